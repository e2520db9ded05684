"""The GPT-J convention as serving engines compute it: adjacent pairs, one position axis.

Conventions and not one vendor's function, so that nothing is pinned: the pairing that flash-attention calls
``interleaved=True`` and vLLM ``is_neox_style=False``. Its fused kernels rotate in fp32. The unfused kernels of vLLM
and SGLang read a table in the activation dtype and multiply in it; transformers' Cohere rounds the table alone.
"""

from __future__ import annotations

from dataclasses import replace

from ..contract import Contract, contiguous_lanes
from ..frequencies import CosineSine
from ..pairing import ADJACENT
from ..positions import Sequential
from ..recipes import ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS, ONE_ROUNDING, ONE_ROUNDING_VJP

GPTJ = Contract(
    name="gptj",
    summary="GPT-J convention of fused kernels: adjacent pairs, fp32 table and rotation, one rounding each way",
    source="a convention; no vendor function is pinned",
    family="rotate_qk",
    head_dim=128,
    positions=Sequential(),
    frequencies=CosineSine(),
    lanes=contiguous_lanes((128,)),
    pairing=ADJACENT,
    forward=ONE_ROUNDING,
    backward=ONE_ROUNDING_VJP,
)

GPTJ_ROUNDED_TABLE = replace(
    GPTJ,
    name="gptj-rounded-table",
    summary="GPT-J convention on a table in the activation dtype: adjacent pairs, fp32 rotation, one rounding each way",
    table_dtype="activation",
)

GPTJ_ACTIVATION_DTYPE = replace(
    GPTJ,
    name="gptj-activation-dtype",
    summary="GPT-J convention of unfused kernels: adjacent pairs, table and rotation in the activation dtype",
    table_dtype="activation",
    forward=ACTIVATION_DTYPE,
    backward=ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
)
