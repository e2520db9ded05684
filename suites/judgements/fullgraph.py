"""fullgraph: does torch.compile take the candidate in one graph, with the bytes of an eager call?

Asked of a candidate that claims ``compile``: ``torch.compile(.., fullgraph=True)``, the forward alone and with its
backward, for static and for dynamic shapes, contiguous inputs and others. Where the graphs hold only registered
operators, Triton kernels and moves of values, every compiled byte must be eager's. Where torch's own arithmetic is in
them (a composed candidate) a compiler may keep an intermediate result in fp32: then each element must be admissible
under the recipe with some of its intermediate roundings left out. Called again, with other values of the same sizes,
nothing may be compiled again; with other sizes, under dynamic shapes, once at most. On a GPU the compiler is
Inductor; on a CPU the traced graphs run as they are (``aot_eager``), for Inductor would need a C++ compiler: what its
code generation does is not seen there. Recorded as the fact ``backend``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..captured_graphs import CapturingBackend, CountingBackend, fresh_compiler
from ..cases import Case, Inputs, Operands, build, cases_of, elsewhere
from ..families import Family
from ..invocation import CandidateFault, as_function, guarded, put_together
from ..verdicts import PASS, Finding, failed, passed
from .judgement import Judgement, first_of

_PLAIN = Inputs(batch=2)
_PACKED = Inputs(batch=2, x_view="packed-qkv", gradient_view="heads-first")
_SLICED = Inputs(batch=2, table="per-sample", x_view="heads-first", table_view="sliced-rows")
_SMOKE = ((_PACKED, "vjp/static"), (_PLAIN, "forward/dynamic"))
_STANDARD = (*_SMOKE, (_SLICED, "forward/static"), (_PLAIN, "vjp/dynamic"))
_MORE = (
    (_PLAIN, "forward/static"),
    (_PLAIN, "vjp/static"),
    (_SLICED, "vjp/dynamic"),
    (Inputs(batch=2, payload="special"), "vjp/static"),
    (Inputs(batch=2, conjugate=True), "vjp/static"),
    (Inputs(length=1), "forward/static"),
    (Inputs(batch=2, head_dim=80, rotary_dim=48, x_view="packed-qkv"), "vjp/dynamic"),
    (Inputs(length=300, heads=5, positions="ramp", payload="hard-to-round"), "vjp/static"),
)


def _variants(candidate: Candidate, device: str, dtype: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    asked: tuple[tuple[Inputs, str], ...] = _SMOKE if plan == "smoke" else _STANDARD
    if plan == "full" or (plan == "standard" and device == "cuda" and dtype == "bfloat16"):
        asked += _MORE
    elif plan == "standard" and device == "cpu" and dtype != "bfloat16":
        # Half a second of a CPU each (three with Inductor), and a trace seldom depends on the dtype.
        asked = asked[:1]
    for given, variant in asked:
        # What cannot be asked of the candidate is asked in the form that can.
        variant = variant if "vjp" in candidate.provides else variant.replace("vjp", "forward")
        plain = replace(given, x_view="contiguous", gradient_view="contiguous", table_view="contiguous")
        yield given if "strided" in candidate.provides else plain, variant


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    direction, shapes = case.variant.split("/")
    calls = [build(case, seed), build(elsewhere(case), seed + 1)]
    if shapes == "dynamic":
        calls += [build(_other_size(case, by), seed) for by in (5, 3)]
    call = _Call(candidate, case.bound_family, direction)
    # A compiled output is not to be judged by an eager one that the candidate has since written over.
    expected = [[t.clone() for t in call(call.function, given)] for given in calls]
    with fresh_compiler():
        captured = CapturingBackend()
        backend: CountingBackend = captured
        if case.device == "cuda":
            call.compiled(captured, shapes)(calls[0])
            torch._dynamo.reset()
            backend = CountingBackend("inductor")
        run, found, counts = call.compiled(backend, shapes), [], []
        for given in calls:
            found.append(run(given))
            counts.append(backend.compilations)
    facts: dict[str, Any] = {
        "backend": backend.name,
        "graphs": "opaque" if captured.opaque else "composed",
        "operators": sorted(captured.operators),
        "computing operations": sorted(captured.computing),
        "compilations by call": counts,
    }
    if not counts[0]:
        return failed("nothing is compiled", **facts)
    for number, (given, results, eager) in enumerate(zip(calls, found, expected, strict=True), 1):
        for name, got, plain in zip(call.names, results, eager, strict=True):
            what = f"{name} of compiled call {number}"
            if (got.shape, got.dtype) != (plain.shape, plain.dtype):
                reason = f"{what} is {got.dtype} {tuple(got.shape)}, eager {plain.dtype} {tuple(plain.shape)}"
                return failed(reason, **facts)
            finding = _equal(got, plain) if captured.opaque else _admissible(given, name, got, seed)
            if finding.verdict != PASS:
                return failed(f"{what}: {finding.reason}", finding.worst, **{**facts, **finding.facts})
            facts |= finding.facts
            facts["elements"] = facts.get("elements", 0) + got.numel()
    if counts[1] > counts[0]:
        return failed("a second call with the same sizes is compiled again", **facts)
    if counts[-1] > counts[0] + 1:
        return failed(f"two calls with other sizes are compiled {counts[-1] - counts[0]} times", **facts)
    return passed(**facts)


def _other_size(case: Case, by: int) -> Case:
    given = case.inputs
    return replace(case, inputs=replace(given, batch=given.batch + 1, length=given.length + by))


class _Call:
    """How a case calls the candidate: ``function``, and what its results are."""

    def __init__(self, candidate: Candidate, family: Family, direction: str) -> None:
        self.alone = direction == "vjp" and candidate.vjp is not None
        self.differentiates = direction == "vjp" and not self.alone
        self.names = ("y", "the gradient") if self.differentiates else ("the gradient",) if self.alone else ("y",)
        if direction == "vjp" and candidate.vjp is not None:
            # A separate backward has the forward's signature.
            claims = tuple(claim for claim in candidate.provides if claim != "vjp")
            candidate = replace(candidate, run=candidate.vjp, vjp=None, provides=claims)
        self.function = as_function(candidate, family)

    def compiled(self, backend: CountingBackend, shapes: str) -> Callable[[Operands], tuple[Tensor, ...]]:
        function = torch.compile(self.function, backend=backend, fullgraph=True, dynamic=shapes == "dynamic")
        return lambda given: self(function, given, "the compiled run")

    def __call__(self, function: Callable[..., Any], given: Operands, name: str = "run") -> tuple[Tensor, ...]:
        """``function``'s results on ``given``. Raises CandidateFault, also where it returns no tensor."""
        tables, gradient = given.call.tables, given.gradient.view

        def execute() -> tuple[Any, ...]:
            with torch.set_grad_enabled(self.differentiates):
                x = gradient if self.alone else given.x.view.detach()
                y = put_together(given.family, function(x.requires_grad_(self.differentiates), *tables))
            return (y, *torch.autograd.grad(y, x, gradient)) if self.differentiates else (y,)

        results = guarded(name, execute)
        if not all(isinstance(t, Tensor) for t in results):
            raise CandidateFault(f"{name} returned {type(results[0]).__name__}, not a tensor")
        return tuple(t.detach() for t in results)


