"""Calling a candidate: its forward, its backward, and the faults that need no oracle to see."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .candidates import Candidate, described
from .families import Call, Family, Wanted
from .returned import fault_of, is_what_was_given
from .surroundings import Surroundings
from .views import X_VIEWS, Placed


class CandidateFault(Exception):  # noqa: N818 - it is no error of the judge's
    """The candidate raised, or returned something that is no output at all. The message is one sentence.

    ``leaves`` says what of the process's state was found changed, where an error is the cause.
    """

    leaves = ""


def forward(candidate: Candidate, x: Tensor, call: Call, *, on_the_spot: bool = False) -> Tensor:
    """The candidate's y for x [B, S, H, D]. Raises :class:`CandidateFault`; out of memory passes through.

    x is divided into the activations of the call's family (:func:`parts`), and the outputs are put together again. A
    candidate that works in place is given a copy of x, unless it is to work ``on_the_spot``.
    """
    return call.family.joined(outputs(candidate, x, call, on_the_spot=on_the_spot, watch=True))


def outputs(
    candidate: Candidate, x: Tensor, call: Call, *, on_the_spot: bool = False, watch: bool = False
) -> tuple[Tensor, ...]:
    """As :func:`forward`, the tensors as the candidate returns them.

    With ``watch``, what lies apart from x for the candidate's sake must be left alone, and so must its surroundings.
    """
    return _called(candidate, "run", candidate.run, x, call, on_the_spot, watch)


def vjp(candidate: Candidate, x: Tensor, call: Call, gradient: Tensor, *, on_the_spot: bool = False) -> Tensor:
    """The candidate's gradient of x for the incoming ``gradient``: its own ``vjp``, or autograd's."""
    if candidate.vjp is not None:
        return call.family.undivided(vjp_outputs(candidate, call, gradient, on_the_spot=on_the_spot, watch=True))
    return differentiated(candidate, x, call, gradient)[1]


def vjp_outputs(
    candidate: Candidate, call: Call, gradient: Tensor, *, on_the_spot: bool = False, watch: bool = False
) -> tuple[Tensor, ...]:
    """The gradients as the candidate's own ``vjp``, which it has, returns them: one for each activation."""
    assert candidate.vjp is not None
    return _called(candidate, "vjp", candidate.vjp, gradient, call, on_the_spot, watch)


