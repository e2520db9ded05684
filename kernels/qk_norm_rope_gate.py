"""The public operator of family ``norm_rotate_gate``."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import Backend, choose_backend
from .norm_operands import check_axis_values, check_norm_operands, check_numbers
from .operands import TABLE_GRADIENT_REFUSED


def qk_norm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    eps: float,
    axis_map: Tensor | None = None,
    gate: bool = True,
    weight_offset: float = 1.0,
    round_norm: bool = True,
    fma: bool = False,
    slots: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise every head of the queries and keys, rotate its first R channels and set the gates apart.

    With D channels x of a head and its weight w, where RN rounds to fp32, to nearest even, and A to the dtype of x:

        inv = RN(1 / root),  root = RN(sqrt(RN(RN(sum / D) + eps))),  sum = the tree over RN(x_i * x_i)
        y_i = A(RN(RN(x_i * inv) * RN(w_i + weight_offset)))

    The tree adds neighbours, then neighbouring sums, and so on, over the channels padded with zeros to a power of
    two. For lane l below R / 2, with c and s from columns l and R / 2 + l of the table's row at the lane's position:

        q_l = A(RN(RN(y_l * c) - RN(y_m * s)))        q_m = A(RN(RN(y_m * c) + RN(y_l * s)))        m = l + R / 2

    Channels from R on are y itself, and a gate is copied bit for bit. Nothing is contracted into an fma. Every
    backend returns these bytes, and its gradients the bytes of the reference; only the payload of a computed NaN is
    left open.

    Args:
        q_gate: fp32, fp16 or bf16 [T, Hq * 2 * D], each head's query and then its gate; [T, Hq * D] without ``gate``.
            Any row pitch, so that it may be a slice of one projection.
        k: [T, Hk * D], dtype of q_gate, any row pitch.
        q_weight, k_weight: [D], 2 <= D <= 256, both of the dtype of q_gate or both fp32.
        cos_sin_cache: fp32, fp16 or bf16 [N, R], R <= D: R / 2 columns of cosines, then those of sines; read as it
            is, so a rounded table rotates by rounded values.
        positions: int32 or int64 [T], or [3, T] with ``axis_map``, any strides. A token with a position outside
            [0, N) gets NaN in all channels of its q and k, since a kernel cannot raise; its gate is copied.
        eps: added to the mean square, rounded to fp32.
        axis_map: int32 or int64 [R / 2], the row of ``positions`` that each lane takes, 0 to 2; see
            :mod:`ropecheck.kernels.axis_maps`. The values of a map on a GPU are read when it is first used, which
            waits for the device once, and not within a CUDA Graph's capture or a compiled program: there a lane of
            another value is out of range.
        gate: whether q_gate has gates.
        weight_offset: added to the weights, rounded to fp32; with 0 they are taken as they are.
        round_norm: round y to the dtype of x before the rotation; False leaves out A in y (not in q).
        fma: compute fma(y_l, c, -RN(y_m * s)) and fma(y_m, c, RN(y_l * s)) instead, in the derivative likewise.
        slots: int32 or int64 [T]. Tokens whose slot is -1 are padding: they are not read, and their rows of the
            outputs are not written, so they hold anything. Their gradients are zero.
        backend: as in :func:`ropecheck.kernels.multi_axis_rope`.

    Returns:
        q [T, Hq * D], k [T, Hk * D] and the gates [T, Hq * D] (None without ``gate``), contiguous, dtype of q_gate.
        Differentiable once, with respect to q_gate, k and the weights: straight through the roundings, the weights'
        gradients a tree over tokens and heads in fp32. A position out of range makes its token's gradients NaN, and
        the weights'.

    Raises:
        TypeError: an operand is no tensor or no number, or has an unsupported dtype or another than it must share.
        ValueError: an unsupported rank, size, stride, device, number or backend; three rows of positions without a
            map or a map without them; a value of the map outside 0 to 2; or a table that requires grad.
        RuntimeError: a second derivative; or as in :func:`ropecheck.kernels.multi_axis_rope`.
        ImportError, OSError: as in :func:`ropecheck.kernels.multi_axis_rope`.
    """
    for name, operand in (
        ("q_gate", q_gate),
        ("k", k),
        ("q_weight", q_weight),
        ("k_weight", k_weight),
        ("cos_sin_cache", cos_sin_cache),
        ("positions", positions),
    ):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(operand).__name__}")
    for name, choice in (("axis_map", axis_map), ("slots", slots)):
        if choice is not None and not isinstance(choice, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or None, got {type(choice).__name__}")
    check_numbers(eps, weight_offset, gate=gate, round_norm=round_norm, fma=fma)
    if cos_sin_cache.requires_grad and torch.is_grad_enabled():
        raise ValueError(TABLE_GRADIENT_REFUSED.format(name="cos_sin_cache"))
    chosen, reason = choose_backend(backend, q_gate.device)
    if chosen == "cuda":
        # The native library checks too, but all that it can raise is RuntimeError; and it reads no values.
        check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
        check_axis_values(axis_map)
    operator = getattr(torch.ops.ropecheck, f"qk_norm_rope_gate_{chosen}")
    tables = cos_sin_cache, positions, axis_map, slots
    q, k_rotated, gates = operator(
        q_gate, k, q_weight, k_weight, *tables, eps, weight_offset, gate, round_norm, fma, reason
    )
    return q, k_rotated, gates if gate else None
