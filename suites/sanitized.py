"""What runs under a sanitizer: a candidate's cases one after another, each between two lines on standard output.

``python -m ropecheck.suites.sanitized REQUEST.json`` calls the cases of the request; without ``tool`` in it, it answers
with the candidates and the cases that a plan has for them. The last thing that it runs is the fault planted for the
tool, so that a report of it shows that the tool was detecting up to the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import planted_faults
from .candidates import CandidateError
from .cases import Case, Inputs, build
from .families import Call
from .inventory import load_all
from .invocation import CandidateFault, derivatives, outputs, vjp_outputs
from .judgements.sanitizer import SANITIZER, cases

MARK = "ropecheck-sanitized"
"""How a line of this module's begins. Then come the event, the number of the case or 'plant', and JSON."""

PAUSE = 0.05
"""Seconds before the line that ends a case: a sanitizer's process writes its reports on its own time."""

PLANT = "plant"


def mark(event: str, number: int | str, told: Any = None) -> None:
    """Write one line, whole, past any buffer."""
    os.write(1, f"\n{MARK} {event} {number} {json.dumps(told)}\n".encode())


def listed(request: dict[str, Any]) -> dict[str, Any]:
    """The candidates of ``specifications`` and their cases in ``plan``; or ``error``, a sentence."""
    try:
        loaded = load_all(request["specifications"])
    except CandidateError as error:
        return {"error": str(error)}
    return {
        "candidates": [
            {
                "name": candidate.name, "specification": specification, "contract": candidate.contract,
                "kernels": list(candidate.kernels), "unavailable": candidate.unavailable,
                "cases": [{**asdict(case), "id": case.id} for case in cases(candidate, request["plan"])]
                if "cuda" in candidate.devices else [],
            }
            for specification, candidates in loaded.items()
            for candidate in candidates
        ]
    }  # fmt: skip


def called(request: dict[str, Any]) -> None:
    """Call every case, then run the planted fault. A process whose CUDA context is broken ends there."""
    candidates = {c.name: c for group in load_all(request["specifications"]).values() for c in group}
    for number, asked in request["cases"]:
        stored = {name: value for name, value in asked["case"].items() if name != "id"}
        case = Case(**{**stored, "inputs": Inputs(**stored["inputs"])})
        mark("begin", number)
        try:
            call(candidates[asked["candidate"]], case, request["seed"])
        except CandidateFault as fault:
            told = {"fault": str(fault)}
        except (torch.OutOfMemoryError, MemoryError):
            told = {"blocked": "out of memory"}
        else:
            told = {}
        time.sleep(PAUSE)
        mark("end", number, told)
        if told and _broken():
            os._exit(1)
    mark("begin", PLANT)
    told = {}
    try:
        planted_faults.launch(request["tool"])
    except (RuntimeError, OSError, AttributeError) as error:
        # A tool that ends a faulty kernel may leave an error behind.
        told = {"fault": " ".join(str(error).split())}
    time.sleep(PAUSE)
    mark("end", PLANT, told)


def call(candidate: Any, case: Case, seed: int) -> None:
    """One call of the candidate, its operands alone in allocations that end where they end."""
    given = build(replace(case, device="cpu"), seed)
    x, *tables, gradient = (fitted(p.view, "cuda") for p in (*given.placed().values(), given.gradient))
    besides = Call(given.family, tuple(tables))
    if case.variant == "forward":
        outputs(candidate, x, besides, on_the_spot=True)
    elif candidate.vjp is not None:
        vjp_outputs(candidate, besides, gradient, on_the_spot=True)
    else:
        derivatives(candidate, x, besides, gradient)


def fitted(view: Tensor, device: str) -> Tensor:
    """``view`` with its strides and its alignment to 16 bytes, in memory on ``device`` that its last element ends."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    offset = view.storage_offset() % (16 // view.element_size())
    whole = view.as_strided((offset + extent,), (1,), view.storage_offset() - offset)
    return whole.clone().to(device).as_strided(view.shape, view.stride(), offset)


def _broken() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if "tool" in asked:
        called(asked)
    else:
        with contextlib.redirect_stdout(sys.stderr):
            answer = listed(asked)
        mark("listed", SANITIZER, answer)
