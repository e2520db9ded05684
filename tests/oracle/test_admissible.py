"""Admissible sets against an enumeration on rational numbers, and the facts of the design measured again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.admissible import SEPARATE, AdmissibleSet, admissible, strict
from ropecheck.oracle.floats import bits, from_key, key, round_double, round_exact, same, two_sum
from ropecheck.oracle.recipes import (
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    Recipe,
)

Nearest = Callable[[Fraction, torch.dtype], float]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RECIPES = [
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)


@dataclass(frozen=True)
class Number:
    """A rational number with a sign that also zero has, or an infinity or NaN as a float."""

    value: Fraction | float
    negative: bool

    @staticmethod
    def of(x: float) -> Number:
        return Number(Fraction(x) if math.isfinite(x) else x, math.copysign(1, x) < 0)

    @property
    def as_float(self) -> float:
        """For arithmetic with an infinity or NaN: a finite number is one of its sign, or zero."""
        if isinstance(self.value, float):
            return self.value
        return math.copysign(1.0 if self.value else 0.0, -1.0 if self.negative else 1.0)

    def __neg__(self) -> Number:
        return Number(-self.value, not self.negative)

    def __mul__(self, other: Number) -> Number:
        if isinstance(self.value, Fraction) and isinstance(other.value, Fraction):
            return Number(self.value * other.value, self.negative != other.negative)
        return Number.of(self.as_float * other.as_float)

    def __add__(self, other: Number) -> Number:
        if isinstance(self.value, Fraction) and isinstance(other.value, Fraction):
            total = self.value + other.value
            return Number(total, total < 0 if total else self.negative and other.negative)
        return Number.of(self.as_float + other.as_float)


class Enumeration:
    """Every legal evaluation of a recipe on numbers, written from the design and not from the code under test."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, nearest: Nearest) -> None:
        self.dtype = dtype
        self.nearest = nearest
        self.transposed = "transposed" in recipe.name
        self.onto_zeros = "onto zeros" in recipe.name
        self.target = torch.float32 if recipe.name.startswith("fp32") else dtype

    def to(self, number: Number, *stops: torch.dtype) -> Number:
        for stop in stops:
            if isinstance(number.value, Fraction):
                rounded = self.nearest(number.value, stop)
                number = Number(Fraction(rounded) if math.isfinite(rounded) else rounded, number.negative)
        return number

    def outputs(self, x0: float, x1: float, c: float, s: float) -> tuple[dict[str, Number], dict[str, Number]]:
        a, b, cosine, sine = map(Number.of, (x0, x1, c, s))
        first = self.sums("x0c", a * cosine, "x1s", b * sine, subtract=not self.transposed)
        second = self.sums("x1c", b * cosine, "x0s", a * sine, subtract=self.transposed)
        return first, second

    def sums(self, left: str, p: Number, right: str, q: Number, *, subtract: bool) -> dict[str, Number]:
        q = -q if subtract else q
        out, fp32, fp64 = self.dtype, torch.float32, torch.float64
        # torch takes an fp32 product to 16 bits; a recipe in the activation dtype rounds there.
        rp, rq = (self.to(n, fp32, self.target) for n in (p, q))
        # (summands, roundings before zero may be added)
        ways: dict[str, tuple[Number, tuple[torch.dtype, ...]]] = {SEPARATE: (rp + rq, (fp32, self.target))}
        if self.target == fp32:
            ways[f"fused {left}"] = p + rq, (fp32,)
            ways[f"fused {right}"] = rp + q, (fp32,)
            ways["fp64 via fp32"] = p + q, (fp64, fp32)
            ways["exact via fp32"] = p + q, (fp32,)
            if out != fp32:
                ways["fp64"] = p + q, (fp64,)
                ways["exact"] = p + q, ()
        plain = {name: self.to(total, *stops, out) for name, (total, stops) in ways.items()}
        zero = Number.of(0.0)
        cleared = {name: self.to(self.to(total, *stops) + zero, out) for name, (total, stops) in ways.items()}
        last = {}
        if self.target != out:
            last = {f"{name}, onto zero at last": value + zero for name, value in plain.items()}
        if not self.onto_zeros:
            return plain | {f"{name}, onto zero": value for name, value in cleared.items()} | last
        return cleared | {f"{name}, not onto zero": value for name, value in plain.items()} | last


