"""Which public bug report has become which fault, and which judgement sees it: a table that is generated.

The reports are rows of a page of faults in public trackers, numbered O001 to O117, and of controls, C001 to C006, which
a judge must not fail. A row is a fault of the dictionary, or pinned elsewhere, or it waits; the last two say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .dictionary import FAULTS
from .sensitivity import Sensitivity

REPORTS = (*(f"O{number:03d}" for number in range(1, 118)), *(f"C{number:03d}" for number in range(1, 7)))
"""Every row."""

_TABLES = "waits for family tables (issue 8): a rule by which a model makes its frequencies"
_BUILDERS = "waits for families tables and rotate_positions (issue 8): a rule by which positions are made"
_FULL_WIDTH = "waits for family rotate_full (issue 8): tables as wide as what is rotated"
_SANITIZER = "no number is wrong: ropecheck sanitize sees the read on a GPU, and a planted one shows that it can"

ELSEWHERE: Mapping[str, str] = MappingProxyType({
    "O010": _BUILDERS,
    "O011": _BUILDERS,
    "O022": f"{_FULL_WIDTH}, since a table of lanes has no second half that could differ",
    "O035": "no contract says how an output lies; of a registered operator its fake does: fault fake-of-other-strides",
    "O036": _SANITIZER,
    "O037": _SANITIZER,
    "O042": "a launch that is refused raises, and whoever raises fails: on a GPU the far-offsets cases have the size",
    "O044": "waits for ropecheck bench (issue 7): nothing is wrong but the time",
    "O052": _TABLES,
    "O064": "waits for family tables (issue 8): two conventions, to be named; what either is off by is tables-scaled",
    "O065": _TABLES,
    "O066": _TABLES,
    "O067": _TABLES,
    "O068": _TABLES,
    "O069": _TABLES,
    "O071": _TABLES,
    "O077": _BUILDERS,
    "O079": _BUILDERS,
    "O083": _BUILDERS,
    "O084": "waits for family rotate_positions (issue 8): keys that were rotated are rotated on",
    "O110": "of harnesses: every table that a token of any case reads is finite, which a test asserts",
    "O116": "of harnesses: faults of the gradient alone pass every judgement of the forward, which a test asserts",
    "C001": "passes: pinned as the positions of contract qwen-image",
    "C002": "passes: pinned as the options sliced-positions and transposed-positions",
    "C003": "passes: what a compiler may keep in fp32 is admitted in compiled mode alone",
    "C004": "passes: a result is held against its admissible values, whatever their distance",
    "C006": "passes: pinned as the option one-row, one row of positions, or three equal ones",
})
"""Rows that are no fault of the dictionary, each with the reason."""


@dataclass(frozen=True)
class Row:
    """One report: the ``faults`` that stand for it, the judgements that see them, or where it is instead."""

    report: str
    faults: tuple[str, ...]
    seen_by: tuple[str, ...]
    elsewhere: str


def rows(found: Sensitivity) -> list[Row]:
    """Every report, with what was measured."""
    records = {record.name: record for record in found.records}
    table = []
    for report in REPORTS:
        faults = tuple(name for name, fault in FAULTS.items() if report in fault.rows)
        seen = dict.fromkeys(j for name in faults if name in records for j in records[name].killed_by)
        blocked = any(records[name].blocked for name in faults if name in records) and not seen
        equivalent = next((FAULTS[name].equivalent for name in faults if FAULTS[name].equivalent), "")
        elsewhere = ELSEWHERE.get(report, "needs a CUDA GPU" if blocked else equivalent)
        table.append(Row(report, faults, tuple(seen), elsewhere))
    return table


def as_markdown(found: Sensitivity) -> str:
    """The table as Markdown."""
    lines = ["| report | faults | seen by, or why there is none |", "| --- | --- | --- |"]
    for row in rows(found):
        lines.append(f"| {row.report} | {', '.join(row.faults)} | {', '.join(row.seen_by) or row.elsewhere} |")
    return "\n".join(lines) + "\n"
