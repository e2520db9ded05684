"""What the operands of a rotation must be; every backend and the fake implementation ask the same."""

from __future__ import annotations

import torch
from torch import Tensor

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def check_operands(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse operands that no backend can rotate, naming the argument.

    Args:
        x: fp32, fp16 or bf16 [B, S, H, D], D <= 256, any strides.
        cos, sin: fp32, both [S, R / 2] or both [B, S, R / 2], 2 <= R <= D, any strides, on the device of x.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a rank, size or device is not supported.
    """
    if x.ndim != 4:
        raise ValueError(f"x: expected 4 dimensions [B, S, H, D], got shape {list(x.shape)}")
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"x: expected float32, float16 or bfloat16, got {x.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.ndim not in (2, 3):
            raise ValueError(
                f"{name}: expected [S, R/2] (2 dimensions) or [B, S, R/2] (3), got shape {list(table.shape)}"
            )
        if table.dtype != torch.float32:
            raise TypeError(f"{name}: expected float32, got {table.dtype}")
        if table.device != x.device:
            raise ValueError(f"{name}: expected the device of x, {x.device}, got {table.device}")
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected the shape of cos, {list(cos.shape)}, got {list(sin.shape)}")
    batch, sequence, _, head_dim = x.shape
    if cos.shape[-2] != sequence:
        raise ValueError(f"cos: expected {sequence} positions, as many as x has tokens, got {cos.shape[-2]}")
    if cos.ndim == 3 and cos.shape[0] != batch:
        raise ValueError(f"cos: expected {batch} samples, as many as x has, got {cos.shape[0]}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"x: expected a head dimension of at most {MAX_HEAD_DIM}, got {head_dim}")
    lanes = cos.shape[-1]
    if lanes == 0:
        raise ValueError(f"cos: expected a last dimension of at least one lane, got shape {list(cos.shape)}")
    if 2 * lanes > head_dim:
        raise ValueError(
            f"cos: expected at most {head_dim // 2} lanes for the head dimension {head_dim} of x, got {lanes}"
        )
