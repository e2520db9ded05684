"""Loading the native library: what can go wrong, injected one by one, and that it goes right beside this torch."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropecheck.kernels import native, native_build
from ropecheck.kernels.native import NativeLibrary
from ropecheck.kernels.native_build import INTERFACE, NativeInformation, expected_information, source_hash


def marker(information: NativeInformation) -> bytes:
    """What a library carries of itself."""
    values = {**vars(information), "architectures": ",".join(information.architectures)}
    return b"\x7fELF...\0ropecheck-native" + json.dumps(values).encode() + b"\0..."


def written(path: Path, **changed: object) -> Path:
    """A file that says what a library of these sources says, but for what is changed."""
    path.write_bytes(marker(replace(expected_information(), **changed)))  # type: ignore[arg-type]
    return path


class Loader:
    """Counts its calls, and raises what it is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.paths: list[str] = []

    def __call__(self, path: str) -> None:
        self.paths.append(path)
        if self.error is not None:
            raise self.error


def refused(library: NativeLibrary, error: type[Exception], words: str) -> Exception:
    """What loading raises: of exactly this type, with these words, the same object at every attempt."""
    caught, frames = [], []
    for _ in range(4):
        with pytest.raises(error, match=words) as raised:
            library.load()
        caught.append(raised.value)
        frames.append(len(list(traceback.walk_tb(raised.tb))))
    assert type(caught[0]) is error
    assert all(one is caught[0] for one in caught)
    # Nothing of an earlier attempt stays with it.
    assert frames[1:] == [2, 2, 2]
    assert library.failure() == f"{error.__name__}: {caught[0]}"
    assert "\n" not in library.failure()
    assert not library.loaded
    return caught[0]


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol"), OSError("no shared object"), RuntimeError("defined twice")], ids=repr
)
def test_the_loaders_own_error_is_raised_every_time(error: Exception, tmp_path: Path) -> None:
    """The very object, at the first attempt and later, and the loader is asked once."""
    loader = Loader(error)
    library = NativeLibrary(written(tmp_path / "library.so"), loader)
    assert refused(library, type(error), str(error)) is error
    assert loader.paths == [str(tmp_path / "library.so")]


def test_an_absent_library(tmp_path: Path) -> None:
    """Its path is named, what to do is said, and nothing is loaded; one that comes later is not taken either."""
    loader = Loader()
    library = NativeLibrary(tmp_path / "library.so", loader)
    refused(library, FileNotFoundError, r"library\.so does not exist; install again with ROPECHECK_CUDA=require")
    written(tmp_path / "library.so")
    refused(library, FileNotFoundError, r"library\.so does not exist")
    assert loader.paths == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"interface": INTERFACE + 1}, rf"has interface {INTERFACE + 1}, and this package needs {INTERFACE}; install"),
        ({"source_hash": "0" * 64}, r"was made from other sources than those of this package; install"),
    ],
    ids=["interface", "sources"],
)
def test_a_library_that_does_not_belong_here(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    """One for another interface, or of other sources, is refused before it is brought into the process."""
    loader = Loader()
    refused(NativeLibrary(written(tmp_path / "library.so", **changed), loader), ImportError, words)
    assert loader.paths == []


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"ropecheck-native{}", b"ropecheck-native{\xff}", b'ropecheck-native{"interface": 1}']
)
def test_a_library_that_says_nothing(content: bytes, tmp_path: Path) -> None:
    """A file without what every library of ours says of itself is refused, and nothing is known of it."""
    (tmp_path / "library.so").write_bytes(content)
    library = NativeLibrary(tmp_path / "library.so", Loader())
    assert library.information() is None
    refused(library, ImportError, "does not say what it was made from")


def test_an_edited_source_makes_the_library_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte more in one source, and the library that fitted is refused."""
    sources = tmp_path / "cuda"
    sources.mkdir()
    for source in native_build.SOURCES.iterdir():
        (sources / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(native_build, "SOURCES", sources)
    path = written(tmp_path / "library.so")
    assert NativeLibrary(path, Loader()).information() == expected_information()
    with (sources / "rotation.h").open("a") as header:
        header.write("\n")
    refused(NativeLibrary(path, Loader()), ImportError, "made from other sources")


@pytest.fixture
def unserved_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An operator that is defined, and that no library implements."""
    definitions = torch.library.Library("ropecheck", "FRAGMENT")
    definitions.define("rotate_nothing_cuda(Tensor x) -> Tensor")
    monkeypatch.setattr(native, "OPERATORS", ("rotate_nothing_cuda",))
    yield "rotate_nothing_cuda"
    definitions._destroy()