def as_tensor(numbers: list[Number], dtype: torch.dtype) -> Tensor:
    floats = [math.copysign(float(abs(n.value)), -1.0 if n.negative else 1.0) for n in numbers]
    return torch.tensor(floats, dtype=torch.float64).to(dtype)


def assert_agrees(recipe: Recipe, dtype: torch.dtype, operands: Operands, nearest: Nearest) -> None:
    """Every form, the ends of the span and the classes are those of the enumeration."""
    walk = Enumeration(recipe, dtype, nearest)
    wanted = [walk.outputs(*values) for values in zip(*(v.tolist() for v in operands), strict=True)]
    sets = admissible(recipe, *operands, dtype)
    for output, members in enumerate(sets):
        names = list(wanted[0][output])
        assert set(members.forms) == set(names)
        assert next(iter(members.forms)) == SEPARATE
        expected = {name: as_tensor([w[output][name] for w in wanted], dtype) for name in names}
        for name in names:
            wrong = (~same(members.forms[name], expected[name])).nonzero().flatten().tolist()
            assert not wrong, (name, [v[wrong[0]].item() for v in operands], expected[name][wrong[0]])
        every = torch.stack(list(expected.values()))
        finite, keys = every.isfinite(), key(every).long()
        some = finite.any(0)
        low = torch.where(finite, keys, 1 << 40).amin(0)
        high = torch.where(finite, keys, -(1 << 40)).amax(0)
        assert torch.equal(members.low.long()[some], low[some])
        assert torch.equal(members.high.long()[some], high[some])
        assert bool((members.low > members.high)[~some].all())
        classes = members.classes or (torch.zeros_like(some),) * 3
        for got, there in zip(classes, (every == -math.inf, every == math.inf, every.isnan()), strict=True):
            assert torch.equal(got, there.any(0))
        assert bool(same(strict(recipe, *operands, dtype)[output], expected[SEPARATE]).all())
        assert_membership(members, expected, dtype)


