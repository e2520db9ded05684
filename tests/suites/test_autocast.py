"""autocast: a candidate whose arithmetic depends on autocast fails it, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.suites.candidates import Candidate

Failing = Callable[..., dict[str, str]]
Ask = Callable[..., list[Any]]


def refused(cos: Tensor, sin: Tensor) -> None:
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError("cos, sin: no gradient is computed")


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image in plain torch operations, forward and backward."""
    refused(cos, sin)
    wide, c, s = x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def casting_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotation(x, cos, sin)


CASTING: Any = torch.library.custom_op("ropecheck_autocast_tests::casting", casting_kernel, mutates_args=())
CASTING.register_autocast("cpu", torch.bfloat16)


def casting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """An operator that is registered to be cast: no matrix product, yet its output changes dtype."""
    y: Tensor = CASTING(x, cos, sin)
    return y


def by_matrices(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair by a product with a matrix: that is what autocast casts."""
    turn = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2).unsqueeze(-4)
    pairs = torch.unflatten(x.float(), -1, (-1, 2)).unsqueeze(-2)
    return torch.matmul(pairs, turn).squeeze(-2).flatten(-2).to(x.dtype)


def rounding_the_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The dtype stays, the table does not."""
    if torch.is_autocast_enabled(x.device.type):
        cos, sin = (t.to(torch.get_autocast_dtype(x.device.type)).float() for t in (cos, sin))
    return rotation(x, cos, sin)


def copying_in_inference_mode(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right wherever autograd may record."""
    return x.clone() if torch.is_inference_mode_enabled() else rotation(x, cos, sin)


class Rotation(torch.autograd.Function):
    """A right backward of its own, whatever autocast says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotation(gradients[0], cos, -sin), None, None


class SavingLess(Rotation):
    """Keeps a rounded table for the backward, under autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        narrow = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        ctx.save_for_backward(cos.to(narrow).float(), sin.to(narrow).float())
        return rotation(x, cos, sin)


class CastingBackward(Rotation):
    """Its backward rounds the table where it runs under autocast, which is inside the region only."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rounding_the_table(gradients[0], cos, -sin), None, None


def by(function: type[Rotation]) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        refused(cos, sin)
        y: Tensor = function.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return y

    return run


@dataclass(frozen=True)
class Wrong:
    run: Callable[..., Tensor]
    reason: str
    dtype: str
    claims: tuple[str, ...] = ("vjp", "strided", "autocast")


FORWARD = ("strided", "autocast")
WRONG = {
    "casting": Wrong(casting, "run returned dtype torch.bfloat16, where x has dtype torch.float32", "float32", FORWARD),
    "casting-the-table": Wrong(casting, "elements of y are others than outside autocast", "bfloat16", FORWARD),
    "by-matrices": Wrong(by_matrices, "elements of y are others than outside autocast", "float32", FORWARD),
    "rounding-the-table": Wrong(rounding_the_table, "elements of y are others than outside autocast", "bfloat16"),
    "saving-less": Wrong(by(SavingLess), "elements of the gradient are others than outside autocast", "bfloat16"),
    "inference-mode": Wrong(copying_in_inference_mode, "are others than outside inference mode", "bfloat16"),
    "casting-backward": Wrong(by(CastingBackward), "elements of the gradient are others", "bfloat16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_depending_on_autocast_fails_alone(name: str, failing: Failing) -> None:
    """Arithmetic that autocast changes, forward or backward, in dtype or bytes, fails autocast and nothing else."""
    wrong = WRONG[name]
    candidate = Candidate("wrong", "qwen-image", wrong.run, devices=("cpu",), provides=wrong.claims)
    reasons = failing(candidate, dtypes=(wrong.dtype,))
    assert list(reasons) == ["autocast"], reasons
    assert wrong.reason in reasons["autocast"]


def ours(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    return multi_axis_rope(x, cos, sin, conjugate=conjugate, backend="reference")


def our_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Any:
    return multi_axis_rope_pair(q, k, cos, sin, conjugate=conjugate, backend="reference")


RIGHT: dict[str, dict[str, Any]] = {
    "ours": {"run": ours},
    "our-pair": {"run": our_pair, "family": "rotate_pair"},
    "plain-torch": {"run": rotation},
    "autograd-function": {"run": by(Rotation)},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_under_autocast_passes(name: str, dtype: str, ask: Ask) -> None:
    """Whatever autocast is to, inputs of every dtype come out in theirs, byte for byte."""
    claims = ("vjp", "strided", "autocast")
    candidate = Candidate("right", "qwen-image", devices=("cpu",), provides=claims, **RIGHT[name])
    verdicts = ask(candidate, "standard", ("autocast",), (dtype,))
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts]
    assert {v.facts["autocast to"] for v in verdicts if "/to=" in v.case} == {"bfloat16", "float16"}
    assert sum(v.case.endswith("/inference-mode") for v in verdicts) == 1


def test_autocast_is_off_afterwards(ask: Ask) -> None:
    """The judgement leaves autocast as it found it, also where the candidate raises inside the region."""

    def raising(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not under autocast")
        return rotation(x, cos, sin)

    candidate = Candidate("wrong", "qwen-image", raising, devices=("cpu",), provides=("autocast",))
    verdicts = ask(candidate, judgements=("autocast",), dtypes=("bfloat16",), only="/to=")
    assert {v.verdict for v in verdicts} == {"fail"}
    assert all("not under autocast" in v.reason for v in verdicts)
    assert not torch.is_autocast_enabled("cpu")
