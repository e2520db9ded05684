"""What a run prints: one table that stays readable, whatever was judged, and the policy's part below it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ropecheck.ci.policy import Policy, RequiredCell, Requirement
from ropecheck.ci.report import held_to, table
from ropecheck.suites.adapters.shipped import CANDIDATES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.verdicts import Verdict

NAMES = [c.name for c in CANDIDATES]


def verdict(candidate: str, judgement: str, kind: Any = "pass", dtype: str = "float32") -> Verdict:
    return Verdict(candidate, "neox", judgement, "cuda", dtype, f"{judgement}/{candidate}", kind, "why")


def printed(*things: Any) -> list[str]:
    """The lines that a log receives."""
    console = Console(file=io.StringIO(), width=140)
    for thing in things:
        console.print(thing)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_many_candidates_have_a_row_each() -> None:
    """Seventeen candidates and every judgement fit a log; only what is not all passed is named."""
    verdicts = [verdict(name, judgement) for name in NAMES for judgement in JUDGEMENTS]
    verdicts += [verdict(NAMES[3], "purity", "fail"), verdict(NAMES[5], "no-copy", "not-applicable")]
    lines = printed(table(verdicts))
    assert len(NAMES) == 17
    assert len(lines) <= len(NAMES) + 6
    rows = {name: next(line for line in lines if name in line) for name in NAMES}
    assert "purity 1 pass, 1 fail" in rows[NAMES[3]]
    assert "no-copy" in rows[NAMES[5]]
    judgements_passed = [int(rows[name].split("│")[3]) for name in NAMES]
    expected = [len(JUDGEMENTS) - (name in (NAMES[3], NAMES[5])) for name in NAMES]
    assert judgements_passed == expected


def test_what_could_not_be_asked_takes_one_line_of_a_row() -> None:
    """On a machine without a GPU a row says that all is blocked, and names what is not alike."""
    verdicts = [verdict(name, judgement, "blocked", "") for name in NAMES for judgement in JUDGEMENTS]
    verdicts = [v for v in verdicts if (v.candidate, v.judgement) != (NAMES[2], "strict-bytes")]
    verdicts.append(verdict(NAMES[2], "strict-bytes", "not-applicable", ""))
    lines = printed(table(verdicts))
    assert sum("all blocked" in line for line in lines) == len(NAMES) - 1
    (row,) = (line for line in lines if NAMES[2] in line)
    assert row.split("│")[5].strip() == "strict-bytes n/a; the others blocked"


@pytest.mark.parametrize("number", [1, 7])
def test_few_candidates_have_every_count(number: int) -> None:
    """Judgement by candidate, as long as that fits one table."""
    lines = printed(table([verdict(f"c{i}", j) for i in range(number) for j in ("purity", "no-copy")]))
    assert next(line for line in lines if "purity" in line).count("1") == number


def test_the_policy_is_summed_up() -> None:
    """Each unmet cell has its state and reason, permitted ones of one reason share a line, and the sum is printed."""
    cells = [
        RequiredCell("a x purity x cuda", "passed"),
        RequiredCell("a x device-guard x cuda", "permitted", "1 blocked: one GPU; allowed: so"),
        RequiredCell("b x device-guard x cuda", "permitted", "1 blocked: one GPU; allowed: so"),
        RequiredCell("b x purity x cuda", "failed", "2 fail: [why]"),
        RequiredCell("c", "missing", "no candidate of that name was judged"),
    ]
    console = Console(file=io.StringIO(), width=140)
    held_to(console, Policy("gpu", (Requirement(("a",), ("purity",), ("cuda",)),)), cells)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "required b x purity x cuda: failed: 2 fail: [why]" in text
    assert "required c: missing: no candidate of that name was judged" in text
    assert text.count("allowed to be blocked a x device-guard x cuda, b x device-guard x cuda: 1 blocked") == 1
    assert "policy gpu: 5 cells required, 1 passed, 2 allowed to be blocked, 2 not met" in text
