"""The dictionary: every fault by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .arithmetic import ARITHMETIC
from .coverage import COVERAGE
from .equivalents import EQUIVALENTS
from .fault import Fault, Misreading
from .gradients import GRADIENTS
from .mechanical.addressing import ADDRESSING
from .mechanical.backwards import BACKWARDS
from .mechanical.compiling import COMPILING
from .mechanical.differentiation import DIFFERENTIATION
from .mechanical.fused_integers import FUSED_INTEGERS
from .mechanical.given_tables import GIVEN_TABLES
from .mechanical.kernel import Broken
from .mechanical.launching import LAUNCHING
from .mechanical.on_a_gpu import ON_A_GPU
from .mechanical.padding import PADDING
from .mechanical.registration import REGISTRATION
from .mechanical.weights import WEIGHTS
from .mechanical.writing import WRITING
from .norms import FUSED, NORMS
from .positions import POSITIONS
from .tables import TABLES

MISREADINGS: tuple[Misreading, ...] = (*COVERAGE, *POSITIONS, *TABLES, *ARITHMETIC, *GRADIENTS, *NORMS)
"""The semantic faults, in the order in which a diagnosis tries them."""

_STAGES = (POSITIONS, TABLES, (*ARITHMETIC, *NORMS), (*COVERAGE, *GRADIENTS))
_STAGE_OF = {fault.name: number for number, faults in enumerate(_STAGES) for fault in faults}


def stage(fault: Misreading) -> int:
    """When a fault strikes, where several do: where tokens stand, what is read, how it is combined, what is stored."""
    return _STAGE_OF[fault.name]


_MECHANICAL: tuple[Broken, ...] = (
    *ADDRESSING, *GIVEN_TABLES, *WRITING, *LAUNCHING, *PADDING, *FUSED_INTEGERS, *BACKWARDS, *DIFFERENTIATION, *WEIGHTS,
    *REGISTRATION, *COMPILING, *ON_A_GPU,
)  # fmt: skip

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            *(of.fault() for of in (*MISREADINGS, *FUSED)),
            *(of.fault() for of in _MECHANICAL),
            *EQUIVALENTS,
        )
    }
)
"""All faults by name."""
