"""codegen: does the machine code of the candidate's kernels keep what the candidate promises?

A candidate that claims ``strict`` must not contract a product into a sum (PTX without fma, SASS without FFMA, where a
function does not hold a root or a division, which are made of them) and must not flush subnormal numbers (no .ftz);
for others both are recorded. A candidate that names its ``kernels`` holds them out to be looked at, and of them two
things are asked that make a kernel slow and not wrong: no local memory (spilled registers, a stack), and accesses of
16 bytes where the case is aligned, of unit stride and of powers of two: all stores, some loads, and no load narrower
than 4 bytes for a 16-bit x, unless the table is a cache that positions choose from. Loads of a table and of x look the
same and are not told apart.

On a GPU the code is what Triton launched in the call, and the function that ran of the ``binaries`` that the candidate
names. On a CPU, where Triton interprets, its kernels are compiled for sm_90 with the specialisation of the case. What
torch compiles, and libraries that the candidate does not name, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ropecheck.oracle.contracts import contract

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..compilation import NotCompiled, compiled
from ..interpreter import launched_kernels
from ..invocation import forward, vjp
from ..launched import demangled, launched_triton_kernels
from ..machine_code import KernelCode, NoDisassembler, of_binary
from ..verdicts import Finding, failed, passed
from .judgement import Judgement
from .provenance import binary_hashes

_ALIGNED = Inputs(batch=2, length=16, heads=8)
_OTHER = (
    Inputs(batch=2, length=16, heads=8, x_view="packed-qkv"),
    Inputs(batch=2, length=13, x_view="misaligned"),
    Inputs(batch=2, length=13, head_dim=80, rotary_dim=48),
)
_ON_GPU = (
    Inputs(batch=2, length=16, heads=8, table="per-sample"),
    Inputs(batch=2, length=1, heads=32),
    Inputs(length=64, heads=2, head_dim=256, rotary_dim=64),
    Inputs(batch=2, length=13, x_view="channels-stride-2"),
    Inputs(batch=2, length=13, x_view="heads-first", table_view="lanes-stride-2"),
    Inputs(batch=2, length=16, heads=8, conjugate=True),
)
_VECTOR = 16
_WIDE_VIEWS = ("contiguous", "packed-qkv", "heads-first", "sequence-first")


def _variants(candidate: Candidate, device: str, dtype: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    yield _ALIGNED, "forward"
    # A compilation ahead of time takes some tenths of a second, and the dtype changes little of the code.
    if device == "cpu" and dtype != candidate.dtypes[0]:
        return
    chosen = () if plan == "smoke" else _OTHER + _ON_GPU if device == "cuda" or plan == "full" else _OTHER
    if "vjp" in candidate.provides:
        yield _ALIGNED, "vjp"
    for given in chosen:
        yield given, "forward"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    try:
        kernels = (
            _launched(candidate, case, given) if case.device == "cuda" else _ahead_of_time(candidate, case, given, seed)
        )
    except (NotCompiled, NoDisassembler) as reason:
        return Finding("not-applicable", str(reason))
    absent = [name for name in candidate.kernels if not any(name in kernel.name for kernel in kernels)]
    if absent:
        return Finding("not-applicable", f"no machine code of kernel {absent[0]} was seen")
    return _held(candidate, case, kernels)


def _call(candidate: Candidate, case: Case, given: Operands) -> None:
    if case.variant == "vjp":
        vjp(candidate, given.x.view, given.call, given.gradient.view)
    else:
        forward(candidate, given.x.view, given.call)


def _ahead_of_time(candidate: Candidate, case: Case, given: Operands, seed: int) -> list[KernelCode]:
    launched_kernels()
    _call(candidate, case, given)
    if not launched_kernels():
        raise NotCompiled("the call runs no Triton kernel, and on a CPU there is no other machine code to look at")
    kernels = compiled(candidate, case, seed)
    if not kernels:
        raise NotCompiled("the call launches no Triton kernel where it is compiled and not interpreted")
    return kernels


def _launched(candidate: Candidate, case: Case, given: Operands) -> list[KernelCode]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, launched_triton_kernels() as launched:
        _call(candidate, case, given)
        torch.cuda.synchronize()
    kernels = list(launched)
    ran = {e.name for e in profiler.events() or [] if e.device_type.name == "CUDA"}
    for path, found in binary_hashes(candidate).items():
        if found is None:
            raise NoDisassembler(f"there is no file {path}, which the candidate names as a binary")
        capability = torch.cuda.get_device_capability()
        functions = of_binary(Path(path), f"sm_{capability[0]}{capability[1]}")
        spelt = {demangled(name): code for name, code in functions.items()}
        kernels += [replace(code, name=name) for name, code in spelt.items() if name in ran]
    if not kernels:
        raise NotCompiled("no Triton kernel was launched, and no function of the binaries that the candidate names ran")
    return kernels


def _held(candidate: Candidate, case: Case, kernels: list[KernelCode]) -> Finding:
    """The finding on kernels whose code is there."""
    named = [k for k in kernels if any(name in k.name for name in candidate.kernels)]
    facts: dict[str, Any] = {"kernels": [asdict(kernel) for kernel in kernels], "wide accesses asked": _is_wide(case)}
    for kernel in kernels if "strict" in candidate.provides else ():
        if kernel.contractions:
            return failed(f"{kernel.name} contracts {kernel.contractions} products, and strict is claimed", **facts)
        if kernel.flushes:
            return failed(f"{kernel.name} has {kernel.flushes} instructions that flush subnormal numbers", **facts)
    for kernel in named:
        if kernel.stack or kernel.local:
            reason = f"{kernel.name} has a stack of {kernel.stack} bytes and {kernel.local} accesses to local memory"
            return failed(reason, **facts)
        # The elements of a 16-bit cache are gathered one by one.
        itemsize = 4 if case.bound_family.gathers else case.torch_dtype.itemsize
        if _is_wide(case) and (reason := _narrow(kernel, itemsize)):
            return failed(f"{kernel.name} {reason}, where x and y are aligned", **facts)
    return passed(**facts)


def _is_wide(case: Case) -> bool:
    """Whether every row of x, y and the tables is aligned to 16 bytes, of unit stride, and made of powers of two."""
    own, given = contract(case.contract_name), case.inputs
    sizes = given.head_dim or own.head_dim, given.rotary_dim or own.rotary_dim
    # Half of the narrower size is what one member of a half-split pair takes.
    row = min(sizes) // 2 * case.torch_dtype.itemsize
    views = (given.x_view, given.gradient_view, given.k_view or "contiguous")
    tables = given.table_view, given.sin_view or given.table_view
    wide = all(view in _WIDE_VIEWS for view in views) and set(tables) == {"contiguous"}
    return wide and all(n & (n - 1) == 0 for n in sizes) and row >= _VECTOR


def _narrow(kernel: KernelCode, itemsize: int) -> str:
    """In what the accesses of a kernel are narrower than they could be; empty where they are not."""
    if not kernel.stores or min(kernel.stores) < _VECTOR:
        return f"stores {' and '.join(map(str, kernel.stores)) or 'no'} bytes at a time"
    if max(kernel.loads, default=0) < _VECTOR:
        return f"loads at most {max(kernel.loads, default=0)} bytes at a time"
    if itemsize < 4 and min(kernel.loads) < 4:
        return f"loads single elements of {min(kernel.loads)} bytes"
    return ""


CODEGEN = Judgement(
    "codegen",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "codegen", candidate, device, dtype, _variants(candidate, device, dtype, plan)
    ),
    judge,
)
