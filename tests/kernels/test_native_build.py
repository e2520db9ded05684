"""Building the native library: what each mode does, with compilers and interpreters that only pretend."""

from __future__ import annotations

import functools
import sys
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ropecheck.kernels import native_build
from ropecheck.kernels.native_build import (
    CannotBuild,
    build_mode,
    expected_information,
    find_toolchain,
    provide_library,
    read_information,
)

# Writes what a library says of itself, from the definitions that it is given; every compilation is one line of a log.
NVCC = """
import os, pathlib, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release {release}, V0.0.0")
    raise SystemExit
home = pathlib.Path(__file__).parents[1]
with (home / "log").open("a") as log:
    log.write(" ".join(sys.argv) + "\\n")
given = dict(a[len("-DROPECHECK_"):].split("=", 1) for a in sys.argv if a.startswith("-DROPECHECK_"))
text = "".join(
    ["ropecheck-native{{", '"interface": ', given["INTERFACE"][1:-1], ', "torch_target": ', given["TORCH_TARGET"]]
    + [', "architectures": ', given["ARCHITECTURES"], ', "source_hash": ', given["SOURCE_HASH"], "}}"]
)
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text(text)
if {failing}:
    print("rotation.cu(7): error: identifier is undefined", file=sys.stderr)
    raise SystemExit(2)
"""

Toolkit = Callable[..., Path]
Interpreter = Callable[..., str]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """``toolkit(release, failing)``: the only one that is found, with a host compiler beside it; its folder."""

    def made(release: str = "13.0", failing: bool = False) -> Path:
        home = tmp_path / "toolkit"
        _script(home / "bin" / "nvcc", NVCC.format(release=release, failing=failing))
        monkeypatch.setenv("CUDA_HOME", str(home))
        return home

    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(native_build, "DEFAULT_TOOLKIT", tmp_path / "none")
    _script(tmp_path / "path" / "g++", "")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("NVCC_CCBIN", raising=False)
    return made


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """``interpreter(version, hip)``: one that has a torch of that version, and that the build asks; its path.

    Without a version it has none. ``headers=False`` leaves out what a build needs of it.
    """

    def made(version: str | None = "2.13.0+cpu", hip: str | None = None, headers: bool = True) -> str:
        venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
        (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        if version is not None:
            torch = packages / "torch"
            torch.mkdir()
            (torch / "version.py").write_text(f"__version__ = {version!r}\nhip = {hip!r}\n")
            (torch / "__init__.py").write_text("raise SystemError('the build does not import torch')\n")
            for name in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so") if headers else ():
                (torch / name).parent.mkdir(parents=True)
                (torch / name).touch()
        python = str(tmp_path / "venv" / "bin" / "python")
        monkeypatch.setattr(native_build, "find_toolchain", functools.partial(find_toolchain, python))
        return python

    return made


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which a test may change."""
    copy = tmp_path / "cuda"
    copy.mkdir()
    for source in native_build.SOURCES.iterdir():
        (copy / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(native_build, "SOURCES", copy)
    return copy


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)


def compilations(home: Path) -> int:
    log = home / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def left_out(target: Path, words: str) -> None:
    """``auto`` goes on without a library and says why, in one line; ``require`` fails with the same reason."""
    target.write_text("ropecheck-native{} of other sources")
    said = provide_library(target, "auto")
    assert said.startswith("the native library is left out: ")
    assert words in said
    assert "\n" not in said
    assert not target.exists()
    with pytest.raises(CannotBuild) as caught:
        provide_library(target, "require")
    assert str(caught.value) == said.replace(
        "the native library is left out", "ROPECHECK_CUDA=require, and the native library cannot be built"
    )
    assert list(target.parent.glob(f"{target.name}*")) == []


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_library_is_built_once(
    mode: str,
    toolkit: Toolkit,
    interpreter: Interpreter,
    sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says what it was made from; it is made again when a source, its name or a flag changes, and only then."""
    home, target = toolkit(), tmp_path / "new folder" / "library.so"
    interpreter()

    def provided(times: int, said: str) -> None:
        assert provide_library(target, mode) == f"{said}: {target}"
        assert compilations(home) == times
        assert read_information(target) == expected_information()
        assert [path.name for path in target.parent.iterdir()] == [target.name]

    built, kept = "the native library was built", "the native library is up to date"
    provided(1, built)
    provided(1, kept)
    (sources / "rotation.h").touch()
    provided(1, kept)
    with (sources / "rotation.h").open("a") as header:
        header.write("// more\n")
    provided(2, built)
    (sources / "launch.h").rename(sources / "start.h")
    provided(3, built)
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-lineinfo"))
    provided(4, built)
    monkeypatch.setattr(native_build, "INTERFACE", native_build.INTERFACE + 1)
    provided(5, built)
    target.write_bytes(target.read_bytes()[:-9])
    provided(6, built)
    assert provide_library(target, mode) == f"{kept}: {target}"


def test_what_is_asked_of_the_compiler(toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path) -> None:
    """Machine code for four architectures and PTX, no contraction, torch's headers and libtorch_cpu alone."""
    home = toolkit()
    torch = Path(interpreter()).parents[1]
    provide_library(tmp_path / "library.so", "require")
    (command,) = (home / "log").read_text().splitlines()
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90, 100, 120)]
    for option in (*codes, "-gencode=arch=compute_80,code=compute_80", "--fmad=false", "-ltorch_cpu"):
        assert f" {option} " in command
    assert "-ffp-contract=off" in command
    assert "-DTORCH_TARGET_VERSION=0x020A000000000000" in command
    assert f"-I{torch}/lib" in command
    assert "cuda_runtime" not in command


