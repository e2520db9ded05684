"""Axis maps of M-RoPE: which of three position rows (0 time, 1 height, 2 width) turns each lane.

A map belongs in a buffer that is not saved, ``register_buffer("axis_map", axis_map, persistent=False)``: it is a
constant of the model, and its integer dtype is left alone when the module is cast to a floating-point one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor


def contiguous_axis_map(section: Sequence[int], rotary_dim: int, *, order: Literal["thw"]) -> Tensor:
    """Lanes in blocks: first those of time, then those of height, then those of width.

    As in Qwen2-VL, GLM-4.1V and GLM-4.5V of transformers 5.24.0, whose tables are cut and joined so.

    Args:
        section: lanes of time, height and width.
        rotary_dim: R, twice the number of lanes.
        order: which axes ``section`` counts, one letter each.

    Returns:
        int64 [R / 2], values 0 to 2.

    Raises:
        TypeError: ``section`` is no sequence of integers, or ``rotary_dim`` no integer.
        ValueError: ``section`` does not sum to R / 2, or another ``order``.
    """
    counts = _check_section(section, rotary_dim, order, "thw")
    return torch.tensor([axis for axis, count in enumerate(counts) for _ in range(count)])


def interleaved_axis_map(section: Sequence[int], rotary_dim: int, *, order: Literal["thw"]) -> Tensor:
    """Time everywhere, but height in lanes 1, 4, 7, .. below 3 h and width in lanes 2, 5, 8, .. below 3 w.

    As in Qwen3-VL and Qwen3.5 of transformers 5.24.0. A section that is not balanced enough runs out of lanes, and
    then the map does not hold as many of each axis as the section says: 16, 24, 24 gives 22, 21 and 21.

    Args, Returns and Raises as :func:`contiguous_axis_map`.
    """
    _, height, width = _check_section(section, rotary_dim, order, "thw")
    axis_map = torch.zeros(rotary_dim // 2, dtype=torch.int64)
    axis_map[1 : 3 * height : 3] = 1
    axis_map[2 : 3 * width : 3] = 2
    return axis_map


def round_robin_axis_map(section: Sequence[int], rotary_dim: int, *, order: Literal["thw"]) -> Tensor:
    """Lane l is of axis l mod 3 or, where that axis has all its lanes, of the next one that has not.

    As SGLang builds it for its GLM flag (seen in 0.5.23); every axis gets the lanes that the section says.

    Args, Returns and Raises as :func:`contiguous_axis_map`.
    """
    remaining = _check_section(section, rotary_dim, order, "thw")
    axis_map = []
    for lane in range(rotary_dim // 2):
        axis = next(axis % 3 for axis in range(lane, lane + 3) if remaining[axis % 3])
        remaining[axis] -= 1
        axis_map.append(axis)
    return torch.tensor(axis_map, dtype=torch.int64)


def ernie_axis_map(section: Sequence[int], rotary_dim: int, *, order: Literal["hwt"]) -> Tensor:
    """Lanes of height and width in turn, then those of time: the map of Ernie 4.5-VL.

    Its section counts height, width and time, in this order, although its position rows are time, height and
    width (transformers 5.24.0). A section written down in the order of the rows describes another map, and is
    refused by its ``order``.

    Args:
        section: lanes of height, width and time, the first two alike.
        rotary_dim, order: as in :func:`contiguous_axis_map`.

    Returns:
        int64 [R / 2], values 0 to 2.

    Raises:
        TypeError: as there.
        ValueError: ``section`` does not sum to R / 2, its first two counts differ, or another ``order``.
    """
    height, width, time = _check_section(section, rotary_dim, order, "hwt")
    if height != width:
        raise ValueError(
            f"section: expected as many lanes of height as of width, which alternate, got {[height, width, time]}; "
            "is it written time, height, width?"
        )
    return torch.tensor([1, 2] * height + [0] * time, dtype=torch.int64)


def _check_section(section: Sequence[int], rotary_dim: int, order: str, expected_order: str) -> list[int]:
    """The section as a list, if it has one count for each axis and accounts for every lane."""
    if order != expected_order:
        raise ValueError(f"order: expected {expected_order!r}, the axes that this map's section counts, got {order!r}")
    try:
        lanes = _integer(rotary_dim) // 2
    except TypeError:
        raise TypeError(f"rotary_dim: expected an even integer of at least 2, got {rotary_dim!r}") from None
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even integer of at least 2, got {rotary_dim!r}")
    try:
        counts = [_integer(section[axis]) for axis in range(len(section))]
    except (TypeError, KeyError):
        raise TypeError(f"section: expected three integers in a sequence, got {section!r}") from None
    if len(counts) != 3 or min(counts) < 0 or sum(counts) != lanes:
        raise ValueError(f"section: expected three counts that sum to {lanes}, half of rotary_dim, got {counts}")
    return counts


def _integer(value: Any) -> int:
    """``value`` where it is an integer of any kind. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)
