"""What ran and where: versions, devices and the state of the sources, for evidence and for ``ropecheck doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch

from ropecheck.oracle import __version__
from ropecheck.oracle.certify import arithmetic


@dataclass(frozen=True)
class Part:
    """One thing that a machine has or lacks. ``without`` says what cannot be done where it is absent."""

    name: str
    found: str | None
    without: str


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parts() -> list[Part]:
    """Everything optional that this machine has or lacks."""
    return [
        Part("GPU", gpus() or None, "kernels run on the CPU only; every cuda cell is blocked"),
        Part(
            "triton", version_of("triton"), "Triton kernels are blocked, also interpreted; backend='triton' is refused"
        ),
        Part("nvcc", _nvcc(), "CUDA sources cannot be compiled"),
        Part("python-flint", version_of("python-flint"), "cases are certified by mpmath, about ten times slower"),
        Part("diffusers", version_of("diffusers"), "the pins of qwen-image cannot be executed"),
        Part("transformers", version_of("transformers"), "the pins of hf-llama and hf-vision-2d cannot be executed"),
    ]


def gpus() -> str:
    """Names of the CUDA devices, empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _nvcc() -> str | None:
    path = shutil.which("nvcc")
    if path is None:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return text.splitlines()[-1] if text else path


def record() -> dict[str, Any]:
    """The environment as evidence holds it."""
    packages = ("triton", "numpy", "mpmath", "python-flint", "diffusers", "transformers", "pytest")
    return {
        "ropecheck": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": gpus(),
        "driver": _driver(),
        "exact arithmetic": arithmetic(),
        "runner": "local workflow" if os.environ.get("ACT") else "ci" if os.environ.get("CI") else "person",
        "commit": commit(),
        **{name: version_of(name) for name in packages},
    }


def _driver() -> str | None:
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else None


def commit() -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout around the working directory, None outside one."""

    def git(*arguments: str) -> str | None:
        if shutil.which("git") is None:
            return None
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return None if head is None else {"id": head, "dirty": bool(git("status", "--porcelain"))}


def python_command(module: str) -> list[str]:
    """The command that runs a module with this interpreter, the working directory not on its path.

    ``-m`` would put it there: in a checkout its folder kernels then shadows the package of that name, which diffusers
    and transformers look for.
    """
    code = "import runpy, sys; sys.path = [p for p in sys.path if p]; "
    return [sys.executable, "-c", f"{code}runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]
