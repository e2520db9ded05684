"""What the judgement of refusals hands over to families whose call reads a cache: each bad call out of a good one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

BadCall = tuple[Callable[..., tuple[Any, ...]], str]
"""Makes the arguments of the bad call out of those of a good one; the arguments that a refusal may name, by "|"."""


def _of_int32(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=torch.int32, device=t.device)


def _other_dtype(t: Tensor) -> Tensor:
    return t.to(torch.float32 if t.dtype != torch.float32 else torch.half)


def _other_rows(positions: Tensor) -> Tensor:
    """Two rows, which no contract has."""
    row = positions if positions.dim() == 1 else positions[0]
    return torch.stack((row, row))


def _other_kind(positions: Tensor) -> Tensor:
    """Three rows for a contract of one, and one for a contract of three."""
    return positions.expand(3, -1) if positions.dim() == 1 else positions[0]


_CACHE, _POSITIONS = "cos_sin_cache", "positions"
NARROW_FOR_THE_MAP = "cache-of-fewer-lanes-than-the-map"
"""Of a contract with an axis map alone: elsewhere it is a smaller rotary dimension."""

_ROTATE_QK: dict[str, BadCall] = {
    "positions-of-the-other-kind": (lambda q, k, cache, positions: (q, k, cache, _other_kind(positions)), _POSITIONS),
    "q-is-no-tensor": (lambda q, k, cache, positions: (q.tolist(), k, cache, positions), "q"),
    "positions-of-fp32": (lambda q, k, cache, positions: (q, k, cache, positions.float()), _POSITIONS),
    "positions-of-two-rows": (lambda q, k, cache, positions: (q, k, cache, _other_rows(positions)), _POSITIONS),
    "fewer-positions-than-tokens": (lambda q, k, cache, positions: (q, k, cache, positions[..., :-1]), _POSITIONS),
    "more-positions-than-tokens": (lambda q, k, cache, positions: (q[:-1], k[:-1], cache, positions), "positions|q"),
    "positions-of-rank-3": (lambda q, k, cache, positions: (q, k, cache, positions.expand(3, 3, -1)), _POSITIONS),
    "positions-on-another-device": (lambda q, k, cache, positions: (q, k, cache, positions.to("meta")), _POSITIONS),
    "q-of-rank-4": (lambda q, k, cache, positions: (q[None], k, cache, positions), "q"),
    "k-of-rank-2": (lambda q, k, cache, positions: (q, k[:, 0], cache, positions), "k"),
    "q-of-int32": (lambda q, k, cache, positions: (_of_int32(q), _of_int32(k), cache, positions), "q|k"),
    "q-of-fp64": (lambda q, k, cache, positions: (q.double(), k.double(), cache, positions), "q|k"),
    "k-of-another-dtype-than-q": (lambda q, k, cache, positions: (q, _other_dtype(k), cache, positions), "k"),
    "k-of-fewer-tokens-than-q": (lambda q, k, cache, positions: (q, k[:-1], cache, positions), "k"),
    "k-of-narrower-heads-than-q": (lambda q, k, cache, positions: (q, k[..., :-2], cache, positions), "k"),
    "k-on-another-device": (lambda q, k, cache, positions: (q, k.to("meta"), cache, positions), "k"),
    "cache-of-rank-1": (lambda q, k, cache, positions: (q, k, cache[0], positions), _CACHE),
    "cache-of-rank-3": (lambda q, k, cache, positions: (q, k, cache[None], positions), _CACHE),
    "cache-of-fp64": (lambda q, k, cache, positions: (q, k, cache.double(), positions), _CACHE),
    "cache-of-another-dtype": (lambda q, k, cache, positions: (q, k, _other_dtype(cache), positions), _CACHE),
    NARROW_FOR_THE_MAP: (lambda q, k, cache, positions: (q, k, cache[:, :-2], positions), _CACHE),
    "cache-of-odd-width": (lambda q, k, cache, positions: (q, k, cache[:, :-1], positions), _CACHE),
    "cache-wider-than-a-head": (lambda q, k, cache, positions: (q, k, cache.repeat(1, 2), positions), f"{_CACHE}|q"),
    "cache-on-another-device": (lambda q, k, cache, positions: (q, k, cache.to("meta"), positions), _CACHE),
}

BAD_CALLS: Mapping[str, Mapping[str, BadCall]] = MappingProxyType({"rotate_qk": MappingProxyType(_ROTATE_QK)})
"""For each family the bad calls by name. A further family is one more entry."""
