"""``ropecheck ci``: the workflows on this machine, and the watch over the queue of a hosted run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ropecheck.suites.verdicts import canonical

from . import watchdog
from .local import EVENTS, RUNNERS, LocalRun, Outcome, carry_out, repository_root
from .text import plain

EXIT_STATUS = "exit status: 0 every job succeeded; 1 a job failed or has no result; 2 the workflow cannot be run here."


def add_options(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(required=True, metavar="TASK")
    local = tasks.add_parser(
        "local", help="run the workflows of this repository on this machine, through act", epilog=EXIT_STATUS,
        description="Runs the workflows of this repository on this machine, through act and without containers.",
    )  # fmt: skip
    local.set_defaults(task=_local)
    local.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON for a machine")
    local.add_argument("--workflow", default="contracts", metavar="NAME", help="default contracts")
    local.add_argument("--event", choices=EVENTS, default="pull_request", help="default pull_request")
    local.add_argument("--job", default="", metavar="ID", help="only this job, and those that it needs")
    local.add_argument("--input", action="append", default=[], type=_input, metavar="NAME=VALUE",
                       help="an input of workflow_dispatch; repeatable")  # fmt: skip
    local.add_argument("--matrix", action="append", default=[], metavar="NAME:VALUE",
                       help="only this part of a matrix; repeatable")  # fmt: skip
    local.add_argument("--runners", default=",".join(RUNNERS), metavar="LABEL,...",
                       help="labels that this machine serves (default %(default)s); others are nobody's")  # fmt: skip
    local.add_argument("--repository", type=_repository, metavar="OWNER/NAME=DIR",
                       help="take this repository's actions and workflows from a folder")  # fmt: skip
    watch = tasks.add_parser(
        "watchdog", help="wait until a runner has taken the jobs of this run", epilog=watchdog.EXIT_STATUS,
        description="Asks GitHub until a runner has taken every job of this run whose name begins with PREFIX.",
    )  # fmt: skip
    watch.set_defaults(task=watchdog.run)
    watchdog.add_options(watch)


def _input(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def _repository(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name.count("/") != 1 or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"must be OWNER/NAME=DIR with a folder that exists, not {text!r}")
    return name, Path(folder).resolve()


def _local(options: argparse.Namespace, console: Console) -> int:
    run = LocalRun(
        root=repository_root(Path.cwd()), workflow=options.workflow, event=options.event, job=options.job,
        inputs=dict(options.input), matrix=tuple(options.matrix),
        runners=tuple(label for label in options.runners.split(",") if label), repository=options.repository,
    )  # fmt: skip

    def tell(job: str, text: str) -> None:
        for line in text.split("\n"):
            shown = f"[dim]{escape(plain(job))} |[/] {escape(plain(line, limit=2000))}"
            console.print(shown, highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="ropecheck-local-") as scratch:
        outcome = carry_out(run, Path(scratch), tell)
    if options.json:
        told = {"workflow": run.workflow, "event": run.event, "runner": "local workflow", "jobs": outcome.results}
        print(canonical(told))
    else:
        _shown(console, run, outcome)
    return 0 if outcome.green else 1


def _shown(console: Console, run: LocalRun, outcome: Outcome) -> None:
    table = Table()
    table.add_column("job", overflow="fold")
    table.add_column("result")
    for name, result in outcome.results.items():
        style = "green" if result == "success" else "bold red"
        table.add_row(escape(plain(name)), f"[{style}]{escape(plain(result))}[/]")
    console.print(table)
    said = "[green]green[/]" if outcome.green else "[bold red]red[/]"
    console.print(f"local run of {escape(run.workflow)} on {run.event}: {said}; it is no hosted one", highlight=False)


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out the task and return its exit status."""
    task: Callable[[argparse.Namespace, Console], int] = options.task
    return task(options, console)
