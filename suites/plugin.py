"""The pytest plugin: options, one test for every question, and the collection of verdicts.

``pytest --pyargs ropecheck.suites --candidate FILE.py`` composes with ``-k``, ``-x``, ``--lf`` and ``-n``. With
``--verdicts DIR`` every verdict is appended to ``DIR/verdicts.jsonl`` as soon as it is reached, also that of a case
whose worker process died or was ended because it hung.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .verdicts import Verdict

_PROPERTY = "ropecheck"
_DEATHS_ALLOWED = 3
_LAST_WORDS = "last-words.jsonl"
_VERDICTS = "verdicts.jsonl"
_DEATHS = "deaths.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ropecheck", "verification of rotary-embedding kernels")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    group.addoption("--candidate", **many, help="FILE.py or package.module:attribute; repeatable")
    group.addoption("--contract", **many, help="only candidates of this contract; repeatable")
    group.addoption("--judgement", **many, help="only this judgement; repeatable")
    group.addoption("--on", **many, help="only this device, cpu or cuda; repeatable")
    group.addoption("--dtype", **many, help="only this dtype; repeatable")
    group.addoption("--case", **many, help="only the case of this id; repeatable")
    group.addoption("--plan", default="standard", choices=("smoke", "standard", "full"))
    group.addoption("--seed", default=0, type=int, help="seed of every payload")
    group.addoption("--case-limit", default=120.0, type=float, metavar="SECONDS", help="longest a case may take")
    group.addoption("--verdicts", default=None, metavar="DIR", help="folder that receives verdicts.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    directory = config.getoption("--verdicts")
    if directory and not hasattr(config, "workerinput"):
        config.pluginmanager.register(VerdictCollector(Path(directory), config.getoption("--case-limit")))
    # On sys.path a checkout shadows, with its folder kernels, the package of that name which diffusers and transformers
    # look for. ``python -m pytest`` in a checkout puts it there, and so does pytest's default import mode.
    around = Path(__file__).resolve().parents[1]
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != around]
    if config.getoption("--candidate"):
        config.option.importmode = "importlib"
        # pytest-xdist would end the run after four deaths a worker, with the remaining cases unasked.
        if getattr(config.option, "maxworkerrestart", "") is None:
            config.option.maxworkerrestart = "1000000"
        _prepare_process(config)


def _prepare_process(config: pytest.Config) -> None:
    """Before a candidate is imported: whether Triton interprets is read when a kernel is decorated."""
    import torch

    from .interpreter import interpreting, repair

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if interpreting():
        repair()
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        # The process that the workers report to ends them; an interrupt here is then a candidate's.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(worker["workercount"])))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(worker["workerid"].removeprefix("gw")) % torch.cuda.device_count())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.name != "test_question" or "question" not in metafunc.fixturenames:
        return
    from .candidates import CandidateError, load_candidates
    from .judging import Selection, check_selection, questions

    option = metafunc.config.getoption
    selection = Selection(
        option("--plan"), option("--contract"), option("--judgement"), option("--on"), option("--dtype"),
        option("--case"),
    )  # fmt: skip
    try:
        check_selection(selection)
        candidates = [c for specification in option("--candidate") for c in load_candidates(specification)]
    except (CandidateError, ValueError) as error:
        # Of all errors that stop a collection this one is shown without a traceback.
        raise pytest.Collector.CollectError(str(error)) from None
    asked = [(candidate, q) for candidate in candidates for q in questions(candidate, selection)]
    metafunc.parametrize(("candidate", "question"), asked, ids=[f"{q.id}@{c.name}" for c, q in asked])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a case that hangs. The watchdog is a thread of the C runtime: it needs no GIL."""
    if not _is_question(item.nodeid):
        return (yield)
    faulthandler.dump_traceback_later(item.config.getoption("--case-limit"), exit=True, file=_nowhere())
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_devnull: Any = None


def _nowhere() -> Any:
    global _devnull
    if _devnull is None:
        _devnull = open(os.devnull, "w")  # noqa: SIM115 - the watchdog writes to it as the process ends
    return _devnull


