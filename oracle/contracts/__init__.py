"""The contracts by name. A new one is a small module here and one entry of :data:`CONTRACTS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..contract import Contract
from .hf_llama import HF_LLAMA
from .hf_vision_2d import HF_VISION_2D
from .neox import NEOX
from .qwen_image import QWEN_IMAGE

CONTRACTS: Mapping[str, Contract] = MappingProxyType({c.name: c for c in (QWEN_IMAGE, HF_LLAMA, HF_VISION_2D, NEOX)})


def contract(name: str) -> Contract:
    """The contract called ``name``. Raises ValueError, listing the known names, for any other."""
    try:
        return CONTRACTS[name]
    except KeyError:
        raise ValueError(f"unknown contract {name!r}; known contracts are {', '.join(sorted(CONTRACTS))}") from None
