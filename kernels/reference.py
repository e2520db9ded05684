"""The torch reference of the rotation: the bytes that every other backend must return, on any device."""

from __future__ import annotations

from torch import Tensor

from .operands import check_operands
from .trace import CALLED_DIRECTLY, record_launch


def rotate_reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> Tensor:
    """Rotate x [B, S, H, D] by the table; operands as in :func:`ropecheck.kernels.multi_axis_rope`.

    Each product and each sum is an operation of its own, rounded to fp32, so that nothing can be contracted.
    """
    check_operands(x, cos, sin)
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    lanes = cos.shape[-1]
    rotary_dim = 2 * lanes
    if half_split:
        first, second = slice(0, lanes), slice(lanes, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    x0, x1 = x[..., first], x[..., second]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if conjugate:
        s = -s
    # A product with the fp32 table is fp32 by type promotion: narrower activations are widened exactly.
    y[..., first] = x0 * c - x1 * s
    y[..., second] = x1 * c + x0 * s
    y[..., rotary_dim:] = x[..., rotary_dim:]
    record_launch("multi_axis_rope_reference", "reference", direction, str(x.device), None, reason)
    return y
