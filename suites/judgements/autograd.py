"""autograd: is the gradient right in every way in which autograd asks for it?

Asked of a candidate that claims ``vjp``. accuracy-vjp asks for one backward right after its forward; a model does
otherwise. Two calls are recorded before either is differentiated, as the layers of a model are; one graph is gone
through twice; x is used twice and its gradient added to ``.grad``; a slice of y alone is used; of a pair, one output
alone is used or one input alone wants a gradient, and both outputs are still rotated; a table, weights or x are
written over between a forward and its backward. Each gradient must be admissible, of a ``strict`` candidate the strict
bytes. A graph that was freed, or whose operands were written over, may be refused, but not answered wrongly. Of a
candidate with a ``vjp`` of its own autograd records no graph; if it works in place, a call on tensors that require a
gradient must be refused or differentiated up to rounding. Hooks, checkpointing and several threads are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of, same
from ropecheck.oracle.rotation import Rotation, changed_elements

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of, elsewhere
from ..families import FAMILIES, Expected, shown
from ..invocation import CandidateFault, applied, guarded, parts, pulled_back, recorded
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of

_PLACE = ("sample", "token", "head", "channel")
_SMOKE = (Inputs(batch=2, length=5),)
_STANDARD = (Inputs(length=5), Inputs(batch=2, length=3, heads=5, table="per-sample"))
_FULL = (*_STANDARD, Inputs(length=13, payload="special"), Inputs(batch=2, length=64, heads=8, table="per-sample"))


@dataclass(frozen=True)
class Derivative:
    """A derivative, or an output, ``got`` [B, S, H, D] that must be what is ``expected``. ``what`` names it."""

    what: str
    expected: Expected
    got: Tensor

    def fault(self, strict: bool) -> str:
        """What is wrong with it, in words; empty where nothing is."""
        if strict:
            unlike = changed_elements(self.got, self.expected.strict())
            kind = "are not the strict bytes"
        else:
            held = self.expected.held(self.got, samples=0)
            unlike = held.outside + held.moved
            kind = "are not admissible"
        return f"{self.what}: {unlike} of {self.got.numel()} elements {kind}" if unlike else ""

    def worst(self) -> dict[str, Any]:
        """The element furthest from what is admissible, or the first that is not strict."""
        found = self.expected.held(self.got, samples=0).worst
        if found:
            return {name: found[0][name] for name in (*_PLACE, "admissible", "strict", "got")}
        strict = self.expected.strict()
        index = first_of(~same(self.got.contiguous(), strict))
        place = dict(zip(_PLACE, index, strict=True))
        return {**place, "strict": shown(float(strict[index])), "got": shown(float(self.got[index]))}


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
    incoming = tuple(g.view(y.shape) for y, g in zip(results, gradients, strict=True))
    reached: tuple[Tensor | None, ...] = guarded(
        "the backward of run",
        lambda: torch.autograd.grad(results, inputs, incoming, allow_unused=True, **keywords),
    )
    return reached


_Way = Callable[[Candidate, Operands, Operands], Iterator[Derivative | str]]


def _recorded(candidate: Candidate, given: Operands) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return recorded(candidate, given.x.view, given.call)


def _pulled_back(
    graph: tuple[tuple[Tensor, ...], tuple[Tensor, ...]], operands: Operands, **keywords: bool
) -> tuple[Tensor, ...]:
    """The gradients of a recorded call, with that of ``operands`` coming in."""
    leaves, results = graph
    return pulled_back(results, leaves, _upstream(operands), **keywords)


def _upstream(given: Operands) -> tuple[Tensor, ...]:
    return given.family.upstream(given.gradient.view)


def _interleaved(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    graphs = [_recorded(candidate, operands) for operands in (given, other)]
    gradients = [
        given.family.undivided(_pulled_back(graph, operands))
        for graph, operands in zip(graphs, (given, other), strict=True)
    ]
    for what, operands, gradient in zip(("first", "second"), (given, other), gradients, strict=True):
        yield Derivative(
            f"the gradient of the {what} of two recorded calls", operands.expected(backward=True), gradient
        )


def _again(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    graph, undivided, expected = _recorded(candidate, given), given.family.undivided, given.expected(backward=True)
    first, between, last = (
        undivided(_pulled_back(graph, operands, retain_graph=True)) for operands in (given, other, given)
    )
    yield Derivative("the gradient of a retained graph", expected, first)
    yield Derivative(
        "the second gradient of a retained graph", expected.with_upstream(other.gradient.as_given()), between
    )
    if changed := changed_elements(last, first):
        raise CandidateFault(f"{changed} of {first.numel()} elements change when one graph is gone through again")
    _pulled_back(graph, given)
    try:
        freed = _pulled_back(graph, given)
    except CandidateFault:
        # torch refuses to go through a freed graph; one that keeps no tensor may still answer.
        return
    yield Derivative("the gradient of a freed graph, which was not refused", expected, undivided(freed))


def _accumulated(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    family, expected = given.family, given.expected(backward=True)
    single = [_pulled_back(_recorded(candidate, given), operands) for operands in (given, other)]
    yield Derivative("the gradient", expected, family.undivided(single[0]))
    with_other = expected.with_upstream(other.gradient.as_given())
    yield Derivative("the other gradient", with_other, family.undivided(single[1]))

    upstream = [_upstream(operands) for operands in (given, other)]
    leaves = tuple(part.detach().requires_grad_() for part in parts(candidate, family, given.x.view))
    # Each use by a view of its own: what belongs to one use is summed before the uses are.
    uses = [applied(candidate, tuple(leaf.view_as(leaf) for leaf in leaves), given.call) for _ in upstream]
    again = applied(candidate, leaves, given.call)
    for results, gradients in (((*uses[0], *uses[1]), (*upstream[0], *upstream[1])), (again, upstream[0])):
        incoming = tuple(g.view(y.shape) for y, g in zip(results, gradients, strict=True))
        guarded("the backward of run", partial(torch.autograd.backward, results, incoming))
    for leaf, first, second in zip(leaves, *single, strict=True):
        if leaf.grad is None:
            raise CandidateFault("the backward of run leaves .grad empty")
        if changed := int((~same(leaf.grad.contiguous(), (first + second) + first)).sum()):
            raise CandidateFault(f"{changed} of {leaf.numel()} elements of .grad are not the sum of the gradients")


def _slice(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    leaves, results = _recorded(candidate, given)
    family = given.family
    every_other = (*(slice(None),) * family.token_dimension, slice(None, None, 2))
    used, gradients = tuple(y[every_other] for y in results), tuple(g[every_other] for g in _upstream(given))
    upstream = torch.zeros_like(given.gradient.as_given(), memory_format=torch.contiguous_format)
    upstream[:, ::2] = given.gradient.as_given()[:, ::2]
    got = pulled_back(used, leaves, gradients)
    expected = given.expected(backward=True).with_upstream(upstream)
    yield Derivative("the gradient of every other token", expected, family.undivided(got))


def _one_of_two(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative]:
    family, upstream, whole = given.family, _upstream(given), given.expected(backward=True)

    def rotated(results: tuple[Tensor, ...], where: str) -> Derivative:
        return Derivative(f"the outputs where {where}", given.expected(), family.joined(results).detach())

    yield rotated(_recorded(candidate, given)[1], "both require a gradient")
    for at, name in enumerate(family.activations):
        wanted = whole.part(at)
        leaves, results = _recorded(candidate, given)
        own = family.outputs_of(at)
        own_upstream = tuple(upstream[number] for number in own)
        gradients = where_reached(tuple(results[number] for number in own), leaves, own_upstream)
        used, unused = gradients[at], gradients[1 - at]
        if used is None:
            raise CandidateFault(f"where {name}'s output alone is used, {name} gets no gradient")
        yield Derivative(f"{name}'s gradient where its output alone is used", wanted, family.lifted(used))
        if unused is not None and bool((unused != 0).any()):
            raise CandidateFault(f"where {name}'s output alone is used, the other input's gradient is not zero")
        leaves, results = recorded(candidate, given.x.view, given.call, wanted=(at == 0, at == 1))
        yield rotated(results, f"{name} alone requires a gradient")
        made = tuple(results[number] for number in own)
        (alone,) = pulled_back(made, (leaves[at],), own_upstream, retain_graph=True)
        yield Derivative(f"{name}'s gradient where it alone requires one", wanted, family.lifted(alone))
        reached = [number for number, y in enumerate(results) if y.requires_grad]
        if len(reached) > len(own):
            used_together = tuple(results[number] for number in reached)
            (both,) = pulled_back(used_together, (leaves[at],), tuple(upstream[number] for number in reached))
            what = f"{name}'s gradient where it alone requires one and both are used"
            yield Derivative(what, wanted, family.lifted(both))


def _overwritten(candidate: Candidate, given: Operands, other: Operands) -> Iterator[Derivative | str]:
    tables = {name: placed.view for name, placed in given.tables.items()}
    for name in [n for n, table in tables.items() if table.is_floating_point() or n == "positions"] + ["x"]:
        leaves, results = _recorded(candidate, given)
        written = leaves if name == "x" else (tables[name],)
        before = [t.detach().clone() for t in written]
        with torch.no_grad():
            for t in written:
                # The gradient of a norm is that of x's negative, too.
                t.copy_(-t if t.is_floating_point() and name != "x" else t.flip(-1))
        try:
            got = pulled_back(results, leaves, _upstream(given))
        except CandidateFault as fault:
            yield _refusal(fault)
        else:
            # The oracle's operands are those that were given.
            what = f"the gradient after {name} was written over"
            yield Derivative(what, given.expected(backward=True), given.family.undivided(got))
        with torch.no_grad():
            for t, value in zip(written, before, strict=True):
                t.copy_(value)


def _recorded_in_place(candidate: Candidate, given: Operands) -> Iterator[Derivative | str]:
    """A call that writes into tensors which autograd watches: silence would leave them the gradient of a copy."""
    leaf, family = given.x.view.detach().requires_grad_(), given.family
    with torch.enable_grad():
        copy = leaf.clone()
        written = tuple(_writable(copy, part) for part in parts(candidate, family, copy))
        by_place, by_name = family.keywords(candidate.run).arguments(written, given.call.tables)
        try:
            guarded("run", lambda: candidate.run(*by_place, **by_name))
        except CandidateFault as fault:
            yield _refusal(fault)
            return
    yield Derivative("what is written under autograd", given.expected(), family.undivided(written).detach())
    if not all(part.requires_grad for part in written):
        raise CandidateFault("run, working in place, cuts off the graph of an x that requires a gradient")
    try:
        (got,) = where_reached(written, (leaf,), _upstream(given))
    except CandidateFault as fault:
        yield _refusal(fault)
        return
    if got is None:
        raise CandidateFault("run, working in place, cuts off the graph of an x that requires a gradient")
    what = "the gradient of what was written in place and not refused"
    if outside := _outside_of_rounding(given.vjp(), got):
        raise CandidateFault(f"{what}: {outside} of {got.numel()} elements are further off than rounding can be")
    yield what


def _writable(x: Tensor, part: Tensor) -> Tensor:
    """``part`` of x, as another view where it is one: into those of torch.split autograd lets nobody write."""
    return x.as_strided(part.shape, part.stride(), part.storage_offset()) if part._is_view() else part


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
    "overwritten": _overwritten,
}


def variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    if candidate.vjp is not None:
        # One that works in place has a vjp of its own, too.
        yield _SMOKE[0], "separate"
        return
    ways = ("interleaved", "again", "one-of-two") if plan == "smoke" else tuple(_WAYS)
    for way in ways:
        if way != "one-of-two" or len(FAMILIES[candidate.family].activations) == 2:
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