def assert_membership(members: AdmissibleSet, forms: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Each form is a member at no distance; one value beyond either end is not, and is one value outside."""
    assert bool(members.contains(members.strict).all())
    for form in forms.values():
        assert bool(members.contains(form).all())
        assert not bool(members.outside_by(form)[form.isfinite()].any())
    some = members.low <= members.high
    for end, step in ((members.low, -1), (members.high, 1)):
        beyond = from_key(end.long() + step, dtype)
        usual = some & beyond.isfinite()
        assert not bool(members.contains(beyond)[usual].any())
        assert bool((members.outside_by(beyond)[usual] == 1).all())


def table_dtype(recipe: Recipe, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if recipe.name.startswith("fp32") else dtype


def drawn(recipe: Recipe, dtype: torch.dtype, count: int, seed: int = 0) -> Operands:
    """Normal x and the cosine and sine of uniform angles, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    x0, x1 = (torch.randn(count, generator=generator).to(dtype).double() for _ in range(2))
    angle = torch.rand(count, generator=generator, dtype=torch.float64) * (2 * math.pi)
    table = table_dtype(recipe, dtype)
    return x0, x1, angle.cos().to(table).double(), angle.sin().to(table).double()


def picked(operands: Operands, where: Tensor) -> Operands:
    x0, x1, c, s = (v[where] for v in operands)
    return x0, x1, c, s


@recipes
@dtypes
def test_random_and_hard_to_round(recipe: Recipe, dtype: torch.dtype, nearest: Nearest) -> None:
    """Sets agree on ordinary elements and on the hundred next to a boundary of the output dtype."""
    operands = drawn(recipe, dtype, 1 << 17)
    x0, x1, c, s = operands
    sign = 1.0 if "transposed" in recipe.name else -1.0
    exact = x0 * c + sign * (x1 * s)
    ignored = 53 - {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    from_boundary = ((exact.view(torch.int64) & ((1 << ignored) - 1)) - (1 << (ignored - 1))).abs()
    hard = from_boundary.topk(100, largest=False).indices
    assert_agrees(recipe, dtype, picked(operands, torch.cat((torch.arange(60), hard))), nearest)


@recipes
@dtypes
def test_magnitudes(recipe: Recipe, dtype: torch.dtype, nearest: Nearest) -> None:
    """Sets agree where products underflow, sums are subnormal, cancel to their last bits, or overflow."""
    generator = torch.Generator().manual_seed(3)
    count = 240
    table = table_dtype(recipe, dtype)

    def scaled(low: int, high: int, to: torch.dtype) -> Tensor:
        power = torch.randint(low, high, (count,), generator=generator).double()
        return ((1 + torch.rand(count, generator=generator).double()) * 2.0**power).to(to).double()

    parts = []
    least, most = (-24, 15) if dtype == torch.float16 else (-149, 127)
    for x_powers, table_powers in (
        ((least, most), (-149, 127) if table == torch.float32 else (least, most)),
        ((least, least + 12), (-14, 1)),
        ((most - 1, most + 1), (-1, 1)),
    ):
        x0, x1 = scaled(*x_powers, dtype), -scaled(*x_powers, dtype)
        c, s = scaled(*table_powers, table), scaled(*table_powers, table)
        parts.append((x0, x1, c, s))
    # The second product equals the first, or its rounding: the sum is what was lost, or zero.
    parts.append((parts[0][0], parts[0][0], parts[1][2], parts[1][2]))
    parts.append((parts[1][0], -parts[1][0], parts[1][2], parts[1][2]))
    x0, x1, c, s = (torch.cat(columns)[:: len(parts)] for columns in zip(*parts, strict=True))
    assert_agrees(recipe, dtype, (x0, x1, c, s), nearest)


@recipes
@dtypes
def test_special_values(recipe: Recipe, dtype: torch.dtype, nearest: Nearest) -> None:
    """Sets agree on zeros of either sign, infinities, NaN, and the ends of the finite range."""
    limits, table = torch.finfo(dtype), torch.finfo(table_dtype(recipe, dtype))
    x_values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, limits.max, -limits.max, limits.smallest_normal]
    x_values += [limits.smallest_normal * limits.eps, -limits.smallest_normal * limits.eps]
    t_values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1 + table.eps, -table.max, table.tiny * table.eps]
    generator = torch.Generator().manual_seed(5)
    x = torch.tensor(x_values, dtype=torch.float64)[torch.randint(len(x_values), (2, 400), generator=generator)]
    t = torch.tensor(t_values, dtype=torch.float64)[torch.randint(len(t_values), (2, 400), generator=generator)]
    assert_agrees(recipe, dtype, (x[0], x[1], t[0], t[1]), nearest)


def test_infinity_less_infinity_in_an_honest_kernel() -> None:
    """fp32 max times a table above one overflows: NaN, infinities and the exact zero are admitted, nothing else."""
    most = torch.finfo(torch.float32).max
    above_one = 1 + 2.0**-23
    x, t = torch.tensor([most], dtype=torch.float64), torch.tensor([above_one], dtype=torch.float64)
    first, _ = admissible(ONE_ROUNDING, x, x, t, t, torch.float32)
    assert first.strict.isnan().tolist() == [True]
    assert first.classes is not None
    assert [c.item() for c in first.classes] == [True, True, True]
    assert from_key(first.low, torch.float32).tolist() == from_key(first.high, torch.float32).tolist() == [0.0]
    candidates = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, most, 1.0])
    sets, _ = admissible(ONE_ROUNDING, *(v.expand(7) for v in (x, x, t, t)), torch.float32)
    assert sets.contains(candidates).tolist() == [True, True, True, True, False, False, False]


