"""Mechanical faults of the integers of a fused call: its positions, its axis map and its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ...cache_packing import axis_map_of
from ..mutants import right_fused_call
from .kernel import Broken

_CONTRACT = "qwen3.5-norm-rope-gate"
_right = right_fused_call(contract(_CONTRACT))

Outputs = tuple[Tensor | None, ...]


def map_of_contract(lanes: int) -> Tensor:
    """int64 [lanes]: which row of the positions each lane reads, as the contract has it."""
    own = axis_map_of(contract(_CONTRACT))
    assert own is not None
    return torch.tensor(own)[torch.arange(lanes) * len(own) // lanes]


def _of_unit_stride(integers: Tensor | None) -> Tensor | None:
    return None if integers is None else integers.as_strided(integers.shape, (1,))


def slots_of_unit_stride(
    *operands: Tensor, eps: float, axis_map: Tensor | None = None, slots: Tensor | None = None
) -> Outputs:
    return _right(*operands, eps=eps, axis_map=axis_map, slots=_of_unit_stride(slots))


def map_of_unit_stride(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    return _right(*operands, eps=eps, axis_map=_of_unit_stride(axis_map))


class MapKept:
    """A model has one map: the first of its length is prepared, and used from then on."""

    def __init__(self) -> None:
        self.maps: dict[int, Tensor] = {}

    def __call__(self, *operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
        if axis_map is not None:
            axis_map = self.maps.setdefault(len(axis_map), axis_map.clone())
        return _right(*operands, eps=eps, axis_map=axis_map)


class MapKeptByAddress:
    """What was prepared of an axis map is used as long as the map lies where it lay, though it was written to."""

    def __init__(self) -> None:
        # With the map itself, whose memory is thus nobody else's.
        self.maps: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, *operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
        if axis_map is not None:
            axis_map = self.maps.setdefault(axis_map.data_ptr(), (axis_map, axis_map.clone()))[1]
        return _right(*operands, eps=eps, axis_map=axis_map)


def three_tokens_for_three_rows(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    """How many rows the positions have is read from their first dimension."""
    *others, cache, positions = operands
    if positions.shape == (3,):
        axis_map, positions = map_of_contract(cache.shape[1] // 2), positions[:, None].expand(3, 3)
    return _right(*others, cache, positions, eps=eps, axis_map=axis_map)


def _integers(name: str, says: str, run: Callable[..., Any], **more: Any) -> Broken:
    claims = ("vjp", "any-shape", "strided")
    return Broken(name, says, run, family="norm_rotate_gate", contract=_CONTRACT, claims=claims, **more)


FUSED_INTEGERS = (
    _integers("slots-of-unit-stride", "slots are read as if they were contiguous", slots_of_unit_stride),
    _integers("map-of-unit-stride", "the axis map is read as if it were contiguous", map_of_unit_stride),
    _integers("map-kept", "the first axis map of a length is used in every later call", MapKept, stateful=True),
    _integers("map-kept-by-address", "an axis map that was written to is used as it was", MapKeptByAddress,
              stateful=True),
    _integers("three-tokens-for-three-rows", "positions of three tokens are taken for three rows",
              three_tokens_for_three_rows),
)  # fmt: skip
