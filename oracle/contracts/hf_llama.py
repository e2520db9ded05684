"""Llama as transformers computes it: half-split, table and rotation in the activation dtype, three roundings.

Facts: transformers 4.57.6 to 5.24.0, ``LlamaRotaryEmbedding`` and ``apply_rotary_pos_emb``, with the default
``rope_theta`` 10000 and 128 channels a head.
"""

from __future__ import annotations

from ..contract import Contract, contiguous_lanes
from ..frequencies import CosineSine
from ..pairing import HALF_SPLIT
from ..positions import Sequential
from ..recipes import ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS

HF_LLAMA = Contract(
    name="hf-llama",
    summary="Llama in transformers: half-split pairs, table and rotation in the activation dtype, three roundings",
    source="transformers 4.57.6 to 5.24.0, transformers.models.llama.modeling_llama",
    family="rotate",
    head_dim=128,
    positions=Sequential(),
    frequencies=CosineSine(),
    lanes=contiguous_lanes((128,)),
    pairing=HALF_SPLIT,
    forward=ACTIVATION_DTYPE,
    backward=ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    table_dtype="activation",
)
