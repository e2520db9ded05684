"""Derivatives of every order, and every way of asking for them: what is wrong in one of them alone, and right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate

Reasons = Callable[..., dict[str, str]]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image, and made of torch operations."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As an opaque kernel computes it: without a graph."""
    with torch.no_grad():
        return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


class Right(torch.autograd.Function):
    """The usual kernel behind an autograd.Function, differentiable to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return Right.apply(gradient, cos, -sin), None, None


class DetachedAtSecondOrder(Right):
    """The first gradient is right, and has no graph."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return kernel(gradient, cos, -sin), None, None


class OnceDifferentiable(Right):
    """Says that it has no second derivative, though it claims one."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return kernel(gradient, cos, -sin), None, None


class Backward(torch.autograd.Function):
    """A backward whose own backward turns back once more, where it should turn forward."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernel(gradient, cos, -sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return Backward.apply(gradient, cos, sin), None, None


class WrongSignAtSecondOrder(Right):
    """Of two near copies of one kernel one has the other sign."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return Backward.apply(gradient, cos, sin), None, None


class DetachedAtThirdOrder(Right):
    """The second derivative is right and has no graph."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return DetachedAtSecondOrder.apply(gradient, cos, -sin), None, None


class DependingOnX(torch.autograd.Function):
    """x enters the first gradient with the value zero, and its derivative is not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        return Right.apply(gradient, cos, -sin) + _nothing(x, gradient), None, None


def _nothing(x: Tensor, gradient: Tensor) -> Tensor:
    """Zeros, of which x's derivative is the gradient."""
    return (x - x.detach()).nan_to_num(0, 0, 0) * gradient.nan_to_num(0, 0, 0)


