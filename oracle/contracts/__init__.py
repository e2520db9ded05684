"""The contracts by name. A new one is a small module here and one entry of :data:`CONTRACTS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..contract import Contract
from .gptj import GPTJ, GPTJ_ACTIVATION_DTYPE, GPTJ_ROUNDED_TABLE
from .hf_llama import HF_LLAMA
from .hf_vision_2d import HF_VISION_2D
from .mrope import MROPE
from .neox import NEOX
from .qwen35_norm_rope_gate import QWEN35_NORM_ROPE_GATE
from .qwen_image import QWEN_IMAGE

_ALL = (
    QWEN_IMAGE, HF_LLAMA, HF_VISION_2D, NEOX, GPTJ, GPTJ_ROUNDED_TABLE, GPTJ_ACTIVATION_DTYPE, *MROPE,
    QWEN35_NORM_ROPE_GATE,
)  # fmt: skip

CONTRACTS: Mapping[str, Contract] = MappingProxyType({c.name: c for c in _ALL})


def contract(name: str) -> Contract:
    """The contract called ``name``. Raises ValueError, listing the known names, for any other."""
    try:
        return CONTRACTS[name]
    except KeyError:
        raise ValueError(f"unknown contract {name!r}; known contracts are {', '.join(sorted(CONTRACTS))}") from None
