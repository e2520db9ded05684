"""Mechanical faults of differentiation: what a training step meets, the forward being right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import Broken
from .rotations import adjacent, adjacent_back, dense_strides, read_as


def gradient_dense(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent_back(read_as(gradient, dense_strides(gradient)), cos, sin)


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


def _step(name: str, says: str, row: str, run: Callable[..., Any] = adjacent, **more: Any) -> Broken:
    return Broken(name, says, run, rows=(row,), **more)


DIFFERENTIATION = (
    _step("gradient-taken-for-contiguous", "a gradient that comes in is read as if it were contiguous", "O032",
          vjp=gradient_dense),
    _step("backward-never-executed", "the backward raises whenever it is called", "O088", vjp=never_executed),
    _step("racing-in-the-backward", "in every backward other elements keep the gradient that came in", "O093",
          vjp=RacingBack()),
    _step("saved-then-written", "what was saved for the backward is written in place", "O090", saved_then_written,
          claims=("vjp",)),
)  # fmt: skip
