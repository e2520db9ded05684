"""The operators of the normalised rotation under torch.library's checks, torch.compile, torch.export and autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ropecheck.kernels import interleaved_axis_map, norm_operators, qk_norm_rope_gate, trace_launches
from ropecheck.kernels.native import NativeLibrary

OPERATOR = torch.ops.ropecheck.qk_norm_rope_gate_reference.default
BACKWARD_OPERATOR = torch.ops.ropecheck.qk_norm_rope_gate_backward_reference.default
BACKENDS = ("reference", "triton", "cuda")
AUTO_ON_CPU = "auto: a cpu tensor is rotated by the reference"
HEADS, D, R, N = (3, 2), 8, 6, 20
AXIS_MAP = interleaved_axis_map([1, 1, 1], R, order="thw")


def activations(tokens: int, *, dtype: torch.dtype = torch.float32, gate: bool = True) -> list[Tensor]:
    """q_gate and k as slices of one projection, and both weights."""
    width = HEADS[0] * (2 if gate else 1) * D
    projection = torch.randn(tokens, width + HEADS[1] * D + 4).to(dtype)
    return [projection[:, :width], projection[:, width : width + HEADS[1] * D], *torch.randn(2, D).to(dtype)]


def tables(tokens: int, *, mrope: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    positions = torch.randint(0, N, (tokens, 3)).T if mrope else torch.randint(0, N, (tokens,))
    return torch.randn(N, R), positions, AXIS_MAP if mrope else None


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, gate: bool, mrope: bool, slots: bool) -> None:
    """Schema, autograd registration, fakes and AOT dispatch pass in both directions, for slices of one projection."""
    leaves = [x.requires_grad_() for x in activations(5, dtype=dtype, gate=gate)]
    # Slot 0 of a token: with padding, what is not written could not be compared.
    rest = *tables(5, mrope=mrope), torch.zeros(5, dtype=torch.int32) if slots else None, 1e-6, 1.0, gate
    result = torch.library.opcheck(OPERATOR, (*leaves, *rest, True, False))
    assert set(result.values()) == {"SUCCESS"}
    upstream = [torch.randn(5, width).to(dtype) for width in (24, 16, 24 if gate else 0)]
    arguments = *upstream, *(x.detach() for x in leaves), *rest
    for weight_gradients in (False, True):
        result = torch.library.opcheck(BACKWARD_OPERATOR, (*arguments, False, weight_gradients))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_schemas_are_one_across_backends(backend: str) -> None:
    """Every backend has both operators, with the schemas of the reference."""
    for name in ("qk_norm_rope_gate_{}", "qk_norm_rope_gate_backward_{}"):
        schema, wanted = (
            str(getattr(torch.ops.ropecheck, name.format(which)).default._schema) for which in (backend, "reference")
        )
        assert schema.replace(f"_{backend}", "_reference", 1) == wanted


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_fake_cuda_tensors_pass_through(backend: Any) -> None:
    """Fake CUDA tensors give contiguous outputs of the documented sizes, without a GPU too."""
    with FakeTensorMode():
        q_gate, k, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((5, 48), (5, 16), D))
        cache = torch.empty(N, R, device="cuda")
        positions, axis_map = (torch.empty(shape, dtype=torch.int64, device="cuda") for shape in ((3, 5), (3,)))
        outputs = qk_norm_rope_gate(
            q_gate, k, weight, weight, cache, positions, axis_map=axis_map, eps=1e-6, backend=backend
        )
    for y, shape in zip(outputs, ((5, 24), (5, 16), (5, 24)), strict=True):
        assert y is not None
        assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == (shape, torch.bfloat16, "cuda", True)


@pytest.mark.parametrize("weight_gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fake_gradients(backend: str, weight_gradients: bool) -> None:
    """The fake derivatives promise gradients like their inputs, contiguous; those of the weights may be left out."""
    with FakeTensorMode():
        q_gate, k = (torch.empty(5, width, dtype=torch.bfloat16, device="cuda") for width in (48, 16))
        weight, cache = torch.empty(D, device="cuda"), torch.empty(N, R, device="cuda")
        positions = torch.empty(5, dtype=torch.int32, device="cuda")
        upstream = [torch.empty(width, 5, dtype=torch.bfloat16, device="cuda").T for width in (24, 16, 24)]
        operator = getattr(torch.ops.ropecheck, f"qk_norm_rope_gate_backward_{backend}")
        gradients = operator(
            *upstream, q_gate, k, weight, weight, cache, positions, None, None, 1e-6, 1.0, True, False,
            weight_gradients,
        )  # fmt: skip
    size = D if weight_gradients else 0
    wanted = [((5, 48), torch.bfloat16), ((5, 16), torch.bfloat16), ((size,), torch.float32), ((size,), torch.float32)]
    assert [(tuple(x.shape), x.dtype) for x in gradients] == wanted
    assert all(x.is_contiguous() for x in gradients)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mrope", [False, True])
def test_fullgraph_forward_and_backward_with_changing_sizes(mrope: bool, dynamic: bool | None) -> None:
    """One graph without a break gives eager's bytes in both directions, for other numbers of tokens too."""
    torch._dynamo.reset()

    def attend(*arguments: Tensor, axis_map: Tensor | None) -> tuple[Tensor, ...]:
        q, k, gate = qk_norm_rope_gate(*arguments, axis_map=axis_map, eps=1e-6)
        assert gate is not None
        return q, k, gate

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (5, 6, 9):
        leaves = [x.detach().requires_grad_() for x in activations(tokens, dtype=torch.bfloat16)]
        cache, positions, axis_map = tables(tokens, mrope=mrope)
        upstream = [torch.randn(tokens, width).to(torch.bfloat16) for width in (24, 16, 24)]
        results = []
        for function in (compiled, attend):
            with trace_launches() as launches:
                outputs = function(*leaves, cache, positions, axis_map=axis_map)
                results.append((*outputs, *torch.autograd.grad(outputs, leaves, upstream)))
            assert [(launch.operator, launch.direction, launch.reason) for launch in launches] == [
                ("qk_norm_rope_gate_reference", "forward", AUTO_ON_CPU),
                ("qk_norm_rope_gate_backward_reference", "backward", AUTO_ON_CPU),
            ]
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("gate", [False, True])
def test_export_keeps_one_operator(gate: bool) -> None:
    """The exported graph calls the operator once and runs to the same bytes; the map is a buffer and not saved."""

    class Attention(nn.Module):
        axis_map: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("axis_map", AXIS_MAP, persistent=False)

        def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
            outputs = qk_norm_rope_gate(*arguments, axis_map=self.axis_map, eps=1e-6, gate=gate)
            return tuple(y for y in outputs if y is not None)

    arguments = (*activations(5, gate=gate), *tables(5)[:2])
    program = torch.export.export(Attention(), arguments)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(OPERATOR) == 1
    assert not program.state_dict
    wanted = Attention()(*arguments)
    assert len(wanted) == (3 if gate else 2)
    assert all(map(torch.equal, program.module()(*arguments), wanted))


