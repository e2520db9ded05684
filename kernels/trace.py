"""The execution trace: which operator, backend and launch configuration really ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from .launch_configuration import LaunchConfiguration
from .native import report_launches_to


@dataclass(frozen=True)
class Launch:
    """One real execution of a rotary operator.

    ``operator`` is the registered name, without its namespace. ``direction`` is ``forward``, or ``backward``
    for every execution that autograd asked for, whatever the order of the derivative. ``configuration`` is
    the launch configuration, fitted to the input, of a Triton kernel, the native library's own description of
    a CUDA kernel, or None for the reference. ``reason`` says why this backend ran.
    """

    operator: str
    backend: str
    direction: str
    device: str
    configuration: LaunchConfiguration | str | None
    reason: str


CALLED_DIRECTLY = "operator called directly"
"""The reason recorded for an operator that was not called through a public function."""

_lock = Lock()
_recorders: list[list[Launch]] = []


@contextmanager
def trace_launches() -> Iterator[list[Launch]]:
    """Yield a list that receives one :class:`Launch` for each execution within the block, in order.

    Executions of every thread of the process are recorded, since autograd runs a backward in a thread of its
    own. An empty input executes nothing and leaves no record. Replays of a CUDA Graph do not pass through the
    trace: a graph's launches are recorded once, when the graph is captured.
    """
    launches: list[Launch] = []
    with _lock:
        _recorders.append(launches)
        if len(_recorders) == 1:
            report_launches_to(_record_native_launch)
    try:
        yield launches
    finally:
        with _lock:
            # By identity: two recorders that hold equal records are still two recorders.
            _recorders[:] = [recorder for recorder in _recorders if recorder is not launches]
            if not _recorders:
                report_launches_to(None)


def record_launch(
    operator: str,
    backend: str,
    direction: str,
    device: str,
    configuration: LaunchConfiguration | str | None,
    reason: str,
) -> None:
    """Add one record to every active trace."""
    if not _recorders:
        return
    launch = Launch(operator, backend, direction, device, configuration, reason)
    with _lock:
        for recorder in _recorders:
            recorder.append(launch)


def _record_native_launch(operator: str, direction: str, device_index: int, configuration: str, reason: str) -> None:
    record_launch(operator, "cuda", direction, f"cuda:{device_index}", configuration or None, reason)
