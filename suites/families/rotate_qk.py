"""Family ``rotate_qk``: q and k are rotated by rows of a joint cache that positions choose, as in serving engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..cache_packing import STRIDED_POSITIONS, axis_map_of, gradients_of_cache, model_cache, pack, place_positions
from ..views import TABLE_VIEWS, Placed
from .expected import ExpectedRotation
from .family import Asked, Family
from .rotate import q_heads
from .rotate_qk_cases import further

if TYPE_CHECKING:
    from ropecheck.oracle.contract import Contract

    from ..cases import Inputs, Operands

LARGEST_HEAD = 256


@dataclass(frozen=True)
class RotateQK(Family):
    """``run(q, k, cos_sin_cache, positions) -> (q, k)``: q [T, Hq, D], k [T, Hk, D], cache [N, R], positions [T] or
    [3, T], int64 or int32. Which row of three a lane reads belongs to the contract."""

    name: ClassVar[str] = "rotate_qk"
    activations: ClassVar[tuple[str, ...]] = ("q", "k")
    outputs: ClassVar[tuple[str, ...]] = ("q", "k")
    flat: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    differentiable_tables: ClassVar[tuple[str, ...]] = ("cos_sin_cache",)
    options: ClassVar[frozenset[str]] = frozenset(
        {"int32-positions", "model-cache", "shared-rows", *STRIDED_POSITIONS}
    )
    unclaimable: ClassVar[Mapping[str, str]] = {
        "conjugate": "its call has no such keyword",
        "any-dtype": "the contract says what its cache is",
        "any-position": "its contracts do not say what a position outside the cache gives",
    }

    @classmethod
    def takes(cls, own: Contract) -> bool:
        # A lane's row of the cache is its position: each row of positions counts from zero.
        return own.family == "rotate_qk" or (own.norm is None and own.positions.axes == ("position",))

    @classmethod
    def fitted(cls, own: Contract, inputs: Inputs) -> Inputs:
        """One head becomes two. The map of three rows is the contract's: another rotary width leaves but its tail."""
        inputs = replace(inputs, heads=2) if inputs.heads == 1 else inputs
        if axis_map_of(own) is None or not inputs.rotary_dim:
            return inputs
        tail = (inputs.head_dim or own.head_dim) - inputs.rotary_dim
        return replace(inputs, head_dim=min(own.rotary_dim + tail, LARGEST_HEAD), rotary_dim=0)

    @classmethod
    def further(cls, judgement: str, plan: str, device: str) -> Asked:
        return further(judgement, plan)

    def suits(self, run: Callable[..., Any]) -> bool:
        given = self.inputs
        # A cache has neither samples nor a sine of its own.
        tables = not given.sin_view and "stride-0" not in given.table_view
        return super().suits(run) and tables and not given.conjugate

    def needs(self) -> set[str]:
        return {"strided"} if self.inputs.chosen & STRIDED_POSITIONS else set()

    @property
    def q_heads(self) -> int:
        """How many heads of x are q's."""
        return q_heads(self.inputs)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x[0], [self.q_heads, x.shape[2] - self.q_heads], dim=1)

    def lifted(self, activation: Tensor) -> Tensor:
        return activation[None]

    def lowered(self, x: Tensor) -> Tensor:
        return x[0]

    def packed(
        self, cos: Tensor, sin: Tensor, activation: torch.dtype, positions: Tensor | None = None
    ) -> dict[str, Placed]:
        options = self.inputs.chosen
        if "model-cache" in options:
            if positions is None:
                raise ValueError("positions must be given where the model's own cache is read")
            made = model_cache(self.own, positions, cos.dtype, cos.device)
        else:
            made = pack(cos, sin, axis_map_of(self.own), shared="shared-rows" in options)
        return {
            "cos_sin_cache": TABLE_VIEWS[self.inputs.table_view](made.cache),
            "positions": place_positions(made.positions, options, made.nobody),
        }

    def sizes_of_tokens(self, tables: Sequence[Tensor]) -> tuple[int | None, ...]:
        return 0, tables[1].dim() - 1

    def repeated(self, tables: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        cache, positions = tables
        return cache, positions.expand(*positions.shape[:-1], count).contiguous()

    def gradients_read(
        self, tables: Sequence[Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        (gradient,) = gradients.values()
        return gradients_of_cache(gradient, tables[1], axis_map_of(self.own))

    def expected(self, operands: Operands, *, backward: bool) -> ExpectedRotation:
        rotation = operands.vjp() if backward else operands.rotation()
        return ExpectedRotation(rotation, self, operands.positions)

    def tensor_of(self, head: int) -> str:
        return "q" if head < self.q_heads else "k"
