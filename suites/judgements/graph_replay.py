"""graph-replay: does a CUDA graph that holds the call give an eager call's bytes whenever it is replayed?

Asked on a GPU, of a candidate that claims ``graph``. The call (with the claim ``vjp`` also a forward with its
backward) is warmed up on a side stream and captured there. Before each replay the memory that the graph reads is
overwritten, first with garbage as far as the storage reaches, so that a slice's neighbours change too, then with
other data, or with the tables of other positions; an eager call is made, freed memory is filled with NaN, and so is
the output; once the allocator's cache is emptied. Each replay must leave its inputs and freed memory alone, and return
the bytes of an eager call with such inputs in memory of their own. Further cases replay on a side stream, and two
graphs of one memory pool in turn, behind an eager call of a larger size than both. A graph of another process, memory
that is taken behind torch's back, and replays that overlap in time are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import same

from ..bare_calls import Outputs, bare_call
from ..candidates import Candidate
from ..cases import Case, Inputs, build, cases_of
from ..cuda_graphs import POISON, CudaGraphs, Recorded
from ..invocation import CandidateFault, guarded
from ..verdicts import Finding, failed, passed
from ..views import Placed
from .judgement import Judgement

_SMOKE = (Inputs(), Inputs(batch=2, table="per-sample", x_view="packed-qkv", gradient_view="packed-qkv"))
_STANDARD = (
    *_SMOKE,
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(batch=2, length=5, payload="special"),
    Inputs(batch=2, length=5, table="per-sample", x_view="wider-heads", table_view="sliced-rows"),
    Inputs(batch=2, length=5, x_view="misaligned", table_view="misaligned", gradient_view="misaligned"),
    Inputs(length=5, table_view="end-of-allocation"),
    Inputs(batch=2, length=64, heads=24, table="per-sample"),
    Inputs(batch=2, length=5, conjugate=True),
    Inputs(length=7, head_dim=80, rotary_dim=48, x_view="packed-qkv"),
    Inputs(length=0),
)
_ASIDE, _IN_TURN = "side-stream", "two-graphs"
_LONGER, _LARGEST = 6, 8192
"""Tokens: by how many a second graph has more, and of the call that is larger than both."""

_GARBAGE = (0xFF, 0x11, 0x7F)
_ORDER = (0, 1, 2, 1, 0)
"""The fills that are replayed one after another. Behind the third the allocator's cache is emptied."""


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    directions = ("forward", "vjp") if "vjp" in candidate.provides else ("forward",)
    for direction in directions:
        for given in _SMOKE if plan == "smoke" else _STANDARD:
            yield given, direction
        for given in _SMOKE[:1] if plan == "smoke" else _SMOKE:
            yield given, f"{direction}/{_ASIDE}"
            yield given, f"{direction}/{_IN_TURN}"


@dataclass(frozen=True)
class _Fill:
    """What the graph's memory holds for a replay, and the bytes of an eager call with it."""

    name: str
    placed: tuple[Placed, ...]
    expected: Outputs


class _Captured:
    """One graph, the memory that it reads, and what it is to be replayed with."""

    def __init__(self, candidate: Candidate, case: Case, seed: int, graphs: CudaGraphs) -> None:
        self.graphs = graphs
        backward = case.variant.startswith("vjp")
        self.call = bare_call(candidate, case.bound_family, backward=backward)
        self.read = _operands(case, seed)
        self.names = (*build(case, seed).placed(), "the gradient")
        self.fills = [_Fill(name, placed, self._eager(placed)) for name, placed in _fills(case, seed)]
        self.recorded: Recorded | None = None
        self.replays = 0

    def _eager(self, placed: tuple[Placed, ...]) -> Outputs:
        outputs = guarded("run", lambda: self.call(*(p.view for p in placed)))
        return tuple(y.clone() for y in _checked(outputs, placed[0].view))

    def _of_the_graph(self) -> Outputs:
        return self.call(*(p.view for p in self.read))

    def warm_up(self) -> None:
        guarded("run", lambda: self.graphs.warm_up(self._of_the_graph))

    def record(self, *, sharing: bool) -> None:
        self.recorded = self.graphs.record(self._of_the_graph, sharing=sharing)
        _checked(self.recorded.outputs, self.read[0].view)

    def replay(self, number: int, *, aside: bool = False) -> str:
        """Fill the memory as ``fills[number]``, replay twice, and say what is wrong; empty where nothing is."""
        assert self.recorded is not None
        fill = self.fills[number]
        if any((~same(y, expected)).any() for y, expected in zip(self._eager(fill.placed), fill.expected, strict=True)):
            return f"an eager call ({fill.name}) does not return what it returned before the capture"
        with self.graphs.aside() if aside else nullcontext():
            kept = [
                _overwritten(own, new, garbage)
                for own, new, garbage in zip(self.read, fill.placed, cycle(_GARBAGE), strict=False)
            ]
            free = self.graphs.poison()
            for _ in range(2):
                for y in self.recorded.outputs:
                    y.fill_(float("nan"))
                guarded("the replay", self.recorded.replay)
                self.replays += 1
                if found := self.unlike(number):
                    return found
        # The least byte, for a comparison would need as much memory again.
        if free and int(torch.stack([memory.amin() for memory in free]).amin()) != POISON:
            return f"replay {self.replays} writes to memory that was given back before"
        for own, before, name in zip(self.read, kept, self.names, strict=True):
            if changed := int((own.storage != before).sum()):
                return f"replay {self.replays} changes {changed} bytes of {name}'s storage"
        return ""

    def unlike(self, number: int) -> str:
        """In words, how the graph's outputs differ from what ``fills[number]`` gives; empty where they do not."""
        assert self.recorded is not None
        fill = self.fills[number]
        for name, got, expected in zip(("output", "gradient"), self.recorded.outputs, fill.expected, strict=False):
            if count := int((~same(got, expected)).sum()):
                of = f"{count} of {got.numel()} elements of the {name}"
                return f"replay {self.replays} ({fill.name}): {of} are not those of an eager call"
        return ""


