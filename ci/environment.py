"""What ran and where: versions, devices, binaries and sources, for evidence and for ``ropecheck doctor``."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropecheck.oracle import __version__
from ropecheck.oracle.certify import arithmetic
from ropecheck.suites.candidates import described


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
    gpus = [f"{d['name']}, compute capability {d['compute capability']}, {d['memory']} MiB" for d in devices()]
    native = native_library()
    return [
        Part("GPU", "; ".join(gpus) or None, "kernels run on the CPU only; every cuda cell is blocked"),
        Part(
            "triton", version_of("triton"), "Triton kernels are blocked, also interpreted; backend='triton' is refused"
        ),
        Part("native library", _native_part(native), f"backend='cuda' is refused: {native['failure']}"),
        Part("nvcc", _nvcc(), "CUDA sources cannot be compiled"),
        Part("python-flint", version_of("python-flint"), "cases are certified by mpmath, about ten times slower"),
        Part("diffusers", version_of("diffusers"), "the pins of qwen-image cannot be executed"),
        Part(
            "transformers",
            version_of("transformers"),
            "the pins of hf-llama, hf-vision-2d and qwen3.5-norm-rope-gate cannot be executed",
        ),
    ]


def devices() -> list[dict[str, Any]]:
    """The CUDA devices in torch's order, empty where there is none; memory in MiB."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": p.name,
            "compute capability": f"{p.major}.{p.minor}",
            "memory": p.total_memory // 2**20,
            "multiprocessors": p.multi_processor_count,
        }
        for p in found
    ]


def native_library() -> dict[str, Any]:
    """Path, SHA-256 and build facts of our native library, and ``failure``: why it cannot be used, empty where it can.

    Our own kernels are strangers here as well: one that does not import is a failure to report, and no reason for
    another candidate's run to end.
    """
    try:
        from ropecheck.suites.adapters.shipped import native_library as asked

        found = asked()
    except Exception as error:
        return {"path": None, "sha256": None, "failure": described(error)}
    path = Path(found["path"])
    return {**found, "sha256": sha256(path) if path.is_file() else None}


def _native_part(native: dict[str, Any]) -> str | None:
    """What the doctor's table shows of a library that is there, also where it cannot be used."""
    if native["sha256"] is None:
        return None
    return f"there, and cannot be used: {native['failure']}" if native["failure"] else "can be used, see below"


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_PACKAGES = ("oracle", "kernels", "suites")
_NO_SOURCE = (".pyc", ".so")


def source_hashes() -> dict[str, str]:
    """One SHA-256 for each package that computes, judges or is judged: over its files' names and hashes in order.

    Compiled files are left out: a shared library has a hash of its own in the record.
    """
    hashes = {}
    for package in _PACKAGES:
        found = importlib.util.find_spec(f"ropecheck.{package}")
        assert found is not None
        assert found.submodule_search_locations is not None
        folder = Path(next(iter(found.submodule_search_locations)))
        total = hashlib.sha256()
        names = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        for name in sorted(n for n in names if not n.endswith(_NO_SOURCE)):
            total.update(f"{name}\0{sha256(names[name])}\n".encode())
        hashes[package] = total.hexdigest()
    return hashes


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
        "cuda runtime": torch.version.cuda,
        "cuda driver": _cuda_driver(),
        "driver": _driver(),
        "gpus": devices(),
        "native library": native_library(),
        "sources": source_hashes(),
        "exact arithmetic": arithmetic(),
        "runner": runner(),
        "run url": run_url(),
        "commit": commit(),
        **{name: version_of(name) for name in packages},
    }


def runner() -> str:
    """Who runs this: ``hosted`` or ``self-hosted`` runners, a ``local workflow`` (act), or a ``person``.

    act sets the variables of a hosted workflow as well: it is asked for first, so that a local run is never recorded as
    a hosted one.
    """
    if os.environ.get("ACT"):
        return "local workflow"
    if os.environ.get("GITHUB_ACTIONS") == "true" and os.environ.get("RUNNER_ENVIRONMENT") == "github-hosted":
        return "hosted"
    return "self-hosted" if os.environ.get("CI") else "person"


def run_url() -> str | None:
    """The page of the workflow run that this is part of; None outside one, and in a local one."""
    if runner() not in ("hosted", "self-hosted"):
        return None
    parts = [os.environ.get(name) for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")]
    url = "{}/{}/actions/runs/{}".format(*parts)
    return url if all(parts) and re.fullmatch(r"https://[A-Za-z0-9_./-]+", url) else None


def _cuda_driver() -> str | None:
    """The CUDA version that the driver serves, as it says itself; None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


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
