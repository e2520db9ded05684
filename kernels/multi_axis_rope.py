"""The public rotary operator of family ``rotate``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .backends import Backend, choose_backend
from .operands import check_call, check_operands


def multi_axis_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: Literal["adjacent", "half-split"] = "adjacent",
    conjugate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Turn each lane of each head of x by its token's angle: the rotation of a rotary position embedding.

    With R = 2 * cos.shape[-1], lane l is the channels (2 l, 2 l + 1) with ``pairing="adjacent"`` and
    (l, l + R / 2) with ``"half-split"``. For its two members x0 and x1, c = cos[.., l] and s = sin[.., l]:

        y0 = RN(RN(x0 * c) - RN(x1 * s))        y1 = RN(RN(x1 * c) + RN(x0 * s))

    RN rounds to fp32, to nearest even; products are never contracted into an fma, and the result is rounded
    once more, to the dtype of x. Channels from R on are moved unchanged, bit for bit. Every backend returns
    these bytes; only the payload of a computed NaN is left open.

    Args:
        x: fp32, fp16 or bf16 [B, S, H, D], D <= 256, any strides; cuda and triton read it where it lies.
        cos, sin: fp32, both [S, R / 2] (shared by the samples) or both [B, S, R / 2], any strides.
        conjugate: negate s first, which rotates back.
        backend: ``cuda`` (the native library), ``triton``, ``reference`` (torch), or ``auto``: for a CUDA tensor
            the first of the three that can be loaded, else the reference.
            :func:`ropecheck.kernels.trace_launches` records choice and reason.

    Returns:
        y [B, S, H, D], contiguous, dtype of x. Differentiable with respect to x, to any order.

    Raises:
        TypeError: an operand is no tensor or has an unsupported dtype.
        ValueError: an unsupported rank, size, device, pairing or backend; or a table that requires grad.
        RuntimeError: ``backend="cuda"`` or ``"triton"`` with a CPU tensor (triton: outside
            ``interpreted_launches()``).
        ImportError: ``backend="triton"`` and triton cannot be imported.
        FileNotFoundError, ImportError, OSError, RuntimeError: ``backend="cuda"`` and the native library cannot be
            used; the error is the one that loading it raised.
    """
    check_call((("x", x),), cos, sin, pairing)
    chosen, reason = choose_backend(backend, x.device)
    if chosen == "cuda":
        # The native library checks too, but all that it can raise is RuntimeError.
        check_operands(x, cos, sin)
    operator = getattr(torch.ops.ropecheck, f"multi_axis_rope_{chosen}")
    y: Tensor = operator(x, cos, sin, pairing == "half-split", conjugate, "forward", reason)
    return y
