"""What is at hand: the candidates, their sources and cases, and the judging code that evidence is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropecheck.suites.judging import Selection

from .policy import REQUIRABLE
from .sources import candidate_sources, judging_hash, sensitivity_hash
from .verify import Run, expected

Question = tuple[str, str, str]
"""Judgement, device, dtype."""

Asked = Mapping[Question, tuple[int, str]]
"""How many cases of a candidate a plan has for each question, and the hash over their sorted ids."""


@dataclass(frozen=True)
class KnownCandidate:
    """A candidate as it is now: ``sources`` is the hash over its sources, ``files`` that of each; ``asked`` maps each
    plan that was looked up to its cases."""

    name: str
    contract: str
    provides: tuple[str, ...]
    sources: str
    files: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Asked] = field(default_factory=dict)


@dataclass(frozen=True)
class AtHand:
    """The candidates by name; ``judging`` maps judgement and contract to the hash of what judges them, ``sensitivity``
    is the hash of what is measured by ``ropecheck sensitivity``."""

    candidates: Mapping[str, KnownCandidate]
    judging: Mapping[str, Mapping[str, str]]
    sensitivity: str = ""


def looked_up(specifications: Sequence[str], plans: Iterable[str]) -> AtHand:
    """The candidates of ``specifications`` with the cases that each of ``plans`` has for them, on any machine.

    They are imported, in a process of their own. Raises :class:`~ropecheck.ci.verify.UsageError` where they cannot be.
    """
    found: dict[str, KnownCandidate] = {}
    for plan in plans:
        for entry in expected(Run(tuple(specifications), Selection(plan))):
            earlier = found[entry["name"]].asked if entry["name"] in found else {}
            found[entry["name"]] = _known(entry, {**earlier, plan: _asked(entry["asked"])})
    contracts = {candidate.contract for candidate in found.values()}
    judging = {j: {c: judging_hash(j, c) for c in sorted(contracts)} for j in REQUIRABLE}
    return AtHand(found, judging, sensitivity_hash())


def of_a_run(run: Run, document: Mapping[str, Any]) -> AtHand:
    """What a run itself had before it: its own judging code, and of the cases those that it chose."""
    plan = run.selection.plan
    candidates = {c["name"]: _known(c, {plan: _asked(c["asked"])}) for c in expected(run)}
    return AtHand(candidates, document["judging"])


def _known(entry: Mapping[str, Any], asked: Mapping[str, Asked]) -> KnownCandidate:
    sources = candidate_sources(entry)
    return KnownCandidate(
        entry["name"], entry["contract"], tuple(entry["provides"]), sources["sha256"], sources["files"], asked
    )


def _asked(rows: Sequence[Mapping[str, Any]]) -> Asked:
    return {(row["judgement"], row["device"], row["dtype"]): (row["count"], row["cases"]) for row in rows}
