"""Each bad input gets one sentence that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ropecheck.kernels import multi_axis_rope

X = torch.zeros(2, 7, 3, 8)
TABLE = torch.zeros(7, 4)

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x no tensor": ({"x": [1.0]}, TypeError, r"x: expected a torch\.Tensor, got list"),
    "cos no tensor": ({"cos": None}, TypeError, r"cos: expected a torch\.Tensor, got NoneType"),
    "x rank": ({"x": X[0]}, ValueError, r"x: expected 4 dimensions \[B, S, H, D\], got shape \[7, 3, 8\]"),
    "x dtype": ({"x": X.double()}, TypeError, r"x: expected float32, float16 or bfloat16, got torch\.float64"),
    "x integer": ({"x": X.int()}, TypeError, r"x: expected float32, float16 or bfloat16, got torch\.int32"),
    "cos rank": ({"cos": TABLE[0]}, ValueError, r"cos: expected \[S, R/2\] .* got shape \[4\]"),
    "sin rank": ({"sin": X}, ValueError, r"sin: expected \[S, R/2\] .* got shape \[2, 7, 3, 8\]"),
    "cos dtype": ({"cos": TABLE.bfloat16()}, TypeError, r"cos: expected float32, got torch\.bfloat16"),
    "sin dtype": ({"sin": TABLE.double()}, TypeError, r"sin: expected float32, got torch\.float64"),
    "cos device": ({"cos": TABLE.to("meta")}, ValueError, r"cos: expected the device of x, cpu, got meta"),
    "sin device": ({"sin": TABLE.to("meta")}, ValueError, r"sin: expected the device of x, cpu, got meta"),
    "cos and sin": ({"sin": TABLE[:, :2]}, ValueError, r"sin: expected the shape of cos, \[7, 4\], got \[7, 2\]"),
    "positions": ({"cos": TABLE[:6], "sin": TABLE[:6]}, ValueError, r"cos: expected 7 positions.* got 6"),
    "positions of one": ({"cos": TABLE[:1], "sin": TABLE[:1]}, ValueError, r"cos: expected 7 positions.* got 1"),
    "samples": (
        {"cos": TABLE.expand(3, 7, 4), "sin": TABLE.expand(3, 7, 4)},
        ValueError,
        r"cos: expected 2 samples.* got 3",
    ),
    "samples of one": ({"cos": TABLE[None], "sin": TABLE[None]}, ValueError, r"cos: expected 2 samples.* got 1"),
    "R above D": (
        {"cos": torch.zeros(7, 5), "sin": torch.zeros(7, 5)},
        ValueError,
        r"cos: expected at most 4 lanes for the head dimension 8 of x, got 5",
    ),
    "R above an odd D": ({"x": X[..., :7]}, ValueError, r"cos: expected at most 3 lanes .* 7 of x, got 4"),
    "no lanes": ({"cos": TABLE[:, :0], "sin": TABLE[:, :0]}, ValueError, r"cos: .* at least one lane"),
    "D above 256": ({"x": torch.zeros(2, 7, 3, 258)}, ValueError, r"x: .* head dimension of at most 256, got 258"),
    "pairing": ({"pairing": "interleaved"}, ValueError, r"pairing: .*'half-split', got 'interleaved'"),
    "backend": ({"backend": "eager"}, ValueError, r"backend: expected 'auto', 'cuda', 'triton' .* got 'eager'"),
    "cos gradient": ({"cos": TABLE.clone().requires_grad_()}, ValueError, r"cos: gradients .* not computed"),
    "sin gradient": ({"sin": TABLE.clone().requires_grad_()}, ValueError, r"sin: gradients .* not computed"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused(case: str) -> None:
    """The refusal is one line, of the documented type, and begins with the argument's name."""
    changed, error, message = REFUSALS[case]
    arguments: dict[str, Any] = {"x": X, "cos": TABLE, "sin": TABLE} | changed
    with pytest.raises(error, match="^" + message) as caught:
        multi_axis_rope(arguments.pop("x"), arguments.pop("cos"), arguments.pop("sin"), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cos", "sin"])
@pytest.mark.parametrize("x_requires_grad", [False, True])
def test_raw_operator_refuses_a_table_that_requires_grad(name: str, x_requires_grad: bool) -> None:
    """The operator itself raises too, so that a table's gradient is never silently None or zero."""
    x = X.clone().requires_grad_(x_requires_grad)
    tables = {"cos": TABLE.clone(), "sin": TABLE.clone()}
    tables[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: gradients with respect to the table are not computed"):
        torch.ops.ropecheck.multi_axis_rope_reference(x, tables["cos"], tables["sin"], False, False)


def test_learnable_table_is_taken_where_no_gradient_is_recorded() -> None:
    """Under no_grad nothing can get lost, so a table that requires grad is an ordinary table."""
    table = torch.randn(7, 4).requires_grad_()
    with torch.no_grad():
        y = multi_axis_rope(X + 1, table, table)
    assert torch.equal(y, multi_axis_rope(X + 1, table.detach(), table.detach()))


@pytest.mark.parametrize("kind", ["", "pair_", "pair_in_place"])
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_raw_operators_check_their_operands(backend: str, kind: str) -> None:
    """A short table is refused by every operator's fake implementation, before anything could read past it."""
    x, table = X.to("meta"), TABLE[:6].to("meta")
    name = f"multi_axis_rope_{kind.removesuffix('in_place')}{backend}{'_' if kind == 'pair_in_place' else ''}"
    activations = (x, x[:, :, :1].clone()) if kind else (x,)
    with pytest.raises(ValueError, match=r"^cos: expected 7 positions"):
        getattr(torch.ops.ropecheck, name)(*activations, table, table, False, False)
