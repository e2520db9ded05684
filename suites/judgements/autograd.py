"""autograd: is the gradient right in every way in which autograd asks for it?

Asked of a candidate that claims ``vjp``. accuracy-vjp asks for one backward right after its forward; a model does
otherwise. Two calls are recorded before either is differentiated, as the layers of a model are; one graph is gone
through twice; x is used twice and its gradient added to ``.grad``; a slice of y alone is used; of a pair, one output
alone is used or one input alone wants a gradient, and both outputs are still rotated; the tables are written over
between a forward and its backward. Each gradient must be admissible, of a ``strict`` candidate the strict bytes. A
graph that was freed, or whose tables were written over, may be refused, but not answered wrongly. Of a candidate with a
``vjp`` of its own autograd records no graph; if it works in place, a call on tensors that require a gradient must be
refused or differentiated up to rounding. Hooks, checkpointing and several threads are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of, same
from ropecheck.oracle.rotation import Rotation, changed_elements, compare, rotate_strict

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of, elsewhere
from ..invocation import CandidateFault, applied, divided, guarded, joined, parts, pulled_back, recorded
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of, shown

_SMOKE = (Inputs(batch=2, length=5),)
_STANDARD = (Inputs(length=5), Inputs(batch=2, length=3, heads=5, table="per-sample"))
_FULL = (*_STANDARD, Inputs(length=13, payload="special"), Inputs(batch=2, length=64, heads=8, table="per-sample"))


@dataclass(frozen=True)
class Derivative:
    """A derivative, or an output, ``got`` [B, S, H, D] that must be what ``rotation`` admits. ``what`` names it."""

    what: str
    rotation: Rotation
    got: Tensor

    def fault(self, strict: bool) -> str:
        """What is wrong with it, in words; empty where nothing is."""
        if strict:
            unlike = changed_elements(self.got, rotate_strict(self.rotation))
            kind = "are not the strict bytes"
        else:
            comparison = compare(self.rotation, self.got, samples=0)
            unlike = comparison.outside + comparison.tail_changed
            kind = "are not admissible"
        return f"{self.what}: {unlike} of {self.got.numel()} elements {kind}" if unlike else ""

    def worst(self) -> dict[str, Any]:
        """The element furthest from what is admissible, or the first that is not strict."""
        found = compare(self.rotation, self.got, samples=0).worst
        strict = rotate_strict(self.rotation)
        index = found[0].index if found else first_of(~same(self.got.contiguous(), strict))
        place = dict(zip(("sample", "token", "head", "channel"), index, strict=True))
        ends = {"admissible": [shown(found[0].low), shown(found[0].high)]} if found else {}
        return {**place, **ends, "strict": shown(float(strict[index])), "got": shown(float(self.got[index]))}


def verdict_on(candidate: Candidate, derivatives: Iterator[Derivative | str]) -> Finding:
    """Pass where every derivative is right; the first that is not is the reason of the failure.

    A sentence among them tells what else was found right: a refusal of what may be refused.
    """
    judged: list[str] = []
    elements = 0
    for derivative in derivatives:
        if isinstance(derivative, str):
            judged.append(derivative)
            continue
        judged.append(derivative.what)
        elements += derivative.got.numel()
        if reason := derivative.fault("strict" in candidate.provides):
            return failed(reason, derivative.worst(), judged=judged, elements=elements)
    return passed(judged=judged, elements=elements)


def where_reached(
    results: tuple[Tensor, ...], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...], **keywords: bool
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with ``keywords``, None for each of ``inputs`` that no graph reaches."""
    reached: tuple[Tensor | None, ...] = guarded(
        "the backward of run",
        lambda: torch.autograd.grad(results, inputs, gradients, allow_unused=True, **keywords),
    )
    return reached


_Way = Callable[[Candidate, Operands, Operands], Iterator[Derivative | str]]


def _recorded(candidate: Candidate, given: Operands) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return recorded(candidate, given.x.view, given.cos.view, given.sin.view, conjugate=given.case.inputs.conjugate)


def _upstream(candidate: Candidate, given: Operands) -> tuple[Tensor, ...]:
    return divided(candidate, given.gradient.view)


