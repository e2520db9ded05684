"""Registration of the normalised rotation with torch.library: per backend the operator and its derivative.

For each backend of reference, triton and cuda ``ropecheck::qk_norm_rope_gate_BACKEND`` computes queries, keys and
gates, and ``qk_norm_rope_gate_backward_BACKEND`` the gradients of both inputs and both weights. The backends share
schema, fake implementation and derivative. ``reason`` changes no result: the execution trace records it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from .native import NATIVE
from .norm_operands import check_norm_gradients, check_norm_operands
from .norm_reference import norm_rope_gate_backward_reference, norm_rope_gate_reference
from .operands import TABLE_GRADIENT_REFUSED
from .trace import CALLED_DIRECTLY

SECOND_DERIVATIVE_REFUSED = (
    "qk_norm_rope_gate: a second derivative is not computed; differentiate the first without create_graph=True, or "
    "compose the norm and the rotation of differentiable operations"
)

# The dispatcher leaves out arguments that equal their default, so the implementations repeat the default.
_OPERANDS = (
    "Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, Tensor positions, "
    "Tensor? axis_map, Tensor? slots, float eps, float weight_offset, bool gate, "
)
_REASON = f'str reason="{CALLED_DIRECTLY}"'
SCHEMA = f"({_OPERANDS}bool round_norm, bool fma, {_REASON}) -> (Tensor, Tensor, Tensor)"
BACKWARD_SCHEMA = (
    f"(Tensor q_gradient, Tensor k_gradient, Tensor gate_gradient, {_OPERANDS}bool fma, bool weight_gradients, "
    f"{_REASON}) -> (Tensor, Tensor, Tensor, Tensor)"
)

_library = Library("ropecheck", "FRAGMENT")  # type: ignore[no-untyped-call]


def _norm_rope_gate_triton(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton backend, imported when first executed; ImportError where triton is absent."""
    from .norm_triton import norm_rope_gate_triton

    return norm_rope_gate_triton(*arguments)


def _norm_rope_gate_backward_triton(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .norm_triton import norm_rope_gate_backward_triton

    return norm_rope_gate_backward_triton(*arguments)


def _refuse_native(*arguments: Any) -> Any:
    """Runs in place of the native library where that cannot: its own error first, then the tensor's device."""
    NATIVE.load()
    raise RuntimeError(f"backend: 'cuda' needs a cuda tensor, got one on {arguments[0].device}")


def _fake(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    axis_map: Tensor | None,
    slots: Tensor | None,
    eps: float,
    weight_offset: float,
    gate: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    q_width, k_width = sizes.q_heads * sizes.head_dim, sizes.k_heads * sizes.head_dim
    q, k_rotated, gate_values = (
        torch.empty((sizes.tokens, width), dtype=q_gate.dtype, device=q_gate.device)
        for width in (q_width, k_width, q_width if gate else 0)
    )
    return q, k_rotated, gate_values


def _fake_backward(
    q_gradient: Tensor,
    k_gradient: Tensor,
    gate_gradient: Tensor,
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    axis_map: Tensor | None,
    slots: Tensor | None,
    eps: float,
    weight_offset: float,
    gate: bool,
    fma: bool,
    weight_gradients: bool,
    *_: Any,
) -> tuple[Tensor, ...]:
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    check_norm_gradients(q_gradient, k_gradient, gate_gradient, q_gate, sizes, gate)
    weight_shape = (sizes.head_dim,) if weight_gradients else (0,)
    return tuple(
        torch.empty(shape, dtype=like.dtype, device=like.device)
        for shape, like in (
            (q_gate.shape, q_gate),
            (k.shape, k),
            (weight_shape, q_weight),
            (weight_shape, k_weight),
        )
    )


def _differentiate(backend: str) -> None:
    backward_operator = getattr(torch.ops.ropecheck, f"qk_norm_rope_gate_backward_{backend}")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.eps, ctx.weight_offset, ctx.gate, _, ctx.fma, ctx.reason = inputs
        if ctx.needs_input_grad[4]:
            raise ValueError(TABLE_GRADIENT_REFUSED.format(name="cos_sin_cache"))
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        weights_needed = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradients = backward_operator(
            *incoming, *ctx.saved_tensors, ctx.eps, ctx.weight_offset, ctx.gate, ctx.fma, weights_needed, ctx.reason
        )
        needed = [gradient if needs else None for gradient, needs in zip(gradients, ctx.needs_input_grad, strict=False)]
        return (*needed, *[None] * 10)

    def refuse(ctx: Any, *incoming: Tensor) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE_REFUSED)

    register_autograd(f"ropecheck::qk_norm_rope_gate_{backend}", backward, setup_context=setup_context, lib=_library)
    register_autograd(f"ropecheck::qk_norm_rope_gate_backward_{backend}", refuse, lib=_library)


def _register(
    backend: str, dispatch_keys: tuple[str, ...], forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    fake: Callable[..., Any]
    for name, schema, kernel, fake in (
        (f"qk_norm_rope_gate_{backend}", SCHEMA, forward, _fake),
        (f"qk_norm_rope_gate_backward_{backend}", BACKWARD_SCHEMA, backward, _fake_backward),
    ):
        _library.define(name + schema)  # type: ignore[no-untyped-call]
        for key in dispatch_keys:
            _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        register_fake(f"ropecheck::{name}", fake, lib=_library)
    _differentiate(backend)


_register("reference", ("CompositeExplicitAutograd",), norm_rope_gate_reference, norm_rope_gate_backward_reference)
_register("triton", ("CPU", "CUDA"), _norm_rope_gate_triton, _norm_rope_gate_backward_triton)
_register("cuda", ("CPU",), _refuse_native, _refuse_native)

NATIVE_NORM_OPERATORS = ("qk_norm_rope_gate_cuda", "qk_norm_rope_gate_backward_cuda")
"""What the native library implements for CUDA tensors."""
