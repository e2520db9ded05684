"""The repaired conversions of Triton's interpreter, and what upstream's own do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ropecheck.suites.interpreter import bfloat16_to_float32, float32_fma, float32_to_bfloat16

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")

EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def test_up_and_down_again_is_the_identity() -> None:
    """All 65,536 bf16 patterns widen to torch's fp32 value and, NaN apart, come back as they were."""
    wide = bfloat16_to_float32(EVERY_BFLOAT16)
    expected = torch.from_numpy(EVERY_BFLOAT16.view(np.int16).copy()).view(torch.bfloat16).float()
    assert np.array_equal(wide.view(np.uint32), expected.numpy().view(np.uint32))
    back = float32_to_bfloat16(wide)
    number = ~np.isnan(wide)
    assert np.array_equal(back[number], EVERY_BFLOAT16[number])
    assert np.isnan(bfloat16_to_float32(back[~number])).all()


def around_every_midpoint() -> npt.NDArray[np.float32]:
    """fp32 patterns: each bf16, the midpoint behind it, and the fp32 numbers beside both."""
    base = EVERY_BFLOAT16.astype(np.uint32) << 16
    offsets = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF], dtype=np.uint32)
    return (base[:, None] + offsets).reshape(-1).view(np.float32)


def test_rounds_to_nearest_even_around_every_midpoint() -> None:
    """Beside each midpoint of two bf16, overflow and subnormals included, the result is torch's; a NaN stays one."""
    values = around_every_midpoint()
    got = float32_to_bfloat16(values)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert np.array_equal(got[number], expected[number])
    assert np.isnan(bfloat16_to_float32(got[~number])).all()


def test_truncation_is_towards_zero() -> None:
    """With ``truncate`` the low sixteen bits are dropped, of whatever sign the number is."""
    values = around_every_midpoint()
    number = ~np.isnan(values)
    expected = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(float32_to_bfloat16(values, truncate=True)[number], expected[number])


def test_fma_rounds_once() -> None:
    """Against rationals: where the exact sum lies beside a tie of fp32 by less than fp64 holds, and at random."""
    generator = np.random.default_rng(0)
    x, y, z = generator.standard_normal((3, 500)).astype(np.float32)
    # Half of the sums cancel the product's leading bits, which shows the ones that a rounded product would lose.
    z[::2] = -(x * y)[::2]
    tie = np.float32(1 + 2.0**-12)
    x[:6], y[:6], z[:6] = tie, tie, [2.0**-60, -(2.0**-60), 0.0, 2.0**-100, -(2.0**-100), -1.0]
    for a, b, c, got in zip(x, y, z, float32_fma(x, y, z), strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        distance = abs(Fraction(float(got)) - exact)
        neighbours = [np.nextafter(got, np.float32(end)) for end in (-np.inf, np.inf)]
        distances = [abs(Fraction(float(value)) - exact) for value in neighbours]
        assert distance <= min(distances)
        assert distance < min(distances) or int(got.view(np.int32)) % 2 == 0
    special = np.array([np.inf, -np.inf, np.nan, 3e38, -0.0], dtype=np.float32)
    one = np.float32(1)
    assert np.array_equal(float32_fma(special, one, -special), [np.nan, np.nan, np.nan, 0, 0], equal_nan=True)
    assert np.array_equal(float32_fma(special, one + one, one), [np.inf, -np.inf, np.nan, np.inf, 1], equal_nan=True)


CONVERSIONS = """
import json, sys
import torch, triton
import triton.language as tl

if sys.argv[1] == "repaired":
    from ropecheck.suites.interpreter import launched_kernels, repair
    assert repair() and repair()

@triton.jit
def down(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))

@triton.jit
def up(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.float32))

@triton.jit
def double(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a + a)

@triton.jit
def positive(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.where(tl.load(x + i) > 0, 1.0, 0.0))

@triton.jit
def fused(x, y, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.store(y + tl.arange(0, N), tl.fma(a, a, -a * a))

def wrong(kernel, x, expected):
    y = torch.zeros_like(expected)
    kernel[(1,)](x, y, N=x.numel())
    return int(((y != expected) & ~(y.isnan() & expected.isnan())).sum())

every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
normal = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
subnormal = every.isfinite() & (every.abs() < torch.finfo(torch.bfloat16).smallest_normal) & (every != 0)
found = {
    "down": wrong(down, normal, normal.bfloat16()),
    "up": wrong(up, every, every.float()),
    "arithmetic": wrong(double, every, every + every),
    "comparison": wrong(positive, every, (every > 0).float()),
    "subnormal": wrong(up, torch.where(subnormal, every, 0), torch.where(subnormal, every, 0).float()),
    "half": wrong(up, every.half(), every.half().float()),
}
if sys.argv[1] == "repaired":
    # What the rounding of a product loses is all that is left, and fp64 holds it.
    exact = normal.double() ** 2 - (normal * normal).double()
    found["fma"] = wrong(fused, normal, exact.float())
    found["launched"] = launched_kernels()
print(json.dumps(found))
"""


def converted(how: str, folder: Path) -> dict[str, Any]:
    """Counts of wrong elements by operation, in a process of its own: the repair cannot be taken back."""
    script = folder / "conversions.py"
    script.write_text(CONVERSIONS)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(script), how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    counts: dict[str, Any] = json.loads(run.stdout)
    return counts


@needs_triton
def test_repaired_interpreter_is_exact(tmp_path: Path) -> None:
    """In kernels every bf16 conversion, sum and comparison is torch's, an fma rounds once, launches are recorded."""
    counts = converted("repaired", tmp_path)
    assert counts.pop("launched") == ["down", "up", "double", "positive", "up", "up", "fused"]
    assert counts == dict.fromkeys(("down", "up", "arithmetic", "comparison", "subnormal", "half", "fma"), 0)


@needs_triton
def test_upstream_still_needs_the_repair(tmp_path: Path) -> None:
    """The installed Triton truncates fp32 to bf16, mishandles subnormal bf16 and computes with raw integers."""
    counts = converted("upstream", tmp_path)
    done = "upstream no longer needs the repair"
    assert counts["half"] == 0
    assert any(counts[name] for name in ("down", "subnormal", "arithmetic", "comparison")), done
    # About half of all values lie nearer to the bf16 above than to the one below.
    assert 0.4 < counts["down"] / (1 << 14) < 0.6, f"{done} of rounding: {counts}"
    assert counts["subnormal"] > 0, f"{done} of subnormal numbers: {counts}"
    assert counts["arithmetic"] > 0, f"{done} of arithmetic: {counts}"
    assert counts["comparison"] > 0, f"{done} of comparisons: {counts}"
