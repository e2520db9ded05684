"""The torch reference of the normalised rotation: the bytes that every other backend must return, on any device.

Every operation is one of torch's own on fp32, so nothing is contracted, and sums are explicit trees. Padding rows
are computed with whatever they hold, and then replaced: picking them out would wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .norm_operands import (
    PADDING_SLOT,
    check_axis_values,
    check_norm_gradients,
    check_norm_operands,
    rounded_to_float32,
)
from .trace import CALLED_DIRECTLY, record_launch


def norm_rope_gate_reference(
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
    round_norm: bool,
    fma: bool,
    reason: str = CALLED_DIRECTLY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, rotate and copy; operands as in :func:`ropecheck.kernels.qk_norm_rope_gate`.

    The gate is [T, 0] without ``gate``.
    """
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    check_axis_values(axis_map)
    c, s, outside = _gather(cos_sin_cache, positions, axis_map)
    lanes = sizes.rotary_dim // 2
    turn = _fused if fma else _separate
    rotated = []
    q, gate_values = _queries_and_gates(q_gate, sizes.head_dim, gate)
    for x, weight in ((q, q_weight), (_heads(k, sizes.head_dim), k_weight)):
        widened = x.float()
        normalised = widened * _reciprocal_root(widened, eps) * _factor(weight, weight_offset)
        if round_norm:
            normalised = normalised.to(x.dtype).float()
        a, b, tail = _parts(normalised, lanes)
        y = torch.cat((turn(a, c, -(b * s)), turn(b, c, a * s), tail), dim=-1)
        y = torch.where(outside, torch.nan, y).to(x.dtype)
        rotated.append(_written(y, slots))
    if sizes.tokens and (sizes.q_heads or sizes.k_heads):
        record_launch("qk_norm_rope_gate_reference", "reference", "forward", str(q_gate.device), None, reason)
    return rotated[0], rotated[1], _written(gate_values, slots)


