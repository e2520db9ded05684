"""The registered operators under torch.library's checks, torch.compile, torch.export and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair, trace_launches

OPERATOR = torch.ops.ropecheck.multi_axis_rope_reference.default
PAIR_OPERATOR = torch.ops.ropecheck.multi_axis_rope_pair_reference.default
IN_PLACE_OPERATOR = torch.ops.ropecheck.multi_axis_rope_pair_reference_.default
BACKENDS = ("reference", "triton", "cuda")
AUTO_ON_CPU = "auto: a cpu tensor is rotated by the reference"


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


@pytest.mark.parametrize("needed", ["q and k", "q", "k"])
@pytest.mark.parametrize("half_split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_of_a_pair(dtype: torch.dtype, half_split: bool, needed: str) -> None:
    """The pair's operator passes with gradients of both and of either, for views of one packed QKV."""
    q, k, _ = torch.randn(2, 5, 8, 8, dtype=dtype).split([4, 2, 2], dim=2)
    q, k = (x.detach().requires_grad_(name in needed) for name, x in (("q", q), ("k", k)))
    result = torch.library.opcheck(PAIR_OPERATOR, (q, k, torch.randn(5, 3), torch.randn(5, 3), half_split, True))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("half_split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_in_place(dtype: torch.dtype, half_split: bool) -> None:
    """The in-place operator writes q and k, as its schema says, and nothing else; functionalization keeps that."""
    q, k, _ = torch.randn(2, 5, 8, 8, dtype=dtype).split([4, 2, 2], dim=2)
    result = torch.library.opcheck(IN_PLACE_OPERATOR, (q, k, torch.randn(5, 3), torch.randn(5, 3), half_split, True))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_schemas_are_one_across_backends(backend: str) -> None:
    """Every backend has the three operators, with the schemas of the reference."""
    for name in ("multi_axis_rope_{}", "multi_axis_rope_pair_{}", "multi_axis_rope_pair_{}_"):
        schema, wanted = (
            str(getattr(torch.ops.ropecheck, name.format(which)).default._schema) for which in (backend, "reference")
        )
        assert schema.replace(f"_{backend}", "_reference", 1) == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_fake_outputs_are_contiguous(backend: str) -> None:
    """The fake implementations promise what the kernels return: contiguous, dtype and device of the input."""
    q = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    k = torch.empty(2, 5, 8, 1, dtype=torch.bfloat16, device="meta").transpose(2, 3)
    table = torch.empty(5, 4, device="meta")
    settings = table, table, False, False
    rotated = getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{backend}")(q, k, *settings)
    alone = getattr(torch.ops.ropecheck, f"multi_axis_rope_{backend}")(q, *settings)
    for y, x in zip((*rotated, alone), (q, k, q), strict=True):
        assert y.is_contiguous()
        assert (y.shape, y.dtype, y.device.type) == (x.shape, torch.bfloat16, "meta")
    assert getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{backend}_")(q, k, *settings) is None


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_fake_cuda_tensors_pass_through(backend: Any, in_place: bool) -> None:
    """Under FakeTensorMode fake CUDA tensors are rotated by every backend, on a machine without one too."""
    with FakeTensorMode():
        qkv = torch.empty(2, 5, 8, 8, dtype=torch.bfloat16, device="cuda")
        q, k, _ = qkv.split([4, 2, 2], dim=2)
        table = torch.empty(5, 4, device="cuda")
        rotated = multi_axis_rope_pair(q, k, table, table, in_place=in_place, backend=backend)
        alone = multi_axis_rope(q, table, table, backend=backend)
    for y, x in zip((*rotated, alone), (q, k, q), strict=True):
        assert (y.shape, y.dtype, y.device.type) == (x.shape, torch.bfloat16, "cuda")
        assert y.is_contiguous() == (not in_place or y is alone)


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
        assert launches[1].reason == AUTO_ON_CPU


@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph_pair_forward_and_backward(dynamic: bool) -> None:
    """One graph without a break gives eager's bytes for q and k of one packed QKV, in both directions."""
    torch._dynamo.reset()

    def rotate_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return multi_axis_rope_pair(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin)

    compiled = torch.compile(rotate_packed, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for sequence in (5, 6):
        qkv = torch.randn(2, sequence, 8, 8).to(torch.bfloat16).requires_grad_()
        cos, sin = torch.randn(sequence, 3), torch.randn(sequence, 3)
        results = []
        for function in (compiled, rotate_packed):
            with trace_launches() as launches:
                q, k = function(qkv, cos, sin)
                results.append((q, k, *torch.autograd.grad((q, k), qkv, (torch.ones_like(q), torch.ones_like(k)))))
            assert [(launch.operator, launch.direction, launch.reason) for launch in launches] == [
                ("multi_axis_rope_pair_reference", direction, AUTO_ON_CPU) for direction in ("forward", "backward")
            ]
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_fullgraph_in_place(compiler: str, dynamic: bool) -> None:
    """A compiled program writes q and k of one packed QKV as eager does, and reads what was written."""
    torch._dynamo.reset()

    def rotate_packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = qkv.split([4, 2, 2], dim=2)
        rotated_q, _ = multi_axis_rope_pair(q, k, cos, sin, in_place=True)
        return rotated_q[:, :, :2] * k + v

    compiled = torch.compile(rotate_packed, backend=compiler, fullgraph=True, dynamic=dynamic)
    for sequence in (5, 6):
        qkv = torch.randn(2, sequence, 8, 8)
        other = qkv.clone()
        tables = torch.randn(sequence, 3), torch.randn(sequence, 3)
        with trace_launches() as launches:
            assert torch.equal(compiled(qkv, *tables), rotate_packed(other, *tables))
        assert torch.equal(qkv, other)
        assert [launch.operator for launch in launches] == ["multi_axis_rope_pair_reference_"] * 2


def test_fullgraph_in_place_on_separate_inputs() -> None:
    """q and k that are the graph's own inputs are written too, and come back as themselves."""
    torch._dynamo.reset()

    def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return multi_axis_rope_pair(q, k, cos, sin, in_place=True)

    q, k, cos, sin = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8), torch.randn(5, 3), torch.randn(5, 3)
    wanted = multi_axis_rope_pair(q, k, cos, sin)
    returned = torch.compile(rotate_both, backend="aot_eager", fullgraph=True)(q, k, cos, sin)
    assert all(map(torch.equal, (q, k), wanted))
    assert returned[0] is q
    assert returned[1] is k


@pytest.mark.parametrize("in_place", [False, True])
def test_export_of_a_pair_keeps_one_operator(in_place: bool) -> None:
    """The exported graph rotates both by one operator and runs to eager's bytes, in place into the given tensors."""

    class Rotation(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return multi_axis_rope_pair(q, k, cos, sin, in_place=in_place)

    arguments = (torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8), torch.randn(5, 3), torch.randn(5, 3))
    wanted = multi_axis_rope_pair(*arguments)
    program = torch.export.export(Rotation(), arguments)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(IN_PLACE_OPERATOR if in_place else PAIR_OPERATOR) == 1
    assert all(map(torch.equal, program.module()(*arguments), wanted))
    assert torch.equal(arguments[0], wanted[0]) == in_place


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
