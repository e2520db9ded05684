"""The states of a cell, each from made documents: what makes it passed, and what keeps it from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime, timezone
from typing import Any

import pytest

from ropecheck.ci.at_hand import AtHand, KnownCandidate
from ropecheck.ci.gate import gated
from ropecheck.ci.needs import NeedsError, of_context
from ropecheck.ci.policy import Override, Permission, Policy, Requirement, SensitivityFloor
from ropecheck.ci.states import Cell

NOW = datetime(2030, 6, 1, 12, tzinfo=timezone.utc)
NEED = Requirement(("mine/*",), ("purity",), ("cpu",), cases=2)
POLICY = Policy("p", (NEED,), plan="smoke")
LATER, EARLIER = date(2030, 12, 31), date(2030, 5, 31)
ALLOWED = Permission(("mine/*",), ("purity",), ("cpu",), "there is only one", LATER)
OVERRIDE = Override(("mine/*",), ("purity",), ("cpu",), "A. Person", "it cannot wait", LATER)
KNOWN = KnownCandidate(
    "mine/a", "neox", ("vjp",), "aa", {"a.py": "1"},
    {"smoke": {("purity", "cpu", "float32"): (3, "f32"), ("purity", "cpu", "float16"): (3, "f16"),
               ("refusals", "cpu", "float32"): (1, "r")}},
)  # fmt: skip
AT_HAND = AtHand({"mine/a": KNOWN}, {"purity": {"neox": "jj"}, "refusals": {"neox": "jj"}}, "ss")

Document = dict[str, Any]
Change = Callable[[Document], Any]


def cell(dtype: str, cases: str, **counts: Any) -> Document:
    return {
        "candidate": "mine/a", "contract": "neox", "judgement": "purity", "device": "cpu", "dtype": dtype,
        "cases": cases, "reasons": ["why"] if set(counts) - {"pass"} else [], **counts,
    }  # fmt: skip


def document(*changes: Change) -> Document:
    """Evidence that meets the policy, changed."""
    made: Document = {
        "environment": {"torch": "2.13.0+cpu", "triton": None, "gpus": []},
        "run": {"kind": "verify", "selection": {"plan": "smoke"}, "started": "2030-06-01T10:00:00+00:00",
                "exit status": 0, "seed": 0},
        "pins": [],
        "candidates": [{"name": "mine/a", "contract": "neox", "sources": {"sha256": "aa", "files": {"a.py": "1"}}}],
        "judging": {"purity": {"neox": "jj"}},
        "cells": [cell("float32", "f32", **{"pass": 3}), cell("float16", "f16", **{"pass": 3})],
    }  # fmt: skip
    made = copy.deepcopy(made)
    for change in changes:
        change(made)
    return made


def counts(**found: Any) -> Change:
    """Other counts in the cell of float32."""
    totals = {name.replace("_", "-"): number for name, number in found.items()}
    return lambda d: d["cells"].__setitem__(0, cell("float32", "f32", **totals))


def judged(*documents: Document, policy: Policy = POLICY, at_hand: AtHand = AT_HAND, pending: str = "") -> Cell:
    """The one required cell, whatever else there is."""
    cells = gated(policy, documents, at_hand, NOW, pending)
    return next(c for c in cells if c.parts[1:] == ("purity", "cpu"))


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        (lambda d: None, "passed", ""),
        (counts(**{"pass": 2, "fail": 1}), "failed", "1 fail: why"),
        (counts(**{"pass": 2, "blocked": 1}), "blocked", "1 blocked in float32: why"),
        (counts(not_applicable=3), "missing", "3 not-applicable in float32: why"),
        (counts(**{"pass": 2}), "missing", "2 cases in float32 were judged, and plan smoke has 3 at hand"),
        (lambda d: d["cells"].pop(1), "missing", "0 cases in float16, 2 are required"),
        (lambda d: d["cells"].clear(), "missing", "no evidence holds this cell"),
        (lambda d: d["cells"][0].update(cases="x"), "missing", "other cases in float32 were judged"),
        (lambda d: d.update(cells=[cell("", "u", blocked=1)]), "blocked", "1 blocked in float32: why"),
    ],
)  # fmt: skip
def test_states(change: Change, state: str, reason: str) -> None:
    """Only all the cases of a plan, passed in every dtype, are passed."""
    found = judged(document(change))
    assert (found.state, reason in found.reason, found.met) == (state, True, state == "passed")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (counts(**{"pass": 2, "blocked": 1}), "blocked"),
        (counts(blocked=3), "blocked"),
        (lambda d: None, "passed"),
        # Permission is for what could not run, and for nothing else.
        (counts(blocked=2, fail=1), "failed"),
        (counts(blocked=2, not_applicable=1), "missing"),
        (lambda d: d["cells"].clear(), "missing"),
    ],
)
def test_what_may_be_blocked_may_not_fail(change: Change, state: str) -> None:
    """A permission covers blocked cases; failures, missing cases and unclaimed judgements stay unmet."""
    found = judged(document(change), policy=replace(POLICY, permissions=(ALLOWED,)))
    assert (found.state, found.met) == (state, state in ("passed", "blocked"))
    assert ("there is only one" in found.reason) == (state == "blocked")


@pytest.mark.parametrize(
    ("permission", "gpus", "met"),
    [
        (replace(ALLOWED, gpus=1), 1, True),
        (replace(ALLOWED, gpus=1), 2, False),
        (replace(ALLOWED, candidates=("other/*",)), 1, False),
        (replace(ALLOWED, judgements=("refusals",)), 1, False),
        (replace(ALLOWED, devices=("cuda",)), 1, False),
        (replace(ALLOWED, expires=NOW.date()), 1, True),
    ],
)
def test_permission_is_for_the_cells_it_names(permission: Permission, gpus: int, met: bool) -> None:
    """Another candidate, judgement, device, or a machine with more GPUs has no permission; the last day counts."""
    made = document(counts(blocked=3), lambda d: d["environment"].update(gpus=[{"name": "x"}] * gpus))
    found = judged(made, policy=replace(POLICY, permissions=(permission,)))
    assert (found.state, found.met) == ("blocked", met)


def test_an_expired_permission_is_its_own_state() -> None:
    """Another one for the cell that has not ended counts."""
    ended = replace(ALLOWED, expires=EARLIER)
    found = judged(document(counts(blocked=3)), policy=replace(POLICY, permissions=(ended,)))
    assert (found.state, found.met) == ("expired", False)
    assert "the permission for it ended on 2030-05-31: there is only one" in found.reason
    both = replace(POLICY, permissions=(ended, ALLOWED))
    assert judged(document(counts(blocked=3)), policy=both).met


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["candidates"][0]["sources"].update(sha256="bb", files={"a.py": "2", "b.py": "3"}), "a.py, b.py"),
        (lambda d: d["candidates"][0].update(contract="qwen-image"), "judged by contract qwen-image"),
        (lambda d: d["judging"]["purity"].update(neox="kk"), "the code that judges purity for contract neox"),
        (lambda d: d["environment"].update(torch="2.9"), "recorded with torch 2.9, and the policy allows >=2.10"),
        (lambda d: d["environment"].update(torch=None), "recorded with torch None"),
        (lambda d: d["run"].update(started="2030-04-30T10:00:00Z"), "the evidence is 32 days old"),
        (lambda d: d["run"].update(started="2030-13-01T10:00:00Z"), "which is no time"),
        (lambda d: d["run"].update(started="2030-06-01T12:06:00Z"), "recorded in the future, at 2030-06-01 12:06 UTC"),
    ],
)
def test_stale(change: Change, reason: str) -> None:
    """Other sources, another judge, another toolchain or another time: red, or allowed where the policy says so; a
    failure is red either way, and a fresh pass beside it is a pass."""
    policy = replace(POLICY, toolchain={"torch": ">=2.10"}, max_age_days=30)
    lenient = replace(policy, requirements=(replace(NEED, stale="annotate"),))
    old = document(change)
    for asked, allowed in ((policy, False), (lenient, True)):
        found = judged(old, policy=asked)
        assert (found.state, found.met) == ("stale", allowed)
        assert reason in found.reason
        failed = judged(document(change, counts(**{"pass": 2, "fail": 1})), policy=asked)
        assert (failed.state, failed.met) == ("failed", False)
        assert judged(old, document(), policy=asked).state == "passed"


@pytest.mark.parametrize("started", ["2030-06-01T12:04:00Z", "2030-05-03T10:00:00+00:00"])
def test_clocks_may_differ_a_little(started: str) -> None:
    """By less than five minutes; and the last day of an age counts."""
    policy = replace(POLICY, max_age_days=30)
    assert judged(document(lambda d: d["run"].update(started=started)), policy=policy).met


def test_the_oldest_reason_is_not_the_one_to_read() -> None:
    """Of several stale runs the newest is described."""
    old = document(
        lambda d: d["candidates"][0]["sources"].update(sha256="bb"),
        lambda d: d["run"].update(started="2029-06-01T10:00:00Z"),
    )
    newer = document(lambda d: d["judging"]["purity"].update(neox="kk"))
    assert judged(old, newer).reason == "the code that judges purity for contract neox has changed since"


def test_runs_complete_one_another() -> None:
    """A dtype each; a machine where the cell is blocked beside one where it passes; a failure counts first."""
    half, other = document(lambda d: d["cells"].pop(0)), document(lambda d: d["cells"].pop(1))
    assert judged(half).state == judged(other).state == "missing"
    assert judged(half, other).state == "passed"
    assert judged(document(counts(blocked=3)), document()).state == "passed"
    assert judged(document(), document(counts(**{"pass": 2, "fail": 1}))).state == "failed"


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        (replace(NEED, cases=4), "3 cases in float32, 4 are required"),
        (replace(NEED, dtypes=("bfloat16",)), "0 cases in bfloat16, 2 are required"),
        (replace(NEED, claims=("vjp", "strided")), "the candidate does not claim strided"),
        (replace(NEED, candidates=("your/*",)), "no candidate of that name is at hand"),
    ],
)
def test_more_may_be_required(requirement: Requirement, reason: str) -> None:
    """More cases, another dtype, a claim, another candidate: missing, with what is missing."""
    found = judged(document(), policy=replace(POLICY, requirements=(requirement,)))
    assert (found.state, found.reason) == ("missing", reason)
    # The strictest requirement of a cell counts.
    both = gated(replace(POLICY, requirements=(NEED, requirement)), [document()], AT_HAND, NOW)
    assert [c.reason for c in both if not c.met] == [reason]


def test_pending_is_for_what_no_evidence_holds() -> None:
    """A cell that was judged and is not passed is not waited for."""
    empty = document(lambda d: d["cells"].clear())
    found = judged(empty, pending="no GPU runner took the job")
    assert (found.state, found.met) == ("pending", False)
    assert found.reason.endswith("no GPU runner took the job")
    assert judged(document(counts(**{"pass": 2})), pending="why").state == "missing"


@pytest.mark.parametrize(
    "change", [counts(**{"pass": 2, "fail": 1}), counts(blocked=3), lambda d: d["cells"].clear(),
               lambda d: d["judging"]["purity"].update(neox="kk")]
)  # fmt: skip
def test_an_override_says_what_it_overrides(change: Change) -> None:
    """Whatever the state was; it is named, and so are who and why. After its last day it does nothing but say so."""
    was = judged(document(change))
    found = judged(document(change), policy=replace(POLICY, overrides=(OVERRIDE,)))
    assert (found.state, found.met) == ("overridden", True)
    assert found.reason == f"OVERRIDDEN by A. Person until 2030-12-31: it cannot wait; it is {was.state}: {was.reason}"
    ended = judged(document(change), policy=replace(POLICY, overrides=(replace(OVERRIDE, expires=EARLIER),)))
    assert (ended.state, ended.met) == ("expired", False)
    assert "the override of A. Person ended on 2030-05-31" in ended.reason
    assert judged(document(), policy=replace(POLICY, overrides=(OVERRIDE,))).state == "passed"


def test_nothing_else_may_fail() -> None:
    """A failure in a cell that no requirement names, fresh and not stale; a pin; a judge that failed."""
    other = {**cell("float32", "r", fail=1), "judgement": "refusals"}
    failing = document(lambda d: d["cells"].append(other), lambda d: d["judging"].update(refusals={"neox": "jj"}))
    unmet = [c for c in gated(POLICY, [failing], AT_HAND, NOW) if not c.met]
    assert [c.name for c in unmet] == ["mine/a x refusals x cpu"]
    failing["judging"]["refusals"] = {"neox": "kk"}
    assert all(c.met for c in gated(POLICY, [failing], AT_HAND, NOW))
    unequal = document(lambda d: d["pins"].append({"contract": "neox", "state": "unequal"}))
    assert [c.reason for c in gated(POLICY, [unequal], AT_HAND, NOW) if not c.met] == [
        "a vendor's function does not return the bytes that neox is pinned to"
    ]


def test_sensitivity_needs_enough_faults() -> None:
    """A share of few faults is no share; the best of several measurements counts, unless one sees less."""
    policy = replace(POLICY, sensitivity=SensitivityFloor(0.99, 100))

    def measured(**changes: Any) -> Document:
        found = {"judged": 200, "seen": 200, "survivors": [], "judging": "ss", **changes}
        return {**document(), "cells": [], "sensitivity": found}

    def state(*documents: Document) -> str:
        return next(c.state for c in gated(policy, [document(), *documents], AT_HAND, NOW) if c.name == "sensitivity")

    assert state() == "missing"
    assert state(measured()) == "passed"
    assert state(measured(seen=199, survivors=["a"])) == "passed"
    assert state(measured(seen=197, survivors=["a", "b", "c"])) == "failed"
    assert state(measured(seen=199)) == "failed"
    assert state(measured(judged=99, seen=99)) == "missing"
    assert state(measured(judged=0, seen=0)) == "missing"
    assert state(measured(judging="tt")) == "stale"
    assert state(measured(judged=99, seen=99), measured()) == "passed"
    assert state(measured(judging="tt"), measured()) == "passed"


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", "success", '{"a": "success"}', '{"a": {}}', '{"a": {"result": null}}']
)
def test_a_context_that_says_nothing_is_refused(text: str | None) -> None:
    """No job, or a job without result, is no success."""
    with pytest.raises(NeedsError, match="NEEDS"):
        of_context(text)


def test_a_job_that_waits_is_told_from_one_that_failed() -> None:
    """By its missing result, or by what a watchdog says."""
    done = '{"a": {"result": "success", "outputs": {"no-runner": ""}}}'
    assert of_context(done) == ([Cell(("job", "a"), "passed")], "")
    assert of_context('{"a": {"result": ""}}')[1].startswith("the job has no result")
    watched = '{"a": {"result": "success", "outputs": {"no-runner": "true"}}}'
    assert of_context(watched)[1] == "no GPU runner took the job"
    # The job that nobody took comes first, and knows less.
    both = '{"gpu": {"result": ""}, "watchdog": {"result": "failure", "outputs": {"no-runner": "true"}}}'
    assert of_context(both)[1] == "no GPU runner took the job"
