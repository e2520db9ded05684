"""What the commands that list things print, for a person and for a machine."""

from __future__ import annotations

import json

import pytest

from ropecheck.ci.cli import main
from ropecheck.suites.candidates import DTYPES
from ropecheck.suites.families import FAMILIES
from ropecheck.suites.judgements import JUDGEMENTS


@pytest.mark.parametrize("plan", ["smoke", "standard"])
def test_every_judgement_counts_its_cases_in_every_family(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By dtype; what a family has no room for is not counted, and everything else has cases."""
    assert main(["judgements", "--plan", plan, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["judgements"]}
    assert list(rows) == list(JUDGEMENTS)
    for name, row in rows.items():
        impossible = {family for family, made in FAMILIES.items() if row["claim"] in made.unclaimable}
        assert set(row["cases"]) == set(FAMILIES) - impossible - set(JUDGEMENTS[name].not_of)
        for family, counts in row["cases"].items():
            assert all(set(dtypes) == set(DTYPES) for dtypes in counts.values()), (name, family)
            assert sum(counts["everything"].values()) > 0, (name, family)
    assert sum(rows["accuracy-forward"]["cases"]["norm_rotate_gate"]["least"].values()) > 0


def test_the_table_of_judgements_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a row, and each family a column."""
    assert main(["judgements", "--plan", "smoke"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("accuracy-forward", "table-gradient", "codegen", "n/a"))


@pytest.mark.parametrize("command", [["contracts"], ["contracts", "qwen3.5-norm-rope-gate"], ["doctor"]])
def test_the_other_lists_are_printed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """For a person and for a machine."""
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(command) == 0
    assert capsys.readouterr().out.strip()