class StaleContext(torch.autograd.Function):
    """The table of the last call is kept for every call's backward."""

    kept: tuple[Tensor, Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        StaleContext.kept = cos, sin
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = StaleContext.kept
        return Right.apply(gradient, cos, -sin), None, None


class OverwritingItsContext(torch.autograd.Function):
    """The backward negates the sine that it has saved, in place: right the first time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.cos, ctx.sin = cos, sin.clone()
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            ctx.sin.neg_()
        return Right.apply(gradient, ctx.cos, ctx.sin.clone()), None, None


class ForgettingItsContext(torch.autograd.Function):
    """The backward drops what it has saved, retained or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.kept = [(cos, sin)]
        return kernel(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.kept.pop()
        return Right.apply(gradient, cos, -sin), None, None


class OneBuffer(Right):
    """All gradients of a shape are written into one buffer."""

    buffers: dict[Any, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        wanted = Right.apply(gradient, cos, -sin)
        if torch.is_grad_enabled():
            return wanted, None, None
        buffer = OneBuffer.buffers.setdefault((gradient.shape, gradient.dtype), torch.empty_like(wanted))
        return buffer.copy_(wanted), None, None


def refusing_table_gradients(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            raise ValueError("cos, sin: no gradient of the table is computed")
        result: Tensor = function.apply(x, cos, sin)
        return result

    run.__module__ = __name__
    return run


CLAIMS = ("vjp", "higher-vjp", "strict")


def candidate(function: type[torch.autograd.Function], *claims: str) -> Candidate:
    run = refusing_table_gradients(function)
    return Candidate("function", "qwen-image", run, ("cpu",), dtypes=("bfloat16",), provides=claims or CLAIMS)


WRONG = [
    (DetachedAtSecondOrder, ["higher-vjp"], "detached from the gradient"),
    (OnceDifferentiable, ["higher-vjp"], "no derivative of the second order"),
    (WrongSignAtSecondOrder, ["higher-vjp"], "the derivative of the second order: "),
    (DetachedAtThirdOrder, ["higher-vjp"], "detached from the gradient"),
    (DependingOnX, ["higher-vjp"], "the second order gives x a gradient that is not zero"),
    (StaleContext, ["autograd", "higher-vjp"], "the gradient of the first of two recorded calls: "),
    (OverwritingItsContext, ["autograd"], "the second gradient of a retained graph: "),
    (ForgettingItsContext, ["autograd"], "pop from empty list"),
    (OneBuffer, ["repeatability", "autograd"], "the gradient of the first of two recorded calls: "),
]


@pytest.mark.parametrize(("function", "expected", "reason"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_wrong_derivatives(
    function: type[torch.autograd.Function], expected: list[str], reason: str, failing: Reasons
) -> None:
    """Each fails the judgements of its fault, for its reason, and out of all that are asked no other."""
    reasons = failing(candidate(function))
    assert list(reasons) == expected
    assert any(reason in found for found in reasons.values()), reasons


@pytest.mark.parametrize("function", [StaleContext, OverwritingItsContext, ForgettingItsContext])
def test_a_first_order_fault_is_seen_without_the_claim_of_higher_orders(
    function: type[torch.autograd.Function], failing: Reasons
) -> None:
    """A graph that answers wrongly when two calls are recorded, or it is gone through again, fails autograd alone."""
    assert list(failing(candidate(function, "vjp"))) == ["autograd"]


def test_right_function_passes(failing: Reasons) -> None:
    """The kernel that the wrong ones are made from passes all that is asked of it, and strictly."""
    assert failing(candidate(Right)) == {}
    assert failing(candidate(Right), "standard", ("autograd", "higher-vjp")) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_composed_rotation_passes(dtype: str, failing: Reasons) -> None:
    """What autograd makes of torch operations, in every order, is admissible."""
    composed = Candidate("composed", "qwen-image", turned, ("cpu",), dtypes=(dtype,), provides=("vjp", "higher-vjp"))
    assert failing(composed, "standard", ("autograd", "higher-vjp", "table-gradient")) == {}


def test_a_failure_names_the_element(ask: Callable[..., list[Any]]) -> None:
    """Where a derivative is wrong, the verdict tells an element, what was admissible there and what came."""
    verdict = ask(candidate(WrongSignAtSecondOrder), "smoke", ("higher-vjp",))[0]
    assert set(verdict.worst) == {"sample", "token", "head", "channel", "admissible", "strict", "got"}
    assert verdict.facts["judged"] == [f"the derivative of the {order} order" for order in ("first", "second")]


def test_a_separate_backward_is_not_applicable(ask: Callable[..., list[Any]]) -> None:
    """Where the candidate gives its own vjp there is no graph to ask, and the verdict says so."""
    separate = Candidate(
        "separate", "qwen-image", kernel, ("cpu",), ("bfloat16",), ("vjp", "higher-vjp"),
        vjp=lambda gradient, cos, sin: kernel(gradient, cos, -sin),
    )  # fmt: skip
    verdicts = ask(separate, "standard", ("autograd", "higher-vjp", "table-gradient"))
    assert [v.verdict for v in verdicts] == ["not-applicable"] * 3
    assert all("records no graph" in v.reason for v in verdicts)


class Pair(torch.autograd.Function):
    """q and k, rotated together."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return kernel(q, cos, sin), kernel(k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (*Pair.apply(*gradients, cos, -sin), None, None)


class OfQOnly(Pair):
    """k's gradient is forgotten."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return Pair.apply(*gradients, cos, -sin)[0], None, None, None


class BothOrNone(Pair):
    """Nothing is computed unless both inputs want a gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if not all(ctx.needs_input_grad[:2]):
            return None, None, None, None
        return (*Pair.apply(*gradients, cos, -sin), None, None)


class WithoutAnUnusedOutput(Pair):
    """Fails where one of the outputs is not used, whose gradient is then None."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return Pair.forward(ctx, q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*Pair.apply(*(g.contiguous() for g in gradients), *_turned_back(ctx)), None, None)


class ZerosForOneOutput(WithoutAnUnusedOutput):
    """Gives zeros to both inputs where one of the outputs is not used."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if None in [g if g is None else 0 for g in gradients]:
            shapes = [g for g in gradients if g is not None] * 2
            return (*(torch.zeros_like(g) for g in shapes), None, None)
        return WithoutAnUnusedOutput.backward(ctx, *gradients)


def _turned_back(ctx: Any) -> tuple[Tensor, Tensor]:
    cos, sin = ctx.saved_tensors
    return cos, -sin


def pair(function: type[torch.autograd.Function]) -> Candidate:
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            raise ValueError("cos, sin: no gradient of the table is computed")
        q_turned, k_turned = function.apply(q, k, cos, sin)
        return q_turned, k_turned

    run.__module__ = __name__
    return Candidate(
        "pair", "qwen-image", run, ("cpu",), ("bfloat16",), ("vjp", "higher-vjp", "strict", "strided"),
        family="rotate_pair",
    )  # fmt: skip


WRONG_PAIRS = [
    (Pair, []),
    (BothOrNone, ["autograd"]),
    (WithoutAnUnusedOutput, ["autograd"]),
    (ZerosForOneOutput, ["autograd"]),
]


@pytest.mark.parametrize(("function", "expected"), WRONG_PAIRS, ids=[w[0].__name__ for w in WRONG_PAIRS])
def test_one_of_a_pair(function: type[torch.autograd.Function], expected: list[str], failing: Reasons) -> None:
    """A pair of which one output alone is used, or one input alone wants a gradient, fails autograd alone."""
    assert list(failing(pair(function))) == expected


def test_a_pair_without_the_gradient_of_k(failing: Reasons) -> None:
    """A backward that forgets k fails everything that differentiates, and nothing of the forward."""
    reasons = failing(pair(OfQOnly))
    assert {"accuracy-vjp", "invariance-vjp", "autograd", "higher-vjp"} <= set(reasons)
    assert not {"accuracy-forward", "invariance-forward", "laws", "table-gradient"} & set(reasons)
