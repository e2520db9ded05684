"""A progress bar with counts and an estimate of the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropecheck.suites.verdicts import Verdict

from .verify import Outcome


@contextmanager
def watched(console: Console, outcome: Outcome) -> Iterator[Callable[[Verdict], None]]:
    """Yield what is to be told of each verdict. On no terminal a line is printed every tenth of the way."""
    total = sum(c["questions"] for c in outcome.candidates)
    names = len(outcome.candidates)
    cases = sum(c["cases"] for c in outcome.candidates)
    console.print(f"{cases} cases for {names} candidate{'s' if names != 1 else ''}")
    seen = {"fail": 0, "blocked": 0, "number": 0}

    def counted(verdict: Verdict) -> str:
        seen["number"] += 1
        if verdict.verdict in seen:
            seen[verdict.verdict] += 1
        return f"{seen['fail']} failed, {seen['blocked']} blocked"

    if not console.is_terminal:

        def line(verdict: Verdict) -> None:
            said = counted(verdict)
            if seen["number"] * 10 // max(1, total) > (seen["number"] - 1) * 10 // max(1, total):
                console.print(f"{seen['number']} of {total}: {said}")

        yield line
        return
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("judging", total=total)
        yield lambda verdict: progress.update(task, advance=1, description=counted(verdict))
