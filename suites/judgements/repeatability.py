"""repeatability: is a call's output the same again, whatever was called in between and is forced?

The same inputs are given again and again; the second and the last call (the tenth, or the hundredth) must return the
first call's bytes, and on a GPU each of a hundred. In between another input is given, which must not get the first
one's output nor overwrite it, and a longer one. Then another table is written into the memory of the first: a cached
table shows. Each launch configuration that the candidate names is forced alone and must return these bytes too. A race
that strikes less often than once in the calls of a case is missed; the first call of a case need not be the first of
the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..invocation import derivatives, outputs, vjp_outputs
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

_MANY, _FEW = 100, 10
_FORCE = "configuration="
_LONGER = 250
# One or two heads, and many calls of one input only: an interpreted call costs milliseconds.
_WORN = Inputs(batch=2, length=1, table="per-sample")
_SMOKE = (_WORN,)
_STANDARD = (
    Inputs(heads=1),
    Inputs(batch=2, heads=1),
    Inputs(batch=2, heads=1, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(length=7, heads=2, payload="index-coded"),
    Inputs(length=5, heads=1, payload="special"),
    Inputs(length=5, heads=1, payload="magnitudes"),
    Inputs(length=3, heads=2, positions="far"),
    Inputs(heads=2, x_view="packed-qkv", gradient_view="all-stride-0"),
    Inputs(heads=2, head_dim=80, rotary_dim=48),
)
_FORCED = (Inputs(batch=2, length=19, heads=5, table="per-sample"), Inputs(length=37, heads=9, payload="special"))


def _variants(candidate: Candidate, device: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    for given in _SMOKE if plan == "smoke" else _STANDARD:
        calls = _MANY if given == _WORN or plan == "full" or device == "cuda" else _FEW
        yield given, f"forward/calls={calls}"
        if "vjp" in candidate.provides:
            yield given, f"vjp/calls={calls}"
    for name in candidate.configs:
        for given in _FORCED[:1] if plan == "smoke" else _FORCED:
            yield given, f"{_FORCE}{name}"


def _results(candidate: Candidate, given: Operands, variant: str) -> tuple[torch.Tensor, ...]:
    """The outputs, or the gradients, as the candidate returns them."""
    if not variant.startswith("vjp"):
        return outputs(candidate, given.x.view, given.call, watch=True)
    if candidate.vjp is None:
        return derivatives(candidate, given.x.view, given.call, given.gradient.view, watch=True)[1]
    return vjp_outputs(candidate, given.call, given.gradient.view, watch=True)


def _whole(given: Operands, variant: str, results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return given.family.undivided(results) if variant.startswith("vjp") else given.family.joined(results)


def _call(candidate: Candidate, given: Operands, variant: str) -> torch.Tensor:
    return _whole(given, variant, _results(candidate, given, variant))


def _inputs_differ(given: Operands, other: Operands, variant: str) -> bool:
    a, b = (o.gradient if variant.startswith("vjp") else o.x for o in (given, other))
    return not bool(same(a.view, b.view).all())


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given, other = build(case, seed), build(case, seed + 1)
    forced = case.variant.removeprefix(_FORCE) if case.variant.startswith(_FORCE) else ""
    kept = _results(candidate, given, case.variant)
    first = _whole(given, case.variant, kept).clone()
    calls = 2 if forced else int(case.variant.partition("calls=")[2])
    facts: dict[str, Any] = {"calls": calls, "elements": first.numel()}
    with candidate.configs[forced]() if forced else nullcontext():
        for number in range(2, calls):
            # On a CPU the calls between the second and the last only wear the candidate on.
            again = _call(candidate, given, case.variant)
            if (number == 2 or case.device == "cuda") and (found := _unlike(again, first, number, forced)):
                return failed(found, **facts)
        between = _call(candidate, other, case.variant)
        if _inputs_differ(given, other, case.variant) and bool(same(between, first).all()):
            return failed("another input is given the first input's output", **facts)
        if found := _unlike(_whole(given, case.variant, kept), first, 1, ""):
            return failed(f"a later call overwrites an earlier one's output: {found}", **facts)
        if not forced:
            longer = replace(case, inputs=replace(case.inputs, length=case.inputs.length + _LONGER))
            _call(candidate, build(longer, seed), case.variant)
        if found := _unlike(_call(candidate, given, case.variant), first, calls, forced):
            return failed(found, **facts)
    if not forced and (found := _stale_table(candidate, case, given, seed)):
        return failed(found, **facts)
    return passed(**facts)


def _unlike(got: torch.Tensor, first: torch.Tensor, number: int, forced: str) -> str:
    """In words, how ``got`` differs from ``first``; empty where it does not."""
    count = int((~same(got, first)).sum())
    under = f" under configuration {forced}" if forced else ""
    return f"{count} of {first.numel()} elements of call {number}{under} are not those of call 1" if count else ""


def _stale_table(candidate: Candidate, case: Case, given: Operands, seed: int) -> str:
    """Write other tables over the first, each alone and then all: the output must be that of the others."""
    elsewhere = "far" if case.inputs.positions == "ramp" else "ramp"
    other = build(replace(case, inputs=replace(case.inputs, positions=elsewhere)), seed)
    for name, placed in given.tables.items():
        if torch.equal(placed.view, other.tables[name].view):
            # An axis map is the same at all positions.
            other.tables[name].view.copy_(placed.view.flip(-1))
    for names in (*([name] for name in given.tables), list(given.tables)):
        # In fresh memory, of which nobody can have kept anything.
        fresh = {**build(case, seed).tables, **{name: other.tables[name] for name in names}}
        expected = _call(candidate, replace(given, tables=fresh), case.variant).clone()
        before = {name: given.tables[name].view.clone() for name in names}
        for name in names:
            given.tables[name].view.copy_(other.tables[name].view)
        count = int((~same(_call(candidate, given, case.variant), expected)).sum())
        for name in names:
            given.tables[name].view.copy_(before[name])
        if count:
            what = " and ".join(names)
            return f"{count} of {expected.numel()} elements are those of {what} that was overwritten since"
    return ""


REPEATABILITY = Judgement(
    "repeatability",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "repeatability", candidate, device, dtype, _variants(candidate, device, plan)
    ),
    judge,
)
