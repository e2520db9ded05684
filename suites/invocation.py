"""Calling a candidate: its forward, its backward, and the faults that need no oracle to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, described
from .returned import fault_of, is_what_was_given
from .surroundings import Surroundings
from .views import X_VIEWS, Placed


class CandidateFault(Exception):  # noqa: N818 - it is no error of the judge's
    """The candidate raised, or returned something that is no output at all. The message is one sentence.

    ``leaves`` says what of the process's state was found changed, where an error is the cause.
    """

    leaves = ""


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
        outputs(candidate, x, cos, sin, conjugate=conjugate, on_the_spot=on_the_spot, k_view=k_view, watch=True)
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
    watch: bool = False,
) -> tuple[Tensor, ...]:
    """As :func:`forward`, the tensors as the candidate returns them: y, or those of q and of k.

    With ``watch``, what lies apart from x for the candidate's sake must be left alone, and so must its surroundings.
    """
    return _called(candidate, "run", candidate.run, x, cos, sin, conjugate, on_the_spot, k_view, watch)


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
            vjp_outputs(
                candidate, cos, sin, gradient, conjugate=conjugate, on_the_spot=on_the_spot, k_view=k_view, watch=True
            )
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
    watch: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients as the candidate's own ``vjp``, which it has, returns them: of x, or of q and of k."""
    assert candidate.vjp is not None
    return _called(candidate, "vjp", candidate.vjp, gradient, cos, sin, conjugate, on_the_spot, k_view, watch)


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
    results, gradients = derivatives(candidate, x, cos, sin, gradient, conjugate=conjugate, k_view=k_view, watch=True)
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
    watch: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(outputs, gradients) by autograd, as the candidate returns them: of x, or of q and of k."""
    apart: list[Placed] | None = [] if watch else None
    leaves, results = recorded(candidate, x, cos, sin, conjugate=conjugate, k_view=k_view, apart=apart)
    gradients = pulled_back(results, leaves, divided(candidate, gradient, k_view))
    _require_left_alone("run", apart or [], written=False)
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
    apart: list[Placed] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(leaves, outputs) of a call that autograd records; of x, or of q and k, those ``wanted`` require grad.

    Raises :class:`CandidateFault` where the output of one that does has no graph.
    """
    given = parts(candidate, x, k_view, apart)
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
    """How many heads of x are q's, where the candidate takes a pair: two of three, so that k has its own count.

    Of five, and of larger odd numbers, k has one more than q.
    """
    if heads > 3 and heads % 2:
        return heads // 2
    return heads - heads // 3 if heads > 2 else (heads + 1) // 2


def parts(
    candidate: Candidate, x: Tensor, k_view: str = "", apart: list[Placed] | None = None
) -> tuple[Tensor, ...]:
    """What the candidate's family is given of x [B, S, H, D]: x itself, or q and k.

    q and k are views of x's memory, as of a packed projection, or k lies apart as ``k_view`` says. Where the
    candidate does not claim ``strided`` both are contiguous copies. What lies apart from x is placed between guard
    bands and added to ``apart``, where that is given.
    """
    if candidate.family == "rotate":
        return (x,)
    q, k = divided(candidate, x)
    if "strided" not in candidate.provides:
        if apart is None:
            return tuple(part.clone(memory_format=torch.contiguous_format) for part in (q, k))
        placed = [X_VIEWS["contiguous"](part) for part in (q, k)]
    elif k_view:
        placed = [X_VIEWS[k_view](k)]
    else:
        return q, k
    if apart is not None:
        apart += placed
    return (*((q,) if len(placed) == 1 else ()), *(p.view for p in placed))


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
    watch: bool,
) -> tuple[Tensor, ...]:
    apart: list[Placed] | None = [] if watch else None
    given = parts(candidate, _own_copy(x) if candidate.in_place and not on_the_spot else x, k_view, apart)
    with torch.no_grad():
        result = _run(name, function, given, cos, sin, conjugate)
    if candidate.in_place:
        written = _in_place(name, result, given)
        if apart:
            # What may have been written is put back, to see what may not have been.
            written = tuple(y.clone() for y in written)
        result = written if len(written) > 1 else written[0]
    results = tuple(y.detach() for y in _checked(name, result, given))
    _require_left_alone(name, apart or [], written=candidate.in_place)
    return results


def _require_left_alone(name: str, apart: list[Placed], *, written: bool) -> None:
    """Raise :class:`CandidateFault` where bytes have changed that are not the candidate's to write."""
    for placed in apart:
        if written:
            placed.view.copy_(placed.as_given())
        if count := placed.changed_bytes():
            raise CandidateFault(f"{name} changes {count} bytes of q's or k's storage, guard bands included")


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
        fault = CandidateFault(f"{name} raised {described(error)}")
        fault.leaves = before.restore()
        raise fault from error
    finally:
        changed = before.restore()
    if changed:
        raise CandidateFault(f"{name} leaves {changed} changed")
    return result


def _checked(name: str, result: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``result`` as one output for each of ``given``, each of its shape, dtype and device."""
    if fault := fault_of(name, result, given):
        raise CandidateFault(fault)
    return tuple(y.resolve_neg() for y in ((result,) if len(given) == 1 else result))


def _in_place(name: str, result: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a candidate that works in place has made of ``given``."""
    if not is_what_was_given(result, given):
        raise CandidateFault(f"{name} is declared to work in place, but returns other memory than it was given")
    return given
