"""Calling a candidate: its forward, its backward, and the faults that need no oracle to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, described, printable
from .surroundings import Surroundings
from .views import X_VIEWS


class CandidateFault(Exception):  # noqa: N818 - it is no error of the judge's
    """The candidate raised, or returned something that is no output at all. The message is one sentence."""


def forward(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    conjugate: bool = False,
    on_the_spot: bool = False,
    k_view: str = "",
) -> Tensor:
    """The candidate's y for x [B, S, H, D]. Raises :class:`CandidateFault`; out of memory passes through.

    A pair is given the first heads of x as q and the others as k (:func:`parts`), and its outputs are put together
    again. A candidate that works in place is given a copy of x, unless it is to work ``on_the_spot``.
    """
    return joined(
        outputs(candidate, x, cos, sin, conjugate=conjugate, on_the_spot=on_the_spot, k_view=k_view)
    )


def outputs(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    conjugate: bool = False,
    on_the_spot: bool = False,
    k_view: str = "",
) -> tuple[Tensor, ...]:
    """As :func:`forward`, the tensors as the candidate returns them: y, or those of q and of k."""
    return _called(candidate, "run", candidate.run, x, cos, sin, conjugate, on_the_spot, k_view)


def vjp(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gradient: Tensor,
    *,
    conjugate: bool = False,
    on_the_spot: bool = False,
    k_view: str = "",
) -> Tensor:
    """The candidate's gradient of x for the incoming ``gradient``: its own ``vjp``, or autograd's."""
    if candidate.vjp is not None:
        return joined(
            vjp_outputs(candidate, cos, sin, gradient, conjugate=conjugate, on_the_spot=on_the_spot, k_view=k_view)
        )
    return differentiated(candidate, x, cos, sin, gradient, conjugate=conjugate, k_view=k_view)[1]


def vjp_outputs(
    candidate: Candidate,
    cos: Tensor,
    sin: Tensor,
    gradient: Tensor,
    *,
    conjugate: bool = False,
    on_the_spot: bool = False,
    k_view: str = "",
) -> tuple[Tensor, ...]:
    """The gradients as the candidate's own ``vjp``, which it has, returns them: of x, or of q and of k."""
    assert candidate.vjp is not None
    return _called(candidate, "vjp", candidate.vjp, gradient, cos, sin, conjugate, on_the_spot, k_view)


def differentiated(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gradient: Tensor,
    *,
    conjugate: bool = False,
    k_view: str = "",
) -> tuple[Tensor, Tensor]:
    """(y, gradient of x) by autograd."""
    results, gradients = derivatives(candidate, x, cos, sin, gradient, conjugate=conjugate, k_view=k_view)
    return joined(results), joined(gradients)


