"""Compiling a candidate's Triton kernels ahead of time, for a judge that interprets them and has no GPU.

Whether Triton interprets is fixed when a kernel is decorated, so this needs another process. It loads the candidate
again, calls it on the case's own operands with CPU memory that passes for a GPU's, and hands every launch to Triton's
launcher up to the point where the GPU would be needed. So the code is that of the launcher's real specialisation:
alignment, unit strides and constants are those of the case.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .candidates import Candidate, CandidateError, load_candidates
from .cases import Case, Inputs, build
from .invocation import CandidateFault, forward, vjp
from .machine_code import KernelCode, NoDisassembler, of_cubin

CAPABILITY = 90
"""The compute capability that is compiled for, ten times: sm_90."""

_LIMIT = 100.0


class NotCompiled(Exception):  # noqa: N818 - it says why there is nothing to judge
    """The candidate's machine code cannot be had ahead of time. The message is one sentence."""


def compiled(candidate: Candidate, case: Case, seed: int) -> list[KernelCode]:
    """The kernels that the call of ``case`` launches, compiled for sm_90.

    Raises :class:`NotCompiled`, and :class:`CandidateFault` for a kernel that Triton does not compile.
    """
    if not candidate.origin:
        raise NotCompiled("the candidate was not loaded by name, so no process that compiles can load it again")
    request = {
        "origin": candidate.origin, "name": candidate.name, "seed": seed, "contract": case.contract_name,
        "dtype": case.dtype, "inputs": asdict(case.inputs), "variant": case.variant, "family": case.family,
    }  # fmt: skip
    answer = _compiler().ask(request)
    if "fault" in answer:
        raise CandidateFault(answer["fault"])
    if "refused" in answer:
        raise NotCompiled(answer["refused"])
    return [
        KernelCode(**{**kernel, "loads": tuple(kernel["loads"]), "stores": tuple(kernel["stores"])})
        for kernel in answer["kernels"]
    ]


class Compiler:
    """The process that compiles, started with the first question and again where a candidate takes it down."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _LIMIT)
        line = process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        return {"refused": f"compiling takes down its process (status {process.returncode}), or more than {_LIMIT:g} s"}

    def _start(self) -> subprocess.Popen[str]:
        # Not ``-m``: that would put the working directory on the path, where a folder kernels can shadow a package.
        code = f"import sys; sys.path = [p for p in sys.path if p]; from {__name__} import serve; serve()"
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment,
        )  # fmt: skip
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def _compiler() -> Compiler:
    compiler = Compiler()
    atexit.register(compiler.close)
    return compiler


def serve() -> None:
    """Answer requests, a line of JSON each, from standard input until it ends."""
    out = os.fdopen(os.dup(1), "w")
    # What a candidate prints must not stand in an answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = _answer(json.loads(line))
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from .pretended_gpu import pretended_gpu

    launches = None
    try:
        candidate = _loaded(request["origin"], request["name"], _changed(request["origin"]))
        case = Case(
            "codegen", request["contract"], "cpu", request["dtype"], Inputs(**request["inputs"]), request["variant"],
            request["family"],
        )  # fmt: skip
        given = build(case, request["seed"])
        with pretended_gpu(CAPABILITY) as launches:
            if case.variant == "vjp":
                vjp(candidate, given.x.view, given.call, given.gradient.view)
            else:
                forward(candidate, given.x.view, given.call)
        kernels = [of_cubin(*kernel) for kernel in dict.fromkeys(launches.kernels)]
    except CandidateFault as fault:
        if launches is not None and launches.fault:
            return {"fault": launches.fault}
        return {"refused": f"the call cannot be followed without a GPU: {fault}"}
    except (CandidateError, NoDisassembler, ImportError) as error:
        return {"refused": str(error)}
    return {"kernels": [asdict(code) for code in kernels]}


def _changed(origin: str) -> int:
    return Path(origin).stat().st_mtime_ns if Path(origin).is_file() else 0


@functools.lru_cache(maxsize=64)
def _loaded(origin: str, name: str, changed: int) -> Candidate:
    for candidate in load_candidates(origin):
        if candidate.name == name:
            return candidate
    raise CandidateError(f"{origin} defines no candidate {name!r} where Triton compiles")
