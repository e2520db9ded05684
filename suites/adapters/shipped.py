"""Our own kernels as candidates, imported as a stranger would import them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ropecheck.kernels import (
    LAUNCH_CONFIGURATIONS,
    NATIVE,
    NORM_LAUNCH_CONFIGURATIONS,
    LaunchConfiguration,
    forced_configuration,
    interpreted_launches,
    multi_axis_rope,
    multi_axis_rope_pair,
    qk_norm_rope_gate,
    trace_launches,
)

from ..candidates import Candidate
from ..interpreter import interpreting, repair

# The judge repairs the interpreter's conversions, and the whole process is the judge's: it stays open.
_interpreted = ExitStack()
if interpreting() and repair():
    _interpreted.enter_context(interpreted_launches())

Pairing = Literal["adjacent", "half-split"]
Backend = Literal["cuda", "triton", "reference"]

_CONTRACTS: dict[Pairing, str] = {"adjacent": "qwen-image", "half-split": "neox"}
_OF_ALL = (
    "vjp", "strict", "strided", "any-shape", "refusals", "opcheck", "compile", "export", "autocast", "graph",
    "multi-device",
)  # fmt: skip
_CLAIMS = (*_OF_ALL, "conjugate")
_OF_NORM = (*_OF_ALL, "any-dtype", "any-position")


def _rotation(pairing: Pairing, backend: Backend) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        return multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate, backend=backend)

    return run


def _pair(pairing: Pairing, backend: Backend, *, in_place: bool = False, back: bool = False) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> tuple[Tensor, Tensor]:
        return multi_axis_rope_pair(
            q, k, cos, sin, pairing=pairing, conjugate=conjugate != back, in_place=in_place, backend=backend
        )

    return run


def _norm(backend: Backend) -> Callable[..., Any]:
    def run(
        q_gate: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        *,
        eps: float,
        axis_map: Tensor | None = None,
        gate: bool = True,
        weight_offset: float = 1.0,
        round_norm: bool = True,
        fma: bool = False,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return qk_norm_rope_gate(
            q_gate, k, q_weight, k_weight, cos_sin_cache, positions, eps=eps, axis_map=axis_map, gate=gate,
            weight_offset=weight_offset, round_norm=round_norm, fma=fma, slots=slots, backend=backend,
        )  # fmt: skip

    return run


def _unavailable(backend: Backend) -> str:
    if backend == "triton":
        return "" if importlib.util.find_spec("triton") else "triton is not installed"
    if backend == "cuda":
        failure = NATIVE.failure()
        return f"the native library cannot be used: {failure}" if failure else ""
    return ""


def _candidate(backend: Backend, pairing: Pairing, kind: Literal["", "pair-", "pair-in-place-"] = "") -> Candidate:
    in_place = kind == "pair-in-place-"
    # Interpreted kernels take seconds where compiled ones take microseconds: a CPU is asked about one pair.
    on_a_cpu = backend != "cuda" and not in_place and (not kind or pairing == "adjacent")
    claims: tuple[str, ...] = (*_CLAIMS, *(() if in_place else ("higher-vjp",)))
    # The reference is a composition of torch operations: it makes temporaries.
    claims += () if backend == "reference" else ("no-copy",)
    return Candidate(
        name=f"ropecheck/{backend}-{kind}{pairing}",
        contract=_CONTRACTS[pairing],
        run=_pair(pairing, backend, in_place=in_place) if kind else _rotation(pairing, backend),
        family="rotate_pair" if kind else "rotate",
        devices=("cpu", "cuda") if on_a_cpu else ("cuda",),
        provides=claims,
        in_place=in_place,
        vjp=_pair(pairing, backend, in_place=True, back=True) if in_place else None,
        configs=_configurations(LAUNCH_CONFIGURATIONS) if backend == "triton" else {},
        kernels={"triton": ("rotation_kernel",), "cuda": ("rotation_kernel",), "reference": ()}[backend],
        binaries=(str(NATIVE.path),) if backend == "cuda" else (),
        backend=backend,
        trace=trace_launches,
        unavailable=_unavailable(backend),
    )


def _norm_candidate(backend: Backend) -> Candidate:
    return Candidate(
        name=f"ropecheck/{backend}-norm-rope-gate",
        contract="qwen3.5-norm-rope-gate",
        run=_norm(backend),
        family="norm_rotate_gate",
        devices=("cuda",) if backend == "cuda" else ("cpu", "cuda"),
        provides=_OF_NORM if backend == "reference" else (*_OF_NORM, "no-copy"),
        configs=_configurations(NORM_LAUNCH_CONFIGURATIONS) if backend == "triton" else {},
        # What the names of the forward's and of the backward's kernel begin with: a call runs one of them, or both.
        kernels=() if backend == "reference" else ("norm_rope_",),
        binaries=(str(NATIVE.path),) if backend == "cuda" else (),
        backend=backend,
        trace=trace_launches,
        unavailable=_unavailable(backend),
    )


def _configurations(choices: tuple[LaunchConfiguration, ...]) -> dict[str, Callable[[], Any]]:
    """What forces each of the launch configurations of a Triton kernel, by a name that says what it is."""
    return {f"tokens={c.tokens},heads={c.heads},warps={c.warps}": partial(forced_configuration, c) for c in choices}


_PAIRINGS: tuple[Pairing, Pairing] = ("adjacent", "half-split")
_BACKENDS: tuple[Backend, ...] = ("triton", "cuda", "reference")

CANDIDATES = [
    *(_candidate(backend, pairing) for backend in _BACKENDS for pairing in _PAIRINGS),
    *(_candidate(backend, pairing, "pair-") for backend in _BACKENDS for pairing in _PAIRINGS),
    *(_candidate(backend, "adjacent", "pair-in-place-") for backend in ("triton", "cuda")),
    *map(_norm_candidate, _BACKENDS),
]


def native_library() -> dict[str, Any]:
    """Path of our native library, what it was built from and for, and ``failure``: empty where it can be used."""
    information = NATIVE.information()
    built = asdict(information) if information is not None else {}
    return {"path": str(NATIVE.path), **built, "failure": NATIVE.failure()}
