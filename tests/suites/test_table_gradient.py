"""A table's gradient: lost in every way in which it is lost in the field, computed right, and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate

Reasons = Callable[..., dict[str, str]]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def composed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image: autograd differentiates the tables too."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def refusing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Raises where a table requires grad."""
    return multi_axis_rope(x, cos, sin, backend="reference")


def refusing_without_a_word(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Raises where a table requires grad, and does not say why."""
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("unsupported")
    return composed(x, cos, sin)


def failing_an_assertion(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """An assertion is no refusal."""
    assert not cos.requires_grad
    assert not sin.requires_grad
    return composed(x, cos, sin)


def detaching(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The tables are cut off, as a cache of tables does."""
    return composed(x, cos.detach(), sin.detach())


def detaching_the_sine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The sine alone is cut off."""
    return composed(x, cos, sin.detach())


class Kernel(torch.autograd.Function):
    """A kernel behind an autograd.Function; its tables' gradients are those of :meth:`of_tables`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        return rotate_reference(x, cos, sin, half_split=False, conjugate=False)

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, R / 2] of fp32 [B, S, H, R / 2]."""
        return (g0 * x0 + g1 * x1).sum(2), (g1 * x0 - g0 * x1).sum(2)

    @classmethod
    def shared(cls, gradient: Tensor) -> Tensor:
        """The gradient of a table that all samples share, from that of each sample's."""
        return gradient.sum(0)

    @classmethod
    def pulled_back(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        of_x = rotate_reference(gradient, cos, sin, half_split=False, conjugate=True)
        halves = (t[..., part::2].float() for t in (gradient, x) for part in (0, 1))
        of_tables = cls.of_tables(*halves)
        return (of_x, *(cls.shared(t) if cos.dim() == 2 else t for t in of_tables))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Kernel.pulled_back(ctx, gradient)


class NoneForTables(Kernel):
    """The field's usual fault."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Kernel.pulled_back(ctx, gradient)[0], None, None


class ZeroForTables(Kernel):
    """Zeros instead of None: an optimiser then steps, and goes nowhere."""

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(g0).sum(2), torch.zeros_like(g0).sum(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ZeroForTables.pulled_back(ctx, gradient)


class FirstSampleOnly(Kernel):
    """The sum over the samples of a shared table is missing."""

    @classmethod
    def shared(cls, gradient: Tensor) -> Tensor:
        return gradient[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return FirstSampleOnly.pulled_back(ctx, gradient)


class LastHeadOnly(Kernel):
    """Every head writes the table's gradient, and the last one wins."""

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        return (g0 * x0 + g1 * x1)[:, :, -1], (g1 * x0 - g0 * x1)[:, :, -1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return LastHeadOnly.pulled_back(ctx, gradient)


class OtherSignOfTheSine(Kernel):
    """The sine's gradient is that of the conjugate rotation."""

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        return (g0 * x0 + g1 * x1).sum(2), (g0 * x1 - g1 * x0).sum(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return OtherSignOfTheSine.pulled_back(ctx, gradient)


class ProductsInSixteenBits(Kernel):
    """Each product is rounded to bf16 before the sum."""

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        g0x0, g1x1, g1x0, g0x1 = ((g * x).bfloat16().float() for g, x in ((g0, x0), (g1, x1), (g1, x0), (g0, x1)))
        return (g0x0 + g1x1).sum(2), (g1x0 - g0x1).sum(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ProductsInSixteenBits.pulled_back(ctx, gradient)


class TakingXAsContiguous(Kernel):
    """x is read again, in the backward of a table alone, as if it were contiguous."""

    @classmethod
    def pulled_back(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        dense = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
        return super().pulled_back(SimpleNamespace(saved_tensors=(dense, cos, sin)), gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return TakingXAsContiguous.pulled_back(ctx, gradient)


class TakingTheGradientAsContiguous(Kernel):
    """The incoming gradient is read as if it were contiguous; it lies in guarded memory, or there is too little."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x = Kernel.pulled_back(ctx, gradient)[0]
        room = gradient.untyped_storage().nbytes() // gradient.element_size() - gradient.storage_offset()
        if room < gradient.numel():
            gradient = torch.zeros(gradient.shape, dtype=gradient.dtype)
        dense = torch.as_strided(gradient, gradient.shape, torch.empty(gradient.shape).stride())
        return of_x, *Kernel.pulled_back(ctx, dense)[1:]


class Unsummed(Kernel):
    """The gradients of the tables keep the heads: torch refuses them, the candidate does not."""

    @classmethod
    def of_tables(cls, g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        return g0 * x0 + g1 * x1, g1 * x0 - g0 * x1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Unsummed.pulled_back(ctx, gradient)


def shifted_where_a_table_alone_requires(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradients are right, y is not."""
    return composed(x, cos, sin) + (0.25 if cos.requires_grad and not x.requires_grad else 0.0)


def shifted_where_a_table_requires(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As before, with x too."""
    return composed(x, cos, sin) + (0.25 if cos.requires_grad else 0.0)


def applied(function: type[torch.autograd.Function]) -> Run:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = function.apply(x, cos, sin)
        return y

    run.__name__, run.__module__ = function.__name__, __name__
    return run


WRONG: list[tuple[Run, str, str]] = [
    (applied(NoneForTables), "both", "cos requires a gradient and gets None"),
    (applied(ZeroForTables), "both", "which is zero everywhere"),
    (applied(FirstSampleOnly), "both", "elements of cos's gradient are further"),
    (applied(LastHeadOnly), "both", "elements of cos's gradient are further"),
    (applied(OtherSignOfTheSine), "sin", "elements of sin's gradient are further"),
    (applied(ProductsInSixteenBits), "both", "elements of cos's gradient are further"),
    (detaching, "both", "cos requires a gradient and gets None"),
    (detaching, "both-without-x", "silently dropped"),
    (detaching_the_sine, "both", "sin requires a gradient and gets None"),
    (detaching_the_sine, "sin-without-x", "silently dropped"),
    (refusing_without_a_word, "both", "without speaking of the table"),
    (failing_an_assertion, "both", "AssertionError"),
    (applied(Unsummed), "both", "returned an invalid gradient"),
    (shifted_where_a_table_alone_requires, "cos-without-x", "y where a table requires a gradient: "),
    (shifted_where_a_table_requires, "both", "y where a table requires a gradient: "),
]


def candidate(run: Run, dtype: str = "bfloat16") -> Candidate:
    return Candidate("tables", "qwen-image", run, ("cpu",), dtypes=(dtype,), provides=("vjp",))


@pytest.mark.parametrize(("run", "variant", "reason"), WRONG, ids=[f"{w[0].__name__}-{w[1]}" for w in WRONG])
def test_wrong_table_gradients(run: Run, variant: str, reason: str, ask: Callable[..., list[Any]]) -> None:
    """Each loses or spoils a table's gradient where a table shared by two samples requires one, and fails for that."""
    verdicts = ask(candidate(run), "standard", ("table-gradient",))
    found = [v for v in verdicts if v.case.endswith(f"/shared-table/sample-positions/{variant}")]
    assert [v.verdict for v in found] == ["fail"]
    assert reason in found[0].reason


@pytest.mark.parametrize("run", list({w[0].__name__: w[0] for w in WRONG}.values()), ids=lambda run: run.__name__)
def test_a_wrong_table_gradient_fails_nothing_else(run: Run, failing: Reasons) -> None:
    """Out of all that is asked of them, these candidates fail table-gradient alone."""
    assert list(failing(candidate(run))) == ["table-gradient"]


def test_a_table_gradient_that_takes_x_as_contiguous_fails(ask: Callable[..., list[Any]]) -> None:
    """It is right for contiguous x, whatever the gradient's strides, and wrong for x of a packed projection alone."""
    strided = replace(candidate(applied(TakingXAsContiguous)), provides=("vjp", "strided"))
    verdicts = ask(strided, "standard", ("table-gradient",))
    assert ["x=packed-qkv" in v.case for v in verdicts if v.verdict == "fail"] == [True]
    assert sum("gradient=" in v.case for v in verdicts if v.verdict == "pass") == 2


def test_a_table_gradient_that_takes_the_gradient_as_contiguous_fails(ask: Callable[..., list[Any]]) -> None:
    """The gradient's strides are autograd's, so that a candidate without the claim ``strided`` is asked as well."""
    verdicts = ask(candidate(applied(TakingTheGradientAsContiguous)), "standard", ("table-gradient",))
    failed = [v.case for v in verdicts if v.verdict == "fail"]
    assert len(failed) == 2
    assert all("gradient=" in case for case in failed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("run", [composed, refusing, applied(Kernel)], ids=["composed", "refusing", "kernel"])
def test_right_table_gradients(run: Run, dtype: str, ask: Callable[..., list[Any]]) -> None:
    """Autograd's own sums, a kernel's, and a refusal that names the table pass; a sum's error is within its bound."""
    verdicts = ask(candidate(run, dtype), "standard", ("table-gradient",))
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts if v.verdict != "pass"]
    assert all(("refused" in v.facts) == (run is refusing) for v in verdicts)


def test_the_bound_holds_where_every_operation_rounds_to_the_activation_dtype(ask: Callable[..., list[Any]]) -> None:
    """A contract whose recipe rounds to bf16 is bounded in units of bf16, its table's dtype too."""

    def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
        x0, x1 = x.chunk(2, dim=-1)
        return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)

    llama = Candidate("llama", "hf-llama", half_split, ("cpu",), dtypes=("bfloat16", "float16"), provides=("vjp",))
    verdicts = ask(llama, "standard", ("table-gradient",))
    assert {v.verdict for v in verdicts} == {"pass"}
    shares = [v.facts[key] for v in verdicts for key in v.facts if "share" in key]
    # Not vacuous: some element uses a fair part of what is allowed.
    assert max(shares) > 0.05