@dtypes
def test_overflow_admits_its_own_infinity_only(dtype: torch.dtype) -> None:
    """Where every form is plus infinity, minus infinity, NaN and the greatest finite value are not members."""
    most = torch.finfo(dtype).max
    x0, x1, c, s = (torch.full((4,), v, dtype=torch.float64) for v in (most, 0.0, 2.0, 1.0))
    first, _ = admissible(ONE_ROUNDING, x0, x1, c, s, dtype)
    candidates = torch.tensor([math.inf, -math.inf, math.nan, most], dtype=torch.float64).to(dtype)
    assert first.contains(candidates).tolist() == [True, False, False, False]


@dtypes
def test_minus_zero_is_below_plus_zero(dtype: torch.dtype) -> None:
    """-0 is not admitted where the sum is +0; where it is -0, strictly, +0 is too; the zeros are one value apart."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    plus, minus = torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)
    first, second = admissible(ONE_ROUNDING, one, one, one, one, dtype)
    assert first.contains(plus).item()
    assert not first.contains(minus).item()
    assert first.outside_by(minus).item() == 1
    first, second = admissible(ONE_ROUNDING, -zero, zero, one, one, dtype)
    assert first.contains(minus).item()
    assert first.contains(plus).item()
    assert first.strict.signbit().item()
    assert second.contains(plus).item()
    assert not second.contains(minus).item()


@recipes
@dtypes
def test_a_sum_may_be_accumulated_onto_zero_or_not(recipe: Recipe, dtype: torch.dtype) -> None:
    """Where a sum is -0 both zeros are admitted, one is strict, and elsewhere nothing changes."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    second_member = -zero if "transposed" in recipe.name else zero
    first, _ = admissible(recipe, -zero, second_member, one, one, dtype)
    assert first.strict.signbit().tolist() == ["onto zeros" not in recipe.name]
    assert first.low.tolist() == [-1]
    assert first.high.tolist() == [0]
    for members in admissible(recipe, *drawn(recipe, dtype, 5000), dtype):
        suffix = ", not onto zero" if "onto zeros" in recipe.name else ""
        names = [name for name in members.forms if name.endswith(suffix) and ", onto" not in name]
        plain = torch.stack([key(members.forms[name]) for name in names])
        assert torch.equal(members.low, plain.amin(0))
        # +0 is one value above -0.
        assert torch.equal(members.high, torch.where(plain.amax(0) == -1, 0, plain.amax(0)))


@recipes
@dtypes
def test_a_nan_elsewhere_changes_nothing(recipe: Recipe, dtype: torch.dtype) -> None:
    """Sets of tiny, ordinary and overflowing values are the same alone and beside NaN, infinities and zeros."""
    operands = tuple(torch.cat((v * 2.0**-130, v, v * 2.0**64)) for v in drawn(ONE_ROUNDING, torch.float32, 3000))
    if dtype != torch.float32:
        operands = tuple(v.to(dtype).double() for v in operands)
    company = [math.nan, math.inf, torch.finfo(dtype).max, 0.0]
    beside = tuple(torch.cat((torch.tensor(company, dtype=torch.float64), v)) for v in operands)
    for alone, among in zip(admissible(recipe, *operands, dtype), admissible(recipe, *beside, dtype), strict=True):
        assert torch.equal(among.low[len(company) :], alone.low)
        assert torch.equal(among.high[len(company) :], alone.high)
        for name, values in alone.forms.items():
            assert torch.equal(bits(among.forms[name][len(company) :]), bits(values))


