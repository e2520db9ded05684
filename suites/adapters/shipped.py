"""Our own kernels as candidates, imported as a stranger would import them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ropecheck.kernels import (
    LAUNCH_CONFIGURATIONS,
    forced_configuration,
    interpreted_launches,
    multi_axis_rope,
    trace_launches,
)

from ..candidates import Candidate
from ..interpreter import interpreting, repair

# The judge repairs the interpreter's conversions, and the whole process is the judge's: it stays open.
_interpreted = ExitStack()
if interpreting() and repair():
    _interpreted.enter_context(interpreted_launches())

_CLAIMS = ("vjp", "strict", "strided", "any-shape", "conjugate", "refusals")
_NO_TRITON = "" if importlib.util.find_spec("triton") else "triton is not installed"


def _rotation(
    pairing: Literal["adjacent", "half-split"], backend: Literal["triton", "reference"]
) -> Callable[..., Any]:
    def run(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        return multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate, backend=backend)

    return run


def _triton(name: str, contract: str, pairing: Literal["adjacent", "half-split"]) -> Candidate:
    return Candidate(
        name=name,
        contract=contract,
        run=_rotation(pairing, "triton"),
        devices=("cpu", "cuda"),
        provides=(*_CLAIMS, "no-copy"),
        configs={
            f"tokens={c.tokens},heads={c.heads},warps={c.warps}": partial(forced_configuration, c)
            for c in LAUNCH_CONFIGURATIONS
        },
        kernels=("rotation_kernel",),
        backend="triton",
        trace=trace_launches,
        unavailable=_NO_TRITON,
    )


def _reference(name: str, contract: str, pairing: Literal["adjacent", "half-split"]) -> Candidate:
    # A composition of torch operations: it makes temporaries, so it cannot claim no-copy.
    return Candidate(
        name=name,
        contract=contract,
        run=_rotation(pairing, "reference"),
        devices=("cpu", "cuda"),
        provides=_CLAIMS,
        backend="reference",
        trace=trace_launches,
    )


CANDIDATES = [
    _triton("ropecheck/triton-adjacent", "qwen-image", "adjacent"),
    _triton("ropecheck/triton-half-split", "neox", "half-split"),
    _reference("ropecheck/reference-adjacent", "qwen-image", "adjacent"),
    _reference("ropecheck/reference-half-split", "neox", "half-split"),
]
