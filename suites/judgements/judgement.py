"""What a judgement is: a question, the cases it is asked on, and how an answer is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ropecheck.oracle.certify import certify
from ropecheck.oracle.recipes import Recipe
from ropecheck.oracle.rotation import Comparison, Point

from ..candidates import Candidate
from ..cases import Case, Operands
from ..invocation import heads_of_q
from ..verdicts import Finding, failed, passed


@dataclass(frozen=True)
class Judgement:
    """One question with one verdict per case.

    ``claim`` is what a candidate must claim for the question to be asked, None where it always is. ``asks`` says
    in a paragraph what it asks and what it cannot see. ``cases`` yields the cases of a plan ('smoke', 'standard' or
    'full') for a candidate, device and dtype; ``judge`` answers one of them. ``not_on`` holds the devices on which
    the question makes no sense, each with the reason; ``lacking`` says what this machine lacks to ask it on the
    others, nothing where it lacks nothing.
    """

    name: str
    claim: str | None
    asks: str
    cases: Callable[[Candidate, str, str, str], Iterable[Case]]
    judge: Callable[[Candidate, Case, int], Finding]
    not_on: Mapping[str, str] = field(default_factory=dict)
    lacking: Callable[[], str] = lambda: ""


def element(operands: Operands, point: Point) -> dict[str, Any]:
    """The worst element as a person needs it: which token, head and lane, what was admissible, what came."""
    sample, token, head, channel = point.index
    where = operands.positions[token] if operands.positions.dim() == 2 else operands.positions[sample, token]
    return {
        **_tensor_of(operands, head),
        "sample": sample,
        "token": token,
        "head": head,
        "channel": channel,
        "lane": point.lane,
        "position": where.tolist(),
        "member": "first" if point.output == "y0" else "second",
        "inputs": {"x0": shown(point.x0), "x1": shown(point.x1), "cos": shown(point.c), "sin": shown(point.s)},
        "admissible": [shown(point.low), shown(point.high)],
        "strict": shown(point.strict),
        "got": shown(point.got),
        "outside_by_ulp": point.outside_by,
    }


def _tensor_of(operands: Operands, head: int) -> dict[str, str]:
    """Of a pair, whether the head is one of q's, which come first, or of k's."""
    if operands.case.family != "rotate_pair":
        return {}
    return {"tensor": "q" if head < heads_of_q(operands.x.view.shape[2]) else "k"}


def shown(value: float) -> str:
    """A float's shortest decimal and its exact hexadecimal form."""
    return f"{value:.9g} ({value.hex()})" if value == value and abs(value) != float("inf") else str(value)


def verdict_of(comparison: Comparison, operands: Operands, recipe: Recipe) -> Finding:
    """Certify the sample, then the finding of an accuracy judgement."""
    dtype = operands.case.torch_dtype
    certificate = certify(recipe, [*comparison.sample, *comparison.worst], dtype)
    facts = {
        "elements": comparison.elements,
        "outside": comparison.outside,
        "with several admissible values": comparison.several,
        "tail elements changed": comparison.tail_changed,
        "fingerprint": list(comparison.fingerprint),
        "certified points": certificate.points,
        "certified by": certificate.arithmetic,
    }
    if comparison.passed:
        return passed(**facts)
    worst = element(operands, comparison.worst[0]) if comparison.worst else None
    parts = []
    if comparison.outside:
        share = 100 * comparison.outside / comparison.elements
        parts.append(f"{comparison.outside} of {comparison.elements} elements ({share:.3g} %) are not admissible")
    if comparison.tail_changed:
        parts.append(f"{comparison.tail_changed} pass-through elements changed")
    facts["worst elements"] = [element(operands, point) for point in comparison.worst]
    return failed("; ".join(parts), worst, **facts)


def first_of(differs: Tensor) -> tuple[int, ...]:
    """Index of the first element that is true."""
    return tuple(int(i) for i in differs.nonzero()[0])
