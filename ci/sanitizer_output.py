"""Reading what compute-sanitizer writes around the lines of :mod:`ropecheck.suites.sanitized`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ropecheck.suites.planted_faults import KERNELS
from ropecheck.suites.sanitized import MARK, PLANT

_LINE = re.compile(r"^=========(.*)$")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_UNPRINTED = re.compile(r"were? not printed")
_UNUSABLE = re.compile(
    r"Device not supported|Internal Sanitizer Error|No attachable process|terminated before first instrumented"
)
# What the tool says of itself and of the process, as opposed to what it found.
_REMARKS = re.compile(r"COMPUTE-SANITIZER|Target application returned|Error: process didn't terminate|LEAK SUMMARY")


@dataclass(frozen=True)
class Report:
    """One thing that a tool found, as it wrote it."""

    lines: tuple[str, ...]

    @property
    def head(self) -> str:
        return self.lines[0]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass
class Session:
    """One process of the candidates' cases under a tool.

    ``answers`` holds what the process told at the end of each case, ``begun`` the cases that began, in order, and
    ``reports`` what was found in each. ``unusable`` says why the tool could not work, ``summary`` is its own count.
    """

    begun: list[int | str] = field(default_factory=list)
    answers: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[int | str, list[Report]] = field(default_factory=dict)
    stray: list[Report] = field(default_factory=list)
    unusable: str = ""
    summary: int | None = None
    unprinted: bool = False
    last: str = ""

    @property
    def unfinished(self) -> int | str | None:
        """The case in which the process ended, None where it ended between cases."""
        return next((number for number in self.begun if number not in self.answers), None)

    @property
    def doubt(self) -> str:
        """Why the absence of a report proves nothing; empty where it does."""
        if self.unusable:
            return self.unusable
        if self.summary is None:
            return f"the tool ended without a summary: {self.last or 'it wrote nothing'}"
        if self.unprinted:
            return "the tool did not print all that it found"
        if self.stray:
            return f"the tool reports something before the first case: {self.stray[0].head}"
        if (self.summary > 0) != any(self.reports.values()):
            return f"the tool counts {self.summary} errors, and wrote of {sum(map(len, self.reports.values()))}"
        return ""


def read(text: str, tool: str) -> Session:
    """What a session's whole output says."""
    session = Session()
    current: int | str | None = None
    for piece in _pieces(text):
        if isinstance(piece, str):
            event, number, told = _told(piece)
            if event == "begin":
                current = number
                session.begun.append(number)
            elif event == "end":
                session.answers[number] = told or {}
            continue
        head = piece.head
        if counted := _SUMMARY.search(head):
            session.summary = int(counted[1] or counted[2])
            session.unprinted |= bool(_UNPRINTED.search(piece.text))
        elif _UNUSABLE.search(head):
            session.unusable = session.unusable or head
        elif _UNPRINTED.search(head):
            session.unprinted = True
        elif not _REMARKS.search(head):
            _charge(session, current, piece, tool)
    said = [line.strip() for line in text.splitlines() if line.strip() and MARK not in line]
    session.last = said[-1].removeprefix("=========").strip()[:200] if said else ""
    return session


def _charge(session: Session, current: int | str | None, report: Report, tool: str) -> None:
    """A report belongs to the case in which it came, the planted kernel's to the plant alone."""
    if KERNELS[tool] in report.text:
        session.reports.setdefault(PLANT, []).append(report)
        return
    if current == PLANT:
        cases = [number for number in session.begun if number != PLANT]
        current = cases[-1] if cases else None
    if current is None:
        session.stray.append(report)
    else:
        session.reports.setdefault(current, []).append(report)


def _told(line: str) -> tuple[str, int | str, Any]:
    _, event, number, *rest = line.split(" ", 3)
    return event, int(number) if number.isdigit() else number, json.loads(rest[0]) if rest else None


def _pieces(text: str) -> Iterator[str | Report]:
    """Marks as text, and the tool's messages: a line with its indented followers."""
    message: list[str] = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if line.startswith(MARK):
            if message:
                yield Report(tuple(message))
            message = []
            yield line
        elif found:
            said = found[1]
            # Details of a message are indented, by five places.
            if said.strip() and not said.startswith("  "):
                if message:
                    yield Report(tuple(message))
                message = [said.strip()]
            elif said.strip() and message:
                message.append("    " + said.strip())
    if message:
        yield Report(tuple(message))
