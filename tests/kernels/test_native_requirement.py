"""The mode in which a missing native library fails the tests instead of skipping them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Every fixture that a machine may be unable to serve; the library of the process is an absent one.
TESTS = """
from pathlib import Path
from ropecheck.kernels import native

native.NATIVE = native.NativeLibrary(Path("absent.so"))

def test_compiler(host_compiler): pass
def test_library(native_library): pass
def test_machine_code(disassembled): pass
"""
REASONS = (
    "there is no host compiler: g++ is not found",
    "the native library cannot be used: FileNotFoundError: the native library absent.so does not exist",
)


@pytest.mark.parametrize(("mode", "status", "outcome"), [("require", 1, "3 errors"), ("auto", 0, "3 skipped")])
def test_what_is_missing_fails_where_it_is_required(mode: str, status: int, outcome: str, tmp_path: Path) -> None:
    """With an empty PATH and no library no test passes, and each reason is named; ``require`` ends with a failure."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path / "conftest.py")
    (tmp_path / "test_needs.py").write_text(TESTS)
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_needs.py"],
        cwd=tmp_path,
        env=os.environ | {"PATH": "", "ROPECHECK_CUDA": mode},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == status, child.stdout + child.stderr
    assert outcome in child.stdout.splitlines()[-1]
    assert "passed" not in child.stdout.splitlines()[-1]
    said = "ROPECHECK_CUDA=require, and " if mode == "require" else ": "
    assert [reason for reason in REASONS if said + reason not in child.stdout] == []
