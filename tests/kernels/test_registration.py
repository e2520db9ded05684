"""The registered operators under torch.library's checks, torch.compile, torch.export and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ropecheck.kernels import multi_axis_rope, trace_launches

OPERATOR = torch.ops.ropecheck.multi_axis_rope_reference.default


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return multi_axis_rope(x, cos, sin, pairing="half-split")


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("half_split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, half_split: bool, conjugate: bool) -> None:
    """Schema, autograd registration, fake implementation and AOT dispatch pass, for a strided input with a tail."""
    x = torch.randn(2, 3, 5, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    result = torch.library.opcheck(OPERATOR, (x, cos, sin, half_split, conjugate))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", ["multi_axis_rope_reference", "multi_axis_rope_triton"])
def test_fake_output_is_contiguous(operator: str) -> None:
    """The fake implementation promises what the kernels return: contiguous, dtype and device of x."""
    x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    table = torch.empty(5, 4, device="meta")
    y = getattr(torch.ops.ropecheck, operator)(x, table, table, False, False)
    assert y.is_contiguous()
    assert (y.shape, y.dtype, y.device.type) == (x.shape, torch.bfloat16, "meta")


def test_fullgraph_forward_and_backward_with_changing_sizes() -> None:
    """One graph without a break gives eager's bytes in both directions, for a second sequence length too."""
    torch._dynamo.reset()
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    for sequence in (5, 6, 9):
        x = torch.randn(2, sequence, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = torch.randn(sequence, 3), torch.randn(sequence, 3)
        upstream = torch.randn(2, sequence, 3, 8).to(torch.bfloat16)
        with trace_launches() as launches:
            y = compiled(x, cos, sin)
            (gradient,) = torch.autograd.grad(y, x, upstream)
        assert torch.equal(y, rotate(x, cos, sin))
        assert torch.equal(gradient, multi_axis_rope(upstream, cos, sin, pairing="half-split", conjugate=True))
        assert [launch.direction for launch in launches] == ["forward", "backward"]
        assert launches[1].reason == "auto: a cpu tensor is rotated by the reference"


def test_export_keeps_one_operator() -> None:
    """The exported graph calls the registered operator once and runs to the same bytes."""

    class Rotation(nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotate(x, cos, sin)

    arguments = (torch.randn(2, 5, 3, 8), torch.randn(5, 3), torch.randn(5, 3))
    program = torch.export.export(Rotation(), arguments)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [OPERATOR]
    assert torch.equal(program.module()(*arguments), rotate(*arguments))


def test_autocast_changes_nothing() -> None:
    """Inside autocast an fp32 input stays fp32 and keeps its bytes."""
    arguments = (torch.randn(2, 5, 3, 8), torch.randn(5, 3), torch.randn(5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        y = rotate(*arguments)
    assert y.dtype == torch.float32
    assert torch.equal(y, rotate(*arguments))
