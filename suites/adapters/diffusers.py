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
        rotated: Tensor = apply_rotary_emb_qwen(x, table, use_real=False)
        return rotated
    # The vendor takes one table for all samples. Not x[b]: the backward of a slice adds zeros, which clears -0.
    rows = zip(torch.split(x, 1), table, strict=True)
    return torch.cat([apply_rotary_emb_qwen(row, t, use_real=False) for row, t in rows])


CANDIDATES = [
    Candidate(
        name="diffusers/apply_rotary_emb_qwen",
        contract="qwen-image",
        run=rotate,
        devices=("cpu", "cuda"),
        provides=("vjp",),
        unavailable="" if importlib.util.find_spec("diffusers") else "diffusers is not installed",
    )
]
