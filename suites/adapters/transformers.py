"""transformers' own rotations of Llama and of Qwen2-VL's vision tower as candidates."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..candidates import Candidate


def rotate_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rotary_pos_emb`` on [B, S, H, D]."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (_full_width(t, x) for t in (cos, sin))
    rotated: Tensor = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]
    return rotated


def rotate_vision(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rotary_pos_emb_vision``, which broadcasts its table over heads, on [B, S, H, D]."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    cos, sin = (_full_width(t, x) for t in (cos, sin))
    rotated: Tensor = apply_rotary_pos_emb_vision(x, x, cos, sin)[0]
    return rotated


def _full_width(table: Tensor, x: Tensor) -> Tensor:
    """[B, S, R] from [S, R / 2] or [B, S, R / 2]: the vendor's table repeats its half."""
    return torch.cat((table, table), dim=-1).expand(x.shape[0], -1, -1)


_UNAVAILABLE = "" if importlib.util.find_spec("transformers") else "transformers is not installed"

CANDIDATES = [
    Candidate(
        name="transformers/llama-apply_rotary_pos_emb",
        contract="hf-llama",
        run=rotate_llama,
        devices=("cpu", "cuda"),
        provides=("vjp", "strided"),
        unavailable=_UNAVAILABLE,
    ),
    Candidate(
        name="transformers/apply_rotary_pos_emb_vision",
        contract="hf-vision-2d",
        run=rotate_vision,
        devices=("cpu", "cuda"),
        provides=("vjp", "strided"),
        unavailable=_UNAVAILABLE,
    ),
]
