"""The reference against exact rational arithmetic, and against itself under other strides."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope

# Significand bits and the exponent of the smallest subnormal: IEEE 754 and the bfloat16 format.
FORMATS = {torch.float32: (24, -149), torch.float16: (11, -24), torch.bfloat16: (8, -133)}
INTEGER_VIEW = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = tuple(FORMATS)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits."""
    view = INTEGER_VIEW[left.dtype]
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(view), right.contiguous().view(view))


def rounded(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The number of ``dtype`` nearest to ``value``, ties to even; no overflow."""
    if value == 0:
        return value
    bits, smallest = FORMATS[dtype]
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator))
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - bits + 1, smallest)
    return round(value / quantum) * quantum  # round() of a Fraction takes ties to even


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_rounds_each_product_and_sum_once(dtype: torch.dtype, pairing: str, conjugate: bool) -> None:
    """Every element is the rational result with one fp32 rounding per operation and one to the output dtype."""
    generator = torch.Generator().manual_seed(7)
    lanes, tokens = 6, 20
    scale = torch.tensor([1.0, 1e-3, 3e-5, 64.0, 1e-38 if dtype != torch.float16 else 1e-6])
    x = torch.randn(1, tokens, 2, 2 * lanes, generator=generator)
    x = (x * scale[torch.arange(tokens) % 5].view(1, tokens, 1, 1)).to(dtype)
    angle = 10 * torch.randn(tokens, lanes, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    y = multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate, backend="reference")
    sign = -1 if conjugate else 1
    for token in range(tokens):
        for head in range(2):
            for lane in range(lanes):
                first, second = (2 * lane, 2 * lane + 1) if pairing == "adjacent" else (lane, lane + lanes)
                x0, x1 = (Fraction(x[0, token, head, channel].item()) for channel in (first, second))
                c, s = Fraction(cos[token, lane].item()), sign * Fraction(sin[token, lane].item())
                x0c, x1s, x1c, x0s = (rounded(a * b, torch.float32) for a, b in ((x0, c), (x1, s), (x1, c), (x0, s)))
                for channel, total in ((first, x0c - x1s), (second, x1c + x0s)):
                    wanted = rounded(rounded(total, torch.float32), dtype)
                    assert Fraction(y[0, token, head, channel].item()) == wanted, (token, head, lane, channel)


def test_conjugate_flips_the_sign_bit_of_a_zero_sine() -> None:
    """With s = +0 the conjugate multiplies by -0, which the sign of a zero result shows."""
    x = torch.tensor([-0.0, 0.0]).view(1, 1, 1, 2)
    cos, sin = torch.ones(1, 1), torch.zeros(1, 1)
    plain = multi_axis_rope(x, cos, sin, backend="reference")
    conjugate = multi_axis_rope(x, cos, sin, conjugate=True, backend="reference")
    assert torch.signbit(plain).flatten().tolist() == [True, False]
    assert torch.signbit(conjugate).flatten().tolist() == [False, False]


@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tail_channels_keep_their_bits(dtype: torch.dtype, pairing: str) -> None:
    """Channels past R are moved, signalling NaN payloads included."""
    view = INTEGER_VIEW[dtype]
    limits = torch.iinfo(view)
    bits = torch.randint(limits.min, limits.max, (2, 3, 2, 10), dtype=view, generator=torch.Generator().manual_seed(1))
    signalling = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}[dtype]
    bits[..., 7] = signalling
    bits[..., :6] = 0
    y = multi_axis_rope(bits.view(dtype), torch.ones(3, 3), torch.ones(3, 3), pairing=pairing)
    assert torch.equal(y.view(view)[..., 6:], bits[..., 6:])


def test_shared_table_equals_the_same_table_per_sample() -> None:
    """B = 2, S = 7 with one table gives the bytes of that table repeated for each sample, and of stride-0 batch."""
    x, cos, sin = torch.randn(2, 7, 3, 8), torch.randn(7, 4), torch.randn(7, 4)
    shared = multi_axis_rope(x, cos, sin)
    assert same_bytes(shared, multi_axis_rope(x, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1)))
    assert same_bytes(shared, multi_axis_rope(x, cos.expand(2, 7, 4), sin.expand(2, 7, 4)))


def test_per_sample_table_is_used_by_its_own_sample() -> None:
    """S = 1 with B = 2: exchanging the samples' tables changes the result."""
    x = torch.randn(1, 1, 2, 4).expand(2, 1, 2, 4)
    cos, sin = torch.randn(2, 1, 2), torch.randn(2, 1, 2)
    y = multi_axis_rope(x, cos, sin)
    assert same_bytes(y[:1], multi_axis_rope(x[:1], cos[:1], sin[:1]))
    assert same_bytes(y[1:], multi_axis_rope(x[1:], cos[1:], sin[1:]))
    assert not torch.equal(y[0], y[1])


def test_output_is_contiguous_and_the_input_untouched() -> None:
    """A transposed input gives a contiguous output of its dtype and keeps its bytes."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16).transpose(1, 2)
    before = x.clone()
    y = multi_axis_rope(x, torch.randn(5, 4), torch.randn(5, 4))
    assert y.is_contiguous()
    assert y.dtype == torch.bfloat16
    assert same_bytes(x, before)


@pytest.mark.parametrize("shape", [(0, 7, 3, 8), (2, 0, 3, 8), (2, 7, 0, 8)], ids=["batch", "sequence", "heads"])
def test_empty_input_gives_an_empty_output(shape: tuple[int, int, int, int]) -> None:
    """An empty batch, sequence or head dimension is no error."""
    y = multi_axis_rope(torch.randn(shape), torch.randn(shape[1], 4), torch.randn(shape[1], 4))
    assert y.shape == shape
