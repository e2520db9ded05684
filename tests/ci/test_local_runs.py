"""The workflows themselves, run on this machine through act: what must be green is, and what must be red is red there.

Slow: each job installs a copy of the sources and asks in processes of its own.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.at_hand import looked_up
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.evidence.writing import close, prepare

ROOT = Path(__file__).parents[2]
CONSUMER = ROOT / "tests" / "consumer"
ROPECHECK = Path(sys.executable).parent / "ropecheck"
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "__pycache__", "*.so", "build", "report", "report-*"
)

NARROW_CANDIDATE = """from ropecheck.kernels import multi_axis_rope
from ropecheck.suites import Candidate


def rotate(x, cos, sin):
    return multi_axis_rope(x, cos, sin, pairing="half-split", backend="reference")


CANDIDATES = [
    Candidate(
        name="ropecheck/narrow", contract="neox", run=rotate, devices=("cpu",), dtypes=("float32",), provides=("vjp",)
    )
]
"""
NARROW_POLICY = """plan = "smoke"

[sensitivity]
coverage = 1.0
faults = 1

[[require]]
candidates = ["ropecheck/narrow"]
judgements = ["accuracy-forward", "accuracy-vjp", "invariance-forward"]
devices = ["cpu"]
"""
NARROWED = (
    "--event", "workflow_dispatch", "--matrix", "python:3.12", "--input", "policy=narrow.toml",
    "--input", "candidate=narrow.py", "--input", "fault=sine-negated",
    "--input", "tests=tests/test_architecture.py",
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """What came of a local run: exit status, the result of each job, and the log by job."""

    status: int
    jobs: dict[str, str]
    log: str

    def said(self, job: str) -> str:
        """What a job wrote, as one line: a terminal folds."""
        lines = [line.partition(" |")[2] for line in self.log.splitlines() if line.startswith(f"{job} |")]
        return " ".join(" ".join(lines).split())


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def committed(folder: Path) -> Path:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Everything")
    return folder


def run(folder: Path, *arguments: str) -> Ran:
    # No GPU, also where there is one; and no native library, which takes longer to build than all the rest.
    bare = {"CUDA_VISIBLE_DEVICES": "", "ROPECHECK_CUDA": "off"}
    command = [str(ROPECHECK), "ci", "local", "--json", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | bare, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert told["runner"] == "local workflow"
    return Ran(done.returncode, told["jobs"], done.stderr)


@pytest.fixture
def ropecheck(tmp_path: Path) -> Path:
    """A repository with these sources, committed, and a candidate and a policy that are quickly judged."""
    shutil.copytree(ROOT, tmp_path / "ropecheck", ignore=NOT_SOURCES)
    # Of other candidates than the one below.
    shutil.rmtree(tmp_path / "ropecheck" / "evidence")
    (tmp_path / "ropecheck" / "narrow.py").write_text(NARROW_CANDIDATE)
    (tmp_path / "ropecheck" / "narrow.toml").write_text(NARROW_POLICY)
    return committed(tmp_path / "ropecheck")


@pytest.fixture
def consumer(tmp_path: Path, ropecheck: Path) -> Callable[..., Ran]:
    """Run the example consumer's workflow, its kernel changed by one replacement."""
    del ropecheck

    def changed(old: str = "", new: str = "") -> Ran:
        folder = tmp_path / "consumer"
        shutil.copytree(CONSUMER, folder, ignore=NOT_SOURCES)
        text = (folder / "rope.py").read_text()
        assert old in text
        (folder / "rope.py").write_text(text.replace(old, new))
        committed(folder)
        return run(folder, "--workflow", "rope", "--repository", f"OWNER/ropecheck={tmp_path / 'ropecheck'}")

    return changed


def test_the_example_consumer_is_green_with_a_right_kernel(consumer: Callable[..., Ran]) -> None:
    """One line of `uses:` gates another repository's kernel; what is recorded says that the run was a local one."""
    ran = consumer()
    assert (ran.status, ran.jobs) == (0, {"verify/Verify": "success"}), ran.log
    said = ran.said("verify/Verify")
    assert "gate rope.toml: green" in said
    assert "runner local workflow" in said
    assert "with changes" not in said
    assert "hosted" not in said


