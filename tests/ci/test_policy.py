"""Policies: what is required, and why a cell does not meet it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.policy import PolicyError, Requirement, load_policy, unmet
from ropecheck.suites.verdicts import Verdict

NEED = Requirement(("mine/*",), ("purity",), ("cpu",), cases=2)


def verdicts(*kinds: Any, dtype: str = "float32") -> list[Verdict]:
    return [Verdict("mine/a", "neox", "purity", "cpu", dtype, f"purity/{i}", k, "why") for i, k in enumerate(kinds)]


@pytest.mark.parametrize(
    ("found", "reasons"),
    [
        (verdicts("pass", "pass"), []),
        (verdicts("pass"), ["1 cases in float32, 2 are required"]),
        (verdicts("pass", "pass", "fail"), ["1 fail: why"]),
        (verdicts("pass", "pass", "blocked"), ["1 blocked: why"]),
        (verdicts("not-applicable"), ["1 not-applicable: why"]),
        ([], ["no candidate of that name was judged"]),
        (verdicts("pass", "pass") + verdicts("pass", dtype="float16"), ["1 cases in float16, 2 are required"]),
    ],
)
def test_reasons(found: list[Verdict], reasons: list[str]) -> None:
    """Only enough passes and nothing else meet a requirement."""
    assert [u.reason for u in unmet([NEED], found)] == reasons


def test_missing_cell() -> None:
    """A candidate that was judged on something else only has not met it."""
    other = [Verdict("mine/a", "neox", "refusals", "cpu", "float32", "refusals/0", "pass")]
    assert [u.reason for u in unmet([NEED], other)] == ["missing: no case was judged"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold"),
        ("x = [", "is not TOML"),
        ("[[require]]\ncandidates = ['a']\ndevices = ['cpu']", "judgements must be a list of strings"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['beauty']\ndevices = ['cpu']", "'beauty'"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['tpu']", "'tpu'"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['cpu']\ncases = 0", "cases must be"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['cpu']\nretry = 3", "key 'retry'"),
        ("[other]\nx = 1", "must hold"),
    ],
)
def test_unusable_policy(tmp_path: Path, text: str, says: str) -> None:
    """One sentence that names the file and the key."""
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match="--policy") as refusal:
        load_policy(path)
    assert says in str(refusal.value)
