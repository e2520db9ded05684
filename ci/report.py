"""What a person reads at the end of a run: the matrix, the failures with all that is needed to look into them."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.verdicts import Verdict, count

_STYLES = {"pass": "green", "fail": "bold red", "blocked": "yellow", "not-applicable": "dim"}
_SHOWN_PER_CELL = 2
_NOT_ASKED, _BLOCKED = "[dim]n/a[/]", "[yellow]blocked[/]"
_COLUMNS = 7
"""As many candidates as a table of judgements can stand beside one another."""


def table(verdicts: Sequence[Verdict]) -> Table:
    """How many cases passed, failed and were blocked: judgement x candidate where that fits, else a row for each
    candidate and device, which says of a judgement only what is not all passed."""
    candidates = sorted({v.candidate for v in verdicts})
    return _matrix(verdicts, candidates) if len(candidates) <= _COLUMNS else _rows(verdicts)


def _matrix(verdicts: Sequence[Verdict], candidates: Sequence[str]) -> Table:
    devices = sorted({v.device for v in verdicts})
    cells: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        cells[v.judgement, v.candidate, v.device].append(v)
    shown = Table(show_lines=True)
    shown.add_column("cases passed", no_wrap=True)
    for name in candidates:
        shown.add_column(escape(name.replace("/", "/\n")), overflow="fold", min_width=10)
    for judgement in (name for name in JUDGEMENTS if any(v.judgement == name for v in verdicts)):
        shown.add_row(judgement, *(_cell(cells, judgement, name, devices) for name in candidates))
    return shown


def _rows(verdicts: Sequence[Verdict]) -> Table:
    groups: dict[tuple[str, str], dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    for v in verdicts:
        groups[v.candidate, v.device][v.judgement].append(v)
    shown = Table()
    shown.add_column("candidate", no_wrap=True)
    shown.add_column("device")
    shown.add_column("judgements\npassed", justify="right")
    shown.add_column("cases\npassed", justify="right")
    shown.add_column("judgements not passed", overflow="fold")
    for (candidate, device), judgements in sorted(groups.items()):
        whole = [name for name, found in judgements.items() if {v.verdict for v in found} == {"pass"}]
        others = {name: _totals(found) for name, found in judgements.items() if name not in whole}
        passed = sum(count(found)["pass"] for found in judgements.values())
        shown.add_row(escape(candidate), device, str(len(whole)), str(passed), _together(others))
    return shown


def _together(totals: dict[str, str]) -> str:
    """Judgements and what became of them, those that came to the same side by side; of the largest group, which no
    one reads name by name where it was not asked or could not be, only that."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in JUDGEMENTS:
        if name in totals:
            alike[totals[name]].append(name)
    parts: list[str] = []
    for said, names in sorted(alike.items(), key=lambda group: len(group[1])):
        last = len(parts) == len(alike) - 1
        unasked = said in (_NOT_ASKED, _BLOCKED) and len(names) > 3
        parts.append(f"{('the others' if parts else 'all') if last and unasked else ', '.join(names)} {said}")
    return "; ".join(parts)


def _cell(cells: dict[tuple[str, str, str], list[Verdict]], judgement: str, candidate: str, devices: list[str]) -> str:
    lines = []
    for device in devices:
        if found := cells.get((judgement, candidate, device)):
            lines.append(f"{device} {_totals(found)}" if len(devices) > 1 else _totals(found))
    return "\n".join(lines)


def _totals(verdicts: Sequence[Verdict]) -> str:
    totals = {name: n for name, n in count(verdicts).items() if n}
    if set(totals) == {"pass"}:
        return f"[green]{totals['pass']}[/]"
    if set(totals) == {"not-applicable"}:
        return _NOT_ASKED
    if set(totals) == {"blocked"} and not verdicts[0].dtype:
        return _BLOCKED
    return ", ".join(f"[{_STYLES[name]}]{n} {name}[/]" for name, n in totals.items())