def differentiated(candidate: Candidate, x: Tensor, call: Call, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(y, gradient of x) by autograd."""
    results, gradients = derivatives(candidate, x, call, gradient, watch=True)
    return call.family.joined(results), call.family.undivided(gradients)


def derivatives(
    candidate: Candidate, x: Tensor, call: Call, gradient: Tensor, *, watch: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(outputs, gradients) by autograd, as the candidate returns them. ``watch`` as in :func:`outputs`."""
    apart: list[Placed] | None = [] if watch else None
    leaves, results = recorded(candidate, x, call, apart=apart)
    gradients = pulled_back(results, leaves, call.family.upstream(gradient))
    _require_left_alone("run", apart or [], written=False)
    return tuple(y.detach() for y in results), tuple(g.detach() for g in gradients)


def recorded(
    candidate: Candidate,
    x: Tensor,
    call: Call,
    *,
    wanted: tuple[bool, ...] = (True, True),
    apart: list[Placed] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(leaves, outputs) of a call that autograd records; of the activations, those ``wanted`` require grad.

    Raises :class:`CandidateFault` where the output of one that does has no graph.
    """
    given = parts(candidate, call.family, x, apart)
    leaves = tuple(part.detach().requires_grad_(want) for part, want in zip(given, wanted, strict=False))
    results = applied(candidate, leaves, call)
    # What a family returns beyond one output for each activation comes from the first.
    of_each = (*leaves, *leaves[:1] * (len(results) - len(leaves)))
    if not all(y.requires_grad or not leaf.requires_grad for y, leaf in zip(results, of_each, strict=True)):
        raise CandidateFault("run returns a tensor without gradient for an x that requires one")
    return leaves, results


def applied(candidate: Candidate, given: tuple[Tensor, ...], call: Call) -> tuple[Tensor, ...]:
    """The outputs of ``run`` for the very tensors ``given`` (:func:`parts`), with the graph that autograd records."""
    with torch.enable_grad():
        result = call.family.returned(_run("run", candidate.run, given, call))
    return _checked("run", result, call.family.wanted(given))


def pulled_back(
    results: tuple[Tensor, ...], leaves: tuple[Tensor, ...], gradients: tuple[Tensor, ...], **keywords: bool
) -> tuple[Tensor, ...]:
    """``torch.autograd.grad`` with ``keywords``; what comes out must fit the leaves. Raises :class:`CandidateFault`."""
    name = "the backward of run"
    # An output may have a dimension for its heads, where the gradient has none.
    incoming = tuple(g.view(y.shape) for y, g in zip(results, gradients, strict=True))
    pulled = guarded(name, lambda: torch.autograd.grad(results, leaves, incoming, **keywords))
    return _checked(name, pulled if len(leaves) > 1 else pulled[0], _like(leaves))


def as_function(candidate: Candidate, family: Family) -> Callable[..., tuple[Any, ...]]:
    """``function(x, *tables) -> outputs`` that only calls the candidate, for compilers, exporters and graphs.

    Nothing is checked. Of x the candidate is given the parts (contiguous copies where it does not claim ``strided``),
    a candidate that works in place those of a copy: operations that move values and compute none. The outputs are not
    put together, for what a compiler makes of that would take longer than the rest.
    """
    keywords = family.keywords(candidate.run)

    def function(x: Tensor, *tables: Tensor) -> tuple[Any, ...]:
        given = family.split(x.clone() if candidate.in_place else x)
        if len(given) > 1 and "strided" not in candidate.provides:
            given = tuple(part.clone(memory_format=torch.contiguous_format) for part in given)
        by_place, by_name = keywords.arguments(given, tables)
        results = family.returned(candidate.run(*by_place, **by_name))
        if results is None:
            return given
        several = len(given) > 1 and isinstance(results, (tuple, list))
        return tuple(results) if several else (results,)

    return function


def put_together(family: Family, results: Sequence[Any]) -> Any:
    """What :func:`as_function` makes as one tensor like x. Whoever returned something else finds out elsewhere."""
    return family.joined(results) if all(isinstance(y, Tensor) for y in results) else results[0]


def parts(
    candidate: Candidate, family: Family, x: Tensor, apart: list[Placed] | None = None, *, gradient: bool = False
) -> tuple[Tensor, ...]:
    """What the candidate's family is given of x [B, S, H, D], or of a ``gradient``: x itself, or activations.

    They are views of x's memory, or lie apart as the inputs say. Where a candidate that is given more than one does not
    claim ``strided`` they are contiguous copies. What lies apart from x is placed between guard bands and added to
    ``apart``, where that is given.
    """
    if len(family.activations) == 1 or "strided" in candidate.provides:
        placed = family.apart(x, gradient=gradient)
    elif apart is None:
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in family.split(x))
    else:
        placed = {number: X_VIEWS["contiguous"](family.lifted(part)) for number, part in enumerate(family.split(x))}
    if apart is not None:
        apart += placed.values()
    return family.with_apart(x, placed)


def _called(
    candidate: Candidate,
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    call: Call,
    on_the_spot: bool,
    watch: bool,
) -> tuple[Tensor, ...]:
    apart: list[Placed] | None = [] if watch else None
    own = _own_copy(x) if candidate.in_place and not on_the_spot else x
    given = parts(candidate, call.family, own, apart, gradient=name == "vjp")
    # In inference mode nothing is saved for a backward, and nothing counts.
    versions = [-1 if t.is_inference() else t._version for t in given]
    with torch.no_grad():
        result = _run(name, function, given, call)
    if candidate.in_place:
        written = _in_place(name, result, given)
        if on_the_spot and watch:
            _require_noted(name, given, versions)
        if apart:
            # What may have been written is put back, to see what may not have been.
            written = tuple(y.clone() for y in written)
        result = written if len(written) > 1 else written[0]
    if name == "run":
        checked = _checked(name, call.family.returned(result), call.family.wanted(given))
    else:
        checked = _checked(name, result, _like(given))
    _require_left_alone(name, apart or [], written=candidate.in_place)
    return tuple(y.detach() for y in checked)


def _require_noted(name: str, given: tuple[Tensor, ...], versions: list[int]) -> None:
    """Raise :class:`CandidateFault` where autograd does not learn that what it may have saved was written over."""
    watched = [(t, version) for t, version in zip(given, versions, strict=True) if version >= 0 and t.numel()]
    if any(t._version == version for t, version in watched):
        raise CandidateFault(f"{name} writes into a tensor without raising its version, by which autograd would know")


def _require_left_alone(name: str, apart: list[Placed], *, written: bool) -> None:
    """Raise :class:`CandidateFault` where bytes have changed that are not the candidate's to write."""
    if written:
        # All of them first: several may share memory.
        for placed in apart:
            placed.view.copy_(placed.as_given())
    for placed in apart:
        if count := placed.changed_bytes():
            raise CandidateFault(f"{name} changes {count} bytes of q's or k's storage, guard bands included")


def _like(activations: tuple[Tensor, ...]) -> tuple[Wanted, ...]:
    """What gradients of the activations must be like."""
    names = ("x",) if len(activations) == 1 else ("q", "k")
    return tuple(Wanted(name, t, (tuple(t.shape),)) for name, t in zip(names, activations, strict=True))


def _own_copy(x: Tensor) -> Tensor:
    """x again in memory of its own, with the same strides, for a candidate that writes into it."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def _run(name: str, function: Callable[..., Any], given: tuple[Tensor, ...], call: Call) -> Any:
    by_place, by_name = call.family.keywords(function).arguments(given, call.tables)
    return guarded(name, lambda: function(*by_place, **by_name))


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


def _checked(name: str, result: Any, wanted: tuple[Wanted, ...]) -> tuple[Tensor, ...]:
    """``result`` as one tensor for each of ``wanted``, each of its shape, dtype and device."""
    if fault := fault_of(name, result, wanted):
        raise CandidateFault(fault)
    return tuple(y.resolve_neg() for y in ((result,) if len(wanted) == 1 else result))


def _in_place(name: str, result: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a candidate that works in place has made of ``given``."""
    if not is_what_was_given(result, given):
        raise CandidateFault(f"{name} is declared to work in place, but returns other memory than it was given")
    return given
