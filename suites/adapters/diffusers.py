"""diffusers' own rotation of Qwen-Image as a candidate."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ..candidates import Candidate


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rotary_emb_qwen`` in its complex form, which the released model uses."""
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    table = torch.complex(cos, sin)
    if table.dim() == 2:
        return apply_rotary_emb_qwen(x, table, use_real=False)
    # The vendor takes one table for all samples.
    rows = [apply_rotary_emb_qwen(x[b : b + 1], table[b], use_real=False) for b in range(x.shape[0])]
    return torch.cat(rows) if rows else x.clone()


CANDIDATES = [
    Candidate(
        name="diffusers/apply_rotary_emb_qwen",
        contract="qwen-image",
        run=rotate,
        devices=("cpu", "cuda"),
        provides=("vjp", "strided"),
        unavailable="" if importlib.util.find_spec("diffusers") else "diffusers is not installed",
    )
]
