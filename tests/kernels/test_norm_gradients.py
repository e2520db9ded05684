"""Gradients of the normalised rotation on payloads whose every intermediate value is exact, in any order of sums.

Channels of +-1024 without eps have the inverse root 2^-10, D is a power of two, and tables, weights and incoming
gradients are small multiples of powers of two: fp64 autograd through the plain formula is then exact as well, and
the two are compared by value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import qk_norm_rope_gate, trace_launches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS, Q_HEADS, K_HEADS, HEAD_DIM, LANES, ROWS = 17, 3, 2, 16, 4, 12
AXIS_MAP = torch.tensor([0, 1, 2, 1])
NAMES = ("q_gate", "k", "q_weight", "k_weight")


def integers(*shape: int, low: int = -2, high: int = 3) -> Tensor:
    return torch.randint(low, high, shape).float()


def payload(dtype: torch.dtype, *, gate: bool, rows: int) -> dict[str, Any]:
    """Operands with exact norms; quarter turns and halves in the table, weights that make a factor of 1/2, 1 or 2."""
    parts = 2 if gate else 1
    operands: dict[str, Any] = {
        "q_gate": integers(TOKENS, Q_HEADS * parts * HEAD_DIM, low=0, high=2).mul(2048).sub(1024).to(dtype),
        "k": integers(TOKENS, K_HEADS * HEAD_DIM, low=0, high=2).mul(2048).sub(1024).to(dtype),
        "q_weight": torch.tensor([-0.5, 0.0, 1.0])[torch.randint(0, 3, (HEAD_DIM,))].to(dtype),
        "k_weight": torch.tensor([-0.5, 0.0, 1.0])[torch.randint(0, 3, (HEAD_DIM,))].to(dtype),
        "cos_sin_cache": torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])[torch.randint(0, 5, (ROWS, 2 * LANES))],
        "positions": torch.randint(0, ROWS, (3, TOKENS) if rows == 3 else (TOKENS,)),
        "axis_map": AXIS_MAP if rows == 3 else None,
        "gate": gate,
        "eps": 0.0,
    }
    for name in NAMES:
        operands[name].requires_grad_()
    return operands


def composition(operands: dict[str, Any]) -> list[Tensor]:
    """The plain formula in fp64, from the same leaves: q, k and the gate, if there is one."""
    positions = operands["positions"]
    row = positions[:, None].expand(-1, LANES) if positions.ndim == 1 else positions[AXIS_MAP].T
    cache, lane = operands["cos_sin_cache"].double(), torch.arange(LANES)
    c, s = cache[row, lane][:, None], cache[row, LANES + lane][:, None]
    parts = 2 if operands["gate"] else 1
    q_gate = operands["q_gate"].double().view(TOKENS, Q_HEADS, parts, HEAD_DIM)
    outputs = []
    for x, weight in ((q_gate[:, :, 0], "q_weight"), (operands["k"].double().view(TOKENS, -1, HEAD_DIM), "k_weight")):
        y = x / x.square().mean(-1, keepdim=True).sqrt() * (operands[weight].double() + 1)
        a, b = y[..., :LANES], y[..., LANES : 2 * LANES]
        outputs.append(torch.cat((a * c - b * s, b * c + a * s, y[..., 2 * LANES :]), -1).flatten(1))
    if operands["gate"]:
        outputs.append(q_gate[:, :, 1].flatten(1))
    return outputs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_plain_formula(dtype: torch.dtype, gate: bool, rows: int) -> None:
    """All four gradients equal those of fp64 autograd, and have their input's dtype."""
    torch.manual_seed(0)
    operands = payload(dtype, gate=gate, rows=rows)
    leaves = [operands[name] for name in NAMES]
    outputs = [y for y in qk_norm_rope_gate(**operands) if y is not None]
    upstream = [integers(*y.shape) for y in outputs]
    got = torch.autograd.grad(outputs, leaves, [g.to(dtype) for g in upstream])
    wanted = torch.autograd.grad(composition(operands), leaves, [g.double() for g in upstream])
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        assert x.dtype == dtype
        assert y.any()
        assert torch.equal(x, y), name


def test_fma_option_is_the_derivatives_too() -> None:
    """Where the rest cancels, what rounding the first product loses is all that the two recipes differ in."""
    x, weight = torch.full((1, 2), 1024.0), torch.zeros(2)
    cache, upstream = torch.tensor([[1 + 2.0**-12, 0.5]]), torch.tensor([[1 + 2.0**-12, -2.0]])
    firsts = []
    for fma in (False, True):
        leaf = weight.clone().requires_grad_()
        q, _, _ = qk_norm_rope_gate(
            x, x, leaf, weight, cache, torch.zeros(1, dtype=torch.int64), eps=0.0, gate=False, fma=fma
        )
        firsts.append(torch.autograd.grad(q, leaf, upstream)[0][0].item())
    # g0 c + g1 s = (1 + 2^-12)^2 - 1, of which fp32 loses 2^-24 if the square is rounded.
    assert firsts == [2.0**-11, 2.0**-11 + 2.0**-24]


