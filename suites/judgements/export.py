"""export: can torch.export take the candidate, and does what it exports return an eager call's bytes?

Asked of a candidate that claims ``export``: a module that only calls the candidate is exported with example inputs,
with static sizes or with a length that stays free. The exported program is then run on other values, another table and,
where the length is free, other lengths; so it is again after it was saved and loaded. Every byte must be that of an
eager call. An exported program is not differentiated here, and it is loaded into the process that has registered the
candidate's operators.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ropecheck.oracle.floats import same

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of, elsewhere
from ..invocation import as_function, guarded, put_together
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

_PLAIN = Inputs(batch=2)
_PACKED = Inputs(batch=2, x_view="packed-qkv")
_SLICED = Inputs(batch=2, table="per-sample", x_view="heads-first", table_view="sliced-rows")
_LONG = 300
_SMOKE = ((_PLAIN, "static"), (_SLICED, "dynamic"))
_STANDARD = (*_SMOKE, (_PACKED, "static"), (_PLAIN, "dynamic"))
_MORE = (
    (_SLICED, "static"),
    (_PACKED, "dynamic"),
    (Inputs(batch=2, conjugate=True), "dynamic"),
    (Inputs(batch=2, payload="special"), "static"),
    (Inputs(batch=2, length=1, table="per-sample"), "static"),
    (Inputs(batch=2, head_dim=80, rotary_dim=48, x_view="heads-first"), "dynamic"),
)


def _variants(candidate: Candidate, device: str, dtype: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    asked: tuple[tuple[Inputs, str], ...] = _SMOKE if plan == "smoke" else _STANDARD
    if plan == "full" or (plan == "standard" and device == "cuda"):
        asked += _MORE
    elif plan == "standard" and dtype != "bfloat16":
        # A quarter of a second of a CPU each, and a trace seldom depends on the dtype.
        asked = asked[:2]
    for given, variant in asked:
        plain = replace(given, x_view="contiguous", table_view="contiguous")
        yield given if "strided" in candidate.provides else plain, variant


class _Calling(nn.Module):
    """Calls ``function(x, *tables)``, and has nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, *tables: Tensor) -> Any:
        return self.function(x, *tables)


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    function = as_function(candidate, case.bound_family)
    example = build(case, seed)
    others = [build(elsewhere(case), seed + 1)]
    if case.variant == "dynamic":
        # The long one shows a range that was capped when the program was traced.
        others += [build(replace(case, inputs=replace(case.inputs, length=n)), seed) for n in (12, 3, _LONG)]
    expected = [_run("run", function, given).clone() for given in others]
    exported = guarded("torch.export.export", lambda: _exported(function, example, case.variant == "dynamic"))
    programs = {"the exported program": exported}
    if case.variant == "static" or all(placed.view.is_contiguous() for placed in example.placed().values()):
        # Of a free size torch 2.11 to 2.13 save no range for the strides of some views, and cannot load them.
        programs["the program saved and loaded"] = _reloaded(exported)
    facts: dict[str, Any] = {"lengths run": [given.x.view.shape[1] for given in others], "programs": list(programs)}
    for name, program in programs.items():
        module = guarded(name, program.module)
        for given, eager in zip(others, expected, strict=True):
            got = _run(name, module, given)
            if not isinstance(got, Tensor) or (got.shape, got.dtype) != (eager.shape, eager.dtype):
                return failed(f"{name} returns other shapes or dtypes than an eager call", **facts)
            if count := int((~same(got, eager)).sum()):
                reason = f"{count} of {eager.numel()} elements of {name} are not those of an eager call"
                return failed(f"{reason}, length {eager.shape[1]}", **facts)
    return passed(**facts, elements=sum(eager.numel() for eager in expected))


def _run(name: str, function: Callable[..., Any], given: Operands) -> Any:
    def execute() -> Any:
        with torch.no_grad():
            return put_together(given.family, function(given.x.view, *given.call.tables))

    return guarded(name, execute)


def _exported(function: Callable[..., Any], example: Operands, free: bool) -> torch.export.ExportedProgram:
    tables, length = example.call.tables, torch.export.Dim.DYNAMIC
    of_tables = tuple({} if d is None else {d: length} for d in example.family.sizes_of_tokens(tables))
    sizes = {"x": {1: length}, "tables": of_tables} if free else None
    return torch.export.export(_Calling(function), (example.x.view, *tables), dynamic_shapes=sizes)


def _reloaded(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    def reload() -> torch.export.ExportedProgram:
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        return torch.export.load(file)

    program: torch.export.ExportedProgram = guarded("saving and loading the exported program", reload)
    return program


EXPORT = Judgement(
    "export",
    "export",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "export", candidate, device, dtype, _variants(candidate, device, dtype, plan)
    ),
    judge,
)
