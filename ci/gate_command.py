"""The command ``gate``: evidence and a policy in, one verdict out, the same one on every machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ropecheck.suites.cases import PLANS
from ropecheck.suites.verdicts import canonical

from . import gate_report
from .annotations import announce, announce_error
from .at_hand import looked_up
from .evidence.reading import load
from .gate import gated
from .needs import of_context
from .policy import Policy
from .policy_file import load_policy, shipped_policies
from .states import Cell, verdict
from .text import plain
from .verify import SHIPPED

EXIT_STATUS = """exit status: 0 every required cell is passed, or what the policy allows or overrides; 1 one is not;
2 the command cannot be carried out as given, or evidence is invalid."""

_STYLES = {"green": "bold green", "overridden": "bold magenta", "red": "bold red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``gate``, but for ``--json``."""
    parser.add_argument("evidence", nargs="*", type=Path, metavar="EVIDENCE",
                        help="folders or .zip files of evidence; with none every required cell is missing")  # fmt: skip
    parser.add_argument("--policy", required=True, metavar="POLICY", help="which cells are required: FILE.toml or a "
                        f"shipped policy, {', '.join(shipped_policies())}")  # fmt: skip
    parser.add_argument("--candidate", action="append", default=[], metavar="CANDIDATE",
                        help="FILE.py or package.module:attribute, whose sources and cases evidence must be of; "
                        "repeatable; without one, our kernels and the vendors' functions")  # fmt: skip
    parser.add_argument("--needs", action="store_true",
                        help="require that every job in the environment variable NEEDS, a workflow's toJSON(needs), "
                        "has the result success")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out the command and return its exit status."""
    try:
        policy, cells, documents = _judged(options)
    except ValueError as error:
        # Whoever reads the output of a step, and not its status, must not find an earlier verdict.
        announce_error(str(error))
        raise
    found = verdict(cells)
    machines = [machine(document) for document in documents]
    console.print(gate_report.matrix(cells))
    for line in machines:
        console.print(f"evidence: {escape(line)}", highlight=False, soft_wrap=True)
    gate_report.shown(console, policy, cells)
    said = found.upper() if found == "overridden" else found
    console.print(f"[{_STYLES[found]}]gate {escape(plain(policy.name))}: {said}[/]", highlight=False)
    announce(policy, cells, machines)
    if options.json:
        print(canonical({"policy": {"name": policy.name, "sha256": policy.sha256}, "verdict": found,
                         "cells": [cell.as_json() for cell in cells], "evidence": machines}))  # fmt: skip
    return 1 if found == "red" else 0


def _judged(options: argparse.Namespace) -> tuple[Policy, list[Cell], list[Mapping[str, Any]]]:
    policy = load_policy(options.policy)
    jobs, pending = of_context(os.environ.get("NEEDS")) if options.needs else ([], "")
    documents = [document for path in options.evidence for document in load(path).documents]
    specifications = tuple(dict.fromkeys(options.candidate)) or SHIPPED
    at_hand = looked_up(specifications, _plans(policy, documents))
    policy.check(at_hand.candidates)
    cells = gated(policy, documents, at_hand, datetime.now(timezone.utc), pending)
    return policy, [*cells, *jobs], documents


def _plans(policy: Policy, documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The plans whose cases must be known: those that evidence was asked, of which there are three at most."""
    asked = {(document["run"].get("selection") or {}).get("plan") for document in documents}
    return [plan for plan in PLANS if plan in asked] or [policy.plan or "standard"]


def machine(document: Mapping[str, Any]) -> str:
    """What recorded a document, when, of which commit; as text that is not escaped yet for where it is shown."""
    environment, ran = document["environment"], document["run"]
    gpus = [str(gpu["name"]) for gpu in environment["gpus"]]
    where = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    commit = environment.get("commit")
    of = f"commit {str(commit['id'])[:12]}{' with changes' if commit['dirty'] else ''}" if commit else "no commit"
    by = f"torch {environment['torch']}, runner {environment['runner']}"
    return plain(f"{ran['kind']} on {where}, {by}, {of}, {ran['started']}")
