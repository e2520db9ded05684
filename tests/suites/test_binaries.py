"""provenance of shared libraries: what a candidate declares must exist and be loaded by the process of the call."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from ropecheck.suites.candidates import Candidate, CandidateError
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.verdicts import Verdict


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    (a, b), c, s = x.float().chunk(2, dim=-1), cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def judged(*binaries: str) -> Verdict:
    """The verdict of one provenance case on a candidate that declares ``binaries``."""
    candidate = Candidate("c", "neox", rotate, devices=("cpu",), binaries=binaries)
    selection = Selection("smoke", judgements=["provenance"], dtypes=["float32"])
    return judge(candidate, next(iter(questions(candidate, selection))), 0)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of a shared library that every Python process can load, and that nobody has loaded from here."""
    here = Path(torch.__file__).parent / "lib" / "libshm.so"
    small = here if here.is_file() else Path(torch._C.__file__)
    return Path(shutil.copy(small, tmp_path / "libmine.so"))


def test_a_loaded_library_is_hashed(library: Path) -> None:
    """Its full path and SHA-256 are facts, also where the candidate names it through a link."""
    ctypes.CDLL(str(library))
    link = library.with_name("link.so")
    link.symlink_to(library)
    verdict = judged(str(link))
    assert verdict.verdict == "pass"
    assert verdict.facts["binaries"] == {str(library.resolve()): hashlib.sha256(library.read_bytes()).hexdigest()}


def test_a_library_that_does_not_exist_fails(tmp_path: Path) -> None:
    """Declared and absent."""
    verdict = judged(str(tmp_path / "nowhere.so"))
    assert (verdict.verdict, verdict.reason) == ("fail", f"declared binary {tmp_path / 'nowhere.so'} does not exist")


def test_a_library_that_is_not_loaded_fails(library: Path) -> None:
    """Something else computed the result than the library that the candidate declares."""
    verdict = judged(str(library))
    assert verdict.verdict == "fail"
    assert "is not loaded by the process" in verdict.reason


def test_a_library_that_was_replaced_after_loading_fails(library: Path) -> None:
    """The file that would be hashed is not the one that runs."""
    ctypes.CDLL(str(library))
    content = library.read_bytes()
    library.unlink()
    library.write_bytes(content)
    assert judged(str(library)).verdict == "fail"


def test_without_binaries_nothing_is_asked() -> None:
    """A candidate of torch operations declares none."""
    verdict = judged()
    assert (verdict.verdict, verdict.facts["binaries"]) == ("pass", {})


def test_binaries_must_be_a_tuple_of_strings() -> None:
    """A lone string would be taken for a sequence of letters."""
    with pytest.raises(CandidateError, match=r"binaries must be a tuple of strings, not 'lib\.so'"):
        Candidate("c", "neox", rotate, binaries="lib.so")