def _is_question(nodeid: str) -> bool:
    return "test_question[" in nodeid


def question_of(nodeid: str) -> tuple[str, str]:
    """(case id, candidate name) of the test of a question."""
    inside = nodeid.partition("test_question[")[2].removesuffix("]")
    case, _, candidate = inside.rpartition("@")
    return case, candidate


def record(request: pytest.FixtureRequest, verdict: Verdict) -> None:
    """Attach ``verdict`` to the test's report, as text: a report may carry nothing else between processes."""
    from .verdicts import canonical

    request.node.user_properties.append((_PROPERTY, canonical(verdict.as_json())))


def deaths(config: pytest.Config, candidate: str) -> int:
    """How many processes ``candidate`` has taken down in this run, as far as the collector has seen."""
    directory = config.getoption("--verdicts")
    log = Path(directory) / _DEATHS if directory else None
    return log.read_text().splitlines().count(candidate) if log is not None and log.exists() else 0


def too_many_deaths(config: pytest.Config, candidate: str) -> bool:
    return deaths(config, candidate) >= _DEATHS_ALLOWED


def context_is_broken() -> bool:
    """Whether CUDA refuses everything in this process, as it does after an illegal access."""
    from .cuda_graphs import usable

    return not usable()


def leave_and_die(request: pytest.FixtureRequest, reason: str) -> None:
    """End this process at once, leaving ``reason`` for the collector. A worker that dies is replaced."""
    directory = request.config.getoption("--verdicts")
    if directory:
        with (Path(directory) / _LAST_WORDS).open("a") as words:
            words.write(json.dumps([request.node.nodeid, reason]) + "\n")
    os._exit(1)


class VerdictCollector:
    """Writes each verdict down as it is reached, in the process that the workers report to."""

    def __init__(
        self, directory: Path, case_limit: float, tell: Callable[[Verdict], None] = lambda verdict: None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # What an earlier run left would be counted as this one's, its deaths above all.
        for name in (_VERDICTS, _DEATHS, _LAST_WORDS):
            (directory / name).unlink(missing_ok=True)
        self.directory = directory
        self.case_limit = case_limit
        self.tell = tell
        self.verdicts: list[Verdict] = []
        self._started: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from .verdicts import Verdict

        if not _is_question(report.nodeid):
            return
        properties: dict[str, Any] = dict(report.user_properties)
        if report.when == "call" and _PROPERTY in properties:
            self._add(Verdict.from_json(json.loads(properties[_PROPERTY])))
        elif report.when not in ("setup", "call", "teardown"):
            self._add(self._death(report.nodeid))

    def _death(self, nodeid: str) -> Verdict:
        """The verdict on a case whose process is gone: the candidate killed it, or hung."""
        from .verdicts import Verdict

        case, candidate = question_of(nodeid)
        judgement, device, dtype, *_ = [*case.split("/"), "", ""]
        seconds = time.monotonic() - self._started.get(nodeid, time.monotonic())
        hung = seconds >= self.case_limit
        reason = f"no answer within {self.case_limit:g} s" if hung else "the process died"
        words = self.directory / _LAST_WORDS
        if words.exists():
            said = dict(json.loads(line) for line in words.read_text().splitlines())
            reason = said.get(nodeid, reason)
        with (self.directory / _DEATHS).open("a") as log:
            log.write(candidate + "\n")
        return Verdict(candidate, "", judgement, device, dtype, case, "fail", reason, seconds=round(seconds, 3))

    def _add(self, verdict: Verdict) -> None:
        from .verdicts import canonical

        self.verdicts.append(verdict)
        with (self.directory / _VERDICTS).open("a") as lines:
            lines.write(canonical(verdict.as_json()) + "\n")
        self.tell(verdict)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = Counter(v.verdict for v in self.verdicts)
        said = ", ".join(f"{n} {name}" for name, n in counts.items()) or "no verdict"
        terminalreporter.write_line(f"ropecheck: {said}; written to {self.directory / _VERDICTS}")
