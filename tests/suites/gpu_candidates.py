"""Candidates for the judgements that need a GPU: right ones, and ones that are wrong where only a GPU shows it.

The contract is qwen-image. Those that are made of torch operations alone also run on a CPU.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropecheck.kernels import multi_axis_rope
from ropecheck.suites import Candidate
from ropecheck.suites.faults.mechanical.on_a_gpu import (
    LengthOfTheEagerCall,
    OutputOfTheFirstCall,
    TableOfTheFirstCall,
)


@triton.jit
def head_of_a_token(x, cos, sin, y, heads, LANES: tl.constexpr):
    """Contiguous operands, a program for each head of a token; the tables per token."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    first = row * 2 * LANES + 2 * lane
    x0, x1 = tl.load(x + first).to(tl.float32), tl.load(x + first + 1).to(tl.float32)
    c = tl.load(cos + row // heads * LANES + lane)
    s = tl.load(sin + row // heads * LANES + lane)
    tl.store(y + first, (x0 * c - x1 * s).to(y.dtype.element_ty))
    tl.store(y + first + 1, (x1 * c + x0 * s).to(y.dtype.element_ty))


@triton.jit
def far_outside(y):
    tl.store(y + 4398046511104, tl.load(y))


def launched(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """On whichever GPU is current."""
    batch, length, heads, _ = x.shape
    y = torch.empty_like(x)
    cos, sin = (t.expand(batch, length, -1).contiguous() for t in (cos, sin))
    if x.numel():
        head_of_a_token[(batch * length * heads,)](x, cos, sin, y, heads, LANES=cos.shape[-1], enable_fp_fusion=False)
    return y


def guarded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if len({t.device for t in (x, cos, sin)}) > 1:
        raise ValueError("x, cos and sin must lie on one device")
    with torch.cuda.device(x.device):
        return launched(x, cos, sin)


def illegal_in_decode(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With one token the kernel writes far outside of its output."""
    y = launched(x, cos, sin)
    if x.shape[1] == 1:
        far_outside[(1,)](y)
    return y


def asking_for_ten_terabytes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    torch.empty(10 * 2**40, dtype=torch.uint8, device=x.device)
    return launched(x, cos, sin)


def composed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Plain torch, without a claim to sizes or strides."""
    x0, x1 = x[..., ::2].float(), x[..., 1::2].float()
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


class ScratchOfTheLastEagerCall:
    """Each eager call makes scratch memory anew; a captured one uses the last eager call's, which is then freed."""

    def __init__(self) -> None:
        self.ones: Tensor | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.ones is None or not torch.cuda.is_current_stream_capturing():
            self.ones = torch.ones(x.shape, dtype=torch.float32, device=x.device)
        return composed(x, cos, sin) * self.ones.to(x.dtype)


def reading_the_table_on_the_host(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Looks whether there is anything to rotate."""
    return x.clone() if bool((sin == 0).all()) else composed(x, cos, sin)


def synchronising(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = composed(x, cos, sin)
    torch.cuda.synchronize()
    return y


def without_copies(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return multi_axis_rope(x, cos, sin, backend="triton")


def contiguous_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return without_copies(x.contiguous(), cos, sin)


def cloned_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return without_copies(x.clone(), cos, sin)


def by_way_of_the_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return without_copies(x, cos.cpu().to(x.device), sin)


def waiting_for_the_gpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = without_copies(x, cos, sin)
    torch.cuda.synchronize()
    return y


def _candidate(name: str, run: Callable[..., Any], *claims: str, devices: tuple[str, ...] = ("cuda",)) -> Candidate:
    return Candidate(name, "qwen-image", run, devices, provides=claims)


CANDIDATES = [
    _candidate("right/launched", guarded, "graph", "multi-device"),
    _candidate("right/composed", composed, "graph", "vjp", "multi-device", devices=("cpu", "cuda")),
    _candidate("right/without-copies", without_copies, "no-copy", "strided"),
    _candidate("wrong/illegal-in-decode", illegal_in_decode),
    _candidate("wrong/ten-terabytes", asking_for_ten_terabytes),
    _candidate("wrong/output-by-pointer", OutputOfTheFirstCall(), "graph", devices=("cpu", "cuda")),
    _candidate("wrong/table-by-pointer", TableOfTheFirstCall(), "graph", devices=("cpu", "cuda")),
    _candidate("wrong/length-of-the-last-eager-call", LengthOfTheEagerCall(), "graph", devices=("cpu", "cuda")),
    _candidate("wrong/scratch-of-the-last-eager-call", ScratchOfTheLastEagerCall(), "graph"),
    _candidate("wrong/table-on-the-host", reading_the_table_on_the_host, "graph", devices=("cpu", "cuda")),
    _candidate("wrong/synchronising", synchronising, "graph"),
    _candidate("wrong/contiguous-first", contiguous_first, "no-copy", "strided"),
    _candidate("wrong/cloned-first", cloned_first, "no-copy", "strided"),
    _candidate("wrong/by-way-of-the-cpu", by_way_of_the_cpu, "no-copy", "strided"),
    _candidate("wrong/waiting-for-the-gpu", waiting_for_the_gpu, "no-copy", "strided"),
    _candidate("wrong/no-device-guard", launched, "multi-device"),
]
