"""Wrong candidates of family norm_rotate_gate that an attack got past the judge: each fails now, where it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import qk_norm_rope_gate
from ropecheck.suites.candidates import Candidate

Failing = Callable[..., dict[str, str]]
Outputs = tuple[Tensor, Tensor, Tensor | None]

CONTRACT = "qwen3.5-norm-rope-gate"
WIDE = ("strided", "any-shape", "any-dtype", "any-position")


def right(*operands: Tensor, **options: Any) -> Outputs:
    return qk_norm_rope_gate(*operands, backend="reference", **options)


def slots_ignored(*operands: Tensor, slots: Tensor | None = None, **options: Any) -> Outputs:
    return right(*operands, **options)


def gate_is_a_view(q_gate: Tensor, *operands: Tensor, gate: bool = True, **options: Any) -> Outputs:
    q, k, copied = right(q_gate, *operands, gate=gate, **options)
    width = operands[1].shape[0]
    return q, k, q_gate.unflatten(-1, (-1, 2, width))[:, :, 1] if gate else copied


class SameMemory:
    """Writes every result of one size where the one before it is."""

    def __init__(self) -> None:
        self.memory: dict[tuple[object, ...], Outputs] = {}

    def __call__(self, *operands: Tensor, **options: Any) -> Outputs:
        results = right(*operands, **options)
        key = tuple((y.shape, y.dtype) if y is not None else None for y in results)
        kept = self.memory.setdefault(key, results)
        for old, new in zip(kept, results, strict=True):
            if old is not None and new is not None:
                old.copy_(new)
        return kept


def with_positions(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Outputs]:
    def run(*operands: Tensor, **options: Any) -> Outputs:
        *others, cache, positions = operands
        return right(*others, cache, change(positions, len(cache)), **options)

    return run


def width_row_unchecked(positions: Tensor, rows: int) -> Tensor:
    if positions.dim() == 1:
        return positions
    return torch.cat((positions[:2], positions[2:].clamp(0, rows - 1)))


def only_head_0_is_nan(*operands: Tensor, **options: Any) -> Outputs:
    q, k, gate = right(*operands, **options)
    clamped = right(*operands[:5], operands[5].clamp(0, len(operands[4]) - 1), **options)
    width = operands[2].shape[0]
    for y, other in zip((q, k), clamped, strict=False):
        assert other is not None
        y[:, width:] = other[:, width:]
    return q, k, gate


def one_row(**fixed: Any) -> Callable[..., Outputs]:
    """The specialisation for one row of positions has constants where it should have arguments."""

    def run(*operands: Tensor, axis_map: Tensor | None = None, eps: float = 1e-6, gate: bool = True,
            weight_offset: float = 1.0, round_norm: bool = True, fma: bool = False,
            slots: Tensor | None = None) -> Outputs:  # fmt: skip
        options = {"eps": eps, "weight_offset": weight_offset, "round_norm": round_norm, "fma": fma}
        options |= fixed if axis_map is None else {}
        return right(*operands, axis_map=axis_map, gate=gate, slots=slots, **options)  # type: ignore[arg-type]

    return run


def one_row_gives_all_keys_the_first(q_gate: Tensor, k: Tensor, *operands: Tensor, **options: Any) -> Outputs:
    width = operands[0].shape[0]
    if options.get("axis_map") is None and k.shape[1]:
        k = k[:, :width].repeat(1, k.shape[1] // width)
    return right(q_gate, k, *operands, **options)


def with_map(change: Callable[[Tensor], Tensor]) -> Callable[..., Outputs]:
    def run(*operands: Tensor, axis_map: Tensor | None = None, eps: float) -> Outputs:
        return right(*operands, axis_map=None if axis_map is None else change(axis_map), eps=eps)

    return run


def int32_map_misread(axis_map: Tensor) -> Tensor:
    return axis_map.roll(1) if axis_map.dtype == torch.int32 else axis_map


def first_lane_reads_time(axis_map: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(axis_map[:1]), axis_map[1:]))


def offset_is_a_flag(*operands: Tensor, weight_offset: float = 1.0, **options: Any) -> Outputs:
    return right(*operands, weight_offset=1.0 if weight_offset else 0.0, **options)


def mean_over_the_padded_width(*operands: Tensor, **options: Any) -> Outputs:
    q, k, gate = right(*operands, **options)
    width = operands[2].shape[0]
    padded = 1 << (width - 1).bit_length()
    return (q, k, gate) if width < 81 else ((q * (padded / width) ** 0.5), (k * (padded / width) ** 0.5), gate)


def tokens_past_1024_are_lost(*operands: Tensor, **options: Any) -> Outputs:
    q, k, gate = right(*operands, **options)
    q[1024:] = 0
    return q, k, gate


@dataclass(frozen=True)
class Wrong:
    name: str
    run: Any
    judgement: str = "accuracy-forward"
    only: str = ""
    claims: tuple[str, ...] = ()


WRONG = (
    Wrong("slots-ignored", slots_ignored, "purity", "padding"),
    Wrong("gate-is-a-view", gate_is_a_view, "purity"),
    Wrong("same-memory", SameMemory(), "repeatability"),
    Wrong("positions-of-32-bits", with_positions(lambda p, _: p.int()), only="out-of-range"),
    Wrong("positions-without-a-sign", with_positions(lambda p, _: p & 0xFFFFFFFF), only="out-of-range"),
    Wrong("width-row-unchecked", with_positions(width_row_unchecked), only="out-of-range"),
    Wrong("only-head-0-is-nan", only_head_0_is_nan, only="out-of-range"),
    Wrong("one-row-eps", one_row(eps=1e-6), only="large-eps"),
    Wrong("one-row-offset", one_row(weight_offset=1.0), only="plain-weights"),
    Wrong("one-row-rounding", one_row(round_norm=True), only="unrounded-norm"),
    Wrong("one-row-fma", one_row(fma=False), "strict-bytes", "fma", ("strict",)),
    Wrong("one-row-keys", one_row_gives_all_keys_the_first, only="one-row"),
    Wrong("int32-map-misread", with_map(int32_map_misread), only="int32-map"),
    Wrong("first-lane-reads-time", with_map(first_lane_reads_time), only="ernie"),
    Wrong("offset-is-a-flag", offset_is_a_flag, only="half-offset"),
    Wrong("mean-over-the-padded-width", mean_over_the_padded_width, only="-d96-"),
    Wrong("mean-over-the-padded-width-of-256", mean_over_the_padded_width, only="-d192-"),
    Wrong("tokens-past-1024-are-lost", tokens_past_1024_are_lost, only="-s1025-"),
)


def candidate(run: Any, *claims: str) -> Candidate:
    return Candidate("norm", CONTRACT, run, ("cpu",), provides=(*WIDE, *claims), family="norm_rotate_gate")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_it_fails(wrong: Wrong, failing: Failing) -> None:
    """And the reference passes the same cases."""
    # What is not rounded shows in 16 bits.
    asked = "standard", (wrong.judgement,), ("bfloat16" if "rounding" in wrong.name else "float32",)
    assert set(failing(candidate(wrong.run, *wrong.claims), *asked, only=wrong.only)) == {wrong.judgement}
    assert failing(candidate(right, *wrong.claims), *asked, only=wrong.only) == {}


class Doubled(torch.autograd.Function):
    """The identity, and a gradient that is counted twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def x_wrong_in_training(q_gate: Tensor, k: Tensor, q_weight: Tensor, *operands: Tensor, **options: Any) -> Outputs:
    k = Doubled.apply(k) if q_weight.requires_grad and k.requires_grad else k
    return right(q_gate, k, q_weight, *operands, **options)


