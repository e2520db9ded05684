"""Ways to cheat or to break the gate: each begins with a gate that is green and must turn it red, naming the cause."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci import gate_command
from ropecheck.ci.at_hand import AtHand, looked_up
from ropecheck.ci.cli import main
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.evidence.writing import close, prepare

CANDIDATE = """
import torch
from ropecheck.suites import Candidate
from turned import turned

def rotate(x, cos, sin):
    return turned(x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)).to(x.dtype)

CANDIDATES = [
    Candidate(name="mine/right", contract="neox", run=rotate, devices=("cpu", "cuda"), provides=("vjp",),
              dtypes=("float32", "bfloat16")),
]
"""
TURNED = """
import torch

def turned(x, c, s):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1)
"""
POLICY = """plan = "smoke"
max_age_days = 30

[toolchain]
torch = ">=2.10,<3"

[sensitivity]
coverage = 1.0
faults = 100

[[benchmark]]
name = "rotate"
device = "NVIDIA H200"
ratio = 1.05

[[require]]
candidates = ["mine/right"]
judgements = ["purity", "repeatability"]
devices = ["cpu"]
cases = 2
dtypes = ["float32", "bfloat16"]
claims = ["vjp"]

[[require]]
candidates = ["mine/*"]
judgements = ["purity", "device-guard"]
devices = ["cuda"]
dtypes = ["float32"]

[[may_block]]
candidates = ["mine/*"]
judgements = ["device-guard"]
devices = ["cuda"]
gpus = 1
reason = "there is one GPU"
expires = 9999-01-01
"""
H200 = {"name": "NVIDIA H200", "compute capability": "9.0", "memory": 143771, "multiprocessors": 132}
QUICK = ("--judgement", "purity", "--judgement", "repeatability", "--device", "cpu", "--plan", "smoke", "-n", "1")

Document = dict[str, Any]


def quiet(*arguments: str) -> int:
    with redirect_stdout(StringIO()):
        return main(arguments)


def written(document: Document, out: Path) -> Path:
    """The compact form of a document with a manifest and a statement that fit it, as whoever cheats would write it."""
    close(prepare(out), out, document)
    return out


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A candidate that was judged for real on the CPU, and made evidence of a GPU, of sensitivity, of a benchmark."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "mine.py").write_text(CANDIDATE)
    (folder / "turned.py").write_text(TURNED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert quiet("verify", "mine.py", *QUICK, "--out", "cpu") == 0
        at_hand = looked_up(["mine.py"], ["smoke"])
    asked = at_hand.candidates["mine/right"].asked["smoke"]
    cpu = copy.deepcopy(dict(load(folder / "cpu").documents[0]))
    gpu = copy.deepcopy(cpu)
    gpu["environment"]["gpus"] = [H200]
    gpu["cells"] = [
        {"candidate": "mine/right", "contract": "neox", "judgement": judgement, "device": device, "dtype": dtype,
         "pass": number, "cases": digest, "reasons": [], "elements": 1, "certified points": 0}
        for (judgement, device, dtype), (number, digest) in sorted(asked.items())
        if device == "cuda" and judgement == "purity"
    ]  # fmt: skip
    gpu["cells"].append({**gpu["cells"][0], "judgement": "device-guard", "dtype": "", "blocked": 1,
                         "reasons": ["device-guard needs two GPUs"]})  # fmt: skip
    del gpu["cells"][-1]["pass"]
    gpu["judging"] = {name: at_hand.judging[name] for name in ("purity", "device-guard")}
    gpu["benchmarks"] = [{"name": "rotate", "device": "NVIDIA H200", "ratio": 1.01, "spread": 0.01}]
    written(gpu, folder / "gpu")
    sensitive = {**cpu, "cells": [], "candidates": [], "judging": {}, "run": {**cpu["run"], "kind": "sensitivity"}}
    sensitive["sensitivity"] = {"faults": 210, "judged": 200, "seen": 200, "blocked": 6, "equivalent": 4,
                                "coverage": 1.0, "survivors": [], "judging": at_hand.sensitivity}  # fmt: skip
    written(sensitive, folder / "sensitivity")
    return folder


@pytest.fixture(scope="session")
def known(recorded: Path) -> AtHand:
    """What is at hand while nobody has changed the candidate: looked up once for all attacks on evidence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(recorded)
        return looked_up(["mine.py"], ["smoke"])


