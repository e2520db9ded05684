"""Which backend runs, and why: an explicit choice, recorded with every launch, never a silent fallback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Literal

import torch

from .operators import NATIVE_FAILURE

Backend = Literal["auto", "cuda", "triton", "reference"]


def _import_failure(module: str) -> str:
    try:
        import_module(module)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Found out once, because a traced program may read a text and not load or import anything.
TRITON_FAILURE = _import_failure("triton")
"""Why triton cannot be imported; empty where it can."""

_lock = Lock()
_interpreted_launches = 0


def choose_backend(
    backend: Backend,
    device: torch.device,
    native_failure: str = NATIVE_FAILURE,
    triton_failure: str = TRITON_FAILURE,
) -> tuple[Literal["cuda", "triton", "reference"], str]:
    """The backend that runs a tensor of ``device``, and the reason that the trace records.

    Args:
        native_failure, triton_failure: why the native library or triton cannot be used; empty where it can.

    Raises:
        ValueError: ``backend`` is none of ``auto``, ``cuda``, ``triton`` and ``reference``.
    """
    # Whether an explicit backend can run is its operator's to say, with the error of the library that is missing.
    if backend == "cuda":
        return "cuda", "requested"
    if backend == "triton":
        return "triton", "requested"
    if backend == "reference":
        return "reference", "requested"
    if backend != "auto":
        raise ValueError(f"backend: expected 'auto', 'cuda', 'triton' or 'reference', got {backend!r}")
    if device.type != "cuda":
        return "reference", f"auto: a {device.type} tensor is rotated by the reference"
    if not native_failure:
        return "cuda", "auto: a cuda tensor is rotated by the native library"
    passed_over = f"auto: the native library cannot be loaded ({native_failure})"
    if not triton_failure:
        return "triton", f"{passed_over}; a cuda tensor is rotated by triton"
    passed_over = f"{passed_over}; triton cannot be imported ({triton_failure})"
    return "reference", f"{passed_over}; a cuda tensor is rotated by the reference"


@contextmanager
def interpreted_launches() -> Iterator[None]:
    """Within the block Triton operators may run in Triton's interpreter, which CPU tensors need.

    By this the caller declares two things. ``TRITON_INTERPRET=1`` was set before triton was imported, since
    whether a kernel is interpreted is decided when it is defined. And the interpreter's casts are repaired:
    as shipped (seen with triton 3.9) it truncates fp32 to bf16 instead of rounding, which half of all results
    show.
    """
    global _interpreted_launches
    with _lock:
        _interpreted_launches += 1
    try:
        yield
    finally:
        with _lock:
            _interpreted_launches -= 1


def require_launchable(interpreted: bool, device: torch.device) -> None:
    """Refuse to launch a Triton kernel, interpreted or compiled, where its result could not be trusted.

    Raises:
        RuntimeError: the kernel is interpreted and nobody declared the interpreter usable, or it is compiled
            and the tensor is not on a GPU.
    """
    if interpreted and not _interpreted_launches:
        raise RuntimeError(
            "backend: 'triton' is interpreted in this process (TRITON_INTERPRET=1), and the interpreter "
            "rounds bf16 wrongly; repair its casts and launch within ropecheck.kernels.interpreted_launches()"
        )
    if not interpreted and device.type != "cuda":
        raise RuntimeError(
            f"backend: 'triton' needs a cuda tensor, got one on {device}; on a CPU it runs only in Triton's "
            "interpreter (TRITON_INTERPRET=1 set before triton is imported) and within "
            "ropecheck.kernels.interpreted_launches(); use backend='auto' or 'reference'"
        )
