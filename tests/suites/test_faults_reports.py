"""The table of public reports: every row is there, once, as a fault or with a reason."""

from __future__ import annotations

from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.reports import ELSEWHERE, REPORTS, as_markdown, rows
from ropecheck.suites.faults.sensitivity import Record, Sensitivity


def test_every_report_is_a_fault_or_says_why_not() -> None:
    """O001 to O117 and the six controls; no row is both, and no fault stands for a row that is not there."""
    named = {report for fault in FAULTS.values() for report in fault.rows}
    assert (len(REPORTS), REPORTS[0], REPORTS[116], REPORTS[-1]) == (123, "O001", "O117", "C006")
    assert named | set(ELSEWHERE) == set(REPORTS)
    assert not named & set(ELSEWHERE)


def test_what_waits_says_for_which_issue() -> None:
    """Whoever leaves a row to later names the issue that will take it."""
    waiting = [reason for reason in ELSEWHERE.values() if "waits" in reason]
    assert waiting
    assert all("(issue " in reason for reason in waiting)


def test_the_table_has_what_was_measured() -> None:
    """A row shows the judgements that see its faults, a fault for a GPU that it needs one."""
    found = Sensitivity([
        Record("axes-swapped", "semantic", "", "rotate", "qwen-image", "bfloat16",
               killed_by={"accuracy-forward": "c"}),
        Record("raising-in-a-capture", "mechanical", "", "rotate", "qwen-image", "bfloat16",
               blocked="needs a CUDA GPU"),
        Record("replayed-without-computing", "mechanical", "", "rotate", "qwen-image", "bfloat16",
               blocked="needs a CUDA GPU"),
    ])  # fmt: skip
    table = {row.report: row for row in rows(found)}
    assert table["O006"].seen_by == ("accuracy-forward",)
    assert table["O100"].elsewhere == "needs a CUDA GPU"
    assert "waits for family tables" in table["O066"].elsewhere
    assert as_markdown(found).count("\n") == len(REPORTS) + 2


def test_the_dictionary_is_as_large_as_it_is_said_to_be() -> None:
    """At least 90 faults of distinct mechanism that a CPU judges, of each kind 45, and at most five that are none."""
    on_a_cpu = [fault for fault in FAULTS.values() if fault.device == "cpu" and not fault.equivalent]
    assert len([fault for fault in on_a_cpu if fault.kind == "semantic"]) >= 45
    assert len([fault for fault in on_a_cpu if fault.kind == "mechanical"]) >= 45
    assert sum(bool(fault.equivalent) for fault in FAULTS.values()) <= 5
    assert all(fault.check is not None for fault in FAULTS.values() if fault.equivalent)
