"""What a person reads of a gate: the matrix, a sentence for each cell that is not passed, and what is not qualified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .policy import REQUIRABLE, Policy
from .states import GREEN, OVERRIDDEN, Cell, verdict, worst
from .text import plain

_LONGEST = 4000
_NAMED = 4
"""As many judgements of one candidate and device as a sentence names."""


def matrix(cells: Sequence[Cell]) -> Table:
    """A row for each candidate and device: how many judgements are passed, and what became of the others."""
    shown = Table()
    shown.add_column("candidate", no_wrap=True)
    shown.add_column("device")
    shown.add_column("judgements\npassed", justify="right")
    shown.add_column("judgements not passed", overflow="fold")
    for row in matrix_rows(cells):
        shown.add_row(*(escape(plain(text)) for text in row))
    return shown


def matrix_rows(cells: Sequence[Cell]) -> list[tuple[str, str, str, str]]:
    """Candidate, device, how many judgements are passed, and the others with what became of them; not escaped."""
    rows: dict[tuple[str, str], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if len(cell.parts) == 3:
            candidate, judgement, device = cell.parts
            rows[candidate, device][judgement].append(cell)
    shown = []
    for (candidate, device), judgements in sorted(rows.items()):
        found = {name: worst(group) for name, group in judgements.items()}
        passed = sum(cell.state == "passed" for cell in found.values())
        shown.append((candidate, device, f"{passed} of {len(found)}", _others(found)))
    return shown


def _others(found: dict[str, Cell]) -> str:
    alike: dict[str, list[str]] = defaultdict(list)
    order = {name: number for number, name in enumerate(REQUIRABLE)}
    for name in sorted(found, key=lambda name: (order.get(name, len(order)), name)):
        if found[name].state != "passed":
            alike[said(found[name])].append(name)
    if len(alike) == 1 and len(found) > _NAMED and len(next(iter(alike.values()))) == len(found):
        return f"all {next(iter(alike))}"
    return "; ".join(f"{', '.join(names)} {what}" for what, names in alike.items())


def said(cell: Cell) -> str:
    """The state in words: an override is never to be read past, and a permission not to be taken for red."""
    if cell.state == "overridden":
        return "OVERRIDDEN"
    return f"{cell.state} (allowed)" if cell.allowed else cell.state


def together(cells: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """Cells that are not passed, those with one state and one reason as one: (the first of them, their names)."""
    groups: dict[tuple[str, bool, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.state != "passed":
            groups[cell.state, cell.allowed, cell.reason].append(cell)
    return [(group[0], _names(group)) for group in groups.values()]


def _names(cells: Sequence[Cell]) -> str:
    """Candidates with the same judgements on one device together; of many judgements their number, for the matrix
    names them."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in cells:
        if len(cell.parts) == 3:
            rows[cell.parts[0], cell.parts[2]].append(cell.parts[1])
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (candidate, device), names in rows.items():
        judgements = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} judgements"
        alike[judgements, device].append(candidate)
    named = [f"{', '.join(candidates)} x {judgements} x {device}" for (judgements, device), candidates in alike.items()]
    named += [cell.name for cell in cells if len(cell.parts) != 3]
    return plain("; ".join(named), limit=_LONGEST)


def shown(console: Console, policy: Policy, cells: Sequence[Cell]) -> None:
    """Print a sentence for each group of cells that is not passed, then the sum of it all."""
    for cell, names in together(cells):
        style = "magenta" if cell.state == "overridden" else "yellow" if cell.allowed else "red"
        line = f"[{style}]{said(cell)}[/] {escape(names)}: {escape(plain(cell.reason))}"
        console.print(line, highlight=False, soft_wrap=True)
    style = {GREEN: "green", OVERRIDDEN: "magenta"}.get(verdict(cells), "red")
    console.print(escape(plain(summed_up(policy, cells))), style=style, highlight=False, soft_wrap=True)


def summed_up(policy: Policy, cells: Sequence[Cell]) -> str:
    """How many cells there are and what became of them, on one line; not escaped."""
    parts = [f"{len(cells)} cells required", f"{sum(cell.state == 'passed' for cell in cells)} passed"]
    for what, number in (
        ("allowed to be blocked", sum(cell.allowed and cell.state == "blocked" for cell in cells)),
        ("allowed to be stale", sum(cell.allowed and cell.state == "stale" for cell in cells)),
        ("OVERRIDDEN", sum(cell.state == "overridden" for cell in cells)),
    ):
        parts += [f"{number} {what}"] if number else []
    return f"policy {policy.name}: {', '.join(parts)}, {sum(not cell.met for cell in cells)} not met"
