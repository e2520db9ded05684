"""What a workflow shows of a gate: annotations, the job's summary, and the output ``verdict``.

Whatever comes from evidence is escaped: a reason that holds a workflow command, or a link, stays text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .gate_report import matrix_rows, summed_up, together
from .policy import Policy
from .states import Cell
from .states import verdict as verdict_of
from .text import annotation, markdown

_ANNOTATIONS = 10
"""As many of one level as GitHub shows of a step."""
_LINES = 200


def announce(policy: Policy, cells: Sequence[Cell], machines: Sequence[str]) -> None:
    """Tell the workflow that this process is a step of, if it is one."""
    groups = together(cells)
    _annotate("error", [f"{names}: {cell.state}: {cell.reason}" for cell, names in groups if not cell.met])
    _annotate("warning", [f"{names}: {cell.state}: {cell.reason}" for cell, names in groups if cell.met])
    _append("GITHUB_STEP_SUMMARY", summary(policy, cells, machines))
    _append("GITHUB_OUTPUT", f"verdict={verdict_of(cells)}\n")


def announce_error(sentence: str) -> None:
    """Tell the workflow that there is no verdict, which is no green one."""
    _annotate("error", [sentence])
    _append("GITHUB_STEP_SUMMARY", f"## ropecheck gate: invalid\n\n{markdown(sentence)}\n")
    _append("GITHUB_OUTPUT", "verdict=red\n")


def summary(policy: Policy, cells: Sequence[Cell], machines: Sequence[str]) -> str:
    """The job's summary in Markdown."""
    verdict = verdict_of(cells)
    said = verdict.upper() if verdict == "overridden" else verdict
    lines = [f"## ropecheck gate: {said}", "", markdown(summed_up(policy, cells)), ""]
    lines += ["| candidate | device | judgements passed | not passed |", "| --- | --- | --- | --- |"]
    for candidate, device, passed, others in matrix_rows(cells):
        lines.append(f"| {markdown(candidate)} | {markdown(device)} | {passed} | {markdown(others)} |")
    groups = together(cells)
    if groups:
        lines += ["", "Not qualified:", ""]
        lines += [f"- {markdown(names)}: {cell.state}: {markdown(cell.reason)}" for cell, names in groups[:_LINES]]
        lines += [f"- and {len(groups) - _LINES} more"] if len(groups) > _LINES else []
    lines += ["", "Evidence:", "", *(f"- {markdown(machine)}" for machine in machines or ["none"]), ""]
    return "\n".join(lines)


def _annotate(level: str, sentences: Sequence[str]) -> None:
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    shown = list(sentences[:_ANNOTATIONS])
    if len(sentences) > _ANNOTATIONS:
        shown[-1] = f"and {len(sentences) - _ANNOTATIONS + 1} more, see the summary of the job"
    for sentence in shown:
        # Standard error: standard output may be JSON for a machine. The runner reads both.
        print(f"::{level} title=ropecheck gate::{annotation(sentence)}", file=sys.stderr, flush=True)


def _append(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(text)
