"""Floating-point arithmetic: all 16-bit patterns, and by property against rational numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropecheck.oracle.floats import (
    FORMATS,
    bits,
    detour_matters,
    fma32,
    format_of,
    from_key,
    key,
    round_double,
    round_exact,
    round_to_odd,
    same,
    two_sum,
    ulp_distance,
)

Nearest = Callable[[Fraction, torch.dtype], float]

SIXTEEN = [torch.bfloat16, torch.float16]
NARROW = [*SIXTEEN, torch.float32]
sixteen = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)


def every(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype, in the order of their keys."""
    return from_key(torch.arange(-(1 << 15), 1 << 15), dtype)


def neighbours(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of neighbouring finite values of a 16-bit dtype but the two zeros, the lower first, in fp64."""
    finite = every(dtype)
    finite = finite[finite.isfinite()]
    lower, upper = finite[:-1].double(), finite[1:].double()
    return lower[lower != upper], upper[lower != upper]


def fp64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def from_bits32(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


@sixteen
def test_key_is_a_bijection_in_the_order_of_the_values(dtype: torch.dtype) -> None:
    """Over all patterns keys are distinct, invertible, and ordered as the numbers, -0 one below +0, NaN outermost."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    values = patterns.view(dtype)
    keys = key(values).long()
    assert torch.equal(keys.sort().values, torch.arange(-(1 << 15), 1 << 15))
    assert torch.equal(bits(from_key(keys, dtype)), patterns)
    ordered = values[keys.argsort()]
    numbers = ordered[~ordered.isnan()].tolist()
    assert numbers == sorted(numbers)
    assert numbers[0] == -math.inf
    assert numbers[-1] == math.inf
    minus, plus = (int(key(torch.tensor([z], dtype=dtype))) for z in (-0.0, 0.0))
    assert (minus, plus) == (-1, 0)
    infinity = format_of(dtype).infinity_key
    assert int(key(torch.tensor([math.inf], dtype=dtype))) == infinity
    assert int(key(torch.tensor([-math.inf], dtype=dtype))) == -1 - infinity
    nan = keys[values.isnan()]
    assert bool(((nan > infinity) | (nan < -1 - infinity)).all())
    assert torch.equal(nan > 0, patterns[values.isnan()] >= 0)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(0x80000000, 0)
def test_key_orders_fp32(first: int, second: int) -> None:
    """Keys of fp32 bit patterns are invertible and compare as the numbers do; only zeros are told apart."""
    values = torch.tensor([first, second]).to(torch.int32).view(torch.float32)
    keys = key(values).tolist()
    assert torch.equal(bits(from_key(torch.tensor(keys), torch.float32)), bits(values))
    a, b = from_bits32(first), from_bits32(second)
    if a < b or (a == b and math.copysign(1, a) < math.copysign(1, b)):
        assert keys[0] < keys[1]


@sixteen
def test_same_is_bytes_with_nan_as_a_class(dtype: torch.dtype) -> None:
    """Two patterns are the same where their bytes are, or where both are NaN, and nowhere else."""
    values = every(dtype)
    for shift in (0, 1, 2, 77, 1 << 14, 1 << 15):
        other = values.roll(shift)
        expected = [p == q or (p != p and q != q) for p, q in zip(values.tolist(), other.tolist(), strict=True)]
        zeros = (values == 0) & (other == 0)
        expected_bytes = torch.where(zeros, values.signbit() == other.signbit(), torch.tensor(expected))
        assert torch.equal(same(values, other), expected_bytes)
    assert same(torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0])).tolist() == [False, True]


@sixteen
def test_ulp_distance_counts_values(dtype: torch.dtype) -> None:
    """The distance is the number of steps along all values, in either direction, with -0 and +0 one apart."""
    values = every(dtype)
    for steps in (0, 1, 5, 1000):
        there, here = values[steps:], values[: len(values) - steps]
        assert ulp_distance(there, here).unique().tolist() == [steps]
        assert ulp_distance(here, there).unique().tolist() == [steps]


def test_ulp_distance_of_far_fp32_does_not_wrap() -> None:
    """From the least to the greatest finite fp32 there are more values than 32 bits can count with a sign."""
    most = torch.tensor([torch.finfo(torch.float32).max])
    assert int(ulp_distance(-most, most)) == 2 * 0x7F7FFFFF + 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e5m2], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """A dtype that is not a float of 16, 32 or 64 bits is refused by name."""
    with pytest.raises(ValueError, match=rf"dtype must be one of torch.bfloat16, .*, not {dtype}"):
        format_of(dtype)


