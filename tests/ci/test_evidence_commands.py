"""``ropecheck evidence``: joining, packing and comparing evidence that is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.evidence.difference import difference
from ropecheck.ci.evidence.form import EvidenceError
from ropecheck.ci.evidence.merging import contradiction, merge
from ropecheck.ci.evidence.packing import compact, pack
from ropecheck.ci.evidence.reading import load

Made = Any

H200 = {"name": "NVIDIA H200", "compute capability": "9.0", "memory": 143771, "multiprocessors": 132}


def on_a_gpu(made: Made, name: str, verdict: str = "pass", **changed: Any) -> Path:
    """Evidence of a GPU on which one case had ``verdict``."""
    case = made.verdict(verdict=verdict, device="cuda", case="purity/cuda/float32/one", reason="why")
    folder: Path = made.written(name, [case], gpus=[H200], **changed)
    return folder


def test_a_packed_folder_is_the_same_evidence(made: Made) -> None:
    """The zip file is read like the folder, and is the same bytes whenever and wherever it is made."""
    folder = made.written("report", [made.verdict()])
    pack(load(folder), made.folder / "a.zip")
    copy = shutil.copytree(folder, made.folder / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o755)
    pack(load(copy), made.folder / "b.zip")
    assert (made.folder / "a.zip").read_bytes() == (made.folder / "b.zip").read_bytes()
    assert load(made.folder / "a.zip").parts == load(folder).parts
    assert load(made.folder / "a.zip").container.names == load(folder).container.names
    with pytest.raises(EvidenceError, match=r"a\.zip exists"):
        pack(load(folder), made.folder / "a.zip")


def test_the_compact_form_has_the_documents_alone(made: Made) -> None:
    """What is committed holds every cell, and neither verdicts nor logs."""
    folder = made.written("report", [made.verdict()])
    compact(load(folder), made.folder / "small")
    small = load(made.folder / "small")
    assert small.container.names == ["evidence.json", "manifest.json", "statement.json"]
    assert small.documents == load(folder).documents
    assert small.verdicts is None


def test_a_merge_keeps_every_run_whole(made: Made) -> None:
    """Documents, verdicts and logs of each machine; what stands in two of the inputs is kept once."""
    cpu, gpu = made.written("cpu", [made.verdict()]), on_a_gpu(made, "gpu")
    pack(load(cpu), made.folder / "cpu.zip")
    merge([load(path) for path in (cpu, gpu, made.folder / "cpu.zip")], made.folder / "both")
    both = load(made.folder / "both")
    assert both.is_merged
    assert both.documents == [load(cpu).documents[0], load(gpu).documents[0]]
    assert [v.device for v in both.verdicts or ()] == ["cpu", "cuda"]
    assert "parts/1/cpu/pytest.log" in both.container.names


def test_merges_are_flat_and_can_be_merged_and_compacted(made: Made) -> None:
    """A merge of merges has the runs of all as its own, and a part without verdicts stays without."""
    cpu, gpu = made.written("cpu", [made.verdict()]), on_a_gpu(made, "gpu")
    compact(load(gpu), made.folder / "small")
    third = made.written("third", [made.verdict()], seed=3)
    merge([load(made.folder / "small"), load(cpu)], made.folder / "two")
    merge([load(third), load(made.folder / "two")], made.folder / "three")
    three = load(made.folder / "three")
    assert [document["run"]["seed"] for document in three.documents] == [3, 0, 0]
    assert [part.verdicts is None for part in three.parts] == [False, True, False]
    assert three.verdicts is None
    compact(three, made.folder / "compact")
    assert load(made.folder / "compact").documents == three.documents


def test_runs_that_contradict_one_another_are_not_merged(made: Made) -> None:
    """The same sources pass on one machine and fail on another: the sentence names the cell and both."""
    good, bad = on_a_gpu(made, "good"), on_a_gpu(made, "bad", "fail", torch="2.12.0", exit_status=1)
    sentence = (
        r"mine/right x purity x cuda x float32 passes on 1 NVIDIA H200 \(torch 2\.11\.0, .*\) "
        r"and fails on 1 NVIDIA H200 \(torch 2\.12\.0, .*\), with the same sources"
    )
    for order in ((good, bad), (bad, good)):
        with pytest.raises(EvidenceError, match=sentence):
            merge([load(path) for path in order], made.folder / "both")
    assert not (made.folder / "both").exists()


def test_a_blocked_or_a_changed_cell_contradicts_nothing(made: Made) -> None:
    """Blocked says nothing of the candidate, and other sources or another judging code are other questions."""
    good, blocked = on_a_gpu(made, "good"), on_a_gpu(made, "blocked", "blocked", exit_status=3)
    bad = load(on_a_gpu(made, "bad", "fail", exit_status=1)).documents[0]
    passes = load(good).documents[0]
    assert contradiction([passes, bad])
    assert not contradiction([passes, load(blocked).documents[0]])
    judged_otherwise = json.loads(json.dumps(bad))
    judged_otherwise["judging"]["purity"]["neox"] = 64 * "0"
    assert not contradiction([passes, judged_otherwise])
    path = made.folder / "mine.py"
    path.write_text(path.read_text().replace("a * c - b * s", "a * c + b * s"))
    assert not contradiction([passes, load(on_a_gpu(made, "other", "fail", exit_status=1)).documents[0]])


def test_a_difference_says_what_changed(made: Made) -> None:
    """Toolchain, files of the candidate and cells; equal evidence has none."""
    first = load(made.written("first", [made.verdict()]))
    assert not any(difference(first, first).values())
    path = made.folder / "mine.py"
    path.write_text(path.read_text().replace("a * c - b * s", "a * c + b * s"))
    verdicts = [made.verdict(verdict="fail", reason="why"), made.verdict("two", judgement="laws")]
    second = load(made.written("second", verdicts, torch="2.12.0", exit_status=1))
    found = difference(first, second)
    assert found["environment"] == [{"name": "torch", "was": "2.11.0", "is": "2.12.0"}]
    assert [(row["name"], row["files"]) for row in found["sources"]] == [("mine/right", ["mine.py"])]
    assert [(row["name"], row["was"] is None) for row in found["judging"]] == [("laws of neox", True)]
    laws, purity = found["cells"]
    assert (laws["was"], purity["was"].split(" (")[0], purity["is"].split(" (")[0]) == (None, "1 pass", "1 fail")


def test_the_commands(made: Made, command: Any) -> None:
    """Each sub-command on good evidence: its status, and what it says to a person and to a machine."""
    cpu, gpu = str(made.written("cpu", [made.verdict()])), str(on_a_gpu(made, "gpu"))
    status, out, _ = command("evidence", "validate", cpu, gpu)
    assert (status, out.count("valid ")) == (0, 2)
    status, out, _ = command("evidence", "merge", "--json", "--out", "both", cpu, gpu)
    assert (status, json.loads(out)["runs"]) == (0, 2)
    status, out, _ = command("evidence", "pack", "both", "both.zip")
    assert (status, "2 runs" in out) == (0, True)
    status, out, _ = command("evidence", "compact", "both.zip", "small")
    assert (status, "compact" in out) == (0, True)
    status, out, _ = command("evidence", "show", "small")
    assert status == 0
    assert "1 NVIDIA H200" in out
    assert command("evidence", "diff", "both", "small")[0] == 0
    status, out, _ = command("evidence", "diff", "--json", cpu, gpu)
    assert (status, bool(json.loads(out)["cells"])) == (1, True)


@pytest.mark.parametrize("what", ["show", "validate"])
def test_invalid_evidence_is_exit_status_2(made: Made, command: Any, what: str) -> None:
    """One sentence on standard error, nothing on standard output."""
    folder = made.written("report", [made.verdict()])
    (folder / "manifest.json").unlink()
    status, out, err = command("evidence", what, "--json", str(folder))
    assert (status, out) == (2, "")
    assert err.startswith("ropecheck: error: ")
    assert len(err.splitlines()) == 1
