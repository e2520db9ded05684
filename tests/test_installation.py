"""The files that `make` installs by: the constraints agree with pyproject.toml, and the Makefile fails closed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints" / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _on(python: str, requirements: list[Requirement]) -> list[Requirement]:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    return [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_release_that_meets_its_bound(
    python: str, project: dict[str, Any], constraints: list[Requirement]
) -> None:
    """On each Python every dependency, extra and group is pinned, within the bounds that pyproject.toml states."""
    asked = [*project["project"]["dependencies"]]
    for group in (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()):
        asked += group
    pinned = {r.name: r for r in _on(python, constraints)}
    assert len(pinned) == len(_on(python, constraints))
    for requirement in _on(python, [Requirement(text) for text in asked]):
        (pin,) = pinned[requirement.name].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} on Python {python}, pinned {pin}"


def test_only_triton_is_bounded_and_not_pinned(constraints: list[Requirement]) -> None:
    """torch's builds disagree on triton and on nothing else, so everything else has exactly one release."""
    loose = {r.name for r in constraints if [s.operator for s in r.specifier] != ["=="]}
    assert loose == {"triton"}


def test_the_classifiers_are_the_pythons_that_the_constraints_serve(project: dict[str, Any]) -> None:
    """What the metadata promise is what the constraints were made for."""
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in project["project"]["classifiers"] if c.startswith(prefix)]
    assert tuple(named) == PYTHONS
    assert project["project"]["requires-python"] == f">={PYTHONS[0]}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a checkout as an installation reads."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


def _make(checkout: Path, target: str, python: str) -> subprocess.CompletedProcess[str]:
    without = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", target, f"PYTHON={python}"]
    return subprocess.run(command, cwd=checkout, env=without, capture_output=True, text=True, timeout=60)


def _interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("target", ["verify", "test"])
def test_an_old_python_is_refused_with_one_sentence(checkout: Path, target: str) -> None:
    """Nothing is made where the interpreter is older than 3.10, and the message says which was found."""
    old = _interpreter(checkout / "old", 'case "$1" in -c) exit 1;; -V) echo Python 3.9.18;; *) touch made;; esac')
    done = _make(checkout, target, old)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0
    assert len(said) == 1
    assert "3.10 or newer is needed" in said[0]
    assert "3.9.18" in said[0]
    assert not (checkout / "made").exists()


def test_a_missing_python_is_named(checkout: Path) -> None:
    """An interpreter that does not exist is an error that names it."""
    done = _make(checkout, "test", "no-such-python")
    assert done.returncode != 0
    assert "'no-such-python' is not found" in done.stderr


def test_a_failed_installation_is_not_taken_for_done(checkout: Path) -> None:
    """After an installation that failed the next run installs again; after one that did not, it does not."""
    stub = "mkdir -p .venv/bin; cp installer .venv/bin/python; cp tool .venv/bin/ropecheck"
    python = _interpreter(checkout / "python", f'case "$1" in -c) exit 0;; -m) {stub};; esac')
    _interpreter(checkout / "tool", 'echo ran "$@"')
    _interpreter(checkout / "installer", "exit 1")
    assert _make(checkout, "verify", python).returncode != 0
    assert not (checkout / ".venv" / "installed").exists()
    _interpreter(checkout / "installer", "echo pip >> log")
    first = _make(checkout, "verify", python)
    assert first.returncode == 0, first.stderr
    assert "ran verify --plan standard --out report" in first.stdout
    installations = (checkout / "log").read_text()
    assert _make(checkout, "verify", python).returncode == 0
    assert (checkout / "log").read_text() == installations
