"""``ropecheck sensitivity``: which judgement sees which fault, in tables, as JSON, or in a page of documentation."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ropecheck.suites.cases import PLANS
from ropecheck.suites.faults.asking import SensitivityError
from ropecheck.suites.faults.sensitivity import NEVER_ALONE, Record, Sensitivity, measure
from ropecheck.suites.verdicts import canonical

from . import environment
from .evidence.writing import close, document, measured, prepare
from .faults_page import MARKERS, filled_in, tables

DETAILS = "sensitivity.json"
"""The file of an evidence folder with what ``--json`` prints."""

EXIT_STATUS = """exit status: 0 every fault that this machine can judge is seen, or is proven to be none; 1 a fault is
not seen; 2 the command cannot be carried out as given; 4 the judge itself failed."""


def add_options(parser: argparse.ArgumentParser, natural: Callable[[str], int], positive: Callable[[str], int]) -> None:
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="only this fault; repeatable")
    parser.add_argument("--plan", choices=PLANS, default="standard", help="how many cases (default standard)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of every payload (default 0)")
    parser.add_argument("--all", action="store_true", help="print a row for every fault")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables of all faults between the markers of this page")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the evidence")
    parser.add_argument("-n", dest="workers", type=positive, default=2, metavar="N", help="processes (default 2)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, print, and return the exit status."""
    page = _page(options)
    started = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory() as scratch:
        # Refused before anything is measured, where it is not to be written to.
        out = options.out.absolute() if options.out else Path(scratch) / "evidence"
        folder = prepare(out)
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
        status = 0 if found.coverage == 1.0 else 1
        settings = {
            "kind": "sensitivity", "candidates": [], "selection": {"plan": options.plan, "faults": options.fault},
            "seed": options.seed, "workers": options.workers, "exit status": status, "policy": None,
            "started": started.isoformat(timespec="seconds"), "seconds": found.seconds,
        }  # fmt: skip
        if options.out:
            (folder / DETAILS).write_text(canonical(as_json(found)) + "\n")
            close(folder, out, document([], [], environment.record(), [], settings, measured(found.records)))
    if options.markdown is not None:
        options.markdown.write_text(filled_in(page, tables(found)))
    if options.json:
        print(canonical(as_json(found)))
    else:
        shown(console, found, every=options.all)
    if options.out:
        console.print(f"evidence in {options.out}")
    return status


def _page(options: argparse.Namespace) -> str:
    """The page that is to be filled in, read before anything is measured. Raises ValueError for what is none."""
    if options.markdown is None:
        return ""
    if options.fault:
        raise ValueError("--markdown must not be given with --fault: the page is of all faults")
    if not options.markdown.is_file():
        raise ValueError(f"--markdown must name a page that exists, not {options.markdown}")
    page: str = options.markdown.read_text()
    filled_in(page, dict.fromkeys(MARKERS, ""))
    return page


def as_json(found: Sensitivity) -> dict[str, Any]:
    """One record for each fault, those that nothing sees first; coverage; and what each judgement sees."""
    return {
        "faults": [record.as_json() for record in sorted(found.records, key=lambda record: not record.survives)],
        "coverage": found.coverage,
        "judgements": {
            name: {"kills": kills, "alone": alone, "never alone": NEVER_ALONE.get(name, "")}
            for name, (kills, alone) in found.by_judgement().items()
        },
        "seconds": found.seconds,
    }


def shown(console: Console, found: Sensitivity, *, every: bool = False) -> None:
    """Print what is not seen, what each judgement sees, what only one sees, and the coverage; or ``every`` fault."""
    if found.survivors:
        console.print(_faults("[bold red]faults that nothing sees", found.survivors))
    if every:
        console.print(_faults("faults and the judgements that see them", found.records))
    console.print(_judgements(found))
    alone = [record for record in found.records if record.only_by]
    if alone and not every:
        console.print(_faults("faults that one judgement alone sees", alone))
    for reason in dict.fromkeys(record.blocked for record in found.records if record.blocked):
        names = ", ".join(record.name for record in found.records if record.blocked == reason)
        console.print(f"[yellow]not judged on this machine, {escape(reason)}:[/] {escape(names)}", highlight=False)
    judged, survivors = found.judged, found.survivors
    none = sum(bool(record.equivalent) for record in found.records)
    style = "bold red" if survivors else "green"
    console.print(
        f"[{style}]{len(judged) - len(survivors)} of {len(judged)} faults are seen ({100 * found.coverage:.3g} %)[/]; "
        f"{none} proven to be no faults, {sum(bool(r.blocked) for r in found.records)} not judged; {found.seconds:g} s",
        highlight=False,
    )


def _faults(title: str, records: Iterable[Record]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("fault", "kind", "of", "seen by", "needed"):
        table.add_column(column, overflow="fold")
    for record in records:
        of = f"{record.contract} ({record.family}, {record.dtype})"
        table.add_row(escape(record.name), record.kind, escape(of), _seen(record), escape(", ".join(record.needed)))
    return table


def _seen(record: Record) -> str:
    if record.equivalent:
        return f"[dim]equivalent: {escape(record.equivalent)}[/]"
    if record.blocked:
        return f"[yellow]{escape(record.blocked)}[/]"
    if record.survives:
        return "[bold red]nothing[/]"
    return f"[bold]{record.only_by}[/]" if record.only_by else ", ".join(record.killed_by)


def _judgements(found: Sensitivity) -> Table:
    table = Table(title="judgements", title_justify="left")
    for column in ("judgement", "sees", "alone", ""):
        table.add_column(column, overflow="fold")
    for name, (kills, alone) in found.by_judgement().items():
        remark = "" if alone else NEVER_ALONE.get(name, "sees nothing that no other sees")
        table.add_row(name, str(len(kills)), str(len(alone)), f"[dim]{escape(remark)}[/]")
    return table
