"""The archives that the project builds, and that the installed wheel judges kernels from outside the checkout."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ropecheck.kernels.native_build import CannotBuild, find_toolchain

ROOT = Path(__file__).parents[1]
PACKAGES = ("oracle", "kernels", "suites", "ci")
LEFT_OUT: tuple[str, ...] = (".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "__pycache__", "*.so")
LEFT_OUT += ("build", "report", "report-gpu", "report-sanitizer", "report-sensitivity")
LIBRARY = "kernels/libropecheck_cuda.so"
OPTIONAL = ("triton", "diffusers", "transformers", "flint")

# One worker builds and installs; the tests of this file wait for it together.
pytestmark = pytest.mark.xdist_group("packaging")

CANDIDATE = """
from ropecheck.suites import Candidate
import torch

def rotate(x, cos, sin):
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.stack((first * c - second * s, second * c {sign} first * s), dim=-1)
    return turned.flatten(-2).to(x.dtype)

CANDIDATES = [Candidate(name="{name}", contract="qwen-image", run=rotate, devices=("cpu",))]
"""


@dataclass(frozen=True)
class Archives:
    """The source distribution, built from a copy of the tree, and of it the wheel without the native library."""

    sdist: Path
    wheel: Path

    def files(self) -> list[str]:
        """Names in the wheel."""
        return _names(self.wheel)


@dataclass(frozen=True)
class Installation:
    """A virtual environment that has the wheel, and the dependencies of the environment of this test."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.directory)}))

    def run(self, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run an installed command; nothing of the checkout is on its path."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "COV_", "TRITON_"))}
        environment |= {"PATH": f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}", **variables}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)

    def judge(
        self, candidate: Path, verdicts: Path, *options: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The conformance suite on one question of ``candidate``."""
        return self.run(
            str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "ropecheck.suites",
            "--candidate", str(candidate), "--plan", "smoke", "--judgement", "accuracy-forward",
            "--dtype", "float32", "--verdicts", str(verdicts), *options, cwd=candidate.parent, **variables,
        )  # fmt: skip


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    folder = tmp_path_factory.mktemp("archives")
    # A copy, since a build writes into the tree. The wheel is made from the source distribution.
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    # What an editable installation leaves beside the modules belongs into neither archive.
    (folder / "tree" / LIBRARY).write_bytes(b"of other sources")
    _build(folder / "tree", folder, ROPECHECK_CUDA="off")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Archives(sdist, wheel)


@pytest.fixture(scope="session")
def native_wheel(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution gives where the native library is required.

    Where it cannot be built the test fails if ``ROPECHECK_CUDA`` requires it here too, and is skipped if not.
    """
    try:
        find_toolchain()
    except CannotBuild as error:
        if os.environ.get("ROPECHECK_CUDA") == "require":
            pytest.fail(f"ROPECHECK_CUDA=require, and the native library cannot be built: {error}", pytrace=False)
        pytest.skip(f"the native library cannot be built: {error}")
    folder = tmp_path_factory.mktemp("native")
    shutil.unpack_archive(archives.sdist, folder)
    (tree,) = folder.iterdir()
    _build(tree, folder, "--wheel", ROPECHECK_CUDA="require")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installation(
    archives: Archives, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """With the native library where this machine can build it."""
    wheel = archives.wheel
    with contextlib.suppress(CannotBuild):
        find_toolchain()
        wheel = request.getfixturevalue("native_wheel")
    made = Installation(tmp_path_factory.mktemp("installation") / "venv")
    venv.create(made.directory, with_pip=False)
    # The dependencies are gigabytes, so they are taken from this environment. Python does not follow the .pth files
    # of a folder that a .pth file names: an editable installation there stays out.
    (made.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install", "--quiet", "--no-deps", "--no-index"]
    _check([*pip, "--ignore-installed", str(wheel)])
    return made


def _build(tree: Path, into: Path, *options: str, **variables: str) -> None:
    # Not isolated: torch, whose headers the library needs, is that of this environment.
    _check([sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(into), str(tree)], **variables)


def _check(command: Sequence[str], **variables: str) -> None:
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_licence_is_in_both_archives(archives: Archives) -> None:
    """Wheel and source distribution carry the text of the BSD-3-Clause licence, and the metadata name it."""
    text = (ROOT / "LICENSE").read_text()
    assert "BSD 3-Clause" in text
    assert "Neither the name of the copyright holder" in text
    with tarfile.open(archives.sdist) as archive:
        (inside,) = [m for m in archive.getmembers() if m.name.count("/") == 1 and m.name.endswith("/LICENSE")]
        member = archive.extractfile(inside)
        assert member is not None
        assert member.read().decode() == text
    (licence,) = [name for name in archives.files() if name.endswith(".dist-info/licenses/LICENSE")]
    (metadata,) = [name for name in archives.files() if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(archives.wheel) as archive:
        assert archive.read(licence).decode() == text
        assert "License-Expression: BSD-3-Clause" in archive.read(metadata).decode().splitlines()


def test_the_wheel_holds_the_packages_and_nothing_else(archives: Archives) -> None:
    """Every module and data file of the four folders is in the wheel under ropecheck, and no other file is."""
    sources = {
        f"ropecheck/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    installed = {name for name in archives.files() if ".dist-info/" not in name}
    assert installed == sources
    assert {f"ropecheck/{package}/py.typed" for package in PACKAGES} <= installed
    assert "ropecheck/oracle/pins.json" in installed
    assert "ropecheck/kernels/cuda/rotation.cu" in installed


def test_a_native_wheel_holds_the_library_more(archives: Archives, native_wheel: Path) -> None:
    """Beside the modules, and nothing else; it is for this platform and every Python, the other wheel for any."""
    assert {name for name in _names(native_wheel) if ".dist-info/" not in name} - set(archives.files()) == {
        f"ropecheck/{LIBRARY}"
    }
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    for wheel, platform, pure in ((native_wheel, here, "false"), (archives.wheel, "any", "true")):
        assert wheel.name.endswith(f"-py3-none-{platform}.whl")
        with zipfile.ZipFile(wheel) as archive:
            (stated,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
            lines = archive.read(stated).decode().splitlines()
        assert f"Tag: py3-none-{platform}" in lines
        assert f"Root-Is-Purelib: {pure}" in lines


def test_the_installed_library_can_be_used(native_wheel: Path, installation: Installation, tmp_path: Path) -> None:
    """In another environment and outside the checkout it is found beside the modules, and loads."""
    code = "from ropecheck.kernels.native import NATIVE; print(NATIVE.path); print(NATIVE.failure() or 'none')"
    done = installation.run(str(installation.python), "-c", code, cwd=tmp_path)
    assert done.stdout.splitlines() == [str(installation.packages / "ropecheck" / LIBRARY), "none"], done.stderr


def test_an_installed_package_without_the_library_says_so(archives: Archives, tmp_path: Path) -> None:
    """The wheel without it imports and rotates on the CPU; the native backend is refused with the reason."""
    with zipfile.ZipFile(archives.wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import torch; from ropecheck.kernels import multi_axis_rope\n"
        "x, table = torch.ones(1, 2, 3, 4), torch.ones(2, 2)\n"
        "print(multi_axis_rope(x, table, table).sum().item())\n"
        "multi_axis_rope(x, table, table, backend='cuda')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "24.0\n", done.stderr
    refusal = f"FileNotFoundError: the native library {tmp_path / 'ropecheck' / LIBRARY} does not exist; install again"
    assert refusal in done.stderr.splitlines()[-1]


def test_the_source_distribution_can_be_tested(archives: Archives) -> None:
    """It carries the tests, the constraints, the Makefile that runs them, and the sources of the native library."""
    with tarfile.open(archives.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "pyproject.toml", "constraints/constraints.txt", "tests/test_packaging.py"} <= names
    for folder, patterns in (("tests", ("*.py", "*.cpp")), ("kernels/cuda", ("*",))):
        wanted = {str(p.relative_to(ROOT)) for pattern in patterns for p in (ROOT / folder).rglob(pattern)}
        assert wanted <= names
        assert wanted
    assert {"setup.py", ".ci/run"} <= names
    assert [name for name in names if name.endswith(".so")] == []


def test_only_ropecheck_is_installed_at_the_top_level(installation: Installation) -> None:
    """A package called kernels there would shadow the one that diffusers and transformers look for."""
    found = {p.name for p in installation.packages.iterdir()} - {"dependencies.pth", "__pycache__"}
    (metadata,) = [name for name in found if name.endswith(".dist-info")]
    assert metadata.startswith("ropecheck-")
    assert found == {"ropecheck", metadata}


def test_the_wheel_judges_outside_the_checkout(installation: Installation, tmp_path: Path) -> None:
    """From the installed wheel a right candidate of ten lines passes and a wrong one fails."""
    where = "import ropecheck.oracle, ropecheck.suites.plugin as p; print(ropecheck.oracle.__file__); print(p.__file__)"
    printed = installation.run(str(installation.python), "-c", where, cwd=tmp_path).stdout.splitlines()
    assert [Path(p).is_relative_to(installation.packages) for p in printed] == [True, True]
    for name, sign, code in (("right", "+", 0), ("wrong", "-", 1)):
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(CANDIDATE.format(name=name, sign=sign)))
        done = installation.judge(file, tmp_path / name)
        assert done.returncode == code, done.stdout + done.stderr
        verdicts = (tmp_path / name / "verdicts.jsonl").read_text()
        assert ('"verdict":"pass"' in verdicts, '"verdict":"fail"' in verdicts) == (code == 0, code == 1)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_checkout_as_working_directory_does_not_shadow_packages(workers: str, tmp_path: Path) -> None:
    """Its folder kernels is not taken for the package that transformers looks for, also by python -m pytest."""
    candidate = tmp_path / "vendor.py"
    candidate.write_text(
        "from ropecheck.suites import Candidate\nimport ropecheck.kernels, sys\n"
        "def rotate(x, cos, sin):\n"
        "    import transformers.integrations.hub_kernels\n"
        "    assert 'kernels' not in sys.modules\n"
        "    return ropecheck.kernels.multi_axis_rope(x, cos, sin, pairing='adjacent')\n"
        "CANDIDATES = [Candidate(name='vendor', contract='qwen-image', run=rotate, devices=('cpu',))]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, "--pyargs"]
    command += ["ropecheck.suites", "--candidate", str(candidate), "--plan", "smoke", "--judgement", "repeatability"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [["ropecheck"], ["python", "-m", "ropecheck.ci"]], ids=["script", "module"])
def test_the_command_explains_itself(installation: Installation, command: list[str], tmp_path: Path) -> None:
    """The installed command, and the module that it stands for, print their help."""
    done = installation.run(*command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verify" in done.stdout


def test_the_policies_are_installed(archives: Archives, installation: Installation, tmp_path: Path) -> None:
    """A shipped policy is found by its name outside the checkout, and refuses a machine without a GPU."""
    assert "ropecheck/ci/policies/gpu.toml" in archives.files()
    bare = {"CUDA_VISIBLE_DEVICES": ""}
    done = installation.run("ropecheck", "verify", "--policy", "gpu", "--out", "report", cwd=tmp_path, **bare)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "policy gpu needs an NVIDIA GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_the_optional_packages(installation: Installation, tmp_path: Path) -> None:
    """Everything imports and judges, and the doctor answers, where triton, the vendors and flint are missing."""
    blocker = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in OPTIONAL)
    # find_spec finds what lies on disk even where importing it fails, so it is told as well.
    blocker += textwrap.dedent(f"""
        from importlib.machinery import PathFinder
        find = PathFinder.find_spec.__func__
        def without(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in {OPTIONAL!r} else find(cls, name, path, target)
        PathFinder.find_spec = classmethod(without)
        for name in {OPTIONAL!r}:
            del sys.modules[name]
    """)
    (tmp_path / "sitecustomize.py").write_text(blocker)
    missing = {"PYTHONPATH": str(tmp_path)}
    modules = [f"ropecheck.{p}" for p in PACKAGES]
    modules += [f"ropecheck.suites.adapters.{name}" for name in ("shipped", "diffusers", "transformers")]
    gone = f"import importlib.util as u; print([n for n in {OPTIONAL!r} if u.find_spec(n)])"
    code = f"import importlib; [importlib.import_module(m) for m in {modules!r}]; {gone}"
    imported = installation.run(str(installation.python), "-c", code, cwd=tmp_path, **missing)
    assert (imported.returncode, imported.stdout.strip()) == (0, "[]"), imported.stderr
    file = tmp_path / "right.py"
    file.write_text(textwrap.dedent(CANDIDATE.format(name="right", sign="+")))
    judged = installation.judge(
        file, tmp_path / "verdicts", "--candidate", "ropecheck.suites.adapters.shipped:CANDIDATES", **missing
    )
    assert judged.returncode == 0, judged.stdout + judged.stderr
    lines = (tmp_path / "verdicts" / "verdicts.jsonl").read_text().splitlines()
    assert any('"right"' in line and '"certified by":"mpmath"' in line and '"verdict":"pass"' in line for line in lines)
    triton = [line for line in lines if "ropecheck/triton" in line]
    assert triton
    assert all('"verdict":"blocked"' in line and "triton is not installed" in line for line in triton)
    doctor = installation.run("ropecheck", "doctor", cwd=tmp_path, **missing)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert [name for name in ("triton", "diffusers", "transformers") if name not in doctor.stdout] == []


def test_types_are_complete(installation: Installation) -> None:
    """mypy, strict, accepts the installed packages; their py.typed files are what lets it see their types."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--python-executable", str(installation.python)]
    command += [argument for package in PACKAGES for argument in ("-p", f"ropecheck.{package}")]
    done = subprocess.run(command, cwd=installation.directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
