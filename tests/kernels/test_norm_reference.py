"""The reference of the normalised rotation against exact arithmetic, element by element."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropecheck.kernels import interleaved_axis_map, qk_norm_rope_gate, trace_launches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VIEWS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
EPS = 1e-6


def rounded(value: Fraction) -> np.float32:
    """The fp32 nearest to ``value``, ties to even: rational arithmetic, for values well within the normal range."""
    if not value:
        return np.float32(0)
    exponent = math.frexp(float(abs(value)))[1] - 24
    unit = Fraction(2) ** exponent
    return np.float32(float(round(value / unit) * unit))


def product(x: np.float32, y: np.float32) -> np.float32:
    return rounded(Fraction(float(x)) * Fraction(float(y)))


def total(x: np.float32, y: np.float32) -> np.float32:
    return rounded(Fraction(float(x)) + Fraction(float(y)))


def fused(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    return rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def root(x: np.float32) -> np.float32:
    """The fp32 nearest to the root, decided by squares of rationals."""
    guess = np.float32(math.sqrt(float(x)))
    for candidate in (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf))):
        low, high = (
            (Fraction(float(candidate)) + Fraction(float(np.nextafter(candidate, np.float32(end))))) / 2
            for end in (0.0, np.inf)
        )
        if low**2 < Fraction(float(x)) < high**2:
            return np.float32(candidate)
    raise AssertionError(x)


def tree(values: list[np.float32]) -> np.float32:
    values = values + [np.float32(0)] * ((1 << (len(values) - 1).bit_length()) - len(values))
    while len(values) > 1:
        values = [total(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def head_of(
    x: Tensor,
    weight: Tensor,
    cos: list[float],
    sin: list[float],
    *,
    weight_offset: float = 1.0,
    round_norm: bool = True,
    fma: bool = False,
) -> Tensor:
    """One head, computed one operation at a time as the contract writes them down."""
    values = [np.float32(value) for value in x.tolist()]
    mean = rounded(Fraction(float(tree([product(value, value) for value in values]))) / len(values))
    inverse = rounded(1 / Fraction(float(root(total(mean, np.float32(EPS))))))
    factors = [np.float32(value) for value in weight.tolist()]
    if weight_offset:
        factors = [total(factor, np.float32(weight_offset)) for factor in factors]
    y = [product(product(value, inverse), factor) for value, factor in zip(values, factors, strict=True)]
    if round_norm:
        y = [np.float32(value) for value in torch.tensor(np.array(y)).to(x.dtype).tolist()]
    lanes = len(cos)
    out = list(y)
    for lane in range(lanes):
        a, b, c, s = y[lane], y[lane + lanes], np.float32(cos[lane]), np.float32(sin[lane])
        if fma:
            out[lane], out[lane + lanes] = fused(a, c, -product(b, s)), fused(b, c, product(a, s))
        else:
            out[lane] = total(product(a, c), -product(b, s))
            out[lane + lanes] = total(product(b, c), product(a, s))
    return torch.tensor(np.array(out)).to(x.dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain weight": {"weight_offset": 0.0},
    "offset a half": {"weight_offset": 0.5},
    "no rounding": {"round_norm": False},
    "fma": {"fma": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_is_the_contracts(dtype: torch.dtype, options: str) -> None:
    """With three rows of positions, a tail and D no power of two, each element is that of rational arithmetic."""
    torch.manual_seed(0)
    tokens, q_heads, head_dim, lanes = 4, 2, 11, 4
    axis_map = interleaved_axis_map([2, 1, 1], 2 * lanes, order="thw")
    q_gate, k = torch.randn(tokens, q_heads * 2 * head_dim).to(dtype), torch.randn(tokens, head_dim).to(dtype)
    q_weight, k_weight = torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)
    cache, positions = torch.randn(64, 2 * lanes), torch.tensor([[0, 3, 5, 63], [10, 11, 12, 13], [63, 40, 41, 42]])
    q, k_rotated, gate = qk_norm_rope_gate(
        q_gate, k, q_weight, k_weight, cache, positions, axis_map=axis_map, eps=EPS, **OPTIONS[options]
    )
    assert gate is not None
    both = q_gate.view(tokens, q_heads, 2, head_dim)
    for token in range(tokens):
        rows = [int(positions[axis_map[lane], token]) for lane in range(lanes)]
        cos = [float(cache[row, lane]) for lane, row in enumerate(rows)]
        sin = [float(cache[row, lanes + lane]) for lane, row in enumerate(rows)]
        for head in range(q_heads):
            wanted = head_of(both[token, head, 0], q_weight, cos, sin, **OPTIONS[options])
            assert torch.equal(q.view(tokens, q_heads, head_dim)[token, head], wanted)
        assert torch.equal(k_rotated[token], head_of(k[token], k_weight, cos, sin, **OPTIONS[options]))
    assert torch.equal(gate.view(tokens, q_heads, head_dim), both[:, :, 1])


def test_fma_rounds_once() -> None:
    """The exact product enters the sum: cases where two roundings, of fp32 or of fp64, give another value."""
    # Norm factor 1: the two channels are +-1024 with weight w, so y is +-w.
    one, tiny = 1.0, 2.0**-12
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the last term is half an ulp of fp32, and the addend decides.
    for addend in (2.0**-60, -(2.0**-60), 0.0):
        cache = torch.tensor([[one + tiny, addend]])
        x, weight = torch.tensor([[1024.0, -1024.0]]), torch.tensor([one + tiny, 1.0])
        q, _, _ = qk_norm_rope_gate(
            x, x, weight, weight, cache, torch.zeros(1, dtype=torch.int64), eps=0.0, gate=False, weight_offset=0.0,
            fma=True,
        )  # fmt: skip
        # The addend is -(b * s) = addend, with b = -1.
        exact = Fraction(one + tiny) ** 2 + Fraction(addend)
        assert q[0, 0].item() == rounded(exact)
    assert rounded(Fraction(one + tiny) ** 2 + Fraction(2) ** -60) != rounded(Fraction(one + tiny) ** 2)


def basis(tokens: int, heads: int, head_dim: int) -> Tensor:
    """Channels of +-1024, whose norm factor is 2^-10 exactly without eps."""
    return torch.randint(0, 2, (tokens, heads * head_dim)).mul(2).sub(1).mul(1024).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_norm_prints_the_table(dtype: torch.dtype) -> None:
    """Channels of +-1024 and weight 0 normalise to +-1 exactly, so the rotation prints sums of cosine and sine."""
    tokens, heads, head_dim, lanes = 9, 2, 16, 4
    x, cache, positions = basis(tokens, heads, head_dim), torch.randn(9, 2 * lanes), torch.randperm(9)
    zero = torch.zeros(head_dim, dtype=dtype)
    q, _, _ = qk_norm_rope_gate(x.to(dtype), x.to(dtype), zero, zero, cache, positions, eps=0.0, gate=False)
    signs = x.view(tokens, heads, head_dim) / 1024
    a, b = signs[..., :lanes], signs[..., lanes : 2 * lanes]
    c, s = cache[positions, None, :lanes], cache[positions, None, lanes:]
    wanted = torch.cat((a * c - b * s, b * c + a * s, signs[..., 2 * lanes :]), -1).to(dtype)
    assert torch.equal(q.view(wanted.shape).view(VIEWS[dtype]), wanted.view(VIEWS[dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_bits_are_copied(dtype: torch.dtype) -> None:
    """Every bit pattern of a gate comes back, also those of a NaN, and with a position out of range."""
    view = VIEWS[dtype]
    bits = torch.randint(torch.iinfo(view).min, torch.iinfo(view).max, (3, 2, 2, 8), dtype=view)
    bits[:, :, 1, 0] = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}[dtype]
    weight = torch.zeros(8, dtype=dtype)
    _, _, gate = qk_norm_rope_gate(
        bits.view(dtype).flatten(1), torch.zeros(3, 8, dtype=dtype), weight, weight, torch.randn(4, 8),
        torch.tensor([0, 4, -1]), eps=EPS,
    )  # fmt: skip
    assert gate is not None
    assert torch.equal(gate.view(view), bits[:, :, 1].flatten(1))


@pytest.mark.parametrize("rows", [1, 3])
def test_position_out_of_range_is_nan(rows: int) -> None:
    """Such a token is NaN in every channel of q and k, tail included; the last row of the table is in range."""
    torch.manual_seed(0)
    positions, axis_map = torch.tensor([0, 7, 8, -1, 2**40]), None
    inside = [True, True, False, False, False]
    if rows == 3:
        # Height is used by no lane: what is there does not count.
        positions = torch.stack((positions, torch.full((5,), 99), torch.tensor([0, 8, 0, 0, 0])))
        axis_map, inside = torch.tensor([0, 0, 2]), [True, False, False, False, False]
    x, weight = torch.randn(5, 2 * 8), torch.randn(8)
    q, k, _ = qk_norm_rope_gate(
        x, x, weight, weight, torch.randn(8, 6), positions, axis_map=axis_map, eps=EPS, gate=False
    )
    for y in (q, k):
        assert y.isnan().all(1).tolist() == [not good for good in inside]
        assert y.isnan().any(1).tolist() == [not good for good in inside]


def test_padding_rows_are_not_written(uninitialized_is_nan: None) -> None:
    """Rows of slot -1 stay as they were allocated, whatever they hold; other slots, negative or not, are tokens."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 2 * 8), torch.randn(8)
    outputs = qk_norm_rope_gate(
        x, x[:, :8], weight, weight, torch.randn(8, 6), torch.arange(4), eps=EPS, slots=torch.tensor([5, -1, -2, 0])
    )
    for y in outputs:
        assert y is not None
        assert y.isnan().all(1).tolist() == [False, True, False, False]


