"""Capturing calls in CUDA graphs, and mending the process where a capture fails.

torch does not clean up behind a capture that CUDA has broken off (a call that synchronises breaks it off): the side
stream stays current, and the allocator and the random generator go on believing in a capture under way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .bare_calls import Outputs
from .candidates import described
from .invocation import CandidateFault
from .surroundings import Surroundings
from .waiting import waiting_refused

POISON = 0xFF
"""Every byte of the memory that :meth:`CudaGraphs.poison` fills: NaN in every floating-point dtype."""

_WARM_UPS = 3
_SMALL, _MOST = 1 << 20, 1 << 31
_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator may keep a reference to them that it does not count."""


@dataclass(frozen=True)
class Recorded:
    """A captured call: the tensors that it writes, and its replay on the current stream."""

    outputs: Outputs
    replay: Callable[[], None]


class CudaGraphs:
    """The graphs of one case, on the current device; those that are to share memory share one pool."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The block works on a stream of its own, between what came before and what comes after it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def warm_up(self, call: Callable[[], Outputs]) -> None:
        """As torch asks for before a capture: a kernel's first launch may load it, which no graph can hold."""
        with self.aside():
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.synchronize()

    def record(self, call: Callable[[], Outputs], *, sharing: bool = False) -> Recorded:
        """Capture ``call``. Raises :class:`CandidateFault` where it raises, or cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        pool = self.pool if sharing else torch.cuda.graph_pool_handle()
        before = Surroundings.now()
        outputs, fault = _captured(graph, pool, self.stream, call)
        changed = before.restore()
        if isinstance(fault, (torch.OutOfMemoryError, MemoryError, KeyboardInterrupt)):
            raise fault
        if fault is not None:
            raise CandidateFault(f"the capture raised {described(fault)}") from None
        if changed:
            raise CandidateFault(f"the capture leaves {changed} changed")
        return Recorded(outputs, graph.replay)

    def poison(self) -> list[Tensor]:
        """The memory that is free, up to a bound, filled with NaN: who still reads it reads NaN, and who still writes
        is seen in it as long as it is held."""
        held = []
        # The allocator keeps what was freed apart by stream: eager calls have one, warm-ups the other.
        for stream in (nullcontext(), self.aside()):
            with stream:
                for size in _free():
                    held.append(torch.full((size,), POISON, dtype=torch.uint8, device="cuda"))
        return held

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


def _free() -> Iterator[int]:
    """Sizes of the free blocks of the current stream outside the pools of graphs: whoever asks for just these gets just
    these, as the allocator gives out the smallest block that is large enough."""
    of_stream = torch.cuda.current_stream().cuda_stream
    left = _MOST
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if (segment["stream"], segment["device"]) != (of_stream, torch.cuda.current_device()):
            continue
        if tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] != "inactive" or size > left:
                continue
            left -= size
            # What is larger comes from segments of another kind.
            small = segment["segment_type"] == "small"
            yield from (_SMALL, size - _SMALL) if small and size > _SMALL else (size,)


def _captured(
    graph: torch.cuda.CUDAGraph, pool: tuple[int, int], stream: torch.cuda.Stream, call: Callable[[], Outputs]
) -> tuple[Outputs, BaseException | None]:
    """(what ``call`` returned, what it or the end of its capture raised)."""
    before = torch.cuda.current_stream()
    outputs: Outputs = ()
    fault: BaseException | None = None
    begun = False
    try:
        with warnings.catch_warnings():
            # An empty input gives an empty graph, of which torch warns.
            warnings.simplefilter("ignore")
            with torch.cuda.graph(graph, pool=pool, stream=stream):  # type: ignore[arg-type]
                begun = True
                try:
                    with waiting_refused():
                        outputs = call()
                except BaseException as error:
                    # Kept until the capture has ended.
                    fault = error
    except RuntimeError as error:
        if not begun:
            raise
        fault = fault or error
        _ABANDONED.append(graph)
        torch.cuda.set_stream(before)
        _mend(pool)
    return outputs, fault


def _mend(pool: tuple[int, int]) -> None:
    """After a capture that CUDA broke off. Where this does not help, :func:`usable` says so."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        # A torch that has told its allocator itself raises here.
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)
    try:
        torch.cuda.synchronize()
        # The generator learns from the end of a capture that none is under way.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
    except RuntimeError:
        return


def usable() -> bool:
    """Whether this process can go on using its GPUs: after an illegal access, or some failed captures, it cannot."""
    try:
        for device in range(torch.cuda.device_count()):
            # A GPU that this process has not touched is not to be given a context of its own.
            if device == torch.cuda.current_device() or torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.rand(1, device="cuda")
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return not torch.cuda.is_current_stream_capturing()
