"""The states of a cell at the gate, and what several of them come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["passed", "failed", "missing", "blocked", "stale", "expired", "pending", "overridden"]

GREEN, RED, OVERRIDDEN = "green", "red", "overridden"


@dataclass(frozen=True)
class Cell:
    """One thing that a policy requires, or that evidence may not hold, and what became of it.

    ``parts`` are candidate, judgement and device, or whatever else names it. ``allowed`` is where the policy lets a
    cell be blocked, or stale.
    """

    parts: tuple[str, ...]
    state: State
    reason: str = ""
    allowed: bool = False

    @property
    def name(self) -> str:
        return " x ".join(self.parts)

    @property
    def met(self) -> bool:
        """Whether it does not turn the gate red."""
        return self.allowed or self.state in ("passed", "overridden")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "parts": list(self.parts), "cell": self.name, "met": self.met}


_WORST: tuple[tuple[State, bool], ...] = (
    ("failed", False), ("stale", False), ("pending", False), ("missing", False), ("expired", False),
    ("blocked", False), ("overridden", False), ("stale", True), ("blocked", True), ("passed", False),
)  # fmt: skip


def worst(cells: Iterable[Cell]) -> Cell:
    """Of the parts that must all be passed the one that is furthest from it."""
    return min(cells, key=lambda cell: _WORST.index((cell.state, cell.allowed)))


def decided(accounts: Sequence[Cell]) -> Cell:
    """Of several accounts of one thing the one that counts: a failure, then a pass, then what is nearest to it."""
    failed = [cell for cell in accounts if cell.state == "failed"]
    return (failed or [max(accounts, key=lambda cell: _WORST.index((cell.state, cell.allowed)))])[0]


def verdict(cells: Sequence[Cell]) -> str:
    """``green`` where every cell is met, ``overridden`` where some are only by an override, else ``red``."""
    if not cells or not all(cell.met for cell in cells):
        return RED
    return OVERRIDDEN if any(cell.state == "overridden" for cell in cells) else GREEN
