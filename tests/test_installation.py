"""What installs: the constraints agree with pyproject.toml, and Makefile and setup.py fail closed."""

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
    for name in ("Makefile", "pyproject.toml", "setup.py", "kernels/native_build.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("constraints", "kernels/cuda"):
        shutil.copytree(ROOT / name, tmp_path / name)
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


@pytest.fixture
def stub(checkout: Path) -> str:
    """A Python whose virtual environments have a pip that notes what it is asked for, and the tools that make runs."""
    tools = "cp tool .venv/bin/ropecheck; cp tool .venv/bin/ruff; cp tool .venv/bin/pytest"
    _interpreter(checkout / "tool", 'echo ran "$@"')
    _interpreter(checkout / "installer", 'echo "$@" >> log')
    made = f"mkdir -p .venv/bin; cp installer .venv/bin/python; {tools}"
    return _interpreter(checkout / "python", f'case "$1" in -c) exit 0;; -m) {made};; esac')


def _installations(checkout: Path) -> list[str]:
    """What pip was asked for, a line for each call."""
    log = checkout / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_a_failed_installation_is_not_taken_for_done(checkout: Path, stub: str) -> None:
    """After an installation that failed the next run installs again; after one that did not, it does not."""
    _interpreter(checkout / "installer", "exit 1")
    assert _make(checkout, "verify", stub).returncode != 0
    assert not (checkout / ".venv" / "installed").exists()
    _interpreter(checkout / "installer", "echo pip >> log")
    first = _make(checkout, "verify", stub)
    assert first.returncode == 0, first.stderr
    assert "ran verify --plan standard --out report" in first.stdout
    before = _installations(checkout)
    assert before
    assert _make(checkout, "verify", stub).returncode == 0
    assert _installations(checkout) == before


@pytest.mark.parametrize(
    "changed",
    ["kernels/cuda/rotation.h", "kernels/cuda/another.cuh", "kernels/native_build.py", "setup.py", "pyproject.toml"],
)
def test_what_the_native_library_is_made_of_is_installed_again(checkout: Path, stub: str, changed: str) -> None:
    """A changed or new source leads to another installation, which builds the library; one is enough."""
    assert _make(checkout, "test", stub).returncode == 0
    before = len(_installations(checkout))
    stamp = (checkout / ".venv" / "installed").stat().st_mtime
    (checkout / changed).touch()
    os.utime(checkout / changed, (stamp + 1, stamp + 1))
    assert _make(checkout, "test", stub).returncode == 0
    assert len(_installations(checkout)) == 2 * before
    os.utime(checkout / ".venv" / "installed", (stamp + 2, stamp + 2))
    assert _make(checkout, "test", stub).returncode == 0
    assert len(_installations(checkout)) == 2 * before


def test_torch_is_installed_before_the_package(checkout: Path, stub: str) -> None:
    """The native library is built with its headers, and pip would install it after the package is built."""
    assert _make(checkout, "test", stub).returncode == 0
    names = [line.split()[-1] for line in _installations(checkout)]
    assert names[-2:] == ["torch", ".[triton,flint,vendors]"]
    assert all("--constraint constraints/constraints.txt" in line for line in _installations(checkout)[-2:])


@pytest.mark.parametrize(
    ("nvcc", "given", "mode"), [(True, None, "require"), (False, None, "none"), (True, "off", "off")], ids=str
)
def test_ci_requires_the_native_library_where_nvcc_is(nvcc: bool, given: str | None, mode: str, tmp_path: Path) -> None:
    """Unless another mode was asked for; without nvcc nothing is demanded."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    _interpreter(tools / "make", 'echo "$* with ${ROPECHECK_CUDA:-none} in $PWD"')
    if nvcc:
        _interpreter(tools / "nvcc", "")
    environment = {"PATH": str(tools)} | ({} if given is None else {"ROPECHECK_CUDA": given})
    done = subprocess.run([tmp_path / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True)
    assert done.stdout == f"test with {mode} in {tmp_path}\n", done.stderr


@pytest.mark.parametrize(
    ("mode", "status", "said"),
    [
        ("auto", 0, "ropecheck: the native library is left out: nvcc failed with exit status 7: error: no such GPU"),
        ("require", 1, "error: ROPECHECK_CUDA=require, and the native library cannot be built: nvcc failed with exit "),
        ("off", 0, "ropecheck: the native library is left out: ROPECHECK_CUDA=off"),
        ("nonsense", 1, "error: ROPECHECK_CUDA: expected 'require', 'auto' or 'off', got 'nonsense'"),
    ],
)
@pytest.mark.parametrize("command", ["build_native", "build"])
def test_a_build_whose_compiler_fails(checkout: Path, command: str, mode: str, status: int, said: str) -> None:
    """auto goes on without the library and prints the reason, require fails with it; a misspelt mode is refused."""
    # No package: the library's step alone is asked.
    (checkout / "pyproject.toml").write_text(
        '[project]\nname = "empty"\nversion = "0"\n[tool.setuptools]\npackages = []\n'
    )
    (checkout / "toolkit" / "bin").mkdir(parents=True)
    script = 'case "$1" in --version) echo release 13.0,;; *) echo "error: no such GPU" >&2; exit 7;; esac'
    _interpreter(checkout / "toolkit" / "bin" / "nvcc", script)
    environment = os.environ | {"CUDA_HOME": str(checkout / "toolkit"), "ROPECHECK_CUDA": mode, "NVCC_CCBIN": "sh"}
    done = subprocess.run(
        [sys.executable, "setup.py", command], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith(said)], done.stderr
    assert list(checkout.rglob("*.so*")) == []
