"""Every value that an implementation of the fused contract may return, whatever the order of its reduction.

Intervals are carried through: the reciprocal root, the normalised channels, the rounding at both ends, the rotation.
Each form of the rotation is monotone in each of its two members, so that the four corners of a lane's intervals give
every end. In fp32 nearly every element admits a hundred values or more; there :func:`unexplained_rows` asks besides
that one reciprocal root explains all channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .admissible import SEPARATE, AdmissibleSet, admissible
from .floats import format_of, from_key, key, same
from .fused import NormRotation
from .norm import gamma, neighbours, norm_interval, reciprocal_root_interval, strict_norm
from .recipes import ONE_ROUNDING

_FUSED = {"y0": "fused x0c", "y1": "fused x1c"}
"""The forms that are strict with ``fma``: the product with the cosine goes unrounded into the sum."""


@dataclass(frozen=True)
class FusedSets:
    """The sets of some tokens, [t, H, D], and the ends of their rows' reciprocal roots, fp32 [t, H, 1].

    ``members.forms`` holds the strict values alone; ``forms`` has every form of each part of the output after a norm
    in the fixed order, flat: 'y0' and 'y1' by the form of the rotation, 'tail'.
    """

    members: AdmissibleSet
    roots: tuple[Tensor, Tensor]
    forms: dict[str, dict[str, Tensor]]


def fused_sets(rotation: NormRotation) -> FusedSets:
    """The admissible sets of all tokens of ``rotation``, out-of-range and padding tokens as if they were none."""
    x = rotation.x
    roots = reciprocal_root_interval(x, rotation.norm.eps)
    low, high = norm_interval(x, rotation.weight, rotation.norm, roots)
    fixed = strict_norm(x, rotation.weight, rotation.norm)
    members, forms = _with_rotation(rotation, fixed, low, high)
    return FusedSets(members, roots, forms)


def unexplained_rows(rotation: NormRotation, got: Tensor, sets: FusedSets) -> Tensor:
    """bool [t, H]: rows of fp32 ``got`` [t, H, D] that no reciprocal root explains. ``sets`` are those of ``rotation``.

    A root explains a row where every element is admissible with it; it lies between two neighbours of fp32, whose
    values enclose those of every root between, so that an evaluation that divides by a root is not held to a
    reciprocal in fp32. Rows with an element that is not finite are left out: their elements are judged one by one.
    """
    least, greatest = _roots_by_element(rotation, got, sets.roots)
    cell = neighbours(least)[0]
    explained = ~got.isfinite().all(-1) | same(got, sets.members.strict).all(-1)
    open_rows = (~explained & (cell.double() <= greatest).squeeze(-1)).nonzero()
    tokens, heads = open_rows.unbind(-1)
    cell, greatest = cell[tokens, heads], greatest[tokens, heads]
    while len(tokens):
        # A row with its head, as a token of one head.
        rows = NormRotation(
            rotation.x[tokens, heads][:, None], rotation.weight, rotation.cos[tokens], rotation.sin[tokens],
            rotation.norm, rotation.fma,
        )  # fmt: skip
        ends = cell[:, None], from_key(key(cell) + 1, torch.float32)[:, None]
        low, high = norm_interval(rows.x, rows.weight, rows.norm, ends)
        members, _ = _with_rotation(rows, low, low, high)
        done = members.contains(got[tokens, heads][:, None]).all(-1).squeeze(-1)
        explained[tokens[done], heads[done]] = True
        cell = ends[1][:, 0]
        left = ~done & (cell.double() <= greatest).squeeze(-1)
        tokens, heads, cell, greatest = tokens[left], heads[left], cell[left], greatest[left]
    return ~explained


def _roots_by_element(rotation: NormRotation, got: Tensor, roots: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """fp64 [t, H, 1] twice: the least and greatest root with which every element can be what it is.

    An element is root times a fixed number K, but for six roundings (two products and a factor of the norm, a product
    and a sum of the rotation, and one to spare), each of a number no greater than what K's two summands make.
    """
    lanes = rotation.rotary_dim // 2
    scaled = rotation.x.double() * rotation.norm.exact_factor(rotation.weight)
    a, b, tail = scaled[..., :lanes], scaled[..., lanes : 2 * lanes], scaled[..., 2 * lanes :]
    c, s = rotation.cos.double()[:, None], rotation.sin.double()[:, None]
    exact = torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1)
    size = torch.cat(((a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs(), tail.abs()), dim=-1)
    low, high = (r.double() for r in roots)
    # Underflow in fp32 adds at most 2^-149 for each rounding, times what it is multiplied with.
    reach = 1 + rotation.norm.exact_factor(rotation.weight).abs().amax()
    error = gamma(7) * high * size + 2.0**-140 * reach * (1 + c.abs().amax() + s.abs().amax())
    wide = got.double()
    ends = torch.stack(((wide - error) / exact, (wide + error) / exact))
    silent = exact == 0
    least = torch.where(silent, -float("inf"), ends.amin(0)).amax(-1, keepdim=True)
    greatest = torch.where(silent, float("inf"), ends.amax(0)).amin(-1, keepdim=True)
    return torch.maximum(low, least), torch.minimum(high, greatest)


def _with_rotation(
    rotation: NormRotation, fixed: Tensor, low: Tensor, high: Tensor
) -> tuple[AdmissibleSet, dict[str, dict[str, Tensor]]]:
    """The sets of normalised channels between fp32 ``low`` and ``high`` [t, H, D], and the forms of ``fixed``."""
    x, width = rotation.x, rotation.rotary_dim
    c, s = (t.double()[:, None].expand(-1, x.shape[1], -1).reshape(-1) for t in (rotation.cos, rotation.sin))
    halves = [[half.reshape(-1) for half in t[..., :width].chunk(2, dim=-1)] for t in (fixed, low, high)]
    turned, forms = _turned(halves, c, s, x.dtype)
    fixed_tail, *tail = (t[..., width:].to(x.dtype) for t in (fixed, low, high))
    shape = (*x.shape[:2], width // 2)
    parts = [*(span.of_shape(shape) for span in turned), _Span.between(*tail)]
    least, greatest, minus, plus, nan = (torch.cat(fields, dim=-1) for fields in zip(*parts, strict=True))
    fixed_forms = (forms[output][name if rotation.fma else SEPARATE] for output, name in _FUSED.items())
    strict = torch.cat([*(form.reshape(shape) for form in fixed_forms), fixed_tail], dim=-1)
    members = AdmissibleSet({SEPARATE: strict}, least, greatest, (minus, plus, nan))
    return members, forms | {"tail": {SEPARATE: fixed_tail.reshape(-1)}}


class _Span(NamedTuple):
    """Ordered integers of the ends of the finite members, and which elements may be an infinity or NaN."""

    low: Tensor
    high: Tensor
    minus: Tensor
    plus: Tensor
    nan: Tensor

    @staticmethod
    def of(members: AdmissibleSet) -> _Span:
        none = torch.zeros_like(members.low, dtype=torch.bool)
        return _Span(members.low, members.high, *(members.classes or (none, none, none)))

    @staticmethod
    def between(low: Tensor, high: Tensor) -> _Span:
        ends = torch.stack((low, high))
        minus, plus, nan = ends == -float("inf"), ends == float("inf"), ends.isnan()
        return _Span(key(low), key(high), minus.any(0), plus.any(0), nan.any(0))

    def of_shape(self, shape: tuple[int, ...]) -> _Span:
        return _Span(*(t.reshape(shape) for t in self))

    def with_corners(self, at: Tensor, corners: list[_Span], dtype: torch.dtype) -> _Span:
        """This span with the elements at flat indices ``at`` replaced by what encloses all ``corners`` there."""
        lows, highs, *kinds = (torch.stack(fields) for fields in zip(*corners, strict=True))
        low, high = lows.amin(0), highs.amax(0)
        minus, plus, nan = (kind.any(0) for kind in kinds)
        # Between a finite corner and an infinite one lie all finite values on that side; beside NaN, all.
        partly, limit = low <= high, format_of(dtype).infinity_key
        low = torch.where(partly & (minus | nan), -limit, low)
        high = torch.where(partly & (plus | nan), limit - 1, high)
        fields = zip(self, (low, high, minus, plus, nan), strict=True)
        return _Span(*(whole.index_put((at,), here.to(whole.dtype)) for whole, here in fields))


def _turned(
    halves: list[list[Tensor]], c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[list[_Span], dict[str, dict[str, Tensor]]]:
    """The spans of both outputs, flat, and the forms of the first of ``halves``: fixed, least and greatest members."""
    (a, b), *ends = halves
    sets = admissible(ONE_ROUNDING, a.double(), b.double(), c, s, dtype)
    spans = [_Span.of(members) for members in sets]
    settled = [same(low, high) for low, high in zip(*ends, strict=True)]
    wide = (~(settled[0] & settled[1])).nonzero().flatten()
    if len(wide):
        low, high = ([member[wide].double() for member in end] for end in ends)
        at = c[wide], s[wide], dtype
        corners = [admissible(ONE_ROUNDING, one[0], other[1], *at) for one in (low, high) for other in (low, high)]
        spans = [
            span.with_corners(wide, [_Span.of(corner[n]) for corner in corners], dtype) for n, span in enumerate(spans)
        ]
    return spans, {"y0": sets[0].forms, "y1": sets[1].forms}
