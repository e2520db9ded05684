"""Running the suites: one pytest session for each device, watched from outside, with nothing reached ever lost."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ropecheck.suites.cases import PLANS
from ropecheck.suites.inventory import request
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import Verdict

from .environment import python_command
from .policy import Policy, PolicyError
from .states import Cell

SHIPPED = tuple(f"ropecheck.suites.adapters.{name}:CANDIDATES" for name in ("shipped", "diffusers", "transformers"))
"""What is judged where no candidate is named: our kernels, and the vendors' functions that contracts are pinned to."""


class UsageError(ValueError):
    """The command cannot be carried out as given. The message is one sentence."""


@dataclass(frozen=True)
class Run:
    """What is to be judged and how."""

    specifications: tuple[str, ...]
    selection: Selection
    seed: int = 0
    workers: int = 1
    case_limit: float = 120.0


@dataclass
class Outcome:
    """Everything that a run reached.

    ``candidates`` is the inventory, ``sessions`` the last line that the session of each device wrote.
    """

    candidates: list[dict[str, Any]]
    verdicts: list[Verdict] = field(default_factory=list)
    sessions: dict[str, str] = field(default_factory=dict)
    pins: list[dict[str, Any]] = field(default_factory=list)


def held_to(selection: Selection, policy: Policy) -> Selection:
    """The selection of a run under ``policy``: only the devices that it names, where none were chosen.

    Raises :class:`PolicyError` where the policy names a plan and the selection leaves some of that plan's cases out.
    """
    if policy.plan:
        if PLANS.index(selection.plan) < PLANS.index(policy.plan):
            raise PolicyError(f"--plan {selection.plan} asks less than {policy.plan}, which policy {policy.name} asks")
        narrowing = {"--contract": selection.contracts, "--dtype": selection.dtypes, "--case": selection.cases}
        for option, chosen in narrowing.items():
            if chosen:
                raise PolicyError(f"{option} leaves out cases of plan {policy.plan}, which policy {policy.name} asks")
    return replace(selection, devices=selection.devices or policy.of_a_run().devices)


def without_idle(run: Run, candidates: Sequence[dict[str, Any]], policy: Policy) -> Run:
    """The run without the files of which ``policy`` requires no candidate; all of them where it requires none."""
    needed = {c["specification"] for c in candidates if policy.requires(c["name"])}
    return replace(run, specifications=tuple(s for s in run.specifications if s in needed) or run.specifications)


def sessions_of(selection: Selection) -> Iterator[tuple[str, Selection]]:
    """(device, selection) of the sessions to run: Triton either interprets or compiles, for a whole process.

    On a machine without a GPU the session of the CPU also says of the other cells that they are blocked.
    """
    if not torch.cuda.is_available():
        yield "cpu", selection
        return
    for device in ("cpu", "cuda"):
        if not selection.devices or device in selection.devices:
            yield device, replace(selection, devices=(device,))


