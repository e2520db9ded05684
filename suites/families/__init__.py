"""The families by name. A new one is a class here and one entry of :data:`FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .expected import Expected, ExpectedRotation, Held, shown
from .family import Call, Family, Keywords, Wanted, heads_of_q
from .norm_rotate_gate import NormRotateGate
from .rotate import Rotate, RotatePair
from .rotate_qk import RotateQK

FAMILIES: Mapping[str, type[Family]] = MappingProxyType(
    {family.name: family for family in (Rotate, RotatePair, RotateQK, NormRotateGate)}
)
"""The call signatures that a candidate may have."""

__all__ = [
    "FAMILIES", "Call", "Expected", "ExpectedRotation", "Family", "Held", "Keywords", "NormRotateGate", "Rotate",
    "RotatePair", "RotateQK", "Wanted", "heads_of_q", "shown",
]  # fmt: skip
