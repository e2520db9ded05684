"""The exit status of a run: precedence 4, 2, 1, 3, and what is required without a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ropecheck.ci.states import Cell
from ropecheck.ci.verify import SHIPPED, Outcome, exit_status
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import Verdict


def verdict(kind: Any, device: str = "cpu", **facts: Any) -> Verdict:
    return Verdict("c", "qwen-image", "purity", device, "float32", f"purity/{kind}/{device}", kind, "why", facts)


def outcome(*verdicts: Verdict, pins: tuple[str, ...] = (), **entry: Any) -> Outcome:
    known = {"name": "c", "questions": len(verdicts), "unavailable": "", "devices": ["cpu", "cuda"]}
    known |= {"specification": "c.py", **entry}
    return Outcome([known], list(verdicts), pins=[{"state": state} for state in pins])


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (outcome(verdict("pass")), 0),
        (outcome(verdict("pass"), verdict("not-applicable")), 0),
        (outcome(verdict("pass"), verdict("fail")), 1),
        (outcome(verdict("pass"), verdict("blocked")), 3),
        (outcome(verdict("fail"), verdict("blocked")), 1),
        (outcome(verdict("fail"), verdict("blocked", **{"judge failed": "certification"})), 4),
        (outcome(verdict("pass"), pins=("known", "drift", "missing", "not-installed")), 0),
        (outcome(verdict("fail"), pins=("unequal",)), 4),
        # Not one case was executed.
        (outcome(verdict("not-applicable")), 3),
        # A session ended before it reached every question.
        (outcome(verdict("pass"), questions=2), 3),
        # A vendor's function that is not installed is not required, unless somebody named it.
        (outcome(verdict("blocked"), unavailable="absent", specification=SHIPPED[1]), 0),
        (outcome(verdict("blocked"), unavailable="absent"), 3),
    ],
)
def test_without_policy(found: Outcome, status: int) -> None:
    """What this machine's devices can run is required."""
    assert exit_status(found, Selection(), None) == status


def test_blocked_gpu_is_not_required_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU cuda cells are listed and do not turn the status."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = outcome(verdict("pass"), verdict("blocked", "cuda"))
    assert exit_status(found, Selection(), None) == 0
    assert exit_status(found, Selection(devices=["cuda"]), None) == 3


def test_our_own_kernels_for_a_gpu_are_not_required_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the GPU was asked for. A stranger's candidate that was not executed has been shown nothing, and is 3."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shipped = outcome(verdict("blocked", "cuda"), devices=["cuda"], specification=SHIPPED[0])
    assert exit_status(shipped, Selection(), None) == 0
    assert exit_status(shipped, Selection(devices=["cuda"]), None) == 3
    assert exit_status(outcome(verdict("blocked", "cuda"), devices=["cuda"]), Selection(), None) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert exit_status(shipped, Selection(), None) == 3


@pytest.mark.parametrize(
    ("state", "allowed", "status"),
    [
        ("passed", False, 0),
        ("overridden", False, 0),
        ("blocked", True, 0),
        ("blocked", False, 3),
        ("missing", False, 3),
        ("expired", False, 3),
        ("failed", False, 1),
    ],
)
def test_with_policy(state: Any, allowed: bool, status: int) -> None:
    """A required cell that failed is 1, one that is not met for another reason is 3."""
    found = outcome(verdict("pass"), verdict("blocked"))
    assert exit_status(found, Selection(), [Cell(("cell",), state, allowed=allowed)]) == status


def test_policy_does_not_excuse_the_rest() -> None:
    """A failure of what nothing requires is a failure, the judge's own failure comes first, and no question is lost."""
    met = [Cell(("cell",), "passed")]
    unmet = [Cell(("cell",), "failed")]
    assert exit_status(outcome(verdict("pass"), verdict("fail")), Selection(), met) == 1
    broken = outcome(verdict("blocked", **{"judge failed": "certification"}))
    assert exit_status(broken, Selection(), unmet) == 4
    assert exit_status(outcome(verdict("pass"), questions=2), Selection(), met) == 3
    assert exit_status(outcome(verdict("pass"), questions=2), Selection(), unmet) == 1
