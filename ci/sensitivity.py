"""``ropecheck sensitivity``: which judgement sees which fault, as a table or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ropecheck.suites.cases import PLANS
from ropecheck.suites.faults.reports import as_markdown
from ropecheck.suites.faults.sensitivity import Record, Sensitivity, SensitivityError, measure
from ropecheck.suites.verdicts import canonical

EXIT_STATUS = """exit status: 0 every fault that this machine can judge is seen, or is proven to be none; 1 a fault is
not seen; 2 the command cannot be carried out as given; 4 the judge itself failed."""


def add_options(parser: argparse.ArgumentParser, natural: Callable[[str], int], positive: Callable[[str], int]) -> None:
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--plan", choices=PLANS, default="standard", help="how many cases (default standard)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of every payload (default 0)")
    parser.add_argument("--reports", action="store_true", help="print which public report each fault stands for")
    parser.add_argument("-n", dest="workers", type=positive, default=2, metavar="N", help="processes (default 2)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, print, and return the exit status."""
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("faults x judgements", total=None)
            found = measure(
                options.fault, plan=options.plan, workers=options.workers, seed=options.seed,
                tell=lambda done, of: progress.update(bar, completed=done, total=of),
            )  # fmt: skip
    except SensitivityError as error:
        console.print(f"ropecheck: the judge failed: {escape(str(error))}")
        return 4
    if options.json:
        print(canonical(as_json(found)))
    elif options.reports:
        print(as_markdown(found), end="")
    else:
        shown(console, found)
    return 0 if found.coverage == 1.0 else 1


def as_json(found: Sensitivity) -> dict[str, Any]:
    return {
        "faults": [record.as_json() for record in found.records],
        "coverage": found.coverage,
        "judgements": {name: {"kills": k, "alone": a} for name, (k, a) in found.by_judgement().items()},
        "seconds": found.seconds,
    }


def shown(console: Console, found: Sensitivity) -> None:
    """Print both tables and the coverage."""
    console.print(_faults(found))
    console.print(_judgements(found))
    judged = found.judged
    seen = sum(not record.survives for record in judged)
    others = [f"{sum(bool(getattr(r, what)) for r in found.records)} {said}" for what, said in
              (("equivalent", "proven to be no faults"), ("blocked", "not judged on this machine"))]  # fmt: skip
    style = "green" if seen == len(judged) else "bold red"
    console.print(f"[{style}]{seen} of {len(judged)} faults are seen ({100 * found.coverage:.3g} %)[/]; "
                  f"{', '.join(others)}; {found.seconds:g} s", highlight=False)  # fmt: skip


def _faults(found: Sensitivity) -> Table:
    table = Table(title="faults and the judgements that see them", title_justify="left")
    for column in ("fault", "kind", "of", "seen by"):
        table.add_column(column, overflow="fold")
    for record in found.records:
        of = f"{record.contract} ({record.family}, {record.dtype})"
        table.add_row(escape(record.name), record.kind, escape(of), _seen(record))
    return table


def _seen(record: Record) -> str:
    if record.equivalent:
        return f"[dim]equivalent: {escape(record.equivalent)}[/]"
    if record.blocked:
        return f"[yellow]{escape(record.blocked)}[/]"
    if record.survives:
        return "[bold red]nothing[/]"
    if record.only_by:
        judgement, case = next(iter(record.killed_by.items()))
        return f"[bold]{judgement}[/] alone, first in {escape(case.split('/', 3)[-1])}"
    return ", ".join(record.killed_by)


def _judgements(found: Sensitivity) -> Table:
    table = Table(title="judgements", title_justify="left")
    for column in ("judgement", "sees", "alone", "that only it sees"):
        table.add_column(column, overflow="fold")
    for name, (kills, alone) in found.by_judgement().items():
        table.add_row(name, str(len(kills)), str(len(alone)), escape(", ".join(alone)) or "[dim]nothing[/]")
    return table
