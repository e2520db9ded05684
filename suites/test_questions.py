"""The conformance suite: one test for every question that the chosen candidates are asked."""

from __future__ import annotations

import pytest

# Absolute: pytest imports this file by its place on disk, which need not be inside a package called ropecheck.
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.cases import Case
from ropecheck.suites.judging import Unasked, diagnosed, judge
from ropecheck.suites.plugin import context_is_broken, leave_and_die, record, too_many_deaths
from ropecheck.suites.verdicts import BLOCKED, FAIL, PASS, Verdict


def test_question(candidate: Candidate, question: Case | Unasked, request: pytest.FixtureRequest) -> None:
    """The candidate gives the answer that the judgement asks for."""
    seed = request.config.getoption("--seed")
    if isinstance(question, Case) and too_many_deaths(request.config, candidate.name):
        verdict = Verdict(
            candidate.name, candidate.contract, question.judgement, question.device, "", question.id, "blocked",
            "not run: the candidate has taken down its process three times", seed=seed,
        )  # fmt: skip
    else:
        verdict = judge(candidate, question, seed)
        if verdict.verdict == FAIL and isinstance(question, Case):
            verdict = diagnosed(candidate, question, verdict)
    suspect = verdict.verdict == FAIL or "judge failed" in verdict.facts
    if suspect and question.device == "cuda" and context_is_broken():
        # No later case can run in this process. Its death is the answer to this one, and the reason is left behind.
        leave_and_die(request, verdict.reason)
    record(request, verdict)
    if verdict.verdict == FAIL:
        pytest.fail(f"{verdict.reason}\nworst element: {dict(verdict.worst or {})}", pytrace=False)
    if verdict.verdict == BLOCKED and "judge failed" in verdict.facts:
        pytest.fail(verdict.reason, pytrace=False)
    if verdict.verdict != PASS:
        pytest.skip(f"{verdict.verdict}: {verdict.reason}")
