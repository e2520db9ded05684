"""Reading what compute-sanitizer writes around the lines of :mod:`ropecheck.suites.sanitized`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ropecheck.suites.planted_faults import KERNELS
from ropecheck.suites.sanitized import MARK, PLANT

ERROR_STATUS = 99
"""The exit status that the tool is told to end with where it found something, and the process itself ended well."""

# What a process prints without ending the line stands before the tool's words on the same line.
_LEADER = re.compile(r"=========(?!=)")
_MARKED = re.compile(rf"{MARK} (begin|end) ([0-9]{{1,9}}|{PLANT}) (.*)")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_UNPRINTED = re.compile(r"were? not printed")
_UNUSABLE = re.compile(
    r"Device not supported|Internal Sanitizer Error|No attachable process|terminated before first instrumented"
)
_PROCESS_FAILED = re.compile(r"Target application returned|Error: process didn't terminate")
_KILLED = (128 + 9, 128 + 15)
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
    ``reports`` what was found in each. ``unusable`` says why the tool could not work, ``malformed`` holds the first
    line of the process that cannot be read. ``summary`` is the tool's own count, the largest where it gives several,
    and ``closed`` says that no case came after it; ``process_failed`` says that the tool saw the process end badly,
    ``status`` is the tool's exit status.
    """

    begun: list[int | str] = field(default_factory=list)
    answers: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    reports: dict[int | str, list[Report]] = field(default_factory=dict)
    stray: list[Report] = field(default_factory=list)
    unusable: str = ""
    malformed: str = ""
    summary: int | None = None
    closed: bool = False
    process_failed: bool = False
    status: int = 0
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
        if self.malformed:
            return f"a line of the process cannot be read: {self.malformed}"
        if self.summary is None or not self.closed:
            return f"the tool ended without a summary: {self.last or 'it wrote nothing'}"
        if self.unprinted:
            return "the tool did not print all that it found"
        if self.stray:
            return f"the tool reports something before the first case: {self.stray[0].head}"
        written = sum(map(len, self.reports.values()))
        # A count that is larger than what was read may hide one; the plant's reports are among both.
        if self.summary > written or (written and not self.summary):
            return f"the tool counts {self.summary} errors, and wrote of {written}"
        # After its planted fault the process may end badly; the tool then says so and passes the status on.
        passed_on = self.process_failed and self.status > 0 and self.status not in _KILLED
        if self.status not in (0, ERROR_STATUS) and not passed_on:
            return f"the tool ended with status {self.status}"
        return ""


def read(text: str, tool: str, status: int = 0) -> Session:
    """What a session's whole output says, of a tool that ended with ``status``: negative where a signal ended it."""
    session = Session(status=status)
    current: int | str | None = None
    for piece in _pieces(text):
        if isinstance(piece, str):
            session.closed = False
            told = _told(piece)
            if told is None:
                session.malformed = session.malformed or piece[:200]
                continue
            event, number, answer = told
            if event == "begin":
                current = number
                session.begun.append(number)
            else:
                session.answers[number] = answer
            continue
        head = piece.head
        if counted := _SUMMARY.search(head):
            session.summary = max(int(counted[1] or counted[2]), session.summary or 0)
            session.closed = True
            session.unprinted |= bool(_UNPRINTED.search(piece.text))
        elif _UNUSABLE.search(head):
            session.unusable = session.unusable or head
        elif _UNPRINTED.search(head):
            session.unprinted = True
        elif _REMARKS.search(head):
            session.process_failed |= bool(_PROCESS_FAILED.search(head))
        else:
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


def _told(line: str) -> tuple[str, int | str, dict[str, Any]] | None:
    """Event, number of the case and answer; None for a line that was cut or is not the process's own."""
    found = _MARKED.fullmatch(line)
    if found is None:
        return None
    try:
        answer = json.loads(found[3])
    except ValueError:
        return None
    if answer is not None and not isinstance(answer, dict):
        return None
    return found[1], PLANT if found[2] == PLANT else int(found[2]), answer or {}


def _pieces(text: str) -> Iterator[str | Report]:
    """Marks as text, and the tool's messages: a line with its indented followers."""
    message: list[str] = []
    for line in text.splitlines():
        if line.startswith(MARK):
            if message:
                yield Report(tuple(message))
            message = []
            yield line
            continue
        for said in _LEADER.split(line)[1:]:
            # Details of a message are indented, by five places.
            if said.strip() and not said.startswith("  "):
                if message:
                    yield Report(tuple(message))
                message = [said.strip()]
            elif said.strip() and message:
                message.append("    " + said.strip())
    if message:
        yield Report(tuple(message))
