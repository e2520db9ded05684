"""autograd: a graph that is right where it is asked plainly, and wrong where a model asks otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope_pair
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate

Ask = Callable[..., list[Any]]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """Right for qwen-image."""
    return rotate_reference(x, cos, sin, half_split=False, conjugate=conjugate)


def differentiable(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image, by operations that autograd differentiates."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


class WhereWanted(torch.autograd.Function):
    """Rotates what wants a gradient, and copies the other of the two."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        of_q, of_k = ctx.needs_input_grad[:2]
        return (
            rotated(q, cos, sin) if of_q or not of_k else q.clone(),
            rotated(k, cos, sin) if of_k or not of_q else k.clone(),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *(rotated(g, *ctx.saved_tensors, conjugate=True) for g in gradients), None, None


class KeepingTables(torch.autograd.Function):
    """Keeps the tables as attributes, which autograd does not watch; ``kept`` is what it keeps of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kept: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.tables = kept(cos), kept(sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return rotated(gradients[0], *ctx.tables, conjugate=True), None, None, None


def keeping_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = KeepingTables.apply(x, cos, sin, lambda table: table)  # type: ignore[no-untyped-call]
    return y


def keeping_copies(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = KeepingTables.apply(x, cos, sin, Tensor.clone)  # type: ignore[no-untyped-call]
    return y


def where_wanted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return WhereWanted.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]


def one(run: Callable[..., Any], **fields: Any) -> Candidate:
    return Candidate("graph", "qwen-image", run, ("cpu",), ("bfloat16",), ("vjp", "strided"), **fields)


def test_an_output_that_is_not_rotated_without_a_gradient_fails(ask: Ask) -> None:
    """Every gradient is right; the output of the one of two that wants none is a copy of the input."""
    verdicts = ask(one(where_wanted, family="rotate_pair"), "standard", ("autograd",))
    assert {v.case.rpartition("/")[2] for v in verdicts if v.verdict == "fail"} == {"one-of-two"}
    reasons = [v.reason for v in verdicts if v.verdict == "fail"]
    assert all("the outputs where q alone requires a gradient: " in reason for reason in reasons)


def test_a_table_that_autograd_does_not_watch_fails(ask: Ask) -> None:
    """Written over between forward and backward, it gives the gradient of another rotation, and nobody objects."""
    verdicts = ask(one(keeping_tables), "standard", ("autograd",))
    failed = [v for v in verdicts if v.verdict == "fail"]
    assert {v.case.rpartition("/")[2] for v in failed} == {"overwritten"}
    assert all("was written over: " in v.reason for v in failed)


@pytest.mark.parametrize("run", [differentiable, keeping_copies])
def test_a_table_that_is_watched_or_copied_passes(run: Callable[..., Any], ask: Ask) -> None:
    """Torch's refusal is noted; a copy of the table answers as if nothing had happened."""
    verdicts = ask(one(run), "standard", ("autograd",), only="overwritten")
    assert {v.verdict for v in verdicts} == {"pass"}
    refused = ["modified by an inplace operation" in v.facts["judged"][0] for v in verdicts]
    assert refused == [run is differentiable] * len(verdicts)


def behind_autograd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for x in (q, k):
        x.data.copy_(rotated(x.detach(), cos, sin))


def cutting_off(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for x in (q, k):
        x.copy_(rotated(x.detach(), cos, sin))


def watched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for x in (q, k):
        x.copy_(differentiable(x, cos, sin))


def refusing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    multi_axis_rope_pair(q, k, cos, sin, in_place=True, backend="reference")


def back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    with torch.no_grad():
        for x in (q, k):
            x.copy_(rotated(x, cos, sin, conjugate=True))


@pytest.mark.parametrize("run", [behind_autograd, cutting_off])
def test_in_place_without_a_word_to_autograd_fails(run: Callable[..., Any], failing: Callable[..., Any]) -> None:
    """The gradient that autograd then gives is that of a copy, or zero; one that x's version hides purity sees, too."""
    reasons = failing(one(run, family="rotate_pair", in_place=True, vjp=back))
    assert list(reasons) == (["purity", "autograd"] if run is behind_autograd else ["autograd"])
    assert "the gradient of what was written in place and not refused: " in reasons["autograd"]


@pytest.mark.parametrize("run", [watched, refusing])
def test_in_place_that_is_refused_or_recorded_passes(run: Callable[..., Any], ask: Ask) -> None:
    """A candidate that refuses tensors which require a gradient passes, and so does one that autograd records."""
    strict = replace(one(run, family="rotate_pair", in_place=True, vjp=back), provides=("vjp", "strided", "strict"))
    (verdict,) = ask(strict, "standard", ("autograd",))
    assert verdict.verdict == "pass", verdict.reason
    assert verdict.facts["judged"][-1].startswith("refused: ") == (run is refusing)
