"""What a policy requires of the suite and of the clock: that faults are seen, and that kernels are no slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .at_hand import AtHand
from .freshness import outdated_sources
from .policy import BenchmarkFloor, SensitivityFloor
from .states import Cell, State, decided

Document = Mapping[str, Any]


def sensitivity_of(floor: SensitivityFloor, documents: Sequence[tuple[Document, str]], at_hand: AtHand) -> Cell:
    """The cell ``sensitivity``. Each document comes with the reason why nothing of it counts, or an empty one."""
    accounts = [
        _sensitivity(floor, document["sensitivity"], unfit, at_hand)
        for document, unfit in documents
        if document.get("sensitivity") is not None
    ]
    missing = Cell(("sensitivity",), "missing", "no evidence says which faults the suite sees: ropecheck sensitivity")
    return decided(accounts or [missing])


def _sensitivity(floor: SensitivityFloor, found: Mapping[str, Any], unfit: str, at_hand: AtHand) -> Cell:
    def cell(state: State, reason: str = "") -> Cell:
        return Cell(("sensitivity",), state, reason)

    if unfit or found["judging"] != at_hand.sensitivity:
        return cell("stale", unfit or "the suite or its faults have changed since its sensitivity was measured")
    judged, seen, survivors = found["judged"], found["seen"], found["survivors"]
    # The share is computed here: what the evidence calls its coverage could be anything.
    if seen < floor.coverage * judged:
        return cell("failed", f"{seen} of {judged} faults are seen, and the policy requires the share "
                    f"{floor.coverage:g}; unseen: {', '.join(survivors[:5]) or 'not named'}")  # fmt: skip
    if seen + len(survivors) != judged:
        return cell("failed", f"{seen} of {judged} faults are said to be seen, and {len(survivors)} not to be")
    if judged < floor.faults:
        return cell("missing", f"{judged} faults were judged, and the policy requires {floor.faults}")
    return cell("passed")


def benchmark_of(floor: BenchmarkFloor, documents: Sequence[tuple[Document, str]], at_hand: AtHand) -> Cell:
    """The cell of one benchmark on one device."""
    parts = ("benchmark", f"{floor.name} on {floor.device}")
    accounts = []
    for document, unfit in documents:
        for row in document.get("benchmarks") or ():
            if (row["name"], row["device"]) != (floor.name, floor.device):
                continue
            names = [c["name"] for c in document["candidates"]]
            old = unfit or next((why for name in names if (why := outdated_sources(document, name, at_hand))), "")
            slow = f"it takes {row['ratio']:g} times as long, and the policy allows {floor.ratio:g}"
            state: State = "stale" if old else "passed" if row["ratio"] <= floor.ratio else "failed"
            accounts.append(Cell(parts, state, old or (slow if state == "failed" else "")))
    return decided(accounts or [Cell(parts, "missing", "no evidence holds this benchmark")])
