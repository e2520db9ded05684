"""The public rotary operator of family ``rotate_pair``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .backends import Backend, choose_backend
from .operands import IN_PLACE_GRADIENT_REFUSED, check_call, check_in_place, check_pair_operands


def multi_axis_rope_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairing: Literal["adjacent", "half-split"] = "adjacent",
    conjugate: bool = False,
    in_place: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in one launch, each as :func:`ropecheck.kernels.multi_axis_rope` rotates it alone.

    Args:
        q, k: fp32, fp16 or bf16 [B, S, Hq, D] and [B, S, Hk, D], D <= 256, alike but for their heads; any strides
            of their own, so that both may be views of one packed QKV.
        cos, sin: fp32, both [S, R / 2] (shared by the samples) or both [B, S, R / 2], any strides.
        pairing, conjugate, backend: as in :func:`ropecheck.kernels.multi_axis_rope`.
        in_place: write the result into the memory of q and k, whatever their strides, and return q and k
            themselves. Channels from R on are then not touched.

    Returns:
        The rotated q and k, contiguous, dtype of q, and differentiable with respect to q and k, to any order;
        with ``in_place`` q and k.

    Raises:
        TypeError: an operand is no tensor or has an unsupported dtype, or k another than q.
        ValueError: an unsupported rank, size, device, pairing or backend; k unlike q; a table that requires grad;
            or with ``in_place`` a q or k that requires grad while gradients are recorded, or elements of q and k
            that share memory with another.
        RuntimeError, ImportError, OSError: as in :func:`ropecheck.kernels.multi_axis_rope`.
    """
    check_call((("q", q), ("k", k)), cos, sin, pairing)
    chosen, reason = choose_backend(backend, q.device)
    if chosen == "cuda":
        # The native library checks too, but all that it can raise is RuntimeError.
        check_pair_operands(q, k, cos, sin)
    settings = cos, sin, pairing == "half-split", conjugate, "forward", reason
    if not in_place:
        q_rotated, k_rotated = getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{chosen}")(q, k, *settings)
        return q_rotated, k_rotated
    for name, x in (("q", q), ("k", k)):
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(IN_PLACE_GRADIENT_REFUSED.format(name=name))
    if chosen == "cuda" and not torch.compiler.is_compiling():
        # The native library asks for stride 0 alone, the other backends for all of it. What is traced has no address.
        check_in_place(q, k)
    getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{chosen}_")(q, k, *settings)
    return q, k
