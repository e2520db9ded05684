"""Evidence folders: closed last, checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
