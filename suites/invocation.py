"""Calling a candidate: its forward, its backward, and the faults that need no oracle to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, described, printable
from .surroundings import Surroundings


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
        result = _run("run", candidate.run, given, cos, sin, conjugate)
    if candidate.in_place:
        result = _in_place("run", result, given)
    return _checked("run", result, x).detach()


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
        given = _own_copy(gradient) if candidate.in_place and not on_the_spot else gradient
        with torch.no_grad():
            result = _run("vjp", candidate.vjp, given, cos, sin, conjugate)
        if candidate.in_place:
            result = _in_place("vjp", result, given)
        return _checked("vjp", result, gradient).detach()
    return differentiated(candidate, x, cos, sin, gradient, conjugate=conjugate)[1]


def differentiated(
    candidate: Candidate, x: Tensor, cos: Tensor, sin: Tensor, gradient: Tensor, *, conjugate: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, gradient of x) by autograd."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _checked("run", _run("run", candidate.run, leaf, cos, sin, conjugate), x)
    if not y.requires_grad:
        raise CandidateFault("run returns a tensor without gradient for an x that requires one")

    def backward() -> Any:
        return torch.autograd.grad(y, leaf, gradient)[0]

    name = "the backward of run"
    return y.detach(), _checked(name, _guarded(name, backward), x).detach()


def _own_copy(x: Tensor) -> Tensor:
    """x again in memory of its own, with the same strides, for a candidate that writes into it."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _run(
    name: str, function: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool
) -> Any:
    keywords = {"conjugate": True} if conjugate else {}
    return _guarded(name, lambda: function(x, cos, sin, **keywords))


def _guarded(name: str, call: Callable[[], Any]) -> Any:
    before = Surroundings.now()
    try:
        result = call()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A kernel's error is reported late: here it is still known whose it is.
            torch.cuda.synchronize()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except KeyboardInterrupt as error:
        # A worker ignores the interrupt of a terminal: there, only a candidate can have raised it.
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        raise CandidateFault(f"{name} raised {described(error)}") from None
    except BaseException as error:
        raise CandidateFault(f"{name} raised {described(error)}") from None
    finally:
        changed = before.restore()
    if changed:
        raise CandidateFault(f"{name} leaves {changed} changed")
    return result


def _checked(name: str, result: Any, like: Tensor) -> Tensor:
    if not isinstance(result, Tensor):
        raise CandidateFault(f"{name} returned {printable(type(result).__name__)}, not a tensor")
    if type(result) not in (Tensor, torch.nn.Parameter):
        raise CandidateFault(f"{name} returned a {printable(type(result).__name__)}, a subclass of torch.Tensor")
    if result.layout != torch.strided:
        raise CandidateFault(f"{name} returned a tensor of layout {result.layout}, not a strided one")
    for what, got, expected in (
        ("shape", tuple(result.shape), tuple(like.shape)),
        ("dtype", result.dtype, like.dtype),
        ("device", result.device, like.device),
    ):
        if got != expected:
            raise CandidateFault(f"{name} returned {what} {got}, where x has {what} {expected}")
    return result.resolve_neg()


def _in_place(name: str, result: Any, given: Tensor) -> Tensor:
    """What a candidate that works in place has made of ``given``."""
    if result is not None and (not isinstance(result, Tensor) or result.data_ptr() != given.data_ptr()):
        raise CandidateFault(f"{name} is declared to work in place, but returns other memory than it was given")
    return given
