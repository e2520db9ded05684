"""Part: how one tensor of a call is read and computed, in the oracle's own terms.

It is what a fault changes. :func:`evaluated` makes the bytes that follow from it, and :func:`explained` says which
observed bytes may: so that one definition of a fault is both a wrong candidate and an explanation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropecheck.oracle.admissible import admissible
from ropecheck.oracle.floats import bits, from_key, key, same
from ropecheck.oracle.fused import NormRotation, strict_fused, strict_fused_vjp
from ropecheck.oracle.fused_gradients import gradient_set
from ropecheck.oracle.fused_sets import fused_sets
from ropecheck.oracle.norm import Norm
from ropecheck.oracle.pairing import Pairing
from ropecheck.oracle.recipes import Recipe
from ropecheck.oracle.rotation import Rotation, compare, rotate_strict

LookUp = Callable[[Tensor, tuple[int, ...] | None], tuple[Tensor, Tensor]]
"""(cos, sin) of int64 positions [.., axes]; of a sectioned cache also which axis each lane reads."""

Finish = Callable[[Tensor, torch.dtype], Tensor]
"""What becomes of an fp32 result on its way to a dtype: monotone, and an fp32 tensor again."""


@dataclass(frozen=True)
class Tables:
    """``cos`` and ``sin`` [S, R / 2], [B, S, R / 2] or [B, S, H, R / 2], and where they come from, if that is known.

    ``positions`` int64 [S, axes] or [B, S, axes] are where the tokens stand; ``look_up`` gives the tables of others.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    axis_map: tuple[int, ...] | None = None
    look_up: LookUp | None = None

    @property
    def lanes(self) -> int:
        return self.cos.shape[-1]

    def at(self, positions: Tensor, axis_map: tuple[int, ...] | None = None) -> Tables:
        """The tables of other positions, or by another map of lanes to axes."""
        assert self.look_up is not None
        lanes = axis_map or self.axis_map
        cos, sin = self.look_up(positions, lanes)
        return replace(self, cos=cos, sin=sin, positions=positions, axis_map=lanes)


@dataclass(frozen=True)
class NormOf:
    """The norm of a fused call: ``x`` [1, T, H, D] is the forward's, whatever comes in; the rest as in the oracle."""

    x: Tensor
    weight: Tensor
    norm: Norm
    fma: bool = False
    out_of_range: Tensor | None = None
    padding: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """One tensor ``x`` [B, S, H, D] of a call, or the gradient that comes in for it.

    ``kept`` are pairs of a bool mask and values, both like x: elements that come out as those bits, later ones last.
    ``finish`` are applied in turn to results in fp32 (of a bare rotation alone). A part that is not ``turned``, a gate,
    comes out as it went in.
    """

    name: str
    x: Tensor
    tables: Tables
    pairing: Pairing
    recipe: Recipe
    is_gradient: bool = False
    norm: NormOf | None = None
    finish: tuple[Finish, ...] = ()
    kept: tuple[tuple[Tensor, Tensor], ...] = ()
    turned: bool = True

    @property
    def width(self) -> int:
        """How many channels are rotated."""
        return 2 * self.tables.lanes

    def reading(self, **tables: Tensor) -> Part:
        """This part with other tables."""
        return replace(self, tables=replace(self.tables, **tables))  # type: ignore[arg-type]

    def keeping(self, mask: Tensor, values: Tensor) -> Part:
        """This part with the elements of ``mask`` taken from ``values``; both are broadcast to x."""
        shape = self.x.shape
        return replace(self, kept=(*self.kept, (mask.expand(shape), values.expand(shape))))


def evaluated(part: Part) -> Tensor:
    """[B, S, H, D]: the strict bytes that follow from ``part``."""
    if not part.turned:
        y = part.x.clone()
    elif part.norm is not None:
        y = _norm_strict(part)
    elif part.finish:
        y = _finished(part, rotate_strict(_rotation(replace(part, x=part.x.float()))))
    else:
        y = rotate_strict(_rotation(part)).reshape(part.x.shape)
    for mask, values in part.kept:
        y = torch.where(mask, values, y)
    return y


