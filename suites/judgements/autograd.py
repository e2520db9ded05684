"""autograd: is the gradient right in every way in which autograd asks for it?

Asked of a candidate that claims ``vjp`` and is differentiated by autograd. accuracy-vjp asks for one backward right
after its forward; a model does otherwise. Two calls are recorded before either is differentiated, as the layers of a
model are; one graph is gone through twice; x is used twice and its gradient added to ``.grad``; a slice of y alone is
used; of a pair, one output alone is used or one input alone wants a gradient. Each gradient must be admissible, of a
``strict`` candidate the strict bytes. A graph that was freed may be refused, but not answered wrongly. Hooks,
checkpointing and several threads are not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import same
from ropecheck.oracle.rotation import changed_elements

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
    """A derivative ``got`` [B, S, H, D] that must be what is ``expected``. ``what`` names it."""

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


def verdict_on(candidate: Candidate, derivatives: Iterator[Derivative]) -> Finding:
    """Pass where every derivative is right; the first that is not is the reason of the failure."""
    judged: list[str] = []
    elements = 0
    for derivative in derivatives:
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


_Way = Callable[[Candidate, Operands, Operands], Iterator[Derivative]]


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
    both, gradients = (*uses[0], *uses[1]), (*upstream[0], *upstream[1])
    guarded("the backward of run", lambda: torch.autograd.backward(both, gradients))
    again = applied(candidate, leaves, given.call)
    guarded("the backward of run", lambda: torch.autograd.backward(again, upstream[0]))
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
        made = tuple(results[number] for number in own)
        (alone,) = pulled_back(made, (leaves[at],), own_upstream, retain_graph=True)
        yield Derivative(f"{name}'s gradient where it alone requires one", wanted, family.lifted(alone))
        reached = [number for number, y in enumerate(results) if y.requires_grad]
        if len(reached) > len(own):
            used_together = tuple(results[number] for number in reached)
            (both,) = pulled_back(used_together, (leaves[at],), tuple(upstream[number] for number in reached))
            what = f"{name}'s gradient where it alone requires one and both are used"
            yield Derivative(what, wanted, family.lifted(both))


_WAYS: dict[str, _Way] = {
    "interleaved": _interleaved,
    "again": _again,
    "accumulated": _accumulated,
    "slice": _slice,
    "one-of-two": _one_of_two,
}


def variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    if candidate.vjp is not None:
        yield _SMOKE[0], "separate"
        return
    ways = ("interleaved", "again", "one-of-two") if plan == "smoke" else tuple(_WAYS)
    for way in ways:
        if way != "one-of-two" or len(FAMILIES[candidate.family].activations) == 2:
            for given in {"smoke": _SMOKE, "standard": _STANDARD, "full": _FULL}[plan]:
                yield given, way


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
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
