"""provenance: where declared files lie, what is hashed, and which candidates owe a Triton kernel."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ropecheck.suites.candidates import load_candidates
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.verdicts import Verdict

_ROTATE = """
import torch

def rotate(x, cos, sin):
    (a, b), c, s = x.float().chunk(2, dim=-1), cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)
"""
_CANDIDATES = """
from ropecheck.suites import Candidate
{definition}
CANDIDATES = [Candidate("mine/c", "neox", {run}, devices=("cpu",){more})]
"""
_KERNEL = """
import functools
triton = __import__("pytest").importorskip("triton")

@triton.jit
def rotation_kernel(pointer):
    pass

LAUNCH = False

def fallback(x, cos, sin):
    if LAUNCH:
        rotation_kernel[(1,)](x)
    return rotate(x, cos, sin)

def dispatched(x, cos, sin):
    return TABLE["only"](x, cos, sin)

def given(kernel, x, cos, sin):
    return rotate(x, cos, sin)

def made(kernel):
    return lambda x, cos, sin: rotate(x, cos, sin) if kernel else None

class Module(torch.nn.Module):
    def forward(self, x, cos, sin):
        return fallback(x, cos, sin)

TABLE = {"only": fallback}
"""


def judged(path: Path) -> Verdict:
    """The verdict of one provenance case on the only candidate of the file."""
    (candidate,) = load_candidates(str(path))
    selection = Selection("smoke", judgements=["provenance"], dtypes=["float32"])
    return judge(candidate, next(iter(questions(candidate, selection))), 0)


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the candidate file; the module that defines run lies in another folder."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "rope_that_lies_elsewhere.py").write_text(_ROTATE)
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    (tmp_path / "candidates").mkdir()
    return tmp_path / "candidates"


def written(folder: Path, more: str) -> Path:
    path = folder / "listed.py"
    path.write_text(
        _CANDIDATES.format(definition="from rope_that_lies_elsewhere import rotate", run="rotate", more=f", {more}")
    )
    return path


def test_sources_lie_relative_to_the_candidate_file(apart: Path) -> None:
    """Not beside the module that defines run; and both of these files are hashed as well."""
    (apart / "kernel.cu").write_text("mine")
    path = written(apart, 'sources=("kernel.cu",)')
    verdict = judged(path)
    assert verdict.verdict == "pass"
    expected = {p.name: p for p in (path, apart / "kernel.cu", apart.parent / "library/rope_that_lies_elsewhere.py")}
    assert verdict.facts["sources"] == {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in expected.items()}


def test_a_source_beside_the_module_alone_does_not_exist(apart: Path) -> None:
    """What lies in the library's folder is not the candidate's file's neighbour."""
    (apart.parent / "library" / "kernel.cu").write_text("theirs")
    verdict = judged(written(apart, 'sources=("kernel.cu",)'))
    assert (verdict.verdict, verdict.reason) == ("fail", "declared source kernel.cu does not exist")


def test_binaries_lie_relative_to_the_candidate_file(apart: Path) -> None:
    """The path that is looked for is named."""
    verdict = judged(written(apart, 'binaries=("mine.so",)'))
    assert (verdict.verdict, verdict.reason) == ("fail", f"declared binary {apart / 'mine.so'} does not exist")


@pytest.mark.parametrize(
    "run", ["fallback", "dispatched", "functools.partial(given, rotation_kernel)", "made(rotation_kernel)", "Module()"]
)
def test_a_candidate_that_refers_to_a_kernel_owes_it(tmp_path: Path, run: str) -> None:
    """Directly, through a table, a partial function, a closure or a class: a kernel that never runs is a fallback."""
    path = tmp_path / "kernels.py"
    path.write_text(_CANDIDATES.format(definition=_ROTATE + _KERNEL, run=run, more=""))
    verdict = judged(path)
    assert verdict.verdict == "fail"
    assert "['rotation_kernel'] ran: a silent fallback" in verdict.reason


def test_a_kernel_that_nothing_refers_to_is_owed(tmp_path: Path) -> None:
    """It stands in the file as if it were what runs."""
    path = tmp_path / "kernels.py"
    orphan = _KERNEL.partition("LAUNCH = ")[0]
    path.write_text(_CANDIDATES.format(definition=_ROTATE + orphan, run="rotate", more=""))
    assert "a silent fallback" in judged(path).reason


def test_a_candidate_that_only_shares_a_file_with_a_kernel_owes_nothing(tmp_path: Path) -> None:
    """Plain torch operations beside a kernel are no fallback; with ``kernels`` they are held to what they name."""
    path = tmp_path / "kernels.py"
    path.write_text(_CANDIDATES.format(definition=_ROTATE + _KERNEL, run="rotate", more=""))
    assert judged(path).verdict == "pass"
    more = ', kernels=("rotation_kernel",)'
    path.write_text(_CANDIDATES.format(definition=_ROTATE + _KERNEL, run="rotate", more=more))
    assert "kernel rotation_kernel was not seen to run" in judged(path).reason
