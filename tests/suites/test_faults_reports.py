"""The table of public reports: every row is there, once, as a fault or with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.cases import Case, positions_of
from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.gradients import GRADIENTS
from ropecheck.suites.faults.mutants import mutant
from ropecheck.suites.faults.reports import ELSEWHERE, REPORTS, as_markdown, rows
from ropecheck.suites.faults.sensitivity import Record, Sensitivity
from ropecheck.suites.judging import Selection, questions


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


@pytest.mark.parametrize("name", CONTRACTS)
def test_o110_every_table_that_a_token_reads_is_finite(name: str) -> None:
    """Against a table of NaN every kernel that returns NaN would be right."""
    own = CONTRACTS[name]
    family = "norm_rotate_gate" if own.norm is not None else own.family or "rotate"
    right = mutant("right", name, family, lambda reading: reading, "bfloat16")
    asked = [q for q in questions(right, Selection("standard", devices=("cpu",))) if isinstance(q, Case)]
    given = {(i.length, i.batch, i.positions, i.table, i.rotary_dim): i for i in (q.inputs for q in asked)}
    tables = [
        own.tables(positions_of(own, i), torch.bfloat16, i.rotary_dim or own.rotary_dim)
        for i in given.values() if i.table != "logical"
    ]  # fmt: skip
    assert len(tables) > 10
    assert all(bool(table.isfinite().all()) for both in tables for table in both)


@pytest.mark.parametrize("name", [fault.name for fault in GRADIENTS])
def test_o116_the_backward_is_judged_by_itself(name: str, failing: Callable[..., dict[str, str]]) -> None:
    """A fault of the gradient alone passes what is asked of the forward, and is seen all the same."""
    candidate = FAULTS[name].candidate()
    assert failing(candidate, "smoke", ("accuracy-forward", "invariance-forward")) == {}
    assert "accuracy-vjp" in failing(candidate, "smoke", ("accuracy-vjp",))
