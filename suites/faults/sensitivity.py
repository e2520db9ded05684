"""Sensitivity: every fault is given to every judgement, and what each judgement sees is written down.

Cases are the outer loop and faults the inner one, so that operands are made, and an output is held against the oracle,
once for all faults of one contract, family and dtype. A judgement is asked no further about a fault that it has failed.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..cases import Case
from ..judgements import JUDGEMENTS
from ..judging import Selection, judge, questions
from ..remembered import remembering
from ..verdicts import FAIL
from .dictionary import FAULTS
from .fault import Fault

Group = tuple[str, str, str]
"""Contract, family and dtype."""


class SensitivityError(RuntimeError):
    """The judge itself failed on a fault, or a proof of equivalence did. The message is one sentence."""


@dataclass(frozen=True)
class Task:
    """One judgement and the faults of one group."""

    judgement: str
    group: Group
    faults: tuple[str, ...]


@dataclass
class Record:
    """What became of one fault: ``killed_by`` maps each judgement that sees it to the case in which it first does.

    ``blocked`` says why it could not be judged on this machine. ``equivalent`` as in
    :class:`~ropecheck.suites.faults.fault.Fault`, its proof executed.
    """

    name: str
    kind: str
    says: str
    family: str
    contract: str
    dtype: str
    rows: tuple[str, ...] = ()
    killed_by: dict[str, str] = field(default_factory=dict)
    equivalent: str = ""
    blocked: str = ""

    @property
    def only_by(self) -> str:
        """The judgement that alone sees it; empty where none does, or several do."""
        return next(iter(self.killed_by)) if len(self.killed_by) == 1 else ""

    @property
    def survives(self) -> bool:
        return not (self.killed_by or self.equivalent or self.blocked)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "only_by": self.only_by}


@dataclass
class Sensitivity:
    """The records of all faults that were asked for, and how long it took."""

    records: list[Record]
    seconds: float = 0.0

    @property
    def judged(self) -> list[Record]:
        """Without those that this machine cannot judge, and those that are no faults."""
        return [r for r in self.records if not r.blocked and not r.equivalent]

    @property
    def coverage(self) -> float:
        """The share of the judged faults that some judgement sees; 1 where none was judged."""
        judged = self.judged
        return sum(not r.survives for r in judged) / len(judged) if judged else 1.0

    def by_judgement(self) -> dict[str, tuple[list[str], list[str]]]:
        """For each judgement that was asked the faults that it sees, and those that it alone sees."""
        asked = {name for r in self.judged for name in r.killed_by}
        return {
            name: (
                [r.name for r in self.judged if name in r.killed_by],
                [r.name for r in self.judged if r.only_by == name],
            )
            for name in JUDGEMENTS
            if name in asked
        }


def measure(
    names: Iterable[str] = (),
    *,
    plan: str = "standard",
    workers: int = 2,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Sensitivity:
    """Ask every judgement about the faults called ``names``, or all. ``tell`` is told of finished tasks.

    Raises ValueError for a name that no fault has, and :class:`SensitivityError`.
    """
    started = time.perf_counter()
    for name in (chosen := list(names) or list(FAULTS)):
        if name not in FAULTS:
            raise ValueError(f"--fault must be one of {', '.join(FAULTS)}, not {name!r}")
    faults = [FAULTS[name] for name in chosen]
    records = {fault.name: _record(fault) for fault in faults}
    planned = list(_tasks([fault for fault in faults if fault.device == "cpu"], plan))
    for number, (task, kills) in enumerate(_carried_out(planned, plan, workers, seed), 1):
        for name, case in kills.items():
            records[name].killed_by[task.judgement] = case
        tell(number, len(planned))
    for record in records.values():
        record.killed_by = {name: record.killed_by[name] for name in JUDGEMENTS if name in record.killed_by}
        if record.equivalent and record.killed_by:
            raise SensitivityError(f"fault {record.name} is listed as equivalent, but {record.only_by} sees it")
    return Sensitivity(list(records.values()), round(time.perf_counter() - started, 1))


def _record(fault: Fault) -> Record:
    blocked = "" if fault.device == "cpu" else "needs a CUDA GPU"
    if fault.check is not None and (wrong := fault.check()):
        raise SensitivityError(f"fault {fault.name} is not equivalent: {wrong}")
    return Record(
        fault.name, fault.kind, fault.says, fault.family, fault.contract, fault.dtype, fault.rows,
        equivalent=fault.equivalent, blocked=blocked,
    )  # fmt: skip


# What takes longest begins first.
_SLOW = ("accuracy-forward", "accuracy-vjp", "repeatability", "invariance-vjp", "invariance-forward", "fullgraph")


def _tasks(faults: Sequence[Fault], plan: str) -> Iterable[Task]:
    groups: dict[Group, list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.contract, fault.family, fault.dtype), []).append(fault)
    order = sorted(JUDGEMENTS, key=lambda name: _SLOW.index(name) if name in _SLOW else len(_SLOW))
    for judgement in order:
        for group, members in sorted(groups.items(), key=lambda item: (item[0][1] != "norm_rotate_gate", item[0])):
            yield Task(judgement, group, tuple(fault.name for fault in members))


def _carried_out(
    tasks: Sequence[Task], plan: str, workers: int, seed: int
) -> Iterable[tuple[Task, dict[str, str]]]:
    if workers == 1 or len(tasks) == 1:
        yield from ((task, carry_out(task, plan, seed)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(carry_out, task, plan, seed): task for task in tasks}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def carry_out(task: Task, plan: str, seed: int) -> dict[str, str]:
    """For each fault of ``task`` that its judgement sees, the first case in which it does."""
    selection = Selection(plan, judgements=(task.judgement,), devices=("cpu",))
    candidates = {name: FAULTS[name].candidate() for name in task.faults}
    asked: dict[str, tuple[Case, list[str]]] = {}
    for name, candidate in candidates.items():
        for question in questions(candidate, selection):
            if isinstance(question, Case):
                asked.setdefault(question.id, (question, []))[1].append(name)
    kills: dict[str, str] = {}
    for case, names in asked.values():
        with remembering():
            for name in names:
                if name in kills:
                    continue
                verdict = judge(candidates[name], case, seed)
                if "judge failed" in verdict.facts:
                    raise SensitivityError(f"{case.id} of fault {name}: {verdict.reason}")
                if verdict.verdict == FAIL:
                    kills[name] = case.id
    return kills
