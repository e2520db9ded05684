"""Qwen3.5's attention input as one fused kernel: RMS norm of each head, partial M-RoPE, the gate copied.

The norm and its rounding, the axis map and the table are transformers' own. The rotation is that of the fused kernels
(SGLang ``fused_qk_gemma_rmsnorm_rope_gate``, vLLM ``fused_qk_rmsnorm_rope_gate``): fp32 with one rounding, where
transformers rotates in the activation dtype with three. Facts: transformers 5.4.0 to 5.24.0, modeling_qwen3_5.
"""

from __future__ import annotations

from ..contract import Contract
from ..frequencies import CosineSine
from ..norm import Norm
from ..pairing import HALF_SPLIT
from ..positions import TextAndImages
from ..recipes import ONE_ROUNDING, ONE_ROUNDING_VJP
from .mrope import sectioned_lanes

QWEN35_NORM_ROPE_GATE = Contract(
    name="qwen3.5-norm-rope-gate",
    summary="Qwen3.5: (1 + w) RMS norm, rounded, then interleaved M-RoPE of half-split pairs, 64 of 256 channels, fp32",
    source="transformers 5.4.0 to 5.24.0, transformers.models.qwen3_5.modeling_qwen3_5",
    family="norm_rotate_gate",
    head_dim=256,
    positions=TextAndImages(),
    frequencies=CosineSine(1e7),
    lanes=sectioned_lanes("interleaved", (11, 11, 10)),
    pairing=HALF_SPLIT,
    forward=ONE_ROUNDING,
    backward=ONE_ROUNDING_VJP,
    norm=Norm(eps=1e-6, weight_offset=1.0, round_norm=True),
)