def test_formats_are_those_of_torch() -> None:
    """Precision and least exponent of each format are what torch says of the dtype."""
    for dtype, form in FORMATS.items():
        limits = torch.finfo(dtype)
        assert 2.0 ** (1 - form.precision) == limits.eps
        assert 2.0**form.least_exponent == limits.tiny
        assert form.magnitude_mask == 2 ** (limits.bits - 1) - 1


@sixteen
def test_round_double_keeps_every_value(dtype: torch.dtype) -> None:
    """Each of the 65,536 values comes back from fp64 as it was, bytes for finite values and infinities."""
    values = every(dtype)
    back = round_double(values.double(), dtype)
    assert bool(same(back, values).all())


@sixteen
def test_midpoints_round_to_even(dtype: torch.dtype) -> None:
    """The midpoint of every two neighbours goes to the one whose last bit is zero, signs of zeros included."""
    lower, upper = neighbours(dtype)
    middle = (lower + upper) / 2
    even = torch.where(bits(lower.to(dtype)) & 1 == 0, lower, upper).to(dtype)
    assert torch.equal(bits(round_double(middle, dtype)), bits(even))
    assert torch.equal(bits(round_exact(middle, torch.zeros_like(middle), dtype)), bits(even))


@sixteen
def test_beside_midpoints_rounding_goes_the_right_way(dtype: torch.dtype) -> None:
    """One fp64 ulp, one fp32 ulp, or an error term of 2^-1074 beside a midpoint decides."""
    lower, upper = neighbours(dtype)
    middle = (lower + upper) / 2
    least = torch.full_like(middle, 5e-324)
    infinity = torch.full_like(middle, math.inf)
    for far, nearest_value, error in ((-infinity, lower, -least), (infinity, upper, least)):
        expected = bits(nearest_value.to(dtype))
        assert torch.equal(bits(round_double(torch.nextafter(middle, far), dtype)), expected)
        beside32 = torch.nextafter(middle.float(), far.float()).double()
        assert torch.equal(bits(round_double(beside32, dtype)), expected)
        assert torch.equal(bits(round_exact(middle, error, dtype)), expected)


@narrow
def test_overflow_threshold(dtype: torch.dtype) -> None:
    """Half an ulp beyond the greatest finite value rounds to infinity, and just below that to the greatest value."""
    most = torch.finfo(dtype).max
    half = most - float(from_key(key(torch.tensor([most], dtype=dtype)) - 1, dtype))
    limit = most + half / 2
    for sign in (1.0, -1.0):
        beyond = round_double(fp64(sign * limit, sign * math.nextafter(limit, 0), sign * 1e300), dtype)
        assert beyond.tolist() == [sign * math.inf, sign * most, sign * math.inf]
        below = round_exact(fp64(sign * limit), fp64(-sign * 1e-300), dtype)
        assert below.tolist() == [sign * most]


@narrow
def test_infinities_and_nan_pass_through(dtype: torch.dtype) -> None:
    """Infinities keep their sign and NaN stays NaN, with and without an error term that is NaN."""
    values = fp64(math.inf, -math.inf, math.nan)
    for got in (round_double(values, dtype), round_exact(values, values - values, dtype)):
        assert got[:2].tolist() == [math.inf, -math.inf]
        assert bool(got[2].isnan())


# Finite fp64 numbers whose sums do not overflow, and pairs of them built to be hard: a number next to the midpoint
# of two neighbours of a narrower format, with an addend that fp64 cannot hold beside it, whole or split in two.
moderate = st.floats(-1e300, 1e300)


