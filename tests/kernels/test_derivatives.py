"""The derivative of a rotation is the conjugate rotation, byte for byte and to any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UPSTREAM = {
    "contiguous": lambda: torch.randn(2, 5, 3, 10),
    "expanded scalar": lambda: torch.randn(()).expand(2, 5, 3, 10),
    "expanded heads": lambda: torch.randn(2, 5, 1, 10).expand(2, 5, 3, 10),
    "heads before tokens": lambda: torch.randn(2, 3, 5, 10).transpose(1, 2),
    "channels outermost": lambda: torch.randn(10, 2, 5, 3).permute(1, 2, 3, 0),
}


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 5, 3, 10] that requires grad, and a table of R = 6."""
    return torch.randn(2, 5, 3, 10).to(dtype).requires_grad_(), torch.randn(5, 3), torch.randn(5, 3)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_the_conjugate_rotation(dtype: torch.dtype, upstream: str, pairing: str, conjugate: bool) -> None:
    """The gradient has the bytes of the upstream gradient rotated back, whatever the upstream strides."""
    x, cos, sin = operands(dtype)
    given = UPSTREAM[upstream]().to(dtype)
    y = multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate)
    (gradient,) = torch.autograd.grad(y, x, given)
    wanted = multi_axis_rope(given.contiguous(), cos, sin, pairing=pairing, conjugate=not conjugate)
    assert torch.equal(gradient, wanted)
    assert gradient.dtype == dtype


def test_sum_gives_every_element_a_gradient() -> None:
    """The expanded gradient of a sum is the conjugate rotation of ones; tail channels receive one."""
    x, cos, sin = operands(torch.float32)
    multi_axis_rope(x, cos, sin).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, multi_axis_rope(torch.ones(2, 5, 3, 10), cos, sin, conjugate=True))
    assert torch.equal(x.grad[..., 6:], torch.ones(2, 5, 3, 4))


def test_second_and_third_order() -> None:
    """Each further order is one more conjugation: forward, conjugate, forward, conjugate."""
    x, cos, sin = operands(torch.float32)
    first_upstream, second_upstream, third_upstream = (torch.randn(2, 5, 3, 10).requires_grad_() for _ in range(3))
    y = multi_axis_rope(x, cos, sin)
    (first,) = torch.autograd.grad(y, x, first_upstream, create_graph=True)
    (second,) = torch.autograd.grad(first, first_upstream, second_upstream, create_graph=True)
    (third,) = torch.autograd.grad(second, second_upstream, third_upstream)
    assert torch.equal(first, multi_axis_rope(first_upstream, cos, sin, conjugate=True))
    assert torch.equal(second, multi_axis_rope(second_upstream, cos, sin))
    assert torch.equal(third, multi_axis_rope(third_upstream, cos, sin, conjugate=True))


def test_a_table_changed_before_the_backward_is_noticed() -> None:
    """Writing into a saved table raises instead of giving the gradient of another rotation."""
    x, cos, sin = operands(torch.float32)
    y = multi_axis_rope(x, cos, sin)
    cos.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
