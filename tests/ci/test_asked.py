"""What evidence must hold, as it is told on any machine: the cases of a plan and their digest."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from ropecheck.ci.environment import python_command
from ropecheck.ci.verify import environment_of
from ropecheck.suites import judging
from ropecheck.suites.adapters import rotate_qk, shipped
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.inventory import asked, digest, request
from ropecheck.suites.judging import Selection, Unasked, questions

CANDIDATES = [*shipped.CANDIDATES, *rotate_qk.CANDIDATES[:2]]


def judged(candidate: Candidate, selection: Selection) -> dict[tuple[str, str, str], tuple[int, str]]:
    """What this machine would judge, as it is asked when it does."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for question in questions(replace(candidate, unavailable=""), selection):
        dtype = "" if isinstance(question, Unasked) else question.dtype
        cells.setdefault((question.judgement, question.device, dtype), []).append(question.id)
    return {cell: (len(ids), digest(ids)) for cell, ids in cells.items()}


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_a_machine_with_gpus_judges_what_is_asked(
    candidate: Candidate, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many it has, from two on: the same cells, as many cases, the same digests."""
    selection = Selection("smoke")
    told = {
        (row["judgement"], row["device"], row["dtype"]): (row["count"], row["cases"])
        for row in asked(candidate, selection) if row["judgement"] != "sanitizer"
    }  # fmt: skip
    monkeypatch.setattr(judging, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert judged(candidate, selection) == told
    assert {device for _, device, _ in told} == set(candidate.devices)


def test_what_is_asked_does_not_depend_on_the_session() -> None:
    """A process that interprets Triton kernels and one that compiles them tell the same."""
    specification = "ropecheck.suites.adapters.shipped:CANDIDATES"
    answers = []
    for device in ("cpu", "cuda"):
        done = subprocess.run(
            python_command("ropecheck.suites.inventory"), env=environment_of(device), capture_output=True, text=True,
            input=request([specification], Selection("smoke"), anywhere=True), check=True,
        )  # fmt: skip
        entries: list[dict[str, Any]] = json.loads(done.stdout)["candidates"]
        answers.append({entry["name"]: entry["asked"] for entry in entries})
    assert answers[0] == answers[1]
    assert all(answers[0].values())


def test_what_does_not_apply_is_told_with_its_reason() -> None:
    """The gate can say why a required cell is not there before it has seen any evidence."""
    candidate = replace(shipped.CANDIDATES[0], provides=(), devices=("cuda",))
    rows = {row["judgement"]: row for row in asked(candidate, Selection("smoke")) if row["reason"]}
    assert rows["opcheck"]["reason"] == "the candidate does not claim opcheck"
    assert (rows["opcheck"]["dtype"], rows["opcheck"]["count"]) == ("", 1)
    assert rows["opcheck"]["cases"] == digest(["opcheck/cuda/not-applicable"])


def test_a_larger_plan_asks_more() -> None:
    """Each plan has cells of its own: evidence of a smaller one does not stand for a larger one."""
    counts = [
        sum(row["count"] for row in asked(shipped.CANDIDATES[0], Selection(plan))) for plan in ("smoke", "standard")
    ]
    assert counts[0] < counts[1]
