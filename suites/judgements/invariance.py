"""invariance-forward and invariance-vjp: does a logical token get the same bytes in every layout?

The samples of a workload are run once in the canonical layout (each sample alone) and once in another: packed,
permuted, chunked, padded, or several of these. Every logical token's bytes must agree, a NaN with any NaN, zeros of
unlike sign not. Padding holds NaN, or the largest finite number where the payload has special values of its own.
That the canonical bytes are right is the accuracy judgements' question; a fault that is the same in every layout
cannot be seen here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..cases import Case, Inputs, cases_of
from ..families import shown
from ..invocation import forward, vjp
from ..layouts import LAYOUTS, PADDING, SINGLE, Layout, flat_index, gather, scatter
from ..payloads import Slots
from ..remembered import remembered
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of

LENGTHS = {"unequal": (11, 16, 13, 19), "equal": (13, 13, 13, 13)}
"""Workloads. With 5 heads and a width of 21 tokens, heads, sequence and batch are pairwise coprime."""

_HEADS = 5
_SMOKE = ("packed-permuted/unequal/random", "padded-left/unequal/index-coded", "chunked/unequal/random")
_TWO = ("random", "index-coded")
_PAYLOADS = {"smoke": _TWO, "standard": _TWO, "full": (*_TWO, "special")}


def _variants(plan: str) -> Iterator[tuple[Inputs, str]]:
    for layout in LAYOUTS.values():
        for workload in LENGTHS:
            if layout is SINGLE or (layout.name == "batched") != (workload == "equal"):
                continue
            for payload in _PAYLOADS[plan]:
                variant = f"{layout.name}/{workload}"
                total = sum(LENGTHS[workload])
                if plan != "smoke" or f"{variant}/{payload}" in _SMOKE:
                    yield Inputs(length=total, heads=_HEADS, payload=payload, table="logical"), variant
    if plan != "smoke":
        for name in ("packed-permuted-chunked", "padded-left-permuted", "padded-right"):
            total = sum(LENGTHS["unequal"])
            if "special" not in _PAYLOADS[plan]:
                yield Inputs(length=total, heads=_HEADS, payload="special", table="logical"), f"{name}/unequal"
            yield Inputs(length=total, heads=_HEADS, table="logical", conjugate=True), f"{name}/unequal"


@functools.lru_cache(maxsize=64)
def _arranged(layout: str, workload: str) -> tuple[tuple[Tensor, Tensor], ...]:
    """The calls of a layout, each with where its tokens stand in the samples laid end to end: to be read only."""
    lengths = LENGTHS[workload]
    return tuple((call, flat_index(call, lengths)) for call in LAYOUTS[layout].arrange(lengths))


class _Logical:
    """x, gradient and tables of all logical tokens laid end to end: [tokens, H, D] and [tokens, R / 2]."""

    def __init__(self, case: Case, seed: int) -> None:
        layout, self.workload = case.variant.split("/")
        self.case, self.layout, self.lengths = case, LAYOUTS[layout], LENGTHS[self.workload]
        own, given = case.contract, case.inputs
        positions = torch.cat([own.positions.of_length(n) for n in self.lengths])
        self.positions = positions
        self.cos, self.sin = own.tables(positions, case.torch_dtype)
        shape = (1, given.length, given.heads, own.head_dim)
        slots = Slots(shape, case.torch_dtype, own.pairing, self.cos, self.sin, case.generator(seed))
        self.x, self.gradient = (case.bound_family.payload(slots, gradient=g)[0] for g in (False, True))

    def run(self, candidate: Candidate, layout: Layout, *, backward: bool) -> Tensor:
        """The output of every logical token, [tokens, H, D], through ``layout``."""
        out = torch.zeros_like(self.x)
        padding = float("nan") if self.case.inputs.payload != "special" else torch.finfo(self.x.dtype).max
        family, device = self.case.bound_family, self.case.device
        for _, index in _arranged(layout.name, self.workload):
            # Without a batch dimension the rows of a batch lie end to end, padding and all.
            index = index.reshape(1, -1) if family.flat else index
            x, gradient = (gather(t, index, padding).to(device) for t in (self.x, self.gradient))
            # Rows at the same coordinates share one table, as a batch of equal images does.
            where = gather(self.positions, index, PADDING)
            shared = bool((where == where[:1]).all())
            rows = 0 if shared else slice(None)
            cos, sin = (gather(t, index, padding)[rows].to(device) for t in (self.cos, self.sin))
            call = family.call(cos, sin, self.x.dtype)
            got = vjp(candidate, x, call, gradient) if backward else forward(candidate, x, call)
            scatter(got.cpu(), index, out)
        return out


def _judge(candidate: Candidate, case: Case, seed: int, *, backward: bool) -> Finding:
    # Tokens are gathered into new memory for each call: a candidate cannot write into what is remembered.
    logical = remembered(lambda: (case.family, case.contract_name, case.id, seed), lambda: _Logical(case, seed))
    canonical = logical.run(candidate, SINGLE, backward=backward)
    got = logical.run(candidate, logical.layout, backward=backward)
    differs = ~same(got, canonical)
    calls = len(_arranged(logical.layout.name, logical.workload))
    facts = {"tokens": len(got), "calls": calls, "elements": got.numel(), "unlike": int(differs.sum())}
    if not facts["unlike"]:
        return passed(**facts)
    token, head, channel = first_of(differs)
    sample, position = _logical_token(token, logical.lengths)
    worst = {
        "sample": sample,
        "token": position,
        "head": head,
        "channel": channel,
        "position": logical.positions[token].tolist(),
        "canonical": shown(float(canonical[token, head, channel])),
        "got": shown(float(got[token, head, channel])),
    }
    reason = f"{facts['unlike']} of {facts['elements']} elements differ in bytes from the canonical layout's"
    return failed(reason, worst, **facts)


def _logical_token(token: int, lengths: tuple[int, ...]) -> tuple[int, int]:
    for sample, length in enumerate(lengths):
        if token < length:
            return sample, token
        token -= length
    raise IndexError(token)


INVARIANCE_FORWARD = Judgement(
    "invariance-forward",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("invariance-forward", candidate, device, dtype, _variants(plan)),
    lambda candidate, case, seed: _judge(candidate, case, seed, backward=False),
)
INVARIANCE_VJP = Judgement(
    "invariance-vjp",
    "vjp",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("invariance-vjp", candidate, device, dtype, _variants(plan)),
    lambda candidate, case, seed: _judge(candidate, case, seed, backward=True),
)
