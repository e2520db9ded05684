"""The dictionary: every fault by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .fault import Fault, Misreading
from .positions import POSITIONS

MISREADINGS: tuple[Misreading, ...] = (*POSITIONS,)
"""The semantic faults, in the order in which a diagnosis tries them."""

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in (*(m.fault() for m in MISREADINGS),)})
"""All faults by name."""
