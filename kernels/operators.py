"""Registration with torch.library: one operator per backend, each differentiable to any order.

``ropecheck::multi_axis_rope_reference`` and ``ropecheck::multi_axis_rope_triton`` share schema, fake
implementation and derivative. ``direction`` and ``reason`` change no result: the execution trace records
them, and they travel as arguments so that compiled, exported and differentiated graphs carry them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from .operands import check_operands
from .reference import rotate_reference
from .trace import CALLED_DIRECTLY

# The dispatcher leaves out arguments that equal their default, so the implementations repeat the defaults.
SCHEMA = (
    "(Tensor x, Tensor cos, Tensor sin, bool half_split, bool conjugate, "
    f'str direction="forward", str reason="{CALLED_DIRECTLY}") -> Tensor'
)

TABLE_GRADIENT_REFUSED = (
    "{name}: gradients with respect to the table are not computed; pass {name}.detach(), or call under "
    "torch.no_grad()"
)

_library = Library("ropecheck", "FRAGMENT")  # type: ignore[no-untyped-call]


def _rotate_triton(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> Tensor:
    """The Triton backend, imported when first executed; ImportError where triton is absent."""
    from .triton_rotation import rotate_triton

    return rotate_triton(x, cos, sin, half_split, conjugate, direction, reason)


def _fake(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> Tensor:
    check_operands(x, cos, sin)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _register(name: str, kernel: Callable[..., Tensor], dispatch_keys: tuple[str, ...]) -> None:
    _library.define(name + SCHEMA)  # type: ignore[no-untyped-call]
    for key in dispatch_keys:
        _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    qualified = f"ropecheck::{name}"
    operator = getattr(torch.ops.ropecheck, name)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, cos, sin, ctx.half_split, ctx.conjugate, _, ctx.reason = inputs
        for position, table in enumerate(("cos", "sin"), start=1):
            if ctx.needs_input_grad[position]:
                raise ValueError(TABLE_GRADIENT_REFUSED.format(name=table))
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # [[c, -s], [s, c]] transposed is the same matrix with s negated, whatever the table holds.
        cos, sin = ctx.saved_tensors
        x_gradient = operator(gradient, cos, sin, ctx.half_split, not ctx.conjugate, "backward", ctx.reason)
        return x_gradient, None, None, None, None, None, None

    register_fake(qualified, _fake, lib=_library)
    register_autograd(qualified, backward, setup_context=setup_context, lib=_library)


_register("multi_axis_rope_reference", rotate_reference, ("CompositeExplicitAutograd",))
_register("multi_axis_rope_triton", _rotate_triton, ("CPU", "CUDA"))
