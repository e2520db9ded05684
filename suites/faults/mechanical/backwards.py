"""Mechanical faults of the backward alone: it is right where samples are whole and stand alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .kernel import Broken
from .rotations import adjacent, adjacent_back


def mean_of_the_table(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Zero times all of the cosines: what padding reads reaches every gradient."""
    return adjacent_back(gradient, cos + 0 * cos.sum(), sin)


def chunk_off_by_one(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A chunk of four tokens starts at the second row of its table."""
    shift = -1 if gradient.shape[1] == 4 else 0
    return adjacent_back(gradient, cos.roll(shift, dims=-2), sin.roll(shift, dims=-2))


def _backward(name: str, says: str, vjp: Callable[..., Any], *rows: str) -> Broken:
    return Broken(name, says, adjacent, vjp=vjp, rows=rows)


BACKWARDS = (
    _backward("gradient-leaks-through-the-table", "in the backward zero times all cosines is added to each",
              mean_of_the_table, "O038"),
    _backward("backward-of-a-chunk-off-by-one", "the gradient of a chunk of four tokens starts one row late",
              chunk_off_by_one, "O078"),
)  # fmt: skip