def environment_of(device: str) -> dict[str, str]:
    """The environment of a session's processes."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "TRITON_INTERPRET")}
    # Workers share the processors: more threads than one each only get in each other's way.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    return env


def take_inventory(run: Run, limit: float = 300.0) -> list[dict[str, Any]]:
    """The candidates, and how many questions each will be asked over all sessions.

    Raises :class:`UsageError` where a candidate file cannot be used, also where it takes its process down.
    """
    merged: dict[str, dict[str, Any]] = {}
    for device, selection in sessions_of(run.selection):
        for entry in _inventory(run, device, selection, limit):
            known = merged.setdefault(entry["name"], {**entry, "questions": 0, "cases": 0})
            known["questions"] += entry["questions"]
            known["cases"] += entry["cases"]
    chosen = [entry for entry in merged.values() if entry["questions"]]
    if not chosen:
        raise UsageError("no case matches the candidates, contracts, judgements, devices, dtypes and cases asked for")
    return chosen


def expected(run: Run, limit: float = 600.0) -> list[dict[str, Any]]:
    """The candidates with ``asked``: the cases that evidence of a machine that lacks nothing must hold.

    Raises :class:`UsageError` as :func:`take_inventory` does.
    """
    return _inventory(run, "cpu", run.selection, limit, anywhere=True)


def _inventory(
    run: Run, device: str, selection: Selection, limit: float, *, anywhere: bool = False
) -> list[dict[str, Any]]:
    command = python_command("ropecheck.suites.inventory")
    where = " or ".join(run.specifications)
    try:
        done = subprocess.run(
            command, input=request(list(run.specifications), selection, anywhere=anywhere), capture_output=True,
            text=True, timeout=limit, env=environment_of(device), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"{where} does not import within {limit:g} s") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = f": {done.stderr.strip().splitlines()[-1]}" if done.stderr.strip() else ""
        raise UsageError(f"{where} takes down the process that imports it (status {done.returncode}){said}") from None
    if "error" in answer:
        raise UsageError(answer["error"])
    candidates: list[dict[str, Any]] = answer["candidates"]
    return candidates


def carry_out(run: Run, folder: Path, outcome: Outcome, tell: Callable[[Verdict], None]) -> None:
    """Run every session, adding verdicts to ``outcome`` as they are reached and telling each."""
    for device, selection in sessions_of(run.selection):
        session = folder / device
        session.mkdir()
        with (session / "pytest.log").open("w") as log:
            process = subprocess.Popen(
                session_command(run, selection, session), stdout=log, stderr=subprocess.STDOUT,
                env=environment_of(device), cwd=os.getcwd(),
            )  # fmt: skip
            try:
                for verdict in _reached(session / "verdicts.jsonl", process):
                    full = _completed(verdict, outcome, run)
                    outcome.verdicts.append(full)
                    tell(full)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        lines = (session / "pytest.log").read_text(errors="replace").split("\n")
        outcome.sessions[device] = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def session_command(run: Run, selection: Selection, session: Path) -> list[str]:
    """The pytest command of one session. No configuration of the working directory takes part in it."""
    chosen = {
        "--candidate": run.specifications, "--contract": selection.contracts, "--judgement": selection.judgements,
        "--on": selection.devices, "--dtype": selection.dtypes, "--case": selection.cases,
    }  # fmt: skip
    return [
        *python_command("pytest"), "--pyargs", "ropecheck.suites", "-q", "--tb=no", "-c", os.devnull, "--noconftest",
        "--rootdir", str(session), "-p", "no:cacheprovider", "-n", str(run.workers), "--dist", "worksteal",
        # A crash costs a worker; how many deaths a candidate may cause is the plugin's business.
        "--max-worker-restart", "1000000", "--plan", selection.plan, "--seed", str(run.seed),
        "--case-limit", str(run.case_limit), "--verdicts", str(session), "--junit-xml", str(session / "junit.xml"),
        *(f"{option}={value}" for option, values in chosen.items() for value in values),
    ]  # fmt: skip


def _reached(lines: Path, process: subprocess.Popen[bytes]) -> Iterator[Verdict]:
    """Each verdict as its line appears, until the process has ended and every line is read."""
    position = 0
    while True:
        ended = process.poll() is not None
        if lines.exists():
            with lines.open() as stream:
                stream.seek(position)
                for line in iter(stream.readline, ""):
                    if not line.endswith("\n"):
                        break
                    position = stream.tell()
                    yield Verdict.from_json(json.loads(line))
        if ended:
            return
        time.sleep(0.2)


def _completed(verdict: Verdict, outcome: Outcome, run: Run) -> Verdict:
    """A verdict that was reached over a dead process does not know its contract and seed."""
    if verdict.contract:
        return verdict
    contract = next((c["contract"] for c in outcome.candidates if c["name"] == verdict.candidate), "")
    return replace(verdict, contract=contract, seed=run.seed)


def exit_status(outcome: Outcome, selection: Selection, required: Sequence[Cell] | None) -> int:
    """0 everything required passed, 1 a fail, 3 something required was blocked or not asked, 4 the oracle failed.

    ``required`` are the cells of a policy; None without one, when what the devices of this machine can run is required.
    """
    if any("judge failed" in v.facts for v in outcome.verdicts):
        return 4
    if any(report["state"] == "unequal" for report in outcome.pins):
        return 4
    unmet = [cell for cell in required or () if not cell.met]
    if any(v.verdict == "fail" for v in outcome.verdicts) or any(cell.state == "failed" for cell in unmet):
        return 1
    if required is not None:
        # Where everything may be blocked, a run that executed nothing has still shown nothing.
        executed = any(v.verdict in ("pass", "fail") for v in outcome.verdicts)
        return 3 if unmet or lost(outcome) or not executed else 0
    usable = {"cpu", *(["cuda"] if torch.cuda.is_available() else []), *selection.devices}
    # What comes with us is not required where it cannot run: a library is not installed, or it is for a GPU alone.
    absent = {
        c["name"]
        for c in outcome.candidates
        if c["specification"] in SHIPPED and (c["unavailable"] or usable.isdisjoint(c["devices"]))
    }
    blocked = any(v.verdict == "blocked" and v.device in usable and v.candidate not in absent for v in outcome.verdicts)
    return 3 if blocked or lost(outcome) or without_case(outcome) - absent else 0


def without_case(outcome: Outcome) -> set[str]:
    """Candidates of which no case was executed."""
    executed = {v.candidate for v in outcome.verdicts if v.verdict in ("pass", "fail")}
    return {c["name"] for c in outcome.candidates} - executed


def lost(outcome: Outcome) -> int:
    """Questions of the inventory that have no verdict, because a session ended before it reached them."""
    asked: int = sum(c["questions"] for c in outcome.candidates)
    return asked - len(outcome.verdicts)
