"""Cells: verdicts counted by candidate, judgement, device and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ropecheck.suites.inventory import digest
from ropecheck.suites.verdicts import Verdict, count

NAMES = ("candidate", "contract", "judgement", "device", "dtype")


def cells(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For each candidate, judgement, device and dtype how many cases had which verdict, and what they were.

    ``cases`` is the digest of the ids of all cases, whatever became of them: a case that was renamed, left out or added
    changes it. A verdict that no case had is left out of the counts.
    """
    groups: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        groups[v.candidate, v.contract, v.judgement, v.device, v.dtype].append(v)
    return [
        {
            **dict(zip(NAMES, cell, strict=True)),
            **{verdict: n for verdict, n in count(group).items() if n},
            "cases": digest(v.case for v in group),
            "reasons": sorted({v.reason for v in group if v.reason}),
            "elements": sum(int(v.facts.get("elements", 0)) for v in group),
            "certified points": sum(int(v.facts.get("certified points", 0)) for v in group),
        }
        for cell, group in sorted(groups.items())
    ]
