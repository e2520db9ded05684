"""Candidates whose arithmetic is right and whose behaviour is not: each fails for the right judgements only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate, load_candidates
from ropecheck.suites.faults.mechanical.launching import FirstResultKept, OneCallLate, RaisingTheSecondTime
from ropecheck.suites.faults.mechanical.writing import sine_left_negated, uninitialised_added, x_as_scratch

EVERY = ("accuracy-forward", "invariance-forward", "purity", "repeatability", "provenance")


def right(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image."""
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def transposed(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return right(gradient, cos, -sin)


def as_if_contiguous(t: Tensor) -> Tensor:
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())


def ignoring_strides(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reads x's memory as if it were contiguous."""
    return right(as_if_contiguous(x), cos, sin)


def ignoring_table_strides(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reads the tables' memory as if it were contiguous."""
    return right(x, as_if_contiguous(cos), as_if_contiguous(sin))


def scrambling_the_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pass-through channels come out reversed."""
    y, tail = right(x, cos, sin), 2 * cos.shape[-1]
    y[..., tail:] = x[..., tail:].flip(-1)
    return y


def dropping_the_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pass-through channels come out as zeros."""
    y = right(x, cos, sin)
    y[..., 2 * cos.shape[-1] :] = 0
    return y


def one_sample_in_decode(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With one token, every sample uses the first sample's table."""
    if x.shape[1] == 1 and cos.dim() == 3:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return right(x, cos, sin)


def skipping_the_last_token(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last row of the output is never written."""
    y = torch.empty_like(x)
    y[:, :-1] = right(x[:, :-1], cos[..., :-1, :], sin[..., :-1, :])
    return y


def writing_behind_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Writes one element past the end of x, where there is memory."""
    end = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    if end < x.untyped_storage().nbytes() // x.element_size():
        x.as_strided((1,), (1,), end).zero_()
    return right(x, cos, sin)


def returning_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Writes the result over x and returns x, without saying that it works in place."""
    return x.copy_(right(x, cos, sin))


def leaking_across_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Zero times the token before is added, so that a NaN in padding spreads."""
    y = right(x, cos, sin)
    y[:, 1:] -= 0 * x[:, :-1].abs()
    return y


def depending_on_the_chunk(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A sequence of four tokens starts at the second row of its table."""
    shift = -1 if x.shape[1] == 4 else 0
    return right(x, cos.roll(shift, dims=-2), sin.roll(shift, dims=-2))


def sample_by_sequence_index(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows longer than 20 tokens use the table of row 0 for the whole batch."""
    if cos.dim() == 3 and x.shape[1] > 20:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return right(x, cos, sin)


class OffsetByTheCallCount:
    """Every call starts one row further down the table."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.calls += 1
        shift = -(self.calls % 5)
        return right(x, cos.roll(shift, dims=-2), sin.roll(shift, dims=-2))


@dataclass(frozen=True)
class Wrong:
    """A wrong candidate and the judgements that must fail of those asked."""

    run: Callable[..., Any]
    fails: tuple[str, ...]
    claims: tuple[str, ...] = ()
    asked: tuple[str, ...] = EVERY
    plan: str = "smoke"


WRONG = (
    Wrong(ignoring_strides, ("accuracy-forward",), ("strided",)),
    Wrong(scrambling_the_tail, ("accuracy-forward",), ("any-shape",)),
    Wrong(dropping_the_tail, ("accuracy-forward",), ("any-shape",)),
    Wrong(one_sample_in_decode, ("accuracy-forward",)),
    # Memory that was not written may by chance hold the right bytes: only purity can promise to see it.
    Wrong(skipping_the_last_token, ("purity",), asked=("purity", "provenance")),
    Wrong(uninitialised_added, ("purity",), asked=("purity", "provenance")),
    # Accuracy holds an output against the inputs as they were given; a repeated call meets the changed ones.
    Wrong(x_as_scratch, ("purity", "repeatability")),
    Wrong(sine_left_negated, ("purity", "repeatability")),
    Wrong(writing_behind_x, ("purity",)),
    Wrong(returning_x, ("purity", "repeatability")),
    # Special values stand beside ordinary ones in an accuracy case.
    Wrong(leaking_across_tokens, ("accuracy-forward", "invariance-forward")),
    Wrong(depending_on_the_chunk, ("invariance-forward",)),
    Wrong(sample_by_sequence_index, ("invariance-forward",)),
    Wrong(OneCallLate(), ("repeatability",), asked=("repeatability", "provenance")),
    Wrong(FirstResultKept(), ("repeatability",), asked=("repeatability", "provenance")),
    Wrong(RaisingTheSecondTime(), ("repeatability",)),
    Wrong(OffsetByTheCallCount(), ("repeatability",), asked=("repeatability", "provenance"), plan="standard"),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: getattr(w.run, "__name__", type(w.run).__name__))
def test_wrong_behaviour_fails_for_the_right_judgements(wrong: Wrong, failing: Callable[..., dict[str, str]]) -> None:
    """Each fault is seen by the judgements that ask for it, and those which cannot see it pass."""
    candidate = Candidate("wrong", "qwen-image", wrong.run, devices=("cpu",), provides=wrong.claims)
    reasons = failing(candidate, wrong.plan, wrong.asked, ("bfloat16",))
    assert tuple(reasons) == wrong.fails, reasons


def test_table_strides_ignored(failing: Callable[..., dict[str, str]]) -> None:
    """Tables cut out of a wider one, transposed or spread out show a kernel that reads them as contiguous."""
    candidate = Candidate("wrong", "qwen-image", ignoring_table_strides, devices=("cpu",), provides=("strided",))
    reasons = failing(candidate, "standard", ("accuracy-forward",), ("bfloat16",), only="table=")
    assert "table=" in reasons["accuracy-forward"]


def test_right_behaviour_passes(failing: Callable[..., dict[str, str]]) -> None:
    """The rotation that the wrong ones are made from passes everything that they are asked, with all their claims."""
    claims = ("vjp", "strict", "strided", "any-shape")
    candidate = Candidate("right", "qwen-image", right, devices=("cpu",), provides=claims, vjp=transposed)
    assert failing(candidate, dtypes=("bfloat16",)) == {}


def without_temporaries(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 only: allocates its output and nothing else."""
    y, c, s = torch.empty(x.shape), cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2], x[..., 1::2]
    torch.mul(x0, c, out=y[..., 0::2]).addcmul_(x1, s, value=-1)
    torch.mul(x1, c, out=y[..., 1::2]).addcmul_(x0, s)
    return y


def copying(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Makes a strided input contiguous first."""
    return without_temporaries(x.contiguous(), cos, sin)


@pytest.mark.parametrize(("run", "expected"), [(without_temporaries, []), (copying, ["no-copy"])])
def test_hidden_copy(run: Callable[..., Tensor], expected: list[str], failing: Callable[..., dict[str, str]]) -> None:
    """With the claim no-copy a hidden contiguous() fails for strided input, and fails nothing else."""
    candidate = Candidate(
        "copying", "qwen-image", run, devices=("cpu",), dtypes=("float32",), provides=("strided", "no-copy")
    )
    reasons = failing(candidate, "standard", ("no-copy", "purity", "provenance"))
    assert list(reasons) == expected
    assert all("x=" in reason and "allocates" in reason for reason in reasons.values())


@contextmanager
def trace_of(backend: str, direction: str = "forward") -> Iterator[list[Any]]:
    yield [SimpleNamespace(backend=backend, direction=direction)]


TRACES: dict[str, tuple[dict[str, Any], str]] = {
    "names-another-backend": ({"backend": "triton", "trace": lambda: trace_of("reference")}, "backend reference ran"),
    "records-nothing": ({"backend": "triton", "trace": lambda: trace_of("triton", "backward")}, "records no forward"),
    "kernel-not-seen": ({"kernels": ("rotation_kernel",)}, "kernel rotation_kernel was not seen to run; seen: none"),
    "no-such-source": ({"sources": ("no_such_file.cu",)}, "declared source no_such_file.cu does not exist"),
}


@pytest.mark.parametrize("name", TRACES)
def test_another_kernel_than_declared(name: str, failing: Callable[..., dict[str, str]]) -> None:
    """What a candidate says about the kernel that runs is held against what is seen to run."""
    said, expected = TRACES[name]
    candidate = Candidate("wrong", "qwen-image", right, devices=("cpu",), **said)
    reasons = failing(candidate, dtypes=("bfloat16",))
    assert list(reasons) == ["provenance"]
    assert expected in reasons["provenance"]


FALLBACK = """
import triton
from ropecheck.kernels import multi_axis_rope
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites import Candidate

@triton.jit
def my_rotation(x, y):
    pass

def run(x, cos, sin):
    return rotate_reference(x, cos, sin, False, False)

CANDIDATES = [Candidate("fallback", "qwen-image", run, devices=("cpu",))]
"""


def test_silent_fallback(tmp_path: Path, failing: Callable[..., dict[str, str]]) -> None:
    """A module that holds a Triton kernel and runs torch operations instead fails provenance, and only that."""
    file = tmp_path / "silent_fallback.py"
    file.write_text(FALLBACK)
    (candidate,) = load_candidates(str(file))
    reasons = failing(candidate, dtypes=("bfloat16",))
    assert list(reasons) == ["provenance"]
    assert "my_rotation" in reasons["provenance"]
    assert "silent fallback" in reasons["provenance"]


def refusing_nothing(x: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns something for every input."""
    return x if isinstance(x, Tensor) else torch.zeros(1)


def refusing(x: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image, and checks its arguments."""
    return multi_axis_rope(x, cos, sin, backend="reference")


def refusing_without_a_name(x: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Every error is the same."""
    try:
        return refusing(x, cos, sin)
    except (TypeError, ValueError):
        raise ValueError("bad input") from None


def failing_an_assertion(x: Any, cos: Tensor, sin: Tensor) -> Tensor:
    """Bad input ends in an AssertionError."""
    try:
        return refusing(x, cos, sin)
    except (TypeError, ValueError):
        raise AssertionError("x cos sin") from None


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (refusing_nothing, "accepted"),
        (refusing_without_a_name, "refused without naming"),
        (failing_an_assertion, "AssertionError"),
        (refusing, ""),
    ],
    ids=["refusing-nothing", "refusing-without-a-name", "failing-an-assertion", "right"],
)
def test_refusals(run: Callable[..., Tensor], expected: str, ask: Callable[..., list[Any]]) -> None:
    """With the claim refusals every bad input must get an error that names the argument."""
    candidate = Candidate("refusing", "qwen-image", run, devices=("cpu",), provides=("refusals",))
    verdicts = ask(candidate, "standard", ("refusals",), ("bfloat16",))
    assert len(verdicts) >= 8
    assert all(v.verdict == ("fail" if expected else "pass") and expected in v.reason for v in verdicts)
