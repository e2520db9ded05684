"""Reading: how a whole call is read, made from what a candidate is given or from the operands of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.frequencies import PolarRows
from ropecheck.oracle.fused import gathered_tables
from ropecheck.oracle.norm import Norm

from ..cache_packing import axis_map_of
from ..cases import Operands
from ..families.norm_expected import ExpectedNorm
from ..families.norm_heads import HeadCounts
from .part import LookUp, NormOf, Part, Tables, evaluated, explained


@dataclass(frozen=True)
class Reading:
    """The tensors of one call in the order of the outputs. ``own`` is the contract that is to be kept."""

    own: Contract
    parts: tuple[Part, ...]

    @property
    def backward(self) -> bool:
        return any(part.is_gradient for part in self.parts)

    def each(self, change: Callable[[Part], Part]) -> Reading:
        """``change`` made to every part that is rotated."""
        return replace(self, parts=tuple(change(part) if part.turned else part for part in self.parts))

    def one(self, name: str, change: Callable[[Part], Part]) -> Reading:
        """``change`` made to the part called ``name``, if there is one."""
        return replace(self, parts=tuple(change(part) if part.name == name else part for part in self.parts))

    def outputs(self) -> tuple[Tensor, ...]:
        """[B, S, H, D] of each part."""
        return tuple(evaluated(part) for part in self.parts)

    def explains(self, got: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """bool like ``got``, the observed outputs of each part."""
        return tuple(explained(part, y) for part, y in zip(self.parts, got, strict=True))


def of_rotation(
    own: Contract, x: Sequence[Tensor], cos: Tensor, sin: Tensor, *, backward: bool, positions: Tensor | None = None
) -> Reading:
    """Of families ``rotate`` and ``rotate_pair``: x, or q and k, [B, S, H, D].

    Where ``positions`` are not given they are read off the tables, if these are the contract's own.
    """
    where = positions if positions is not None else positions_behind(own, cos, sin)
    fits = where is not None and cos.shape[-1] == own.lanes.lanes
    tables = Tables(cos, sin, where if fits else None, None, _own_tables(own, cos.dtype) if fits else None)
    return _of_parts(own, x, tables, backward)


def of_cache(own: Contract, x: Sequence[Tensor], cache: Tensor, positions: Tensor, *, backward: bool) -> Reading:
    """Of family ``rotate_qk``: q and k [1, T, H, D], ``positions`` [T] or [3, T]."""
    return _of_parts(own, x, tables_of_rows(cache, positions, axis_map_of(own)), backward)


def of_norm(
    own: Contract,
    x: Tensor,
    heads: HeadCounts,
    weights: Sequence[Tensor],
    tables: Tables,
    norm: Norm,
    *,
    fma: bool = False,
    out_of_range: Tensor | None = None,
    padding: Tensor | None = None,
    gradient: Tensor | None = None,
) -> Reading:
    """Of family ``norm_rotate_gate``: x [1, T, H, D] of queries, gates and keys, and the ``gradient`` that comes in."""
    incoming = x if gradient is None else gradient
    recipe = own.forward if gradient is None else own.backward
    parts = [
        Part(
            name, of(incoming), tables, own.pairing, recipe, gradient is not None,
            NormOf(of(x), weight, norm, fma, out_of_range, padding),
        )
        for name, of, weight in zip(("q", "k"), (heads.queries, heads.keys), weights, strict=True)
    ]  # fmt: skip
    if heads.gate:
        gate = Part("gate", heads.gates(incoming), tables, own.pairing, recipe, gradient is not None, turned=False)
        parts.append(gate)
    return Reading(own, tuple(parts))


def of_operands(operands: Operands, *, backward: bool = False) -> Reading:
    """As the oracle reads the operands of a case."""
    case, family = operands.case, operands.family
    own, whole = case.contract, (operands.gradient if backward else operands.x).as_given()
    if family.name == "norm_rotate_gate":
        expected = family.expected(operands, backward=backward)
        assert isinstance(expected, ExpectedNorm)
        rotation = expected.q
        rows = tables_of_rows(
            operands.tables["cos_sin_cache"].as_given().float(), operands.tables["positions"].as_given(),
            getattr(family, "axis_map", None),
        )  # fmt: skip
        # What the tokens read is the oracle's; the rows behind it are for faults of positions.
        tables = replace(rows, cos=rotation.cos, sin=rotation.sin)
        return of_norm(
            own, expected.x, expected.heads, (rotation.weight, expected.k.weight), tables, rotation.norm,
            fma=rotation.fma, out_of_range=rotation.out_of_range, padding=rotation.padding, gradient=expected.gradient,
        )  # fmt: skip
    x = tuple(family.lifted(part) for part in family.split(whole))
    if family.name == "rotate_qk":
        cache, where = (operands.tables[name].as_given() for name in ("cos_sin_cache", "positions"))
        return of_cache(own, x, cache, where, backward=backward)
    cos, sin = operands.cos.as_given(), operands.sin.as_given()
    sin = -sin if case.inputs.conjugate else sin
    return of_rotation(own, x, cos, sin, backward=backward, positions=operands.positions)


def divided(operands: Operands, got: Tensor) -> tuple[Tensor, ...]:
    """Observed ``got`` [B, S, H, D], like x, as the outputs of the parts of :func:`of_operands`."""
    family = operands.family
    heads = getattr(family, "heads", None)
    if isinstance(heads, HeadCounts):
        parts = [heads.queries(got), heads.keys(got), *([heads.gates(got)] if heads.gate else [])]
        return tuple(parts)
    return tuple(family.lifted(part) for part in family.split(got))


def _of_parts(own: Contract, x: Sequence[Tensor], tables: Tables, backward: bool) -> Reading:
    names = ("x",) if len(x) == 1 else ("q", "k")
    recipe = own.backward if backward else own.forward
    parts = (Part(n, t, tables, own.pairing, recipe, backward) for n, t in zip(names, x, strict=True))
    return Reading(own, tuple(parts))


def tables_of_rows(cache: Tensor, positions: Tensor, axis_map: tuple[int, ...] | None) -> Tables:
    where = (positions if positions.dim() == 2 else positions[None]).T.long()

    def look_up(rows: Tensor, lanes: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
        cos, sin, _ = gathered_tables(cache, rows[:, 0] if lanes is None else rows.T, lanes)
        return cos, sin

    cos, sin = look_up(where, axis_map)
    return Tables(cos, sin, where, axis_map, look_up)


def _own_tables(own: Contract, dtype: torch.dtype) -> LookUp:
    def look_up(positions: Tensor, lanes: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
        return own.tables(positions.clamp(*_limits(own)), dtype)

    return look_up


def _limits(own: Contract) -> tuple[int, int]:
    rows = own.frequencies.rows if isinstance(own.frequencies, PolarRows) else 1 << 20
    return -rows, rows - 1


def positions_behind(own: Contract, cos: Tensor, sin: Tensor) -> Tensor | None:
    """int64 [.., axes]: the coordinates whose rows ``cos`` and ``sin`` [.., R / 2] are; None where they are no rows of
    the contract's. Only contracts that keep tables of few rows, of either sign, are looked up."""
    if not isinstance(own.frequencies, PolarRows) or cos.shape[-1] != own.lanes.lanes or not cos.numel():
        return None
    if cos.dtype != torch.float32 or not bool(cos.isfinite().all()):
        return None
    columns = []
    for axis, rows in enumerate(_rows_by_bytes(own.name)):
        lanes = [lane for lane, a in enumerate(own.lanes.axis) if a == axis]
        both = torch.cat((cos[..., lanes], sin[..., lanes]), dim=-1).contiguous()
        found = [rows.get(row.tobytes()) for row in both.reshape(-1, both.shape[-1]).numpy()]
        if any(place is None for place in found):
            return None
        columns.append(torch.tensor(found).reshape(cos.shape[:-1]))
    return torch.stack(columns, dim=-1)


@cache
def _rows_by_bytes(name: str) -> tuple[dict[bytes, int], ...]:
    own = contract(name)
    low, high = _limits(own)
    everywhere = torch.arange(low, high + 1)
    tables = own.tables(everywhere[:, None].expand(-1, len(own.positions.axes)), torch.float32)
    found: list[dict[bytes, int]] = []
    for axis in range(len(own.positions.axes)):
        lanes = [lane for lane, a in enumerate(own.lanes.axis) if a == axis]
        both: Any = torch.cat([t[:, lanes] for t in tables], dim=-1).contiguous().numpy()
        found.append({row.tobytes(): place for row, place in zip(both, everywhere.tolist(), strict=True)})
    return tuple(found)