@pytest.fixture
def uninitialized_is_nan() -> Any:
    """torch.empty fills with NaN, which makes unwritten elements visible."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def test_rounded_table_is_taken_as_it_is() -> None:
    """A bf16 or fp16 table gives what its values give in fp32, and not what the table before rounding gives."""
    torch.manual_seed(0)
    x, weight, cache, positions = torch.randn(6, 16), torch.randn(16), torch.randn(6, 8), torch.arange(6)
    exact = qk_norm_rope_gate(x, x, weight, weight, cache, positions, eps=EPS, gate=False)[0]
    for dtype in (torch.bfloat16, torch.float16):
        narrow = cache.to(dtype)
        got, wanted = (
            qk_norm_rope_gate(x, x, weight, weight, table, positions, eps=EPS, gate=False)[0]
            for table in (narrow, narrow.float())
        )
        assert torch.equal(got, wanted)
        assert not torch.equal(got, exact)


@pytest.mark.parametrize("sizes", [(0, 2, 1), (3, 0, 1), (3, 2, 0), (3, 0, 0)], ids=str)
def test_empty(sizes: tuple[int, int, int]) -> None:
    """No tokens, no queries or no keys are no error; nothing at all leaves no record, in both directions."""
    tokens, q_heads, k_heads = sizes
    q_gate, k = torch.randn(tokens, q_heads * 16, requires_grad=True), torch.randn(tokens, k_heads * 8)
    weight = torch.zeros(8, requires_grad=True)
    with trace_launches() as launches:
        outputs = qk_norm_rope_gate(
            q_gate, k, weight, weight, torch.randn(4, 8), torch.zeros(tokens, dtype=torch.int64), eps=EPS
        )
        q, k_rotated, gate = outputs
        assert gate is not None
        (q.sum() + k_rotated.sum() + gate.sum()).backward()
    assert [list(y.shape) for y in (q, k_rotated, gate)] == [
        [tokens, q_heads * 8], [tokens, k_heads * 8], [tokens, q_heads * 8]
    ]  # fmt: skip
    assert len(launches) == 2 * bool(tokens * (q_heads + k_heads))
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
