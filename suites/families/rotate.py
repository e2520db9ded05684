"""Families ``rotate`` and ``rotate_pair``: a rotation by tables that are given row by row, of one tensor or of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..views import TABLE_VIEWS, Placed
from .expected import ExpectedRotation
from .family import Family, Keywords, heads_of_q

if TYPE_CHECKING:
    from ropecheck.oracle.contract import Contract

    from ..cases import Inputs, Operands


@dataclass(frozen=True)
class Rotate(Family):
    """``run(x, cos, sin, *, conjugate=False) -> y``: x [B, S, H, D], tables [S, R / 2] or [B, S, R / 2]."""

    name: ClassVar[str] = "rotate"
    activations: ClassVar[tuple[str, ...]] = ("x",)
    outputs: ClassVar[tuple[str, ...]] = ("x",)
    differentiable_tables: ClassVar[tuple[str, ...]] = ("cos", "sin")
    unclaimable: ClassVar[Mapping[str, str]] = {
        "any-dtype": "the contract says what its tables are",
        "any-position": "its call has no positions",
    }

    @classmethod
    def takes(cls, own: Contract) -> bool:
        return own.norm is None

    def suits(self, run: Callable[..., Any]) -> bool:
        given = self.inputs
        return super().suits(run) and not (given.k_view or given.k_gradient_view or given.k_heads)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def lifted(self, activation: Tensor) -> Tensor:
        return activation

    def lowered(self, x: Tensor) -> Tensor:
        return x

    def packed(
        self, cos: Tensor, sin: Tensor, activation: torch.dtype, positions: Tensor | None = None
    ) -> dict[str, Placed]:
        view, sin_view = self.inputs.table_view, self.inputs.sin_view or self.inputs.table_view
        return {"cos": TABLE_VIEWS[view](cos), "sin": TABLE_VIEWS[sin_view](sin)}

    def sizes_of_tokens(self, tables: Sequence[Tensor]) -> tuple[int | None, ...]:
        return tuple(table.dim() - 2 for table in tables)

    def repeated(self, tables: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        return tuple(table.expand(count, -1).contiguous() for table in tables)

    def gradients_read(
        self, tables: Sequence[Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        return dict(gradients), 0

    def keywords(self, function: Callable[..., Any]) -> Keywords:
        return Keywords({"conjugate": True} if self.inputs.conjugate else {})

    def expected(self, operands: Operands, *, backward: bool) -> ExpectedRotation:
        rotation = operands.vjp() if backward else operands.rotation()
        return ExpectedRotation(rotation, self, operands.positions)

    def tensor_of(self, head: int) -> str:
        return ""


@dataclass(frozen=True)
class RotatePair(Rotate):
    """``run(q, k, cos, sin, *, conjugate=False) -> (q, k)``: the first and the other heads of x."""

    name: ClassVar[str] = "rotate_pair"
    activations: ClassVar[tuple[str, ...]] = ("q", "k")
    outputs: ClassVar[tuple[str, ...]] = ("q", "k")

    @classmethod
    def fitted(cls, own: Contract, inputs: Inputs) -> Inputs:
        # One head for q and one for k.
        return replace(inputs, heads=2) if inputs.heads == 1 else inputs

    def suits(self, run: Callable[..., Any]) -> bool:
        return Family.suits(self, run)

    @property
    def q_heads(self) -> int:
        """How many heads of x are q's."""
        return q_heads(self.inputs)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        # Not two slices: their backward is a sum, which is no longer a move of values.
        return torch.split(x, [self.q_heads, x.shape[2] - self.q_heads], dim=2)

    def tensor_of(self, head: int) -> str:
        return "q" if head < self.q_heads else "k"


def q_heads(inputs: Inputs) -> int:
    """How many of the heads of ``inputs`` are q's."""
    return inputs.heads - inputs.k_heads if inputs.k_heads else heads_of_q(inputs.heads)
