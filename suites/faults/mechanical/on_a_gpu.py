"""Mechanical faults that only a GPU shows: of graphs, streams, devices, and memory that a small machine has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import Broken
from .rotations import adjacent


class TableOfTheFirstCall:
    """A copy of the table for each address: a graph that was captured with it replays old values."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, torch.Size], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        place = cos.data_ptr(), cos.shape
        if place not in self.of:
            # With the table, so that its address is not another's one day.
            self.of[place] = cos.clone(), sin.clone(), cos
        return adjacent(x, *self.of[place][:2])


class OutputOfTheFirstCall:
    """An output for each address of x: what is captured computes nothing."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        place = x.data_ptr(), x.shape
        if place not in self.of:
            self.of[place] = adjacent(x, cos, sin), x
        return self.of[place][0]


class LengthOfTheEagerCall:
    """Launches are planned in eager calls alone: a capture rotates as many tokens as the call before it."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            self.length = x.shape[1]
        y, n = x.clone(), min(self.length, x.shape[1])
        y[:, :n] = adjacent(x[:, :n], cos[..., :n, :], sin[..., :n, :])
        return y


class WorkspaceOfTheEagerCall:
    """A workspace is allocated outside of graphs, and again as soon as a larger one is needed."""

    def __init__(self) -> None:
        self.workspace: Tensor | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.workspace is None or self.workspace.numel() < x.numel():
            self.workspace = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        held = self.workspace[: x.numel()].view(x.shape)
        held.copy_(adjacent(x, cos, sin))
        return held.clone()


def on_the_default_stream(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Whichever stream is current."""
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        return adjacent(x, cos, sin)


def on_the_current_device(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The output is allocated where the process happens to be, and not where x is."""
    y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    return y.copy_(adjacent(x, cos, sin))


def waiting_for_the_gpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """How far the positions reach is read back at every call."""
    return adjacent(x, cos, sin) if float(cos.max()) <= 2 else x.clone()


def raising_in_a_capture(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A launch is checked by waiting for it, which a capture forbids."""
    y = adjacent(x, cos, sin)
    torch.cuda.synchronize()
    return y


def _gpu(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, device="cuda", **more)


_GRAPH: dict[str, Any] = {"claims": ("graph",)}

ON_A_GPU = (
    _gpu("replayed-with-an-old-table", "a replayed graph rotates by the table of its capture", TableOfTheFirstCall,
         "O103", "O105", stateful=True, **_GRAPH),
    _gpu("replayed-without-computing", "a replayed graph computes nothing", OutputOfTheFirstCall, "O100",
         stateful=True, **_GRAPH),
    _gpu("replayed-with-an-old-length", "a replayed graph rotates as many tokens as the eager call before it",
         LengthOfTheEagerCall, "O104", stateful=True, **_GRAPH),
    _gpu("workspace-outgrown", "a larger call frees the workspace that a captured graph writes into",
         WorkspaceOfTheEagerCall, "O103", stateful=True, **_GRAPH),
    _gpu("raising-in-a-capture", "a launch is checked by waiting for it, which a capture forbids",
         raising_in_a_capture, **_GRAPH),
    _gpu("default-stream-assumed", "work is queued on the default stream, whichever is current",
         on_the_default_stream, "O106", claims=("multi-device",)),
    _gpu("current-device-assumed", "the output is allocated on the current device", on_the_current_device, "O106",
         "O107", claims=("multi-device",)),
    _gpu("waiting-for-the-gpu", "a value is read back from the GPU at every call", waiting_for_the_gpu, "O074",
         claims=("no-copy",)),
)  # fmt: skip