def derivatives(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gradient: Tensor,
    *,
    conjugate: bool = False,
    k_view: str = "",
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(outputs, gradients) by autograd, as the candidate returns them: of x, or of q and of k."""
    leaves, results = recorded(candidate, x, cos, sin, conjugate=conjugate, k_view=k_view)
    gradients = pulled_back(results, leaves, divided(candidate, gradient, k_view))
    return tuple(y.detach() for y in results), tuple(g.detach() for g in gradients)


def recorded(
    candidate: Candidate,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    conjugate: bool = False,
    k_view: str = "",
    wanted: tuple[bool, ...] = (True, True),
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(leaves, outputs) of a call that autograd records; of x, or of q and k, those ``wanted`` require grad.

    Raises :class:`CandidateFault` where the output of one that does has no graph.
    """
    given = parts(candidate, x, k_view)
    leaves = tuple(part.detach().requires_grad_(want) for part, want in zip(given, wanted, strict=False))
    results = applied(candidate, leaves, cos, sin, conjugate=conjugate)
    if not all(y.requires_grad or not leaf.requires_grad for y, leaf in zip(results, leaves, strict=True)):
        raise CandidateFault("run returns a tensor without gradient for an x that requires one")
    return leaves, results


def applied(
    candidate: Candidate, given: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """The outputs of ``run`` for the very tensors ``given`` (:func:`parts`), with the graph that autograd records."""
    with torch.enable_grad():
        return _checked("run", _run("run", candidate.run, given, cos, sin, conjugate), given)


def pulled_back(
    results: tuple[Tensor, ...], leaves: tuple[Tensor, ...], gradients: tuple[Tensor, ...], **keywords: bool
) -> tuple[Tensor, ...]:
    """``torch.autograd.grad`` with ``keywords``; what comes out must fit the leaves. Raises :class:`CandidateFault`."""
    name = "the backward of run"
    pulled = guarded(name, lambda: torch.autograd.grad(results, leaves, gradients, **keywords))
    return _checked(name, pulled if len(leaves) > 1 else pulled[0], leaves)


def as_function(candidate: Candidate, *, conjugate: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``function(x, cos, sin) -> y`` that only calls the candidate, for compilers, exporters and graphs.

    Nothing is checked. A pair is given parts of x (contiguous copies where it does not claim ``strided``) and its
    outputs are put together, a candidate that works in place is given a copy: operations that move values and compute
    none.
    """
    keywords = {"conjugate": True} if conjugate else {}

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.clone() if candidate.in_place else x
        if candidate.family == "rotate":
            result = candidate.run(x, cos, sin, **keywords)
            return x if result is None else result
        # Not two slices: their backward is a sum, which is no longer a move of values.
        q, k = torch.split(x, [heads_of_q(x.shape[2]), x.shape[2] - heads_of_q(x.shape[2])], dim=2)
        if "strided" not in candidate.provides:
            q, k = (part.clone(memory_format=torch.contiguous_format) for part in (q, k))
        results = candidate.run(q, k, cos, sin, **keywords)
        return torch.cat((q, k) if results is None else tuple(results), dim=2)

    return function


def heads_of_q(heads: int) -> int:
    """How many heads of x are q's, where the candidate takes a pair: two of three, so that k has its own count."""
    return heads - heads // 3 if heads > 2 else (heads + 1) // 2


def parts(candidate: Candidate, x: Tensor, k_view: str = "") -> tuple[Tensor, ...]:
    """What the candidate's family is given of x [B, S, H, D]: x itself, or q and k.

    q and k are views of x's memory, as of a packed projection, or k lies apart as ``k_view`` says. Where the
    candidate does not claim ``strided`` both are contiguous copies.
    """
    if candidate.family == "rotate":
        return (x,)
    if "strided" not in candidate.provides:
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in divided(candidate, x))
    return divided(candidate, x, k_view)


def divided(candidate: Candidate, x: Tensor, k_view: str = "") -> tuple[Tensor, ...]:
    """As :func:`parts`, views in any case: for incoming gradients, whose layout is autograd's and nobody's claim."""
    if candidate.family == "rotate":
        return (x,)
    q, k = x[:, :, : heads_of_q(x.shape[2])], x[:, :, heads_of_q(x.shape[2]) :]
    return (q, X_VIEWS[k_view](k).view) if k_view else (q, k)


def joined(results: tuple[Tensor, ...]) -> Tensor:
    """The inverse of :func:`parts`, for what came out."""
    return results[0] if len(results) == 1 else torch.cat(results, dim=2)


def _called(
    candidate: Candidate,
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    conjugate: bool,
    on_the_spot: bool,
    k_view: str,
) -> tuple[Tensor, ...]:
    given = parts(candidate, _own_copy(x) if candidate.in_place and not on_the_spot else x, k_view)
    with torch.no_grad():
        result = _run(name, function, given, cos, sin, conjugate)
    if candidate.in_place:
        written = _in_place(name, result, given)
        result = written if len(written) > 1 else written[0]
    return tuple(y.detach() for y in _checked(name, result, given))


def _own_copy(x: Tensor) -> Tensor:
    """x again in memory of its own, with the same strides, for a candidate that writes into it."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _run(
    name: str, function: Callable[..., Any], given: tuple[Tensor, ...], cos: Tensor, sin: Tensor, conjugate: bool
) -> Any:
    keywords = {"conjugate": True} if conjugate else {}
    return guarded(name, lambda: function(*given, cos, sin, **keywords))


def guarded(name: str, call: Callable[[], Any]) -> Any:
    """What ``call``, code of the candidate's that ``name`` describes, returns.

    Whatever it raises is (the cause of) a :class:`CandidateFault`, and so is a change of the process's state; out of
    memory passes through.
    """
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
        raise CandidateFault(f"{name} raised {described(error)}") from error
    finally:
        changed = before.restore()
    if changed:
        raise CandidateFault(f"{name} leaves {changed} changed")
    return result


def _checked(name: str, result: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``result`` as one output for each of ``given``, each of its shape, dtype and device."""
    if len(given) == 1:
        return (_checked_one(name, result, given[0], "x"),)
    if not isinstance(result, (tuple, list)) or len(result) != len(given):
        raise CandidateFault(f"{name} returned {printable(type(result).__name__)}, not the two tensors of q and k")
    return tuple(_checked_one(name, r, like, of) for r, like, of in zip(result, given, ("q", "k"), strict=True))


def _checked_one(name: str, result: Any, like: Tensor, of: str) -> Tensor:
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
            raise CandidateFault(f"{name} returned {what} {got}, where {of} has {what} {expected}")
    return result.resolve_neg()


def _in_place(name: str, result: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a candidate that works in place has made of ``given``."""
    results = (result,) if isinstance(result, Tensor) else result
    if results is not None and not (
        isinstance(results, (tuple, list))
        and len(results) == len(given)
        and all(isinstance(r, Tensor) and r.data_ptr() == g.data_ptr() for r, g in zip(results, given, strict=True))
    ):
        raise CandidateFault(f"{name} is declared to work in place, but returns other memory than it was given")
    return given
