"""``make verify-gpu``: build, plan and sanitizer in one command, with what a machine without network has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def make(checkout: Path, python: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")} | variables
    command = ["make", "verify-gpu", f"PYTHON={python}"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def installer(checkout: Path, verify: int, sanitize: int, sensitivity: int) -> str:
    """A Python that has every package and whose pip puts a command in place that ends with these statuses."""
    script(
        checkout / "tool",
        f'echo "$PYTHONPATH|$*" >> log\ncase "$1" in verify) exit {verify};; sanitize) exit {sanitize};; '
        f"sensitivity) exit {sensitivity};; esac",
    )
    install = 'echo "$ROPECHECK_CUDA|$*" >> log; mkdir -p build/gpu/bin; cp tool build/gpu/bin/ropecheck'
    return script(checkout / "python", f'case "$1" in -c) exit 0;; -m) {install};; esac')


@pytest.mark.parametrize("statuses", [(0, 0, 0), (1, 0, 0), (3, 0, 0), (0, 3, 0), (0, 0, 1), (2, 4, 1)])
def test_every_command_runs_and_each_can_fail_it(checkout: Path, statuses: tuple[int, int, int]) -> None:
    """The library is required of the build, what is judged is that build, and no status is lost."""
    (checkout / "build").mkdir()
    (checkout / "build" / "stale").touch()
    done = make(checkout, installer(checkout, *statuses))
    built, judged, sanitized, seen = (line.partition("|") for line in (checkout / "log").read_text().splitlines())
    assert built[0] == "require"
    assert "--no-index --no-deps --no-build-isolation --target build/gpu ." in built[2]
    assert judged == (f"{checkout}/build/gpu", "|", "verify --policy gpu --out report-gpu")
    assert sanitized == (f"{checkout}/build/gpu", "|", "sanitize --out report-sanitizer")
    assert seen[2].startswith("sensitivity -n ")
    assert not (checkout / "build" / "stale").exists()
    assert f"exit status of verify: {statuses[0]}, of sanitize: {statuses[1]}" in done.stdout
    assert (done.returncode == 0) == (statuses == (0, 0, 0))


def test_a_failed_build_judges_nothing(checkout: Path) -> None:
    """Without the library there is nothing to judge."""
    script(checkout / "tool", "echo ran >> log")
    done = make(checkout, script(checkout / "python", 'case "$1" in -c) exit 0;; -m) exit 1;; esac'))
    assert done.returncode != 0
    assert not (checkout / "log").exists()


def test_missing_packages_are_named_before_anything_is_touched(checkout: Path) -> None:
    """One sentence with all of them."""
    (checkout / "build").mkdir()
    bare = script(checkout / "python", f'exec "{sys.executable}" -S -I "$@"')
    done = make(checkout, bare)
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert "verify-gpu needs these packages" in said
    assert [name for name in ("torch", "triton", "mpmath", "pytest", "xdist", "rich") if name not in said] == []
    assert (checkout / "build").exists()


def test_a_missing_python_is_named(checkout: Path) -> None:
    """Before anything else."""
    done = make(checkout, "no-such-python")
    assert done.returncode != 0
    assert "'no-such-python' is not found" in done.stderr