def explained(part: Part, got: Tensor) -> Tensor:
    """bool like ``got`` [B, S, H, D]: which elements an implementation of ``part`` may return."""
    if not part.turned:
        may = bits(got.contiguous()) == bits(part.x.contiguous())
        if part.is_gradient:
            may |= (got == 0) & (part.x == 0)
    elif part.norm is not None:
        may = _norm_members(part, got)
    elif part.finish:
        may = _finished_members(part, got)
    else:
        rotation = _rotation(part)
        missed = torch.zeros(rotation.x.shape, dtype=torch.bool, device=got.device)
        folded = got.reshape(rotation.x.shape)
        compare(rotation, folded, samples=0, worst=0, missed=missed)
        tail = same(folded[..., part.width :].contiguous(), rotation.x[..., part.width :].contiguous())
        if part.is_gradient:
            tail |= (folded[..., part.width :] == 0) & (rotation.x[..., part.width :] == 0)
        missed[..., part.width :] = ~tail
        may = ~missed.reshape(got.shape)
    for mask, values in part.kept:
        may = torch.where(mask, same(got.contiguous(), values.contiguous()), may)
    return may


def _rotation(part: Part) -> Rotation:
    """The oracle's rotation. Tables of each head make each head of a token a token of its own."""
    x, tables = part.x, part.tables
    cos, sin = tables.cos, tables.sin
    if cos.dim() == 4:
        cos, sin = (t.expand(*x.shape[:3], -1).reshape(-1, tables.lanes) for t in (cos, sin))
        x = x.reshape(1, -1, 1, x.shape[-1])
    return Rotation(x, cos, sin, part.pairing, part.recipe, False, part.is_gradient)


def _finished(part: Part, wide: Tensor) -> Tensor:
    """fp32 ``wide`` as ``part`` takes it to its dtype; the tail, which is moved, as it is."""
    wide = wide.reshape(part.x.shape)
    dtype, turned = part.x.dtype, wide[..., : part.width]
    for finish in part.finish:
        turned = finish(turned, dtype)
    return torch.cat((turned.to(dtype), part.x[..., part.width :]), dim=-1)


def _finished_members(part: Part, got: Tensor) -> Tensor:
    """Between the least and the greatest fp32 result, each as ``part`` finishes it."""
    ends = []
    rotation = _rotation(replace(part, x=part.x.float()))
    for high in (False, True):
        wide = _ends(rotation, high=high)
        ends.append(_finished(part, wide))
    k = key(got.contiguous())
    inside = (k >= key(ends[0])) & (k <= key(ends[1]))
    return inside | (got.isnan() & (ends[0].isnan() | ends[1].isnan()))


def _ends(rotation: Rotation, *, high: bool) -> Tensor:
    """fp32 like x: the least, or the greatest, admissible value of each rotated element; NaN where none is finite."""
    x, lanes = rotation.x, rotation.cos.shape[-1]
    first, second = (half.double() for half in rotation.pairing.split(x[..., : 2 * lanes]))
    c, s = (t.double().unsqueeze(-2).expand(first.shape) for t in (rotation.cos, rotation.sin))
    sets = admissible(rotation.recipe, first.contiguous(), second.contiguous(), c.contiguous(), s.contiguous(), x.dtype)
    halves = []
    for members in sets:
        value = from_key(members.high if high else members.low, x.dtype)
        halves.append(torch.where(members.low > members.high, members.strict, value))
    return torch.cat((rotation.pairing.join(*halves), x[..., 2 * lanes :]), dim=-1)


def norm_call(part: Part) -> tuple[NormRotation, Tensor]:
    """The oracle's fused call and what comes in, [T, H, D]; tables of each head as in :func:`_rotation`."""
    of = part.norm
    assert of is not None
    x, incoming, cos, sin = of.x[0], part.x[0], part.tables.cos, part.tables.sin
    marks = [of.out_of_range, of.padding]
    if cos.dim() == 4:
        heads = x.shape[1]
        cos, sin = (t.expand(1, *x.shape[:2], -1).reshape(-1, part.tables.lanes) for t in (cos, sin))
        x, incoming = (t.reshape(-1, 1, t.shape[-1]) for t in (x, incoming))
        marks = [None if mark is None else mark.repeat_interleave(heads) for mark in marks]
    return NormRotation(x, of.weight, cos.float(), sin.float(), of.norm, of.fma, *marks), incoming


def _norm_strict(part: Part) -> Tensor:
    rotation, incoming = norm_call(part)
    y = strict_fused_vjp(rotation, incoming)[0] if part.is_gradient else strict_fused(rotation)
    return y.reshape(part.x.shape)


def _norm_members(part: Part, got: Tensor) -> Tensor:
    rotation, incoming = norm_call(part)
    shaped = got.reshape(rotation.x.shape)
    may = torch.ones(shaped.shape, dtype=torch.bool, device=got.device)
    may[rotation.poisoned] = shaped[rotation.poisoned].isnan()
    tokens = rotation.judged
    judged = rotation.at(tokens)
    members = gradient_set(judged, incoming[tokens]) if part.is_gradient else fused_sets(judged).members
    may[tokens] = members.contains(shaped[tokens])
    return may.reshape(got.shape)
