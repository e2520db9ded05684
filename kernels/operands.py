"""What the operands of a rotation must be; every backend and the fake implementation ask the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .overlap import overlap_each_other, overlaps_itself

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256

TABLE_GRADIENT_REFUSED = (
    "{name}: gradients with respect to the table are not computed; pass {name}.detach(), or call under torch.no_grad()"
)
IN_PLACE_GRADIENT_REFUSED = (
    "{name}: a tensor that requires grad is not rotated in place while gradients are recorded; rotate it out of "
    "place, or call under torch.no_grad()"
)


def check_call(activations: tuple[tuple[str, Tensor], ...], cos: Tensor, sin: Tensor, pairing: str) -> None:
    """Refuse what an operator's own schema would refuse in worse words, and a table that requires grad.

    Raises:
        TypeError: an operand is no tensor.
        ValueError: an unknown pairing, or a table that requires grad while gradients are recorded.
        NotImplementedError: an operand has a tangent of forward-mode differentiation.
    """
    eager = not torch.compiler.is_compiling()
    for name, operand in (*activations, ("cos", cos), ("sin", sin)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(operand).__name__}")
        # An operator of torch.library drops the tangent of a tensor that does not require grad, silently.
        if eager and unpack_dual(operand).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{name}: forward-mode derivatives are not computed; use reverse mode")
    if pairing not in ("adjacent", "half-split"):
        raise ValueError(f"pairing: expected 'adjacent' or 'half-split', got {pairing!r}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(TABLE_GRADIENT_REFUSED.format(name=name))


def check_operands(x: Tensor, cos: Tensor, sin: Tensor, name: str = "x") -> None:
    """Refuse operands that no backend can rotate, naming the argument.

    Args:
        x: fp32, fp16 or bf16 [B, S, H, D], D <= 256, any strides; called ``name`` in the refusal.
        cos, sin: fp32, both [S, R / 2] or both [B, S, R / 2], 2 <= R <= D, any strides, on the device of x.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a rank, size or device is not supported.
    """
    _check_activation(x, name)
    for table_name, table in (("cos", cos), ("sin", sin)):
        if table.ndim not in (2, 3):
            raise ValueError(
                f"{table_name}: expected [S, R/2] (2 dimensions) or [B, S, R/2] (3), got shape {list(table.shape)}"
            )
        if table.dtype != torch.float32:
            raise TypeError(f"{table_name}: expected float32, got {table.dtype}")
        if table.device != x.device:
            raise ValueError(f"{table_name}: expected the device of {name}, {x.device}, got {table.device}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected the shape of cos, {list(cos.shape)}, got {list(sin.shape)}")
    batch, sequence, _, head_dim = x.shape
    if cos.shape[-2] != sequence:
        raise ValueError(f"cos: expected {sequence} positions, as many as {name} has tokens, got {cos.shape[-2]}")
    if cos.ndim == 3 and cos.shape[0] != batch:
        raise ValueError(f"cos: expected {batch} samples, as many as {name} has, got {cos.shape[0]}")
    lanes = cos.shape[-1]
    if lanes == 0:
        raise ValueError(f"cos: expected a last dimension of at least one lane, got shape {list(cos.shape)}")
    if 2 * lanes > head_dim:
        raise ValueError(
            f"cos: expected at most {head_dim // 2} lanes for the head dimension {head_dim} of {name}, got {lanes}"
        )


def check_pair_operands(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse a pair that no backend can rotate: what :func:`check_operands` says of each, and unlike tensors.

    Raises:
        TypeError: a dtype is not supported, or k has another than q.
        ValueError: a rank, size or device is not supported, or k has another than q, heads excepted.
    """
    check_operands(q, cos, sin, "q")
    _check_activation(k, "k")
    if k.dtype != q.dtype:
        raise TypeError(f"k: expected the dtype of q, {q.dtype}, got {k.dtype}")
    if k.device != q.device:
        raise ValueError(f"k: expected the device of q, {q.device}, got {k.device}")
    for dimension, meaning in ((0, "samples"), (1, "tokens"), (3, "channels per head")):
        if k.shape[dimension] != q.shape[dimension]:
            raise ValueError(f"k: expected {q.shape[dimension]} {meaning}, as many as q has, got {k.shape[dimension]}")


def check_in_place(q: Tensor, k: Tensor) -> None:
    """Refuse tensors of which one memory location would be rotated twice.

    Raises:
        ValueError: elements of q, elements of k, or an element of each share memory.
    """
    check_own_memory(q, "q")
    check_own_memory(k, "k")
    if overlap_each_other(q, k):
        raise ValueError("k: expected no memory of q, which is rotated in place too, got elements that share memory")


def check_own_memory(x: Tensor, name: str) -> None:
    """The part of :func:`check_in_place` that sizes and strides alone decide, for one tensor."""
    if overlaps_itself(x):
        raise ValueError(
            f"{name}: elements that share memory are not rotated in place, got shape {list(x.shape)} with "
            f"strides {list(x.stride())}"
        )


def _check_activation(x: Tensor, name: str) -> None:
    if x.ndim != 4:
        raise ValueError(f"{name}: expected 4 dimensions [B, S, H, D], got shape {list(x.shape)}")
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
    if x.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected a head dimension of at most {MAX_HEAD_DIM}, got {x.shape[3]}")
