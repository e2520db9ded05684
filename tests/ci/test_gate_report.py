"""What a gate prints: a matrix, a sentence for each group of cells that is not passed, a sum that hides nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ropecheck.ci.gate_report import matrix, matrix_rows, shown, summed_up, together
from ropecheck.ci.policy import Policy, Requirement
from ropecheck.ci.states import GREEN, OVERRIDDEN, RED, Cell, State, decided, verdict, worst

POLICY = Policy("gpu", (Requirement(("a",), ("purity",), ("cuda",)),))
CELLS = [
    Cell(("a", "purity", "cuda"), "passed"),
    Cell(("a", "device-guard", "cuda"), "blocked", "1 blocked: one GPU", allowed=True),
    Cell(("b", "device-guard", "cuda"), "blocked", "1 blocked: one GPU", allowed=True),
    Cell(("b", "purity", "cuda"), "failed", "2 fail: [bold]why[/]"),
    Cell(("b", "laws", "cuda"), "overridden", "OVERRIDDEN by X: because"),
    Cell(("sensitivity",), "missing", "nobody measured it"),
]


def printed(cells: list[Cell]) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(matrix(cells))
    shown(console, POLICY, cells)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_every_cell_that_is_not_passed_is_named() -> None:
    """With its state and reason, those of one reason together, rich's markup left as it is; and the sum of them."""
    text = printed(CELLS)
    assert "blocked (allowed) a, b x device-guard x cuda: 1 blocked: one GPU" in text
    assert "failed b x purity x cuda: 2 fail: [bold]why[/]" in text
    assert "OVERRIDDEN b x laws x cuda: OVERRIDDEN by X: because" in text
    assert "missing sensitivity: nobody measured it" in text
    assert text.endswith("policy gpu: 6 cells required, 1 passed, 2 allowed to be blocked, 1 OVERRIDDEN, 2 not met")


def test_the_matrix_counts_what_passed() -> None:
    """A row for each candidate and device, and what became of the rest of its judgements."""
    assert matrix_rows(CELLS) == [
        ("a", "cuda", "1 of 2", "device-guard blocked (allowed)"),
        ("b", "cuda", "0 of 3", "purity failed; laws OVERRIDDEN; device-guard blocked (allowed)"),
    ]


def test_judgements_of_one_candidate_share_a_name() -> None:
    """Where they have one reason; what passed is not among them. Of many there is their number."""
    cells = [Cell(("a", name, "cpu"), "missing", "no evidence") for name in ("purity", "laws")]
    assert [names for _, names in together([*cells, Cell(("a", "codegen", "cpu"), "passed")])] == [
        "a x purity, laws x cpu"
    ]
    assert summed_up(POLICY, cells).endswith("2 cells required, 0 passed, 2 not met")
    many = [Cell((name, f"j{i}", "cpu"), "missing", "no evidence") for name in ("a", "b") for i in range(9)]
    assert [names for _, names in together(many)] == ["a, b x 9 judgements x cpu"]
    assert matrix_rows(many)[0] == ("a", "cpu", "0 of 9", "all missing")


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([], RED),
        (CELLS[:1], GREEN),
        (CELLS[:3], GREEN),
        ([CELLS[0], CELLS[4]], OVERRIDDEN),
        ([CELLS[4], CELLS[5]], RED),
        *(([CELLS[0], Cell(("c",), state)], RED) for state in ("failed", "missing", "blocked", "stale", "expired")),
        ([CELLS[0], Cell(("c",), "pending")], RED),
    ],
)
def test_the_verdict_of_cells(cells: list[Cell], found: str) -> None:
    """Nothing at all is red, and an override of something else excuses nothing."""
    assert verdict(cells) == found


def test_parts_come_to_the_worst_and_accounts_to_the_best() -> None:
    """All dtypes must be passed; of several runs one that passed is enough, unless another one failed."""

    def cell(state: State, allowed: bool = False) -> Cell:
        return Cell(("c",), state, allowed=allowed)

    assert worst([cell("passed"), cell("blocked", True), cell("missing")]).state == "missing"
    assert worst([cell("passed"), cell("blocked", True)]).allowed
    assert worst([cell("missing"), cell("failed")]).state == "failed"
    assert decided([cell("blocked"), cell("passed"), cell("missing")]).state == "passed"
    assert decided([cell("passed"), cell("failed")]).state == "failed"
    assert decided([cell("blocked"), cell("blocked", True)]).allowed
