"""What a run prints: one table that stays readable, whatever was judged."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ropecheck.ci.report import table
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