def test_a_missing_operator(unserved_operator: str, tmp_path: Path) -> None:
    """A library that loads and leaves an operator without its CUDA kernel is refused by that operator's name."""
    loader = Loader()
    library = NativeLibrary(written(tmp_path / "library.so"), loader)
    refused(
        library, ImportError, rf"has no CUDA implementation of the operator ropecheck::{unserved_operator}; install"
    )
    assert len(loader.paths) == 1


def test_a_library_loads_once(unserved_operator: str, tmp_path: Path) -> None:
    """Loading brings the operator's kernel; afterwards there is no failure, and the loader is not asked again."""
    kernels = torch.library.Library("ropecheck", "IMPL")
    loaded = []

    def load(path: str) -> None:
        loaded.append(path)
        kernels.impl(unserved_operator, lambda x: x, "CUDA")

    library = NativeLibrary(written(tmp_path / "library.so"), load)
    assert library.information() == expected_information()
    assert (loaded, library.loaded) == ([], False)
    assert [library.failure(), library.failure()] == ["", ""]
    library.load()
    assert (len(loaded), library.loaded) == (1, True)
    kernels._destroy()


def patched(library: Path, path: Path, old: bytes, new: bytes) -> Path:
    """A copy of the built library in which ``old``, found once, is replaced by as many bytes."""
    content = library.read_bytes()
    assert content.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def test_the_built_library_says_what_it_is(native_library: Path, tmp_path: Path) -> None:
    """Its bytes tell interface, torch, architectures and sources without loading; a copy for another is refused."""
    assert NativeLibrary(native_library, Loader()).information() == expected_information()
    stated = f'"interface": {INTERFACE}'.encode()
    copy = patched(native_library, tmp_path / "other.so", stated, f'"interface": {INTERFACE + 1}'.encode())
    loader = Loader()
    refused(NativeLibrary(copy, loader), ImportError, f"has interface {INTERFACE + 1}, and this package needs")
    copy = patched(native_library, tmp_path / "stale.so", source_hash().encode(), b"f" * 64)
    refused(NativeLibrary(copy, loader), ImportError, "made from other sources")
    assert loader.paths == []


def test_a_damaged_library(native_library: Path, tmp_path: Path) -> None:
    """One that is right but for its first bytes gives the dynamic loader's own OSError."""
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\0\0\0\0" + native_library.read_bytes()[4:])
    library = NativeLibrary(damaged)
    with pytest.raises(OSError, match=r"damaged\.so"):
        library.load()
    assert library.failure().startswith("OSError: ")
    assert "invalid ELF header" in library.failure()


LOADS = """
import json, torch
from ropecheck.kernels import native, operators
schemas = {n: str(getattr(torch.ops.ropecheck, n).default._schema) for n in native.OPERATORS}
served = [torch._C._dispatch_has_kernel_for_dispatch_key(f"ropecheck::{n}", "CUDA") for n in native.OPERATORS]
mapped = [line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith(".so")]
print(json.dumps({
    "failure": native.NATIVE.failure(), "seen by operators": operators.NATIVE_FAILURE, "loaded": native.NATIVE.loaded,
    "schemas": schemas, "served": served, "mapped": str(native.NATIVE.path) in mapped,
    "callback": native.report_launches_to(print) or native.report_launches_to(None),
}))
"""


def test_it_loads_beside_this_torch(native_library: Path, tmp_path: Path) -> None:
    """In a fresh process the import of the kernels brings the library and its operators; reports go on and off."""
    child = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert (found["failure"], found["seen by operators"]) == ("", "")
    assert (found["loaded"], found["mapped"]) == (True, True)
    assert found["served"] == [True] * len(native.OPERATORS)
    reason = 'str reason="operator called directly"'
    tables = f'Tensor cos, Tensor sin, bool half_split, bool conjugate, str direction="forward", {reason}'
    operands = (
        "Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, Tensor positions, "
        "Tensor? axis_map, Tensor? slots, float eps, float weight_offset"
    )
    assert [schema.removeprefix("ropecheck::") for schema in found["schemas"].values()] == [
        f"multi_axis_rope_cuda(Tensor x, {tables}) -> Tensor",
        f"multi_axis_rope_pair_cuda(Tensor q, Tensor k, {tables}) -> (Tensor, Tensor)",
        f"multi_axis_rope_pair_cuda_(Tensor(a!) q, Tensor(b!) k, {tables}) -> ()",
        f"qk_norm_rope_gate_cuda({operands}, bool gate, bool round_norm, bool fma, {reason}) "
        "-> (Tensor, Tensor, Tensor)",
        f"qk_norm_rope_gate_backward_cuda(Tensor q_gradient, Tensor k_gradient, Tensor gate_gradient, {operands}, "
        f"bool gate, bool fma, bool weight_gradients, {reason}) -> (Tensor, Tensor, Tensor, Tensor)",
    ]
