"""The fused contract: strict bytes, foreign orders that pass, faults that do not, rows, gathers, special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import ropecheck.oracle.fused_comparison as comparison_module
from ropecheck.oracle.axis_maps import interleaved
from ropecheck.oracle.floats import bits, fma32, from_key, key, same
from ropecheck.oracle.fused import NormRotation, gathered_tables, strict_fused
from ropecheck.oracle.fused_comparison import compare_fused
from ropecheck.oracle.norm import Norm, strict_reciprocal_root

Nearest = Callable[[Fraction, torch.dtype], float]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [(256, 64), (128, 128), (72, 72), (20, 8), (2, 2)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
widths = pytest.mark.parametrize(("width", "rotary_dim"), WIDTHS, ids=str)


def call(
    dtype: torch.dtype = torch.bfloat16,
    width: int = 256,
    rotary_dim: int = 64,
    tokens: int = 23,
    heads: int = 3,
    norm: Norm | None = None,
    scale: float = 1.0,
    fma: bool = False,
    weights: torch.dtype | None = None,
) -> NormRotation:
    """Random x, weights about zero, and a table of random angles."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(tokens, heads, width, generator=generator) * scale).to(dtype)
    weight = (torch.randn(width, generator=generator) * 0.1).to(weights or dtype)
    angle = torch.rand(tokens, rotary_dim // 2, generator=generator) * 6.25
    return NormRotation(x, weight, angle.cos(), angle.sin(), norm or Norm(), fma)


def by_hand(given: NormRotation, nearest: Nearest) -> Tensor:
    """The specification, number by number, from the reciprocal root on."""
    dtype, out = given.x.dtype, torch.empty_like(given.x)
    half = given.rotary_dim // 2

    def narrow(number: Fraction) -> float:
        return nearest(Fraction(number), torch.float32)

    def last(value: float) -> float:
        return nearest(Fraction(value), dtype)

    roots = strict_reciprocal_root(given.x, given.norm.eps)[..., 0]
    offset = Fraction(given.norm.weight_offset)
    for token in range(given.x.shape[0]):
        c, s = ([Fraction(v) for v in t[token].tolist()] for t in (given.cos, given.sin))
        for head in range(given.x.shape[1]):
            root = Fraction(roots[token, head].item())
            y = []
            for x, w in zip(given.x[token, head].tolist(), given.weight.tolist(), strict=True):
                scaled = narrow(Fraction(narrow(Fraction(x) * root)) * Fraction(narrow(Fraction(w) + offset)))
                y.append(Fraction(last(scaled) if given.norm.round_norm else scaled))
            row = [last(v) for v in y]
            for lane in range(half):
                a, b = y[lane], y[lane + half]
                as_, bs = Fraction(narrow(a * s[lane])), Fraction(narrow(b * s[lane]))
                ac, bc = a * c[lane], b * c[lane]
                if not given.fma:
                    ac, bc = Fraction(narrow(ac)), Fraction(narrow(bc))
                row[lane], row[lane + half] = last(narrow(ac - bs)), last(narrow(bc + as_))
            out[token, head] = torch.tensor(row).to(dtype)
    return out


@dtypes
@pytest.mark.parametrize("fma", [False, True], ids=["separate", "fma"])
@pytest.mark.parametrize("norm", [Norm(), Norm(1e-5, 0.0, round_norm=False)], ids=str)
@pytest.mark.parametrize(("width", "rotary_dim"), [(20, 8), (7, 6), (12, 12)])
def test_strict_bytes(dtype: torch.dtype, fma: bool, norm: Norm, width: int, rotary_dim: int, nearest: Nearest) -> None:
    """Strict bytes are the specification written out in rational numbers, and pass as strict."""
    given = call(dtype, width, rotary_dim, tokens=3, heads=2, norm=norm, fma=fma)
    got = strict_fused(given)
    assert torch.equal(bits(got), bits(by_hand(given, nearest)))
    found = compare_fused(given, got)
    assert found.passed
    assert found.elements == got.numel()
    assert (found.outside, found.unexplained, found.strict_differs, found.worst) == (0, 0, 0, [])


def foreign(given: NormRotation, how: str) -> Tensor:
    """The contract as others evaluate it: another order, association, contraction, approximation or precision."""
    half, dtype = given.rotary_dim // 2, given.x.dtype
    x = given.x.double() if "fp64" in how else given.x.float()
    factor = given.weight.to(x.dtype) + given.norm.weight_offset
    c, s = (t.to(x.dtype)[:, None].expand(-1, x.shape[1], -1) for t in (given.cos, given.sin))
    squares = (x * x).flip(-1).cumsum(-1)[..., -1:] if "sequence" in how else (x * x).sum(-1, keepdim=True)
    mean = squares * torch.tensor(1 / x.shape[-1], dtype=x.dtype) if "times" in how else squares / x.shape[-1]
    shifted = mean + given.norm.eps
    if "division" in how:
        y = x / shifted.sqrt() * factor
    else:
        y = x * (shifted.rsqrt() * factor) if "factor first" in how else x * shifted.rsqrt() * factor
    if given.norm.round_norm:
        y = y.to(dtype).to(x.dtype)
    a, b, tail = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    turned = (fma32(a, c, -(b * s)), fma32(b, c, a * s)) if "fma" in how else (a * c - b * s, b * c + a * s)
    return torch.cat((*turned, tail), dim=-1).to(dtype)


WAYS = [
    "torch",
    "sequence",
    "factor first",
    "times fma",
    "division",
    "fp64",
    "fp64 division",
    "sequence fma factor first",
]


@dtypes
@widths
@pytest.mark.parametrize("norm", [Norm(), Norm(round_norm=False)], ids=["rounded", "not rounded"])
@pytest.mark.parametrize("how", WAYS)
def test_other_evaluations_pass(dtype: torch.dtype, width: int, rotary_dim: int, norm: Norm, how: str) -> None:
    """Every evaluation that the contract admits passes, on numbers of ordinary, small and large magnitude."""
    for scale in (1.0, 1e-4, 30.0):
        given = call(dtype, width, rotary_dim, norm=norm, scale=scale, weights=torch.float32 if scale == 1.0 else None)
        found = compare_fused(given, foreign(given, how))
        assert (found.outside, found.unexplained) == (0, 0), found.worst[:1]


def without_channel(given: NormRotation) -> Tensor:
    kept = torch.arange(given.x.shape[-1]) != 5
    return torch.where(kept, strict_fused(replace(given, x=given.x * kept)), strict_fused(given))


def last_lane_still(given: NormRotation) -> Tensor:
    cos, sin = given.cos.clone(), given.sin.clone()
    cos[:, -1], sin[:, -1] = 1.0, 0.0
    return strict_fused(replace(given, cos=cos, sin=sin))


def tail_as_it_is(given: NormRotation) -> Tensor:
    return torch.cat((strict_fused(given)[..., : given.rotary_dim], given.x[..., given.rotary_dim :]), dim=-1)


def truncated(given: NormRotation) -> Tensor:
    wide = strict_fused(replace(given, x=given.x.float(), norm=replace(given.norm, round_norm=False)))
    cut = (bits(wide) & ~0xFFFF if given.x.dtype == torch.bfloat16 else bits(wide) & ~0x1FFF).view(torch.float32)
    return cut.to(given.x.dtype)


FAULTS: dict[str, Callable[[NormRotation], Tensor]] = {
    "a channel is missing from the sum": without_channel,
    "eps is added twice": lambda g: strict_fused(replace(g, norm=replace(g.norm, eps=2 * g.norm.eps))),
    "weights are taken as they are": lambda g: strict_fused(replace(g, norm=replace(g.norm, weight_offset=0.0))),
    "the next token's table": lambda g: strict_fused(replace(g, cos=g.cos.roll(1, 0), sin=g.sin.roll(1, 0))),
    "the last lane is not turned": last_lane_still,
    "the tail is not normalised": tail_as_it_is,
    "the sine has the other sign": lambda g: strict_fused(replace(g, sin=-g.sin)),
    "truncated, not rounded": truncated,
}


@dtypes
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail(dtype: torch.dtype, fault: str) -> None:
    """Each fault is outside, with the worst element's place and values."""
    given = call(dtype, 72, 48, scale=2.0**-6 if "eps" in fault else 1.0)
    got = FAULTS[fault](given)
    found = compare_fused(given, got)
    assert not found.passed
    assert found.outside
    worst = found.worst[0]
    assert worst.outside_by == max(p.outside_by for p in found.worst)
    assert got[worst.index].item() == worst.got
    assert not worst.low <= worst.got <= worst.high


def test_missing_rounding_between_norm_and_rotation_is_seen() -> None:
    """A kernel that does not round between norm and rotation fails the contract that does, and the other way round."""
    for ours, theirs in ((True, False), (False, True)):
        given = call(torch.bfloat16, norm=Norm(round_norm=ours))
        found = compare_fused(given, strict_fused(replace(given, norm=Norm(round_norm=theirs))))
        assert found.outside > 0.02 * found.elements


@pytest.mark.parametrize("place", [(0, 0, 0), (22, 2, 255), (7, 1, 40), (9, 0, 63)], ids=str)
@dtypes
@pytest.mark.parametrize("at_once", [1, 5000, 1 << 16])
def test_a_planted_element_is_the_one_reported(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int, int], dtype: torch.dtype, at_once: int
) -> None:
    """One wrong element is the worst, with its index and values, however the tokens are cut into blocks."""
    monkeypatch.setattr(comparison_module, "ELEMENTS_AT_ONCE", {"cpu": at_once})
    given = call(dtype)
    got = strict_fused(given)
    strict = got[place].item()
    got[place] = from_key(
        key(got[place].reshape(1)).long() + 100_000 // (1 if dtype == torch.float32 else 1000), dtype
    )[0]
    found = compare_fused(given, got)
    assert (found.outside, found.strict_differs, len(found.worst)) == (1, 1, 1)
    assert (found.worst[0].index, found.worst[0].strict, found.worst[0].got) == (place, strict, got[place].item())


