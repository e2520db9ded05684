"""Gradients of the fused contract: strict order, foreign evaluations, faults, exact sums, out-of-range and padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.floats import bits, same
from ropecheck.oracle.fused import NormRotation, strict_fused_vjp, turned_back
from ropecheck.oracle.fused_comparison import compare_fused_vjp, compare_weight_gradient
from ropecheck.oracle.fused_gradients import exact_weight_gradient
from ropecheck.oracle.norm import Norm, strict_reciprocal_root

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [(256, 64), (72, 72), (20, 8), (2, 2)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
widths = pytest.mark.parametrize(("width", "rotary_dim"), WIDTHS, ids=str)


def call(
    dtype: torch.dtype, width: int = 256, rotary_dim: int = 64, tokens: int = 17, heads: int = 3, scale: float = 1.0
) -> tuple[NormRotation, Tensor]:
    """A call on random numbers and an incoming gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = (tokens, heads, width)
    x = (torch.randn(shape, generator=generator) * scale).to(dtype)
    weight = (torch.randn(width, generator=generator) * 0.1).to(dtype)
    angle = torch.rand(tokens, rotary_dim // 2, generator=generator) * 6.25
    gradient = torch.randn(shape, generator=generator).to(dtype)
    return NormRotation(x, weight, angle.cos(), angle.sin()), gradient


def gradients(given: NormRotation, gradient: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Both gradients as autograd has them, or in the form that reuses the saved root, in fp32 or fp64."""
    wide = torch.float64 if "fp64" in how else torch.float32
    half = given.rotary_dim // 2
    c, s = (t.to(wide)[:, None] for t in (given.cos, given.sin))
    g, x, factor = gradient.to(wide), given.x.to(wide), given.weight.to(wide) + given.norm.weight_offset
    a, b, tail = g[..., :half], g[..., half : 2 * half], g[..., 2 * half :]
    turned = torch.cat((a * c + b * s, b * c - a * s, tail), dim=-1)
    root = ((x * x).mean(-1, keepdim=True) + given.norm.eps).rsqrt()
    if "saved root" in how:
        h = turned * factor
        of_x = root * h + root * (-(1 / x.shape[-1]) * root * root * (h * x).sum(-1, keepdim=True) * x)
    else:
        leaf = x.clone().requires_grad_()
        normed = leaf * ((leaf * leaf).mean(-1, keepdim=True) + given.norm.eps).rsqrt() * factor
        (of_x,) = torch.autograd.grad(normed, leaf, turned)
    return of_x.to(given.x.dtype), (turned * (x * root)).sum((0, 1)).to(given.weight.dtype)


@dtypes
@widths
@pytest.mark.parametrize("how", ["strict", "autograd", "saved root", "fp64 autograd", "fp64 saved root"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_admitted_evaluations_pass(dtype: torch.dtype, width: int, rotary_dim: int, how: str, tokens: int) -> None:
    """The fixed order and others, rearranged ones too, are inside for x and for the weight."""
    for scale in (1.0, 1e-3, 30.0):
        given, gradient = call(dtype, width, rotary_dim, tokens, scale=scale)
        made = strict_fused_vjp(given, gradient) if how == "strict" else gradients(given, gradient, how)
        of_x, of_weight = compare_fused_vjp(given, gradient, made[0]), compare_weight_gradient(given, gradient, made[1])
        assert (of_x.outside, of_weight.outside) == (0, 0)
        assert (of_x.elements, of_weight.elements) == (given.x.numel(), width)
        if how == "strict":
            assert (of_x.strict_differs, of_weight.strict_differs) == (0, 0)


@pytest.mark.parametrize("fma", [False, True])
def test_strict_order_by_hand(fma: bool) -> None:
    """The fixed order in fp32 numpy arithmetic, pair by pair, gives the same bytes."""
    import numpy as np

    given, gradient = call(torch.float32, 6, 4, tokens=3, heads=2)
    given = replace(given, fma=fma)
    one, count = np.float32(1), np.float32(6)
    f = given.weight.numpy() + one
    rows: list[list[np.float32]] = []
    of_x, of_weight = strict_fused_vjp(given, gradient)
    for token in range(3):
        c, s = given.cos[token].numpy(), given.sin[token].numpy()
        for head in range(2):
            x, g = given.x[token, head].numpy(), gradient[token, head].numpy()

            def tree(p: list[np.float32]) -> np.float32:
                return ((p[0] + p[1]) + (p[2] + p[3])) + (p[4] + p[5])

            root = one / np.sqrt(tree([v * v for v in x]) / count + np.float32(1e-6))
            turned = list(g)
            for lane in range(2):
                a, b = g[lane], g[lane + 2]
                if fma:
                    # Exact products and one sum: in double precision, and then rounded.
                    turned[lane] = np.float32(np.float64(a) * np.float64(c[lane]) + np.float64(b * s[lane]))
                    turned[lane + 2] = np.float32(np.float64(b) * np.float64(c[lane]) - np.float64(a * s[lane]))
                else:
                    turned[lane], turned[lane + 2] = a * c[lane] + b * s[lane], b * c[lane] - a * s[lane]
            xhat = [v * root for v in x]
            h = [t * w for t, w in zip(turned, f, strict=True)]
            mean = tree([a * b for a, b in zip(h, xhat, strict=True)]) / count
            expected = [root * (a - b * mean) for a, b in zip(h, xhat, strict=True)]
            assert np.array_equal(of_x[token, head].numpy().view(np.int32), np.array(expected).view(np.int32))
            rows.append([a * b for a, b in zip(turned, xhat, strict=True)])
    total = [((r[0] + r[1]) + (r[2] + r[3])) + (r[4] + r[5]) for r in zip(*rows, strict=True)]
    assert np.array_equal(of_weight.numpy().view(np.int32), np.array(total).view(np.int32))


def without_mean(given: NormRotation, gradient: Tensor) -> Tensor:
    factor = given.norm.factor(given.weight)
    return (strict_reciprocal_root(given.x, given.norm.eps) * turned_back(given, gradient) * factor).to(given.x.dtype)


FAULTS: dict[str, Callable[[NormRotation, Tensor], Tensor]] = {
    "the mean is left out": without_mean,
    "turned forward": lambda g, d: strict_fused_vjp(replace(g, sin=-g.sin), d)[0],
    "the offset is forgotten": lambda g, d: strict_fused_vjp(replace(g, norm=replace(g.norm, weight_offset=0.0)), d)[0],
    "the next head's gradient": lambda g, d: strict_fused_vjp(g, d.roll(1, 1))[0],
    "the gradient of the tail is zero": lambda g, d: strict_fused_vjp(g, d * (torch.arange(d.shape[-1]) < 48))[0],
}


@dtypes
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_x_fail(dtype: torch.dtype, fault: str) -> None:
    """Each fault in the gradient of x is outside on most elements."""
    given, gradient = call(dtype, 72, 48)
    found = compare_fused_vjp(given, gradient, FAULTS[fault](given, gradient))
    assert found.outside > found.elements // 4
    assert found.worst


@dtypes
def test_a_dropped_token_shows_in_the_weights_gradient(dtype: torch.dtype) -> None:
    """At 17 tokens a missing row moves nearly every element of the weight's gradient out of its bound."""
    given, gradient = call(dtype)
    dropped = strict_fused_vjp(replace(given, padding=torch.arange(17) == 16), gradient)[1]
    assert compare_weight_gradient(given, gradient, dropped).outside > 250


@dtypes
@pytest.mark.parametrize("weights", [torch.float32, None], ids=["fp32 weights", "same dtype"])
def test_exact_sums(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    """With x = +-1024, quarter turns and small integers every order gives the same bytes, and a lost token shows."""
    generator = torch.Generator().manual_seed(0)
    tokens, shape = 500, (500, 4, 256)
    x = (torch.randint(2, shape, generator=generator) * 2048 - 1024).to(dtype)
    turns = torch.randint(4, (tokens, 32), generator=generator)
    cos, sin = (torch.tensor(values)[turns] for values in ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]))
    gradient = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    given = NormRotation(x, torch.zeros(256, dtype=weights or dtype), cos, sin)
    exact = exact_weight_gradient(given, gradient)
    assert exact.dtype == given.weight.dtype
    assert torch.equal(exact, strict_fused_vjp(given, gradient)[1])
    order = torch.randperm(tokens, generator=generator)
    shuffled = replace(given, x=x[order], cos=cos[order], sin=sin[order])
    assert torch.equal(exact, strict_fused_vjp(shuffled, gradient[order])[1])
    assert torch.equal(exact, gradients(given, gradient, "autograd")[1])
    lost = exact_weight_gradient(replace(given, padding=torch.arange(tokens) == 77), gradient)
    assert torch.equal(lost, strict_fused_vjp(replace(given, padding=torch.arange(tokens) == 77), gradient)[1])
    if given.weight.dtype == torch.float32:
        assert float((lost != exact).float().mean()) > 0.85


def test_inexact_sums_are_refused() -> None:
    """Other x, tables or gradients, or sums beyond 2^24, have no one gradient in every order."""
    given, gradient = call(torch.float32)
    with pytest.raises(ValueError, match="x, table and gradient must make integers"):
        exact_weight_gradient(given, gradient)
    whole = NormRotation(torch.full_like(given.x, 1024.0), given.weight, given.cos.round(), given.sin.round())
    with pytest.raises(ValueError, match="x, table and gradient must make integers"):
        exact_weight_gradient(replace(whole, norm=Norm(eps=1.0)), gradient.round())
    with pytest.raises(ValueError, match=r"gradient is too large: its products .* more than 2\*\*24"):
        exact_weight_gradient(whole, torch.full_like(gradient, 2.0**20))


def test_out_of_range_and_padding() -> None:
    """Padding's gradient is zero and adds nothing; an out-of-range token's is NaN, and then the weight's is too."""
    given, gradient = call(torch.bfloat16)
    padding, outside = (torch.arange(17) == n for n in (4, 9))
    given = replace(given, padding=padding)
    gradient[4] = math.nan
    of_x, of_weight = strict_fused_vjp(given, gradient)
    assert torch.equal(bits(of_x[4]), torch.zeros_like(bits(of_x[4])))
    assert bool(of_weight.isfinite().all())
    assert compare_fused_vjp(given, gradient, of_x).passed
    assert compare_weight_gradient(given, gradient, of_weight).passed
    wrong = of_x.clone()
    wrong[4, 0, 0] = 1.0
    assert compare_fused_vjp(given, gradient, wrong).outside == 1
    given = replace(given, out_of_range=outside)
    bad_x, bad_weight = strict_fused_vjp(given, gradient)
    assert bool(bad_x[9].isnan().all() and bad_weight.isnan().all())
    assert bool(same(bad_x, of_x)[~outside].all())
    assert compare_fused_vjp(given, gradient, bad_x).passed
    assert compare_fused_vjp(given, gradient, of_x).outside == 3 * 256
    assert compare_weight_gradient(given, gradient, bad_weight).passed
    assert not compare_weight_gradient(given, gradient, of_weight).passed


@dtypes
def test_special_values(dtype: torch.dtype) -> None:
    """A NaN in x or gradient makes its row NaN and is required to; infinities admit what strict bytes are."""
    given, gradient = call(dtype, 20, 12, tokens=60)
    given.x[0, 0, 3], gradient[1, 1, 5], given.x[2, 2, 7], gradient[3, 0, 9] = math.nan, math.nan, math.inf, -math.inf
    given.x[4], gradient[5] = torch.finfo(dtype).max, torch.finfo(dtype).max
    made = strict_fused_vjp(given, gradient)[0]
    assert bool(made[0, 0].isnan().all() and made[1, 1].isnan().all())
    assert compare_fused_vjp(given, gradient, made).passed
    made[0, 0, 2] = 1.0
    assert compare_fused_vjp(given, gradient, made).outside == 1


def test_other_shapes_are_refused() -> None:
    """A gradient or result of another shape or dtype is refused by its name."""
    given, gradient = call(torch.bfloat16)
    of_x, of_weight = strict_fused_vjp(given, gradient)
    with pytest.raises(ValueError, match=r"gradient must be torch.bfloat16 \(17, 3, 256\) like x"):
        strict_fused_vjp(given, gradient.float())
    for compared in (compare_fused_vjp, compare_weight_gradient):
        with pytest.raises(ValueError, match=r"gradient must be torch.bfloat16 \(17, 3, 256\) like x"):
            compared(given, gradient[:4], of_x)
    with pytest.raises(ValueError, match=r"got must be torch.bfloat16 \(17, 3, 256\) like x"):
        compare_fused_vjp(given, gradient, of_x.float())
    with pytest.raises(ValueError, match=r"got must be torch.bfloat16 \[256\] like the weight"):
        compare_weight_gradient(given, gradient, of_weight.float())
