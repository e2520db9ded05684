"""Evidence as a run writes it: the documents, the statement, the environment."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropecheck.ci import environment
from ropecheck.ci.evidence import writing
from ropecheck.ci.evidence.cells import cells
from ropecheck.ci.evidence.form import EvidenceError
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.evidence.statement import statement
from ropecheck.ci.evidence.writing import close, measured, prepare, with_sources
from ropecheck.ci.evidence.writing import document as writing_document
from ropecheck.ci.sources import judging_hash
from ropecheck.suites.verdicts import Verdict

Made = Any


def test_round_trip(made: Made) -> None:
    """What was written is read, and the cells count it."""
    verdicts = [made.verdict(facts={"elements": 3}), made.verdict("two", "fail", reason="why", facts={"x": math.inf})]
    evidence = load(made.written("report", verdicts))
    assert [v.case for v in evidence.verdicts or ()] == [v.case for v in verdicts]
    ((part,), document) = (evidence.parts, evidence.documents[0])
    assert part.document is document
    (cell,) = document["cells"]
    assert (cell["pass"], cell["fail"], cell["elements"], cell["reasons"]) == (1, 1, 3, ["why"])
    assert "blocked" not in cell
    (candidate,) = document["candidates"]
    assert set(candidate["sources"]["files"]) == {"mine.py"}
    assert candidate["packages"]["torch"]
    assert document["judging"]["purity"]["neox"] == judging_hash("purity", "neox")


def test_cells_know_their_cases(made: Made) -> None:
    """The digest of a cell changes with a case that is renamed, left out or added, and not with verdicts and order."""
    def cases(*verdicts: Verdict) -> str:
        (cell,) = cells(verdicts)
        return str(cell["cases"])

    one, two = made.verdict("one"), made.verdict("two")
    assert cases(one, two) == cases(two, one) == cases(made.verdict("one", "fail"), two)
    assert len({cases(one, two), cases(one), cases(one, made.verdict("Two")), cases(one, two, made.verdict("3"))}) == 4


def test_canonical_bytes_do_not_depend_on_order(made: Made) -> None:
    """Two runs with the same verdicts write the same bytes."""
    one, two = made.verdict("one"), made.verdict("two", "fail", reason="why")
    first, second = made.written("first", [one, two]), made.written("second", [two, one])
    for name in ("evidence.json", "verdicts.json", "statement.json", "manifest.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_manifest_is_written_last_and_lists_every_other_file(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run ends before it, the folder is half-written; where it does not, nothing is left out."""
    folder = made.written("report", [made.verdict()])
    listed = json.loads((folder / "manifest.json").read_text())["sha256"]
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(listed) == there - {"manifest.json"}
    partial, document = prepare(made.folder / "other"), made.document([])
    monkeypatch.setattr("ropecheck.ci.evidence.writing.statement", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        close(partial, made.folder / "other", document)
    assert not (partial / "manifest.json").exists()
    assert not (made.folder / "other").exists()


def test_earlier_report_is_replaced_only_by_a_whole_one(made: Made) -> None:
    """Until the new run is closed the old report stands."""
    folder = made.written("report", [made.verdict()])
    partial = prepare(folder)
    assert load(folder).documents[0]["run"]["seed"] == 0
    close(partial, folder, made.document([made.verdict()], seed=1))
    assert load(folder).documents[0]["run"]["seed"] == 1


def test_what_is_written_can_be_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many failures lose all but their worst element, and a log that is too large is left out and said to be."""
    monkeypatch.setattr(writing, "LARGEST_FILE", 4000)
    elements = {"worst elements": [{"lane": n} for n in range(100)]}
    verdicts = [made.verdict(str(n), "fail", reason="why", facts=elements, worst={"lane": 0}) for n in range(4)]
    partial, out = prepare(made.folder / "report"), made.folder / "report"
    (partial / "pytest.log").write_text("x" * 5000)
    close(partial, out, made.document(verdicts, exit_status=1), verdicts)
    found = load(out)
    assert [(v.facts, v.worst) for v in found.verdicts or ()] == 4 * [({}, {"lane": 0})]
    assert "pytest.log" not in found.container.names
    assert "had 0 MiB, more than" in (out / "pytest.log.left-out").read_text()
    more = [made.verdict(str(n)) for n in range(100)]
    assert load(made.written("more", more)).verdicts is None
    assert load(made.folder / "more").documents[0]["cells"][0]["pass"] == 100


@pytest.mark.parametrize("there", ["file", "folder"])
def test_what_no_run_left_is_not_replaced(tmp_path: Path, there: str) -> None:
    """A file, and a folder of something else, are refused before a run begins."""
    out = tmp_path / "precious"
    if there == "file":
        out.write_text("")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("")
    with pytest.raises(EvidenceError, match=r"is a file|is not empty"):
        prepare(out)


def test_a_source_that_changes_while_it_is_judged_is_refused(made: Made) -> None:
    """Which of both texts was judged cannot be told."""
    judged = with_sources(made.inventory)
    path = made.folder / "mine.py"
    path.write_text(path.read_text().replace("a * c", "c * a"))
    with pytest.raises(EvidenceError, match=r"mine\.py of mine/right was changed while it was judged"):
        writing_document(judged, [made.verdict()], {}, [], {})


def test_the_statement_is_a_test_result(made: Made) -> None:
    """It names its subject by hash, and a failed cell is neither passed nor warned of."""
    verdicts = [
        made.verdict(), made.verdict("two", judgement="laws"), made.verdict("3", "blocked", judgement="laws"),
        made.verdict("4", "fail", judgement="refusals"), made.verdict("5", "not-applicable", judgement="opcheck"),
    ]  # fmt: skip
    folder = made.written("report", verdicts, exit_status=1)
    told = json.loads((folder / "statement.json").read_text())
    assert told["_type"] == "https://in-toto.io/Statement/v1"
    assert told["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert told["subject"][0]["digest"]["sha256"] == environment.sha256(folder / "evidence.json")
    found = told["predicate"]
    assert found["passedTests"] == ["mine/right x purity x cpu x float32"]
    assert found["warnedTests"] == ["mine/right x laws x cpu x float32"]
    assert found["failedTests"] == ["mine/right x refusals x cpu x float32"]
    assert found["result"] == "FAILED"


@pytest.mark.parametrize(
    ("status", "verdicts", "result"),
    [(0, ("pass",), "PASSED"), (3, ("pass",), "WARNED"), (0, ("pass", "blocked"), "WARNED"), (4, ("pass",), "FAILED"),
     (1, ("pass",), "FAILED"), (0, ("fail",), "FAILED")],
)  # fmt: skip
def test_a_statement_is_no_better_than_its_run(made: Made, status: int, verdicts: tuple[str, ...], result: str) -> None:
    """Neither a failing exit status nor a failing or blocked case is told as passed."""
    judged = [made.verdict(str(n), verdict) for n, verdict in enumerate(verdicts)]
    told = statement([made.document(judged, exit_status=status)], 64 * "0")
    assert told["predicate"]["result"] == result


def test_sensitivity_counts_what_was_judged() -> None:
    """Blocked and equivalent faults are no part of the share, and nothing judged is no coverage."""
    def record(name: str, **said: Any) -> Any:
        return SimpleNamespace(**{"name": name, "blocked": "", "equivalent": "", "survives": False} | said)

    others = record("c", blocked="no GPU"), record("d", equivalent="x")
    found = measured([record("a"), record("b", survives=True), *others])
    assert (found["faults"], found["judged"], found["seen"], found["coverage"]) == (4, 2, 1, 0.5)
    assert found["survivors"] == ["b"]
    assert measured([record("c", blocked="no GPU")])["coverage"] == 0.0


RUNNERS = [
    ({}, "person"),
    ({"CI": "true"}, "self-hosted"),
    ({"CI": "true", "GITHUB_ACTIONS": "true", "RUNNER_ENVIRONMENT": "github-hosted"}, "hosted"),
    ({"CI": "true", "GITHUB_ACTIONS": "true", "RUNNER_ENVIRONMENT": "self-hosted"}, "self-hosted"),
    ({"ACT": "true", "CI": "true", "GITHUB_ACTIONS": "true", "RUNNER_ENVIRONMENT": "github-hosted"}, "local workflow"),
]


@pytest.mark.parametrize(("variables", "runner"), RUNNERS)
def test_who_runs_it_is_recorded(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], runner: str) -> None:
    """A local workflow is never recorded as a hosted one, and has no page."""
    for name in ("ACT", "CI", "GITHUB_ACTIONS", "RUNNER_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    page = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7"}
    for name, value in (variables | page).items():
        monkeypatch.setenv(name, value)
    assert environment.runner() == runner
    expected = "https://github.com/a/b/actions/runs/7" if "hosted" in runner else None
    assert environment.run_url() == expected


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
