"""The rotation's mathematics is differentiated right, and the operators' derivative is that of the mathematics.

The operators refuse fp64, in which numerical differentiation means something. So the formula is checked in fp64 to the
second order and in forward mode, and the operators' Jacobians, whose entries are the table's own bytes, exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck, gradgradcheck

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair

PAIRINGS = ("adjacent", "half-split")
SIZES = (2, 2, 2, 6)
LANES = 2


def formula(x: Tensor, cos: Tensor, sin: Tensor, pairing: str, conjugate: bool) -> Tensor:
    """y0 = x0 c - x1 s, y1 = x1 c + x0 s and the channels behind them, in the dtype of its arguments."""
    c, s = cos.unsqueeze(-2), (-sin if conjugate else sin).unsqueeze(-2)
    turned, tail = x[..., : 2 * LANES], x[..., 2 * LANES :]
    if pairing == "adjacent":
        x0, x1 = turned[..., 0::2], turned[..., 1::2]
        y = torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2)
    else:
        x0, x1 = turned.chunk(2, dim=-1)
        y = torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)
    return torch.cat((y, tail), dim=-1)


def operands(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(*shape, SIZES[1], LANES, generator=generator, dtype=torch.float64)
    x = torch.randn(SIZES, generator=generator, dtype=torch.float64)
    return x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shape", [(), (SIZES[0],)], ids=["shared", "per-sample"])
def test_the_formula_in_fp64(shape: tuple[int, ...], pairing: str, conjugate: bool) -> None:
    """Reverse and forward mode to the second order, tables included, agree with finite differences."""
    leaves = tuple(t.requires_grad_() for t in operands(torch.float64, *shape))

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return formula(x, cos, sin, pairing, conjugate)

    assert gradcheck(function, leaves, check_forward_ad=True)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True)


def jacobian(call: Callable[[Tensor], Tensor]) -> Tensor:
    """[elements, elements] of a linear ``call``, column by column: the image of each unit vector."""
    size = torch.Size(SIZES).numel()
    return torch.stack([call(unit.view(SIZES)).flatten() for unit in torch.eye(size)], dim=1)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_operator_has_the_jacobian_of_the_formula(pairing: str, conjugate: bool) -> None:
    """Column by column its entries are the table's own numbers; its backward has exactly the transposed matrix, and
    the backward's backward the matrix itself."""
    x, cos, sin = operands(torch.float32)
    x.requires_grad_()
    y = multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate)  # type: ignore[arg-type]
    upstream = torch.zeros(SIZES, requires_grad=True)
    (first,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    wanted = jacobian(lambda unit: formula(unit.double(), cos.double(), sin.double(), pairing, conjugate).float())
    forward = jacobian(lambda unit: multi_axis_rope(unit, cos, sin, pairing=pairing, conjugate=conjugate))  # type: ignore[arg-type]
    backward = jacobian(lambda unit: torch.autograd.grad(y, x, unit, retain_graph=True)[0])
    second = jacobian(lambda unit: torch.autograd.grad(first, upstream, unit, retain_graph=True)[0])
    assert torch.equal(forward, wanted)
    assert torch.equal(backward, wanted.T)
    assert torch.equal(second, wanted)
    # A rotation and no symmetric matrix: the transposed one is another.
    assert not torch.equal(wanted, wanted.T)


def test_the_second_order_knows_nothing_of_x() -> None:
    """The gradient does not depend on x, and autograd says so by giving None."""
    x, cos, sin = operands(torch.float32)
    x.requires_grad_()
    upstream = torch.ones(SIZES, requires_grad=True)
    (first,) = torch.autograd.grad(multi_axis_rope(x, cos, sin), x, upstream, create_graph=True)
    assert torch.autograd.grad(first, x, torch.ones(SIZES), allow_unused=True) == (None,)


def dual(primal: Tensor) -> Tensor:
    return forward_ad.make_dual(primal, torch.ones_like(primal))


TANGENTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "x": lambda x, cos, sin: (dual(x), cos, sin),
    "x, which requires grad": lambda x, cos, sin: (dual(x.requires_grad_()), cos, sin),
    "cos": lambda x, cos, sin: (x, dual(cos), sin),
    "sin": lambda x, cos, sin: (x, cos, dual(sin)),
}


@pytest.mark.parametrize("operand", TANGENTS)
def test_forward_mode_is_refused(operand: str) -> None:
    """A tangent is refused by the name of its operand, and not dropped, which the operators by themselves would do."""
    name = operand.partition(",")[0]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name}: forward-mode derivatives"):
        multi_axis_rope(*TANGENTS[operand](*operands(torch.float32)))


def test_forward_mode_of_a_pair_is_refused() -> None:
    """k's tangent is refused as q's is, and by functional transforms too."""
    x, cos, sin = operands(torch.float32)
    with pytest.raises(NotImplementedError, match=r"^k: forward-mode derivatives"):
        torch.func.jvp(lambda k: multi_axis_rope_pair(x, k, cos, sin)[1], (x.clone(),), (torch.ones_like(x),))


def test_torch_still_drops_a_tangent_silently() -> None:
    """Why the functions look for tangents: an operator of torch.library returns a result without one."""
    x, cos, sin = operands(torch.float32)
    with forward_ad.dual_level():
        y = torch.ops.ropecheck.multi_axis_rope_reference(dual(x), cos, sin, False, False)
        assert forward_ad.unpack_dual(y).tangent is None
