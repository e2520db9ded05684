"""Waiting for the GPU, and what only a GPU shows of no-copy and of repeatability."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ropecheck.suites.candidates import Candidate, load_candidates
from ropecheck.suites.judgements.repeatability import REPEATABILITY
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.waiting import waiting_refused, waits

HERE = {c.name: c for c in load_candidates(str(Path(__file__).with_name("gpu_candidates.py")))}


class Clock:
    """A GPU that is busy until a moment, a cycle being a nanosecond."""

    def __init__(self) -> None:
        self.until = 0.0
        self.queued: list[int] = []

    def busy(self, cycles: int) -> Callable[[], bool]:
        self.queued.append(cycles)
        self.until = time.monotonic() + cycles * 1e-9
        return lambda: time.monotonic() >= self.until

    def wait(self) -> None:
        while time.monotonic() < self.until:
            time.sleep(0.001)


def test_a_call_that_waits_is_told_from_a_slow_one() -> None:
    """Only the one that outlasts any amount of work waits; a slow one needs a second look, a fast one none."""
    fast, slow, waiting = Clock(), Clock(), Clock()
    assert not waits(lambda: None, fast.busy)
    assert not waits(lambda: time.sleep(0.03), slow.busy)
    assert waits(waiting.wait, waiting.busy)
    assert (len(fast.queued), len(waiting.queued)) == (1, 3)
    assert len(slow.queued) > 1


def test_refused_waiting_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is the process's: after an error it is what it was."""
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(ValueError, match="mine"), waiting_refused():
        raise ValueError("mine")
    assert modes == ["error", 1]


def test_every_repeatability_case_of_a_gpu_has_a_hundred_calls() -> None:
    """On a CPU one input is worn out, on a GPU each."""
    candidate = Candidate("c", "qwen-image", lambda x, cos, sin: x)
    for device, all_of_them in (("cuda", True), ("cpu", False)):
        variants = [c.variant for c in REPEATABILITY.cases(candidate, device, "float32", "standard")]
        assert variants
        assert all(v.endswith("calls=100") for v in variants) is all_of_them


def reasons(name: str, judgement: str, plan: str, only: str = "") -> dict[str, str]:
    """The reason of each case that does not pass, in bfloat16 on the GPU; empty reasons where all pass."""
    candidate = HERE[name]
    selection = Selection(plan, judgements=(judgement,), devices=("cuda",), dtypes=("bfloat16",))
    verdicts = [judge(candidate, q, 0) for q in questions(candidate, selection) if only in q.id]
    assert verdicts
    assert not [v for v in verdicts if v.verdict not in ("pass", "fail")]
    return {v.case: v.reason for v in verdicts if v.verdict == "fail"}


@pytest.mark.gpu
def test_a_kernel_without_copies_passes_on_a_gpu() -> None:
    """One kernel for every view, its output and nothing else, no waiting."""
    assert reasons("right/without-copies", "no-copy", "standard") == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "only", "says"),
    [
        ("wrong/contiguous-first", "x=channels-stride-2", "kernels run for this view"),
        ("wrong/cloned-first", "", "allocates"),
        ("wrong/by-way-of-the-cpu", "", "copies memory"),
        ("wrong/waiting-for-the-gpu", "", "returns only when the GPU is done"),
    ],
)
def test_copies_and_waiting_fail_on_a_gpu(name: str, only: str, says: str) -> None:
    """A copy shows as a kernel or as bytes, a detour over the CPU as a copy between memories, waiting as such."""
    found = reasons(name, "no-copy", "standard" if only else "smoke", only)
    assert found
    assert all(says in reason or "copies memory" in reason for reason in found.values()), found


@pytest.mark.gpu
def test_a_detour_over_the_cpu_is_refused_by_torch() -> None:
    """What torch itself knows to wait is an error within the block, and none outside."""
    x = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), waiting_refused():
        x.cpu()
    assert x.cpu().tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_waits_on_a_gpu() -> None:
    """A launch returns at once, a synchronisation only when the GPU is done."""
    x = torch.zeros(3, device="cuda")
    x.add_(1)
    assert not waits(lambda: x.add_(1))
    assert waits(torch.cuda.synchronize)
    assert waits(lambda: x.sum().item())