def test_bad_map_in_a_compiled_program_is_refused_when_it_runs() -> None:
    """Tracing reads no values; the operator of a traced program does, where it can."""
    torch._dynamo.reset()

    def attend(axis_map: Tensor, *arguments: Tensor) -> Tensor:
        return qk_norm_rope_gate(*arguments, axis_map=axis_map, eps=1e-6)[0]

    arguments = (*activations(5), *tables(5)[:2])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(AXIS_MAP, *arguments), attend(AXIS_MAP, *arguments))
    with pytest.raises(ValueError, match=r"^axis_map: expected values 0, 1 or 2, got values from 0 to 3"):
        compiled(torch.tensor([0, 1, 3]), *arguments)


def test_autocast_changes_nothing() -> None:
    """Inside autocast fp32 inputs stay fp32 and keep their bytes."""
    arguments = (*activations(5), *tables(5, mrope=False)[:2])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = qk_norm_rope_gate(*arguments, eps=1e-6)
    for y, wanted in zip(outputs, qk_norm_rope_gate(*arguments, eps=1e-6), strict=True):
        assert y is not None
        assert wanted is not None
        assert y.dtype == torch.float32
        assert torch.equal(y, wanted)


def test_inputs_are_not_written_and_outputs_are_new() -> None:
    """The operands keep their bytes, and no output shares memory with one, the gate not either."""
    arguments = (*activations(5), *tables(5, mrope=False)[:2])
    before = [x.clone() for x in arguments]
    outputs = qk_norm_rope_gate(*arguments, eps=1e-6)
    assert all(map(torch.equal, arguments, before))
    addresses = {x.untyped_storage().data_ptr() for x in arguments}
    assert not addresses & {y.untyped_storage().data_ptr() for y in outputs if y is not None}


class Library(NativeLibrary):
    """A registry whose library fails to load with ``error``, or loads without one."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(Path("libropecheck_cuda.so"))
        self.error = error

    def load(self) -> None:
        if self.error is not None:
            raise self.error


def test_explicit_request_of_the_native_library_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="cuda" raises the error of loading, or refuses a CPU tensor; nothing else runs in its place."""
    arguments = (*activations(5), *tables(5, mrope=False)[:2])
    error = OSError("undefined symbol")
    for failure, expected, message in (
        (error, OSError, "undefined symbol"),
        (None, RuntimeError, "backend: 'cuda' needs a cuda tensor, got one on cpu"),
    ):
        monkeypatch.setattr(norm_operators, "NATIVE", Library(failure))
        with trace_launches() as launches, pytest.raises(expected, match=f"^{message}$"):
            qk_norm_rope_gate(*arguments, eps=1e-6, backend="cuda")
        assert launches == []
