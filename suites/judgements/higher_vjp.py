"""higher-vjp: are the derivatives of the second and third order right?

Asked of a candidate that claims ``higher-vjp`` and is differentiated by autograd. A rotation y = R x is linear: the
first derivative takes g to R^T g, whose own takes v to R v, and that one's w to R^T w again. Nothing of x is left in
them: autograd must give x no gradient from the second order on, or one of exact zeros.

Each is judged by the contract's own recipe, R v by the forward's and R^T w by the backward's. For a candidate made of
torch operations that is no choice: to differentiate a linear program is to run it in reverse, with sums where values
were used twice and the reverse of each conversion in its place, and to do so twice gives back the program. A kernel
that registers its backward as a rotation by the conjugate says the same. Of a ``strict`` candidate the bytes count.
Special values, zeros of either sign among them, are asked only where the contract's backward adds nothing onto zeros
and the candidate is ``strict``: the zeros that autograd adds between torch operations clear a sign before a product.
Batched gradients (``is_grads_batched``) are not asked for, nor is forward-mode differentiation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of, elsewhere
from ..families import Expected
from ..invocation import CandidateFault, recorded
from ..verdicts import Finding
from .autograd import SEPARATE, Derivative, verdict_on, where_reached
from .judgement import Judgement

_SMOKE = (Inputs(batch=2, length=5),)
_STANDARD = (
    Inputs(length=5),
    Inputs(batch=2, length=3, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(length=5, payload="magnitudes"),
    # Autograd's own layout: no claim is needed.
    Inputs(batch=2, length=3, gradient_view="all-stride-0"),
    Inputs(length=5, gradient_view="heads-first"),
    Inputs(length=5, x_view="packed-qkv", table_view="sliced-rows"),
    Inputs(length=5, table="per-sample", conjugate=True),
    Inputs(length=5, head_dim=80, rotary_dim=48),
    Inputs(batch=0),
)
_FULL = (*_STANDARD, Inputs(batch=2, length=64, heads=8, payload="magnitudes"), Inputs(length=64, conjugate=True))


@dataclass(frozen=True)
class _Graph:
    """One recorded call and its derivatives so far. ``upstream`` are g, v and w, each as it comes in."""

    given: Operands
    upstream: tuple[Tensor, Tensor, Tensor]
    leaves: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @classmethod
    def of(cls, candidate: Candidate, given: Operands, other: Operands) -> _Graph:
        leaves, results = recorded(candidate, given.x.view, given.call)
        return cls(given, (given.gradient.view, other.x.view, other.gradient.view), leaves, results)

    def expected(self, order: int) -> Expected:
        """The oracle's side of the derivative of ``order`` 1, 2 or 3."""
        return self.given.expected(backward=order != 2).with_upstream(self.upstream[order - 1])


def _derivatives(candidate: Candidate, graphs: tuple[_Graph, ...]) -> Iterator[Derivative]:
    """Every order of all graphs, each order of all before the next."""
    results, wanted = [g.results for g in graphs], [g.leaves for g in graphs]
    for order, name in enumerate(("first", "second", "third"), 1):
        upstream = [
            tuple(part.detach().requires_grad_() for part in g.given.family.upstream(g.upstream[order - 1]))
            for g in graphs
        ]
        if order > 1:
            for graph, outputs, gradients in zip(graphs, results, upstream, strict=True):
                _check_nothing_of_x(name, graph.leaves, outputs, gradients)
        got = [
            _connected(name, where_reached(outputs, inputs, gradients, create_graph=True), last=order == 3)
            for outputs, inputs, gradients in zip(results, wanted, upstream, strict=True)
        ]
        for number, (graph, gradients) in enumerate(zip(graphs, got, strict=True), 1):
            what = f"the derivative of the {name} order" + (f" of recorded call {number}" if len(graphs) > 1 else "")
            yield Derivative(what, graph.expected(order), graph.given.family.undivided(gradients).detach())
        results, wanted = got, upstream


def _connected(name: str, derivatives: tuple[Tensor | None, ...], *, last: bool) -> tuple[Tensor, ...]:
    """The derivatives of an order, each of which must exist and, but for the ``last`` order, have a graph."""
    connected = tuple(d for d in derivatives if d is not None)
    if len(connected) < len(derivatives):
        raise CandidateFault(f"there is no derivative of the {name} order: the one before it is detached")
    if not last and not all(d.requires_grad for d in connected):
        raise CandidateFault(f"the derivative of the {name} order is detached from the gradient that came in")
    return connected


def _check_nothing_of_x(
    name: str, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> None:
    for of_x in where_reached(outputs, leaves, gradients, retain_graph=True):
        if of_x is not None and bool((of_x != 0).any()):
            raise CandidateFault(
                f"the {name} order gives x a gradient that is not zero, though the gradient does not depend on x"
            )


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    if candidate.vjp is not None:
        yield _SMOKE[0], "separate"
        return
    for given in {"smoke": _SMOKE, "standard": _STANDARD, "full": _FULL}[plan]:
        yield given, "orders"
    onto_zeros = any(s.right == "zero" and s.customary for s in contract(candidate.contract).backward.steps)
    if "strict" in candidate.provides and not onto_zeros:
        yield Inputs(length=5, payload="special"), "orders"
    for given in _SMOKE if plan == "smoke" else _STANDARD[:2]:
        yield given, "interleaved"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    if candidate.vjp is not None:
        return Finding("not-applicable", SEPARATE)
    given, other = build(case, seed), build(case, seed + 1)
    graphs = [_Graph.of(candidate, given, other)]
    if case.variant == "interleaved":
        graphs.append(_Graph.of(candidate, build(elsewhere(case), seed + 1), given))
    return verdict_on(candidate, _derivatives(candidate, tuple(graphs)))


HIGHER_VJP = Judgement(
    "higher-vjp",
    "higher-vjp",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "higher-vjp", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