def test_tiny_sum_beside_nan_keeps_its_exact_value() -> None:
    """Of a subnormal sum on a midpoint only the exact evaluation sees the lost bits, with a NaN in the tensor too."""
    x0, x1 = 1.5 * 2.0**-100, 2.0**-140
    c, s = 2.0**-49, 2.0**-71
    columns = [torch.tensor([math.nan, v], dtype=torch.float64) for v in (x0, x1, c, s)]
    first, _ = admissible(ONE_ROUNDING, *columns, torch.float32)
    assert first.forms["fp64 via fp32"][1].item() == 2.0**-148
    assert first.forms["exact via fp32"][1].item() == 2.0**-149
    assert from_key(first.low, torch.float32)[1].item() == 2.0**-149


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_only_the_exact_sum_sees_what_fp64_loses(dtype: torch.dtype) -> None:
    """A midpoint of the output dtype plus 2^-60 rounds up without any stop, and to even from fp64 and from fp32."""
    middle = 1 + torch.finfo(dtype).eps / 2
    columns = [torch.tensor([v], dtype=torch.float64) for v in (1.0, 2.0**-14, middle, -(2.0**-46))]
    first, _ = admissible(ONE_ROUNDING, *columns, dtype)
    exact = {name: form.item() for name, form in first.forms.items() if name.partition(",")[0] == "exact"}
    assert set(exact.values()) == {1 + torch.finfo(dtype).eps}
    assert {form.item() for name, form in first.forms.items() if name not in exact} == {1.0}
    assert first.contains(first.forms["exact"]).item()


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("likeness", [1.0, 2.0**-7], ids=["random", "cancelling"])
def test_shortcut_for_16_bits_changes_nothing(recipe: Recipe, dtype: torch.dtype, likeness: float) -> None:
    """Every form has the values that direct evaluation gives on all of many elements, with products that cancel too."""
    x0, x1, c, s = drawn(recipe, dtype, 1 << 17)
    if likeness < 1:
        x1, s = (x0 * (1 + likeness * x1)).to(dtype).double(), (c * (1 + likeness * s)).float().double()
    first, second = admissible(recipe, x0, x1, c, s, dtype)
    sign = 1.0 if "transposed" in recipe.name else -1.0
    suffix = ", not onto zero" if "onto zeros" in recipe.name else ""
    for members, (left, p), (right, q) in (
        (first, ("x0c", x0 * c), ("x1s", sign * x1 * s)),
        (second, ("x1c", x1 * c), ("x0s", -sign * x0 * s)),
    ):
        p32, q32 = p.float().double(), q.float().double()
        high, low = two_sum(p, q)
        expected = {
            SEPARATE: (p32 + q32).float().to(dtype),
            f"fused {left}": round_exact(*two_sum(p, q32), torch.float32).to(dtype),
            f"fused {right}": round_exact(*two_sum(p32, q), torch.float32).to(dtype),
            "fp64 via fp32": high.float().to(dtype),
            "exact via fp32": round_exact(high, low, torch.float32).to(dtype),
            "fp64": round_double(high, dtype),
            "exact": round_exact(high, low, dtype),
        }
        for name, values in expected.items():
            assert torch.equal(bits(members.forms[name + suffix]), bits(values)), name
        keys = torch.stack([key(v) for v in expected.values()])
        assert torch.equal(members.low, keys.amin(0))
        assert torch.equal(members.high, torch.where(keys.amax(0) == -1, 0, keys.amax(0)))
        assert bool((members.low < members.high).any())


def test_empty() -> None:
    """No elements give empty sets."""
    none = torch.empty(0, dtype=torch.float64)
    for dtype in DTYPES:
        for members in admissible(ONE_ROUNDING_VJP_ONTO_ZEROS, none, none, none, none, dtype):
            assert members.low.shape == members.strict.shape == (0,)
            assert members.contains(torch.empty(0, dtype=dtype)).shape == (0,)


def test_without_contraction_there_is_one_value() -> None:
    """A recipe whose products may not be contracted admits its strict value only, in every dtype."""
    rigid = replace(ONE_ROUNDING, steps=tuple(replace(step, contractible=False) for step in ONE_ROUNDING.steps))
    for dtype in DTYPES:
        for members in admissible(rigid, *drawn(rigid, dtype, 20000), dtype):
            assert {name.partition(",")[0] for name in members.forms} == {SEPARATE}
            assert torch.equal(members.low, key(members.strict))
            assert torch.equal(members.high, torch.where(members.low == -1, 0, members.low))


# The facts of the design, on one sampling basis: x0 and x1 normal with deviation 1 and rounded to the dtype, one
# fp32 table entry for each pair, of an angle uniform in [0, 2 pi). Both outputs are counted.
PAIRS = 1 << 19


