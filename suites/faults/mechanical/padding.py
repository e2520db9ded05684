"""Mechanical faults of padding: tokens of a fused call whose slot is -1, which nobody may look up or write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..mutants import right_fused_call
from .kernel import Broken

_CONTRACT = "qwen3.5-norm-rope-gate"
_right = right_fused_call(contract(_CONTRACT))


def looked_up(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor,
    *, eps: float, axis_map: Tensor | None = None, slots: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Rows of the cache are fetched before slots are."""
    _ = cos_sin_cache[positions.long()]
    return _right(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, eps=eps, axis_map=axis_map, slots=slots)


def written(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor,
    *, eps: float, axis_map: Tensor | None = None, slots: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Every row of the keys is stored, whatever its slot."""
    q, key, gate = _right(
        q_gate, k, q_weight, k_weight, cos_sin_cache, positions, eps=eps, axis_map=axis_map, slots=slots
    )
    assert key is not None
    return q, key if slots is None else torch.where((slots == -1)[:, None], torch.zeros_like(key), key), gate


def _padding(name: str, says: str, run: Any, *rows: str) -> Broken:
    return Broken(name, says, run, family="norm_rotate_gate", contract=_CONTRACT, claims=("any-shape",), rows=rows)


PADDING = (
    _padding("padding-looked-up", "the position of padding is looked up before its slot is seen", looked_up, "O051"),
    _padding("padding-written", "rows of padding are written", written),
)
