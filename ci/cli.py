"""The command ``ropecheck``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from ropecheck.oracle import __version__
from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.candidates import DEVICES, DTYPES, CandidateError
from ropecheck.suites.cases import PLANS
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import canonical

from . import ci_command, gate_command, gate_report, listings, report, sanitize_command, sensitivity
from .at_hand import of_a_run
from .environment import record
from .evidence import command as evidence_command
from .evidence.form import EvidenceError
from .evidence.writing import close, document, prepare, with_sources
from .explain import explain
from .gate import gated
from .policy import PolicyError
from .policy_file import load_policy, shipped_policies
from .preflight import lacking
from .progress import watched
from .verify import (
    SHIPPED,
    Outcome,
    Run,
    UsageError,
    carry_out,
    exit_status,
    held_to,
    lost,
    take_inventory,
    without_case,
    without_idle,
)

EXIT_STATUS = """exit status: 0 everything required passed; 1 a case failed; 2 the command cannot be carried out as
given; 3 something required was blocked, or a candidate had no executed case; 4 the oracle itself failed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One sentence; argparse would print the whole usage before it.
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command and return its exit status."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (UsageError, CandidateError, EvidenceError, PolicyError, ValueError) as error:
        print(f"ropecheck: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ropecheck: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ropecheck", description="Decides whether a rotary-embedding kernel is right.")
    parser.add_argument("--version", action="version", version=f"ropecheck {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], text: str, **more: Any
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, **more)
        sub.set_defaults(command=function)
        sub.add_argument("--json", action="store_true", help="print JSON for a machine")
        return sub

    sub = command("verify", _verify, "judge candidates", epilog=EXIT_STATUS)
    sub.add_argument("candidates", nargs="*", metavar="CANDIDATE", help="FILE.py or package.module:attribute; "
                     "without one, our kernels, their reference and the vendors' functions")  # fmt: skip
    for name, known in (("contract", CONTRACTS), ("judgement", JUDGEMENTS), ("device", DEVICES), ("dtype", DTYPES)):
        sub.add_argument(f"--{name}", action="append", default=[], choices=tuple(known), metavar=name.upper(),
                         help=f"only {', '.join(known)}; repeatable")  # fmt: skip
    sub.add_argument("--case", action="append", default=[], metavar="CASE", help="only the case of this id; repeatable")
    sub.add_argument("--plan", choices=PLANS,
                     help="how many cases, see ropecheck judgements; default standard, or the policy's")  # fmt: skip
    sub.add_argument("--policy", metavar="POLICY", help="which cells are required: FILE.toml or a shipped policy, "
                     + ", ".join(shipped_policies()))  # fmt: skip
    sub.add_argument("--seed", type=_natural, default=0, help="seed of every payload (default 0)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder for verdicts, JUnit and manifest")
    sub.add_argument("-n", dest="workers", type=_positive, default=os.cpu_count() or 1, metavar="N",
                     help="worker processes (default: one for each processor)")  # fmt: skip
    sub.add_argument("--case-limit", type=_seconds, default=120.0, metavar="SECONDS",
                     help="longest that a case may take before its process is ended (default 120)")  # fmt: skip

    sub = command("sanitize", _sanitize, "run candidates on a GPU under compute-sanitizer", epilog=EXIT_STATUS)
    sanitize_command.add_options(sub, _natural, _positive, _seconds)

    sub = command(
        "sensitivity", _sensitivity, "say which judgement sees which fault", epilog=sensitivity.EXIT_STATUS
    )
    sensitivity.add_options(sub, _natural, _positive)

    sub = command("gate", _gate, "hold evidence to a policy", epilog=gate_command.EXIT_STATUS)
    gate_command.add_options(sub)

    sub = commands.add_parser("evidence", help="show, check, join, pack and compare evidence")
    evidence_command.add_options(sub)
    sub.set_defaults(command=_evidence)

    sub = command("explain", _explain, "judge one case alone and show its worst elements", epilog=EXIT_STATUS)
    sub.add_argument("case", metavar="CASE[@CANDIDATE]", help="as a report names it")
    sub.add_argument("--candidate", action="append", default=[], help="FILE.py or package.module:attribute; repeatable")
    sub.add_argument("--seed", type=_natural, default=0, help="seed of the payload (default 0)")

    sub = command("contracts", _contracts, "list the contracts and what they are pinned to")
    sub.add_argument("contract", nargs="*", help="only these")
    sub.add_argument("--check", action="store_true", help="execute the installed vendors' functions and compare bytes")
    sub.add_argument("--unchanged", action="store_true",
                     help="check, and exit with 1 unless every pinned function is there as it is recorded")  # fmt: skip

    sub = command("judgements", _judgements, "list the judgements, what they ask, and how many cases they have")
    sub.add_argument("--plan", choices=PLANS, default="standard")

    ci_command.add_options(command("ci", _ci, "run the workflows of a repository on this machine; watch a hosted run"))

    command("doctor", _doctor, "say what this machine has, and what cannot be done without the rest")
    return parser


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text}")
    return value


