"""``ropecheck explain``: one case alone, in this process, with its worst elements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ropecheck.suites.candidates import Candidate
from ropecheck.suites.cases import Case
from ropecheck.suites.interpreter import repair
from ropecheck.suites.inventory import load_all
from ropecheck.suites.judging import Selection, Unasked, diagnosed, judge, questions
from ropecheck.suites.verdicts import Verdict

from .verify import UsageError


def explain(name: str, specifications: Sequence[str], seed: int) -> Verdict:
    """The verdict on the case ``CASE@CANDIDATE``, or ``CASE`` where only one candidate is asked it.

    Raises :class:`UsageError` for a case that no candidate, or more than one, is asked in any plan.
    """
    case, _, wanted = name.partition("@")
    if "/cuda/" not in case:
        os.environ["TRITON_INTERPRET"] = "1"
        repair()
    everyone = [c for candidates in load_all(list(specifications)).values() for c in candidates]
    matches = [(c, q) for c in everyone if wanted in ("", c.name) for q in asked(c) if q.id == case]
    if not matches:
        if wanted and wanted not in {c.name for c in everyone}:
            raise UsageError(f"no candidate is called {wanted!r}; there are {', '.join(c.name for c in everyone)}")
        raise UsageError(f"no plan has the case {case!r} for {wanted or 'any of the candidates'}")
    if len(matches) > 1:
        raise UsageError(f"{len(matches)} candidates are asked this case; write {case}@{matches[0][0].name}")
    candidate, question = matches[0]
    verdict = judge(candidate, question, seed)
    return diagnosed(candidate, question, verdict) if isinstance(question, Case) else verdict


def asked(candidate: Candidate) -> list[Case | Unasked]:
    """Every question of every plan, each once."""
    plans = ("smoke", "standard", "full")
    found = [q for plan in plans for q in questions(candidate, replace(Selection(), plan=plan))]
    return list({q.id: q for q in found}.values())
