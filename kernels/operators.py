"""Registration with torch.library: three operators per backend, the out-of-place ones differentiable to any order.

For each backend of reference, triton and cuda: ``ropecheck::multi_axis_rope_BACKEND`` rotates one tensor,
``multi_axis_rope_pair_BACKEND`` two in one launch, and ``multi_axis_rope_pair_BACKEND_`` two within their own
memory. The backends share schema, fake implementation and derivative. ``direction`` and ``reason`` change no
result: the execution trace records them, and they travel as arguments so that compiled, exported and
differentiated graphs carry them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from .native import NATIVE
from .norm_operators import NATIVE_NORM_OPERATORS
from .operands import (
    IN_PLACE_GRADIENT_REFUSED,
    TABLE_GRADIENT_REFUSED,
    check_operands,
    check_own_memory,
    check_pair_operands,
)
from .reference import rotate_pair_reference, rotate_pair_reference_in_place, rotate_reference
from .trace import CALLED_DIRECTLY

# The dispatcher leaves out arguments that equal their default, so the implementations repeat the defaults.
_SETTINGS = (
    f'Tensor cos, Tensor sin, bool half_split, bool conjugate, str direction="forward", str reason="{CALLED_DIRECTLY}"'
)
SCHEMA = f"(Tensor x, {_SETTINGS}) -> Tensor"
PAIR_SCHEMA = f"(Tensor q, Tensor k, {_SETTINGS}) -> (Tensor, Tensor)"
IN_PLACE_SCHEMA = f"(Tensor(a!) q, Tensor(b!) k, {_SETTINGS}) -> ()"

_library = Library("ropecheck", "FRAGMENT")  # type: ignore[no-untyped-call]


def _rotate_triton(*arguments: Any) -> Tensor:
    """The Triton backend, imported when first executed; ImportError where triton is absent."""
    from .triton_rotation import rotate_triton

    return rotate_triton(*arguments)


def _rotate_pair_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .triton_rotation import rotate_pair_triton

    return rotate_pair_triton(*arguments)


def _rotate_pair_triton_in_place(*arguments: Any) -> None:
    from .triton_rotation import rotate_pair_triton_in_place

    rotate_pair_triton_in_place(*arguments)


def _refuse_native(*arguments: Any) -> Any:
    """Runs in place of the native library where that cannot: its own error first, then the tensor's device."""
    NATIVE.load()
    raise RuntimeError(f"backend: 'cuda' needs a cuda tensor, got one on {arguments[0].device}")


