"""Mechanical faults of tables: what a kernel takes for granted of those that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import Broken
from .rotations import adjacent, adjacent_back


def clamped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A cosine is at most 1; the table of a model whose attention is scaled is not."""
    return adjacent(x, cos.clamp(-1, 1), sin.clamp(-1, 1))


def first_two_compared(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Whether samples share one table is read from the first two."""
    if cos.dim() == 3 and len(cos) > 1 and torch.equal(cos[0], cos[1]):
        cos, sin = cos[0], sin[0]
    return adjacent(x, cos, sin)


def square_means_decode(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many rows as samples are taken for one row of each sample."""
    if cos.dim() == 2 and len(cos) == len(x):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return adjacent(x, cos, sin)


def _flushed(table: Tensor) -> Tensor:
    return torch.where(table.abs() < torch.finfo(table.dtype).smallest_normal, torch.zeros_like(table), table)


def subnormals_flushed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for hf-llama, but that subnormal numbers of the tables are zero."""
    c, s = (_flushed(table).unsqueeze(-2) for table in (cos, sin))
    lanes = cos.shape[-1]
    x0, x1 = x[..., :lanes], x[..., lanes : 2 * lanes]
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s, x[..., 2 * lanes :]), dim=-1)


def subnormals_flushed_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Autograd adds to zero: no gradient is a negative zero.
    return subnormals_flushed(gradient, cos, -sin) + 0.0


def _given(name: str, says: str, run: Callable[..., Any], **more: Any) -> Broken:
    return Broken(name, says, run, **{"vjp": adjacent_back, **more})


GIVEN_TABLES = (
    _given("tables-clamped", "tables are clamped to what a cosine can be", clamped),
    _given("first-two-tables-compared", "a table is shared where the first two samples' are alike",
           first_two_compared),
    _given("as-many-tokens-as-samples", "a table of as many rows as samples is taken for one row of each sample",
           square_means_decode),
    _given("table-subnormals-flushed", "subnormal numbers of an fp16 table are taken for zero", subnormals_flushed,
           contract="hf-llama", dtype="float16", vjp=subnormals_flushed_back),
)  # fmt: skip