def failures(verdicts: Sequence[Verdict], specifications: dict[str, str]) -> list[str]:
    """For each failing cell its worst cases: element, admissible values, what came, and how to see it again."""
    cells: dict[tuple[str, str, str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        if v.verdict == "fail":
            cells[v.candidate, v.judgement, v.device, v.dtype].append(v)
    texts = []
    for (candidate, judgement, device, dtype), failed in sorted(cells.items()):
        failed.sort(key=badness, reverse=True)
        title = f"[bold red]fail[/] [bold]{escape(candidate)}: {judgement}, {dtype or 'any dtype'} on {device}[/]"
        body = [described(v, specifications.get(candidate, "")) for v in failed[:_SHOWN_PER_CELL]]
        if (more := len(failed) - _SHOWN_PER_CELL) > 0:
            body.append(f"[dim]and {more} more cases of this cell (--out DIR keeps them all)[/]")
        texts.append("\n".join([title, *body]))
    return texts


def badness(verdict: Verdict) -> float:
    """How far outside a failing case is: its worst element's distance, else the share of wrong elements."""
    distance = float((verdict.worst or {}).get("outside_by_ulp", 0))
    wrong = float(verdict.facts.get("outside", verdict.facts.get("unlike", 0)) or 0)
    return distance or wrong / max(1.0, float(verdict.facts.get("elements", 1) or 1))


def described(verdict: Verdict, specification: str) -> str:
    """A case in full, as text for a person."""
    lines = [escape(verdict.case), f"  {escape(verdict.reason)}"]
    if verdict.worst:
        lines += [f"  {line}" for line in element(verdict.worst)]
    if fingerprint := verdict.facts.get("fingerprint"):
        lines.append(f"  every element is reproduced by: {escape(', '.join(fingerprint))}")
    if diagnosis := verdict.facts.get("diagnosis"):
        lines.append(f"  [bold]{escape(diagnosis)}[/]")
    lines.append(f"  oracle level {verdict.level}, seed {verdict.seed}")
    lines.append(f"  [cyan]{escape(again(verdict, specification))}[/]")
    return "\n".join(lines)


def element(worst: Any) -> list[str]:
    """The worst element on a few lines."""
    places = ("tensor", "sample", "token", "head", "lane", "channel", "position")
    where = [f"{name} {worst[name]}" for name in places if name in worst]
    lines = ["worst element: " + escape(", ".join(where))] if where else []
    if "inputs" in worst:
        given = ", ".join(f"{name} = {worst['inputs'][name]}" for name in ("x0", "x1", "cos", "sin"))
        lines.append(escape(f"made from {given}"))
    if "admissible" in worst:
        low, high = worst["admissible"]
        lines.append(escape(f"admissible {low}" if low == high else f"admissible {low} to {high}"))
    for name in ("strict", "canonical", "got"):
        if name in worst and not (name == "strict" and "admissible" in worst):
            lines.append(escape(f"{name} {worst[name]}"))
    if "outside_by_ulp" in worst:
        lines[-1] += f", {worst['outside_by_ulp']} ulp outside"
    return lines


def explained(console: Console, verdict: Verdict, specification: str) -> None:
    """Print one verdict with its facts and its worst elements."""
    console.print(f"[{_STYLES[verdict.verdict]}]{verdict.verdict}[/] {escape(verdict.candidate)} ({verdict.contract})")
    console.print(described(verdict, specification), highlight=False, soft_wrap=True)
    facts = Table(show_header=False, box=None)
    for name, value in verdict.facts.items():
        if name != "worst elements":
            facts.add_row(escape(name), escape(str(value)))
    console.print(facts)
    elements = verdict.facts.get("worst elements") or []
    if elements:
        table = Table(title="worst elements", title_justify="left")
        for column in ("sample", "token", "head", "lane", "channel", "position", "admissible", "got", "ulp outside"):
            table.add_column(column, overflow="fold")
        for e in elements:
            cells = [str(e[name]) for name in ("sample", "token", "head", "lane", "channel", "position")]
            admissible = " to ".join(dict.fromkeys(e["admissible"]))
            table.add_row(*cells, escape(admissible), escape(e["got"]), str(e["outside_by_ulp"]))
        console.print(table)


def again(verdict: Verdict, specification: str) -> str:
    """The command that judges this case alone."""
    words = ["ropecheck", "explain", f"{verdict.case}@{verdict.candidate}"]
    if specification and not specification.startswith("ropecheck.suites.adapters."):
        words += ["--candidate", specification]
    if verdict.seed:
        words += ["--seed", str(verdict.seed)]
    return shlex.join(words)


def blocked_reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """One line for each reason that something could not run."""
    reasons: dict[str, set[str]] = defaultdict(set)
    numbers: dict[str, int] = defaultdict(int)
    for v in verdicts:
        if v.verdict == "blocked":
            reasons[v.reason].add(v.candidate)
            numbers[v.reason] += 1
    return [
        f"[yellow]blocked[/] {numbers[reason]} of {escape(', '.join(sorted(names)))}: {escape(reason)}"
        for reason, names in sorted(reasons.items())
    ]


def pin_lines(pins: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each contract whose pin was checked."""
    lines = []
    for report in pins:
        state, style = report["state"], "green" if report["state"] == "known" else "yellow"
        if state == "unequal":
            style = "bold red"
        release = f"{report['package']} {report['release'] or ''}".strip()
        detail = ""
        if state in ("known", "drift"):
            detail = f"{report['cases'] - report['within']} cases equal byte for byte"
            detail += f", {report['within']} within what is admissible" if report["within"] else ""
        if state in ("unequal", "missing"):
            detail = report["first_unequal"] or "a symbol that the contract was read from is not there"
        lines.append(f"pin of {report['contract']}: [{style}]{state}[/] ({escape(release)}) {escape(detail)}".rstrip())
    return lines


def summary(
    console: Console, verdicts: Sequence[Verdict], pins: Sequence[dict[str, Any]], specifications: dict[str, str]
) -> None:
    """Print everything."""
    for text in failures(verdicts, specifications):
        # Unwrapped: a command that is broken over lines cannot be copied.
        console.print(text + "\n", highlight=False, soft_wrap=True)
    console.print(table(verdicts))
    for line in (*pin_lines(pins), *blocked_reasons(verdicts)):
        console.print(line)
    failed = [v for v in verdicts if v.verdict == "fail"]
    if failed:
        worst = max(failed, key=badness)
        of = f"{escape(worst.case)} of {escape(worst.candidate)}"
        console.print(f"worst case: {of}: {escape(worst.reason)}", style="red")
    totals = count(verdicts)
    console.print("  ".join(f"[{_STYLES[name]}]{n} {name}[/]" for name, n in totals.items() if n))