def test_the_example_consumer_is_red_with_a_wrong_kernel(consumer: Callable[..., Ran]) -> None:
    """A sign in the rotation, and the job fails, with the cells that do."""
    ran = consumer("second * c + first * s", "second * c - first * s")
    assert (ran.status, ran.jobs) == (1, {"verify/Verify": "failure"}), ran.log
    assert "gate rope.toml: red" in ran.said("verify/Verify")
    assert re.search(r"accuracy-forward.{0,200}failed", ran.said("verify/Verify"))


def test_a_clean_tree_passes_contracts(ropecheck: Path) -> None:
    """Every job of the workflow, narrowed to one candidate and one fault under a policy that asks for no more."""
    ran = run(ropecheck, "--workflow", "contracts", *NARROWED)
    assert ran.status == 0, ran.log
    assert set(ran.jobs.values()) == {"success"}
    assert {"Lint and documentation", "Tests and types", "Wheel", "CPU plan", "Sensitivity", "Verdict"} <= set(ran.jobs)
    said = ran.said("Verdict")
    assert "gate narrow.toml: green" in said
    assert (said.count("runner local workflow"), "with changes" in said) == (4, False)


def test_a_faulty_kernel_turns_the_right_jobs_red(ropecheck: Path) -> None:
    """Of a kernel that is committed wrong the jobs that judge it fail, and the verdict; those that do not, succeed."""
    reference = ropecheck / "kernels" / "reference.py"
    text = reference.read_text()
    assert text.count("x1 * c + x0 * s") == 1
    reference.write_text(text.replace("x1 * c + x0 * s", "x1 * c - x0 * s"))
    git(ropecheck, "commit", "--all", "--quiet", "--message", "A fault")
    ran = run(ropecheck, "--workflow", "contracts", *NARROWED)
    assert ran.status == 1, ran.log
    red = {name for name, result in ran.jobs.items() if result != "success"}
    assert {name.partition("-")[0] for name in red} == {"Reference on Python 3.12", "CPU plan", "Verdict"}
    assert "gate narrow.toml: red" in ran.said("Verdict")


def test_a_missing_gpu_turns_the_gpu_gate_red(ropecheck: Path) -> None:
    """The GPU job fails and is not skipped, and the verdict names what is missing."""
    ran = run(ropecheck, "--workflow", "gpu-gate")
    assert ran.status == 1, ran.log
    assert ran.jobs["Watchdog"] == "success"
    assert ran.jobs["Verdict"] == "failure"
    (gpu,) = [name for name in ran.jobs if name.startswith("GPU job")]
    assert ran.jobs[gpu] == "failure"
    assert "policy gpu needs an NVIDIA GPU" in ran.said(gpu)
    assert "the job failed" in ran.said("Verdict")


def test_a_label_that_nobody_serves_turns_the_gpu_gate_red(ropecheck: Path) -> None:
    """act skips the job and goes on; its result is empty, and that is no success."""
    ran = run(ropecheck, "--workflow", "gpu-gate", "--runners", "ubuntu-24.04")
    assert ran.status == 1, ran.log
    assert ran.jobs["gpu"] == "no result"
    assert ran.jobs["Verdict"] == "failure"
    assert "no runner took it" in ran.said("Verdict")


REFUSAL = """  NAME:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@9c091bb21b7c1c1d1991bb908d89e4e9dddfe3e0 # v7.0.0
        with:
          persist-credentials: false
      - uses: OWNER/ropecheck/.github/actions/verify@0000000000000000000000000000000000000000 # v0.1.0
        with:
          candidate: rope.py
          policy: gpu.toml
          devices: none
          evidence: evidence/NAME
"""
GPU_POLICY = """plan = "smoke"

[[require]]
candidates = ["consumer/rope"]
judgements = ["purity"]
devices = ["cuda"]

[[may_block]]
candidates = ["consumer/rope"]
judgements = ["purity"]
devices = ["cuda"]
reason = "there was no GPU for a while"
expires = 2020-01-01
"""
H200 = {"name": "NVIDIA H200", "compute capability": "9.0", "memory": 143771, "multiprocessors": 132}


