"""``ropecheck sanitize``: candidates under compute-sanitizer, its reports made into verdicts.

One process for each tool calls all cases; what a case breaks is charged to it, and the remaining cases go on in a new
process. A process ends with a planted fault: where the tool does not report that one, its silence counts for nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ropecheck.suites.judgements.sanitizer import SANITIZER, TOOLS
from ropecheck.suites.planted_faults import KERNELS
from ropecheck.suites.sanitized import MARK, PLANT
from ropecheck.suites.verdicts import BLOCKED, FAIL, PASS, Verdict

from .environment import python_command
from .sanitizer_output import ERROR_STATUS, Session, read
from .verify import UsageError

OURS = "ropecheck.suites.adapters.shipped:CANDIDATES"
"""What is sanitised where no candidate is named: of it, the candidates that name kernels of their own."""

_OPTIONS = {"memcheck": ("--report-api-errors", "no", "--destroy-on-device-error", "kernel")}
_DEATHS_ALLOWED = 3
_SHOWN = 3
_START = 240.0  # seconds: torch's import, and the patching of its modules, under a sanitizer


@dataclass(frozen=True)
class Asked:
    """One case of one candidate."""

    candidate: str
    specification: str
    contract: str
    unavailable: str
    case: dict[str, Any]


@dataclass(frozen=True)
class Sanitizing:
    """What is to be done. ``case_limit`` is in seconds; ``workers`` is how many tools run at a time."""

    specifications: tuple[str, ...] = ()
    tools: tuple[str, ...] = TOOLS
    plan: str = "standard"
    cases: tuple[str, ...] = ()
    seed: int = 0
    workers: int = 1
    case_limit: float = 120.0


@dataclass
class Sanitized:
    """What came of it. ``plants`` holds what each tool wrote of its planted fault, empty where it wrote nothing."""

    verdicts: list[Verdict] = field(default_factory=list)
    plants: dict[str, str] = field(default_factory=dict)


def sanitizer() -> str | None:
    """Path of compute-sanitizer, None where there is none."""
    folders = (os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
    return next((found for folder in folders if (found := shutil.which("compute-sanitizer", path=folder))), None)


def questions(what: Sanitizing, folder: Path) -> list[Asked]:
    """The cases to call. Raises :class:`UsageError` where a candidate cannot be loaded or nothing is left to ask."""
    specifications = what.specifications or (OURS,)
    request = folder / "listing.json"
    request.write_text(json.dumps({"specifications": specifications, "plan": what.plan}))
    command = [*python_command("ropecheck.suites.sanitized"), str(request)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        said = done.stderr.strip().splitlines()[-1:]
        raise UsageError(f"{' or '.join(specifications)} takes down the process that imports it: {' '.join(said)}")
    answer = json.loads(answers[-1].split(" ", 3)[3])
    request.unlink()
    if "error" in answer:
        raise UsageError(answer["error"])
    asked = [
        Asked(c["name"], c["specification"], c["contract"], c["unavailable"], case)
        for c in answer["candidates"]
        if what.specifications or c["kernels"]
        for case in c["cases"]
        if not what.cases or case["id"] in what.cases or f"{case['id']}@{c['name']}" in what.cases
    ]
    if not asked:
        raise UsageError("no case on a GPU matches the candidates and cases asked for")
    return asked


def obstacle(tool: str | None) -> str:
    """Why nothing can be sanitised on this machine; empty where it can be tried."""
    if tool is None:
        return "compute-sanitizer is not installed: it comes with the CUDA toolkit"
    return "" if torch.cuda.is_available() else "no CUDA GPU is available"


def sanitize(
    what: Sanitizing, asked: Sequence[Asked], folder: Path, tell: Callable[[str], None] = lambda line: None
) -> Sanitized:
    """The verdicts of every tool on every case; each tool's whole output is left in ``folder``."""
    outcome = Sanitized()
    path = sanitizer()
    reason = obstacle(path)
    for question in asked:
        if why := reason or question.unavailable:
            outcome.verdicts += [_verdict(what, question, tool, BLOCKED, why) for tool in what.tools]
    usable = [question for question in asked if not question.unavailable]
    if reason or path is None or not usable:
        return outcome
    with ThreadPoolExecutor(max(1, what.workers)) as pool:
        for done in pool.map(lambda tool: _Tool(path, tool, what, usable, folder, tell).run(), what.tools):
            outcome.verdicts += [done.verdicts[number] for number in sorted(done.verdicts)]
            outcome.plants[done.name] = done.plant
    return outcome


def version() -> str:
    """What compute-sanitizer says of its version, empty where there is none."""
    path = sanitizer()
    if path is None:
        return ""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    return next((line.strip() for line in said if "ersion" in line), "")


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """0 every case passed, 1 a case failed, 3 one was blocked or none was executed."""
    found = {v.verdict for v in verdicts}
    return 1 if FAIL in found else 0 if found == {PASS} else 3


