"""``ropecheck evidence show | validate | merge | pack | compact | diff``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropecheck.suites.verdicts import VERDICTS, canonical

from ..text import plain
from .difference import difference
from .merging import machine, merge
from .packing import compact, pack
from .reading import Evidence, load

EXIT_STATUS = """exit status: 0 done, and for diff nothing changed; 1 diff found changes; 2 the evidence is not valid,
or the command cannot be carried out as given."""

_STYLES = {"pass": "green", "fail": "bold red", "blocked": "yellow", "not-applicable": "dim"}
_SHOWN = 60

Act = Callable[[argparse.Namespace, Console], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of ``evidence``, each with ``--json``."""
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    def command(name: str, act: Act, text: str, *operands: tuple[str, str, str | None]) -> None:
        sub = commands.add_parser(name, help=text, description=text, epilog=EXIT_STATUS)
        for operand, said, count in operands:
            more: dict[str, Any] = {"nargs": count} if count else {}
            sub.add_argument(operand, type=Path, metavar=operand.upper(), help=said, **more)
        if name == "merge":
            sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that is written")
        sub.add_argument("--json", action="store_true", help="print JSON for a machine")
        sub.set_defaults(act=act)

    given = "folder or zip file of evidence"
    command("show", _show, "show what evidence holds", ("evidence", given, "+"))
    command("validate", _validate, "check evidence throughout and say nothing but whether it is whole",
            ("evidence", given, "+"))  # fmt: skip
    command("merge", _merge, "join the evidence of several machines in one folder", ("evidence", given, "+"))
    command("pack", _pack, "make one file of evidence", ("evidence", given, None), ("out", "zip file to write", None))
    command("compact", _compact, "write the documents of evidence alone, without verdicts and logs",
            ("evidence", given, None), ("out", "folder that is written", None))  # fmt: skip
    command("diff", _diff, "say what changed from one piece of evidence to another",
            ("first", given, None), ("second", given, None))  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out a sub-command and return the exit status. Raises :class:`~ropecheck.ci.evidence.form.EvidenceError`."""
    act: Act = options.act
    return act(options, console)


def _show(options: argparse.Namespace, console: Console) -> int:
    read = [load(path) for path in options.evidence]
    if options.json:
        print(canonical([{"evidence": one.origin, "runs": one.documents} for one in read]))
        return 0
    for one in read:
        console.print(f"[bold]{escape(one.origin)}[/]", highlight=False)
        for document in one.documents:
            for line in _lines(document):
                console.print(f"  {line}", highlight=False)
            console.print(_table(document))
    return 0


def _lines(document: Mapping[str, Any]) -> list[str]:
    """What a person asks first of a run."""
    environment, run = document["environment"], document["run"]
    commit = environment["commit"]
    said = f"{commit['id'][:12]}{', with changes that were not committed' if commit['dirty'] else ''}" if commit else ""
    policy = f", policy {plain(run['policy']['name'])}" if run["policy"] else ""
    lines = [
        f"{run['kind']}, plan {run['selection']['plan']}{escape(policy)}, exit status {run['exit status']}, "
        f"{run['seconds']:g} s, by {environment['runner']}",
        f"on {escape(machine(document))}",
        f"commit {said or 'unknown'}",
    ]
    if (found := document.get("sensitivity")) is not None:
        lines.append(f"sensitivity: {found['seen']} of {found['judged']} faults are seen, of {found['faults']} in all")
    lines += [
        f"benchmark {escape(plain(row['name']))} on {escape(plain(row['device']))}: ratio {row['ratio']:g}"
        for row in document.get("benchmarks", ())
    ]
    return lines


def _table(document: Mapping[str, Any]) -> Table:
    """How many cases each candidate had of each verdict on each device, and why some were not passed."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in document["cells"]:
        key = cell["candidate"], cell["device"]
        counts = totals.setdefault(key, dict.fromkeys(VERDICTS, 0))
        for verdict in VERDICTS:
            counts[verdict] += cell.get(verdict, 0)
        if cell.get("fail") or cell.get("blocked"):
            reasons.setdefault(key, []).extend(cell["reasons"])
    table = Table()
    table.add_column("candidate", overflow="fold")
    for column in ("device", *VERDICTS):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for (candidate, device), counts in totals.items():
        numbers = (f"[{_STYLES[name]}]{n}[/]" if n else "" for name, n in counts.items())
        why = "; ".join(dict.fromkeys(plain(reason) for reason in reasons.get((candidate, device), ())))
        table.add_row(escape(plain(candidate)), escape(plain(device)), *numbers, escape(plain(why)))
    return table


def _validate(options: argparse.Namespace, console: Console) -> int:
    rows = [_whole(load(path)) for path in options.evidence]
    if options.json:
        print(canonical(rows))
    else:
        for row in rows:
            console.print(
                f"[green]valid[/] {escape(row['evidence'])}: {row['runs']} runs, {row['cells']} cells, {row['form']}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    return 0


def _whole(one: Evidence) -> dict[str, Any]:
    verdicts = one.verdicts
    return {
        "evidence": one.origin,
        "runs": len(one.parts),
        "cells": sum(len(document["cells"]) for document in one.documents),
        "form": "compact" if verdicts is None else f"{len(verdicts)} verdicts",
        "valid": True,
    }


def _merge(options: argparse.Namespace, console: Console) -> int:
    merge([load(path) for path in options.evidence], options.out.absolute())
    return _written(options, console)


def _pack(options: argparse.Namespace, console: Console) -> int:
    pack(load(options.evidence), options.out.absolute())
    return _written(options, console)


def _compact(options: argparse.Namespace, console: Console) -> int:
    compact(load(options.evidence), options.out.absolute())
    return _written(options, console)


def _written(options: argparse.Namespace, console: Console) -> int:
    # What was written is read again: it must be evidence like any other.
    row = _whole(load(options.out))
    if options.json:
        print(canonical(row))
    else:
        console.print(f"{escape(row['evidence'])}: {row['runs']} runs, {row['cells']} cells, {row['form']}")
    return 0


def _diff(options: argparse.Namespace, console: Console) -> int:
    found = difference(load(options.first), load(options.second))
    if options.json:
        print(canonical(found))
    else:
        for title, rows in found.items():
            _print_rows(console, title, rows)
        if not any(found.values()):
            console.print("[green]nothing changed[/]")
    return int(any(found.values()))


def _print_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(title=f"{title}: {len(rows)} changed", title_justify="left")
    for column in ("what", "was", "is"):
        table.add_column(column, overflow="fold")
    for row in rows[:_SHOWN]:
        name = f"{row['name']}: {', '.join(row['files'])}" if row.get("files") else row["name"]
        was, now = ("[dim]absent[/]" if row[side] is None else escape(plain(row[side])) for side in ("was", "is"))
        table.add_row(escape(plain(name)), was, now)
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN} more (--json lists them)")
