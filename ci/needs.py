"""The jobs that a workflow's last job needs, as its context ``needs`` says what became of them.

A verdict that asks for no failure would take a skipped job, and one that no runner took, for a passed one: here each
result must be ``success`` exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .states import Cell, State

_RESULTS: dict[str, tuple[State, str]] = {
    "success": ("passed", ""),
    "failure": ("failed", "the job failed"),
    "cancelled": ("missing", "the job was cancelled before its end"),
    "skipped": ("missing", "the job was skipped, and what did not run has shown nothing"),
    "": ("pending", "the job has no result: no runner took it, or it awaits approval"),
}
_WAITING = {"no-runner": "no GPU runner took the job", "awaiting-approval": "the run awaits approval"}
"""Outputs that are ``true`` where a job which watches the queue says why another has not begun."""


class NeedsError(ValueError):
    """The context cannot be read. The message is one sentence."""


def of_context(text: str | None) -> tuple[list[Cell], str]:
    """A cell for each job, and why evidence may still be to come (empty where nothing says so).

    ``text`` is ``toJSON(needs)``. Raises :class:`NeedsError`.
    """
    if text is None:
        raise NeedsError("--needs reads the environment variable NEEDS, which is not set: NEEDS: ${{ toJSON(needs) }}")
    try:
        jobs = json.loads(text)
    except (ValueError, RecursionError):
        raise NeedsError("--needs: the environment variable NEEDS holds no JSON") from None
    if not isinstance(jobs, dict) or not jobs:
        raise NeedsError("--needs: the environment variable NEEDS names no job")
    if not all(isinstance(job, dict) and isinstance(job.get("result"), str) for job in jobs.values()):
        raise NeedsError("--needs: a job in the environment variable NEEDS has no result")
    cells = [_cell(name, job["result"]) for name, job in sorted(jobs.items())]
    reasons = [*map(_watched, jobs.values()), *map(_untaken, jobs.values())]
    return cells, next(filter(None, reasons), "")


def _cell(name: str, result: str) -> Cell:
    state, reason = _RESULTS.get(result, ("failed", f"the job's result is {result!r}, which is not success"))
    return Cell(("job", name), state, reason)


def _watched(job: Mapping[str, Any]) -> str:
    """What a job that watches the queue says of the others, which know no more than that they have no result."""
    outputs = job.get("outputs")
    if not isinstance(outputs, dict):
        return ""
    return next((why for name, why in _WAITING.items() if outputs.get(name) == "true"), "")


def _untaken(job: Mapping[str, Any]) -> str:
    return _RESULTS[""][1] if job["result"] == "" else ""