@st.composite
def beside_a_midpoint(draw: st.DrawFn) -> tuple[float, float]:
    dtype = draw(st.sampled_from(NARROW))
    limits = torch.finfo(dtype)
    pattern = draw(st.integers(0, int(bits(torch.tensor([limits.max], dtype=dtype)))))
    at = float(torch.tensor([pattern]).to(format_of(dtype).integer).view(dtype))
    above = float(torch.tensor([pattern + 1]).to(format_of(dtype).integer).view(dtype))
    middle = (at + above) / 2 if math.isfinite(above) else at
    tiny = draw(st.sampled_from([0.0, 1.0, -1.0])) * math.ldexp(1.0, draw(st.integers(-1074, -40)))
    tiny = tiny * middle if draw(st.booleans()) else tiny
    if draw(st.booleans()):
        shift = math.ldexp(middle, draw(st.integers(-3, 20)))
        middle, tiny = middle + shift, tiny - shift
    sign = draw(st.sampled_from([1.0, -1.0]))
    return sign * middle, sign * tiny


fp32_values = st.integers(0, 2**32 - 1).map(from_bits32).filter(math.isfinite)


@st.composite
def products_that_cancel(draw: st.DrawFn) -> tuple[float, float]:
    a, b = draw(fp32_values), draw(fp32_values)
    product = a * b
    other = draw(st.one_of(fp32_values.map(lambda c: c * draw(fp32_values)), st.just(-product)))
    return product, other


sums = st.one_of(st.tuples(moderate, moderate), beside_a_midpoint(), products_that_cancel())


@settings(max_examples=500, deadline=None)
@given(sums)
def test_two_sum_is_exact(pair: tuple[float, float]) -> None:
    """The rounded sum is the machine's own and with the error term it is the sum of the rational numbers."""
    a, b = pair
    high, low = (t.item() for t in two_sum(fp64(a), fp64(b)))
    assert high == a + b
    assert Fraction(high) + Fraction(low) == Fraction(a) + Fraction(b)


@settings(max_examples=500, deadline=None)
@given(sums)
def test_round_to_odd_is_exact_or_odd(pair: tuple[float, float]) -> None:
    """A sum that fp64 holds is kept; any other becomes that one of the two fp64 numbers around it that is odd."""
    high, low = two_sum(fp64(pair[0]), fp64(pair[1]))
    odd = round_to_odd(high, low)
    exact, got = Fraction(pair[0]) + Fraction(pair[1]), odd.item()
    if exact == Fraction(high.item()):
        assert torch.equal(bits(odd), bits(high))
        return
    assert int(bits(odd)) & 1 == 1
    assert math.nextafter(got, -math.inf) < exact < math.nextafter(got, math.inf)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_round_exact_is_one_rounding(nearest: Nearest, dtype: torch.dtype) -> None:
    """The exact sum of two fp64 numbers is rounded once, subnormal results and overflow included."""

    @settings(max_examples=600, deadline=None)
    @given(sums)
    @example((1.0 + 2.0**-24, 2.0**-80))
    @example((1.0 + 2.0**-8, -(2.0**-80)))
    @example((1.0 + 2.0**-11, 2.0**-80))
    @example((1.5 * 2.0**-149, -(2.0**-210)))
    @example((2.0**-150, 0.0))
    @example((2.0**-150, 2.0**-250))
    def check(pair: tuple[float, float]) -> None:
        high, low = two_sum(fp64(pair[0]), fp64(pair[1]))
        expected = nearest(Fraction(pair[0]) + Fraction(pair[1]), dtype)
        got = round_exact(high, low, dtype)
        assert got.item() == expected
        assert math.copysign(1, got.item()) == math.copysign(1, expected or high.item())

    check()


def test_fma32_rounds_once(nearest: Nearest) -> None:
    """a b + c of fp32 numbers is rounded once, an exact zero taking the sign that IEEE 754 gives it."""

    @settings(max_examples=800, deadline=None)
    @given(fp32_values, fp32_values, st.one_of(fp32_values, st.none()), st.integers(-2, 2))
    @example(1.0 + 2.0**-12, 1.0 + 2.0**-12, -1.0 - 2.0**-11, 0)
    @example(8 + 2.0**-20, 8 - 2.0**-20, 2.0**30 + 2.0**7, 0)
    @example(8 + 2.0**-20, 2.0**-20 - 8, -(2.0**30) - 2.0**7, 0)
    @example(-0.0, 1.0, -0.0, 0)
    @example(-0.0, 1.0, 0.0, 0)
    @example(2.0**-100, 2.0**-50, 2.0**-149, 0)
    def check(a: float, b: float, c: float | None, steps: int) -> None:
        if c is None:  # an addend that cancels the product to its rounding error
            product = torch.tensor([a * b], dtype=torch.float64).float()
            if not product.isfinite():
                return
            c = -float(from_key(key(product) + steps, torch.float32))
        if not math.isfinite(c):
            return
        got = fma32(*(torch.tensor([v]) for v in (a, b, c))).item()
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        expected = nearest(exact, torch.float32)
        assert got == expected
        if not exact:
            expected = -0.0 if math.copysign(1, a) * math.copysign(1, b) < 0 and math.copysign(1, c) < 0 else 0.0
            both_zero = a * b == 0 and c == 0
            assert math.copysign(1, got) == (math.copysign(1, expected) if both_zero else 1)

    check()


