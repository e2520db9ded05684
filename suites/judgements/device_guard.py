"""device-guard: is the call right, and on the right GPU and stream, when another GPU is the current one?

Asked where there are two GPUs, of a candidate that claims ``multi-device``. Tensors lie on one GPU while the other is
current: the result must be admissible and lie with the tensors, and the current GPU must still be current. In one kind
of case x is written late, by the current stream of its own GPU: a kernel on any other stream reads what was there
before. Where one operand lies on the other GPU, the call must be refused and leave the inputs' memory alone. A wrong
stream that by chance starts late, and GPUs beyond these two, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..candidates import Candidate, described
from ..cases import Case, Inputs, Operands, build, cases_of
from ..families import FAMILIES
from ..invocation import forward, guarded, parts, vjp
from ..verdicts import Finding, failed, passed
from ..waiting import keep_busy
from .judgement import Judgement, finding_of

_SMOKE = (Inputs(),)
_STANDARD = (
    *_SMOKE,
    Inputs(batch=2, length=5, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(batch=2, length=5, x_view="packed-qkv", table_view="sliced-rows", gradient_view="heads-first"),
)
_ELSEWHERE, _FROM_ELSEWHERE, _LATE, _MIXED = "tensors-elsewhere", "tensors-here", "side-stream", "mixed-"
_OTHERS = ("tables", "x")
"""What lies on the other GPU, where not all lies on one."""
_CYCLES = 1 << 27
_REFUSALS = (TypeError, ValueError, RuntimeError)


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    directions = ("forward", "vjp") if "vjp" in candidate.provides else ("forward",)
    for given in _SMOKE if plan == "smoke" else _STANDARD:
        for direction in directions:
            for where in (_ELSEWHERE, _FROM_ELSEWHERE, _LATE):
                yield given, f"{direction}/{where}"
    for other in (*_OTHERS, *FAMILIES[candidate.family].activations[1:]):
        yield _STANDARD[1], f"{_MIXED}{other}"


@dataclass(frozen=True)
class TwoGpus:
    """The GPU that is current, and another one."""

    here: int
    there: int

    @classmethod
    def of_this_process(cls) -> TwoGpus:
        here = torch.cuda.current_device()
        return cls(here, (here + 1) % torch.cuda.device_count())

    def at(self, gpu: int) -> AbstractContextManager[Any]:
        """Within the block ``gpu`` is current, and tensors made on "cuda" lie on it."""
        return torch.cuda.device(gpu)

    def current(self) -> int:
        return torch.cuda.current_device()

    def settle(self) -> None:
        """Wait for both, so that an error of either is raised here."""
        for gpu in (self.here, self.there):
            torch.cuda.synchronize(gpu)

    def delayed(self, gpu: int) -> AbstractContextManager[Any]:
        """Within the block a stream of its own is the current one of ``gpu``, and is busy for a while."""
        with self.at(gpu):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                keep_busy(_CYCLES)
        return torch.cuda.stream(stream)


def lacking() -> str:
    """What this machine lacks for the question: empty where it has two GPUs."""
    count = torch.cuda.device_count()
    return "" if count > 1 else f"device-guard needs two GPUs, this machine has {'one' if count else 'none'}"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    return judged_on(candidate, case, seed, TwoGpus.of_this_process())


def judged_on(candidate: Candidate, case: Case, seed: int, gpus: TwoGpus) -> Finding:
    """The finding on ``case`` with these two GPUs."""
    if case.variant.startswith(_MIXED):
        return _mixed(candidate, case, seed, gpus)
    direction, _, where = case.variant.partition("/")
    tensors, current = (gpus.here, gpus.there) if where == _FROM_ELSEWHERE else (gpus.there, gpus.here)
    with gpus.at(tensors):
        given = build(case, seed)
    with gpus.at(current):
        got = _called(candidate, given, direction)
        left = gpus.current()
    if left == current and where == _LATE:
        got = _called_late(candidate, given, direction, gpus, tensors, current)
    if left != current:
        return failed(f"the call leaves GPU {left} current, where GPU {current} was", gpu=left)
    # An error on the GPU that is not current has not been reported yet.
    guarded("run", gpus.settle)
    with gpus.at(tensors):
        return finding_of(given.expected(backward=direction == "vjp").held(got, seed=seed))


def _called(candidate: Candidate, given: Operands, direction: str) -> Tensor:
    if direction == "vjp":
        return vjp(candidate, given.x.view, given.call, given.gradient.view)
    return forward(candidate, given.x.view, given.call)


def _called_late(
    candidate: Candidate, given: Operands, direction: str, gpus: TwoGpus, tensors: int, current: int
) -> Tensor:
    """The call again, while the stream that it belongs on has yet to write what is rotated."""
    written = given.gradient if direction == "vjp" else given.x
    values = written.view.clone()
    written.view.fill_(float("nan"))
    gpus.settle()
    with gpus.delayed(tensors), gpus.at(current):
        written.view.copy_(values)
        got = _called(candidate, given, direction)
    gpus.settle()
    return got


def _mixed(candidate: Candidate, case: Case, seed: int, gpus: TwoGpus) -> Finding:
    made = []
    for gpu in (gpus.here, gpus.there):
        with gpus.at(gpu):
            made.append(build(case, seed))
    gpus.settle()
    here, there = made
    other = case.variant.removeprefix(_MIXED)
    tables = there if other == "tables" else here
    family = case.bound_family
    x = parts(candidate, family, (there if other == "x" else here).x.view)
    if other == "k":
        x = (x[0], parts(candidate, family, there.x.view)[1])
    arguments, keywords = family.keywords(candidate.run).arguments(x, tables.call.tables)
    try:
        with gpus.at(gpus.here):
            candidate.run(*arguments, **keywords)
    except _REFUSALS as error:
        refusal = described(error)
    except Exception as error:
        return failed(f"raised {described(error)}, which is no refusal of an argument")
    else:
        return failed(f"accepted {other} on another GPU than the rest")
    try:
        gpus.settle()
    except RuntimeError as error:
        return failed(f"ran with {other} on another GPU than the rest, and raised {described(error)}")
    changed = sum(placed.changed_bytes() for operands in made for placed in operands.placed().values())
    if changed:
        return failed(f"refused {other} on another GPU, but changed {changed} bytes of the inputs before")
    return passed(refusal=refusal)


DEVICE_GUARD = Judgement(
    "device-guard",
    "multi-device",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "device-guard", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
    not_on={"cpu": "a CPU has no current GPU to guard"},
    lacking=lacking,
)
