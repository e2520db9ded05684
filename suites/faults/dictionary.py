"""The dictionary: every fault by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .arithmetic import ARITHMETIC
from .coverage import COVERAGE
from .fault import Fault, Misreading
from .gradients import GRADIENTS
from .norms import NORMS
from .positions import POSITIONS
from .tables import TABLES

MISREADINGS: tuple[Misreading, ...] = (*COVERAGE, *POSITIONS, *TABLES, *ARITHMETIC, *GRADIENTS, *NORMS)
"""The semantic faults, in the order in which a diagnosis tries them."""

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.name: fault for fault in (*(m.fault() for m in MISREADINGS),)})
"""All faults by name."""
