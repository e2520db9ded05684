"""The GPT-NeoX convention as fused kernels compute it: half-split, one position axis, fp32, one rounding each way.

A convention and not one vendor's function, so that nothing is pinned: the pairing that flash-attention calls
``interleaved=False`` and vLLM ``is_neox_style=True``, on an fp32 table.
"""

from __future__ import annotations

from ..contract import Contract, contiguous_lanes
from ..frequencies import CosineSine
from ..pairing import HALF_SPLIT
from ..positions import Sequential
from ..recipes import ONE_ROUNDING, ONE_ROUNDING_VJP

NEOX = Contract(
    name="neox",
    summary="GPT-NeoX convention of fused kernels: half-split pairs, fp32 table and rotation, one rounding each way",
    source="a convention; no vendor function is pinned",
    family="rotate",
    head_dim=128,
    positions=Sequential(),
    frequencies=CosineSine(),
    lanes=contiguous_lanes((128,)),
    pairing=HALF_SPLIT,
    forward=ONE_ROUNDING,
    backward=ONE_ROUNDING_VJP,
)
