"""What a set of candidates will be asked, found out in a process that a candidate may take down.

``python -m ropecheck.suites.inventory`` reads a request as JSON on standard input and answers with one line of JSON:
the candidates and the number of questions for each, or the sentence that says why there is nothing to ask.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from .candidates import Candidate, CandidateError, load_candidates
from .interpreter import interpreting, repair
from .judging import Selection, Unasked, check_selection, questions


def load_all(specifications: list[str]) -> dict[str, list[Candidate]]:
    """The candidates of every specification. Raises :class:`CandidateError`, also for a name that stands twice."""
    loaded = {specification: load_candidates(specification) for specification in dict.fromkeys(specifications)}
    owners: dict[str, str] = {}
    for specification, candidates in loaded.items():
        for candidate in candidates:
            if candidate.name in owners:
                both = f"{owners[candidate.name]} and {specification}"
                raise CandidateError(f"candidate name {candidate.name!r} stands in both {both}")
            owners[candidate.name] = specification
    return loaded


def inventory(specifications: list[str], selection: Selection) -> list[dict[str, Any]]:
    """For each candidate its name, contract, claims and specification, how many cases it is asked, and why not."""
    check_selection(selection)
    entries = []
    for specification, candidates in load_all(specifications).items():
        for candidate in candidates:
            asked = list(questions(candidate, selection))
            entries.append(
                {
                    "name": candidate.name,
                    "contract": candidate.contract,
                    "provides": list(candidate.provides),
                    "devices": list(candidate.devices),
                    "specification": specification,
                    "unavailable": candidate.unavailable,
                    "questions": len(asked),
                    "cases": sum(not isinstance(q, Unasked) for q in asked),
                }
            )
    return entries


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if interpreting():
        repair()
    try:
        return {"candidates": inventory(request["candidates"], Selection(**request["selection"]))}
    except (CandidateError, ValueError) as error:
        return {"error": str(error)}


def request(specifications: list[str], selection: Selection) -> str:
    """The request that asks for an inventory."""
    return json.dumps({"candidates": specifications, "selection": asdict(selection)})


if __name__ == "__main__":
    # What a candidate prints as it is imported must not stand in the answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(io.StringIO()):
        answer = _answer(json.load(sys.stdin))
    out.write(json.dumps(answer) + "\n")
    out.flush()
    # A candidate may have left threads behind that would keep the process alive.
    os._exit(0)
