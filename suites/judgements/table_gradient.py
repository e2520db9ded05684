"""table-gradient: where a table requires a gradient, is it computed right, or refused?

Asked of a candidate that claims ``vjp`` and is differentiated by autograd; cos, sin or both require a gradient, with
and without x. The call, or its backward, may refuse with an error that speaks of the table or of a gradient.
Otherwise y must be admissible (of a ``strict`` candidate the strict bytes), and the gradient is held against the exact
sum over all heads, and over all samples that share a table: None, zeros, a sample or a tensor left out, and a table
that was quietly detached fail. That torch finds the backward's gradients to be invalid is no refusal.

The bound is derived, not chosen. dL/dc = sum of g0 x0 + g1 x1 and dL/ds = sum of g1 x0 - g0 x1 have n = 2 B H terms
for a shared table, 2 H otherwise. Each term is a product, rounded once, and passes at most n - 1 additions, in
whatever order, and one conversion to the table's dtype; so, with u the unit roundoff of the coarsest dtype that the
contract's backward computes in, the error is at most gamma_(n + 1) times the sum of the terms' magnitudes,
gamma_k = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002: lemma 3.1,
and 4.2 for sums in any order), and half a least subnormal for each product and the conversion. A smaller fault cannot
be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of
from ropecheck.oracle.recipes import Recipe

from ..cache_packing import rows_read
from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..families import FAMILIES, Call, shown
from ..invocation import CandidateFault, applied, parts
from ..verdicts import Finding, failed, passed
from .autograd import SEPARATE, Derivative, where_reached
from .judgement import Judgement, first_of

_REFUSAL = re.compile(
    r"\b(cos|cosine|sin|sine|(cos_sin_)?cache|tables?|gradients?|grad|requires_grad|derivatives?|differentia(ble|te|tion))\b",
    re.I,
)
# Torch's own words for a backward that returns gradients of another shape or number: that is a crash.
_INVALID = re.compile(r"\breturned an (invalid gradient|incorrect number of gradients)\b")
_REFUSES_BY = (TypeError, ValueError, RuntimeError, NotImplementedError)
_SMOKE = (Inputs(batch=2, length=5),)
_STANDARD = (Inputs(batch=2, length=5), Inputs(batch=2, length=5, table="per-sample"))
_VIEWS = (
    Inputs(batch=2, length=5, x_view="packed-qkv", gradient_view="heads-first"),
    Inputs(batch=2, length=5, gradient_view="heads-first"),
    Inputs(batch=2, length=5, gradient_view="all-stride-0"),
)
_ALONE = "-without-x"


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    if candidate.vjp is not None:
        yield _SMOKE[0], "separate"
        return
    if plan == "smoke":
        yield _SMOKE[0], "both"
        yield _SMOKE[0], "both" + _ALONE
        return
    names = FAMILIES[candidate.family].differentiable_tables
    for given in _STANDARD:
        for wanted in (*names, "both") if len(names) > 1 else ("both",):
            yield given, wanted
            yield given, wanted + _ALONE
    for given in _VIEWS:
        yield given, "both"
    if plan == "full":
        yield Inputs(batch=3, length=33, heads=8), "both"
    yield Inputs(batch=2, length=5, conjugate=True), "both"
    yield Inputs(batch=2, length=5, head_dim=80, rotary_dim=48), "both"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    if candidate.vjp is not None:
        return Finding("not-applicable", SEPARATE)
    given = build(case, seed)
    wanted, possible = case.variant.removesuffix(_ALONE), given.family.differentiable_tables
    tables = {
        name: placed.view.detach().requires_grad_(name in possible and wanted in (name, "both"))
        for name, placed in given.tables.items()
    }
    try:
        output, gradients = _gradients(candidate, given, tables, of_x=not case.variant.endswith(_ALONE))
    except CandidateFault as fault:
        error = fault.__cause__
        if not isinstance(error, _REFUSES_BY):
            return failed(str(fault))
        if _INVALID.search(str(error)):
            return failed(str(fault))
        if not _REFUSAL.search(str(error)):
            return failed(f"refused without speaking of the table or of a gradient: {fault}")
        return passed(refused=str(fault))
    if reason := output.fault("strict" in candidate.provides):
        return failed(reason, output.worst())
    if gradients is None:
        return failed("the output has no graph: the table's gradient is silently dropped")
    return _compared(given, gradients)


def _gradients(
    candidate: Candidate, given: Operands, tables: dict[str, Tensor], *, of_x: bool
) -> tuple[Derivative, dict[str, Tensor | None] | None]:
    """(y, what autograd gives for each table that requires a gradient); None where the outputs have no graph."""
    leaves = tuple(part.detach().requires_grad_(of_x) for part in parts(candidate, given.family, given.x.view))
    results = applied(candidate, leaves, Call(given.family, tuple(tables.values())))
    y = given.family.joined(results).detach().clone()
    output = Derivative("y where a table requires a gradient", given.expected(), y)
    asked = {name: table for name, table in tables.items() if table.requires_grad}
    upstream = given.family.upstream(given.gradient.view)
    # An output that no table reaches, a gate, has none; one that lost its graph is missing from the sum.
    reached = [(y, g) for y, g in zip(results, upstream, strict=True) if y.requires_grad]
    if not reached:
        return output, None
    ys, incoming = zip(*reached, strict=True)
    return output, dict(zip(asked, where_reached(ys, tuple(asked.values()), incoming), strict=True))


def _compared(given: Operands, gradients: dict[str, Tensor | None]) -> Finding:
    facts: dict[str, Any] = {}
    reached = {name: got for name, got in gradients.items() if got is not None}
    for name in gradients:
        if name not in reached:
            return failed(f"{name} requires a gradient and gets None", **facts)
    read, beyond = given.family.gradients_read(tuple(p.view for p in given.tables.values()), reached)
    if beyond:
        return failed(f"{beyond} elements of the gradient of what no token reads are not zero", **facts)
    for name, got in read.items():
        exact, bound = _exact(given, name)
        error = (got.double() - exact).abs()
        outside = ~(error <= bound)
        facts[f"{name}: elements"] = got.numel()
        facts[f"{name}: outside the bound"] = int(outside.sum())
        if outside.any():
            index = first_of(outside)
            worst = {"table": name, "index": list(index), "got": shown(float(got[index])),
                     "exact": shown(float(exact[index])), "bound": shown(float(bound[index]))}  # fmt: skip
            zero = ", which is zero everywhere" if not got.any() else ""
            reason = f"{int(outside.sum())} of {got.numel()} elements of {name}'s gradient{zero}"
            return failed(f"{reason} are further from the exact sum than its derived bound", worst, **facts)
        facts[f"{name}: largest share of the bound"] = float(f"{float((error / bound).max()):.3g}")
    return passed(**facts)


def _exact(given: Operands, name: str) -> tuple[Tensor, Tensor]:
    """The gradient of a table in fp64, and how far from it a right one can be."""
    case = given.case
    lanes = given.cos.view.shape[-1]
    turned = given.family.turned(given)
    (x0, x1), (off0, off1) = (
        (half.double() for half in case.contract.pairing.split(part[..., : 2 * lanes])) for part in turned
    )
    g0, g1 = (half.double() for half in case.contract.pairing.split(given.gradient.as_given()[..., : 2 * lanes]))
    if name == "cos":
        first, second, off = g0 * x0, g1 * x1, (g0 * off0).abs() + (g1 * off1).abs()
    else:
        sign = -1.0 if case.inputs.conjugate else 1.0
        first, second, off = sign * g1 * x0, -sign * g0 * x1, (g1 * off0).abs() + (g0 * off1).abs()
    # The products of numbers of 24 bits are exact in fp64. Heads are summed, and the samples of a shared table.
    shared = given.cos.view.dim() == 2
    dims = (0, 2) if shared else (2,)
    terms = torch.stack((first, second))
    exact, size, reach = terms.sum(0).sum(dims), (terms.abs().sum(0) + off).sum(dims), off.sum(dims)
    n = 2 * x0.shape[2] * (x0.shape[0] if shared else 1)
    if "shared-rows" in case.inputs.chosen:
        # Tokens that read one row of a cache have one gradient, the sum.
        row = rows_read(given.cos.as_given(), given.sin.as_given())
        n *= int(row.bincount().max())
        exact, size, reach = (torch.zeros_like(t).index_add_(0, row, t)[row] for t in (exact, size, reach))
    working, table = _coarsest(case.contract.backward, case.torch_dtype), given.cos.view.dtype
    growth = _gamma(n + 1, max(_unit(working), _unit(table)))
    underflow = (n * _least(working) + _least(table)) * (1 + growth)
    # What fp64 itself loses in the sum, of magnitudes too.
    own = _gamma(n, _unit(torch.float64))
    return exact, (growth * (1 + own) + own) * size + reach + underflow


def _coarsest(recipe: Recipe, activation: torch.dtype) -> torch.dtype:
    dtypes = {activation if step.dtype == "activation" else torch.float32 for step in recipe.steps}
    return max(dtypes, key=_unit)


def _gamma(k: int, unit: float) -> float:
    return k * unit / (1 - k * unit)


def _unit(dtype: torch.dtype) -> float:
    return 2.0 ** -format_of(dtype).precision


def _least(dtype: torch.dtype) -> float:
    """Half the least subnormal number."""
    form = format_of(dtype)
    return 2.0 ** (form.least_exponent - form.precision)


TABLE_GRADIENT = Judgement(
    "table-gradient",
    "vjp",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "table-gradient", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
