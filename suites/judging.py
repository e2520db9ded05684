"""Judging one case: the finding of a judgement, and what becomes of everything that can go wrong on the way."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ropecheck.oracle.certify import CertificationError

from .candidates import DEVICES, DTYPES, Candidate, described
from .cases import Case, cases_of
from .families import FAMILIES
from .interpreter import interpreting
from .invocation import CandidateFault
from .judgements import JUDGEMENTS, Judgement
from .verdicts import Finding, Verdict, failed


@dataclass(frozen=True)
class Selection:
    """Which cells of candidate x judgement are asked. An empty choice stands for all."""

    plan: str = "standard"
    contracts: Sequence[str] = ()
    judgements: Sequence[str] = ()
    devices: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    cases: Sequence[str] = ()


@dataclass(frozen=True)
class Unasked:
    """A cell without a case: its question does not apply, or cannot be asked on this machine."""

    judgement: str
    device: str
    verdict: str
    reason: str

    @property
    def id(self) -> str:
        return f"{self.judgement}/{self.device}/{self.verdict}"


def blocked_on(device: str) -> str:
    """Why ``device`` cannot be used in this process; empty where it can."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return "no CUDA GPU is available"
        if interpreting():
            return "this process interprets Triton kernels (TRITON_INTERPRET=1)"
    return ""


def questions(candidate: Candidate, selection: Selection, *, anywhere: bool = False) -> Iterator[Case | Unasked]:
    """Every case that ``candidate`` is asked, and one :class:`Unasked` for each cell without.

    With ``anywhere``, as on a machine that lacks nothing: no cell is blocked for want of a device or a package.
    """
    if selection.contracts and candidate.contract not in selection.contracts:
        return
    for device in candidate.devices:
        if selection.devices and device not in selection.devices:
            continue
        blocked = "" if anywhere else candidate.unavailable or blocked_on(device)
        for judgement in JUDGEMENTS.values():
            if selection.judgements and judgement.name not in selection.judgements:
                continue
            asked: Iterator[Case | Unasked]
            if judgement.claim is not None and judgement.claim not in candidate.provides:
                reason = f"the candidate does not claim {judgement.claim}"
                asked = iter([Unasked(judgement.name, device, "not-applicable", reason)])
            elif device in judgement.not_on:
                asked = iter([Unasked(judgement.name, device, "not-applicable", judgement.not_on[device])])
            elif candidate.family in judgement.not_of:
                asked = iter([Unasked(judgement.name, device, "not-applicable", judgement.not_of[candidate.family])])
            elif lack := "" if anywhere else blocked or judgement.lacking():
                asked = iter([Unasked(judgement.name, device, "blocked", lack)])
            else:
                asked = (
                    case
                    for dtype in candidate.dtypes
                    if not selection.dtypes or dtype in selection.dtypes
                    for case in _cases(judgement, candidate, device, dtype, selection.plan)
                )
            yield from (q for q in asked if not selection.cases or q.id in selection.cases)


def _cases(judgement: Judgement, candidate: Candidate, device: str, dtype: str, plan: str) -> Iterator[Case]:
    """The cases that a judgement asks of every family, and those that it asks of the candidate's alone."""
    seen = set()
    further = FAMILIES[candidate.family].further(judgement.name, plan, device)
    alone = cases_of(judgement.name, candidate, device, dtype, further)
    for case in chain(judgement.cases(candidate, device, dtype, plan), alone):
        unclaimed = case.variant.startswith("vjp") and "vjp" not in candidate.provides
        if case.id not in seen and not unclaimed:
            seen.add(case.id)
            yield case


def judge(candidate: Candidate, question: Case | Unasked, seed: int) -> Verdict:
    """The verdict on one question. Only a failure of the oracle or of the judge itself is reported as blocked
    with the fact ``judge failed``; whatever the candidate does is the candidate's."""
    if isinstance(question, Unasked):
        finding = Finding(question.verdict, question.reason)  # type: ignore[arg-type]
        return _attached(candidate, question.judgement, question.device, "", question.id, finding, seed)
    started = time.perf_counter()
    if "torch._dynamo" in sys.modules:
        # Every case has sizes of its own: a compiled candidate would meet the recompilation limit of one process.
        torch._dynamo.reset()
    finding = _found(lambda: JUDGEMENTS[question.judgement].judge(candidate, question, seed))
    verdict = _attached(
        candidate, question.judgement, question.device, question.dtype, question.id, finding, seed
    )
    return verdict.timed(time.perf_counter() - started)


_diagnoses: Any = None


def diagnosed(candidate: Candidate, case: Case, verdict: Verdict) -> Verdict:
    """A failing verdict with what the fault dictionary says of it, if anything."""
    global _diagnoses
    # Late: the dictionary's own faults are judged by this module, and a run without a failure has no use for it.
    from .faults.diagnosis import Diagnoses

    _diagnoses = _diagnoses or Diagnoses()
    result: Verdict = _diagnoses.explained(candidate, case, verdict)
    return result


def _found(ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except CandidateFault as fault:
        return failed(str(fault))
    except torch.OutOfMemoryError as error:
        return Finding("blocked", f"out of memory: {' '.join(str(error).split())[:200]}")
    except MemoryError:
        return Finding("blocked", "out of memory")
    except CertificationError as error:
        return Finding("blocked", f"the oracle failed: {error}", {"judge failed": "certification"})
    except Exception as error:
        return Finding("blocked", f"the judge raised {described(error)}", {"judge failed": "exception"})


def _attached(
    candidate: Candidate, judgement: str, device: str, dtype: str, case: str, finding: Finding, seed: int
) -> Verdict:
    return Verdict(
        candidate=candidate.name,
        contract=candidate.contract,
        judgement=judgement,
        device=device,
        dtype=dtype,
        case=case,
        verdict=finding.verdict,
        reason=finding.reason,
        facts=finding.facts,
        worst=finding.worst,
        level=candidate.level,
        seed=seed,
    )


def check_selection(selection: Selection) -> None:
    """Raise ValueError, with one sentence naming the option, for a choice that no question can meet."""
    from ropecheck.oracle.contracts import CONTRACTS

    for option, chosen, known in (
        ("--contract", selection.contracts, tuple(CONTRACTS)),
        ("--judgement", selection.judgements, tuple(JUDGEMENTS)),
        ("--device", selection.devices, DEVICES),
        ("--dtype", selection.dtypes, tuple(DTYPES)),
    ):
        for value in chosen:
            if value not in known:
                raise ValueError(f"{option} must be one of {', '.join(known)}, not {value!r}")
