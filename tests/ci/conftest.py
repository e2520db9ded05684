"""Small candidates, and the command run in this process or as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropecheck.ci.cli import main

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