@pytest.mark.parametrize("how", ["torch", "division", "sequence fma factor first"])
def test_one_root_must_explain_a_row(how: str) -> None:
    """In fp32 three values off in one element of a row is within the element's span, but no root explains the row."""
    given = call(torch.float32, tokens=40)
    got = foreign(given, how)
    channel = torch.randint(256, (40, 3, 1), generator=torch.Generator().manual_seed(0))
    moved = from_key(key(got.gather(-1, channel)) + 4, torch.float32)
    found = compare_fused(given, got.scatter(-1, channel, moved))
    assert found.outside == 0
    assert found.unexplained > 0.9 * 120
    assert found.rows[0] == (0, 0)
    assert not found.passed


def test_rows_with_two_roots_are_unexplained() -> None:
    """A row whose halves were scaled by admissible but different roots is unexplained."""
    given = call(torch.float32)
    got = strict_fused(given)
    got[..., 128:] *= 1 + 2.0**-19
    found = compare_fused(given, got)
    assert found.outside == 0
    assert found.unexplained == 23 * 3


def test_fingerprint_names_the_contraction() -> None:
    """The form of the rotation is named where the norm is in the fixed order, and nothing where it is not."""
    given = call(torch.float32)
    assert compare_fused(given, strict_fused(given)).fingerprint == ("separate",)
    contracted = compare_fused(given, strict_fused(replace(given, fma=True)))
    assert contracted.passed
    assert contracted.strict_differs > 0
    assert contracted.fingerprint == ("fused x0c", "fused x1c")
    assert compare_fused(replace(given, fma=True), strict_fused(replace(given, fma=True))).strict_differs == 0
    assert compare_fused(given, foreign(given, "sequence")).fingerprint == ()


