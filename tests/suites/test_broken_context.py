"""What a candidate does to its GPU costs it its own case, and the next one nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from ropecheck.suites import cuda_graphs, plugin
from ropecheck.suites.verdicts import Verdict

OnAGpu = Callable[..., list[Verdict]]
FORWARD = ("--judgement", "accuracy-forward", "--dtype", "bfloat16", "--plan", "smoke")


@pytest.mark.gpu
def test_an_illegal_access_costs_its_own_case(verdicts_on_a_gpu: OnAGpu) -> None:
    """Of both candidates every case has a verdict; the one case that breaks the context fails, by name."""
    wrong, right = "wrong/illegal-in-decode", "right/launched"
    verdicts = verdicts_on_a_gpu((wrong, right), *FORWARD)
    (failed,) = [v for v in verdicts if v.verdict != "pass"]
    assert (failed.candidate, failed.verdict) == (wrong, "fail")
    assert "/b2-s1-" in failed.case
    assert "illegal memory access" in failed.reason
    counts = Counter(v.candidate for v in verdicts)
    assert counts[wrong] == counts[right] >= 4


@pytest.mark.gpu
def test_out_of_memory_is_blocked(verdicts_on_a_gpu: OnAGpu) -> None:
    """A candidate that asks for 10 TiB is blocked in every case, and the next one passes in the same process."""
    verdicts = verdicts_on_a_gpu(("wrong/ten-terabytes", "right/launched"), *FORWARD)
    outcomes = {(v.candidate, v.verdict) for v in verdicts}
    assert outcomes == {("wrong/ten-terabytes", "blocked"), ("right/launched", "pass")}
    assert all("out of memory" in v.reason for v in verdicts if v.verdict == "blocked")


@pytest.mark.gpu
def test_a_capture_that_is_broken_off_costs_its_own_cases(verdicts_on_a_gpu: OnAGpu) -> None:
    """A candidate that synchronises fails each capture and nothing else; the next one's captures pass."""
    judgements = ("--judgement", "graph-replay", "--judgement", "purity", "--dtype", "bfloat16", "--plan", "smoke")
    verdicts = verdicts_on_a_gpu(("wrong/synchronising", "right/composed"), *judgements)
    outcomes = {(v.candidate, v.judgement, v.verdict) for v in verdicts}
    assert outcomes == {
        ("wrong/synchronising", "graph-replay", "fail"),
        ("wrong/synchronising", "purity", "pass"),
        ("right/composed", "graph-replay", "pass"),
        ("right/composed", "purity", "pass"),
    }, [v.reason for v in verdicts if v.verdict != "pass"]
    assert all("the capture raised" in v.reason for v in verdicts if v.verdict == "fail")


@pytest.mark.gpu
def test_a_gpu_that_works_is_usable() -> None:
    """After a call that failed for its own reasons the process goes on."""
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="cuda") @ torch.zeros(3, device="cuda")
    assert cuda_graphs.usable()
    assert not plugin.context_is_broken()


@pytest.mark.parametrize(
    ("breaks", "usable"),
    [
        ("", True),
        ("synchronize", False),
        ("empty_cache", False),
        ("rand", False),
        ("memory", True),
    ],
)
def test_usable_asks_gpu_allocator_and_generator(monkeypatch: pytest.MonkeyPatch, breaks: str, usable: bool) -> None:
    """Any of the three, broken, ends the process; memory that is used up does not. Only touched GPUs are asked."""
    asked: list[int | None] = []

    def part(name: str) -> Callable[..., None]:
        def called(*arguments: object, **keywords: object) -> None:
            if name == "synchronize":
                asked.append(arguments[0] if arguments else None)  # type: ignore[arg-type]
            if name == breaks:
                raise RuntimeError("an illegal memory access was encountered")
            if name == "rand" and breaks == "memory":
                raise torch.OutOfMemoryError("out of memory")

        return called

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, part(name))
    monkeypatch.setattr(torch, "rand", part("rand"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 512 if device == 2 else 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda_graphs.usable() is usable
    assert plugin.context_is_broken() is not usable
    assert 0 not in asked
