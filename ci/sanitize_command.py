"""The command ``sanitize``: its options, its table, its folder of evidence."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropecheck.suites.cases import PLANS
from ropecheck.suites.judgements.sanitizer import TOOLS
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import FAIL, PASS, Verdict, canonical, count

from .environment import record
from .evidence.writing import close, document, prepare, with_sources
from .report import blocked_reasons
from .sanitize import OURS, Sanitized, Sanitizing, exit_status, questions, sanitize, version
from .verify import Run, expected

_STYLES = {"pass": "green", "fail": "bold red", "blocked": "yellow"}
_FAILURES_SHOWN = 5
_LONGEST = 2000
"""Characters of a tool's report of its planted fault that the evidence holds; the folder has all of it."""


def add_options(
    parser: argparse.ArgumentParser,
    natural: Callable[[str], int],
    positive: Callable[[str], int],
    seconds: Callable[[str], float],
) -> None:
    """The options of ``sanitize``, but for ``--json``."""
    parser.add_argument("candidates", nargs="*", metavar="CANDIDATE", help="FILE.py or package.module:attribute; "
                        "without one, our kernels")  # fmt: skip
    parser.add_argument("--tool", action="append", default=[], choices=TOOLS, metavar="TOOL",
                        help=f"only {', '.join(TOOLS)}; repeatable")  # fmt: skip
    parser.add_argument("--plan", choices=PLANS, default="standard", help="how many cases (default standard)")
    parser.add_argument("--case", action="append", default=[], metavar="CASE[@CANDIDATE]",
                        help="only the case of this id, without its tool; repeatable")  # fmt: skip
    parser.add_argument("--seed", type=natural, default=0, help="seed of every payload (default 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for verdicts, the tools' output and manifest")
    parser.add_argument("-n", dest="workers", type=positive, default=min(len(TOOLS), os.cpu_count() or 1), metavar="N",
                        help="tools at work at a time (default: all, where there are as many processors)")  # fmt: skip
    parser.add_argument("--case-limit", type=seconds, default=120.0, metavar="SECONDS",
                        help="longest that a case may take before its process is ended (default 120)")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out the command and return its exit status."""
    what = Sanitizing(
        tuple(dict.fromkeys(options.candidates)), tuple(options.tool) or TOOLS, options.plan, tuple(options.case),
        options.seed, options.workers, options.case_limit,
    )  # fmt: skip
    started = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out.absolute() if options.out else Path(scratch) / "report"
        folder = prepare(out)
        asked = questions(what, folder)
        specifications = what.specifications or (OURS,)
        names = {question.candidate for question in asked}
        judged = with_sources([c for c in expected(Run(specifications, Selection(what.plan))) if c["name"] in names])
        console.print(f"{len(asked)} cases under {', '.join(what.tools)}")
        outcome = sanitize(what, asked, folder, lambda line: console.print(line, highlight=False, markup=False))
        status = exit_status(outcome.verdicts)
        settings = {
            "kind": "sanitize", "candidates": specifications,
            "selection": {"plan": what.plan, "tools": what.tools, "cases": what.cases}, "seed": what.seed,
            "workers": what.workers, "exit status": status, "policy": None, "compute-sanitizer": version(),
            "planted faults": {tool: text[:_LONGEST] for tool, text in outcome.plants.items()},
            "started": started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(timezone.utc) - started).total_seconds(), 1),
        }  # fmt: skip
        evidence = document(judged, outcome.verdicts, record(), [], settings)
        if options.out:
            for tool, reported in outcome.plants.items():
                (folder / f"planted-{tool}.txt").write_text(reported + "\n")
            close(folder, out, evidence, outcome.verdicts)
    _show(console, what, outcome)
    if options.out:
        console.print(f"report in {options.out}")
    if options.json:
        print(canonical({**evidence, "verdicts": [v.as_json() for v in outcome.verdicts]}))
    return status


def _show(console: Console, what: Sanitizing, outcome: Sanitized) -> None:
    failed = [v for v in outcome.verdicts if v.verdict == FAIL]
    for verdict in failed[:_FAILURES_SHOWN]:
        console.print(_failure(verdict, what), highlight=False, soft_wrap=True)
    if len(failed) > _FAILURES_SHOWN:
        console.print(f"and {len(failed) - _FAILURES_SHOWN} more failed")
    console.print(_table(outcome.verdicts, what.tools))
    for line in blocked_reasons(outcome.verdicts):
        console.print(line)
    for tool, reported in outcome.plants.items():
        said = escape(reported.splitlines()[0]) if reported else "[yellow]not reported[/]"
        console.print(f"planted fault of {tool}: {said}", highlight=False)
    console.print("  ".join(f"[{_STYLES[v]}]{n} {v}[/]" for v, n in count(outcome.verdicts).items() if n))


def _failure(verdict: Verdict, what: Sanitizing) -> str:
    case, _, tool = verdict.case.rpartition("/")
    words = ["ropecheck", "sanitize", *what.specifications, "--case", f"{case}@{verdict.candidate}", "--tool", tool]
    words += ["--plan", what.plan, *(["--seed", str(what.seed)] if what.seed else [])]
    lines = [f"[bold red]{escape(verdict.candidate)}[/] {escape(verdict.case)}", f"  {escape(verdict.reason)}"]
    lines += [f"  {escape(line)}" for line in "\n".join(verdict.facts.get("first reports", [])[:1]).splitlines()[1:6]]
    return "\n".join([*lines, f"  [cyan]{escape(shlex.join(words))}[/]", ""])


def _table(verdicts: Sequence[Verdict], tools: Sequence[str]) -> Table:
    """How many cases passed, failed and were blocked: candidate x tool."""
    cells: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        cells[verdict.candidate, verdict.case.rpartition("/")[2]].append(verdict)
    table = Table()
    table.add_column("cases passed", no_wrap=True)
    for tool in tools:
        table.add_column(tool)
    for name in dict.fromkeys(v.candidate for v in verdicts):
        table.add_row(escape(name), *(_cell(cells[name, tool]) for tool in tools))
    return table


def _cell(verdicts: Sequence[Verdict]) -> str:
    totals = {verdict: n for verdict, n in count(verdicts).items() if n}
    if set(totals) == {PASS}:
        return f"[green]{totals[PASS]}[/]"
    return ", ".join(f"[{_STYLES[verdict]}]{n} {verdict}[/]" for verdict, n in totals.items())
