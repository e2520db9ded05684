"""Small candidates, and the command run in this process or as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.cli import main
from ropecheck.ci.evidence.writing import close, document, prepare, with_sources
from ropecheck.suites.verdicts import Verdict

# An unpinned contract: no run of these tests waits for a vendor's package to import.
_RIGHT = """
import torch
from ropecheck.suites import Candidate

def rotate(x, cos, sin):
    (a, b), c, s = x.float().chunk(2, dim=-1), cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

CANDIDATES = [Candidate(name="mine/right", contract="neox", run=rotate, devices=("cpu",))]
"""

Command = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def right() -> str:
    """The text of a candidate file that passes."""
    return _RIGHT


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``ropecheck`` in an empty folder, in this process; returns status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Command:
    """Run ``ropecheck`` in an empty folder, in a process of its own."""

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "ropecheck.ci", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=dict(os.environ), check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    """A folder with a right and a wrong candidate file."""
    (tmp_path / "right.py").write_text(_RIGHT)
    wrong = _RIGHT.replace("mine/right", "mine/wrong").replace("b * c + a * s", "b * c - a * s")
    (tmp_path / "wrong.py").write_text(wrong)
    return tmp_path


ENVIRONMENT: dict[str, Any] = {
    "ropecheck": "0", "python": "3.12.1", "platform": "Linux", "processors": 2, "vector instructions": "AVX2",
    "torch": "2.11.0", "cuda runtime": None, "cuda driver": None, "driver": None, "gpus": [], "native library": {},
    "sources": dict.fromkeys(("oracle", "kernels", "suites"), 64 * "a"), "exact arithmetic": "mpmath",
    "runner": "person", "run url": None, "commit": {"id": 40 * "c", "dirty": False},
    **dict.fromkeys(("triton", "numpy", "mpmath", "python-flint", "diffusers", "transformers", "pytest")),
}  # fmt: skip
RUN: dict[str, Any] = {
    "kind": "verify", "candidates": ["mine.py"], "selection": {"plan": "smoke"}, "seed": 0, "workers": 1,
    "exit status": 0, "started": "2026-07-01T12:00:00+00:00", "seconds": 1.5, "policy": None,
}  # fmt: skip


@dataclass(frozen=True)
class MadeRun:
    """Evidence of a run that did not happen, of a candidate whose file is real."""

    folder: Path
    inventory: list[dict[str, Any]]

    def verdict(self, case: str = "one", verdict: str = "pass", **changed: Any) -> Verdict:
        given = {"candidate": "mine/right", "contract": "neox", "judgement": "purity", "device": "cpu"}
        given |= {"dtype": "float32", "case": f"purity/cpu/float32/{case}", "verdict": verdict, **changed}
        return Verdict(**given)

    def document(self, verdicts: Sequence[Verdict], **changed: Any) -> dict[str, Any]:
        """A document; ``changed`` are members of its run, or of its environment by names with underscores."""
        environment = ENVIRONMENT | {k: v for k, v in changed.items() if k in ENVIRONMENT}
        run = RUN | {k.replace("_", " "): v for k, v in changed.items() if k not in ENVIRONMENT}
        return document(with_sources(self.inventory), verdicts, environment, [], run)

    def written(self, name: str, verdicts: Sequence[Verdict], **changed: Any) -> Path:
        """A folder of evidence with a log beside the documents."""
        out = self.folder / name
        partial = prepare(out)
        (partial / "cpu").mkdir()
        (partial / "cpu" / "pytest.log").write_text("1 passed\n")
        close(partial, out, self.document(verdicts, **changed), verdicts)
        return out


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    (tmp_path / "mine.py").write_text(_RIGHT)
    files = {"entry": str(tmp_path / "mine.py"), "module": "", "run": {}, "sources": {}}
    entry = {
        "name": "mine/right", "specification": "mine.py", "contract": "neox", "family": "rotate", "provides": ["vjp"],
        "devices": ["cpu", "cuda"], "dtypes": ["float32"], "unavailable": "", "files": files,
    }  # fmt: skip
    return MadeRun(tmp_path, [entry])
