"""What the tests of the suites share: asking a candidate its questions in this process, and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ropecheck.suites.candidates import Candidate
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.verdicts import Verdict

Ask = Callable[..., list[Verdict]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked for a GPU is skipped by name where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU is available"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small, and threads that wait for one another on a busy machine cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ask() -> Ask:
    """``ask(candidate, plan, judgements, dtypes, only)``: the verdicts on the CPU, in this process.

    ``only`` keeps the cases whose id contains it. A failure of the judge itself is an error here.
    """

    def asked(
        candidate: Candidate,
        plan: str = "smoke",
        judgements: tuple[str, ...] = (),
        dtypes: tuple[str, ...] = (),
        only: str = "",
    ) -> list[Verdict]:
        selection = Selection(plan, judgements=judgements, devices=("cpu",), dtypes=dtypes)
        verdicts = [judge(candidate, q, seed=0) for q in questions(candidate, selection) if only in q.id]
        assert verdicts, "no question was asked"
        troubled = [v for v in verdicts if v.verdict == "blocked"]
        assert not troubled, troubled[0].reason
        return verdicts

    return asked


@pytest.fixture
def failing(ask: Ask) -> Callable[..., dict[str, str]]:
    """``failing(candidate, ...)``: as ``ask``; each judgement that fails, and its first reason."""

    def found(candidate: Candidate, *arguments: Any, **keywords: Any) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for verdict in ask(candidate, *arguments, **keywords):
            if verdict.verdict == "fail":
                reasons.setdefault(verdict.judgement, f"{verdict.case}: {verdict.reason}")
        return reasons

    return found


@pytest.fixture
def verdicts_of_a_run(tmp_path: Path) -> Callable[..., list[Verdict]]:
    """``verdicts_of_a_run(source, *options)``: judge the candidate file ``source`` by pytest in another process."""

    def judged(source: str, *options: str) -> list[Verdict]:
        candidates, directory = tmp_path / "candidates_under_test.py", tmp_path / "verdicts"
        candidates.write_text(source)
        command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "ropecheck.suites", "-p", "no:cacheprovider"]
        command += ["--candidate", str(candidates), "--verdicts", str(directory), "--on", "cpu", *options]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        log = directory / "verdicts.jsonl"
        assert log.exists(), run.stdout + run.stderr
        return [Verdict.from_json(json.loads(line)) for line in log.read_text().splitlines()]

    return judged


@pytest.fixture
def verdicts_on_a_gpu(tmp_path: Path) -> Callable[..., list[Verdict]]:
    """``verdicts_on_a_gpu(names, *options)``: judge candidates of gpu_candidates.py, in this order, by one worker."""

    def judged(names: tuple[str, ...], *options: str) -> list[Verdict]:
        chosen, directory = tmp_path / "chosen_candidates.py", tmp_path / "verdicts"
        chosen.write_text(
            "from ropecheck.suites.candidates import load_candidates\n"
            f"known = {{c.name: c for c in load_candidates({str(Path(__file__).with_name('gpu_candidates.py'))!r})}}\n"
            f"CANDIDATES = [known[name] for name in {names!r}]\n"
        )
        command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "ropecheck.suites", "-p", "no:cacheprovider"]
        command += ["-n", "1", "--candidate", str(chosen), "--verdicts", str(directory), "--on", "cuda", *options]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        log = directory / "verdicts.jsonl"
        assert log.exists(), run.stdout + run.stderr
        return [Verdict.from_json(json.loads(line)) for line in log.read_text().splitlines()]

    return judged
