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

from ..candidates import Candidate, described
from ..cases import Case, Inputs, build, cases_of
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError)

Bad = Callable[[Tensor, Tensor, Tensor], tuple[Any, Any, Any]]

# Each makes one bad call out of a good one: x [2, 7, 3, D], cos and sin [2, 7, R / 2].
_BAD: dict[str, tuple[Bad, str]] = {
    "x-is-no-tensor": (lambda x, cos, sin: (x.tolist(), cos, sin), "x"),
    "x-of-rank-3": (lambda x, cos, sin: (x[0], cos, sin), "x"),
    "x-of-rank-5": (lambda x, cos, sin: (x[None], cos, sin), "x"),
    "x-of-int32": (lambda x, cos, sin: (torch.zeros(x.shape, dtype=torch.int32, device=x.device), cos, sin), "x"),
    "x-of-fp64": (lambda x, cos, sin: (x.double(), cos, sin), "x"),
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


def _variants(plan: str) -> Iterator[tuple[Inputs, str]]:
    given = Inputs(batch=2, table="per-sample")
    for name in list(_BAD)[:4] if plan == "smoke" else _BAD:
        yield given, name


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    spoil, argument = _BAD[case.variant]
    try:
        result = candidate.run(*spoil(given.x.view, given.cos.view, given.sin.view))
    except _REFUSALS as error:
        refusal = error
    except Exception as error:
        return failed(f"raised {described(error)}, which is no refusal of an argument")
    else:
        shape = tuple(getattr(result, "shape", ()))
        return failed(f"accepted {case.variant}: returned {type(result).__name__} {shape}")
    changed = {name: placed.changed_bytes() for name, placed in given.placed().items()}
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
    lambda candidate, device, dtype, plan: cases_of("refusals", candidate, device, dtype, _variants(plan)),
    judge,
)
