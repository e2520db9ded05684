"""Mechanical faults of the gradients of a norm's weights: a kernel of their own computes them, from another call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..mutants import right_fused_call
from .fused_integers import map_of_contract
from .kernel import Broken
from .rotations import dense_strides, read_as

_CONTRACT = "qwen3.5-norm-rope-gate"
_right = right_fused_call(contract(_CONTRACT))
_ROWS_AT_ONCE = 1024

Outputs = tuple[Tensor | None, ...]


class _Apart(torch.autograd.Function):
    """``y``, whose gradient goes to ``y``, and as ``change`` makes it to ``again``, which is only differentiated."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, again: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.change(gradient), None


def _apart(
    activations: tuple[Tensor, ...], weights: tuple[Tensor, ...], tables: tuple[Tensor, ...],
    change: Callable[[Tensor], Tensor], options: dict[str, Any], **misread: Any,
) -> Outputs:  # fmt: skip
    """The right outputs and gradients of the activations. The weights' are those of ``misread`` options."""
    if not any(weight.requires_grad for weight in weights):
        return _right(*activations, *weights, *tables, **options)
    outputs = _right(*activations, *(w.detach() for w in weights), *tables, **options)
    again = _right(*(x.detach() for x in activations), *weights, *tables, **{**options, **misread})
    turned = [_Apart.apply(y, other, change) for y, other in zip(outputs[:2], again[:2], strict=True)]  # type: ignore[no-untyped-call]
    return (*turned, outputs[2])


def _as_it_comes(gradient: Tensor) -> Tensor:
    return gradient


def eps_compiled_in(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    options = {"eps": eps, "axis_map": axis_map}
    return _apart(operands[:2], operands[2:4], operands[4:], _as_it_comes, options, eps=1e-6)


def map_compiled_in(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    own = None if axis_map is None else map_of_contract(len(axis_map))
    return _apart(
        operands[:2], operands[2:4], operands[4:], _as_it_comes, {"eps": eps, "axis_map": axis_map}, axis_map=own
    )


def gradient_taken_for_contiguous(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    options = {"eps": eps, "axis_map": axis_map}
    return _apart(operands[:2], operands[2:4], operands[4:], lambda g: read_as(g, dense_strides(g)), options)


def remainder_lost(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    """Each of 1024 partial sums is of as many rows; those behind are nobody's."""
    width = operands[2].shape[0]

    def whole_parts(gradient: Tensor) -> Tensor:
        rows = gradient.reshape(-1, width)
        if len(rows) <= _ROWS_AT_ONCE:
            return gradient
        summed = torch.arange(len(rows)) < len(rows) // _ROWS_AT_ONCE * _ROWS_AT_ONCE
        return torch.where(summed[:, None], rows, 0.0).reshape(gradient.shape)

    return _apart(operands[:2], operands[2:4], operands[4:], whole_parts, {"eps": eps, "axis_map": axis_map})


class _Unwritten(torch.autograd.Function):
    """The weight, whose gradient nobody writes: here NaN."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("nan"))


def _unwritten(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(_Unwritten.apply(weight) for weight in weights)  # type: ignore[no-untyped-call]


def no_tokens_unwritten(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
    weights = operands[2:4] if len(operands[1]) else _unwritten(operands[2:4])
    return _right(*operands[:2], *weights, *operands[4:], eps=eps, axis_map=axis_map)


def padding_unwritten(
    *operands: Tensor, eps: float, axis_map: Tensor | None = None, slots: Tensor | None = None
) -> Outputs:
    nothing = slots is not None and len(slots) > 0 and bool((slots == -1).all())
    weights = _unwritten(operands[2:4]) if nothing else operands[2:4]
    return _right(*operands[:2], *weights, *operands[4:], eps=eps, axis_map=axis_map, slots=slots)


def _read_from(which: int) -> Callable[..., Outputs]:
    """Whether any weight requires a gradient is read from one of the two."""

    def run(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> Outputs:
        weights = operands[2:4]
        if not weights[which].requires_grad:
            weights = tuple(weight.detach() for weight in weights)
        return _right(*operands[:2], *weights, *operands[4:], eps=eps, axis_map=axis_map)

    return run


def _weights(name: str, says: str, run: Callable[..., Any]) -> Broken:
    return Broken(name, says, run, family="norm_rotate_gate", contract=_CONTRACT, claims=("vjp", "any-shape"))


WEIGHTS = (
    _weights("weights-eps-compiled-in", "the gradients of weights are those of a norm whose eps is 1e-6",
             eps_compiled_in),
    _weights("weights-map-compiled-in", "the gradients of weights are those of the contract's own axis map",
             map_compiled_in),
    _weights("weights-gradient-taken-for-contiguous", "for the gradients of weights what comes in is read as dense",
             gradient_taken_for_contiguous),
    _weights("weights-remainder-lost", "rows beyond a multiple of 1024 are missing from the gradients of weights",
             remainder_lost),
    _weights("weights-of-no-tokens-unwritten", "the gradients of weights are not written where there are no tokens",
             no_tokens_unwritten),
    _weights("weights-of-padding-unwritten", "the gradients of weights are not written where all tokens are padding",
             padding_unwritten),
    _weights("weights-asked-of-q", "k_weight has a gradient only where q_weight has one", _read_from(0)),
    _weights("weights-asked-of-k", "q_weight has a gradient only where k_weight has one", _read_from(1)),
)  # fmt: skip
