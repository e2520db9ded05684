"""Semantic faults of fused norms: of the norm, its weights, the rounding behind it, and the gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .fault import Misreading
from .part import NormOf, Part, evaluated
from .positions import POSITIONS
from .reading import Reading
from .tables import TABLES


def _norm(reading: Reading, change: Callable[[NormOf], NormOf]) -> Reading:
    return reading.each(lambda part: part if part.norm is None else replace(part, norm=change(part.norm)))


def offset_forgotten(reading: Reading) -> Reading:
    return _norm(reading, lambda of: replace(of, norm=replace(of.norm, weight_offset=0.0)))


def weights_left_out(reading: Reading) -> Reading:
    return _norm(reading, lambda of: replace(of, weight=torch.full_like(of.weight, 1.0 - of.norm.weight_offset)))


def rounding_skipped(reading: Reading) -> Reading:
    return _norm(reading, lambda of: replace(of, norm=replace(of.norm, round_norm=False)))


def another_eps(reading: Reading, eps: float) -> Reading:
    return _norm(reading, lambda of: replace(of, norm=replace(of.norm, eps=eps)))


def weights_of_queries(reading: Reading) -> Reading:
    of_q = reading.parts[0].norm
    if of_q is None:
        return reading
    return reading.one("k", lambda p: p if p.norm is None else replace(p, norm=replace(p.norm, weight=of_q.weight)))


def out_of_range_read(reading: Reading) -> Reading:
    """What a position outside of the cache gives is not NaN: the row at the nearer end is read."""

    def change(part: Part) -> Part:
        tables = part.tables
        if part.norm is None or part.norm.out_of_range is None or tables.positions is None:
            return part
        return replace(part, tables=tables.at(tables.positions), norm=replace(part.norm, out_of_range=None))

    return reading.each(change)


def not_normalised(reading: Reading) -> Reading:
    """The rotation alone, by the recipe of one rounding."""
    return reading.each(lambda part: replace(part, norm=None))


def tail_not_normalised(reading: Reading) -> Reading:
    def change(part: Part) -> Part:
        tail = torch.arange(part.x.shape[-1]) >= part.width
        return part.keeping(tail, part.x)

    return reading.each(change)


def mean_of_rotated(reading: Reading) -> Reading:
    """The root is that of the rotated channels alone: a power of two where the others only carry zeros."""

    def change(part: Part) -> Part:
        of = part.norm
        if of is None or part.is_gradient or part.width == part.x.shape[-1]:
            return part
        whole, some = (t.float().square().mean(-1, keepdim=True) for t in (of.x, of.x[..., : part.width]))
        by = ((whole + of.norm.eps) / (some + of.norm.eps)).sqrt()
        scaled = (evaluated(part).float() * by).to(part.x.dtype)
        return part.keeping(torch.ones_like(part.x, dtype=torch.bool), scaled)

    return reading.each(change)


def gates_rolled(reading: Reading, by: int) -> Reading:
    return reading.one("gate", lambda part: part.keeping(_all(part), part.x.roll(by, dims=2)))


def gates_through_a_sum(reading: Reading) -> Reading:
    return reading.one("gate", lambda part: part.keeping(_all(part), (part.x.float() + 0.0).to(part.x.dtype)))


def gates_exchanged(reading: Reading) -> Reading:
    """What should be the query is taken for the gate, and the gate for the query."""
    q, gate = reading.parts[0], reading.parts[-1]
    if gate.name != "gate" or q.norm is None or q.is_gradient:
        return reading
    other = gate.x
    swapped = reading.one("q", lambda p: replace(p, x=other, norm=replace(q.norm, x=other) if q.norm else None))
    return swapped.one("gate", lambda part: part.keeping(_all(part), q.x))


def gate_gradient_dropped(reading: Reading) -> Reading:
    return reading.one("gate", lambda part: part.keeping(_all(part), torch.zeros_like(part.x)))


def mean_term_dropped(reading: Reading) -> Reading:
    """The reciprocal root is taken for a constant in the backward."""

    def change(part: Part) -> Part:
        of = part.norm
        if of is None or not part.is_gradient:
            return part
        bare = replace(part, norm=None, recipe=reading.own.backward, x=part.x.float())
        turned = evaluated(bare)
        root = (of.x.float().square().mean(-1, keepdim=True) + of.norm.eps).rsqrt()
        values = (turned * of.norm.factor(of.weight) * root).to(part.x.dtype)
        return part.keeping(_all(part), values)

    return reading.each(change)


def _all(part: Part) -> Tensor:
    return torch.ones(part.x.shape, dtype=torch.bool)


_FUSED: dict[str, Any] = {"family": "norm_rotate_gate", "contract": "qwen3.5-norm-rope-gate"}
_FORWARD: dict[str, Any] = {**_FUSED, "direction": "forward", "claims": ("any-shape",)}
_BACKWARD: dict[str, Any] = {**_FUSED, "direction": "backward"}

NORMS = (
    Misreading("weight-offset-forgotten", "a norm's factor is its weight, without the offset", offset_forgotten,
               **_FORWARD),
    Misreading("weights-left-out", "the weights of the norm are left out", weights_left_out, **_FORWARD),
    Misreading("norm-not-rounded", "the norm's result is not rounded before it is rotated", rounding_skipped,
               rows=("O061",), **_FORWARD),
    Misreading("another-eps", "eps is {0:.9g}", another_eps, (1e-5,),
               lambda r, g: ((eps,) for eps in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3)), **_FORWARD),
    Misreading("weights-of-queries-for-keys", "keys are normalised by the weights of queries", weights_of_queries,
               **_FORWARD),
    Misreading("out-of-range-read", "a position outside of the cache reads a row of it", out_of_range_read,
               rows=("O050",), **{**_FORWARD, "claims": ("any-shape", "any-position")}),
    Misreading("not-normalised", "nothing is normalised", not_normalised, **_FORWARD),
    Misreading("tail-not-normalised", "channels that are not rotated are not normalised either", tail_not_normalised,
               **_FORWARD),
    Misreading("mean-of-the-rotated", "the mean square is that of the rotated channels alone", mean_of_rotated,
               **_FORWARD),
    Misreading("gates-of-another-head", "every gate is that of head {0:+d} from it", gates_rolled, (1,),
               lambda r, g: ((by,) for by in (1, -1, 2, -2)), **_FORWARD),
    Misreading("gates-through-a-sum", "gates are computed, not copied: -0 becomes +0", gates_through_a_sum, **_FORWARD),
    Misreading("gates-for-queries", "gates are taken for queries, and queries for gates", gates_exchanged, **_FORWARD),
    Misreading("gate-gradient-dropped", "the gradient of the gates is zero", gate_gradient_dropped, **_BACKWARD),
    Misreading("norm-taken-for-a-constant", "in the backward the norm's root is taken for a constant",
               mean_term_dropped, **_BACKWARD),
)  # fmt: skip

_AS_IN_OTHERS = (
    ("fused-time-row-only", "one-axis-for-all", "every lane of the fused call uses the time row"),
    ("fused-axes-swapped", "axes-swapped", "in the fused call height and width have changed places"),
    ("fused-width-moved", "axis-moved", "in the fused call the width coordinate is +1 off"),
    ("fused-position-moved", "position-moved", "in the fused call every token stands +1 from its position"),
    ("fused-map", "another-map", "in the fused call lanes are given to axes by the contiguous map"),
    ("fused-table-rounded", "table-rounded", "in the fused call the tables are rounded to bf16"),
    ("fused-sine-negated", "sine-negated", "in the fused call the sine has the other sign"),
)

FUSED = tuple(
    replace(of, name=name, says=says, rows=("O001",) if of.name == "one-axis-for-all" else (), **_FORWARD)
    for name, known, says in _AS_IN_OTHERS
    for of in (*POSITIONS, *TABLES)
    if of.name == known
)
"""The same mechanisms in the fused call, whose diagnosis is that of any other."""
