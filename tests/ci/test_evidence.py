"""Evidence folders: closed last, checked when read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropecheck.ci import environment
from ropecheck.ci.evidence import EvidenceError, close, document, load, prepare
from ropecheck.suites.verdicts import Verdict

VERDICT = Verdict("c", "qwen-image", "purity", "cpu", "float32", "purity/x", "pass", facts={"elements": 3})


def written(folder: Path) -> Path:
    close(prepare(folder), folder, document([VERDICT], {"torch": "x"}, [], {"seed": 0}))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    """What was written is read, and the compact form counts it."""
    folder = written(tmp_path / "report")
    assert [Verdict.from_json(v) for v in load(folder)["verdicts"]] == [VERDICT]
    (cell,) = json.loads((folder / "cells.json").read_text())["cells"]
    assert (cell["pass"], cell["elements"]) == (1, 3)


def test_canonical_bytes_do_not_depend_on_order(tmp_path: Path) -> None:
    """Two runs with the same verdicts write the same bytes."""
    other = Verdict("b", "qwen-image", "purity", "cpu", "float32", "purity/y", "fail", "why", {"x": float("inf")})
    for name, verdicts in (("one", [VERDICT, other]), ("two", [other, VERDICT])):
        close(prepare(tmp_path / name), tmp_path / name, document(verdicts, {}, [], {}))
    assert (tmp_path / "one" / "verdicts.json").read_bytes() == (tmp_path / "two" / "verdicts.json").read_bytes()


def test_half_written_folder_is_refused(tmp_path: Path) -> None:
    """A run that did not end has left no manifest."""
    partial = prepare(tmp_path / "report")
    (partial / "verdicts.json").write_text("{}")
    with pytest.raises(EvidenceError, match=r"holds no manifest\.json"):
        load(partial)


@pytest.mark.parametrize("damage", ["edit", "remove"])
def test_changed_file_is_refused(tmp_path: Path, damage: str) -> None:
    """The manifest notices an edited and a missing file."""
    folder = written(tmp_path / "report")
    target = folder / "verdicts.json"
    target.write_text(target.read_text().replace("pass", "fail")) if damage == "edit" else target.unlink()
    with pytest.raises(EvidenceError, match="missing or not as the manifest says"):
        load(folder)


def test_earlier_report_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    """Until the new run is closed the old report stands."""
    folder = written(tmp_path / "report")
    prepare(folder)
    assert load(folder)["run"] == {"seed": 0}
    close(tmp_path / "report.partial", folder, document([], {}, [], {"seed": 1}))
    assert load(folder)["run"] == {"seed": 1}


def test_the_record_identifies_devices_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, compute capability and memory of each GPU, and the versions of CUDA on both sides."""
    gpu = SimpleNamespace(name="NVIDIA X", major=9, minor=0, total_memory=141 * 2**30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: Driver())
    found = environment.record()
    identity = {"name": "NVIDIA X", "compute capability": "9.0", "memory": 141 * 1024, "multiprocessors": 132}
    assert found["gpus"] == [identity, identity]
    assert (found["cuda runtime"], found["cuda driver"]) == ("13.0", "13.1")
    assert found["torch"] == torch.__version__


class Driver:
    """A libcuda that serves CUDA 13.1."""

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802 - the driver's name
        version._obj.value = 13010
        return 0


def test_no_driver_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where libcuda is missing the record says so instead of failing."""
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = environment.record()
    assert (found["cuda driver"], found["driver"], found["gpus"]) == (None, None, [])


def test_the_record_holds_the_library_by_the_bytes_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own hash of what it was built from is recorded beside the hash of the file that is loaded."""
    from ropecheck.suites.adapters import shipped

    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF")
    said = {"path": str(library), "architectures": ("sm_90",), "source_hash": "00", "failure": ""}
    monkeypatch.setattr(shipped, "native_library", lambda: said)
    found = environment.record()["native library"]
    assert found == {**said, "sha256": hashlib.sha256(b"ELF").hexdigest()}
    library.unlink()
    assert environment.native_library()["sha256"] is None


def test_kernels_that_do_not_import_cost_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's run goes on where ours break, and the record says why ours cannot be used."""
    from ropecheck.suites.adapters import shipped

    def broken() -> Any:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(shipped, "native_library", broken)
    assert "ImportError: undefined symbol" in environment.native_library()["failure"]


@pytest.mark.parametrize("change", ["edit", "rename", "add"])
def test_source_hashes_follow_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """One changed, renamed or added file changes its package's hash alone; bytecode and binaries change none."""
    folders = {}
    for package in ("oracle", "kernels", "suites"):
        folders[package] = tmp_path / package
        (folders[package] / "inner").mkdir(parents=True)
        (folders[package] / "inner" / "a.py").write_text(package)

    def found(name: str) -> Any:
        return SimpleNamespace(submodule_search_locations=[str(folders[name.rpartition(".")[2]])])

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", found)
        before = environment.source_hashes()
        (folders["suites"] / "__pycache__").mkdir()
        (folders["suites"] / "__pycache__" / "a.pyc").write_text("x")
        (folders["kernels"] / "lib.so").write_text("x")
        assert environment.source_hashes() == before
        target = folders["kernels"] / "inner" / "a.py"
        if change == "edit":
            target.write_text("other")
        elif change == "rename":
            shutil.move(target, target.with_name("b.py"))
        else:
            target.with_name("b.cu").write_text("")
        after = environment.source_hashes()
    assert {name for name in before if before[name] != after[name]} == {"kernels"}


def test_real_sources_have_hashes() -> None:
    """The packages that are installed here are found, each with its own."""
    hashes = environment.source_hashes()
    assert set(hashes) == {"oracle", "kernels", "suites"}
    assert len(set(hashes.values())) == 3