def shares(count: Callable[[torch.dtype], tuple[int, int]]) -> dict[torch.dtype, float]:
    return {dtype: hits / total for dtype, (hits, total) in ((d, count(d)) for d in DTYPES)}


def several_values(dtype: torch.dtype) -> tuple[int, int]:
    sets = admissible(ONE_ROUNDING, *drawn(ONE_ROUNDING, dtype, PAIRS), dtype)
    return sum(int((m.low < m.high).sum()) for m in sets), 2 * PAIRS


def test_more_than_one_value_for_42_percent_of_fp32() -> None:
    """Five standard deviations around the measured share of fp32 elements reach the design's rounded 42 %; a 16-bit
    dtype, whose boundaries are met 2^13 or 2^16 times as rarely, has fewer than fp32, and bf16 fewer than fp16."""
    share = shares(several_values)
    deviation = math.sqrt(share[torch.float32] * (1 - share[torch.float32]) / (2 * PAIRS))
    assert share[torch.float32] + 5 * deviation > 0.415
    assert share[torch.float32] - 5 * deviation < 0.425
    assert 0 < share[torch.bfloat16] < share[torch.float16] < share[torch.float32]


def test_truncation_is_outside_for_half_the_elements() -> None:
    """An fp32 rotation cut to bf16 is outside wherever the cut is not the rounding, which is half of the time.

    The lowest sixteen bits of a sum of random products are uniform, so that the count is binomial with p = 1/2;
    six standard deviations contain it but for two cases in 10^9. Elements with several values add at most themselves.
    """
    operands = drawn(ONE_ROUNDING, torch.bfloat16, PAIRS)
    outside = several = 0
    sets = admissible(ONE_ROUNDING, *operands, torch.bfloat16)
    for members, wide in zip(sets, strict(ONE_ROUNDING, *operands, torch.float32), strict=True):
        cut = (bits(wide) >> 16).to(torch.int16).view(torch.bfloat16)
        missed = ~members.contains(cut)
        one = members.low == members.high
        assert torch.equal(missed & one, (bits(cut) != bits(members.strict)) & one)
        outside += int(missed.sum())
        several += int((~one).sum())
    assert abs(outside - PAIRS) <= 6 * math.sqrt(2 * PAIRS) / 2 + several


def test_cosine_one_ulp_off_is_seen_in_fp32() -> None:
    """A cosine one fp32 ulp off is seen on more elements than any bound k 2^-24 (|a| + |b|) that admits every honest
    evaluation shows it on, and on far more in fp32 than in the 16-bit dtypes."""
    operands = drawn(ONE_ROUNDING, torch.float32, PAIRS)
    x0, x1, c, s = operands
    off = torch.nextafter(c.float(), torch.tensor(math.inf)).double()
    seen = {}
    for dtype in DTYPES:
        narrow = (x0.to(dtype).double(), x1.to(dtype).double())
        right = admissible(ONE_ROUNDING, *narrow, c, s, dtype)
        wrong = strict(ONE_ROUNDING, *narrow, off, s, dtype)
        seen[dtype] = sum(int((~m.contains(w)).sum()) for m, w in zip(right, wrong, strict=True))
    assert seen[torch.float32] > seen[torch.float16] > seen[torch.bfloat16] > 0
    bounded = {}
    honest = {}
    right, wrong = (strict(ONE_ROUNDING, x0, x1, t, s, torch.float32) for t in (c, off))
    for k in (1, 2):
        bounded[k] = honest[k] = 0
        for exact, size, good, bad in (
            (x0 * c - x1 * s, (x0 * c).abs() + (x1 * s).abs(), right[0], wrong[0]),
            (x1 * c + x0 * s, (x1 * c).abs() + (x0 * s).abs(), right[1], wrong[1]),
        ):
            limit = k * 2.0**-24 * size
            bounded[k] += int(((bad.double() - exact).abs() > limit).sum())
            honest[k] += int(((good.double() - exact).abs() > limit).sum())
    assert honest[2] == 0
    assert seen[torch.float32] > bounded[1] > bounded[2]
