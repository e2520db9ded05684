"""The norm: its fixed order, and an interval that holds every other order and little else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.floats import bits, fma32, key, round_double, same
from ropecheck.oracle.norm import (
    Norm,
    gamma,
    neighbours,
    norm_interval,
    reciprocal_root_bounds,
    reciprocal_root_interval,
    strict_norm,
    strict_reciprocal_root,
    tree_sum,
)

Nearest = Callable[[Fraction, torch.dtype], float]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [2, 20, 72, 128, 256]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
widths = pytest.mark.parametrize("width", WIDTHS)
EPS = 1e-6


def rows(width: int, dtype: torch.dtype, count: int = 200, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(count, width, generator=generator) * scale).to(dtype)


def weight_of(width: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(width, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 72])
def test_tree_is_adjacent_pairs(count: int, nearest: Nearest) -> None:
    """The tree adds neighbours level by level, zeros standing where there is no partner."""
    terms = torch.rand(3, count, generator=torch.Generator().manual_seed(0))
    for row, total in zip(terms.tolist(), tree_sum(terms).tolist(), strict=True):
        level = row
        while len(level) > 1:
            level = [*level, 0.0] if len(level) % 2 else level
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [nearest(Fraction(a) + Fraction(b), torch.float32) for a, b in pairs]
        assert total == (level[0] if level else 0.0)


@widths
def test_strict_root_is_correctly_rounded_step_by_step(width: int, nearest: Nearest) -> None:
    """Squares, tree, mean, eps, root and reciprocal are each the nearest fp32 number of the exact result."""

    def rounded(number: Fraction) -> float:
        return nearest(number, torch.float32)

    x = rows(width, torch.float32, 5)
    for row, found in zip(x, strict_reciprocal_root(x, EPS).flatten().tolist(), strict=True):
        squares = torch.tensor([rounded(Fraction(v) ** 2) for v in row.tolist()])
        mean = rounded(Fraction(tree_sum(squares).item()) / width)
        shifted = rounded(Fraction(mean) + Fraction(rounded(Fraction(EPS))))
        # Of a root only the nearest integer multiple of a fine unit is taken: an fp32 root is no midpoint.
        root = rounded(Fraction(math.isqrt(int(Fraction(shifted) * 2**400)), 2**200))
        assert found == rounded(1 / Fraction(root))


def in_sequence(x: Tensor, fused: bool = False) -> Tensor:
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = fma32(column, column, total) if fused else total + column * column
    return total[..., None]


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: (x * x).sum(-1, keepdim=True),
    "in sequence": in_sequence,
    "in sequence, fused": lambda x: in_sequence(x, fused=True),
    "from the largest": lambda x: in_sequence(x.gather(-1, x.abs().argsort(-1, descending=True))),
    "from the smallest": lambda x: in_sequence(x.gather(-1, x.abs().argsort(-1))),
    "by halves": lambda x: tree_sum(x * x)[..., None],
    "in fp64": lambda x: (x.double() ** 2).sum(-1, keepdim=True).float(),
}


@dtypes
@widths
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_every_order_is_inside(width: int, dtype: torch.dtype, order: str, scale: float) -> None:
    """Whatever the order of the sum, by division or reciprocal root, the root lies between the ends."""
    x = rows(width, dtype, scale=scale)
    low, high = reciprocal_root_interval(x, EPS)
    total = ORDERS[order](x.float())
    for mean in (total / width, total * (1 / torch.tensor(float(width)))):
        for root in ((mean + EPS).rsqrt(), 1 / (mean + EPS).sqrt()):
            assert bool(((root >= low) & (root <= high)).all())
    fixed = strict_reciprocal_root(x, EPS)
    assert bool(((fixed >= low) & (fixed <= high)).all())


def test_sums_that_lose_every_addend_are_inside() -> None:
    """A sum that drops each of many small terms is off by nearly half the bound, to the side of the bound."""
    width = 256
    x = torch.full((1, width), math.sqrt(2.0**-24.5))
    x[:, 0] = 1.0
    lost = in_sequence(x)
    assert lost.item() == 1.0
    low, high = reciprocal_root_bounds(x, EPS)
    root = 1 / (lost.double() / width + EPS).sqrt()
    true = 1 / ((x.double() ** 2).mean() + EPS).sqrt()
    assert bool((root < high) & (root > low))
    assert float((root - true) / (high - true)) > 0.5


@widths
def test_interval_is_no_wider_than_counted(width: int) -> None:
    """Both ends are fp32 numbers within the bounds, the next ones are not, and the ratio is that of the roundings."""
    x = rows(width, torch.float32)
    low, high = reciprocal_root_bounds(x, EPS)
    least, greatest = reciprocal_root_interval(x, EPS)
    assert bool((least.double() >= low).all() and (greatest.double() <= high).all())
    below, above = (torch.nextafter(t, torch.tensor(side)) for t, side in ((least, -math.inf), (greatest, math.inf)))
    assert bool((below.double() < low).all() and (above.double() > high).all())
    # Half of the sum, the division and the addition, the root on both sides.
    roundings = width + 4 + 1 + 2 * 6
    assert bool((high / low - 1 < 1.01 * gamma(roundings)).all())
    assert bool((high / low - 1 > gamma(width)).all())


def every_form(x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Ends over the forms at both roots, written out one by one."""
    values = []
    for root in reciprocal_root_interval(x, norm.eps):
        wide, factor = x.float(), weight.float() + norm.weight_offset
        unrounded = [wide.double() * root.double() * f for f in (factor.double(), weight.double() + norm.weight_offset)]
        rounded = [wide * root * factor, wide * (root * factor)]
        rounded += [v.float() for v in unrounded] if norm.round_norm else [w for v in unrounded for w in neighbours(v)]
        if norm.round_norm:
            rounded = [v.to(x.dtype).float() for v in rounded]
            values += [round_double(v, x.dtype).float() for v in unrounded]
        values += rounded
    keys = torch.stack([key(v) for v in values])
    return keys.amin(0), keys.amax(0)