def _interleaved(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    graphs = [_recorded(candidate, operands) for operands in (given, other)]
    gradients = [
        pulled_back(results, leaves, _upstream(candidate, operands))
        for (leaves, results), operands in zip(graphs, (given, other), strict=True)
    ]
    for what, operands, gradient in zip(("first", "second"), (given, other), gradients, strict=True):
        yield Derivative(f"the gradient of the {what} of two recorded calls", operands.vjp(), joined(gradient))


def _again(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    leaves, results = _recorded(candidate, given)
    kept = [
        joined(pulled_back(results, leaves, _upstream(candidate, operands), retain_graph=True))
        for operands in (given, other, given)
    ]
    first, between, last = kept
    yield Derivative("the gradient of a retained graph", given.vjp(), first)
    with_other = replace(given.vjp(), x=other.gradient.as_given())
    yield Derivative("the second gradient of a retained graph", with_other, between)
    if changed := changed_elements(last, first):
        raise CandidateFault(f"{changed} of {first.numel()} elements change when one graph is gone through again")
    pulled_back(results, leaves, _upstream(candidate, given))
    try:
        freed = pulled_back(results, leaves, _upstream(candidate, given))
    except CandidateFault:
        # torch refuses to go through a freed graph; one that keeps no tensor may still answer.
        return
    yield Derivative("the gradient of a freed graph, which was not refused", given.vjp(), joined(freed))


def _accumulated(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    tables, conjugate = (given.cos.view, given.sin.view), given.case.inputs.conjugate
    upstream = [_upstream(candidate, operands) for operands in (given, other)]
    single = []
    for gradient in upstream:
        leaves, results = _recorded(candidate, given)
        single.append(pulled_back(results, leaves, gradient))
    yield Derivative("the gradient", given.vjp(), joined(single[0]))
    yield Derivative("the other gradient", replace(given.vjp(), x=other.gradient.as_given()), joined(single[1]))

    leaves = tuple(part.detach().requires_grad_() for part in parts(candidate, given.x.view))
    # Each use by a view of its own: what belongs to one use is summed before the uses are.
    uses = [applied(candidate, tuple(leaf.view_as(leaf) for leaf in leaves), *tables, conjugate=conjugate)
            for _ in upstream]  # fmt: skip
    both, gradients = (*uses[0], *uses[1]), (*upstream[0], *upstream[1])
    guarded("the backward of run", lambda: torch.autograd.backward(both, gradients))
    again = applied(candidate, leaves, *tables, conjugate=conjugate)
    guarded("the backward of run", lambda: torch.autograd.backward(again, upstream[0]))
    for leaf, first, second in zip(leaves, *single, strict=True):
        if leaf.grad is None:
            raise CandidateFault("the backward of run leaves .grad empty")
        if changed := int((~same(leaf.grad.contiguous(), (first + second) + first)).sum()):
            raise CandidateFault(f"{changed} of {leaf.numel()} elements of .grad are not the sum of the gradients")


def _slice(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    leaves, results = _recorded(candidate, given)
    used = tuple(y[:, ::2] for y in results)
    gradients = tuple(g[:, ::2] for g in _upstream(candidate, given))
    upstream = torch.zeros_like(given.gradient.as_given(), memory_format=torch.contiguous_format)
    upstream[:, ::2] = given.gradient.as_given()[:, ::2]
    got = pulled_back(used, leaves, gradients)
    yield Derivative("the gradient of every other token", replace(given.vjp(), x=upstream), joined(got))


def _one_of_two(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    upstream, rotation = _upstream(candidate, given), given.vjp()
    operands = (given.x.view, given.cos.view, given.sin.view)

    def rotated(results: tuple[Tensor, ...], where: str) -> Iterator[Derivative]:
        forward = given.rotation()
        for of, x, y in zip(("q", "k"), divided(candidate, forward.x), results, strict=True):
            yield Derivative(f"{of}'s output where {where}", replace(forward, x=x), y.detach())

    yield from rotated(_recorded(candidate, given)[1], "both require a gradient")
    for at, name in enumerate(("q", "k")):
        wanted = replace(rotation, x=divided(candidate, rotation.x)[at])
        leaves, results = _recorded(candidate, given)
        gradients = where_reached((results[at],), leaves, (upstream[at],))
        used, unused = gradients[at], gradients[1 - at]
        if used is None:
            raise CandidateFault(f"where {name}'s output alone is used, {name} gets no gradient")
        yield Derivative(f"{name}'s gradient where its output alone is used", wanted, used)
        if unused is not None and bool((unused != 0).any()):
            raise CandidateFault(f"where {name}'s output alone is used, the other input's gradient is not zero")
        leaves, results = recorded(candidate, *operands, wanted=(name == "q", name == "k"))
        yield from rotated(results, f"{name} alone requires a gradient")
        alone = pulled_back((results[at],), (leaves[at],), (upstream[at],), retain_graph=True)
        yield Derivative(f"{name}'s gradient where it alone requires one", wanted, alone[0])
        if results[1 - at].requires_grad:
            both = pulled_back(results, (leaves[at],), upstream)
            yield Derivative(f"{name}'s gradient where it alone requires one and both are used", wanted, both[0])


def _table_overwritten(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative | str]:
    leaves, results = _recorded(candidate, given)
    given.cos.view.copy_(other.cos.view)
    given.sin.view.copy_(other.sin.view)
    try:
        got = pulled_back(results, leaves, _upstream(candidate, given))
    except CandidateFault as fault:
        yield _refusal(fault)
        return
    # The oracle's tables are those that were given.
    yield Derivative("the gradient after the tables were written over", given.vjp(), joined(got))


def _recorded_in_place(candidate: Candidate, given: Operands) -> Iterator[Derivative | str]:
    """A call that writes into tensors which autograd watches: silence would leave them the gradient of a copy."""
    leaf = given.x.view.detach().requires_grad_()
    with torch.enable_grad():
        written = parts(candidate, leaf.clone())
        try:
            guarded("run", lambda: candidate.run(*written, given.cos.view, given.sin.view))
        except CandidateFault as fault:
            yield _refusal(fault)
            return
    yield Derivative("what is written under autograd", given.rotation(), joined(written).detach())
    if not all(part.requires_grad for part in written):
        raise CandidateFault("run, working in place, cuts off the graph of an x that requires a gradient")
    try:
        (got,) = where_reached(written, (leaf,), _upstream(candidate, given))
    except CandidateFault as fault:
        yield _refusal(fault)
        return
    if got is None:
        raise CandidateFault("run, working in place, cuts off the graph of an x that requires a gradient")
    what = "the gradient of what was written in place and not refused"
    if outside := _outside_of_rounding(given.vjp(), got):
        raise CandidateFault(f"{what}: {outside} of {got.numel()} elements are further off than rounding can be")
    yield what


def _outside_of_rounding(rotation: Rotation, got: Tensor) -> int:
    """How many elements of ``got`` are no gradient, whatever order autograd has summed and rounded it in.

    Each of two products passes at most four roundings: itself, a conversion, the addition, another conversion; in the
    coarsest dtype, the activation's, each at most u of it and half a least subnormal. The candidate's vjp is another
    function, and this one is not held against its recipe.
    """
    turned, form = 2 * rotation.cos.shape[-1], format_of(got.dtype)
    cos, sin = (table.double().unsqueeze(-2) for table in (rotation.cos, rotation.sin))
    g0, g1 = rotation.pairing.split(rotation.x[..., :turned].double())
    halves = rotation.pairing.split(got[..., :turned].double())
    roundings = 4 * 2.0**-form.precision
    growth, underflow = roundings / (1 - roundings), 4 * 2.0 ** (form.least_exponent - form.precision)
    outside = int((~same(got[..., turned:].contiguous(), rotation.x[..., turned:].contiguous())).sum())
    for half, first, second in zip(halves, (g0 * cos, g1 * cos), (g1 * sin, -g0 * sin), strict=True):
        bound = growth * (first.abs() + second.abs()) + underflow * (1 + growth)
        outside += int((~((half - (first + second)).abs() <= bound)).sum())
    return outside


def _refusal(fault: CandidateFault) -> str:
    """What was refused. Raises ``fault`` where it is another one than an error that was raised."""
    if fault.__cause__ is None:
        raise fault
    return f"refused: {fault}"


_WAYS: dict[str, _Way] = {
    "interleaved": _interleaved,
    "again": _again,
    "accumulated": _accumulated,
    "slice": _slice,
    "one-of-two": _one_of_two,
    "table-overwritten": _table_overwritten,
}


def variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    if candidate.vjp is not None:
        # One that works in place has a vjp of its own, too.
        yield _SMOKE[0], "separate"
        return
    ways = ("interleaved", "again", "one-of-two") if plan == "smoke" else tuple(_WAYS)
    for way in ways:
        if way != "one-of-two" or candidate.family == "rotate_pair":
            for given in {"smoke": _SMOKE, "standard": _STANDARD, "full": _FULL}[plan]:
                yield given, way


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    if candidate.in_place:
        return verdict_on(candidate, _recorded_in_place(candidate, build(case, seed)))
    if candidate.vjp is not None:
        return Finding("not-applicable", SEPARATE)
    # The other's table is another one, too: where a call keeps something of an earlier one, it shows.
    return verdict_on(candidate, _WAYS[case.variant](candidate, build(case, seed), build(elsewhere(case), seed + 1)))


SEPARATE = "the candidate's vjp is a function of its own: autograd records no graph"

AUTOGRAD = Judgement(
    "autograd",
    "vjp",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("autograd", candidate, device, dtype, variants(candidate, plan)),
    judge,
)
