"""provenance: did the kernel run that the candidate says it is?

The device kernels of a call are observed from outside: interpreted launches on a CPU, the profiler's kernels on a
GPU. Each kernel that the candidate names must be among them. Where it names none but the module that defines it
holds Triton kernels, one of these must be. Where it opens a trace, every recorded launch must be by the backend it
declares. Each shared library that it declares must exist and be loaded by the process of the call. So a silent fallback
to another implementation fails. Sources, libraries and the cubins of compiled Triton kernels are recorded by hash. A
candidate of plain torch operations names nothing that could be missing: for it the case records which files and
versions ran, and fails only for a declared source that does not exist. It cannot see that a library which is loaded
was also called: the names of kernels and the trace are for that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..candidates import Candidate
from ..cases import Case, Inputs, build, cases_of
from ..interpreter import interpreting, launched_kernels, repair
from ..invocation import forward, vjp
from ..launched import launched_triton_binaries
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

_SMOKE = (Inputs(), Inputs(batch=2, length=1))
_STANDARD = (
    Inputs(),
    Inputs(batch=2),
    Inputs(batch=2, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(length=64, heads=24),
    Inputs(length=13, payload="special"),
    Inputs(length=255, heads=1, positions="ramp", payload="basis-first"),
    Inputs(length=19, positions="far"),
    Inputs(batch=2, x_view="packed-qkv", gradient_view="packed-qkv"),
    Inputs(batch=2, x_view="channels-stride-2", gradient_view="all-stride-0"),
    Inputs(batch=2, head_dim=80, rotary_dim=48),
)


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    for given in _SMOKE if plan == "smoke" else _STANDARD:
        yield given, "forward"
        if "vjp" in candidate.provides:
            yield given, "vjp"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    launched_kernels()
    opened = candidate.trace() if candidate.trace is not None else nullcontext([])
    cuda = case.device == "cuda"
    with ExitStack() as observed:
        profiler = observed.enter_context(profile(activities=[ProfilerActivity.CUDA])) if cuda else None
        compiled = observed.enter_context(launched_triton_binaries()) if cuda else {}
        launches = observed.enter_context(opened)
        if case.variant == "vjp":
            vjp(candidate, given.x.view, given.call, given.gradient.view)
        else:
            forward(candidate, given.x.view, given.call)
        if cuda:
            torch.cuda.synchronize()
    events = profiler.events() or [] if profiler is not None else []
    kernels = [e.name for e in events if e.device_type.name == "CUDA"] if cuda else launched_kernels()
    facts: dict[str, Any] = {
        "kernels": sorted(set(kernels)),
        "sources": source_hashes(candidate),
        "binaries": binary_hashes(candidate),
        "cubins": sorted(f"{name} {hashlib.sha256(cubin).hexdigest()}" for name, _, cubin in compiled),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "interpreted": interpreting() and bool(kernels) and not cuda,
        "interpreter's bf16 repaired": interpreting() and repair(),
    }
    if missing := [name for name, found in facts["sources"].items() if found is None]:
        return failed(f"declared source {missing[0]} does not exist", **facts)
    for library, found in facts["binaries"].items():
        if found is None:
            return failed(f"declared binary {library} does not exist", **facts)
        if not loaded(library):
            return failed(f"declared binary {library} is not loaded by the process that made the call", **facts)
    for name in candidate.kernels:
        if not any(name in kernel for kernel in kernels):
            return failed(f"kernel {name} was not seen to run; seen: {facts['kernels'] or 'none'}", **facts)
    own = _triton_kernels(candidate)
    if own and not candidate.kernels and not any(name in kernel for name in own for kernel in kernels):
        return failed(f"none of the candidate's Triton kernels {sorted(own)} ran: a silent fallback", **facts)
    if cuda and not kernels:
        return failed("no kernel ran on the GPU", **facts)
    if candidate.trace is not None:
        facts["launches"] = [f"{launch.backend} {launch.direction}" for launch in launches]
        if strange := [launch for launch in launches if launch.backend != candidate.backend]:
            return failed(f"backend {strange[0].backend} ran, {candidate.backend} was asked for", **facts)
        # A backward that is separate is a call like any other.
        differentiates = case.variant == "vjp" and candidate.vjp is None
        wanted = {"forward", "backward"} if differentiates else {"forward"}
        if absent := wanted - {launch.direction for launch in launches}:
            return failed(f"the trace records no {' and no '.join(sorted(absent))} by {candidate.backend}", **facts)
    return passed(**facts)


def source_hashes(candidate: Candidate) -> dict[str, str | None]:
    """SHA-256 of the file that defines ``run`` and of each declared source; None for one that does not exist."""
    own = _file(candidate)
    hashes: dict[str, str | None] = {}
    if own is not None and own.is_file():
        hashes[own.name] = _sha256(own)
    return hashes | {source: _sha256(_beside(own, source)) for source in candidate.sources}


def binary_hashes(candidate: Candidate) -> dict[str, str | None]:
    """SHA-256 of each declared shared library by its full path; None for one that does not exist."""
    own = _file(candidate)
    paths = (os.path.realpath(_beside(own, binary)) for binary in candidate.binaries)
    return {path: _sha256(Path(path)) for path in paths}


def loaded(library: str) -> bool:
    """Whether this process has mapped the file at ``library``, a path without links.

    A file that was replaced after it was loaded is not the one that runs: the kernel then marks the mapping as deleted.
    """
    mapped = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    return any(fields[5] == library for line in mapped if len(fields := line.split(maxsplit=5)) == 6)


def _file(candidate: Candidate) -> Path | None:
    """The file that defines ``run``, where it can be told."""
    file = getattr(candidate.module, "__file__", None)
    return Path(file) if file else None


def _beside(own: Path | None, name: str) -> Path:
    """Where a declared file lies: relative to the candidate's own."""
    return (own.parent if own is not None else Path()) / name


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _triton_kernels(candidate: Candidate) -> set[str]:
    """Names of the Triton kernels that the module which defines ``run`` holds."""
    if "triton" not in sys.modules or candidate.module is None:
        return set()
    from triton.runtime.jit import KernelInterface

    found = (v for v in vars(candidate.module).values() if isinstance(v, KernelInterface))
    return {str(getattr(getattr(v, "fn", v), "__name__", "")) for v in found} - {""}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


PROVENANCE = Judgement(
    "provenance",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "provenance", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
