"""opcheck: registrations that are wrong fail it, and it alone; right ones pass, in both families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.operators_seen import OperatorsSeen

Failing = Callable[..., dict[str, str]]


def right(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image, plain torch."""
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def registered(
    name: str, fake: Callable[..., Tensor] | None, real: Callable[..., Tensor] = right, *, differentiable: bool = True
) -> Any:
    """An operator of the tests' own namespace."""

    def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return real(x, cos, sin)

    operator = torch.library.custom_op(f"ropecheck_tests::{name}", kernel, mutates_args=())
    if fake is not None:
        operator.register_fake(fake)
    if differentiable:
        operator.register_autograd(backward, setup_context=keep_the_table)
    return operator


def keep_the_table(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if any(ctx.needs_input_grad[1:]):
        raise ValueError("cos, sin: no gradient is computed")
    ctx.save_for_backward(*inputs[1:])


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return right(gradient, cos, -sin), None, None


def like_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def other_strides(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return like_x(x.transpose(1, 2), cos, sin).transpose(1, 2)


def strides_of_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Says that the output lies as x does; it is contiguous, so this shows for x that is not."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def other_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def other_shape(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], 2 * cos.shape[-1] + 1), dtype=x.dtype, device=x.device)


def for_the_cpu_only(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if x.device.type != "cpu":
        raise NotImplementedError("no such device")
    return like_x(x, cos, sin)


def behind_a_header(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The output begins 8 elements into its memory, which a plain fake does not say."""
    y = torch.empty(8 + x.numel(), dtype=x.dtype, device=x.device)[8:].view(x.shape)
    return y.copy_(right(x, cos, sin))


RIGHT = registered("right", like_x)
OTHER_STRIDES = registered("other_strides", other_strides)
STRIDES_OF_X = registered("strides_of_x", strides_of_x)
OTHER_DTYPE = registered("other_dtype", other_dtype)
OTHER_SHAPE = registered("other_shape", other_shape)
CPU_FAKE = registered("cpu_fake", for_the_cpu_only)
NO_FAKE = registered("no_fake", None)
HEADER = registered("header", like_x, behind_a_header)


def writing_kernel(x: Tensor, cos: Tensor, sin: Tensor, workspace: Tensor) -> Tensor:
    workspace.fill_(1)
    return right(x, cos, sin)


def lending_kernel(x: Tensor, cos: Tensor, sin: Tensor, workspace: Tensor) -> Tensor:
    return workspace


# custom_op watches what is written, returned and differentiated; an operator defined by hand, as in C++, is on its own.
_library = torch.library.Library("ropecheck_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _kernel in (("writing", writing_kernel), ("lending", lending_kernel)):
    _library.define(f"{_name}(Tensor x, Tensor cos, Tensor sin, Tensor workspace) -> Tensor")  # type: ignore[no-untyped-call]
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(
        f"ropecheck_tests::{_name}", lambda x, cos, sin, workspace: like_x(x, cos, sin), lib=_library
    )
_library.define("detaching(Tensor x, Tensor cos, Tensor sin) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("detaching", right, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("ropecheck_tests::detaching", like_x, lib=_library)
DETACHING = torch.ops.ropecheck_tests.detaching


def writing_undeclared(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator writes into a workspace that its schema calls an input."""
    y: Tensor = torch.ops.ropecheck_tests.writing(x, cos, sin, torch.zeros(4))
    return y


def returning_undeclared(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator returns the memory of an argument as if it were new."""
    y: Tensor = torch.ops.ropecheck_tests.lending(x, cos, sin, right(x, cos, sin))
    return y


def detaching(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The operator has no autograd, and its output no gradient; a zero that has the right one is put in its place."""
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos, sin: no gradient is computed")
    y: Tensor = DETACHING(x, cos, sin).detach()
    return WithGradient.apply(x, y, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


class WithGradient(torch.autograd.Function):
    """y as it is, with the gradient of the rotation of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return right(gradients[0], cos, -sin), None, None, None


@dataclass(frozen=True)
class Wrong:
    run: Callable[..., Tensor]
    reason: str
    claims: tuple[str, ...] = ("vjp", "strided", "opcheck")
    devices: tuple[str, ...] = ("cpu",)


WRONG = {
    "other-strides": Wrong(OTHER_STRIDES, "output 0 has strides"),
    "strides-of-x": Wrong(STRIDES_OF_X, "output 0 has strides"),
    "other-dtype": Wrong(OTHER_DTYPE, "output 0 has dtype torch.bfloat16, and the fake implementation says torch.fl"),
    "other-shape": Wrong(OTHER_SHAPE, "output 0 has shape [2, 5, 3, 128]"),
    "storage-offset": Wrong(HEADER, "output 0 has storage offset 8, and the fake implementation says 0"),
    "cpu-fake": Wrong(CPU_FAKE, "for cuda tensors raised NotImplementedError", devices=("cpu", "cuda")),
    "no-fake": Wrong(NO_FAKE, "fake implementation"),
    "writing": Wrong(writing_undeclared, "argument workspace is written", ("strided", "opcheck")),
    "returning": Wrong(returning_undeclared, "argument workspace's memory is returned", ("opcheck",)),
    "detaching": Wrong(detaching, "test_autograd_registration"),
    "no-operator": Wrong(right, "no registered operator runs", ("strided", "opcheck")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_registration_fails_alone(name: str, failing: Failing) -> None:
    """A registration that does not hold fails opcheck, for the right reason, and every other judgement passes."""
    wrong = WRONG[name]
    candidate = Candidate("wrong", "qwen-image", wrong.run, devices=wrong.devices, provides=wrong.claims)
    reasons = failing(candidate, dtypes=("bfloat16",))
    assert list(reasons) == ["opcheck"], reasons
    assert wrong.reason in reasons["opcheck"]


def test_strides_are_compared_for_inputs_that_are_not_contiguous(ask: Callable[..., list[Any]]) -> None:
    """A fake that follows x's strides is right for contiguous x: only the strided case tells."""
    claims = ("vjp", "strided", "opcheck")
    candidate = Candidate("wrong", "qwen-image", STRIDES_OF_X, devices=("cpu",), provides=claims)
    verdicts = ask(candidate, judgements=("opcheck",), dtypes=("bfloat16",))
    assert {v.verdict for v in verdicts if "x=" in v.case} == {"fail"}
    assert {v.verdict for v in verdicts if "x=" not in v.case} == {"pass"}


def lying_as_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The output has the order of x's strides, which a fake that is contiguous does not."""
    return torch.empty_like(x).copy_(right(x, cos, sin))


def wrong_for_one_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.shape[2] if x.shape[2] > 1 else 2
    return torch.empty((*x.shape[:2], heads, x.shape[3]), dtype=x.dtype, device=x.device)


LYING_AS_X = registered("lying_as_x", like_x, lying_as_x, differentiable=False)
ONE_HEAD = registered("one_head", wrong_for_one_head, differentiable=False)


@torch.library.custom_op("ropecheck_tests::two", mutates_args=())
def two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return lying_as_x(q, cos, sin), lying_as_x(k, cos, sin)


@two.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """k is said to lie in the order of q."""
    outer = sorted(range(4), key=q.stride, reverse=True)
    like_q = torch.empty([k.shape[d] for d in outer], dtype=k.dtype, device=k.device)
    return torch.empty_like(q), like_q.permute([outer.index(d) for d in range(4)])


def for_each(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return ONE_HEAD(q, cos, sin), ONE_HEAD(k, cos, sin)


LAID_OUT_WRONG = {
    "heads-first": ({"run": LYING_AS_X}, "output 0 has strides"),
    "k-apart": ({"run": two, "family": "rotate_pair"}, "output 1 has strides"),
    "k-alone": ({"run": for_each, "family": "rotate_pair"}, "output 0 has shape [2, 5, 1, 128]"),
}


@pytest.mark.parametrize("name", LAID_OUT_WRONG)
def test_a_fake_that_is_wrong_for_one_layout_fails(name: str, failing: Failing) -> None:
    """A fake is asked about x whose heads come first, about k in another layout than q, and about q and k each."""
    fields, reason = LAID_OUT_WRONG[name]
    candidate = Candidate("wrong", "qwen-image", devices=("cpu",), provides=("strided", "opcheck"), **fields)
    reasons = failing(candidate, "standard", ("opcheck",), ("bfloat16",))
    assert reason in reasons["opcheck"]


class Applied(torch.autograd.Function):
    """Calls an operator that has no autograd of its own: the function is what is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        y: Tensor = DETACHING(x, cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return DETACHING(gradients[0], cos, -sin), None, None


def applied(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos, sin: no gradient is computed")
    y: Tensor = Applied.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    return multi_axis_rope(x, cos, sin, conjugate=conjugate, backend="reference")


def pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Any:
    return multi_axis_rope_pair(q, k, cos, sin, conjugate=conjugate, backend="reference")


def pair_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> None:
    multi_axis_rope_pair(q, k, cos, sin, conjugate=conjugate, in_place=True, backend="reference")


def pair_in_place_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> None:
    pair_in_place(q, k, cos, sin, conjugate=not conjugate)


ALL = ("vjp", "strided", "conjugate", "any-shape", "opcheck")
RIGHT_ONES = {
    "custom-op": ({"run": RIGHT, "provides": ("vjp", "strided", "opcheck")}, "ropecheck_tests.right.default"),
    "autograd-function": (
        {"run": applied, "provides": ("vjp", "strided", "opcheck")},
        "ropecheck_tests.detaching.default",
    ),
    "ours": ({"run": reference, "provides": ALL}, "ropecheck.multi_axis_rope_reference.default"),
    "our-pair": (
        {"run": pair, "provides": ALL, "family": "rotate_pair"},
        "ropecheck.multi_axis_rope_pair_reference.default",
    ),
    "our-pair-in-place": (
        {
            "run": pair_in_place,
            "vjp": pair_in_place_back,
            "in_place": True,
            "provides": ALL,
            "family": "rotate_pair",
        },
        "ropecheck.multi_axis_rope_pair_reference_.default",
    ),
}


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_right_registration_passes(name: str, ask: Callable[..., list[Any]]) -> None:
    """Operators that are registered well pass, with fake CUDA tensors too, and the evidence names them."""
    fields, operator = RIGHT_ONES[name]
    candidate = Candidate("right", "qwen-image", devices=("cpu", "cuda"), **fields)
    verdicts = ask(candidate, judgements=("opcheck",), dtypes=("bfloat16",))
    assert [v.verdict for v in verdicts] == ["pass", "pass"], [v.reason for v in verdicts]
    assert all(operator in v.facts["operators"] for v in verdicts)


def test_backward_operators_are_seen() -> None:
    """Under autograd the forward's operator is noted with an x that requires grad, the backward's with none."""
    x, cos, sin = torch.randn(2, 3, 1, 8, requires_grad=True), torch.randn(3, 4), torch.randn(3, 4)
    with OperatorsSeen() as seen:
        y = reference(x, cos, sin)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert [call.arguments[0].requires_grad for call in seen.calls] == [True, False]
    assert [call.arguments[4] for call in seen.calls] == [False, True]


def test_arguments_are_noted_as_they_were() -> None:
    """A copy keeps strides, offset and the values from before the call, also where the call overwrites them."""
    q, k = (torch.randn(2, 5, 4, 8).transpose(0, 1)[1:] for _ in range(2))
    before = q.clone()
    cos, sin = torch.randn(2, 4), torch.randn(2, 4)
    with OperatorsSeen() as seen:
        pair_in_place(q, k, cos, sin)
    noted = seen.calls[0].arguments[0]
    assert torch.equal(noted, before)
    assert not torch.equal(q, before)
    assert (noted.stride(), noted.storage_offset()) == (q.stride(), q.storage_offset())
