"""refusals: does each bad input get an error that names the argument?

Asked of a candidate that claims ``refusals``. Every case hands over one wrong rank, dtype, size or device; the call
must raise a TypeError, ValueError, RuntimeError or NotImplementedError whose message names the offending argument,
and must leave all inputs as they were. Whether the message is helpful beyond that is for a person to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..cache_packing import axis_map_of
from ..candidates import Candidate, described
from ..cases import Case, Inputs, Operands, build, cases_of
from ..families import FAMILIES
from ..invocation import CandidateFault, guarded, parts
from ..verdicts import Finding, failed, passed
from ..views import Placed
from .bad_calls import BAD_CALLS, NARROW_FOR_THE_MAP
from .bad_norm_calls import BAD_NAMED_CALLS
from .judgement import Judgement

_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError)

Bad = Callable[[Tensor, Tensor, Tensor], tuple[Any, Any, Any]]
BadPair = Callable[[Tensor, Tensor], tuple[Any, Any]]

# Each makes one bad call out of a good one: x [2, 7, 3, D], cos and sin [2, 7, R / 2].
_BAD: dict[str, tuple[Bad, str]] = {
    "x-is-no-tensor": (lambda x, cos, sin: (x.tolist(), cos, sin), "x"),
    "x-of-rank-3": (lambda x, cos, sin: (x[0], cos, sin), "x"),
    "x-of-rank-5": (lambda x, cos, sin: (x[None], cos, sin), "x"),
    "x-of-int32": (lambda x, cos, sin: (torch.zeros(x.shape, dtype=torch.int32, device=x.device), cos, sin), "x"),
    "x-of-fp64": (lambda x, cos, sin: (x.double(), cos, sin), "x"),
    "tables-of-fp16": (lambda x, cos, sin: (x, cos.half(), sin.half()), "cos|sin"),
    "tables-of-fp64": (lambda x, cos, sin: (x, cos.double(), sin.double()), "cos|sin"),
    "tables-of-rank-1": (lambda x, cos, sin: (x, cos[0, 0], sin[0, 0]), "cos|sin"),
    "sin-narrower-than-cos": (lambda x, cos, sin: (x, cos, sin[..., :-1]), "cos|sin"),
    "tables-shorter-than-x": (lambda x, cos, sin: (x, cos[:, :-1], sin[:, :-1]), "cos|sin"),
    "tables-longer-than-x": (lambda x, cos, sin: (x[:, :-1], cos, sin), "cos|sin"),
    "more-tables-than-samples": (lambda x, cos, sin: (x[:1], cos, sin), "cos|sin"),
    "tables-wider-than-a-head": (lambda x, cos, sin: (x[..., : cos.shape[-1]], cos, sin), "cos|sin|x"),
    "cos-requires-grad": (lambda x, cos, sin: (x, cos.clone().requires_grad_(), sin), "cos"),
    "sin-requires-grad": (lambda x, cos, sin: (x, cos, sin.clone().requires_grad_()), "sin"),
    "tables-on-another-device": (lambda x, cos, sin: (x, cos.to("meta"), sin.to("meta")), "cos|sin"),
}


_BAD_PAIR: dict[str, tuple[BadPair, str]] = {
    "fewer-samples-than-q": (lambda q, k: (q, k[:1]), "k|cos|sin"),
    "fewer-tokens-than-q": (lambda q, k: (q, k[:, :-1]), "k|cos|sin"),
    "narrower-heads-than-q": (lambda q, k: (q, k[..., :-2]), "k"),
    "another-dtype-than-q": (lambda q, k: (q, k.to(torch.float32 if k.dtype != torch.float32 else torch.half)), "k"),
    "another-device-than-q": (lambda q, k: (q, k.to("meta")), "k"),
}
"""How k can disagree with q. Each is one more bad call of a pair."""

_ONTO_K = "k-"
_DISAGREES = "k-of-"


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    given = Inputs(batch=2, table="per-sample")
    own = contract(candidate.contract)
    if candidate.family in BAD_CALLS:
        for name in list(BAD_CALLS[candidate.family])[: 4 if plan == "smoke" else None]:
            if name != NARROW_FOR_THE_MAP or axis_map_of(own) is not None:
                yield given, name
        return
    if candidate.family in BAD_NAMED_CALLS:
        taken = FAMILIES[candidate.family](own, given).keywords(candidate.run)
        known = {*taken.values, *taken.tables}
        asked = [name for name, (_, _, keyword) in BAD_NAMED_CALLS[candidate.family].items() if keyword in ("", *known)]
        for name in asked[: 4 if plan == "smoke" else None]:
            yield given, name
        return
    for name in list(_BAD)[:4] if plan == "smoke" else _BAD:
        if name == "tables-of-fp16" and own.table_dtype != "float32":
            continue
        if name.endswith("-requires-grad") and "vjp" in candidate.provides and candidate.vjp is None:
            # table-gradient asks: it may be computed as well as refused.
            continue
        yield given, name
        if candidate.family == "rotate_pair" and name.startswith("x-"):
            yield given, _ONTO_K + name
    if candidate.family == "rotate_pair":
        for name in _BAD_PAIR:
            yield given, _DISAGREES + name


def _bad_call(
    candidate: Candidate, variant: str, given: Operands, apart: list[Placed]
) -> tuple[tuple[Any, ...], str, dict[str, Any]]:
    """The arguments of the bad call, the pattern of the argument that the refusal must name, and the keywords."""
    arguments, argument, keywords = _spoilt(candidate, variant, given, apart)
    if "strided" not in candidate.provides:
        # One thing is wrong with a call, and it is not its strides.
        arguments = tuple(_contiguous(value) for value in arguments)
        keywords = {name: _contiguous(value) for name, value in keywords.items()}
    return arguments, argument, keywords


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _spoilt(
    candidate: Candidate, variant: str, given: Operands, apart: list[Placed]
) -> tuple[tuple[Any, ...], str, dict[str, Any]]:
    family = given.family
    if family.name not in BAD_NAMED_CALLS:
        return *_spoilt_by_place(candidate, variant, given, apart), {}
    x = parts(candidate, family, given.x.view, apart)
    by_place, by_name = family.keywords(candidate.run).arguments(x, given.call.tables)
    names = (*family.activations, *given.tables)[: len(by_place)]
    spoil, argument, _ = BAD_NAMED_CALLS[family.name][variant]
    bad = spoil(dict(zip(names, by_place, strict=True)) | by_name)
    return tuple(bad.pop(name) for name in names), argument, bad


def _spoilt_by_place(
    candidate: Candidate, variant: str, given: Operands, apart: list[Placed]
) -> tuple[tuple[Any, ...], str]:
    family = given.family
    if family.name in BAD_CALLS:
        call, argument = BAD_CALLS[family.name][variant]
        return call(*parts(candidate, family, given.x.view, apart), *given.call.tables), argument
    cos, sin = given.cos.view, given.sin.view
    if variant.startswith(_DISAGREES):
        disagree, argument = _BAD_PAIR[variant.removeprefix(_DISAGREES)]
        return (*disagree(*parts(candidate, family, given.x.view, apart)), cos, sin), argument
    spoil, argument = _BAD[variant.removeprefix(_ONTO_K)]
    if candidate.family == "rotate":
        return spoil(given.x.view, cos, sin), argument
    q, k = parts(candidate, family, given.x.view, apart)
    if variant.startswith(_ONTO_K):
        return (q, *spoil(k, cos, sin)), "k"
    bad = spoil(q, cos, sin)
    # What spoils the size of q must not make q and k disagree: then k would be the one to name.
    other = spoil(k, cos, sin)[0] if argument != "x" else k
    return (bad[0], other, *bad[1:]), argument.replace("x", "q|k")


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    apart: list[Placed] = []
    arguments, argument, keywords = _bad_call(candidate, case.variant, given, apart)
    try:
        result = guarded("run", lambda: candidate.run(*arguments, **keywords))
    except CandidateFault as fault:
        refusal = fault.__cause__
        if not isinstance(refusal, _REFUSALS):
            return failed(f"{fault}, which is no refusal of an argument")
        if fault.leaves:
            return failed(f"refused, but leaves {fault.leaves} changed")
    else:
        shape = tuple(getattr(result, "shape", ()))
        return failed(f"accepted {case.variant}: returned {type(result).__name__} {shape}")
    changed = {name: placed.changed_bytes() for name, placed in given.placed().items()}
    changed |= {f"part {number}": placed.changed_bytes() for number, placed in enumerate(apart)}
    message = str(refusal)
    facts: dict[str, Any] = {"error": type(refusal).__name__, "message": message[:300]}
    if any(changed.values()):
        return failed("refused, but inputs were changed before", **facts)
    if not re.search(rf"\b({argument})\b", message):
        wanted = argument.replace("|", " or ")
        return failed(f"refused without naming {wanted}: {described(refusal)}", **facts)
    return passed(**facts)


REFUSALS = Judgement(
    "refusals",
    "refusals",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "refusals", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
