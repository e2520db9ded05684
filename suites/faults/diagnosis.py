"""Diagnosis: which faults of the dictionary, alone or up to three together, would make the bytes that were observed.

The search is given the operands of a case and what came out, and nothing else. Something is said only where all that is
wrong is explained; of several explanations the one that explains every element, with the fewest faults, then the fewest
parameters, then the first in the dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ropecheck.oracle.floats import same

from ..candidates import Candidate, CandidateError
from ..cases import Case, Operands, build
from ..invocation import CandidateFault, forward, vjp
from ..verdicts import FAIL, Verdict
from .dictionary import MISREADINGS, stage
from .fault import Misreading
from .reading import Reading, divided, of_operands

MOST_FAULTS = 3
LARGEST = 1 << 17
"""Elements of a case in which explanations are searched: every one of them is evaluated some hundred times."""

_DIAGNOSED = ("accuracy-forward", "accuracy-vjp", "strict-bytes")
_KEPT = 3
_NO_CHANCE = 32
"""Of so many wrong elements, each a place too high or low, a fault of rounding explains all by chance once in 2^32."""

_TRIED = tuple(sorted(MISREADINGS, key=lambda fault: (fault.direction == "both", len(fault.given))))
"""What is said of gradients alone comes first, then what has nothing to choose: a fitted parameter can imitate it on a
small case."""


@dataclass(frozen=True)
class Cause:
    """One fault with the parameters that explain."""

    fault: Misreading
    parameters: tuple[object, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Faults that together explain ``explained`` of ``elements``, all that are wrong among them."""

    own: str
    causes: tuple[Cause, ...]
    explained: int
    elements: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cause.fault.name for cause in self.causes)

    @property
    def sentence(self) -> str:
        what = "; and ".join(cause.fault.sentence(self.own, *cause.parameters) for cause in self.causes)
        if self.explained == self.elements:
            return f"behaves exactly like: {what}, 100 % of elements"
        # Rounded down: 100 % is said of all elements alone.
        share = int(1000 * self.explained / self.elements) / 10
        return f"behaves like: {what}, {share:g} % of elements and all that are wrong"


_SECONDS = 10.0
"""How long one search may compute: the time of a case is its candidate's, and this is only to say why it failed."""

_SEARCHES = 2
"""How many cases of a candidate, judgement and dtype are searched before nothing is taken to explain it."""


class Diagnoses:
    """Diagnoses of one run: what explained an earlier case of a candidate is tried first, and vain searches end."""

    def __init__(self) -> None:
        self._causes: dict[tuple[str, str], tuple[Cause, ...]] = {}
        self._vain: dict[tuple[str, str, str], int] = {}

    def explained(self, candidate: Candidate, case: Case, verdict: Verdict) -> Verdict:
        """``verdict`` with the facts ``diagnosis`` and ``faults`` where it is a fail that something explains."""
        cell = (candidate.name, case.judgement, case.dtype)
        if verdict.verdict != FAIL:
            return verdict
        known = self._causes.get(cell[:2], ())
        search = self._vain.get(cell, 0) < _SEARCHES
        found = diagnose_case(candidate, case, verdict.seed, known=known, search=search)
        if found is None:
            self._vain[cell] = self._vain.get(cell, 0) + 1
            return verdict
        self._causes[cell[:2]] = found.causes
        return replace(verdict, facts={**verdict.facts, "diagnosis": found.sentence, "faults": list(found.names)})


def diagnose_case(
    candidate: Candidate, case: Case, seed: int, *, known: tuple[Cause, ...] = (), search: bool = True
) -> Diagnosis | None:
    """Of a case that ``candidate`` fails. None where it raises, or where nothing explains what it returns.

    The causes ``known`` are tried first, and others only where these do not explain everything, with ``search``.
    """
    if case.judgement not in _DIAGNOSED or case.device != "cpu" or not _is_plain(case):
        return None
    given = build(case, seed)
    if given.x.view.numel() > LARGEST:
        return None
    backward = case.judgement == "accuracy-vjp" or case.variant == "vjp"
    try:
        if backward:
            got = vjp(candidate, given.x.view, given.call, given.gradient.view)
        else:
            got = forward(candidate, given.x.view, given.call)
    except (CandidateFault, CandidateError):
        return None
    exactly = case.judgement == "strict-bytes"
    of = _Search(of_operands(given, backward=backward), divided(given, got), exactly)
    first = of.by(known) if known else None
    if first is not None and (first.explained == first.elements or not search):
        return first
    return (of.best() or first) if search else None


def _is_plain(case: Case) -> bool:
    return case.variant in ("", "forward", "vjp")