@dataclass
class Bench:
    """A gate that is green, in a folder of its own, to be attacked."""

    folder: Path
    known: AtHand
    patch: pytest.MonkeyPatch
    evidence: list[str] = field(default_factory=lambda: ["cpu", "gpu", "sensitivity"])
    policy: str = POLICY
    options: list[str] = field(default_factory=list)
    changed: bool = False

    def edit(self, name: str, change: Callable[[Document], Any]) -> None:
        """Change the document of a folder and make statement and manifest fit it: the compact form, which has no
        verdicts to be counted again."""
        document = copy.deepcopy(dict(load(self.folder / name).documents[0]))
        change(document)
        shutil.rmtree(self.folder / name)
        written(document, self.folder / name)

    def cell(self, name: str, **changes: Any) -> None:
        """Change the first cell of a folder's document; a count of None is left out."""
        self.edit(name, lambda d: d["cells"].__setitem__(0, _without_none({**d["cells"][0], **changes})))

    def more(self, name: str, change: Callable[[Document], Any]) -> None:
        """Add a changed copy of a folder."""
        shutil.copytree(self.folder / name, self.folder / "more")
        self.evidence.append("more")
        self.edit("more", change)

    def candidate(self, old: str, new: str, file: str = "mine.py") -> None:
        """Change the candidate's sources: they are then looked up anew."""
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new))
        self.changed = True

    def rule(self, old: str, new: str) -> None:
        """Change the policy."""
        assert old in self.policy
        self.policy = self.policy.replace(old, new)

    def needs(self, **results: Any) -> None:
        """Say what became of other jobs."""
        jobs = {name: result if isinstance(result, dict) else {"result": result, "outputs": {}}
                for name, result in results.items()}  # fmt: skip
        self.patch.setenv("NEEDS", json.dumps(jobs))
        self.options.append("--needs")

    def gate(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
        """Exit status, and everything printed."""
        (self.folder / "policy.toml").write_text(self.policy)
        if not self.changed:
            self.patch.setattr(gate_command, "looked_up", lambda specifications, plans: self.known)
        capsys.readouterr()
        status = main(["gate", "--policy", "policy.toml", "--candidate", "mine.py", *self.options, *self.evidence])
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())


def _without_none(cell: Document) -> Document:
    return {name: value for name, value in cell.items() if value is not None}