def test_off_leaves_it_out(toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path) -> None:
    """An earlier library is taken away, and no compiler is asked."""
    home, target = toolkit(), tmp_path / "library.so"
    interpreter()
    provide_library(target, "require")
    assert provide_library(target, "off") == "the native library is left out: ROPECHECK_CUDA=off"
    assert not target.exists()
    assert compilations(home) == 1
    assert provide_library(target, "off") == "the native library is left out: ROPECHECK_CUDA=off"


@pytest.mark.parametrize(("value", "mode"), [(None, "auto"), ("auto", "auto"), ("require", "require"), ("off", "off")])
def test_the_mode_comes_from_the_environment(value: str | None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable it is auto."""
    monkeypatch.delenv("ROPECHECK_CUDA", raising=False)
    if value is not None:
        monkeypatch.setenv("ROPECHECK_CUDA", value)
    assert build_mode() == mode


@pytest.mark.parametrize("value", ["nonsense", "", "REQUIRE", "1"])
def test_another_mode_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt demand must not pass for none."""
    monkeypatch.setenv("ROPECHECK_CUDA", value)
    with pytest.raises(ValueError, match=f"^ROPECHECK_CUDA: expected 'require', 'auto' or 'off', got '{value}'$"):
        build_mode()


def test_without_nvcc(toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path) -> None:
    """None on PATH, none under CUDA_HOME, none where toolkits are installed."""
    interpreter()
    left_out(tmp_path / "library.so", "nvcc is not found, on PATH or under CUDA_HOME or ")


def test_nvcc_is_found_on_path(
    toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_HOME is not needed where PATH has it, and comes first where it is set."""
    home = toolkit()
    interpreter()
    on_path = tmp_path / "path" / "nvcc"
    on_path.symlink_to(home / "bin" / "nvcc")
    assert native_build.find_toolchain().nvcc == str(home / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME")
    assert native_build.find_toolchain().nvcc == str(on_path)


def test_a_failing_compiler(
    toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its first error is the reason, all that it says is passed on, and no unfinished file stays."""
    toolkit(failing=True)
    interpreter()
    left_out(tmp_path / "library.so", "nvcc failed with exit status 2: rotation.cu(7): error: identifier is undefined")
    assert "rotation.cu(7): error: identifier is undefined" in capfd.readouterr().err


@pytest.mark.parametrize("release", ["12.6", "11.8"])
def test_an_old_compiler(release: str, toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path) -> None:
    """A release that does not know every architecture is refused before it compiles."""
    home = toolkit(release)
    interpreter()
    left_out(tmp_path / "library.so", f"nvcc is of release {release}, and 12.8 is needed")
    assert compilations(home) == 0


def test_a_compiler_that_does_not_run(toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path) -> None:
    """One that fails when it is asked for its release, and one that does not tell it."""
    home = toolkit()
    interpreter()
    _script(home / "bin" / "nvcc", "import sys; sys.exit('nvcc: no license')")
    left_out(tmp_path / "library.so", "nvcc failed with exit status 1: nvcc: no license")
    _script(home / "bin" / "nvcc", "print('hello')")
    left_out(tmp_path / "library.so", "nvcc does not say its release")


def test_without_a_host_compiler(
    toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++, or what NVCC_CCBIN names."""
    toolkit()
    interpreter()
    monkeypatch.setenv("NVCC_CCBIN", "clang++-99")
    left_out(tmp_path / "library.so", "the host compiler clang++-99 is not found")
    monkeypatch.delenv("NVCC_CCBIN")
    (tmp_path / "path" / "g++").unlink()
    left_out(tmp_path / "library.so", "the host compiler g++ is not found")


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ({"version": None}, "torch, whose headers are needed, is not installed for "),
        ({"version": "2.13.0+rocm7.0", "hip": "7.0"}, "torch 2.13.0+rocm7.0 is made for ROCm, and the native library "),
        ({"version": "2.9.1"}, "torch is 2.9.1, and 2.10 is needed"),
        ({"version": "nightly"}, "torch is nightly, and 2.10 is needed"),
        ({"headers": False}, "torch 2.13.0+cpu comes without "),
    ],
    ids=["none", "ROCm", "old", "unknown", "without headers"],
)
def test_a_torch_that_it_cannot_be_built_for(
    torch: dict[str, str], words: str, toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path
) -> None:
    """Each is named, and nothing is compiled."""
    home = toolkit()
    interpreter(**torch)
    left_out(tmp_path / "library.so", words)
    assert compilations(home) == 0


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0+cu130", "3.0.0a0+git1234"])
def test_a_torch_that_it_can_be_built_for(
    version: str, toolkit: Toolkit, interpreter: Interpreter, tmp_path: Path
) -> None:
    """Releases from 2.10 on, whatever their build; torch is not imported for it."""
    toolkit()
    interpreter(version)
    assert provide_library(tmp_path / "library.so", "require").startswith("the native library was built")