def _fake(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> Tensor:
    check_operands(x, cos, sin)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    check_pair_operands(q, k, cos, sin)
    q_rotated, k_rotated = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return q_rotated, k_rotated


def _fake_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> None:
    check_pair_operands(q, k, cos, sin)
    for name, x in (("q", q), ("k", k)):
        # Symbolic sizes decide nothing: the operator asks again when it runs.
        if all(isinstance(extent, int) for extent in (*x.shape, *x.stride())):
            check_own_memory(x, name)


def _refuse_table_gradients(ctx: Any, first_table: int) -> None:
    for position, table in enumerate(("cos", "sin"), start=first_table):
        if ctx.needs_input_grad[position]:
            raise ValueError(TABLE_GRADIENT_REFUSED.format(name=table))


# [[c, -s], [s, c]] transposed is the same matrix with s negated, whatever the table holds: each derivative is the
# conjugate rotation of what comes in.


def _differentiate(backend: str) -> None:
    rotate = getattr(torch.ops.ropecheck, f"multi_axis_rope_{backend}")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.half_split, ctx.conjugate, _, ctx.reason = inputs
        _refuse_table_gradients(ctx, 1)
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        x_gradient = rotate(gradient, cos, sin, ctx.half_split, not ctx.conjugate, "backward", ctx.reason)
        return x_gradient, None, None, None, None, None, None

    register_autograd(f"ropecheck::multi_axis_rope_{backend}", backward, setup_context=setup_context, lib=_library)


def _differentiate_pair(backend: str) -> None:
    """One launch where both gradients are asked for and given, the single operator where one is, else none.

    An output whose input needs no gradient is marked as not differentiable. The gradient of an output that was
    not used is undefined, and so is then the gradient of its input: None, which autograd reads as zero.
    """
    rotate = getattr(torch.ops.ropecheck, f"multi_axis_rope_{backend}")
    rotate_pair = getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{backend}")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, cos, sin, ctx.half_split, ctx.conjugate, _, ctx.reason = inputs
        _refuse_table_gradients(ctx, 2)
        ctx.mark_non_differentiable(*(y for y, needed in zip(output, ctx.needs_input_grad, strict=False) if not needed))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, q_gradient: Tensor | None, k_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        settings = cos, sin, ctx.half_split, not ctx.conjugate, "backward", ctx.reason
        given = [
            gradient if needed else None
            for gradient, needed in zip((q_gradient, k_gradient), ctx.needs_input_grad, strict=False)
        ]
        if None not in given:
            given = list(rotate_pair(*given, *settings))
        else:
            given = [gradient if gradient is None else rotate(gradient, *settings) for gradient in given]
        return *given, None, None, None, None, None, None

    register_autograd(f"ropecheck::multi_axis_rope_pair_{backend}", backward, setup_context=setup_context, lib=_library)


def _announce_writes(backend: str) -> None:
    """Let autograd know of what is written in place, and refuse it where a gradient would get lost."""
    name = f"multi_axis_rope_pair_{backend}_"
    operator = getattr(torch.ops.ropecheck, name).default

    def write(keyset: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *settings: Any) -> None:
        if torch.is_grad_enabled():
            for tensor_name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
                if tensor.requires_grad:
                    activation = tensor_name in ("q", "k")
                    refusal = IN_PLACE_GRADIENT_REFUSED if activation else TABLE_GRADIENT_REFUSED
                    raise ValueError(refusal.format(name=tensor_name))
        torch.autograd.graph.increment_version(q)
        torch.autograd.graph.increment_version(k)
        operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, q, k, cos, sin, *settings)

    _library.impl(name, write, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


def _register(
    backend: str,
    dispatch_keys: tuple[str, ...],
    rotate: Callable[..., Tensor],
    rotate_pair: Callable[..., tuple[Tensor, Tensor]],
    rotate_pair_in_place: Callable[..., None],
) -> None:
    fake: Callable[..., Any]
    for name, schema, kernel, fake in (
        (f"multi_axis_rope_{backend}", SCHEMA, rotate, _fake),
        (f"multi_axis_rope_pair_{backend}", PAIR_SCHEMA, rotate_pair, _fake_pair),
        (f"multi_axis_rope_pair_{backend}_", IN_PLACE_SCHEMA, rotate_pair_in_place, _fake_in_place),
    ):
        _library.define(name + schema)  # type: ignore[no-untyped-call]
        for key in dispatch_keys:
            _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        register_fake(f"ropecheck::{name}", fake, lib=_library)
    _differentiate(backend)
    _differentiate_pair(backend)
    _announce_writes(backend)


_register(
    "reference",
    ("CompositeExplicitAutograd",),
    rotate_reference,
    rotate_pair_reference,
    rotate_pair_reference_in_place,
)
_register("triton", ("CPU", "CUDA"), _rotate_triton, _rotate_pair_triton, _rotate_pair_triton_in_place)
_register("cuda", ("CPU",), _refuse_native, _refuse_native, _refuse_native)

NATIVE_FAILURE = NATIVE.failure()
"""Why the native library cannot be used; empty where it has been loaded, which gives ``cuda`` its CUDA kernels."""

if NATIVE_FAILURE:
    _rotations = ("multi_axis_rope_cuda", "multi_axis_rope_pair_cuda", "multi_axis_rope_pair_cuda_")
    for _name in (*_rotations, *NATIVE_NORM_OPERATORS):
        _library.impl(_name, _refuse_native, "CUDA")  # type: ignore[no-untyped-call]
