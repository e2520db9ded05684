"""Does a call wait for the GPU? Work that is queued before it must still be running when the call returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_CYCLES = (1 << 22, 1 << 26, 1 << 31)
"""Of the GPU's clock, for which it is kept busy: about 2 ms, 30 ms and a second."""

Busy = Callable[[int], Callable[[], bool]]
"""Queues work of so many cycles, and returns a function that says whether it is done."""


def keep_busy(cycles: int) -> Callable[[], bool]:
    """Queue ``cycles`` of idle turning on the current stream."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    done.record()
    return done.query


def waits(call: Callable[[], object], busy: Busy = keep_busy) -> bool:
    """Whether ``call`` returns only when the GPU is done with what was queued before.

    A call that is merely slow outlasts little work but not much, and is told by that from one that waits.
    """
    for cycles in _CYCLES:
        done = busy(cycles)
        call()
        if not done():
            return False
    return True


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Within the block torch raises RuntimeError where one of its operations would wait for the GPU.

    Only those that torch knows of: ``item()``, a copy to or from memory of the CPU, a size that depends on values.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
