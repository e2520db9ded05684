"""The laws' bounds: they hold for every recipe, and are no wider than a few times what roundings do at worst."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of, same
from ropecheck.oracle.laws import JUDGED_IN_FP64, PairError, pair_error, scales_exactly, tables_of
from ropecheck.oracle.pairing import ADJACENT
from ropecheck.oracle.recipes import (
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    Recipe,
)
from ropecheck.oracle.rotation import Rotation, rotate_strict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECIPES = (ONE_ROUNDING, ONE_ROUNDING_VJP, ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS)
# 64 rows of 64 lanes: angles that are exact in fp64, and so is the sum of two.
GENERATOR = torch.Generator().manual_seed(0)
A, B = (torch.randint(1 << 30, (64, 64), generator=GENERATOR).double() / 2**12 for _ in range(2))


def table_dtype(recipe: Recipe, dtype: torch.dtype) -> torch.dtype:
    return dtype if recipe.steps[0].dtype == "activation" else torch.float32


def random_x(dtype: torch.dtype) -> Tensor:
    """[1, 64, 8, 128] between one half and four, where the relative error of a rounding is greatest just above a power
    of two."""
    mantissa = 1 + torch.rand(1, 64, 8, 128, generator=GENERATOR) ** 4
    return (torch.ldexp(mantissa, torch.randint(-1, 2, mantissa.shape, generator=GENERATOR))).to(dtype)


def rotated(recipe: Recipe, x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = tables_of(angles, table_dtype(recipe, x.dtype))
    return rotate_strict(Rotation(x, cos, sin, ADJACENT, recipe))


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = ADJACENT.split(x.double())
    return first, second


def norm(first: Tensor, second: Tensor) -> Tensor:
    return (first.square() + second.square()).sqrt()


def exactly_turned(recipe: Recipe, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """fp64, its own error far below the bound."""
    x0, x1 = pairs(x)
    c, s = (f(angles).unsqueeze(-2) for f in (torch.cos, torch.sin))
    s = -s if recipe.steps[4].op == "add" else s
    return x0 * c - x1 * s, x1 * c + x0 * s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_one_rotation_stays_within_its_error_and_comes_near_it(recipe: Recipe, dtype: torch.dtype) -> None:
    """The distance from the exact rotation is within n r + m, and for some pair more than a third of that."""
    error, x = pair_error(recipe, dtype, table_dtype(recipe, dtype)), random_x(dtype)
    (y0, y1), (z0, z1) = pairs(rotated(recipe, x, A)), exactly_turned(recipe, x, A)
    share = norm(y0 - z0, y1 - z1) / error.after(1).of(norm(*pairs(x)))
    assert bool((share <= 1).all())
    assert float(share.max()) > 1 / 3


def deviations(recipe: Recipe, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    error, r = pair_error(recipe, x.dtype, table_dtype(recipe, x.dtype)), norm(*pairs(x))
    once, twice = rotated(recipe, x, A), rotated(recipe, rotated(recipe, x, A), B)
    (a0, a1), (b0, b1) = pairs(twice), pairs(rotated(recipe, x, A + B))
    (i0, i1), (x0, x1) = pairs(rotated(recipe, once, -A)), pairs(x)
    k = x.flip(-1)
    dots = []
    for moved in (torch.zeros_like(A), B):
        (q0, q1), (k0, k1) = pairs(rotated(recipe, x, A + moved)), pairs(rotated(recipe, k, moved))
        dots.append(q0 * k0 + q1 * k1)
    largest = float(r.max())
    return {
        "inverse": (norm(i0 - x0, i1 - x1), error.inverse().of(r)),
        "composition": (norm(a0 - b0, a1 - b1), error.composition().of(r)),
        "norm": ((norm(*pairs(once)) - r).abs(), error.norm().of(r)),
        "dot": ((dots[0] - dots[1]).abs(), error.relative_dot(largest).of(r * norm(*pairs(k)))),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_law_holds_of_every_recipe(recipe: Recipe, dtype: torch.dtype) -> None:
    """No pair of the strict rotation breaks a law's bound, and each bound is used to an eighth at least."""
    for law, (deviation, bound) in deviations(recipe, random_x(dtype)).items():
        assert bool((deviation <= bound).all()), law
        assert float((deviation / bound).max()) > 1 / 8, law


