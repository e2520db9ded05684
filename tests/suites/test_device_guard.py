"""device-guard: its logic with two GPUs that are both the CPU, and the real thing where there are two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate, load_candidates
from ropecheck.suites.cases import Case
from ropecheck.suites.invocation import CandidateFault
from ropecheck.suites.judgements.device_guard import DEVICE_GUARD, TwoGpus, judged_on, lacking
from ropecheck.suites.judging import Selection, Unasked, judge, questions
from ropecheck.suites.verdicts import Finding, failed

HERE = {c.name: c for c in load_candidates(str(Path(__file__).with_name("gpu_candidates.py")))}


class Pretended(TwoGpus):
    """Both GPUs are the CPU; which one is current is only a number."""

    now = 0
    entered: list[int] = []  # noqa: RUF012 - what the last case did

    def at(self, gpu: int) -> AbstractContextManager[Any]:
        return self._at(gpu)

    @contextmanager
    def _at(self, gpu: int) -> Iterator[None]:
        before, Pretended.now = Pretended.now, gpu
        Pretended.entered.append(gpu)
        try:
            yield
        finally:
            Pretended.now = before

    def current(self) -> int:
        return Pretended.now

    def settle(self) -> None:
        pass

    def delayed(self, gpu: int) -> AbstractContextManager[Any]:
        return self._at(gpu)


def right(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q, cos, sin), right(k, cos, sin)


def candidate(run: Callable[..., Any], *claims: str, **fields: Any) -> Candidate:
    return Candidate("c", "qwen-image", run, ("cuda",), ("float32",), ("multi-device", *claims), **fields)


def cases(judged: Candidate, plan: str = "smoke") -> list[Case]:
    return [replace(case, device="cpu") for case in DEVICE_GUARD.cases(judged, "cuda", "float32", plan)]


def findings(judged: Candidate, plan: str = "smoke") -> dict[str, Finding]:
    """The first finding that is no pass, or the last one, for each variant."""
    found: dict[str, Finding] = {}
    for case in cases(judged, plan):
        try:
            finding = judged_on(judged, case, 0, Pretended(0, 1))
        except CandidateFault as fault:
            finding = failed(str(fault))
        if case.variant not in found or found[case.variant].verdict == "pass":
            found[case.variant] = finding
        assert Pretended.now == 0
    return found


CALLS = {f"{d}/{w}" for d in ("forward", "vjp") for w in ("tensors-elsewhere", "tensors-here", "side-stream")}


@pytest.mark.parametrize(
    ("run", "family", "others"), [(right, "rotate", {"tables", "x"}), (pair, "rotate_pair", {"tables", "x", "k"})]
)
def test_right_calls_pass(run: Callable[..., Any], family: str, others: set[str]) -> None:
    """Every way to place the tensors is asked, and passes; what cannot be refused here is accepted, and fails."""
    found = findings(candidate(run, "vjp", "strided", family=family), "standard")
    assert set(found) == CALLS | {f"mixed-{other}" for other in others}
    assert {found[name].verdict for name in CALLS} == {"pass"}
    assert all(f"accepted {other} on another GPU" in found[f"mixed-{other}"].reason for other in others)


def test_the_tensors_lie_where_the_case_says() -> None:
    """Tensors are made on the other GPU and the call is made from this one, or the reverse."""
    seen: list[int] = []

    def watched(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen.append(Pretended.now)
        return right(x, cos, sin)

    for case in cases(candidate(watched))[:2]:
        Pretended.entered.clear()
        judged_on(candidate(watched), case, 0, Pretended(0, 1))
        tensors, current = (1, 0) if case.variant.endswith("elsewhere") else (0, 1)
        assert Pretended.entered[:2] == [tensors, current]
        assert seen.pop() == current


def test_the_current_gpu_must_stay() -> None:
    """A call that leaves the tensors' GPU current fails in every placement, though its result is right."""

    def switching(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        Pretended.now = 1 - Pretended.now
        return right(x, cos, sin)

    found = findings(candidate(switching))
    assert found["forward/tensors-elsewhere"].reason == "the call leaves GPU 1 current, where GPU 0 was"
    assert found["forward/tensors-here"].reason == "the call leaves GPU 0 current, where GPU 1 was"
    assert found["forward/side-stream"].verdict == "fail"


def test_what_is_read_too_early_is_seen() -> None:
    """In the case of the side stream x holds NaN until its own stream writes it: the first call's x is of no use."""
    first: list[Tensor] = []

    def early(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first.append(x.clone())
        return right(x if len(first) % 2 else torch.full_like(x, float("nan")), cos, sin)

    found = {case.variant: judged_on(candidate(early), case, 0, Pretended(0, 1)) for case in cases(candidate(early))}
    assert found["forward/side-stream"].verdict == "fail"
    assert torch.equal(first[-2], first[-1])


def refusing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    raise ValueError("cos lies on another device than x")


def asserting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    raise AssertionError("devices")


def refusing_late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x.zero_()
    raise ValueError("cos lies on another device than x")


@pytest.mark.parametrize(
    ("run", "verdict", "says"),
    [
        (refusing, "pass", ""),
        (asserting, "fail", "AssertionError: devices"),
        (refusing_late, "fail", "but changed 1"),
    ],
)
def test_mixed_devices_are_refused(run: Callable[..., Any], verdict: str, says: str) -> None:
    """By an error that is meant for the caller, before anything is written."""
    found = findings(candidate(run))
    for other in ("x", "tables"):
        assert found[f"mixed-{other}"].verdict == verdict
        assert says in found[f"mixed-{other}"].reason


@pytest.mark.parametrize(("count", "says"), [(0, "this machine has none"), (1, "this machine has one"), (2, "")])
def test_one_gpu_is_not_enough(monkeypatch: pytest.MonkeyPatch, count: int, says: str) -> None:
    """The whole cell is blocked, once and not for each dtype."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr("ropecheck.suites.judging.blocked_on", lambda device: "")
    assert lacking() == (f"device-guard needs two GPUs, {says}" if says else "")
    judged = replace(candidate(right), dtypes=("float32", "bfloat16"))
    asked = list(questions(judged, Selection("smoke", judgements=("device-guard",))))
    if says:
        assert asked == [Unasked("device-guard", "cuda", "blocked", lacking())]
    else:
        assert len(asked) > 2
        assert all(isinstance(q, Case) for q in asked)


def test_a_cpu_has_no_gpu_to_guard() -> None:
    """On a CPU the question does not apply."""
    judged = replace(candidate(right), devices=("cpu",))
    (asked,) = questions(judged, Selection("smoke", judgements=("device-guard",)))
    assert isinstance(asked, Unasked)
    assert (asked.verdict, asked.reason) == ("not-applicable", "a CPU has no current GPU to guard")


def on_gpus(name: str) -> dict[str, str]:
    asked = questions(HERE[name], Selection("standard", judgements=("device-guard",), devices=("cuda",)))
    verdicts = [judge(HERE[name], question, 0) for question in asked]
    return {v.case: v.reason for v in verdicts if v.verdict != "pass"}


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="device-guard needs two GPUs")


@TWO
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["right/launched", "right/composed"])
def test_right_candidates_on_two_gpus(name: str) -> None:
    """A kernel that is launched on the tensors' GPU and a composition of torch operations pass every case."""
    assert on_gpus(name) == {}


@TWO
@pytest.mark.gpu
def test_no_device_guard_on_two_gpus(verdicts_on_a_gpu: Callable[..., Any]) -> None:
    """A launch on whichever GPU is current fails, be it by an illegal access or by its stream."""
    options = ("--judgement", "device-guard", "--dtype", "float32", "--plan", "smoke")
    verdicts = verdicts_on_a_gpu(("wrong/no-device-guard",), *options)
    assert "fail" in {v.verdict for v in verdicts}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="states what happens with one GPU")
def test_blocked_on_one_gpu() -> None:
    """There is one verdict, and it says what is missing."""
    (asked,) = questions(HERE["right/launched"], Selection("standard", judgements=("device-guard",)))
    verdict = judge(HERE["right/launched"], asked, 0)
    assert (verdict.verdict, verdict.reason) == ("blocked", "device-guard needs two GPUs, this machine has one")
