"""autocast: are a call's bytes under torch.autocast, or torch.inference_mode, those of a call outside it?

Asked of a candidate that claims ``autocast``, under autocast to bf16 and to fp16, for inputs of each dtype. A rotation
is no matrix product: neither the output's dtype nor any byte of it, nor (with the claim ``vjp``) of the gradient, may
depend on autocast, whether the backward runs inside the region, as nobody should but many do, or behind it. One more
case calls the candidate inside ``torch.inference_mode()``, on tensors that were made outside, and wants the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import same

from ..candidates import DTYPES, Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..families import Family
from ..invocation import derivatives, outputs, pulled_back, recorded, vjp_outputs
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of

_SMOKE = (Inputs(batch=2),)
_STANDARD = (*_SMOKE, Inputs(batch=2, table="per-sample", x_view="packed-qkv", gradient_view="heads-first"))
_MORE = (
    Inputs(batch=2, conjugate=True),
    Inputs(batch=2, length=13, payload="special"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(batch=2, head_dim=80, rotary_dim=48),
)
_INFERENCE = "inference-mode"


def _variants(candidate: Candidate, device: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    asked: tuple[Inputs, ...] = _SMOKE if plan == "smoke" else _STANDARD
    if plan == "full" or (plan == "standard" and device == "cuda"):
        asked += _MORE
    yield _SMOKE[0], _INFERENCE
    for given in asked:
        for to in ("bfloat16", "float16"):
            yield given, f"forward/to={to}"
            if "vjp" in candidate.provides:
                yield given, f"vjp/to={to}"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given, family = build(case, seed), case.bound_family
    if case.variant == _INFERENCE:
        results = _results(candidate, given, "forward")
        with torch.inference_mode():
            inside = _results(candidate, given, "forward")
        return _compared(family, inside, results, "inference mode", {})
    direction, _, to = case.variant.partition("/to=")
    results = _results(candidate, given, direction)
    with torch.autocast(case.device, dtype=DTYPES[to]):
        inside = _results(candidate, given, direction)
        if direction == "vjp" and candidate.vjp is None:
            leaves, y = recorded(candidate, given.x.view, given.call)
    if direction == "vjp" and candidate.vjp is None:
        name = "the gradient, its backward run behind the region,"
        inside[name] = pulled_back(y, leaves, family.upstream(given.gradient.view))
        results[name] = results["the gradient"]
    return _compared(family, inside, results, "autocast", {"autocast to": to})


def _compared(
    family: Family,
    inside: dict[str, tuple[Tensor, ...]],
    results: dict[str, tuple[Tensor, ...]],
    region: str,
    facts: dict[str, Any],
) -> Finding:
    facts = {**facts, "elements": sum(t.numel() for tensors in results.values() for t in tensors)}
    for name in results:
        # Put together out here: under autocast torch.cat promotes, and refuses bf16 in an fp16 region.
        put_together = family.joined if name == "y" else family.undivided
        got, expected = put_together(inside[name]).detach(), put_together(results[name])
        differs = ~same(got, expected)
        if count := int(differs.sum()):
            where = dict(zip(("sample", "token", "head", "channel"), first_of(differs), strict=True))
            reason = f"{count} of {differs.numel()} elements of {name} are others than outside {region}"
            return failed(reason, where, **facts)
    return passed(**facts)


def _results(candidate: Candidate, given: Operands, direction: str) -> dict[str, tuple[Tensor, ...]]:
    """Copies of what one call returns: a candidate may write over its results in the next."""
    x, call, gradient = given.x.view, given.call, given.gradient.view
    if direction == "forward":
        results = {"y": outputs(candidate, x, call)}
    elif candidate.vjp is not None:
        results = {"the gradient": vjp_outputs(candidate, call, gradient)}
    else:
        y, gradients = derivatives(candidate, x, call, gradient)
        results = {"y": y, "the gradient": gradients}
    return {name: tuple(t.clone() for t in tensors) for name, tensors in results.items()}


AUTOCAST = Judgement(
    "autocast",
    "autocast",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "autocast", candidate, device, dtype, _variants(candidate, device, plan)
    ),
    judge,
)
