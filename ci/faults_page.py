"""The tables of the documentation's page on faults, made from what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ropecheck.suites.faults.reports import as_markdown
from ropecheck.suites.faults.sensitivity import NEVER_ALONE, Record, Sensitivity

MARKERS = ("judgements", "semantic faults", "mechanical faults", "reports")
"""The tables of the page; each stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""


def tables(found: Sensitivity) -> dict[str, str]:
    """Each table as Markdown, by its name."""
    kinds = {kind: [record for record in found.records if record.kind == kind] for kind in ("semantic", "mechanical")}
    return {
        "judgements": _judgements(found),
        **{f"{kind} faults": _faults(records) for kind, records in kinds.items()},
        "reports": as_markdown(found),
    }


def filled_in(page: str, made: Mapping[str, str]) -> str:
    """``page`` with each table in its place. Raises ValueError for a page that has no place for one."""
    for name in MARKERS:
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        parts = re.split(f"{re.escape(begin)}.*?{re.escape(end)}", page, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(f"the page must hold {begin.strip()} and {end} once each, in this order")
        page = f"{begin}\n{made[name]}\n{end}".join(parts)
    return page


def _judgements(found: Sensitivity) -> str:
    lines = ["| judgement | sees | alone | what only it sees |", "| --- | --- | --- | --- |"]
    for name, (kills, alone) in found.by_judgement().items():
        said = ", ".join(alone) or NEVER_ALONE.get(name, "sees nothing that no other sees")
        lines.append(f"| {name} | {len(kills)} | {len(alone)} | {said} |")
    return "\n".join(lines) + "\n"


def _faults(records: Iterable[Record]) -> str:
    lines = ["| fault | says | of | seen by | needed |", "| --- | --- | --- | --- | --- |"]
    for record in records:
        seen = ", ".join(record.killed_by) or record.blocked or f"equivalent: {record.equivalent}"
        if record.survives:
            seen = "**nothing**"
        cells = (record.name, record.says, f"{record.contract}, {record.dtype}", seen, ", ".join(record.needed))
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"
