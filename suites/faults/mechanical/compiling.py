"""Mechanical faults of machine code: Triton kernels whose every byte is right, and whose compiled code is not.

On a CPU they are interpreted, and compiled in another process that loads this module again: there alone they are wrong.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...candidates import Candidate
from ...interpreter import interpreting, repair
from .kernel import Broken

_INTERPRETED_ROWS = 4096
"""The most rows that an interpreted program takes, whatever a fault says: each costs milliseconds."""


@dataclass(frozen=True)
class Launched:
    """``run(x, cos, sin) -> y`` by the kernel of this name: all contiguous, x [B, S, H, D], tables [.., S, D / 2].

    A block is of so many ``rows``, a row being one head of one token. ``arguments(lanes)`` are what the kernel takes
    besides.
    """

    kernel: str
    rows: int = 8
    warps: int = 1
    contracting: bool = False
    arguments: Callable[[int], tuple[object, ...]] = field(default=lambda lanes: ())

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kernel = getattr(_kernels(), self.kernel)
        y, lanes = torch.empty_like(x), cos.shape[-1]
        rows, tables = x.numel() // x.shape[-1], cos.numel() // lanes
        block = min(_INTERPRETED_ROWS, 1 << max(0, rows - 1).bit_length()) if interpreting() else self.rows
        kernel[(-(-rows // block),)](
            x, cos, sin, y, rows, tables, x.shape[2], *self.arguments(lanes), block, lanes,
            num_warps=self.warps, enable_fp_fusion=self.contracting,
        )  # fmt: skip
        return y


@functools.cache
def _kernels() -> Any:
    if interpreting():
        repair()
    from . import triton_kernels

    return triton_kernels


def _unavailable() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return "" if interpreting() else "Triton compiles in this process: on a CPU it has to interpret"


@dataclass(frozen=True)
class _Compiled(Broken):
    """A fault whose candidate can be loaded again, by the process that compiles it."""

    def _candidate(self) -> Candidate:
        return replace(super()._candidate(), unavailable=_unavailable(), origin=f"{__name__}:CANDIDATES")


def _compiled(name: str, says: str, run: Launched, function: str, *rows: str, **more: Any) -> Broken:
    return _Compiled(name, says, run, rows=rows, **{"contract": "neox", "more": {"kernels": (function,)}, **more})


_STRICT: dict[str, Any] = {"claims": ("strict",)}

COMPILING = (
    _compiled("contracted-by-the-compiler", "strict is claimed, and the compiler is left to contract products",
              Launched("halves", contracting=True), "rotate_halves", **_STRICT),
    _compiled("flushing-in-machine-code", "a factor of one is an approximate power of two, which flushes subnormal "
              "numbers", Launched("scaled", arguments=lambda lanes: (0.0,)), "rotate_scaled", **_STRICT),
    _compiled("alignment-not-told", "the compiler is not told that rows are aligned, and moves two bytes at a time",
              Launched("halves_anywhere"), "rotate_halves"),
    _compiled("width-not-told", "the compiler is not told the width of a head, and moves two bytes at a time",
              Launched("by_width", arguments=lambda lanes: (lanes,)), "rotate_by_width"),
    _compiled("block-smaller-than-its-threads", "a block has fewer elements than its threads could move at once",
              Launched("halves", rows=1, warps=4), "rotate_halves"),
    _compiled("members-moved-one-by-one", "neighbouring channels are moved one by one", Launched("neighbours"),
              "rotate_neighbours", contract="qwen-image"),
    _compiled("registers-spilled", "a block does not fit into the registers of its threads",
              Launched("halves", rows=64), "rotate_halves"),
)  # fmt: skip

CANDIDATES = [fault.fault().candidate() for fault in COMPILING]
"""What the process that compiles finds by a candidate's origin."""
