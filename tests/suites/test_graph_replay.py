"""graph-replay: on a CPU with a tape in place of a CUDA graph, on a GPU with the real thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropecheck.kernels import multi_axis_rope
from ropecheck.suites import cuda_graphs
from ropecheck.suites.adapters import rotate_qk
from ropecheck.suites.bare_calls import Outputs
from ropecheck.suites.candidates import Candidate, load_candidates
from ropecheck.suites.cases import Case
from ropecheck.suites.cuda_graphs import CudaGraphs, Recorded, usable
from ropecheck.suites.invocation import CandidateFault
from ropecheck.suites.judgements.graph_replay import GRAPH_REPLAY, replayed
from ropecheck.suites.judging import Selection, Unasked, judge, questions
from ropecheck.suites.verdicts import failed

HERE = {c.name: c for c in load_candidates(str(Path(__file__).with_name("gpu_candidates.py")))}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a CUDA graph holds: each operation with the memory that it read and wrote."""

    running = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        viewed = all(t.untyped_storage().data_ptr() in given for t in made)
        if func._schema.is_mutable or not (viewed or "empty" in func.name()):
            self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for own, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    own.copy_(new)


class TapedGraphs(CudaGraphs):
    """The graphs of a case on a CPU."""

    def __init__(self) -> None:
        self.replays = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def warm_up(self, call: Callable[[], Outputs]) -> None:
        call()

    def record(self, call: Callable[[], Outputs], *, sharing: bool = False) -> Recorded:
        tape = Tape()
        Tape.running = True
        try:
            with tape:
                outputs = call()
        except RuntimeError as error:
            raise CandidateFault(f"the capture raised {error}") from None
        finally:
            Tape.running = False

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                tape.replay()

        return Recorded(outputs, replay)

    def poison(self) -> list[Tensor]:
        return []

    def empty_cache(self) -> None:
        pass


def cases(candidate: Candidate, plan: str, dtype: str = "bfloat16") -> list[Case]:
    """As for a GPU, to be judged on the CPU."""
    return [replace(case, device="cpu") for case in GRAPH_REPLAY.cases(candidate, "cuda", dtype, plan)]


def reasons(candidate: Candidate, plan: str = "smoke") -> dict[str, str]:
    """For each variant the reason of the first case that fails."""
    found: dict[str, str] = {}
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: Tape.running):
        for case in cases(candidate, plan):
            try:
                finding = replayed(candidate, case, 0, TapedGraphs())
            except CandidateFault as fault:
                finding = failed(str(fault))
            if finding.verdict != "pass":
                found.setdefault(case.variant, finding.reason)
    return found


