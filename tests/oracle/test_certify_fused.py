"""Certification of the fused contract: exact arithmetic agrees, and no wrong point passes."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from ropecheck.oracle.certify import CertificationError
from ropecheck.oracle.certify_fused import certify_fused
from ropecheck.oracle.certify_fused_vjp import certify_fused_vjp, certify_weight_gradient
from ropecheck.oracle.fused import NormRotation, strict_fused, strict_fused_vjp
from ropecheck.oracle.fused_comparison import FusedPoint, compare_fused, compare_fused_vjp, compare_weight_gradient
from ropecheck.oracle.norm import Norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
engines = pytest.mark.parametrize("engine", ["arb", "mpmath"])


def sample(
    dtype: torch.dtype, norm: Norm | None = None, fma: bool = False, scale: float = 1.0, width: int = 20
) -> tuple[NormRotation, list[FusedPoint]]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(9, 2, width, generator=generator) * scale).to(dtype)
    weight = (torch.randn(width, generator=generator) * 0.1).to(dtype)
    angle = torch.rand(9, 4, generator=generator) * 6.25
    given = NormRotation(x, weight, angle.cos(), angle.sin(), norm or Norm(), fma)
    return given, compare_fused(given, strict_fused(given), samples=40).sample


@engines
@dtypes
@pytest.mark.parametrize("norm", [Norm(), Norm(round_norm=False), Norm(1e-5, 0.0)], ids=str)
@pytest.mark.parametrize("fma", [False, True], ids=["separate", "fma"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_agrees_with_the_oracle(engine: str, dtype: torch.dtype, norm: Norm, fma: bool, scale: float) -> None:
    """Every drawn point and the widest one are certified, rotated channels and tail, subnormal ones too."""
    if engine == "arb":
        pytest.importorskip("flint", reason="python-flint is not installed: mpmath certifies")
    given, points = sample(dtype, norm, fma, scale)
    assert {p.index[2] < 8 for p in points} == {True, False}
    certificate = certify_fused(given, points, using=engine)
    assert (certificate.points, certificate.arithmetic) == (len(points), engine)


def beside(value: float, dtype: torch.dtype, towards: float) -> float:
    return torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(towards, dtype=dtype)).item()


@dtypes
@pytest.mark.parametrize("field", ["low", "high", "strict"])
@pytest.mark.parametrize("direction", [-math.inf, math.inf], ids=["down", "up"])
def test_one_value_off_is_loud(dtype: torch.dtype, field: str, direction: float) -> None:
    """An end of the span, or the strict value, one value off fails and says where."""
    given, points = sample(dtype, Norm(round_norm=False))
    for point in points[10:14]:
        wrong = replace(point, **{field: beside(getattr(point, field), dtype, direction)})
        with pytest.raises(CertificationError, match=re.escape(f"at token, head and channel {point.index}: ")):
            certify_fused(given, [wrong])


def test_another_norm_does_not_certify() -> None:
    """Points of one contract fail under another eps, offset or rounding."""
    given, points = sample(torch.float32, scale=1e-2)
    for norm in (Norm(eps=1.01e-6), Norm(weight_offset=0.0)):
        with pytest.raises(CertificationError):
            certify_fused(replace(given, norm=norm), points)
    given, points = sample(torch.bfloat16)
    with pytest.raises(CertificationError):
        certify_fused(replace(given, norm=Norm(round_norm=False)), points)


def test_rows_without_exact_value_are_not_counted() -> None:
    """Rows with an infinity, a NaN or an overflow are left out of the count, and no other."""
    given, _ = sample(torch.float32)
    given.x[0, 0, 3], given.x[1, 1, 4], given.x[2] = math.inf, math.nan, 1e25
    points = compare_fused(given, strict_fused(given), samples=80).sample
    left_out = [p for p in points if p.index[:2] in ((0, 0), (1, 1), (2, 0), (2, 1))]
    assert left_out
    assert certify_fused(given, points).points == len(points) - len(left_out)


@engines
@dtypes
def test_true_gradients_are_inside(engine: str, dtype: torch.dtype) -> None:
    """The true gradient lies in the span of every drawn point, and a span beside it is loud."""
    if engine == "arb":
        pytest.importorskip("flint", reason="python-flint is not installed: mpmath certifies")
    given, _ = sample(dtype, width=72)
    gradient = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    points = compare_fused_vjp(given, gradient, strict_fused_vjp(given, gradient)[0], samples=40).sample
    assert certify_fused_vjp(given, gradient, points, using=engine).points == len(points)
    off = replace(points[0], low=points[0].high + 1.0, high=points[0].high + 2.0)
    with pytest.raises(CertificationError, match=r"the true gradient .* is outside"):
        certify_fused_vjp(given, gradient, [off], using=engine)


@engines
@dtypes
def test_agrees_with_the_oracle_on_the_gradient_of_the_weight(engine: str, dtype: torch.dtype) -> None:
    """Real arithmetic lies within the bounds of every channel; a span that is moved beside it is loud."""
    if engine == "arb":
        pytest.importorskip("flint", reason="python-flint is not installed: mpmath certifies")
    given, _ = sample(dtype)
    gradient = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    points = compare_weight_gradient(given, gradient, strict_fused_vjp(given, gradient)[1], samples=40).sample
    certificate = certify_weight_gradient(given, gradient, points, using=engine)
    assert (certificate.points, certificate.arithmetic) == (len(points), engine)
    point = points[3]
    moved = replace(point, low=beside(point.high, dtype, math.inf), high=math.inf)
    with pytest.raises(CertificationError, match=f"channel {point.index[2]}: the true gradient of the weight"):
        certify_weight_gradient(given, gradient, [moved], using=engine)
