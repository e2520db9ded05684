"""Sensitivity: every fault is given to every judgement, and what each judgement sees is written down.

Faults of a CPU are asked in groups (:mod:`.asking`), those that only a GPU shows one by one (:mod:`.alone`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from ..judgements import JUDGEMENTS
from ..judging import blocked_on
from .alone import asked_each
from .asking import Answer, Group, SensitivityError, Task, carried_out
from .dictionary import FAULTS
from .fault import Fault
from .sighting import Sighting

NEEDS_A_GPU = "needs a CUDA GPU"

NEVER_ALONE: Mapping[str, str] = MappingProxyType({
    "laws": "sees nothing that no other sees: of accurate kernels only one that knows its contract's tables breaks a "
            "law, and no public report tells of any",
})  # fmt: skip
"""Judgements that see no fault alone by what they ask, each with the reason."""


@dataclass
class Record:
    """What became of one fault: ``killed_by`` maps each judgement that sees it to the case in which it first does.

    ``sightings`` says of these cases what they took. ``blocked`` says why the fault could not be judged on this
    machine. ``equivalent`` as in :class:`~ropecheck.suites.faults.fault.Fault`, its proof executed.
    """

    name: str
    kind: str
    says: str
    family: str
    contract: str
    dtype: str
    rows: tuple[str, ...] = ()
    killed_by: dict[str, str] = field(default_factory=dict)
    sightings: dict[str, Sighting] = field(default_factory=dict)
    equivalent: str = ""
    blocked: str = ""

    @property
    def only_by(self) -> str:
        """The judgement that alone sees it; empty where none does, or several do."""
        return next(iter(self.killed_by)) if len(self.killed_by) == 1 else ""

    @property
    def survives(self) -> bool:
        return not (self.killed_by or self.equivalent or self.blocked)

    @property
    def needed(self) -> tuple[str, ...]:
        """The least that any judgement needed to see it; empty where one saw it in its first case."""
        return min((s.needed for s in self.sightings.values()), key=len, default=())

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "only_by": self.only_by, "needed": self.needed, "survives": self.survives}


@dataclass
class Sensitivity:
    """The records of all faults that were asked for, which judgements had a case for one, and how long it took."""

    records: list[Record]
    asked: frozenset[str] = frozenset()
    seconds: float = 0.0

    @property
    def judged(self) -> list[Record]:
        """Without those that this machine cannot judge, and those that are no faults."""
        return [r for r in self.records if not r.blocked and not r.equivalent]

    @property
    def survivors(self) -> list[Record]:
        return [r for r in self.records if r.survives]

    @property
    def coverage(self) -> float:
        """The share of the judged faults that some judgement sees; 1 where none was judged."""
        judged = self.judged
        return sum(not r.survives for r in judged) / len(judged) if judged else 1.0

    def by_judgement(self) -> dict[str, tuple[list[str], list[str]]]:
        """For each judgement that was asked the faults that it sees, and those that it alone sees."""
        asked = self.asked | {name for r in self.judged for name in r.killed_by}
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
    """Ask every judgement about the faults called ``names``, or all, in so many processes; 0 is this one alone.

    Faults of a GPU are asked where there is one. ``tell`` is told how many of the tasks are finished. Raises ValueError
    for a name that no fault has, and :class:`SensitivityError`.
    """
    started = time.perf_counter()
    for name in (chosen := list(names) or list(FAULTS)):
        if name not in FAULTS:
            raise ValueError(f"--fault must be one of {', '.join(FAULTS)}, not {name!r}")
    records = {name: _record(FAULTS[name]) for name in chosen}
    tasks = list(_tasks([FAULTS[name] for name in records if FAULTS[name].device == "cpu"]))
    on_a_gpu = [name for name in records if FAULTS[name].device == "cuda" and not records[name].blocked]
    blocked: dict[str, str] = {}
    asked: set[str] = set()
    for number, answers in enumerate(_answers(tasks, on_a_gpu, plan, workers, seed), 1):
        for answer in answers:
            asked.update([answer.judgement] if answer.asked else [])
            blocked |= answer.blocked
            for name, seen in answer.seen.items():
                records[name].sightings[answer.judgement] = seen
        tell(number, len(tasks) + len(on_a_gpu))
    for name, record in records.items():
        record.sightings = {j: record.sightings[j] for j in JUDGEMENTS if j in record.sightings}
        record.killed_by = {j: seen.case for j, seen in record.sightings.items()}
        if record.survives:
            # Whoever could not ask may have seen it.
            record.blocked = blocked.get(name, "")
        if record.equivalent and record.killed_by:
            raise SensitivityError(f"fault {name} is listed as equivalent, but {', '.join(record.killed_by)} sees it")
    return Sensitivity(list(records.values()), frozenset(asked), round(time.perf_counter() - started, 1))


def _record(fault: Fault) -> Record:
    if fault.check is not None and (wrong := fault.check()):
        raise SensitivityError(f"fault {fault.name} is not equivalent: {wrong}")
    return Record(
        fault.name, fault.kind, fault.says, fault.family, fault.contract, fault.dtype, fault.rows,
        equivalent=fault.equivalent, blocked=NEEDS_A_GPU if fault.device == "cuda" and blocked_on("cuda") else "",
    )  # fmt: skip


def _answers(
    tasks: Sequence[Task], on_a_gpu: Sequence[str], plan: str, workers: int, seed: int
) -> Iterator[list[Answer]]:
    for answer in carried_out(tasks, plan, workers, seed):
        yield [answer]
    yield from asked_each(on_a_gpu, "cuda", plan, workers, seed)


# What takes longest begins first.
_SLOW = ("accuracy-forward", "accuracy-vjp", "repeatability", "invariance-vjp", "invariance-forward", "fullgraph")


def _tasks(faults: Sequence[Fault]) -> Iterator[Task]:
    groups: dict[Group, list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.contract, fault.family, fault.dtype), []).append(fault)
    order = sorted(JUDGEMENTS, key=lambda name: _SLOW.index(name) if name in _SLOW else len(_SLOW))
    for judgement in order:
        for group, members in sorted(groups.items(), key=lambda item: (item[0][1] != "norm_rotate_gate", item[0])):
            yield Task(judgement, group, tuple(fault.name for fault in members))
