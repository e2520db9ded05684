"""What a judgement is: a question, the cases it is asked on, and how an answer is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..candidates import Candidate
from ..cases import Case
from ..families import Held
from ..verdicts import Finding, failed, passed


@dataclass(frozen=True)
class Judgement:
    """One question with one verdict per case.

    ``claim`` is what a candidate must claim for the question to be asked, None where it always is. ``asks`` says
    in a paragraph what it asks and what it cannot see. ``cases`` yields the cases of a plan ('smoke', 'standard' or
    'full') for a candidate, device and dtype; ``judge`` answers one of them. ``not_on`` holds the devices on which
    the question makes no sense, each with the reason, ``not_of`` the families; ``lacking`` says what this machine
    lacks to ask it on the others, nothing where it lacks nothing.
    """

    name: str
    claim: str | None
    asks: str
    cases: Callable[[Candidate, str, str, str], Iterable[Case]]
    judge: Callable[[Candidate, Case, int], Finding]
    not_on: Mapping[str, str] = field(default_factory=dict)
    not_of: Mapping[str, str] = field(default_factory=dict)
    lacking: Callable[[], str] = lambda: ""


def finding_of(held: Held) -> Finding:
    """The finding of an accuracy judgement."""
    if not held.reason:
        return passed(**held.facts)
    worst = held.worst[0] if held.worst else None
    return failed(held.reason, worst, **held.facts, **{"worst elements": list(held.worst)})


def first_of(differs: Tensor) -> tuple[int, ...]:
    """Index of the first element that is true."""
    return tuple(int(i) for i in differs.nonzero()[0])
