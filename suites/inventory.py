"""What a set of candidates will be asked, found out in a process that a candidate may take down.

``python -m ropecheck.suites.inventory`` reads a request as JSON on standard input and answers with one line of JSON:
the candidates and the number of questions for each, or the sentence that says why there is nothing to ask. A request
with ``anywhere`` also asks which cases a machine that lacks nothing would judge, whatever this one lacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .candidates import Candidate, CandidateError, load_candidates
from .interpreter import interpreting, repair
from .judgements.sanitizer import SANITIZER, TOOLS
from .judgements.sanitizer import cases as sanitizer_cases
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


def inventory(specifications: list[str], selection: Selection, *, anywhere: bool = False) -> list[dict[str, Any]]:
    """For each candidate its name, contract, claims and specification, how many cases it is asked, and why not.

    ``files`` are the files that define it. With ``anywhere`` there is also ``asked``, see :func:`asked`.
    """
    check_selection(selection)
    entries = []
    for specification, candidates in load_all(specifications).items():
        for candidate in candidates:
            given = list(questions(candidate, selection))
            entries.append(
                {
                    "name": candidate.name,
                    "contract": candidate.contract,
                    "family": candidate.family,
                    "provides": list(candidate.provides),
                    "devices": list(candidate.devices),
                    "dtypes": list(candidate.dtypes),
                    "specification": specification,
                    "unavailable": candidate.unavailable,
                    "files": files(candidate),
                    "questions": len(given),
                    "cases": sum(not isinstance(q, Unasked) for q in given),
                    **({"asked": asked(candidate, selection)} if anywhere else {}),
                }
            )
    return entries


def asked(candidate: Candidate, selection: Selection) -> list[dict[str, Any]]:
    """For each judgement, device and dtype how many cases a machine that lacks nothing judges, and their digest.

    A judgement that does not apply has one question, no dtype, and the ``reason``. The sanitizer's cases are each
    asked of every tool.
    """
    cells: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for question in questions(candidate, selection, anywhere=True):
        if isinstance(question, Unasked):
            cells[question.judgement, question.device, "", question.reason].append(question.id)
        else:
            cells[question.judgement, question.device, question.dtype, ""].append(question.id)
    if "cuda" in candidate.devices:
        for case in sanitizer_cases(candidate, selection.plan):
            cells[SANITIZER, "cuda", case.dtype, ""] += [f"{case.id}/{tool}" for tool in TOOLS]
    names = ("judgement", "device", "dtype", "reason")
    return [
        {**dict(zip(names, cell, strict=True)), "count": len(ids), "cases": digest(ids)}
        for cell, ids in sorted(cells.items())
    ]


def digest(cases: Iterable[str]) -> str:
    """SHA-256 of the sorted ids of cases: the same for the same cases, however many machines judged them."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()


def files(candidate: Candidate) -> dict[str, Any]:
    """The files that define ``candidate``, absolute: ``entry`` lists it, ``run`` are the modules of its functions by
    name, ``sources`` what it declares by the name that it gives it."""
    origin, _, attribute = candidate.origin.rpartition(":")
    module = sys.modules.get(origin) if attribute and origin else None
    entry = getattr(module, "__file__", None) or candidate.origin
    functions = [unwrapped(function) for function in (candidate.run, candidate.vjp) if function is not None]
    names = dict.fromkeys(str(getattr(function, "__module__", "")) for function in functions)
    paths = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    here = Path(entry).resolve()
    return {
        "entry": str(here),
        "module": origin if module is not None else "",
        "run": {name: str(Path(path).resolve()) for name, path in paths.items() if path},
        "sources": {name: os.path.normpath(here.parent / name) for name in candidate.sources},
    }


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function within decorators and partial applications."""
    function = inspect.unwrap(function)
    return unwrapped(function.func) if isinstance(function, partial) else function


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if interpreting():
        repair()
    try:
        selection = Selection(**request["selection"])
        return {"candidates": inventory(request["candidates"], selection, anywhere=request["anywhere"])}
    except (CandidateError, ValueError) as error:
        return {"error": str(error)}


def request(specifications: list[str], selection: Selection, *, anywhere: bool = False) -> str:
    """The request that asks for an inventory."""
    return json.dumps({"candidates": specifications, "selection": asdict(selection), "anywhere": anywhere})


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
