"""What the native library is made of, and making it: sources, flags, their hash, and the call of nvcc.

setup.py loads this module by its path when torch may be absent, so it needs the standard library alone. The package
needs it too: a library tells by the hash whether it was made from the sources beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

LIBRARY_NAME = "libropecheck_cuda.so"
SOURCES = Path(__file__).parent / "cuda"
COMPILED = ("rotation.cu", "norm.cu", "operators.cpp", "norm_operators.cpp")
MODE_VARIABLE = "ROPECHECK_CUDA"
MODES = ("require", "auto", "off")
DEFAULT_TOOLKIT = Path("/usr/local/cuda")

INTERFACE = 2
"""Counts the changes of what library and Python expect of each other: operator names, their arguments, the callback."""

OLDEST_NVCC = (12, 8)
"""The first release that knows sm_120."""

OLDEST_TORCH = (2, 10)
"""The stable C++ interface is used as of this release, and the library runs with every later one."""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
PTX_ARCHITECTURE = "compute_80"
"""The oldest: a GPU of none of the architectures (sm_110, say, or a coming one) compiles it when it loads the library,
and PTX of a later architecture would leave out those before it. The kernel uses nothing newer."""

FLAGS = (
    "-shared",
    "-O3",
    "-std=c++17",
    "--fmad=false",  # a contracted product would lose its rounding
    "-cudart=static",
    "-nodlink",  # no device code lies in two files
    "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden,-ffp-contract=off",
    f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02X}{OLDEST_TORCH[1]:02X}000000000000",
    *(f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in ARCHITECTURES),
    f"-gencode=arch={PTX_ARCHITECTURE},code={PTX_ARCHITECTURE}",
)

# Asked of the interpreter that the package is installed for: within a build's isolation torch is absent, and as a
# build requirement it would be downloaded for every build. torch is not imported, which would take seconds.
TORCH_QUESTION = """
import importlib.util, json, os, runpy
spec = importlib.util.find_spec("torch")
answer = None
if spec is not None and spec.submodule_search_locations:
    (directory,) = spec.submodule_search_locations
    version = runpy.run_path(os.path.join(directory, "version.py"))
    answer = {"directory": directory, "version": version["__version__"], "hip": version.get("hip")}
print(json.dumps(answer))
"""

_MARKER = re.compile(rb"ropecheck-native(\{[^{}\0]*\})")


class CannotBuild(Exception):  # noqa: N818
    """The native library cannot be built here, for the reason given."""


@dataclass(frozen=True)
class NativeInformation:
    """What a library says of itself: ``source_hash`` is the SHA-256 of its sources and flags."""

    interface: int
    torch_target: str
    architectures: tuple[str, ...]
    source_hash: str


@dataclass(frozen=True)
class Toolchain:
    """What a build needs: the compiler, and the folder of an installed torch."""

    nvcc: str
    torch: Path


def source_hash() -> str:
    """SHA-256 of the sources beside this module, by name and content, and of the flags."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in sorted(path for path in SOURCES.iterdir() if path.is_file()):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def expected_information() -> NativeInformation:
    """What a library made from these sources says."""
    target = ".".join(map(str, OLDEST_TORCH))
    return NativeInformation(INTERFACE, target, (*ARCHITECTURES, PTX_ARCHITECTURE), source_hash())


def read_information(library: Path) -> NativeInformation | None:
    """What ``library`` says of itself, read from its bytes; None where it is absent or says nothing."""
    try:
        found = _MARKER.search(library.read_bytes())
        values = json.loads(found[1]) if found else None
        if values is None:
            return None
        return NativeInformation(**values | {"architectures": tuple(values["architectures"].split(","))})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def build_mode() -> str:
    """The value of ``ROPECHECK_CUDA``, ``auto`` where it is not set.

    Raises:
        ValueError: it has another value.
    """
    mode = os.environ.get(MODE_VARIABLE, "auto")
    if mode not in MODES:
        raise ValueError(f"{MODE_VARIABLE}: expected 'require', 'auto' or 'off', got {mode!r}")
    return mode


