"""What we ship: production rotary kernels, their torch reference, registration and backend choice.

Importing this package needs torch alone; triton is imported when a Triton operator first runs.
"""

from .backends import interpreted_launches
from .launch_configuration import LAUNCH_CONFIGURATIONS, LaunchConfiguration, forced_configuration
from .multi_axis_rope import multi_axis_rope
from .trace import Launch, trace_launches

__all__ = [
    "LAUNCH_CONFIGURATIONS",
    "Launch",
    "LaunchConfiguration",
    "forced_configuration",
    "interpreted_launches",
    "multi_axis_rope",
    "trace_launches",
]