def test_fma32_of_infinities_and_nan() -> None:
    """An infinite addend or product comes through; 0 times infinity and infinity less infinity are NaN."""
    inf = math.inf
    a, b, c = torch.tensor([1.0, inf, 0.0, inf, 1.0]), torch.tensor([1.0, -2.0, inf, 1.0, 1.0]), torch.tensor(
        [inf, 1.0, 1.0, -inf, math.nan]
    )
    got = fma32(a, b, c)
    assert got[:2].tolist() == [inf, -inf]
    assert bool(got[2:].isnan().all())


def hard_sums() -> tuple[Tensor, Tensor]:
    """fp64 pairs whose sums lie on, or within fp64's reach beside, the midpoints of fp32, normal and subnormal."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.cat((
        torch.randint(0x7F7FFFFF, (4000,), generator=generator),
        torch.randint(0x01000000, (2000,), generator=generator),
        torch.arange(50),
        torch.arange(0x00800000 - 50, 0x00800000 + 50),
        torch.arange(0x7F7FFFFF - 50, 0x7F7FFFFF),
    ))  # fmt: skip
    lower = pattern.to(torch.int32).view(torch.float32).double()
    upper = (pattern + 1).to(torch.int32).view(torch.float32).double()
    middle = (lower + upper) / 2
    pairs = []
    for sign in (1.0, -1.0):
        for error in (0.0, 2.0**-54, -(2.0**-54), 2.0**-70, -(2.0**-70), 2.0**-52, -(2.0**-52)):
            pairs.append((sign * middle, sign * middle * error))
            pairs.append((sign * middle, sign * error * torch.full_like(middle, 2.0**-150)))
            pairs.append((sign * lower, sign * lower * error))
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


@pytest.mark.parametrize("company", [None, math.nan, math.inf, 0.0, 1.0], ids=str)
def test_detour_matters_omits_nothing(company: float | None) -> None:
    """Where the index is not listed, the sum by way of fp64 is the sum rounded once, whatever else is in the tensor."""
    a, b = hard_sums()
    if company is not None:
        a, b = torch.cat((fp64(company), a)), torch.cat((fp64(0.0), b))
    wide = a + b
    via_fp64, exact = wide.float(), round_exact(*two_sum(a, b), torch.float32)
    listed = torch.zeros(wide.shape, dtype=torch.bool)
    listed[detour_matters(wide, via_fp64)] = True
    differs = ~same(via_fp64, exact)
    assert int(differs.sum()) > 10_000
    assert not bool((differs & ~listed).any())


def test_nan_does_not_hide_tiny_sums() -> None:
    """A subnormal sum on whose detour through fp64 the result depends is listed beside a NaN, an infinity and alone."""
    a, b = 1.5 * 2.0**-149, -(2.0**-210)
    assert fp64(a + b).float().item() == 2.0**-148
    assert round_exact(*two_sum(fp64(a), fp64(b)), torch.float32).item() == 2.0**-149
    for beside in ([], [math.nan], [math.inf], [1.0, math.nan, 1.0]):
        wide = fp64(*beside, a + b)
        assert detour_matters(wide, wide.float()).tolist()[-1:] == [len(beside)]


def test_detour_list_is_short_for_ordinary_sums() -> None:
    """Of ordinary normal sums only those on a midpoint are listed, which is what makes the oracle quick."""
    wide = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs() + 1
    assert detour_matters(wide, wide.float()).numel() == 0
    wide[123] = 1 + 2.0**-24
    assert detour_matters(wide, wide.float()).tolist() == [123]
    assert detour_matters(wide[:0], wide[:0].float()).tolist() == []
    assert detour_matters(torch.zeros(3, dtype=torch.float64), torch.zeros(3)).tolist() == []