@dataclass
class _Tool:
    """One tool at work: its verdicts by the number of the case, and what it wrote of its planted fault."""

    path: str
    name: str
    what: Sanitizing
    asked: Sequence[Asked]
    folder: Path
    tell: Callable[[str], None]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    plant: str = ""

    def run(self) -> _Tool:
        started = time.monotonic()
        while remaining := [number for number in range(len(self.asked)) if number not in self.verdicts]:
            text, hung, status = self._session(remaining)
            with (self.folder / f"{self.name}.txt").open("a") as log:
                log.write(text)
            session = read(text, self.name, status)
            if why := self._settle(session, remaining, hung):
                for number in remaining:
                    self._add(number, BLOCKED, why)
        self.tell(f"{self.name}: {len(self.asked)} cases in {time.monotonic() - started:.0f} s")
        return self

    def _settle(self, session: Session, remaining: Sequence[int], hung: bool) -> str:
        """Add the verdicts that a session gives. Returns why the cases still without one are blocked, if they are."""
        if session.unusable:
            return session.unusable
        begun = [number for number in remaining if number in session.begun]
        strange = [number for number in session.begun if number not in (*remaining, PLANT)]
        if session.malformed or strange:
            # Which case was running is not known for certain: only what the tool reports in one is held against it.
            for number in begun:
                if session.reports.get(number):
                    self._add_failure(session, number, hung)
            return session.doubt if session.malformed else f"the process began case {strange[0]}, which was not asked"
        for number in begun:
            self._add_failure(session, number, hung)
        if PLANT in session.begun:
            self.plant = "\n".join(report.text for report in session.reports.get(PLANT, []))
            doubt = session.doubt
            if not doubt and not self.plant:
                doubt = f"the sanitizer did not report the planted fault {KERNELS[self.name]}"
            for number in begun:
                self._add_answer(session, number, doubt)
            return doubt or "the process did not reach the case"
        # Without its plant a session's silence counts for nothing: cases that did not fail are asked once more.
        failed = [number for number in begun if number in self.verdicts]
        if not failed:
            return f"the process under the tool ended early: {session.last or 'it wrote nothing'}"
        name = self.asked[failed[-1]].candidate
        self.deaths[name] += 1
        self.tell(f"{self.name}: {name} ended the process in {self.asked[failed[-1]].case['id']}")
        if self.deaths[name] >= _DEATHS_ALLOWED:
            for number in remaining:
                if self.asked[number].candidate == name:
                    self._add(number, BLOCKED, "not run: the candidate has taken down its process three times")
        return ""

    def _add_failure(self, session: Session, number: int, hung: bool) -> None:
        """The verdict on a case that failed, and none on another."""
        reports, told = session.reports.get(number, []), session.answers.get(number)
        if reports:
            texts = list(dict.fromkeys(report.text for report in reports))[:_SHOWN]
            self._add(number, FAIL, reports[0].head, {"reports": len(reports), "first reports": texts})
        elif told is None:
            reason = f"no answer within {self.what.case_limit:g} s" if hung else "the process died"
            self._add(number, FAIL, f"{reason} under {self.name}")
        elif "fault" in told:
            self._add(number, FAIL, told["fault"])

    def _add_answer(self, session: Session, number: int, doubt: str) -> None:
        told = session.answers.get(number, {})
        if "blocked" in told:
            self._add(number, BLOCKED, told["blocked"])
        else:
            self._add(number, BLOCKED if doubt else PASS, doubt, {} if doubt else {"reports": 0})

    def _add(self, number: int, verdict: str, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        if number not in self.verdicts:
            self.verdicts[number] = _verdict(self.what, self.asked[number], self.name, verdict, reason, facts or {})

    def _session(self, numbers: Sequence[int]) -> tuple[str, bool, int]:
        """All that one process under the tool writes, whether it was ended because it hung, and the exit status."""
        request = self.folder / f"{self.name}.json"
        content = {
            "specifications": sorted({self.asked[n].specification for n in numbers}),
            "cases": [(n, {"candidate": self.asked[n].candidate, "case": self.asked[n].case}) for n in numbers],
            "tool": self.name, "seed": self.what.seed,
        }  # fmt: skip
        request.write_text(json.dumps(content))
        command = [
            self.path, "--tool", self.name, "--target-processes", "application-only", "--print-limit", "100000",
            "--error-exitcode", str(ERROR_STATUS), "--launch-timeout", str(int(_START)),
            *_OPTIONS.get(self.name, ()),
            *python_command("ropecheck.suites.sanitized"), str(request),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=_environment(), start_new_session=True,
        )  # fmt: skip
        with process:
            try:
                text, hung = _written(process, self.what.case_limit)
                if not hung:
                    # It has closed its output and may still be ending: to kill it now would falsify its status.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(self.what.case_limit)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        request.unlink()
        return text, hung, process.returncode


def _written(process: subprocess.Popen[bytes], limit: float) -> tuple[str, bool]:
    """What ``process`` writes up to its end, or until it has written nothing for too long."""
    assert process.stdout is not None
    chunks: list[bytes] = []
    marked = False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(limit if marked else _START + limit):
                return b"".join(chunks).decode(errors="replace"), True
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return b"".join(chunks).decode(errors="replace"), False
            chunks.append(chunk)
            marked = marked or MARK.encode() in chunk


def _environment() -> dict[str, str]:
    """Triton compiles, and torch takes each allocation from the driver, so that it ends where the tensor ends."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def _verdict(
    what: Sanitizing, question: Asked, tool: str, verdict: str, reason: str, facts: Mapping[str, Any] | None = None
) -> Verdict:
    return Verdict(
        candidate=question.candidate, contract=question.contract, judgement=SANITIZER, device="cuda",
        dtype=question.case["dtype"], case=f"{question.case['id']}/{tool}",
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason, facts=facts or {}, seed=what.seed,
    )  # fmt: skip