def _equal(got: Tensor, eager: Tensor) -> Finding:
    differs = ~same(got, eager)
    if not bool(differs.any()):
        return passed()
    where = dict(zip(("sample", "token", "head", "channel"), first_of(differs), strict=True))
    return failed(f"{int(differs.sum())} of {got.numel()} elements are not those of an eager call", where)


def _admissible(given: Operands, output: str, got: Tensor, seed: int) -> Finding:
    """Whether each element of ``got`` is admissible under one of the recipes that elision may leave."""
    missed = torch.ones(got.shape, dtype=torch.bool, device=got.device)
    names: list[str] = []
    certified = 0
    for name, expected in given.expected(backward=output != "y").elided():
        outside = torch.empty_like(missed)
        held = expected.held(got, seed=seed, missed=outside)
        certified += held.facts["certified points"]
        missed &= outside
        names.append(name)
        if not bool(missed.any()):
            break
    facts: dict[str, Any] = {"recipes": names, "certified points": certified}
    if held.moved:
        return failed(f"{held.moved} pass-through elements changed", **facts)
    if not bool(missed.any()):
        return passed(**facts)
    place = ("sample", "token", "head", "channel")
    # The last recipe leaves out all it can; its worst element that no other admits explains best.
    worst = next((w for w in held.worst if bool(missed[tuple(w[name] for name in place)])), None)
    count = int(missed.sum())
    return failed(
        f"{count} of {got.numel()} elements are not admissible, whichever intermediate roundings are left out",
        worst or dict(zip(place, first_of(missed), strict=True)),
        **facts,
    )


FULLGRAPH = Judgement(
    "fullgraph",
    "compile",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "fullgraph", candidate, device, dtype, _variants(candidate, device, dtype, plan)
    ),
    judge,
)
