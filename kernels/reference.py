"""The torch reference of the rotation: the bytes that every other backend must return, on any device."""

from __future__ import annotations

from torch import Tensor

from .operands import check_in_place, check_operands, check_pair_operands
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
    """Rotate x [B, S, H, D] by the table; operands as in :func:`ropecheck.kernels.multi_axis_rope`."""
    check_operands(x, cos, sin)
    y = x.new_empty(x.shape)
    _rotate_into(y, x, cos, sin, half_split, conjugate)
    if x.numel():
        record_launch("multi_axis_rope_reference", "reference", direction, str(x.device), None, reason)
    return y


def rotate_pair_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the table; operands as in :func:`ropecheck.kernels.multi_axis_rope_pair`."""
    check_pair_operands(q, k, cos, sin)
    rotated = q.new_empty(q.shape), k.new_empty(k.shape)
    for x, y in zip((q, k), rotated, strict=True):
        _rotate_into(y, x, cos, sin, half_split, conjugate)
    if q.numel() or k.numel():
        record_launch("multi_axis_rope_pair_reference", "reference", direction, str(q.device), None, reason)
    return rotated


def rotate_pair_reference_in_place(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> None:
    """Rotate q and k within their memory; operands as in :func:`ropecheck.kernels.multi_axis_rope_pair`."""
    check_pair_operands(q, k, cos, sin)
    check_in_place(q, k)
    for x in (q, k):
        _rotate_into(x, x, cos, sin, half_split, conjugate)
    if q.numel() or k.numel():
        record_launch("multi_axis_rope_pair_reference_", "reference", direction, str(q.device), None, reason)


def _rotate_into(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, half_split: bool, conjugate: bool) -> None:
    """Write the rotated x [B, S, H, D] into y, which is another tensor or x itself.

    Each product and each sum is an operation of its own, rounded to fp32, so that nothing can be contracted.
    """
    if x.numel() == 0:
        return
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
    # Both members are computed before either is written, since y may be x.
    y0 = x0 * c - x1 * s
    y1 = x1 * c + x0 * s
    y[..., first] = y0
    y[..., second] = y1
    if y is not x:
        y[..., rotary_dim:] = x[..., rotary_dim:]