def ours(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    return multi_axis_rope(x, cos, sin, conjugate=conjugate, backend="reference")


def pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return ours(q, cos, sin), ours(k, cos, sin)


def in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.copy_(ours(x, cos, sin))


def backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> None:
    gradient.copy_(ours(gradient, cos, -sin))


EVERYTHING = ("graph", "vjp", "strided", "any-shape", "conjugate")
RIGHT = [
    Candidate("ours", "qwen-image", ours, ("cpu",), provides=EVERYTHING),
    Candidate("pair", "qwen-image", pair, ("cpu",), provides=("graph", "vjp"), family="rotate_pair"),
    Candidate("pair-strided", "qwen-image", pair, ("cpu",), provides=("graph", "strided"), family="rotate_pair"),
    Candidate("in-place", "qwen-image", in_place, ("cpu",), provides=("graph", "vjp"), in_place=True, vjp=backward),
    HERE["right/composed"],
    *(c for c in rotate_qk.CANDIDATES if c.contract == "mrope-interleaved"),
]


@pytest.mark.parametrize("candidate", RIGHT, ids=lambda c: c.name)
def test_right_candidates_replay(candidate: Candidate) -> None:
    """An operator, a composition, a pair, and one that works in place pass every case of the standard plan."""
    assert reasons(candidate, "standard") == {}
    assert len(cases(candidate, "standard")) >= 8


WRONG = {
    "wrong/output-by-pointer": ("replay 1", {"forward", "forward/side-stream", "forward/two-graphs"}),
    "wrong/table-by-pointer": ("at other positions", {"forward", "forward/side-stream", "forward/two-graphs"}),
    "wrong/table-on-the-host": ("the capture raised", {"forward", "forward/side-stream", "forward/two-graphs"}),
    "wrong/length-of-the-last-eager-call": ("replay", {"forward/two-graphs"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidates_do_not_replay(name: str) -> None:
    """What is kept from the capture, read on the host during it, or planned by another call shows in a replay."""
    expected, variants = WRONG[name]
    found = reasons(HERE[name])
    assert set(found) == variants
    assert all(expected in reason for reason in found.values()), found


def test_positions_are_read_in_every_replay() -> None:
    """A gather that is made once, at the capture, is stale where the positions or the cache are others."""
    own, kept = rotate_qk.composition("neox"), {}

    def once(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            kept[positions.shape] = positions.clone()
            return own(q, k, cache, positions)
        return own(q, k, cache, kept[positions.shape])

    found = reasons(Candidate("once", "neox", once, ("cpu",), provides=("graph", "strided"), family="rotate_qk"))
    assert "at other positions" in found["forward"]


def test_a_backward_is_replayed() -> None:
    """A gradient that is computed once, at the capture, shows in the case of the backward only."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def once(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            kept[gradient.shape] = ours(gradient, cos, -sin)
        return kept[gradient.shape]

    candidate = Candidate("c", "qwen-image", ours, ("cpu",), provides=("graph", "vjp"), vjp=once)
    found = reasons(candidate)
    assert set(found) == {"vjp", "vjp/side-stream", "vjp/two-graphs"}
    assert all("elements of the gradient" in reason for reason in found.values())


def test_a_replay_that_writes_its_input() -> None:
    """The memory that a graph reads must hold after a replay what it held before."""

    def negated_sine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = ours(x, cos, sin)
        sin.neg_()
        return y

    found = reasons(Candidate("c", "qwen-image", negated_sine, ("cpu",), provides=("graph",)))
    assert found
    captured_only = reasons(Candidate("c", "qwen-image", _only_captured(negated_sine), ("cpu",), provides=("graph",)))
    assert set(captured_only) == set(found)


def _only_captured(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, cos, sin: (run if torch.cuda.is_current_stream_capturing() else ours)(x, cos, sin)


def test_an_eager_call_after_the_capture() -> None:
    """A candidate that a capture leaves in another state is found out by the eager call that follows."""
    state = {"captured": False}

    def changed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        state["captured"] |= capturing
        return ours(x, cos, sin) if capturing or not state["captured"] else x.clone()

    found = reasons(Candidate("c", "qwen-image", changed, ("cpu",), provides=("graph",)))
    assert "does not return what it returned before the capture" in found["forward"]


def test_a_cpu_has_no_graphs() -> None:
    """On a CPU the one cell is not applicable, for that reason; without the claim for want of it."""
    asked = list(questions(RIGHT[0], Selection("smoke", judgements=("graph-replay",), devices=("cpu",))))
    assert asked == [Unasked("graph-replay", "cpu", "not-applicable", "a CPU has no CUDA graphs")]
    (unclaimed,) = questions(
        replace(RIGHT[0], provides=()), Selection("smoke", judgements=("graph-replay",), devices=("cpu",))
    )
    assert isinstance(unclaimed, Unasked)
    assert "does not claim graph" in unclaimed.reason


class BrokenOff:
    """A capture whose end raises, as CUDA's does after a call that synchronised."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("mine"), "ValueError: mine"),
        (None, "RuntimeError: operation failed"),
        (torch.OutOfMemoryError("no memory"), ""),
    ],
    ids=["raises", "broken-off-silently", "out-of-memory"],
)
def test_a_capture_that_is_broken_off(monkeypatch: pytest.MonkeyPatch, error: Exception | None, expected: str) -> None:
    """The candidate's own error is the one reported, the stream from before is current again, and all is mended."""
    done: list[Any] = []
    for name, stand_in in {
        "graph": BrokenOff, "CUDAGraph": object, "current_stream": lambda: "before",
        "set_stream": done.append, "Stream": lambda: "side", "graph_pool_handle": lambda: (0, 7),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graphs, "waiting_refused", nullcontext)
    monkeypatch.setattr(cuda_graphs, "_mend", done.append)

    def call() -> Outputs:
        if error is not None:
            raise error
        return (torch.zeros(1),)

    if not expected:
        with pytest.raises(torch.OutOfMemoryError):
            CudaGraphs().record(call)
    else:
        with pytest.raises(CandidateFault, match=f"the capture raised {expected}"):
            CudaGraphs().record(call)
    assert done == ["before", (0, 7)]


def verdicts(name: str, plan: str = "smoke") -> dict[str, set[str]]:
    """The reasons of each verdict on the GPU."""
    found: dict[str, set[str]] = {}
    for question in questions(HERE[name], Selection(plan, judgements=("graph-replay",), devices=("cuda",))):
        verdict = judge(HERE[name], question, 0)
        found.setdefault(verdict.verdict, set()).add(verdict.reason)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["right/launched", "right/composed"])
def test_right_candidates_replay_on_a_gpu(name: str) -> None:
    """A Triton kernel and a composition with its backward pass every case, and leave the process as it was."""
    assert verdicts(name, "standard") == {"pass": {""}}
    assert usable()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WRONG, "wrong/scratch-of-the-last-eager-call"])
def test_wrong_candidates_do_not_replay_on_a_gpu(name: str) -> None:
    """As on the CPU; scratch memory that is freed after the capture shows here only. The GPU stays usable."""
    found = verdicts(name)
    assert "fail" in found, found
    assert not found.keys() - {"fail", "pass"}, found
    if name != "wrong/length-of-the-last-eager-call":
        assert "pass" not in found
    assert usable()
    assert verdicts("right/composed") == {"pass": {""}}