@dtypes
def test_share_of_elements_with_several_values(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """At 256 channels about 0.4 % of bf16 and 3 % of fp16 outputs admit several values, and all in fp32."""
    found = compare_fused(given := call(dtype, rotary_dim=256, tokens=300), strict_fused(given))
    share = found.several / found.elements
    with capsys.disabled():
        print(f"\nfused, 256 channels in {dtype}: {100 * share:.2f} % with several values")
    least, most = {torch.bfloat16: (0.002, 0.008), torch.float16: (0.02, 0.05), torch.float32: (1.0, 1.0)}[dtype]
    assert least <= share <= most


def test_out_of_range_tokens_are_nan_and_padding_is_not_looked_at() -> None:
    """Every channel of an out-of-range token must be NaN; whatever stands in padding, NaN in x too, is no matter."""
    given = call()
    flags = torch.zeros(2, 23, dtype=torch.bool)
    flags[0, 3], flags[1, 5] = True, True
    given = replace(given, out_of_range=flags[0], padding=flags[1])
    given.x[5], given.cos[3], given.sin[3] = math.nan, math.nan, math.nan
    got = strict_fused(given)
    assert got[3].isnan().all()
    got[5] = 12345.0
    found = compare_fused(given, got)
    assert found.passed
    assert found.elements == 22 * 3 * 256
    got[3, 1, 200] = 0.0
    assert compare_fused(given, got).outside == 1
    assert compare_fused(replace(given, out_of_range=None), got).outside > 0


@dtypes
def test_special_values(dtype: torch.dtype) -> None:
    """Strict bytes of rows with infinities, NaN, zeros and extreme numbers pass; a finite number for a NaN does not."""
    given = call(dtype, 20, 12, tokens=200)
    limits = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, limits.max, -limits.max, limits.tiny])
    generator = torch.Generator().manual_seed(3)
    drawn = values[torch.randint(len(values), given.x.shape, generator=generator)].to(dtype)
    rare = torch.rand(given.x.shape, generator=generator) < 0.04
    given = replace(given, x=torch.where(rare, drawn, given.x))
    got = strict_fused(given)
    found = compare_fused(given, got)
    assert (found.outside, found.unexplained, found.strict_differs) == (0, 0, 0)
    assert bool(got.isnan().any())
    patched = torch.where(got.isnan(), torch.ones_like(got), got)
    assert compare_fused(given, patched).outside == int(got.isnan().sum())
    infinite = given.x.isinf().any(-1) & ~given.x.isnan().any(-1)
    tail = got[infinite][..., 12:]
    assert bool(((tail == 0) | tail.isnan()).all())


