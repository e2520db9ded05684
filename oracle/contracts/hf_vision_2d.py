"""The vision tower of Qwen2-VL in transformers: half-split, rows then columns, fp32, one rounding each way.

Facts: transformers 4.57.6 to 5.24.0, ``Qwen2VLVisionRotaryEmbedding`` (before 5.18.0 ``VisionRotaryEmbedding``)
and ``apply_rotary_pos_emb_vision``. Both axes use the frequencies of half a head: 80 channels, 40 for each axis.
"""

from __future__ import annotations

from ..contract import Contract, contiguous_lanes
from ..frequencies import CosineSine
from ..pairing import HALF_SPLIT
from ..positions import Grid2D
from ..recipes import ONE_ROUNDING, ONE_ROUNDING_VJP_ONTO_ZEROS

HF_VISION_2D = Contract(
    name="hf-vision-2d",
    summary="Qwen2-VL vision tower in transformers: half-split pairs, (row, column) grid, fp32, one rounding",
    source="transformers 4.57.6 to 5.24.0, transformers.models.qwen2_vl.modeling_qwen2_vl",
    family="rotate",
    head_dim=80,
    positions=Grid2D(),
    frequencies=CosineSine(),
    lanes=contiguous_lanes((40, 40)),
    pairing=HALF_SPLIT,
    forward=ONE_ROUNDING,
    backward=ONE_ROUNDING_VJP_ONTO_ZEROS,
)