def _console(*, stderr: bool = False) -> Console:
    """The terminal as it is; where there is none, a width at which tables stay readable in a log."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=140)


def _verify(options: argparse.Namespace) -> int:
    policy = load_policy(options.policy) if options.policy is not None else None
    plan = options.plan or (policy.plan if policy is not None else "") or "standard"
    selection = Selection(plan, options.contract, options.judgement, options.device, options.dtype, options.case)
    if policy is not None:
        selection = held_to(selection, policy)
    if missing := lacking(policy.needs if policy is not None else ()):
        # Nothing has been written, and a run that cannot give the answer is not begun.
        asking = f"policy {policy.name}" if policy is not None else "a run"
        for sentence in missing:
            print(f"ropecheck: {asking} needs {sentence}", file=sys.stderr)
        return 3
    specifications = tuple(dict.fromkeys(options.candidates)) or SHIPPED
    run = Run(specifications, selection, options.seed, options.workers, options.case_limit)
    console = _console(stderr=options.json)
    started = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out.absolute() if options.out else Path(scratch) / "report"
        folder = prepare(out)
        inventory = take_inventory(run)
        if policy is not None:
            run = run if options.candidates else without_idle(run, inventory, policy)
            policy.check(c["name"] for c in inventory)
        judged = with_sources([c for c in inventory if c["specification"] in run.specifications])
        outcome = Outcome(judged)
        with watched(console, outcome) as tell:
            check = listings.PinCheck(sorted({c["contract"] for c in outcome.candidates}))
            carry_out(run, folder, outcome, tell)
            outcome.pins = check.reports()
        settings = {"kind": "verify", "candidates": list(run.specifications), "selection": asdict(selection),
                    "seed": run.seed, "workers": run.workers,
                    "policy": {"name": policy.name, "sha256": policy.sha256} if policy is not None else None,
                    "started": started.isoformat(timespec="seconds"),
                    "seconds": round((datetime.now(timezone.utc) - started).total_seconds(), 1)}  # fmt: skip
        evidence = document(judged, outcome.verdicts, record(), outcome.pins, settings)
        required = None
        if policy is not None:
            ended = datetime.now(timezone.utc)
            required = gated(policy.of_a_run(), [evidence], of_a_run(run, evidence), ended)
        status = exit_status(outcome, selection, required)
        evidence["run"]["exit status"] = status
        if options.out:
            close(folder, out, evidence, outcome.verdicts)
    origin = {c["name"]: c["specification"] for c in outcome.candidates}
    report.summary(console, outcome.verdicts, outcome.pins, origin)
    if policy is not None and required is not None:
        gate_report.shown(console, policy, required)
    if count := lost(outcome):
        said = "; ".join(f"{device}: {line}" for device, line in outcome.sessions.items())
        console.print(f"[yellow]{count} cases were not reached, for a session ended early:[/] {escape(said)}")
    for name in sorted(without_case(outcome)):
        console.print(f"[yellow]no case of {name} was executed[/]")
    if options.out:
        console.print(f"report in {options.out}")
    if options.json:
        print(canonical({**evidence, "verdicts": [v.as_json() for v in outcome.verdicts]}))
    return status


def _sanitize(options: argparse.Namespace) -> int:
    return sanitize_command.run(options, _console(stderr=options.json))


def _sensitivity(options: argparse.Namespace) -> int:
    return sensitivity.run(options, _console(stderr=options.json))


def _gate(options: argparse.Namespace) -> int:
    return gate_command.run(options, _console(stderr=options.json))


def _evidence(options: argparse.Namespace) -> int:
    return evidence_command.run(options, _console(stderr=options.json))


def _explain(options: argparse.Namespace) -> int:
    specifications = options.candidate or list(SHIPPED)
    verdict = explain(options.case, specifications, options.seed)
    if options.json:
        print(canonical(verdict.as_json()))
    else:
        report.explained(_console(), verdict, options.candidate[0] if options.candidate else "")
    if "judge failed" in verdict.facts:
        return 4
    return {"pass": 0, "fail": 1, "blocked": 3, "not-applicable": 0}[verdict.verdict]


def _contracts(options: argparse.Namespace) -> int:
    for name in options.contract:
        if name not in CONTRACTS:
            raise UsageError(f"unknown contract {name!r}; known contracts are {', '.join(sorted(CONTRACTS))}")
    rows = [row for row in listings.contracts() if not options.contract or row["name"] in options.contract]
    reports = listings.checked_pins([row["name"] for row in rows]) if options.check or options.unchanged else []
    if options.json:
        print(canonical({"contracts": rows, "pins": reports}))
    else:
        console = _console()
        console.print(listings.contract_table(rows))
        for line in report.pin_lines(reports):
            console.print(line)
    states = {r["state"] for r in reports}
    return 4 if "unequal" in states else int(options.unchanged and states != {"known"})


def _judgements(options: argparse.Namespace) -> int:
    rows = listings.judgements(options.plan)
    if options.json:
        print(canonical({"plan": options.plan, "judgements": rows}))
    else:
        _console().print(listings.judgement_table(rows, options.plan))
    return 0


def _ci(options: argparse.Namespace) -> int:
    return ci_command.run(options, _console(stderr=options.json))


def _doctor(options: argparse.Namespace) -> int:
    found = listings.doctor()
    if options.json:
        print(canonical(found))
    else:
        console = _console()
        console.print(listings.doctor_table(found))
        for line in listings.native_lines(found):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