def test_gathered_tables() -> None:
    """Lanes read their own row; the last table row works; a token with any row in use out of range is marked."""
    cache = torch.arange(50 * 8, dtype=torch.float32).reshape(50, 8)
    rows = torch.tensor([[0, 49, 7, -1, 3], [1, 48, 50, 2, 3], [2, 47, 9, 4, 1 << 40]])
    axis_map = interleaved((2, 1, 1), 8)
    cos, sin, outside = gathered_tables(cache, rows, axis_map)
    assert outside.tolist() == [False, False, True, True, True]
    for token in (0, 1):
        assert cos[token].tolist() == [cache[rows[r, token], lane].item() for lane, r in enumerate(axis_map)]
        assert sin[token].tolist() == [cache[rows[r, token], 4 + lane].item() for lane, r in enumerate(axis_map)]
    assert bool(cos[outside].isnan().all() and sin[outside].isnan().all())
    alone = gathered_tables(cache, rows, (0, 0, 0, 0))
    assert alone[2].tolist() == [False, False, False, True, False]
    one = gathered_tables(cache, rows[0])
    assert all(same(a, b).all() for a, b in zip(alone[:2], one[:2], strict=True))
    for positions, given in ((rows, None), (rows[0], axis_map)):
        with pytest.raises(ValueError, match="axis_map must be given with positions of three rows, and only with them"):
            gathered_tables(cache, positions, given)
    for bad in ((0, 1, 2), (0, 1, 2, 3), (0, 1, 2, -1)):
        with pytest.raises(ValueError, match="axis_map must have 4 entries from 0 to 2"):
            gathered_tables(cache, rows, bad)


def test_dropped_axes_fail() -> None:
    """A kernel that reads every lane's angle from the time row is outside where the rows differ, and only there."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.arange(300.0)[:, None] * 1e4 ** (-torch.arange(32.0) / 32)
    cache = torch.cat((angle.cos(), angle.sin()), dim=-1)
    rows = torch.stack([torch.randint(100 * r, 100 * r + 90, (23,), generator=generator) for r in range(3)])
    axis_map, base = interleaved((11, 11, 10), 64), call(torch.bfloat16)
    right, dropped = (replace(base, cos=c, sin=s) for c, s, _ in (
        gathered_tables(cache, rows, axis_map), gathered_tables(cache, rows[0]),
    ))  # fmt: skip
    got = strict_fused(dropped)
    found = compare_fused(right, got)
    assert found.outside > 1000
    owner = [axis_map[p.index[2] % 32] for p in found.worst]
    assert all(owner)  # rows of height and width alone
    text = rows[:1].expand(3, -1)
    c, s, _ = gathered_tables(cache, text, axis_map)
    assert compare_fused(replace(base, cos=c, sin=s), strict_fused(dropped)).passed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(23, 256)}, r"x must be \[T, H, D\], not \[23, 256\]"),
        ({"weight": torch.zeros(64)}, r"weight must be \[256\] like the last dimension of x, not \[64\]"),
        ({"cos": torch.zeros(23, 31)}, r"cos and sin must be \[23, R / 2\] with a row for each token"),
        ({"cos": torch.zeros(22, 32), "sin": torch.zeros(22, 32)}, r"cos and sin must be \[23, R / 2\]"),
        ({"cos": torch.zeros(23, 129), "sin": torch.zeros(23, 129)}, "2 <= R <= D = 256, not 129"),
        ({"padding": torch.zeros(23)}, r"padding must be bool \[23\], not torch.float32"),
        (
            {"out_of_range": torch.zeros(22, dtype=torch.bool)},
            r"out_of_range must be bool \[23\], not torch.bool \[22\]",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], said: str) -> None:
    """A tensor of another shape or dtype is refused by its name."""
    with pytest.raises(ValueError, match=said):
        replace(call(), **change)


def test_other_output_is_refused() -> None:
    """An output of another shape or dtype is refused, and no tokens at all pass with nothing compared."""
    given = call()
    for got in (given.x.float(), given.x[:5]):
        with pytest.raises(ValueError, match=r"got must be torch.bfloat16 \(23, 3, 256\) like x, not"):
            compare_fused(given, got)
    nothing = call(tokens=0)
    found = compare_fused(nothing, strict_fused(nothing))
    assert (found.passed, found.elements) == (True, 0)