@pytest.mark.parametrize("recipe", [ONE_ROUNDING, ACTIVATION_DTYPE], ids=lambda r: r.name)
def test_laws_hold_where_results_underflow(recipe: Recipe) -> None:
    """With fp16 numbers near and below the least normal one the absolute part carries the error, and is needed."""
    x = (random_x(torch.float16).double() * 2.0**-20).to(torch.float16)
    relative = pair_error(recipe, torch.float16, table_dtype(recipe, torch.float16)).relative
    without = PairError(relative, Fraction(0))
    needed = False
    for law, (deviation, bound) in deviations(recipe, x).items():
        assert bool((deviation <= bound).all()), law
        needed |= law == "norm" and bool((deviation > without.norm().of(norm(*pairs(x)))).any())
    assert needed


def test_constants_are_those_of_the_derivation() -> None:
    """fp32 throughout: t = 2^-24, e = 2 * 2^-24 and n = t + sqrt(2) e, to the first order in 2^-24."""
    relative = pair_error(ONE_ROUNDING, torch.float32, torch.float32).relative
    assert abs(float(relative) * 2**24 - (1 + 2 * math.sqrt(2))) < 2.0**-20
    bf16 = float(pair_error(ONE_ROUNDING, torch.bfloat16, torch.float32).relative) * 2**8
    assert abs(bf16 - math.sqrt(2)) < 2.0**-13
    twice = pair_error(ACTIVATION_DTYPE, torch.bfloat16, torch.bfloat16)
    assert twice.inverse().relative == (1 + twice.relative) ** 2 - 1
    assert twice.composition().relative == twice.inverse().relative + twice.relative


def test_a_bound_is_rounded_up() -> None:
    """What ``of`` returns is never below the exact fraction."""
    bound = pair_error(ONE_ROUNDING, torch.float16, torch.float32).composition()
    exact = bound.relative + JUDGED_IN_FP64 + bound.absolute
    assert Fraction(float(bound.of(torch.tensor(1.0, dtype=torch.float64)))) >= exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_are_within_the_error_that_is_counted(dtype: torch.dtype) -> None:
    """Cosine and sine of large angles are within t of the exact ones, by 200 bits of mpmath."""
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8 + 2.0**-24 + 2.0**-32
    cos, sin = tables_of(A[:4], dtype)
    with mpmath.workprec(200):
        for name, table in (("cos", cos), ("sin", sin)):
            for angle, got in zip(A[:4].flatten().tolist(), table.flatten().tolist(), strict=True):
                exact = getattr(mpmath, name)(mpmath.mpf(angle))
                assert abs(mpmath.mpf(got) - exact) <= unit * (1 + 2.0**-28) * abs(exact)


SCALED = [
    (ONE_ROUNDING, torch.float32, 1.0),
    (ONE_ROUNDING, torch.float16, 2.0**-12),
    (ACTIVATION_DTYPE, torch.float16, 2.0**-10),
    (ACTIVATION_DTYPE, torch.bfloat16, 2.0**-124),
]


@pytest.mark.parametrize(("recipe", "dtype", "scale"), SCALED, ids=lambda p: str(getattr(p, "name", p))[:30])
def test_scaling_is_exact_where_it_is_said_to_be(recipe: Recipe, dtype: torch.dtype, scale: float) -> None:
    """Times -8 gives the same bytes times -8 on all elements that are said to scale, which are not few; where numbers
    are small, some of the others do not."""
    x = (random_x(dtype).double() * scale).to(dtype)
    cos, sin = tables_of(A, table_dtype(recipe, dtype))
    y, scaled = (rotate_strict(Rotation(t, cos, sin, ADJACENT, recipe)) for t in (x, x * -8))
    c, s = (t.double().unsqueeze(-2) for t in (cos, sin))
    exact = ADJACENT.join(*scales_exactly(recipe, *pairs(x), c, s, dtype))
    alike = same(y * -8, scaled)
    assert bool(alike[exact].all())
    assert float(exact.double().mean()) > 1 / 8
    assert bool(alike.all()) == (dtype == torch.float32)


def test_half_a_least_subnormal() -> None:
    """The absolute part is sqrt(2) / 2 of fp16's least subnormal number, from its conversion, and hardly more."""
    form = format_of(torch.float16)
    least = 2.0 ** (form.least_exponent - form.precision + 1)
    absolute = float(pair_error(ONE_ROUNDING, torch.float16, torch.float32).absolute)
    assert abs(absolute / (math.sqrt(2) * least / 2) - 1) < 2.0**-40