def weight_wrong_in_training(q_gate: Tensor, k: Tensor, q_weight: Tensor, *operands: Tensor, **options: Any) -> Outputs:
    q_weight = Doubled.apply(q_weight) if q_weight.requires_grad and k.requires_grad else q_weight
    return right(q_gate, k, q_weight, *operands, **options)


def k_weight_wrong_alone(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *operands: Tensor, **options: Any
) -> Outputs:
    if k_weight.requires_grad and not q_weight.requires_grad:
        k_weight = Doubled.apply(k_weight)
    return right(q_gate, k, q_weight, k_weight, *operands, **options)


def last_row_of_many_is_lost(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *operands: Tensor, **options: Any
) -> Outputs:
    """The weight's gradient leaves out the last row of k where there are more than 256."""
    q, turned, gate = right(q_gate, k, q_weight, k_weight, *operands, **options)
    width = k_weight.shape[0]
    if k.numel() > 256 * width:
        _, detached, _ = right(q_gate, k, q_weight, k_weight.detach(), *operands, **options)
        last = torch.zeros(turned.shape, dtype=torch.bool)
        last[-1, -width:] = True
        turned = torch.where(last, detached, turned)
    return q, turned, gate


@pytest.mark.parametrize(
    ("run", "only"),
    [
        (x_wrong_in_training, "weights-and-x"),
        (weight_wrong_in_training, "weights-and-x"),
        (k_weight_wrong_alone, "k_weight-alone"),
        (last_row_of_many_is_lost, "exact-sum"),
    ],
)
def test_wrong_gradients_of_weights_fail(run: Any, only: str, failing: Failing) -> None:
    """The gradients of x alone, and of both weights alone, are right."""
    asked = "standard", ("accuracy-vjp",), ("float32",)
    assert set(failing(candidate(run, "vjp"), *asked, only=only)) == {"accuracy-vjp"}
    assert failing(candidate(right, "vjp"), *asked, only=only) == {}


def by_heads(*operands: Tensor, **options: Any) -> Outputs:
    width = operands[2].shape[0]
    q, k, gate = (None if y is None else y.unflatten(-1, (-1, width)) for y in right(*operands, **options))
    assert q is not None
    assert k is not None
    return q, k, gate


def test_outputs_with_a_dimension_for_heads_are_differentiated(failing: Failing) -> None:
    """In every way in which autograd asks."""
    assert failing(candidate(by_heads, "vjp"), "standard", ("autograd",), ("float32",)) == {}
