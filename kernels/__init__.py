"""What we ship: production rotary kernels, their torch reference, registration and backend choice.

Importing this package needs torch alone: it loads the native library and imports triton where they are present,
and keeps the reason where they cannot be used.
"""

from .axis_maps import contiguous_axis_map, ernie_axis_map, interleaved_axis_map, round_robin_axis_map
from .backends import interpreted_launches
from .launch_configuration import (
    LAUNCH_CONFIGURATIONS,
    NORM_LAUNCH_CONFIGURATIONS,
    LaunchConfiguration,
    forced_configuration,
)
from .multi_axis_rope import multi_axis_rope
from .multi_axis_rope_pair import multi_axis_rope_pair
from .native import NATIVE
from .qk_norm_rope_gate import qk_norm_rope_gate
from .trace import Launch, trace_launches

__all__ = [
    "LAUNCH_CONFIGURATIONS",
    "NATIVE",
    "NORM_LAUNCH_CONFIGURATIONS",
    "Launch",
    "LaunchConfiguration",
    "contiguous_axis_map",
    "ernie_axis_map",
    "forced_configuration",
    "interleaved_axis_map",
    "interpreted_launches",
    "multi_axis_rope",
    "multi_axis_rope_pair",
    "qk_norm_rope_gate",
    "round_robin_axis_map",
    "trace_launches",
]
