"""Calling a candidate: its forward, its backward, and the faults that need no oracle to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, described


class CandidateFault(Exception):  # noqa: N818 - it is no error of the judge's
    """The candidate raised, or returned something that is no output at all. The message is one sentence."""


def forward(
    candidate: Candidate, x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False, on_the_spot: bool = False
) -> Tensor:
    """The candidate's y for x [B, S, H, D]. Raises :class:`CandidateFault`; out of memory passes through.

    A candidate that works in place is given a copy of x, unless it is to work ``on_the_spot``.
    """
    given = _own_copy(x) if candidate.in_place and not on_the_spot else x
    with torch.no_grad():
        result = _run(candidate, "run", candidate.run, given, cos, sin, conjugate)
    if candidate.in_place and result is None:
        result = given
    return _checked(candidate, "run", result, x)


def vjp(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gradient: Tensor,
    *,
    conjugate: bool = False,
    on_the_spot: bool = False,
) -> Tensor:
    """The candidate's gradient of x for the incoming ``gradient``: its own ``vjp``, or autograd's."""
    if candidate.vjp is not None:
        with torch.no_grad():
            given = _own_copy(gradient) if candidate.in_place and not on_the_spot else gradient
            result = _run(candidate, "vjp", candidate.vjp, given, cos, sin, conjugate)
        if candidate.in_place and result is None:
            result = given
        return _checked(candidate, "vjp", result, gradient)
    leaf = x.detach().requires_grad_()
    y = _checked(candidate, "run", _run(candidate, "run", candidate.run, leaf, cos, sin, conjugate), x)
    if not y.requires_grad:
        raise CandidateFault("run returns a tensor without gradient for an x that requires one")

    def backward() -> Any:
        return torch.autograd.grad(y, leaf, gradient)[0]

    return _checked(candidate, "the backward of run", _guarded("the backward of run", backward), x)


def _own_copy(x: Tensor) -> Tensor:
    """x again in memory of its own, with the same strides, for a candidate that writes into it."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _run(
    candidate: Candidate, name: str, function: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool
) -> Any:
    keywords = {"conjugate": True} if conjugate else {}
    return _guarded(name, lambda: function(x, cos, sin, **keywords))


def _guarded(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise CandidateFault(f"{name} raised {described(error)}") from None


def _checked(candidate: Candidate, name: str, result: Any, like: Tensor) -> Tensor:
    if not isinstance(result, Tensor):
        raise CandidateFault(f"{name} returned {type(result).__name__}, not a tensor")
    for what, got, expected in (
        ("shape", tuple(result.shape), tuple(like.shape)),
        ("dtype", result.dtype, like.dtype),
        ("device", result.device, like.device),
    ):
        if got != expected:
            raise CandidateFault(f"{name} returned {what} {got}, where x has {what} {expected}")
    return result.detach() if not result.requires_grad else result
