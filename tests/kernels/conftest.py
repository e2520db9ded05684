"""What the tests of the native library need of a machine, and what its absence means.

``ROPECHECK_CUDA=require`` in the environment says, as for the build, that the library has to be there: whatever is
missing then fails the tests that need it. Otherwise they are skipped; either way the reason is named.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from ropecheck.kernels import native, native_build
from ropecheck.suites.machine_code import disassembler

Lacking = Callable[[str], NoReturn]


@pytest.fixture(scope="session")
def lacking() -> Lacking:
    """``lacking(reason)``: end a test that this machine cannot run, by a failure where the library is required."""

    def end(reason: str) -> NoReturn:
        if os.environ.get(native_build.MODE_VARIABLE) == "require":
            pytest.fail(f"{native_build.MODE_VARIABLE}=require, and {reason}", pytrace=False)
        pytest.skip(reason)

    return end


@pytest.fixture(scope="session")
def host_compiler(lacking: Lacking) -> str:
    """The path of g++."""
    return shutil.which("g++") or lacking("there is no host compiler: g++ is not found")


@pytest.fixture(scope="session")
def native_library(lacking: Lacking) -> Path:
    """The path of the installed native library, which has been loaded."""
    if failure := native.NATIVE.failure():
        lacking(f"the native library cannot be used: {failure}")
    return native.NATIVE.path


@pytest.fixture(scope="session")
def disassembled(native_library: Path, lacking: Lacking) -> Path:
    """The path of the native library, on a machine that has a disassembler for it."""
    if disassembler() is None:
        lacking("there is no cuobjdump, in the triton wheel or in a CUDA toolkit on PATH")
    return native_library
