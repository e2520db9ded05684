"""repeatability: is the output of the tenth, or hundredth, call the first's, whatever launch configuration is forced?

The same inputs are given again and again; the second and the last call must return the first call's bytes. Another
input is given in between, so that a cached result shows. Each launch configuration that the candidate names is
forced alone and must return these bytes too. A race that strikes less often than once in the calls of a case is
missed; the first call of a case need not be the first of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..invocation import forward, vjp
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

_MANY, _FEW = 100, 10
_FORCE = "configuration="
# One or two heads, and many calls of two inputs only: an interpreted call costs milliseconds.
_WORN = (Inputs(batch=2, heads=1, table="per-sample"), Inputs(batch=2, length=1, table="per-sample"))
_SMOKE = _WORN[1:]
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


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    for given in _SMOKE if plan == "smoke" else _STANDARD:
        calls = _MANY if given in _WORN or plan == "full" else _FEW
        yield given, f"forward/calls={calls}"
        if "vjp" in candidate.provides:
            yield given, f"vjp/calls={calls}"
    for name in candidate.configs:
        for given in _FORCED[:1] if plan == "smoke" else _FORCED:
            yield given, f"{_FORCE}{name}"


def _call(candidate: Candidate, given: Operands, variant: str) -> torch.Tensor:
    operands = (given.x.view, given.cos.view, given.sin.view)
    if variant.startswith("vjp"):
        return vjp(candidate, *operands, given.gradient.view)
    return forward(candidate, *operands)


def _inputs_differ(given: Operands, other: Operands, variant: str) -> bool:
    a, b = (o.gradient if variant.startswith("vjp") else o.x for o in (given, other))
    return not bool(same(a.view, b.view).all())


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given, other = build(case, seed), build(case, seed + 1)
    forced = case.variant.removeprefix(_FORCE) if case.variant.startswith(_FORCE) else ""
    first = _call(candidate, given, case.variant).clone()
    calls = 2 if forced else int(case.variant.partition("calls=")[2])
    facts: dict[str, Any] = {"calls": calls, "elements": first.numel()}
    with candidate.configs[forced]() if forced else nullcontext():
        for number in range(2, calls + 1):
            if number == calls:
                between = _call(candidate, other, case.variant)
                if _inputs_differ(given, other, case.variant) and bool(same(between, first).all()):
                    return failed("another input is given the first input's output", **facts)
            elif number > 2:
                # The calls between the second and the last only wear the candidate on.
                _call(candidate, given, case.variant)
                continue
            unlike = int((~same(_call(candidate, given, case.variant), first)).sum())
            if unlike:
                under = f" under configuration {forced}" if forced else ""
                reason = f"{unlike} of {first.numel()} elements of call {number}{under} are not those of the first call"
                return failed(reason, **facts)
    return passed(**facts)


REPEATABILITY = Judgement(
    "repeatability",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "repeatability", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