@pytest.fixture
def bench(recorded: Path, known: AtHand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A copy of the green gate, in the working directory."""
    folder = tmp_path / "gate"
    shutil.copytree(recorded, folder)
    monkeypatch.chdir(folder)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "NEEDS"):
        monkeypatch.delenv(name, raising=False)
    return Bench(folder, known, monkeypatch)


def at(**ago: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(**ago)).isoformat(timespec="seconds")


def raw(name: str, text: Callable[[str], str]) -> Callable[[Bench], None]:
    """Change the text of a folder's evidence and the hash that the manifest has of it."""

    def attack(bench: Bench) -> None:
        path = bench.folder / name / "evidence.json"
        path.write_text(text(path.read_text()))
        manifest = bench.folder / name / "manifest.json"
        content = json.loads(manifest.read_text())
        content["sha256"]["evidence.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(content))

    return attack


def member(name: str, content: str = "x") -> Callable[[Bench], None]:
    """Pack a folder and add a member to the archive."""

    def attack(bench: Bench) -> None:
        with zipfile.ZipFile(bench.folder / "cpu.zip", "w") as archive:
            for path in sorted((bench.folder / "cpu").rglob("*")):
                archive.write(path, path.relative_to(bench.folder / "cpu"))
            archive.writestr(name, content)
        bench.evidence[0] = "cpu.zip"

    return attack


def emptied(bench: Bench) -> None:
    shutil.rmtree(bench.folder / "cpu")
    (bench.folder / "cpu").mkdir()


def relisted(bench: Bench) -> None:
    path = bench.folder / "cpu" / "manifest.json"
    content = json.loads(path.read_text())
    content["sha256"]["../mine.py"] = "0" * 64
    path.write_text(json.dumps(content))


def counted_anew(bench: Bench) -> None:
    """The full form, its count edited and its manifest made to fit: the verdicts say otherwise."""
    raw("cpu", lambda text: text.replace('"pass":2', '"pass":3'))(bench)


def of_the_document(name: str, change: Callable[[Document], Any]) -> Callable[[Bench], None]:
    return lambda bench: bench.edit(name, change)


def of_the_cell(name: str, **changes: Any) -> Callable[[Bench], None]:
    return lambda bench: bench.cell(name, **changes)


def rule(old: str, new: str) -> Callable[[Bench], None]:
    return lambda bench: bench.rule(old, new)


def needing(**results: Any) -> Callable[[Bench], None]:
    return lambda bench: bench.needs(**results)


def waiting(output: str) -> Callable[[Bench], None]:
    """Say that the jobs which the watchdog watches have not begun."""

    def attack(bench: Bench) -> None:
        bench.needs(watchdog={"result": "success", "outputs": {output: "true"}})
        bench.evidence.remove("gpu")

    return attack


def of_sensitivity(**changes: Any) -> Callable[[Bench], None]:
    return lambda bench: bench.edit("sensitivity", lambda d: d["sensitivity"].update(changes))


def twice(where: str, key: str) -> Callable[[Bench], None]:
    return of_the_document(where, lambda d: d[key].append(d[key][0]))


OVERRIDE = """
[[override]]
candidates = ["mine/right"]
judgements = ["purity"]
devices = ["cpu"]
who = "A. Person"
why = "the release cannot wait"
expires = 9999-01-01
"""


def overriding(old: str, new: str) -> Callable[[Bench], None]:
    def attack(bench: Bench) -> None:
        bench.cell("cpu", fail=1, **{"pass": 1})
        bench.policy += OVERRIDE
        bench.rule(old, new)

    return attack


Attack = tuple[Callable[[Bench], Any], int, str]
"""What is done, the exit status, and what the gate must say."""

ON_FOLDERS: dict[str, Attack] = {
    "no evidence at all": (lambda b: b.evidence.clear(), 1, "mine/right x purity, device-guard x cuda: no evidence"),
    "a folder that is not there": (lambda b: b.evidence.append("gone"), 2, "gone does not exist"),
    "an empty folder": (emptied, 2, "cpu holds no manifest.json: the run that wrote it did not end"),
    "a half-written folder": (lambda b: (b.folder / "cpu/manifest.json").unlink(), 2, "cpu holds no manifest.json"),
    "a tampered file": (
        lambda b: (b.folder / "cpu/evidence.json").write_text("{}"), 2, "evidence.json is not as manifest.json says",
    ),
    "a tampered log": (
        lambda b: (b.folder / "cpu/cpu/pytest.log").write_text("all passed"), 2, "pytest.log is not as manifest.json",
    ),
    "a file that was added": (lambda b: (b.folder / "cpu/new").write_text("x"), 2, "new is not in manifest.json"),
    "a file that was removed": (lambda b: (b.folder / "cpu/verdicts.json").unlink(), 2, "verdicts.json is in manifest"),
    "an edited count, rehashed": (counted_anew, 2, "does not count in mine/right x"),
    "an edited statement": (raw("gpu", lambda t: t.replace("H200", "H300")), 2, "statement.json does not say what"),
    "a path that leads out": (relisted, 2, "names ../mine.py, which leads out of the folder"),
    "a member that leads out": (member("../out.py"), 2, "the member ../out.py leads out of the folder"),
    "an absolute member": (member("/out.py"), 2, "the member /out.py leads out of the folder"),
    "a member that nobody listed": (member("more.json"), 2, "more.json is not in manifest.json"),
    "no zip file": (lambda b: b.evidence.append("mine.py"), 2, "mine.py is neither a folder nor a zip file"),
    "an unknown schema version": (raw("gpu", lambda t: t.replace("evidence/1", "evidence/9")), 2, "ce/9, and not"),
    "a key twice": (raw("gpu", lambda t: '{"schema":"x",' + t[1:]), 2, "holds the key 'schema' twice"),
    "a NaN": (raw("gpu", lambda t: t.replace('"ratio":1.01', '"ratio":NaN')), 2, "holds NaN, which is no number"),
    "a number that is too large": (raw("gpu", lambda t: t.replace("1.01", "1e999")), 2, "holds the number 1e999"),
    "deep JSON": (raw("gpu", lambda t: "[" * 5000 + "]" * 5000), 2, "deep inside one another"),
    "no JSON": (raw("gpu", lambda t: "passed"), 2, "evidence.json is not JSON"),
    "huge JSON": (raw("gpu", lambda t: t + " " * (64 << 20)), 2, "evidence.json is larger than 64 MiB"),
    "a duplicate cell": (twice("gpu", "cells"), 2, "holds the cell mine/right x purity x cuda"),
    "a duplicate candidate": (twice("gpu", "candidates"), 2, "lists candidate mine/right twice"),
    "zero cases": (of_the_cell("gpu", **{"pass": None}), 2, "mine/right x purity x cuda x bfloat16 without a case"),
    "a renamed verdict": (of_the_cell("gpu", passed=9), 2, "holds passed, which evidence has not"),
}  # fmt: skip

ON_EVIDENCE: dict[str, Attack] = {
    "a fail": (of_the_cell("cpu", fail=1, **{"pass": 1, "reasons": ["9 outside"]}), 1, "x cpu: 1 fail: 9 outside"),
    "a renamed case": (of_the_cell("cpu", cases="0" * 64), 1, "other cases in bfloat16 were judged than plan"),
    "a lowered case count": (of_the_cell("cpu", **{"pass": 1}), 1, "1 cases in bfloat16 were judged, and plan"),
    "a raised case count": (of_the_cell("cpu", **{"pass": 99}), 1, "99 cases in bfloat16 were judged, and plan"),
    "a dtype dropped": (of_the_document("cpu", lambda d: d["cells"].pop(0)), 1, "0 cases in bfloat16, 2 are required"),
    "a judgement not run": (
        of_the_document("cpu", lambda d: d.update(cells=[c for c in d["cells"] if c["judgement"] == "purity"])), 1,
        "mine/right x repeatability x cpu: no evidence holds this cell",
    ),
    "not one cell": (
        lambda b: [b.edit(name, lambda d: d.update(cells=[])) for name in ("cpu", "gpu")], 1,
        "the evidence holds not one judged cell",
    ),
    "a smaller plan": (rule('"smoke"', '"standard"'), 1, "plan smoke was asked, which is less than standard"),
    "an unknown plan": (
        of_the_document("cpu", lambda d: d["run"]["selection"].update(plan="tiny")), 2, "standard, full, not tiny",
    ),
    "not applicable": (
        of_the_cell("cpu", **{"pass": None, "not-applicable": 2, "reasons": ["a teapot"]}), 1,
        "2 not-applicable in bfloat16: a teapot",
    ),
    "blocked without permission": (
        of_the_cell("cpu", **{"pass": None, "blocked": 2, "reasons": ["out of memory"]}), 1,
        "blocked mine/right x purity x cpu: 2 blocked in bfloat16: out of memory",
    ),
    "blocked on a machine with more GPUs": (
        of_the_document("gpu", lambda d: d["environment"].update(gpus=[H200, H200])), 1,
        "blocked mine/right x device-guard x cuda: 1 blocked",
    ),
    "another judge": (
        of_the_document("cpu", lambda d: d["judging"]["purity"].update(neox="0" * 64)), 1,
        "the code that judges purity for contract neox has changed since",
    ),
    "a judge that is not named": (
        of_the_document("cpu", lambda d: d["judging"].pop("purity")), 2, "does not say what code judged",
    ),
    "other sources": (
        of_the_document("cpu", lambda d: d["candidates"][0]["sources"].update(sha256="0" * 64)), 1,
        "the candidate's sources have changed since: the files are the same, their total is not",
    ),
    "another contract": (
        of_the_document("gpu", lambda d: [d["candidates"][0].update(contract="qwen-image"),
                                          *(c.update(contract="qwen-image") for c in d["cells"]),
                                          *(j.update({"qwen-image": "0" * 64}) for j in d["judging"].values())]), 1,
        "the candidate was judged by contract qwen-image, and its contract is neox",
    ),
    "a toolchain out of range": (
        of_the_document("cpu", lambda d: d["environment"].update(torch="2.9.1+cu128")), 1,
        "recorded with torch 2.9.1+cu128, and the policy allows >=2.10,<3",
    ),
    "a toolchain that is no version": (
        of_the_document("cpu", lambda d: d["environment"].update(torch="new")), 1, "recorded with torch new, and",
    ),
    "too old": (of_the_document("cpu", lambda d: d["run"].update(started=at(days=40))), 1, "evidence is 40 days old"),
    "a clock in the future": (
        of_the_document("cpu", lambda d: d["run"].update(started=at(hours=-2))), 1, "was recorded in the future",
    ),
    "no time": (of_the_document("cpu", lambda d: d["run"].update(started="today")), 2, "today, which is not of"),
    "cuda cells of a machine without a GPU": (
        of_the_document("gpu", lambda d: d["environment"].update(gpus=[])), 1, "recorded on a machine without a GPU",
    ),
    "an unknown candidate": (
        lambda b: b.more("cpu", lambda d: [d["candidates"][0].update(name="your/own"),
                                           *(c.update(candidate="your/own") for c in d["cells"])]), 1,
        "stale your/own x purity, repeatability x cpu: unknown cell: no candidate of that name is at hand",
    ),
    "an unknown judgement": (
        lambda b: b.more("cpu", lambda d: [d["judging"].update(beauty={"neox": "0" * 64}),
                                           d["cells"][0].update(judgement="beauty")]), 1,
        "mine/right x beauty x cpu: unknown cell: no judgement has that name",
    ),
    "an unknown dtype": (
        lambda b: b.more("cpu", lambda d: d["cells"][0].update(dtype="float16")), 1,
        "unknown cell: plan smoke asks it nothing in float16",
    ),
    "a fail beside a pass": (
        lambda b: b.more("cpu", lambda d: d["cells"][0].update({"fail": 1, "pass": 1, "reasons": ["late"]})), 1,
        "passes on a machine without a GPU (torch",
    ),
    "a fail that nobody requires": (
        lambda b: b.more("gpu", lambda d: [d.update(judging={"laws": b.known.judging["laws"]}),
                                           d.update(cells=[{**d["cells"][0], "judgement": "laws",
                                                            "fail": 1, "reasons": ["9 outside"]}])]), 1,
        "mine/right x laws x cuda: 1 fail: 9 outside; no policy requires it, and none excuses it",
    ),
    "a fail that was taken out": (
        of_the_document("cpu", lambda d: d["run"].update({"exit status": 1})), 1, "none of its cells holds a failure",
    ),
    "a judge that failed": (
        of_the_document("cpu", lambda d: d["run"].update({"exit status": 4})), 1, "the judge itself failed in a run",
    ),
    "no sensitivity": (lambda b: b.evidence.pop(), 1, "no evidence says which faults the suite sees"),
    "sensitivity of another suite": (of_sensitivity(judging="0" * 64), 1, "the suite or its faults have changed since"),
    "a surviving fault": (
        of_sensitivity(seen=199, survivors=["swapped-axes"], coverage=0.995), 1, "199 of 200 faults are seen",
    ),
    "a surviving fault and its old share": (of_sensitivity(seen=199, survivors=["swapped-axes"]), 2, "do not agree"),
    "fewer faults": (
        of_sensitivity(faults=60, judged=50, seen=50), 1, "50 faults were judged, and the policy requires 100",
    ),
    "no benchmark": (of_the_document("gpu", lambda d: d.pop("benchmarks")), 1, "no evidence holds this benchmark"),
    "a slow benchmark": (
        of_the_document("gpu", lambda d: d["benchmarks"][0].update(ratio=1.2)), 1,
        "benchmark x rotate on NVIDIA H200: it takes 1.2 times as long, and the policy allows 1.05",
    ),
}  # fmt: skip

ON_SOURCES: dict[str, Attack] = {
    "another candidate": (lambda b: b.candidate("x.float()", "x.double().float()"), 1, "have changed since: mine.py"),
    "another file that it imports": (
        lambda b: b.candidate("a * c - b * s", "a * c - b * s + 0", "turned.py"), 1, "have changed since: turned.py",
    ),
    "a claim withdrawn": (lambda b: b.candidate('("vjp",)', "()"), 1, "cpu: the candidate does not claim vjp"),
    "a candidate renamed": (lambda b: b.candidate("mine/right", "mine/left"), 1, "no candidate of that name is at"),
    "a candidate that does not import": (lambda b: b.candidate("import torch", "import gone"), 2, "does not import"),
}  # fmt: skip

ON_POLICIES: dict[str, Attack] = {
    "an expired permission": (
        rule("9999-01-01", "2020-01-01"), 1,
        "expired mine/right x device-guard x cuda: 1 blocked in float32: device-guard needs two GPUs; the permission "
        "for it ended on 2020-01-01",
    ),
    "a permission that never ends": (rule("expires = 9999-01-01\n", ""), 2, "expires must be a date"),
    "a permission without reason": (rule('reason = "there is one GPU"', 'reason = ""'), 2, "reason must be a sentence"),
    "a permission for nobody": (
        rule('"mine/*"]\njudgements = ["device-guard"]', '"mime/*"]\njudgements = ["device-guard"]'), 2,
        "'mime/*' with device-guard in [[may_block]] is no required cell",
    ),
    "an unknown key": (rule("cases = 2", "case = 2"), 2, "unknown key 'case' in [[require]]"),
    "an unknown table": (rule("[toolchain]", "[toolchains]"), 2, "unknown key 'toolchains'"),
    "a misspelt judgement": (rule('"purity", "rep', '"purty", "rep'), 2, "judgements holds 'purty'"),
    "a required candidate that is not there": (
        rule('["mine/right"]', '["mine/rihgt"]'), 1, "mine/rihgt x purity, repeatability x cpu: no candidate",
    ),
    "an expired override": (
        overriding("9999-01-01", "2020-01-01"), 1, "the override of A. Person ended on 2020-01-01; it is failed",
    ),
    "an override of nobody": (overriding('who = "A. Person"\n', ""), 2, "who must be a sentence or name"),
    "an override without why": (overriding("the release cannot wait", " "), 2, "why must be a sentence or name"),
}  # fmt: skip

ON_JOBS: dict[str, Attack] = {
    "a job that failed": (needing(cpu="success", gpu="failure"), 1, "job x gpu: the job failed"),
    "a job that was skipped": (needing(cpu="success", gpu="skipped"), 1, "job x gpu: the job was skipped"),
    "a job that was cancelled": (needing(gpu="cancelled"), 1, "job x gpu: the job was cancelled before its end"),
    "a job without result": (needing(gpu=""), 1, "pending job x gpu: the job has no result"),
    "a job with an unknown result": (needing(gpu="neutral"), 1, "the job's result is 'neutral', which is not success"),
    "no job": (needing(), 2, "names no job"),
    "no context": (lambda b: b.options.append("--needs"), 2, "NEEDS, which is not set"),
    "no runner": (
        waiting("no-runner"), 1,
        "pending mine/right x purity, device-guard x cuda: no evidence holds this cell: no GPU runner took the job",
    ),
    "an approval that is awaited": (
        waiting("awaiting-approval"), 1, "no evidence holds this cell: the run awaits approval",
    ),
}  # fmt: skip

ATTACKS = {**ON_FOLDERS, **ON_EVIDENCE, **ON_SOURCES, **ON_POLICIES, **ON_JOBS}


def test_it_starts_green(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Evidence of a CPU, of a GPU that is not here, of sensitivity and of a benchmark: all that the policy asks."""
    bench.changed = True  # nothing is, but it is looked up in earnest
    status, said = bench.gate(capsys)
    assert status == 0, said
    assert said.endswith("gate policy.toml: green")
    assert "blocked (allowed) mine/right x device-guard x cuda" in said


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The gate is red, or refuses the evidence, and says why."""
    attack, status, cause = ATTACKS[name]
    attack(bench)
    found, said = bench.gate(capsys)
    assert (found, cause in said) == (status, True), said
    assert not said.endswith("green")


HOSTILE = "\x1b[2Kgreen\u202e ::error::x <b>|`[a](http://b)`\n## gate: green @someone"


def test_what_is_hostile_stays_text(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """A reason that holds escape sequences, workflow commands, Markdown and HTML works nowhere."""
    bench.cell("cpu", **{"fail": 1, "pass": 1, "reasons": [HOSTILE]})
    summary, output = bench.folder / "summary.md", bench.folder / "output"
    bench.patch.setenv("GITHUB_ACTIONS", "true")
    bench.patch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    bench.patch.setenv("GITHUB_OUTPUT", str(output))
    (bench.folder / "policy.toml").write_text(bench.policy)
    bench.patch.setattr(gate_command, "looked_up", lambda specifications, plans: bench.known)
    status = main(["gate", "--policy", "policy.toml", *bench.evidence])
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert status == 1
    assert "1 fail: \\x1b[2Kgreen" in shown
    assert [c for c in ("\x1b", "\u202e") if c in shown + summary.read_text()] == []
    commands = [line for line in shown.splitlines() if "::" in line]
    assert [line.split("::")[1] for line in commands] == ["error title=ropecheck gate", "warning title=ropecheck gate"]
    assert all(line.count("::") == 2 for line in commands)
    text = summary.read_text()
    assert [part for part in ("<b>", "](", "@someone", "\n## gate") if part in text] == []
    assert text.startswith("## ropecheck gate: red\n")
    assert output.read_text() == "verdict=red\n"


@pytest.mark.parametrize("change", [lambda b: b.rule("[toolchain]", "[tools]"), emptied])
def test_what_is_invalid_is_no_verdict(
    change: Callable[[Bench], None], bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """A workflow that reads the output and not the status finds red, and one annotation."""
    output = bench.folder / "output"
    bench.patch.setenv("GITHUB_ACTIONS", "true")
    bench.patch.setenv("GITHUB_OUTPUT", str(output))
    change(bench)
    status, said = bench.gate(capsys)
    assert status == 2
    assert said.count("::error title=ropecheck gate::") == 1
    assert output.read_text() == "verdict=red\n"


def test_compact_and_packed_evidence_is_the_same(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The compact form, a zip file, and all of it merged: green as the folders are."""
    assert quiet("evidence", "compact", "cpu", "small") == 0
    assert sorted(path.name for path in (bench.folder / "small").iterdir()) == [
        "evidence.json", "manifest.json", "statement.json",
    ]  # fmt: skip
    assert quiet("evidence", "pack", "gpu", "gpu.zip") == 0
    bench.evidence = ["small", "gpu.zip", "sensitivity"]
    assert bench.gate(capsys)[0] == 0
    assert quiet("evidence", "merge", "--out", "all", "cpu", "gpu", "sensitivity") == 0
    bench.evidence = ["all"]
    assert bench.gate(capsys)[0] == 0


def test_an_override_is_never_a_pass(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, and OVERRIDDEN with who and why, in the last line as well; only where something is overridden."""
    bench.policy += OVERRIDE
    assert bench.gate(capsys)[1].endswith("gate policy.toml: green")
    bench.cell("cpu", fail=1, **{"pass": 1})
    output = bench.folder / "output"
    bench.patch.setenv("GITHUB_OUTPUT", str(output))
    status, said = bench.gate(capsys)
    assert status == 0
    assert said.endswith("gate policy.toml: OVERRIDDEN")
    assert "OVERRIDDEN mine/right x purity x cpu" in said
    assert "by A. Person until 9999-01-01: the release cannot wait; it is failed: 1 fail" in said
    assert output.read_text() == "verdict=overridden\n"


def test_stale_evidence_may_be_a_warning(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the policy says so, of other sources, another toolchain or too old; a failure and a gap stay red."""
    bench.patch.setenv("GITHUB_ACTIONS", "true")
    bench.rule('devices = ["cuda"]\ndtypes = ["float32"]', 'devices = ["cuda"]\nstale = "annotate"')
    bench.rule('[[benchmark]]\nname = "rotate"\ndevice = "NVIDIA H200"\nratio = 1.05\n', "")
    bench.edit("gpu", lambda d: d["candidates"][0]["sources"].update(sha256="0" * 64))
    status, said = bench.gate(capsys)
    assert status == 0, said
    assert "stale (allowed) mine/right x purity, device-guard x cuda: the candidate's sources have changed" in said
    assert "::warning title=ropecheck gate::mine/right x purity, device-guard x cuda: stale" in said
    assert "::error" not in said
    bench.cell("gpu", fail=1)
    status, said = bench.gate(capsys)
    assert status == 1
    assert "purity x cuda: 1 fail: no reason is given; and the evidence is stale" in said
    bench.evidence.remove("gpu")
    assert "mine/right x purity, device-guard x cuda: no evidence holds" in bench.gate(capsys)[1]


def test_jobs_that_succeeded_are_green(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a cell of its own."""
    bench.needs(cpu="success", gpu="success", watchdog={"result": "success", "outputs": {"no-runner": "false"}})
    status, said = bench.gate(capsys)
    assert status == 0
    assert "9 cells required, 8 passed, 1 allowed to be blocked, 0 not met" in said


def test_json_says_the_same(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, policy, every cell with its state, and what recorded the evidence."""
    (bench.folder / "policy.toml").write_text(bench.policy)
    bench.patch.setattr(gate_command, "looked_up", lambda specifications, plans: bench.known)
    assert main(["gate", "--json", "--policy", "policy.toml", *bench.evidence]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "green"
    states = {cell["cell"]: cell["state"] for cell in told["cells"]}
    assert states == {
        "mine/right x purity x cpu": "passed", "mine/right x repeatability x cpu": "passed",
        "mine/right x purity x cuda": "passed", "mine/right x device-guard x cuda": "blocked",
        "sensitivity": "passed", "benchmark x rotate on NVIDIA H200": "passed",
    }  # fmt: skip
    assert len(told["evidence"]) == 3
    assert "1 x NVIDIA H200" in told["evidence"][1]


def test_there_is_no_attack_twice() -> None:
    """A name that stands in two tables would be tried once only."""
    assert len(ATTACKS) == sum(map(len, (ON_FOLDERS, ON_EVIDENCE, ON_SOURCES, ON_POLICIES, ON_JOBS)))
