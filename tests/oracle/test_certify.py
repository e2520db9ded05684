"""Certification: both exact arithmetics agree with the oracle, and neither lets a wrong point pass."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from ropecheck.oracle.certify import CertificationError, arithmetic, certify
from ropecheck.oracle.pairing import HALF_SPLIT
from ropecheck.oracle.recipes import (
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    Recipe,
)
from ropecheck.oracle.rotation import Point, Rotation, compare, rotate_strict

RECIPES = [
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
engines = pytest.mark.parametrize("engine", ["arb", "mpmath"])


def points(recipe: Recipe, dtype: torch.dtype, scale: float = 1.0, special: bool = False) -> list[Point]:
    """A sample as judgements draw it, of [2, 8, 4, 32] with random x and angles."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 8, 4, 32, generator=generator) * scale).to(dtype)
    if special:
        values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max]).to(dtype)
        x[:, ::2] = values[torch.randint(6, (2, 4, 4, 32), generator=generator)]
    angle = torch.rand(2, 8, 16, generator=generator) * 6.25
    table = torch.float32 if recipe.name.startswith("fp32") else dtype
    rotation = Rotation(x, angle.cos().to(table), angle.sin().to(table), HALF_SPLIT, recipe)
    return compare(rotation, rotate_strict(rotation)).sample


def test_arithmetic_is_named() -> None:
    """The arithmetic in use is one of the two, and the certificate names the one that was used."""
    assert arithmetic() in ("arb", "mpmath")
    assert certify(ONE_ROUNDING, [], torch.float32).arithmetic == arithmetic()
    assert certify(ONE_ROUNDING, [], torch.float32, using="mpmath").arithmetic == "mpmath"


@engines
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_oracle(recipe: Recipe, dtype: torch.dtype, engine: str) -> None:
    """A case's sample is at least 256 points, each of which is certified, as are points of extreme magnitude."""
    if engine == "arb":
        pytest.importorskip("flint", reason="python-flint is not installed: mpmath certifies")
    sample = points(recipe, dtype)
    assert len(sample) >= 256
    for scale in (torch.finfo(dtype).tiny, torch.finfo(dtype).max / 8):
        sample += [p for p in points(recipe, dtype, scale)[:60] if math.isfinite(p.x0) and math.isfinite(p.x1)]
    certificate = certify(recipe, sample, dtype, using=engine)
    assert (certificate.points, certificate.arithmetic) == (len(sample), engine)


def beside(value: float, dtype: torch.dtype, towards: float) -> float:
    return torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(towards, dtype=dtype)).item()


@engines
@pytest.mark.parametrize("field", ["low", "high", "strict"])
@pytest.mark.parametrize("direction", [-math.inf, math.inf], ids=["down", "up"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_value_off_is_loud(dtype: torch.dtype, field: str, direction: float, engine: str) -> None:
    """An end of the span, or the strict value, one value off in either direction fails and says for which numbers."""
    if engine == "arb":
        pytest.importorskip("flint", reason="python-flint is not installed: mpmath certifies")
    sample = points(ONE_ROUNDING, dtype)[:20]
    point = sample[10]
    wrong = replace(point, **{field: beside(getattr(point, field), dtype, direction)})
    said = f"for {point.output} of x0={point.x0.hex()} x1={point.x1.hex()} c={point.c.hex()} s={point.s.hex()}"
    with pytest.raises(CertificationError, match=re.escape(said)):
        certify(ONE_ROUNDING, [*sample[:10], wrong, *sample[11:]], dtype, using=engine)


def test_the_sign_of_a_zero_is_certified() -> None:
    """A strict -0 where the recipe gives +0 fails."""
    point = Point((0, 0, 0, 0), 0, "y0", 1.0, 1.0, 1.0, 1.0, low=0.0, high=0.0, strict=0.0, got=0.0, outside_by=0)
    assert certify(ONE_ROUNDING, [point], torch.float32).points == 1
    for field in ("low", "high", "strict"):
        with pytest.raises(CertificationError, match="recipe 'fp32, one rounding'"):
            certify(ONE_ROUNDING, [replace(point, **{field: -0.0})], torch.float32)


def test_another_recipe_does_not_certify() -> None:
    """Points of one recipe fail under the other, whose roundings differ."""
    with pytest.raises(CertificationError, match="activation dtype, three roundings"):
        certify(ACTIVATION_DTYPE, points(ONE_ROUNDING, torch.float16), torch.float16)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_points_without_exact_value_are_not_counted(recipe: Recipe) -> None:
    """Points with an infinite or NaN input are left out of the count; all others, overflowing ones too, are in it."""
    sample = points(recipe, torch.float32, special=True)
    finite = [p for p in sample if math.isfinite(p.x0) and math.isfinite(p.x1)]
    assert 0 < len(finite) < len(sample)
    assert any(abs(p.x0) == torch.finfo(torch.float32).max for p in finite)
    assert certify(recipe, sample, torch.float32).points == len(finite)


def test_an_unknown_output_is_refused() -> None:
    """A point of an output that the recipe does not have is a ValueError and not a pass."""
    point = replace(points(ONE_ROUNDING, torch.float32)[0], output="y2")
    with pytest.raises(ValueError, match="recipe 'fp32, one rounding' has no output 'y2'"):
        certify(ONE_ROUNDING, [point], torch.float32)