@pytest.mark.parametrize("strides", ["expanded", "transposed"])
def test_incoming_gradients_may_have_any_strides(strides: str) -> None:
    """A gradient of stride 0, and one whose tokens are outermost last, count as their contiguous copies do."""
    torch.manual_seed(0)
    operands = payload(torch.float32, gate=True, rows=3) | {"eps": 1e-6}
    leaves = [operands[name] for name in NAMES]
    outputs = [y for y in qk_norm_rope_gate(**operands) if y is not None]
    upstream = [
        torch.randn(()).expand(y.shape) if strides == "expanded" else torch.randn(y.shape[::-1]).T for y in outputs
    ]
    got = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    wanted = torch.autograd.grad(outputs, leaves, [g.contiguous() for g in upstream])
    assert all(map(torch.equal, got, wanted))


def test_only_what_is_needed_is_returned() -> None:
    """Frozen weights get no gradient, and a weight alone gets one although no activation needs it."""
    torch.manual_seed(0)
    for needed in (("q_gate", "k"), ("k_weight",)):
        operands = payload(torch.float32, gate=True, rows=1)
        for name in set(NAMES) - set(needed):
            operands[name].requires_grad_(False)
        full = payload(torch.float32, gate=True, rows=1) | {
            name: operands[name].detach().clone().requires_grad_() for name in NAMES
        }
        full |= {name: operands[name] for name in ("cos_sin_cache", "positions")}
        for call in (operands, full):
            q, k, gate = qk_norm_rope_gate(**call)
            assert gate is not None
            (q.sum() + k.square().sum() + gate.sum()).backward()
        for name in NAMES:
            gradient = operands[name].grad
            assert (gradient is not None) == (name in needed)
            if gradient is not None:
                assert torch.equal(gradient, full[name].grad)


def test_padding_has_no_part_in_any_gradient() -> None:
    """Padding rows hold NaN everywhere and bad positions: their gradients are +0, and the weights' those without."""
    torch.manual_seed(0)
    operands = payload(torch.float32, gate=True, rows=3)
    slots = torch.arange(TOKENS)
    slots[[0, 5, 16]] = -1
    real = slots != -1
    upstream = [integers(TOKENS, heads * HEAD_DIM) for heads in (Q_HEADS, K_HEADS, Q_HEADS)]
    with torch.no_grad():
        operands["q_gate"][~real] = torch.nan
        operands["k"][~real] = torch.nan
        operands["positions"][:, ~real] = 10**6
    for g in upstream:
        g[~real] = torch.nan
    leaves = [operands[name] for name in NAMES]
    got = torch.autograd.grad(qk_norm_rope_gate(**operands, slots=slots), leaves, upstream)
    only = operands | {name: operands[name][real] for name in ("q_gate", "k")}
    only["positions"] = operands["positions"][:, real]
    few = [only[name] for name in NAMES]
    wanted = torch.autograd.grad(qk_norm_rope_gate(**only), few, [g[real] for g in upstream])
    for x, y in zip(got[:2], wanted[:2], strict=True):
        assert torch.equal(x[real], y)
        assert torch.equal(x[~real].view(torch.int32), torch.zeros_like(x[~real]).view(torch.int32))
    # The sums are exact, so the order in which rows are added is nothing that shows.
    for x, y in zip(got[2:], wanted[2:], strict=True):
        assert torch.equal(x, y)


def test_position_out_of_range_makes_gradients_nan() -> None:
    """The token's own gradient and those of the weights are NaN, other tokens' are not, and the gate's is copied."""
    torch.manual_seed(0)
    operands = payload(torch.float32, gate=True, rows=1)
    operands["positions"][3] = ROWS
    q, k, gate = qk_norm_rope_gate(**operands)
    assert gate is not None
    leaves = [operands[name] for name in NAMES]
    dq, dk, dqw, dkw = torch.autograd.grad((q, k, gate), leaves, [torch.ones_like(y) for y in (q, k, gate)])
    dq = dq.view(TOKENS, Q_HEADS, 2, HEAD_DIM)
    bad = torch.arange(TOKENS) == 3
    assert dq[bad, :, 0].isnan().all()
    assert dk[bad].isnan().all()
    assert not dq[~bad].isnan().any()
    assert not dk[~bad].isnan().any()
    assert torch.equal(dq[:, :, 1], torch.ones_like(dq[:, :, 1]))
    assert dqw.isnan().all()
    assert dkw.isnan().all()


def test_dropped_token_shows_in_the_weights_gradient() -> None:
    """The payload is sensitive: leaving one token out changes the exact sum in almost every channel."""
    torch.manual_seed(0)
    operands = payload(torch.float32, gate=False, rows=1)
    q, _, _ = qk_norm_rope_gate(**operands)
    upstream = integers(*q.shape)
    (whole,) = torch.autograd.grad(q, operands["q_weight"], upstream, retain_graph=True)
    upstream[7] = 0
    (less,) = torch.autograd.grad(q, operands["q_weight"], upstream)
    assert int((whole != less).sum()) > HEAD_DIM // 2


def test_one_record_in_each_direction() -> None:
    """Forward and backward are one record each, with the operator's name and the reason."""
    operands = payload(torch.float32, gate=True, rows=1)
    with trace_launches() as launches:
        qk_norm_rope_gate(**operands)[0].sum().backward()
    assert [(launch.operator, launch.backend, launch.direction, launch.reason) for launch in launches] == [
        (f"qk_norm_rope_gate_{name}", "reference", direction, "auto: a cpu tensor is rotated by the reference")
        for name, direction in (("reference", "forward"), ("backward_reference", "backward"))
    ]