def provide_library(target: Path, mode: str) -> str:
    """Leave at ``target`` a library of the present sources, or none; the answer says in one line which, and why.

    Raises:
        CannotBuild: ``mode`` is ``require`` and no library came out.
    """
    if mode == "off":
        target.unlink(missing_ok=True)
        return f"the native library is left out: {MODE_VARIABLE}=off"
    if read_information(target) == expected_information():
        return f"the native library is up to date: {target}"
    # A library of other sources would be refused when it is loaded.
    target.unlink(missing_ok=True)
    try:
        compile_library(find_toolchain(), target)
    except CannotBuild as error:
        if mode == "require":
            raise CannotBuild(f"{MODE_VARIABLE}=require, and the native library cannot be built: {error}") from error
        return f"the native library is left out: {error}"
    return f"the native library was built: {target}"


def find_toolchain(python: str = sys.executable) -> Toolchain:
    """The toolchain of this machine, with the torch that ``python`` imports.

    Raises:
        CannotBuild: something is missing, too old or made for ROCm.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [*(str(Path(home, "bin", "nvcc")) for home in homes), "nvcc", str(DEFAULT_TOOLKIT / "bin" / "nvcc")]
    nvcc = next((found for place in places if (found := shutil.which(place))), None)
    if nvcc is None:
        raise CannotBuild(f"nvcc is not found, on PATH or under CUDA_HOME or {DEFAULT_TOOLKIT}")
    said = _output([nvcc, "--version"])
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        raise CannotBuild(f"{nvcc} does not say its release")
    if (int(release[1]), int(release[2])) < OLDEST_NVCC:
        raise CannotBuild(f"{nvcc} is of release {release[1]}.{release[2]}, and {_dotted(OLDEST_NVCC)} is needed")
    compiler = os.environ.get("NVCC_CCBIN", "g++")
    if shutil.which(compiler) is None:
        raise CannotBuild(f"the host compiler {compiler} is not found")
    return Toolchain(nvcc, _find_torch(python))


def _find_torch(python: str) -> Path:
    answer = json.loads(_output([python, "-I", "-c", TORCH_QUESTION]))
    if answer is None:
        raise CannotBuild(
            f"torch, whose headers are needed, is not installed for {python}; install it there first, and give "
            "python -m build, which makes an environment without it, --no-isolation"
        )
    if answer["hip"]:
        raise CannotBuild(f"torch {answer['version']} is made for ROCm, and the native library needs CUDA")
    numbers = re.match(r"(\d+)\.(\d+)", answer["version"])
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise CannotBuild(f"torch is {answer['version']}, and {_dotted(OLDEST_TORCH)} is needed")
    directory = Path(answer["directory"])
    for needed in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
        if not (directory / needed).is_file():
            raise CannotBuild(f"torch {answer['version']} comes without {directory / needed}")
    return directory


def compile_library(toolchain: Toolchain, target: Path) -> None:
    """Write the library of the present sources to ``target``, all of it or nothing.

    Raises:
        CannotBuild: the compiler failed; its output goes to standard error.
    """
    values = asdict(expected_information())
    values["architectures"] = ",".join(values["architectures"])
    command = [toolchain.nvcc, *FLAGS, f"--threads={min(os.cpu_count() or 1, len(ARCHITECTURES) + 1)}"]
    command += [f'-DROPECHECK_{name.upper()}="{value}"' for name, value in values.items()]
    command += [f"-I{toolchain.torch / 'include'}", f"-L{toolchain.torch / 'lib'}", "-ltorch_cpu", *COMPILED]
    command += [f"-Xcompiler=-ffile-prefix-map={toolchain.torch}=torch"]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        # Within the folder of the sources: with the prefix map, no path of this machine comes into the library.
        done = subprocess.run([*command, "-o", str(unfinished.resolve())], cwd=SOURCES, capture_output=True, text=True)
        sys.stderr.write(done.stdout + done.stderr)
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]
            raise CannotBuild(
                f"nvcc failed with exit status {done.returncode}: {said[0] if said else 'it named no error'}"
            )
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed with exit status {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
