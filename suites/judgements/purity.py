"""purity: are inputs left alone, guard bands untouched, and every output byte written?

The inputs lie in storages with guard bands on both sides; after the call every byte of every storage must be as it
was, and the output must have memory of its own. Uninitialised memory is filled with NaN, so that an output element
that is not written shows, and so does one that is written though it belongs to a token which the call names as
padding. A candidate that works in place may change x's elements, and only these, and must raise the version by which
autograd sees that what it saved was written over. Reads outside an input leave no
trace here unless they reach the output; memory that a candidate allocates by other means than torch is not filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..invocation import outputs, vjp
from ..verdicts import Finding, failed, passed
from ..views import Placed
from .judgement import Judgement, first_of

PADDING = "padding"
_SMOKE = (Inputs(batch=2, table="per-sample"), Inputs(batch=2, x_view="packed-qkv"))
_STANDARD = (
    Inputs(),
    Inputs(batch=2),
    Inputs(batch=2, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(batch=2, length=13, payload="special"),
    Inputs(batch=2, x_view="misaligned", table_view="misaligned", gradient_view="misaligned"),
    Inputs(batch=2, table_view="end-of-allocation", table="per-sample"),
    Inputs(length=19, positions="far"),
    Inputs(length=255, heads=1, positions="ramp", payload="basis-first"),
    Inputs(batch=2, x_view="packed-qkv", gradient_view="packed-qkv"),
    Inputs(batch=2, x_view="heads-first", table_view="sliced-rows", table="per-sample"),
    Inputs(batch=2, x_view="channels-stride-2", gradient_view="channels-outermost"),
    Inputs(batch=2, x_view="heads-stride-2", table_view="transposed"),
    Inputs(batch=2, head_dim=80, rotary_dim=48),
    Inputs(batch=2, heads=5, head_dim=67, rotary_dim=34, x_view="wider-heads"),
    # A pair only: k in memory of its own.
    Inputs(batch=2, heads=5, k_view="contiguous"),
    Inputs(batch=2, heads=5, x_view="packed-qkv", k_view="heads-first", table="per-sample"),
)


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    for given in _SMOKE if plan == "smoke" else _STANDARD:
        yield given, "forward"
        if "vjp" in candidate.provides:
            yield given, "vjp"


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Within the block torch fills what it allocates without a value; NaN for floats."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Any: the module's attributes are properties that type checkers do not see.
    fills: Any = torch.utils.deterministic
    filled = fills.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fills.fill_uninitialized_memory = filled


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    if case.variant == PADDING:
        return _padding(candidate, given)
    backward = case.variant == "vjp"
    watched = {**given.placed(), **({"gradient": given.gradient} if backward else {})}
    written = given.gradient if backward else given.x
    values = written.view.clone()
    with uninitialised_memory_is_nan():
        if backward:
            got = vjp(candidate, given.x.view, given.call, given.gradient.view, on_the_spot=True)
            results: tuple[Tensor, ...] = (got,)
        else:
            results = outputs(candidate, given.x.view, given.call, on_the_spot=True, watch=True)
            got = given.family.joined(results)
    results = () if candidate.in_place else results
    got = got.clone() if candidate.in_place else got
    if candidate.in_place:
        # What may have changed is put back; what is left is what may not have.
        written.view.copy_(values)
    changed = {name: placed.changed_bytes() for name, placed in watched.items()}
    unwritten = got.isnan() & ~given.may_be_nan(backward=backward)
    facts: dict[str, Any] = {"bytes changed": changed, "elements": got.numel()}
    facts["NaN or unwritten"] = int(unwritten.sum())
    for name, count in changed.items():
        if count:
            return failed(f"{count} bytes of {name}'s storage (guard bands included) changed", **facts)
    for name, placed in watched.items():
        memory = placed.view.untyped_storage().data_ptr()
        if any(y.numel() and y.untyped_storage().data_ptr() == memory for y in results):
            return failed(f"the output shares memory with {name}", **facts)
    if facts["NaN or unwritten"]:
        where = dict(zip(("sample", "token", "head", "channel"), first_of(unwritten), strict=True))
        reason = f"{facts['NaN or unwritten']} output elements are unwritten, or NaN where no form is"
        return failed(reason, where, **facts)
    return passed(**facts)


def _as_it_is(placed: Placed) -> Placed:
    return Placed(placed.view, placed.storage.clone())


def _padding(candidate: Candidate, given: Operands) -> Finding:
    """Rows of the outputs that belong to padding must hold what they were allocated with, which here is NaN.

    Padding has finite values here, and positions of rows that the cache has: whoever writes it writes no NaN.
    """
    family = given.family
    padding = family.padding(given.x.view.shape[1])
    given.x.view[0, padding] = 1.0
    given.tables["positions"].view[..., padding] = 0
    given = replace(given, x=_as_it_is(given.x), tables={name: _as_it_is(t) for name, t in given.tables.items()})
    with uninitialised_memory_is_nan():
        results = outputs(candidate, given.x.view, given.call)
    written = {name: int((~y[padding].isnan()).sum()) for name, y in zip(family.outputs, results, strict=False)}
    changed = {name: placed.changed_bytes() for name, placed in given.placed().items()}
    facts: dict[str, Any] = {"elements of padding written": written, "bytes changed": changed}
    for name, count in written.items():
        if count:
            return failed(f"{count} elements of {name} that belong to padding are written", **facts)
    for name, count in changed.items():
        if count:
            return failed(f"{count} bytes of {name}'s storage (guard bands included) changed", **facts)
    return passed(**facts)


PURITY = Judgement(
    "purity",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("purity", candidate, device, dtype, _variants(candidate, plan)),
    judge,
)