def diagnose(given: Operands, got: Tensor, *, backward: bool = False, exactly: bool = False) -> Diagnosis | None:
    """What explains ``got`` [B, S, H, D], the outputs for ``given`` or (``backward``) the gradient of x.

    An element is explained where an implementation of a fault may return it; ``exactly``, where it is the very value.
    """
    return _Search(of_operands(given, backward=backward), divided(given, got), exactly).best()


@dataclass(frozen=True)
class _Search:
    reading: Reading
    got: tuple[Tensor, ...]
    exactly: bool
    until: float = field(default_factory=lambda: time.process_time() + _SECONDS)

    def by(self, causes: tuple[Cause, ...]) -> Diagnosis | None:
        """What ``causes`` explain, where that is all that is wrong."""
        wrong, may = ~self.may(self.reading), self.may(_misread(self.reading, causes))
        found = Diagnosis(self.reading.own.name, causes, int(may.sum()), may.numel())
        return found if bool(wrong.any()) and _explains(may, wrong) else None

    def best(self) -> Diagnosis | None:
        right = self.may(self.reading)
        wrong = ~right
        if not bool(wrong.any()):
            return None
        found: list[tuple[int, tuple[Cause, ...], Tensor]] = [(int(right.sum()), (), right)]
        partial: Diagnosis | None = None
        for _ in range(MOST_FAULTS if self.told(wrong) else 1):
            grown = []
            for _, causes, _ in found:
                grown += list(self._grown(causes))
                if any(count == right.numel() for count, _, _ in grown):
                    break
            # Stable: of equals the one that the dictionary has first.
            grown.sort(key=lambda entry: -entry[0])
            for count, causes, may in grown:
                if count == right.numel() or (partial is None and _explains(may, wrong)):
                    partial = Diagnosis(self.reading.own.name, causes, count, right.numel())
                    if count == right.numel():
                        return partial
            found = _distinct([entry for entry in grown if entry[0] > found[0][0]])[:_KEPT]
            if not found:
                break
        return partial

    def _grown(self, causes: tuple[Cause, ...]) -> Iterator[tuple[int, tuple[Cause, ...], Tensor]]:
        """``causes`` and one more, with what they explain."""
        known = {cause.fault.name for cause in causes}
        before = _misread(self.reading, causes)
        for fault in _TRIED:
            if fault.name in known or fault.direction == ("forward" if self.reading.backward else "backward"):
                continue
            for parameters in fault.searched(before, self.got):
                if time.process_time() > self.until:
                    return
                more = _in_order((*causes, Cause(fault, parameters)))
                changed = _misread(self.reading, more)
                if all(one is other for one, other in zip(changed.parts, before.parts, strict=True)):
                    continue
                may = self.may(changed)
                yield int(may.sum()), more, may
                if bool(may.all()):
                    return

    def told(self, wrong: Tensor) -> bool:
        """Whether what is wrong is more than NaN: whatever goes astray gives that, and faults that give it compose to
        whatever is to be explained."""
        came = torch.cat([part.flatten() for part in self.got])
        return bool((wrong & ~came.isnan()).any())

    def may(self, reading: Reading) -> Tensor:
        """bool, flat: the elements that ``reading`` explains."""
        if self.exactly:
            made = reading.outputs()
            pairs = zip(made, self.got, strict=True)
            masks: Sequence[Tensor] = [same(y.contiguous(), came.contiguous()) for y, came in pairs]
        else:
            masks = reading.explains(self.got)
        return torch.cat([mask.flatten() for mask in masks])


def _explains(may: Tensor, wrong: Tensor) -> bool:
    """Whether all that is ``wrong`` is among what ``may`` be, and that is no chance."""
    return bool(may[wrong].all()) and (bool(may.all()) or int(wrong.sum()) >= _NO_CHANCE)


def _misread(reading: Reading, causes: tuple[Cause, ...]) -> Reading:
    for cause in causes:
        reading = cause.fault.misread(reading, *cause.parameters)
    return reading


def _in_order(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    """Positions first, then tables, arithmetic, and what comes out of it at last."""
    return tuple(sorted(causes, key=lambda cause: stage(cause.fault)))


def _distinct(
    entries: list[tuple[int, tuple[Cause, ...], Tensor]],
) -> list[tuple[int, tuple[Cause, ...], Tensor]]:
    """The first of those that explain the same elements."""
    kept: list[tuple[int, tuple[Cause, ...], Tensor]] = []
    for entry in entries:
        if len(kept) < _KEPT and not any(torch.equal(entry[2], other[2]) for other in kept):
            kept.append(entry)
    return kept
