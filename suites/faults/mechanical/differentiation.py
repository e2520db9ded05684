"""Mechanical faults of differentiation: what a training step meets, the forward being right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..mutants import right_fused_call
from .kernel import Broken
from .rotations import Pair, adjacent, adjacent_back, both, both_back, dense_strides, read_as

_FUSED = "qwen3.5-norm-rope-gate"
_fused = right_fused_call(contract(_FUSED))


def gradient_dense(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent_back(read_as(gradient, dense_strides(gradient)), cos, sin)


def gradient_of_k_as_that_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Whether both have to be copied is read from q's gradient."""
    return both_back(q, read_as(k, dense_strides(k)) if q.is_contiguous() else k, cos, sin)


class _Kept(torch.autograd.Function):
    """The fused call, whose operands are attributes of the context: autograd does not watch them."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *operands: Tensor) -> tuple[Tensor | None, ...]:
        ctx.options, ctx.operands = options, operands
        return _fused(*operands, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operands = [t.detach().requires_grad_(want) for t, want in
                    zip(ctx.operands, ctx.needs_input_grad[1:], strict=True)]  # fmt: skip
        with torch.enable_grad():
            made = zip(_fused(*operands, **ctx.options), gradients, strict=True)
            outputs, incoming = zip(*[(y, g) for y, g in made if y is not None], strict=True)
        found = iter(torch.autograd.grad(outputs, [t for t in operands if t.requires_grad], incoming))
        return None, *(next(found) if t.requires_grad else None for t in operands)


def kept_unwatched(*operands: Tensor, eps: float, axis_map: Tensor | None = None) -> tuple[Tensor | None, ...]:
    kept: tuple[Tensor | None, ...] = _Kept.apply({"eps": eps, "axis_map": axis_map}, *operands)  # type: ignore[no-untyped-call]
    return kept


def never_executed(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A name that nobody has defined."""
    raise NameError("name 'conjugated' is not defined")


class RacingBack:
    """In place, warps exchange members of pairs: now and then a few are overtaken and keep what came in."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        overtaken = torch.rand(gradient.shape, generator=self.generator) < 0.008
        return torch.where(overtaken, gradient, adjacent_back(gradient, cos, sin))


def saved_then_written(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What autograd has saved for the backward is written in place, if only with what it was."""
    c, s = cos.clone(), sin.clone()
    y = adjacent(x, c, s)
    c.mul_(1.0)
    return y


def _step(name: str, says: str, row: str = "", run: Callable[..., Any] = adjacent, **more: Any) -> Broken:
    return Broken(name, says, run, rows=(row,) if row else (), **more)


DIFFERENTIATION = (
    _step("gradient-taken-for-contiguous", "a gradient that comes in is read as if it were contiguous", "O032",
          vjp=gradient_dense),
    _step("backward-never-executed", "the backward raises whenever it is called", "O088", vjp=never_executed),
    _step("racing-in-the-backward", "in every backward other elements keep the gradient that came in", "O093",
          vjp=RacingBack()),
    _step("saved-then-written", "what was saved for the backward is written in place", "O090", saved_then_written,
          claims=("vjp",)),
    _step("gradient-of-k-as-that-of-q", "whether k's gradient is contiguous is read from q's", run=both,
          family="rotate_pair", vjp=gradient_of_k_as_that_of_q, claims=("strided",)),
    _step("operands-kept-unwatched", "what the backward reads again may be written over without an error",
          run=kept_unwatched, family="norm_rotate_gate", contract=_FUSED, claims=("vjp",)),
)  # fmt: skip
