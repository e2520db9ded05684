"""provenance: did the kernel run that the candidate says it is?

The device kernels of a call are observed from outside: interpreted launches on a CPU, the profiler's kernels on a
GPU. Each kernel that the candidate names must be among them. Where it names none but ``run`` refers to Triton kernels,
itself or through the functions, classes and closures of its own module, one of these must be. What only shares a file
with a kernel of another candidate owes none; a kernel that nothing in the file refers to is owed by every candidate
in it. That is read from the code: a candidate that reaches its kernels in another way, through an operator's registered
name or another module, has to name them. Where it opens a trace, every recorded launch must be by the backend it
declares. Each shared library that it declares must exist and be loaded by the process of the call. So a silent fallback
to another implementation fails. The candidate's file, the module that defines ``run``, the declared sources and
libraries, which lie relative to the candidate's file, and the cubins of compiled Triton kernels are recorded by hash. A
candidate of plain torch operations names nothing that could be missing: for it the case records which files and
versions ran, and fails only for a declared source that does not exist. It cannot see that a library which is loaded
was also called: the names of kernels and the trace are for that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
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
    """SHA-256 of the candidate's file, of the module that defines ``run``, and of each declared source, as it is named.

    A module of the same name as the candidate's file stands under its full path. None for a source that does not exist.
    """
    own, defining = _file(candidate), _path(candidate.module)
    hashes: dict[str, str | None] = {}
    for path in dict.fromkeys(p.resolve() for p in (own, defining) if p is not None and p.is_file()):
        hashes[str(path) if path.name in hashes else path.name] = _sha256(path)
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
    """The file that lists the candidate; that which defines ``run``, where the candidate was not loaded from one."""
    if candidate.origin.endswith(".py") or "/" in candidate.origin:
        return Path(candidate.origin)
    return _path(sys.modules.get(candidate.origin.partition(":")[0], candidate.module))


def _path(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _beside(own: Path | None, name: str) -> Path:
    """Where a declared file lies: relative to the candidate's own."""
    return (own.parent if own is not None else Path()) / name


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _triton_kernels(candidate: Candidate) -> set[str]:
    """Names of the Triton kernels that ``run`` refers to; where it refers to none, of those of its module that nothing
    else there refers to either."""
    if "triton" not in sys.modules:
        return set()
    from triton.runtime.jit import KernelInterface

    run: Any = candidate.run
    while around := _around(run):
        run = around[0]
    home = getattr(run, "__module__", None)
    if own := _reached([candidate.run], home, KernelInterface):
        return own
    held = list(vars(sys.modules[home]).values()) if home in sys.modules else []
    kernels = {_name(value) for value in held if isinstance(value, KernelInterface)}
    others = [value for value in held if not isinstance(value, KernelInterface)]
    return kernels - _reached(others, home, KernelInterface) - {""}


def _reached(values: Sequence[Any], home: str | None, kernel: type) -> set[str]:
    """Names of the kernels that ``values`` are or refer to, through the functions and classes of module ``home``."""
    kernels: set[str] = set()
    ahead = list(values)
    seen: set[int] = set()
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kernel):
            kernels.add(_name(value))
            ahead.append(getattr(value, "fn", None))
        elif isinstance(value, FunctionType):
            ahead += _referred(value) if value.__module__ == home else ()
        elif isinstance(value, type):
            ahead += vars(value).values() if value.__module__ == home else ()
        elif isinstance(value, (list, tuple, dict)):
            ahead += value.values() if isinstance(value, dict) else value
        elif isinstance(value, Candidate):
            ahead += (value.run, value.vjp)
        elif type(value).__module__ == home:
            ahead += [type(value), *getattr(value, "__dict__", {}).values()]
        else:
            ahead += _around(value)
    return kernels - {""}


def _name(kernel: Any) -> str:
    """The name of the function that a kernel is made of, under its configurations and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))


def _around(value: Any) -> list[Any]:
    """The function that a partial function, a method or an operator of torch.library is of, then what it is given."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        return [value.__func__, *([value.__self__] if isinstance(value, MethodType) else [])]
    return [value._init_fn] if isinstance(value, CustomOpDef) else []


def _referred(function: FunctionType) -> Iterator[Any]:
    """What the code of ``function`` names of its module and holds in its closure and defaults."""
    codes = [function.__code__]
    for code in codes:
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that is not set yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


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
