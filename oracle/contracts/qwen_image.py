"""Qwen-Image: adjacent pairs on frame, height and width, complex rotation in fp32, one rounding each way.

Facts: diffusers 0.35.0 to 0.42.1, ``QwenEmbedRope`` and ``apply_rotary_emb_qwen``; the bytes are the same in all
twelve releases.
"""

from __future__ import annotations

from ..contract import Contract, contiguous_lanes
from ..frequencies import PolarRows
from ..pairing import ADJACENT
from ..positions import CentredGrid
from ..recipes import ONE_ROUNDING, ONE_ROUNDING_VJP

QWEN_IMAGE = Contract(
    name="qwen-image",
    summary="Qwen-Image: adjacent pairs, centred (frame, height, width) grid, fp32 rotation, one rounding",
    source="diffusers 0.35.0 to 0.42.1, diffusers.models.transformers.transformer_qwenimage",
    family="rotate",
    head_dim=128,
    positions=CentredGrid(),
    frequencies=PolarRows(),
    lanes=contiguous_lanes((16, 56, 56)),
    pairing=ADJACENT,
    forward=ONE_ROUNDING,
    backward=ONE_ROUNDING_VJP,
)
