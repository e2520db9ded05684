"""no-copy: does the call allocate anything beyond its output?

Asked of a candidate that claims ``no-copy``: the bytes that torch allocates during the call are those of the output
(for a backward, of the output and the gradient), and on a GPU a strided input takes exactly as many kernels as a
contiguous one, no copy between memories, and no waiting for the GPU. That is how a hidden ``contiguous()`` shows, and
a detour over the CPU. Memory taken from the driver behind torch's back is not seen. Triton's interpreter copies by its
nature, so interpreted kernels are not applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..bare_calls import bare_call
from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..interpreter import launched_kernels
from ..invocation import guarded, outputs, pulled_back, recorded, vjp_outputs
from ..verdicts import Finding, failed, passed
from ..waiting import waiting_refused, waits
from .judgement import Judgement

_VIEWS = (
    "packed-qkv", "heads-first", "sequence-first", "heads-outermost", "channels-stride-2", "channels-outermost",
    "heads-stride-0", "all-stride-0",
)  # fmt: skip
_STANDARD = (
    Inputs(length=64),
    Inputs(batch=2, length=64),
    Inputs(batch=2, length=64, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(length=64, x_view="misaligned", gradient_view="misaligned"),
    Inputs(length=64, table_view="end-of-allocation"),
    Inputs(length=64, heads=24),
    Inputs(length=255, positions="ramp"),
    *(Inputs(batch=2, length=64, x_view=v, gradient_view=v, table="per-sample") for v in _VIEWS),
    *(Inputs(batch=2, length=64, table_view=v, table="per-sample") for v in ("sliced-rows", "batch-stride-0")),
    Inputs(length=13, payload="special"),
    Inputs(length=64, head_dim=80, rotary_dim=48, x_view="packed-qkv"),
)


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    for given in _STANDARD[:3] if plan == "smoke" else _STANDARD:
        yield given, "forward"
        if "vjp" in candidate.provides:
            yield given, "vjp"


def _call(candidate: Candidate, given: Operands, variant: str) -> Callable[[], Any]:
    x, call, gradient = given.x.view, given.call, given.gradient.view
    if variant == "vjp" and candidate.vjp is None:
        # What comes in is made beforehand: some families lay it in memory of its own.
        upstream = given.family.upstream(gradient)

        def differentiate() -> Any:
            leaves, results = recorded(candidate, x, call)
            return results, pulled_back(results, leaves, upstream)

        return differentiate
    if variant == "vjp":
        return lambda: vjp_outputs(candidate, call, gradient, on_the_spot=True)
    return lambda: outputs(candidate, x, call, on_the_spot=True)


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    call = _call(candidate, given, case.variant)
    launched_kernels()
    call()
    if launched_kernels():
        return Finding("not-applicable", "an interpreted kernel copies by the interpreter's nature")
    differentiates = case.variant == "vjp" and candidate.vjp is None
    tensors = 0 if candidate.in_place else 1 + differentiates
    if len(given.family.activations) > 1 and "strided" not in candidate.provides:
        # The judge's own copies, of what the candidate is given.
        tensors += 1
    allowed = tensors * given.x.view.numel() * given.x.view.element_size()
    if case.device == "cpu":
        allocated = _allocated_on_cpu(call)
        facts: dict[str, Any] = {"bytes allocated": allocated, "bytes of outputs": allowed}
    else:
        contiguous = build(replace(case, inputs=replace(case.inputs, x_view="contiguous", gradient_view="contiguous",
                                                        table_view="contiguous")), seed)  # fmt: skip
        allocated, kernels = _measured_on_cuda(call)
        plain = _measured_on_cuda(_call(candidate, contiguous, case.variant))[1]
        facts = {"bytes allocated": allocated, "bytes of outputs": allowed, "kernels": kernels}
        if moved := [name for name in kernels if name.startswith("Memcpy")]:
            return failed(f"the call copies memory: {', '.join(moved)}", **facts)
        if not plain and given.x.view.numel():
            return Finding("blocked", "torch's profiler sees no kernel run on this GPU", facts)
        if len(kernels) != len(plain):
            reason = f"{len(kernels)} kernels run for this view, {len(plain)} for a contiguous input"
            return failed(reason, **facts)
        if _waits_for_the_gpu(candidate, given, case.variant):
            return failed("the call returns only when the GPU is done with what was queued before it", **facts)
    if allocated > allowed:
        return failed(f"the call allocates {allocated} bytes, its outputs take {allowed}", **facts)
    return passed(**facts)


def _waits_for_the_gpu(candidate: Candidate, given: Operands, variant: str) -> bool:
    """Raises :class:`CandidateFault` where torch itself says so."""
    function = bare_call(candidate, given.family, backward=variant == "vjp")

    def call() -> object:
        return function(given.x.view, *given.call.tables, given.gradient.view)

    def without_waiting() -> None:
        with waiting_refused():
            call()

    guarded("the call, which must not wait for the GPU,", without_waiting)
    return bool(guarded("the call", lambda: waits(call)))


def _allocated_on_cpu(call: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    results = profiler.profiler.kineto_results
    del kept
    return sum(max(0, event.nbytes()) for event in results.events() if event.name() == "[memory]")


def _measured_on_cuda(call: Callable[[], Any]) -> tuple[int, list[str]]:
    """(bytes requested of torch's allocator, names of the kernels and copies that ran)."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    kept = call()
    allocated = torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    del kept
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # public, though not in __all__
    return allocated, [event.name for event in profiler.events() or [] if event.device_type == device]


NO_COPY = Judgement(
    "no-copy",
    "no-copy",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("no-copy", candidate, device, dtype, _variants(candidate, plan)),
    judge,
)
