"""What we ship: production rotary kernels, their torch reference, registration and backend choice.

Importing this package needs torch alone: it loads the native library and imports triton where they are present,
and keeps the reason where they cannot be used.
"""

from .backends import interpreted_launches
from .launch_configuration import LAUNCH_CONFIGURATIONS, LaunchConfiguration, forced_configuration
from .multi_axis_rope import multi_axis_rope
from .multi_axis_rope_pair import multi_axis_rope_pair
from .native import NATIVE
from .trace import Launch, trace_launches

__all__ = [
    "LAUNCH_CONFIGURATIONS",
    "NATIVE",
    "Launch",
    "LaunchConfiguration",
    "forced_configuration",
    "interpreted_launches",
    "multi_axis_rope",
    "multi_axis_rope_pair",
    "trace_launches",
]
