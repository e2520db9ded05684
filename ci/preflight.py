"""Before anything runs: what this machine lacks of what a run needs, each in one sentence that says what to do."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch

from ropecheck.suites.candidates import described

from .environment import native_library

_PACKAGES = {"pytest": "pytest", "xdist": "pytest-xdist", "mpmath": "mpmath"}
"""Modules that no run is without, with their distributions; what this very command imports is there."""


def lacking(needs: Sequence[str]) -> list[str]:
    """What is missing, empty where the run can start. ``needs`` are those of a policy."""
    return [*_packages(), *(missing for need in needs if (missing := _ASKED[need]()))]


def _packages() -> Iterator[str]:
    for module, distribution in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            yield f"the package {distribution}, which is not installed: pip install {distribution}"


def _gpu() -> str:
    version = torch.__version__
    if torch.version.hip is not None:
        return f"an NVIDIA GPU, and torch {version} is built for ROCm: run it on a machine with one, and its torch"
    if torch.version.cuda is None:
        return f"an NVIDIA GPU, and torch {version} is built without CUDA: run it on a GPU machine with a CUDA build"
    if not torch.cuda.is_available():
        return (
            f"an NVIDIA GPU, and torch {version} finds none: see that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it"
        )
    return ""


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton, which is not installed: pip install 'ropecheck[triton]'"
    try:
        importlib.import_module("triton")
    except Exception as error:
        return f"Triton, which does not import: {described(error)}"
    return ""


def _native() -> str:
    if not (failure := native_library()["failure"]):
        return ""
    return f"the native library, which 'ROPECHECK_CUDA=require pip install .' builds where nvcc is: {failure}"


_ASKED: dict[str, Callable[[], str]] = {"gpu": _gpu, "triton": _triton, "native": _native}
