"""Asking judgements about many faults at once, on a CPU, in processes that interpret Triton's kernels.

Cases are the outer loop and faults the inner one, so that operands are made, and an output is held against
the oracle, once for all faults of one contract, family and dtype. A judgement is asked no further about a fault that it
has failed. What candidates, compilers and profilers print is not shown.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..candidates import Candidate
from ..cases import Case
from ..judging import Selection, judge, questions
from ..remembered import remembering
from ..verdicts import BLOCKED, FAIL
from .dictionary import FAULTS
from .pure import pure
from .sighting import Sighting, sighting

Group = tuple[str, str, str]
"""Contract, family and dtype."""


class SensitivityError(RuntimeError):
    """The judge itself failed on a fault, or a proof of equivalence did. The message is one sentence."""


@dataclass(frozen=True)
class Task:
    """One judgement and the faults of one group."""

    judgement: str
    group: Group
    faults: tuple[str, ...]


@dataclass
class Answer:
    """Of faults by name: what ``judgement`` saw, and why it could not be asked. ``asked``: it had a case for one."""

    judgement: str
    asked: bool = False
    seen: dict[str, Sighting] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)


def carry_out(task: Task, plan: str, seed: int) -> Answer:
    """What the judgement of ``task`` sees, on a CPU. Raises :class:`SensitivityError`."""
    selection = Selection(plan, judgements=(task.judgement,), devices=("cpu",))
    candidates = {name: _candidate(name) for name in task.faults}
    answer, passed = Answer(task.judgement), {name: list[Case]() for name in task.faults}
    asked: dict[str, tuple[Case, list[str]]] = {}
    for name, candidate in candidates.items():
        for question in questions(candidate, selection):
            if isinstance(question, Case):
                asked.setdefault(question.id, (question, []))[1].append(name)
            elif question.verdict == BLOCKED:
                answer.blocked[name] = question.reason
    for case, names in asked.values():
        answer.asked = True
        with remembering():
            for name in names:
                if name not in answer.seen:
                    _ask(answer, candidates[name], name, case, passed[name], seed)
    return answer


def _candidate(name: str) -> Candidate:
    fault = FAULTS[name]
    return pure(fault.candidate()) if fault.kind == "semantic" else fault.candidate()


def _ask(answer: Answer, candidate: Candidate, name: str, case: Case, passed: list[Case], seed: int) -> None:
    verdict = judge(candidate, case, seed)
    if "judge failed" in verdict.facts:
        raise SensitivityError(f"{case.id} of fault {name}: {verdict.reason}")
    if verdict.verdict == FAIL:
        answer.seen[name] = sighting(case, passed)
    elif verdict.verdict == BLOCKED:
        answer.blocked[name] = verdict.reason
    else:
        passed.append(case)


def carried_out(tasks: Sequence[Task], plan: str, workers: int, seed: int) -> Iterator[Answer]:
    """The answers to ``tasks``, as they come, from so many processes; with 0 from this one.

    The processes interpret Triton's kernels. This one may not: a fault that needs it is then blocked.
    """
    if not workers:
        yield from (carry_out(task, plan, seed) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with unheard() as said, ProcessPoolExecutor(
        workers, mp_context=context, initializer=_prepare, initargs=(said,)
    ) as pool:  # fmt: skip
        running = [pool.submit(carry_out, task, plan, seed) for task in tasks]
        try:
            for done in as_completed(running):
                yield done.result()
        except BrokenProcessPool:
            raise SensitivityError(f"a process that judges ended: {last_words(said)}") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(said: Path) -> None:
    # Before triton is imported, which no module of this package does as it is loaded.
    os.environ["TRITON_INTERPRET"] = "1"
    hush(said)
    torch.set_num_threads(1)


@contextmanager
def unheard() -> Iterator[Path]:
    """A folder for what processes print, which is kept as long as somebody may want to read its last line."""
    with tempfile.TemporaryDirectory(prefix="ropecheck-") as folder:
        yield Path(folder)


def hush(said: Path) -> None:
    """From now on, what this process writes to its standard output and error goes into a file of its own."""
    to = os.open(said / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(to, stream)
    os.close(to)


def last_words(said: Path) -> str:
    """The last line that any process wrote."""
    files = sorted(said.iterdir(), key=lambda path: path.stat().st_mtime)
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
