"""Offsets past 2**31 elements: the cases of accuracy-forward that are too large to be made and compared in full.

All samples of such a case (in one of them, all tokens) hold the same data at the same positions. The first and the
last are held against the oracle; every other must have the first one's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract
from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build
from ..families import FAMILIES, Call, heads_of_q
from ..invocation import outputs
from ..verdicts import PASS, Finding, failed
from ..views import FAR, FAR_X_VIEWS, Placed
from .judgement import finding_of
from .purity import uninitialised_memory_is_nan

VARIANT = "far-offsets"
_DTYPE = "bfloat16"
_ELEMENTS_AT_ONCE = 1 << 26
# A prime length: a sample reached through an offset that wrapped is not in step with another.
_LENGTH, _HEADS = 4093, 24


def far_inputs(
    candidate: Candidate, device: str, dtype: str, plan: str, far: int = FAR
) -> Iterator[tuple[Inputs, str]]:
    """x with strides past ``far`` elements, on a CPU too, where its pages are not touched; contiguous tensors of more
    elements, the output's last sample lying beyond, on a GPU, where 10 to 20 GiB hold them. Of a pair, q's."""
    if dtype != _DTYPE or plan == "smoke":
        return
    family = FAMILIES[candidate.family]
    heads = heads_of_q(_HEADS) if len(family.activations) > 1 else _HEADS
    token = heads * contract(candidate.contract).head_dim
    # The first position would be the identity.
    positions = "far" if family.flat else "sample"
    if not family.flat:
        yield Inputs(batch=2, length=5, x_view="samples-far-apart"), VARIANT
    yield Inputs(length=2, x_view="tokens-far-apart", positions=positions), VARIANT
    if device == "cpu":
        return
    if family.flat:
        yield Inputs(length=far // token + 2, heads=_HEADS, positions=positions), VARIANT
    else:
        yield Inputs(batch=far // (_LENGTH * token) + 2, length=_LENGTH, heads=_HEADS), VARIANT


def judge_far(candidate: Candidate, case: Case, seed: int) -> Finding:
    try:
        return _judged(candidate, case, seed)
    finally:
        if case.device == "cuda":
            # What a case of this size leaves in the allocator's cache, the cases of other processes may need.
            torch.cuda.empty_cache()


def _judged(candidate: Candidate, case: Case, seed: int) -> Finding:
    given, family = case.inputs, case.bound_family
    repeated = 1 if given.x_view == "tokens-far-apart" or family.flat else 0
    count = (given.batch, given.length)[repeated]
    one = _one(case, repeated, seed)
    call = Call(family, family.repeated(one.call.tables, count)) if repeated == 1 else one.call
    x = _expanded(one.x.view, repeated, count)
    x = FAR_X_VIEWS[given.x_view](x).view if given.x_view in FAR_X_VIEWS else x.contiguous()
    with uninitialised_memory_is_nan():
        got = outputs(candidate, x, call)
    along = family.token_dimension if repeated == 1 else 0
    ends = family.joined(
        tuple(torch.cat((y.narrow(along, 0, 1), y.narrow(along, count - 1, 1)), along) for y in got)
    )
    two = replace(one, x=Placed(_expanded(one.x.view, repeated, 2), one.x.before))
    if repeated == 1:
        cos, sin = (Placed(table.view.expand(2, -1), table.before) for table in (one.cos, one.sin))
        two = replace(two, cos=cos, sin=sin, positions=one.positions.expand(2, -1))
    finding = finding_of(two.expected().held(ends, seed=seed))
    name = ("samples", "tokens")[repeated]
    facts: dict[str, Any] = {**finding.facts, f"{name} judged": [0, count - 1], f"{name} compared": count}
    if finding.verdict != PASS:
        return replace(finding, facts=facts)
    unlike = sorted({index for y in got for index in _unlike_the_first(y, along)})
    if unlike:
        reason = f"{len(unlike)} of {count} {name} are not the first one's bytes, though they hold the same data"
        return failed(f"{reason}; the first of them is number {unlike[0]}", **facts)
    return replace(finding, facts=facts)


def _one(case: Case, repeated: int, seed: int) -> Operands:
    """The operands of the one sample, or the one token, that the case repeats."""
    single = {"length": 1} if repeated == 1 else {"batch": 1}
    return build(replace(case, inputs=replace(case.inputs, x_view="contiguous", **single)), seed)  # type: ignore[arg-type]


def _expanded(t: Tensor, dimension: int, count: int) -> Tensor:
    return t.expand(*(count if d == dimension else n for d, n in enumerate(t.shape)))


def _unlike_the_first(y: Tensor, dimension: int) -> Iterator[int]:
    """The indices of ``dimension`` at which ``y`` is not what it is at index 0."""
    first = y.narrow(dimension, 0, 1)
    others = tuple(d for d in range(y.dim()) if d != dimension)
    step = max(1, _ELEMENTS_AT_ONCE // max(1, first.numel()))
    for start in range(0, y.shape[dimension], step):
        some = y.narrow(dimension, start, min(step, y.shape[dimension] - start))
        unlike = (~same(some, first.expand_as(some))).sum(dim=others)
        yield from (start + int(i) for i in unlike.nonzero().flatten())