@dtypes
@widths
@pytest.mark.parametrize("norm", [Norm(), Norm(round_norm=False), Norm(1e-5, 0.0)], ids=str)
def test_norm_interval_is_the_span_of_the_forms(width: int, dtype: torch.dtype, norm: Norm) -> None:
    """The interval is that of both associations and the unrounded product, but for fp64's own error at midpoints."""
    x, weight = rows(width, dtype), weight_of(width, dtype)
    low, high = (key(end) for end in norm_interval(x, weight, norm, reciprocal_root_interval(x, norm.eps)))
    least, greatest = every_form(x, weight, norm)
    assert bool((low <= least).all() and (high >= greatest).all())
    assert float(((low < least) | (high > greatest)).float().mean()) < 0.002
    fixed = key(strict_norm(x, weight, norm))
    assert bool(((fixed >= low) & (fixed <= high)).all())


def test_neighbours_enclose() -> None:
    """Neighbours are the number itself where it is fp32, else the two fp32 numbers around it."""
    wide = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    below, above = neighbours(wide)
    assert bool((below.double() < wide).all() and (wide < above.double()).all())
    assert torch.equal(key(above) - key(below), torch.ones(1000, dtype=torch.int32))
    for exact in (wide.float().double(), torch.tensor([0.0, -0.0, math.inf]).double()):
        assert all(torch.equal(bits(side), bits(exact.float())) for side in neighbours(exact))


@dtypes
def test_share_of_elements_with_several_values(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """At 256 channels few rounded values are open in 16 bits, and in fp32 all are, by about 200 values."""
    x, norm = rows(256, dtype, 1000), Norm()
    low, high = norm_interval(x, weight_of(256, dtype), norm, reciprocal_root_interval(x, norm.eps))
    share, width = float((low != high).double().mean()), float((key(high) - key(low)).double().mean())
    with capsys.disabled():
        print(f"\nnorm of 256 channels in {dtype}: {100 * share:.2f} % with several values")
    if dtype == torch.float32:
        assert share == 1.0
        assert 128 < width < 256
    else:
        least, most = {torch.bfloat16: (0.001, 0.006), torch.float16: (0.015, 0.035)}[dtype]
        assert least < share < most


@dtypes
def test_rows_without_a_finite_sum(dtype: torch.dtype) -> None:
    """An infinity makes the root zero and a NaN NaN; rows whose sum overflows may have zero, or the true root."""
    x = rows(8, dtype, 4)
    x[0, 3], x[1, 3], x[1, 5] = math.inf, math.nan, math.inf
    low, high = reciprocal_root_interval(x, EPS)
    assert low[0].item() == high[0].item() == strict_reciprocal_root(x, EPS)[0].item() == 0.0
    assert low[1].isnan().item()
    assert high[1].isnan().item()
    ends = norm_interval(x, weight_of(8, dtype), Norm(), (low, high))
    assert bool(same(*ends)[:2].all())
    assert ends[0][0].isnan().tolist() == [n == 3 for n in range(8)]
    assert bool(ends[0][1].isnan().all())
    if dtype != torch.float16:
        large = torch.full((1, 8), 1e30).to(dtype)
        assert strict_reciprocal_root(large, EPS).item() == 0.0
        low, high = reciprocal_root_interval(large, EPS)
        assert low.item() == 0.0
        assert 1.0 < high.item() * large[0, 0].item() < 1.00001


@dtypes
def test_signs_of_zeros_are_kept(dtype: torch.dtype) -> None:
    """A zero has its own sign times the factor's, and no other value."""
    x = torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0]]).to(dtype)
    weight = torch.tensor([0.0, 0.0, 0.0, -3.0, -3.0]).to(dtype)
    low, high = norm_interval(x, weight, Norm(), reciprocal_root_interval(x, EPS))
    expected = torch.tensor([[0.0, -0.0, 0.0, 0.0, -0.0]])
    zero = x == 0
    for end in (low, high, strict_norm(x, weight, Norm())):
        assert torch.equal(bits(end)[zero], bits(expected)[zero])


@pytest.mark.parametrize("eps", [1e-6, 1e-12])
@pytest.mark.parametrize("width", [20, 72, 256])
def test_powers_of_two_have_an_exact_root(width: int, eps: float) -> None:
    """Channels of +-1024 have the root 2^-10 in the fixed order: eps vanishes beside 2^20."""
    signs = torch.randint(2, (9, width), generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert bool((strict_reciprocal_root(1024.0 * signs, eps) == 2.0**-10).all())


@pytest.mark.parametrize("eps", [0.0, -1e-6, 2.0**-127, math.inf, math.nan])
def test_impossible_eps_is_refused(eps: float) -> None:
    """An eps with which a row of zeros has no finite root is refused by name."""
    with pytest.raises(ValueError, match=re.escape(f"eps must be finite and at least 2**-126, got {eps!r}")):
        Norm(eps)
