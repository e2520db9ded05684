"""A watch over the queue of a hosted run: red when no runner takes its GPU jobs, which GitHub lets wait for a day.

It runs beside them on a hosted runner and asks GitHub's API, with the token of its job and the permission
``actions: read``: https://docs.github.com/en/rest/actions/workflow-jobs
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from .text import annotation, plain

EXIT_STATUS = "exit status: 0 every job was taken, or is over; 1 one still waits, or GitHub could not be asked."

Queue = Literal["taken", "no-runner", "awaiting-approval", "unknown"]
"""What became of the jobs; ``unknown`` where GitHub lists none, or does not answer."""

_APPROVAL = "waiting"
_QUEUED = ("queued", "requested", "pending")
_SENTENCES: dict[Queue, str] = {
    "taken": "a runner has taken every job",
    "no-runner": "no runner took the job",
    "awaiting-approval": "the job awaits approval",
    "unknown": "GitHub does not list the job",
}


class WatchdogError(ValueError):
    """The queue cannot be asked. The message is one sentence."""


@dataclass(frozen=True)
class HostedRun:
    """The workflow run that this process is a step of, as the runner's variables name it."""

    api: str
    repository: str
    run: str
    attempt: str
    token: str

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> HostedRun:
        """Raises :class:`WatchdogError` where a variable is missing."""
        names = ("GITHUB_API_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT", "GITHUB_TOKEN")
        for name in names:
            if not variables.get(name):
                raise WatchdogError(f"the variable {name} is not set: the watchdog is for a step of a hosted run")
        return cls(*(variables[name] for name in names))

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of this attempt, 100 at most. Raises :class:`WatchdogError` with what went wrong."""
        where = f"repos/{urllib.parse.quote(self.repository)}/actions/runs/{self.run}/attempts/{self.attempt}/jobs"
        request = urllib.request.Request(
            f"{self.api.rstrip('/')}/{where}?per_page=100",
            headers={"Authorization": f"Bearer {self.token}", "Accept": "application/vnd.github+json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                told = json.load(answer)
        except (OSError, ValueError) as error:
            raise WatchdogError(f"GitHub could not be asked: {plain(error)}") from None
        listed = told.get("jobs") if isinstance(told, dict) else None
        if not isinstance(listed, list) or not all(isinstance(job, dict) for job in listed):
            raise WatchdogError("GitHub's answer is no list of jobs")
        return listed


def state_of(jobs: Sequence[Mapping[str, Any]], prefix: str) -> Queue:
    """What became of the jobs whose name begins with ``prefix``."""
    states = [str(job.get("status")) for job in jobs if str(job.get("name", "")).startswith(prefix)]
    if not states:
        return "unknown"
    if any(state in _QUEUED for state in states):
        return "no-runner"
    return "awaiting-approval" if _APPROVAL in states else "taken"


def watch(
    jobs: Callable[[], Sequence[Mapping[str, Any]]],
    prefix: str,
    seconds: float,
    *,
    pause: float = 20.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Queue, str]:
    """Ask until every job is taken or the time is over; the last answer, and a sentence.

    A question that goes unanswered is asked again: only the last one counts.
    """
    end = clock() + seconds
    while True:
        try:
            state = state_of(jobs(), prefix)
            sentence = _SENTENCES[state]
        except WatchdogError as error:
            state, sentence = "unknown", str(error)
        if state == "taken" or clock() >= end:
            return state, sentence
        sleep(min(pause, max(end - clock(), 0.0)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", help="how the names of the jobs begin")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="MINUTES",
                        help="how long they may wait (default 20)")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Watch, tell the workflow through its outputs ``no-runner`` and ``awaiting-approval``, and return the status."""
    if os.environ.get("ACT"):
        # This machine is every runner of a local run; a job of a label that it does not serve never waits.
        console.print("a local run has no queue to be watched")
        return 0
    hosted = HostedRun.of(os.environ)
    state, sentence = watch(hosted.jobs, options.prefix, 60 * options.minutes)
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as stream:
            stream.writelines(f"{name}={str(name == state).lower()}\n" for name in ("no-runner", "awaiting-approval"))
    said = f"{options.prefix}: {sentence}" + ("" if state == "taken" else f" within {options.minutes:g} minutes")
    if state != "taken" and os.environ.get("GITHUB_ACTIONS") == "true":
        print(f"::error title=ropecheck ci watchdog::{annotation(said)}", flush=True)
    console.print(escape(plain(said)), highlight=False)
    return 0 if state == "taken" else 1