def _operands(case: Case, seed: int) -> tuple[Placed, ...]:
    made = build(case, seed)
    return (*made.placed().values(), made.gradient)


def _fills(case: Case, seed: int) -> Iterator[tuple[str, tuple[Placed, ...]]]:
    """What the graph's memory is filled with, each in memory of its own, laid out alike."""
    x, *tables, gradient = _operands(case, seed)
    other_x, *_, other_gradient = _operands(case, seed + 1)
    elsewhere = "far" if case.inputs.positions == "ramp" else "ramp"
    moved = _operands(replace(case, inputs=replace(case.inputs, positions=elsewhere)), seed)
    yield "the data of the capture", (x, *tables, gradient)
    yield "other data", (other_x, *tables, other_gradient)
    yield "other data at other positions", (other_x, *moved[1:-1], other_gradient)


def _overwritten(own: Placed, new: Placed, garbage: int) -> Tensor:
    """Fill ``own``'s storage with ``garbage``, its view with ``new``'s values; the bytes that it then holds."""
    if own.view.is_floating_point():
        own.storage.fill_(garbage)
    else:
        # As a position, garbage would be a read outside the cache, which breaks the process of whoever reads it.
        own.storage.copy_(new.storage)
    own.view.copy_(new.view)
    return own.storage.clone()


def _checked(outputs: Any, like: Tensor) -> Outputs:
    for output in outputs:
        if not isinstance(output, Tensor):
            raise CandidateFault(f"run returned {type(output).__name__}, not a tensor")
        for what in ("shape", "dtype", "device"):
            if (got := getattr(output, what)) != (wanted := getattr(like, what)):
                raise CandidateFault(f"run returned {what} {got}, where x has {what} {wanted}")
    return tuple(outputs)


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    return replayed(candidate, case, seed, CudaGraphs())


def replayed(candidate: Candidate, case: Case, seed: int, graphs: CudaGraphs) -> Finding:
    """The finding on ``case``, its calls captured by ``graphs``."""
    cases = [case]
    if case.variant.endswith(_IN_TURN):
        cases.append(replace(case, inputs=replace(case.inputs, length=case.inputs.length + _LONGER)))
    captured = [_Captured(candidate, each, seed, graphs) for each in cases]
    for graph in captured:
        graph.warm_up()
    for graph, other in zip(captured, reversed(captured), strict=True):
        # The last call before a capture is the other one's: what it leaves behind must not enter the graph.
        other.warm_up()
        graph.record(sharing=len(captured) > 1)
    if len(captured) > 1:
        # Whoever keeps memory from call to call, and now needs more, must not take from the graphs what they hold.
        _call_once(candidate, replace(case, inputs=_larger(case)), seed)
    reason = _replayed_in_turn(captured, graphs, aside=case.variant.endswith(_ASIDE))
    facts: dict[str, Any] = {
        "replays": sum(graph.replays for graph in captured),
        "elements": sum(y.numel() for graph in captured for y in graph.fills[0].expected),
    }
    return failed(reason, **facts) if reason else passed(**facts)


def _larger(case: Case) -> Inputs:
    """More than any call before it, as far as the plans of a GPU go: memory that suffices once suffices for ever."""
    if case.device == "cpu" or case.inputs.batch > 1:
        return replace(case.inputs, length=case.inputs.length + 2 * _LONGER)
    return replace(case.inputs, length=_LARGEST, heads=24)


def _call_once(candidate: Candidate, case: Case, seed: int) -> None:
    call = bare_call(candidate, case.bound_family, backward=case.variant.startswith("vjp"))
    operands = _operands(case, seed)
    guarded("run", lambda: call(*(p.view for p in operands)))


def _replayed_in_turn(captured: list[_Captured], graphs: CudaGraphs, *, aside: bool) -> str:
    for turn, number in enumerate(_ORDER):
        for graph in captured:
            if reason := graph.replay(number, aside=aside):
                return reason
        if len(captured) > 1 and (reason := captured[0].unlike(number)):
            return f"after the replay of another graph: {reason}"
        if turn == 2:
            graphs.empty_cache()
    return ""


GRAPH_REPLAY = Judgement(
    "graph-replay",
    "graph",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "graph-replay", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
    not_on={"cpu": "a CPU has no CUDA graphs"},
)
