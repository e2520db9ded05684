"""A contract: the five choices that fix what a rotary operation computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .norm import Norm
    from .pairing import Pairing
    from .recipes import Recipe

Grid = tuple[int, int, int]
"""(frames, height, width) of one image or video, in tokens."""


class PositionRule(Protocol):
    """Where a logical token stands: an int64 coordinate on each axis."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in the order of the coordinates."""
        ...

    def of_length(self, length: int) -> Tensor:
        """int64 [length, axes]: coordinates of a sample of ``length`` tokens, whole grid or not."""
        ...


class FrequencyRule(Protocol):
    """How a coordinate becomes a cosine and a sine: dtypes and order of the operations."""

    def table(self, positions: Tensor, dims: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 [..., dims / 2], for int64 ``positions`` [...] on an axis of ``dims`` channels."""
        ...


@dataclass(frozen=True)
class LaneMap:
    """Which axis, and which frequency of that axis, each lane uses.

    ``axis[l]`` indexes :attr:`PositionRule.axes`; ``frequency[l]`` counts within that axis; ``dims[a]`` is the
    number of channels that the frequency formula of axis ``a`` is evaluated for. There is no default order: a
    sectioned contract names its own.
    """

    axis: tuple[int, ...]
    frequency: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def lanes(self) -> int:
        return len(self.axis)


@dataclass(frozen=True)
class Contract:
    """What a rotary operation must compute, named after the model or convention it reproduces.

    The five choices are ``positions``, ``frequencies``, ``lanes``, ``pairing`` and the recipe (``forward`` and
    ``backward``, which vendors do not always round alike). ``table_dtype`` is fp32, or the activation dtype
    where the vendor casts its table. ``source`` says which upstream release the contract is pinned to. ``norm`` is
    the norm that a fused contract applies to a head before it rotates it.
    """

    name: str
    summary: str
    source: str
    family: Literal["rotate", "rotate_qk", "norm_rotate_gate"]
    head_dim: int
    positions: PositionRule
    frequencies: FrequencyRule
    lanes: LaneMap
    pairing: Pairing
    forward: Recipe
    backward: Recipe
    table_dtype: Literal["float32", "activation"] = "float32"
    norm: Norm | None = None

    @property
    def rotary_dim(self) -> int:
        return 2 * self.lanes.lanes

    def tables(
        self, positions: Tensor, activation: torch.dtype, rotary_dim: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., rotary_dim / 2], of int64 ``positions`` [..., axes].

        The dtype is the contract's table dtype. A ``rotary_dim`` other than the contract's own takes the
        contract's lanes evenly spread (repeated where it is larger), so that every axis stays present.
        Raises ValueError where ``positions`` does not hold one coordinate for each axis.
        """
        if positions.dim() == 0 or positions.shape[-1] != len(self.lanes.dims):
            raise ValueError(
                f"positions must be [..., {len(self.lanes.dims)}] for contract {self.name!r}, "
                f"one coordinate for each of {', '.join(self.positions.axes)}; got {tuple(positions.shape)}"
            )
        columns: list[Tensor] = []
        per_axis = [self.frequencies.table(positions[..., a], d) for a, d in enumerate(self.lanes.dims)]
        for part in range(2):
            lanes = [per_axis[a][part][..., f] for a, f in zip(self.lanes.axis, self.lanes.frequency, strict=True)]
            columns.append(torch.stack(lanes, dim=-1))
        cos, sin = columns
        if rotary_dim is not None and rotary_dim != self.rotary_dim:
            wanted = rotary_dim // 2
            pick = torch.arange(wanted) * self.lanes.lanes // wanted
            cos, sin = cos[..., pick].contiguous(), sin[..., pick].contiguous()
        dtype = activation if self.table_dtype == "activation" else torch.float32
        return cos.to(dtype), sin.to(dtype)


def contiguous_lanes(dims: Sequence[int]) -> LaneMap:
    """Axes one after the other: all lanes of axis 0, then of axis 1, and so on."""
    axis = tuple(a for a, d in enumerate(dims) for _ in range(d // 2))
    frequency = tuple(k for d in dims for k in range(d // 2))
    return LaneMap(axis, frequency, tuple(dims))