@dataclass(frozen=True)
class Committed:
    """A consumer's repository, and evidence in it of a GPU that never was."""

    folder: Path

    def record(self) -> dict[str, Any]:
        """A real run of the candidate as it stands, on the CPU, turned into one on a GPU."""
        command = [str(ROPECHECK), "verify", "rope.py", "--plan", "smoke", "--judgement", "purity", "--device", "cpu"]
        done = subprocess.run(
            [*command, "-n", "1", "--out", "recorded"], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        document = copy.deepcopy(dict(load(self.folder / "recorded").documents[0]))
        shutil.rmtree(self.folder / "recorded")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            asked = looked_up(["rope.py"], ["smoke"]).candidates["consumer/rope"].asked["smoke"]
        ((number, digest),) = [asked[key] for key in asked if key == ("purity", "cuda", "float32")]
        document["environment"]["gpus"] = [H200]
        document["cells"] = [
            {"candidate": "consumer/rope", "contract": "neox", "judgement": "purity", "device": "cuda",
             "dtype": "float32", "pass": number, "cases": digest, "reasons": [], "elements": 1, "certified points": 0}
        ]  # fmt: skip
        return document

    def write(self, name: str, document: dict[str, Any]) -> Path:
        out = self.folder / "evidence" / name
        close(prepare(out), out, document)
        return out


def test_bad_evidence_and_permissions_turn_a_run_red(tmp_path: Path, ropecheck: Path) -> None:
    """One run, a job for each: with what was committed from a GPU it is green; tampered with, of other sources, absent,
    or blocked under a permission that has expired it is red, each with its own sentence."""
    shutil.copytree(CONSUMER, tmp_path / "consumer", ignore=NOT_SOURCES)
    consumer = Committed(tmp_path / "consumer")
    kernel = consumer.folder / "rope.py"
    kernel.write_text(kernel.read_text().replace('devices=("cpu",)', 'devices=("cpu", "cuda")'))
    document = consumer.record()
    kept = consumer.write("kept", document)
    (cell,) = document["cells"]
    blocked = {k: v for k, v in cell.items() if k != "pass"} | {"blocked": cell["pass"], "reasons": ["out of memory"]}
    consumer.write("expired", document | {"cells": [blocked]})
    sources = copy.deepcopy(document["candidates"])
    sources[0]["sources"] = {"sha256": "0" * 64, "files": dict.fromkeys(sources[0]["sources"]["files"], "0" * 64)}
    consumer.write("stale", document | {"candidates": sources})
    shutil.copytree(kept, consumer.folder / "evidence" / "tampered")
    with (consumer.folder / "evidence" / "tampered" / "evidence.json").open("a") as stream:
        stream.write(" ")
    (consumer.folder / "evidence" / "empty").mkdir()
    (consumer.folder / "evidence" / "empty" / ".keep").touch()
    sentences = {
        "kept": "gate gpu.toml: green",
        "tampered": "evidence.json",
        "stale": "stale",
        "empty": "manifest.json",
        "expired": "expired",
    }
    jobs = "".join(REFUSAL.replace("NAME", name) for name in sentences)
    workflow = consumer.folder / ".github" / "workflows" / "refusals.yml"
    workflow.write_text(f"name: refusals\non: [pull_request]\npermissions: {{}}\njobs:\n{jobs}")
    (consumer.folder / "gpu.toml").write_text(GPU_POLICY)
    committed(consumer.folder)
    ran = run(consumer.folder, "--workflow", "refusals", "--repository", f"OWNER/ropecheck={ropecheck}")
    assert ran.status == 1, ran.log
    for name, sentence in sentences.items():
        assert sentence in ran.said(name), f"{name}: {ran.said(name)}"
    assert ran.jobs == {name: "success" if name == "kept" else "failure" for name in sentences}, ran.log