def norm_rope_gate_backward_reference(
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
    reason: str = CALLED_DIRECTLY,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q_gate, k and the weights; those of the weights are empty without ``weight_gradients``."""
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    check_norm_gradients(q_gradient, k_gradient, gate_gradient, q_gate, sizes, gate)
    check_axis_values(axis_map)
    c, s, outside = _gather(cos_sin_cache, positions, axis_map)
    padding = torch.zeros_like(outside) if slots is None else (slots == PADDING_SLOT)[:, None, None]
    lanes = sizes.rotary_dim // 2
    turn = _fused if fma else _separate
    q, _ = _queries_and_gates(q_gate, sizes.head_dim, gate)
    gradients, weight_sums = [], []
    for incoming, x, weight in (
        (q_gradient, q, q_weight),
        (k_gradient, _heads(k, sizes.head_dim), k_weight),
    ):
        g0, g1, tail = _parts(_heads(incoming, sizes.head_dim).float(), lanes)
        rotated_back = torch.cat((turn(g0, c, g1 * s), turn(g1, c, -(g0 * s)), tail), dim=-1)
        rotated_back = torch.where(outside, torch.nan, rotated_back)
        widened = x.float()
        inverse = _reciprocal_root(widened, eps)
        unit = widened * inverse
        scaled = rotated_back * _factor(weight, weight_offset)
        mean = _divide(_tree_sum(scaled * unit), sizes.head_dim)
        gradient = (inverse * (scaled - unit * mean)).to(x.dtype)
        gradients.append(gradient.masked_fill(padding, 0))
        products = (rotated_back * unit).masked_fill(padding, 0).flatten(0, 1)
        weight_sums.append(
            _tree_sum(products.T).flatten().to(weight.dtype) if weight_gradients else weight.new_empty(0)
        )
    if gate:
        # Not by torch.cat, which autocast would have in its own dtype.
        both = gradients[0].new_empty((*gradients[0].shape[:-1], 2 * sizes.head_dim))
        both[..., : sizes.head_dim] = gradients[0]
        both[..., sizes.head_dim :] = _heads(gate_gradient, sizes.head_dim).masked_fill(padding, 0)
        gradients[0] = both
    if sizes.tokens and (sizes.q_heads or sizes.k_heads):
        operator = "qk_norm_rope_gate_backward_reference"
        record_launch(operator, "reference", "backward", str(q_gate.device), None, reason)
    return gradients[0].flatten(1), gradients[1].flatten(1), weight_sums[0], weight_sums[1]


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1] // head_dim, head_dim)


def _queries_and_gates(q_gate: Tensor, head_dim: int, gate: bool) -> tuple[Tensor, Tensor]:
    """Queries and gates, each [T, H, D]; without gates those have no heads."""
    if not gate:
        q = _heads(q_gate, head_dim)
        return q, q[:, :0]
    both = _heads(q_gate, 2 * head_dim)
    return both[..., :head_dim], both[..., head_dim:]


def _written(rows: Tensor, slots: Tensor | None) -> Tensor:
    """Contiguous [T, H * D] with ``rows`` [T, H, D]; what is padding stays as it was allocated."""
    y = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    y.copy_(rows if slots is None else torch.where((slots == PADDING_SLOT)[:, None, None], y, rows))
    return y.flatten(1)


def _gather(cos_sin_cache: Tensor, positions: Tensor, axis_map: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine and sine of each token [T, 1, R / 2], and whether it has a position out of range [T, 1, 1]."""
    count, rotary_dim = cos_sin_cache.shape
    lanes = torch.arange(rotary_dim // 2, device=positions.device)
    if axis_map is None:
        row = positions[:, None].expand(-1, rotary_dim // 2).long()
        inside = (row >= 0) & (row < count)
    else:
        row = positions[axis_map.clamp(0, 2).long()].T.long()
        inside = (row >= 0) & (row < count) & (axis_map >= 0) & (axis_map <= 2)
    outside = ~inside.all(dim=-1)[:, None, None]
    if count == 0:
        nothing = torch.zeros(row.shape, device=positions.device)[:, None]
        return nothing, nothing, outside
    row = torch.where(inside, row, 0)
    c, s = (cos_sin_cache[row, lanes + start].float()[:, None] for start in (0, rotary_dim // 2))
    return c, s, outside


def _parts(x: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    return x[..., :lanes], x[..., lanes : 2 * lanes], x[..., 2 * lanes :]


def _factor(weight: Tensor, offset: float) -> Tensor:
    return weight.float() + rounded_to_float32(offset) if offset else weight.float()


def _reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """1 / root of the mean square of the last dimension, plus eps: [.., 1]."""
    mean = _divide(_tree_sum(x * x), x.shape[-1])
    # torch's fp32 root on a CPU is MKL's and not always the nearest value. An fp32's root is at least four fp64 ulp
    # away from where fp32 changes its rounding, so the one of fp64 rounds to the nearest.
    root = (mean + rounded_to_float32(eps)).double().sqrt().float()
    return torch.ones_like(root) / root


def _divide(total: Tensor, count: int) -> Tensor:
    # By a tensor: on CUDA torch divides by a number as it multiplies with its reciprocal, which rounds twice.
    return total / torch.full_like(total, count)


def _tree_sum(x: Tensor) -> Tensor:
    """Neighbours are added, then neighbouring sums, .., over the last dimension padded with +0: [.., 1]."""
    count = x.shape[-1]
    width = 1 << max(count - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, width - count))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def _separate(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """The product is rounded, then the sum."""
    return x * factor + addend


def _fused(x: Tensor, factor: Tensor, addend: Tensor) -> Tensor:
    """fp32 fma: the sum of the exact product and the addend, rounded once."""
    # fp64 holds the product. The sum is rounded to odd there, which makes the second rounding the only one: whatever
    # was lost leaves the last bit set, and so cannot turn into a tie or out of one.
    product, addend = x.double() * factor.double(), addend.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    inexact = torch.isfinite(total) & (error != 0)
    away = (error > 0) == (total > 0)
    odd = torch.where(inexact & even, bits + torch.where(away, 1, -1), bits)
    return odd.view(torch.float64).float()
