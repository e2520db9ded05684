"""Tables in the form in which serving engines read them: a joint cache of cosines and sines, and positions into it.

Each token, and each row of its positions, gets a cache row of its own, in scattered order and in a range that no other
row of positions shares. Cache rows that no token reads, and in a row the lanes that belong to another row of positions,
hold NaN: whoever reads a neighbour's row, another axis or past the end of the positions, computes NaN.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.floats import bits

from .views import Placed

MODEL_ROWS = 131_101
"""Rows of a model's own cache: 2^17 and some, so that the last row is no round number."""

STRIDED_POSITIONS = frozenset({"sliced-positions", "transposed-positions", "misaligned-positions"})
"""The options of :func:`place_positions` that only a candidate which claims ``strided`` is given."""

_GUARD_ELEMENTS = 64
_WIDER = 4
_ROWS = 3


@dataclass(frozen=True)
class Packed:
    """``cache`` [N, R], cosines then sines, and int64 ``positions`` [T] or [3, T]. Row ``nobody`` is no token's."""

    cache: Tensor
    positions: Tensor
    nobody: int = 0


def axis_map_of(own: Contract) -> tuple[int, ...] | None:
    """Which row of the positions each lane of a contract reads; None where the positions have one row."""
    return own.lanes.axis if len(own.positions.axes) > 1 else None


def rows_read(cos: Tensor, sin: Tensor) -> Tensor:
    """int64 [T]: tokens that read the same ``cos`` and ``sin`` [T, R / 2] have the same number, from zero on."""
    numbers: Tensor = torch.unique(bits(torch.cat((cos, sin), dim=-1)), dim=0, return_inverse=True)[1]
    return numbers


def pack(cos: Tensor, sin: Tensor, axis_map: tuple[int, ...] | None = None, *, shared: bool = False) -> Packed:
    """The cache and the positions with which the tokens read ``cos`` and ``sin`` [T, R / 2].

    With ``shared``, tokens that read the same have the same rows of the cache.

    Row ``axis_map[l]`` of three rows of positions is the one that lane ``l`` reads. The last row of the cache is read,
    the first is ``nobody``. The scatter depends on the tables alone.
    """
    if shared and len(cos):
        numbers = rows_read(cos, sin)
        first = torch.stack([(numbers == n).nonzero()[0, 0] for n in range(int(numbers.max()) + 1)])
        own = pack(cos[first], sin[first], axis_map)
        return replace(own, positions=own.positions[..., numbers])
    tokens, lanes = cos.shape
    rows = 1 if axis_map is None else _ROWS
    band = 2 * tokens
    generator = torch.Generator().manual_seed(int(bits(cos).sum()) & (2**63 - 1))
    places = [1 + row * band + torch.randperm(band, generator=generator)[:tokens] for row in range(rows)]
    count = rows * band + 1
    if tokens:
        # The first token's last row of positions trades with whoever has the last row of the cache.
        last = places[-1]
        last[last == count - 1] = last[0]
        last[0] = count - 1
    positions = torch.stack(places).to(cos.device)
    cache = torch.full((count, 2 * lanes), float("nan"), dtype=cos.dtype, device=cos.device)
    made = Packed(cache, positions[0] if axis_map is None else positions)
    where, lane = _read(made.positions, axis_map, lanes)
    cache[where, lane] = cos
    cache[where, lane + lanes] = sin
    return made


def _read(positions: Tensor, axis_map: tuple[int, ...] | None, lanes: int) -> tuple[Tensor, Tensor]:
    """The row of the cache that each lane of each token reads, int64 [T, R / 2], and the lanes."""
    lane = torch.arange(lanes, device=positions.device)
    if axis_map is None:
        return positions.long()[:, None].expand(-1, lanes), lane
    return positions.long()[list(axis_map)].T, lane


def gradients_of_cache(
    gradient: Tensor, positions: Tensor, axis_map: tuple[int, ...] | None
) -> tuple[dict[str, Tensor], int]:
    """The gradient of a cache that :func:`pack` made, as those of ``cos`` and ``sin`` [T, R / 2], and how many other
    elements of it are not zero."""
    lanes = gradient.shape[-1] // 2
    where, lane = _read(positions, axis_map, lanes)
    of_tokens = {"cos": gradient[where, lane], "sin": gradient[where, lane + lanes]}
    beyond = gradient.clone()
    for half in (0, lanes):
        beyond[where, lane + half] = 0.0
    return of_tokens, int((beyond != 0).sum())


def model_cache(own: Contract, positions: Tensor, activation: torch.dtype, device: str | torch.device) -> Packed:
    """The contract's own cache of :data:`MODEL_ROWS` rows, and the positions int64 [T, axes] as its tokens have them.

    Raises ValueError for a position that the cache has no row for.
    """
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < MODEL_ROWS:
        raise ValueError(f"positions must lie between 0 and {MODEL_ROWS - 1}, the rows of the cache")
    cache = _whole_cache(own.name, activation).to(device)
    rows = positions.T.contiguous().to(device)
    return Packed(cache, rows[0] if axis_map_of(own) is None else rows)


@lru_cache(maxsize=1)
def _whole_cache(name: str, activation: torch.dtype) -> Tensor:
    own = contract(name)
    everywhere = torch.arange(MODEL_ROWS)[:, None].expand(-1, len(own.positions.axes))
    return torch.cat(own.tables(everywhere, activation), dim=-1)


def place_positions(positions: Tensor, options: Collection[str], nobody: int) -> Placed:
    """``positions`` [T] or [3, T] in a guarded storage, as ``options`` say, all that is not theirs being ``nobody``.

    'int32-positions'; 'sliced-positions', the first quarter of a buffer's columns, so that the row pitch is not T;
    'transposed-positions', stored (T, 3) and transposed (a single row then is a column of such a buffer);
    'misaligned-positions', which start one element behind an aligned address.
    """
    dtype = torch.int32 if "int32-positions" in options else torch.int64
    tokens = positions.shape[-1]
    if "transposed-positions" in options:
        strides, extent = (1, _ROWS), _ROWS * tokens
    elif "sliced-positions" in options:
        strides, extent = (_WIDER * tokens, 1), _ROWS * _WIDER * tokens
    else:
        strides, extent = (tokens, 1), _ROWS * tokens
    raw = torch.full((extent + 2 * _GUARD_ELEMENTS,), nobody, dtype=dtype, device=positions.device)
    start = _GUARD_ELEMENTS + ("misaligned-positions" in options)
    view = raw.as_strided(positions.shape, strides[-positions.dim() :], start)
    view.copy_(positions)
    return Placed(view, raw.view(torch.uint8).clone())
