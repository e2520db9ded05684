"""The Triton kernels of the normalised rotation's derivative: rows of gradients, and sums over them.

A row is one head of one token, row t * H + h. The weights' gradients are trees over rows: each program of the first
kernel sums a block of rows, a power of two of them, and the second kernel sums the blocks' sums.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from .norm_triton_parts import load_factor, load_turn, partner_of, reciprocal_root, tree_sum, turn


@triton.jit(do_not_specialize=["tokens", "heads", "cache_rows"])
def norm_rope_backward_kernel(
    incoming,
    incoming_gate,
    x,
    weight,
    cache,
    positions,
    axis_map,
    slots,
    gradient,
    partial_sums,
    tokens,
    heads,
    cache_rows,
    incoming_stride_token,
    incoming_stride_channel,
    gate_stride_token,
    gate_stride_channel,
    x_stride,
    cache_stride,
    position_stride_row,
    position_stride_token,
    axis_stride,
    slot_stride,
    eps,
    weight_offset,
    GATE: tl.constexpr,
    MROPE: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    ADD_OFFSET: tl.constexpr,
    FMA: tl.constexpr,
    WEIGHT_GRADIENTS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The gradient of a block of rows of x, and the sum of the block's products for the weight's.

    With GATE each head of x, and of its gradient, has its gate behind it, and the gate's gradient is copied there.
    """
    parts: tl.constexpr = 2 if GATE else 1
    block = tl.program_id(0).to(tl.int64)
    row = block * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    token = row // heads
    head = row % heads
    channel = tl.arange(0, BLOCK)
    exists = token < tokens
    row_valid = exists
    if SLOTS:
        row_valid &= tl.load(slots + token * slot_stride, mask=exists, other=PADDING) != PADDING
    c, s, outside = load_turn(
        cache,
        cache_stride,
        cache_rows,
        positions,
        position_stride_row,
        position_stride_token,
        axis_map,
        axis_stride,
        token,
        row_valid,
        channel,
        LANES,
        MROPE,
        ALIGNMENT,
    )
    rotated = channel < 2 * LANES
    in_head = (channel < HEAD_DIM)[None, :]
    valid = row_valid[:, None] & in_head
    partner_channel = partner_of(channel, LANES, ALIGNMENT)
    incoming_row = incoming + (token * incoming_stride_token)[:, None]
    first = head[:, None] * HEAD_DIM
    own = tl.load(incoming_row + (first + channel[None, :]) * incoming_stride_channel, mask=valid, other=0.0)
    partner = tl.load(
        incoming_row + (first + partner_channel[None, :]) * incoming_stride_channel,
        mask=row_valid[:, None] & rotated[None, :],
        other=0.0,
    )
    own = own.to(tl.float32)
    # Back: the sine is negated for the second members. Triton's minus is a difference from +0 and makes +0 of it.
    sign = tl.where(channel < LANES, 1.0, -1.0)
    turned = turn(own, partner.to(tl.float32), c, s * sign[None, :], FMA)
    rotated_back = tl.where(rotated[None, :], turned, own)
    rotated_back = tl.where(outside[:, None], float("nan"), rotated_back)

    x_offset = (token * x_stride + head * (parts * HEAD_DIM))[:, None] + channel[None, :]
    x_value = tl.load(x + x_offset, mask=valid, other=0.0).to(tl.float32)
    inverse = reciprocal_root(x_value, eps, ROW_BLOCK, HEAD_DIM, BLOCK)[:, None]
    unit = x_value * inverse
    factor = load_factor(weight, channel, channel < HEAD_DIM, weight_offset, ADD_OFFSET)
    scaled = rotated_back * factor[None, :]
    total = tree_sum(tl.where(valid, scaled * unit, 0.0), ROW_BLOCK, BLOCK)
    mean = tl.div_rn(total, tl.full((ROW_BLOCK,), HEAD_DIM, tl.float32))[:, None]
    result = inverse * (scaled - unit * mean)
    # Rows of padding are written, with zeros, and were not read.
    result = tl.where(valid, result, 0.0).to(gradient.dtype.element_ty)
    store_valid = exists[:, None] & in_head
    gradient_offset = (row * (parts * HEAD_DIM))[:, None] + channel[None, :]
    tl.store(gradient + gradient_offset, result, mask=store_valid)
    if GATE:
        gate_row = incoming_gate + (token * gate_stride_token)[:, None]
        moved = tl.load(gate_row + (first + channel[None, :]) * gate_stride_channel, mask=valid, other=0.0)
        tl.store(gradient + gradient_offset + HEAD_DIM, moved, mask=store_valid)
    if WEIGHT_GRADIENTS:
        products = tl.where(valid, rotated_back * unit, 0.0)
        sums = tree_sum(tl.trans(products), BLOCK, ROW_BLOCK)
        tl.store(partial_sums + block * HEAD_DIM + channel, sums, mask=channel < HEAD_DIM)


@triton.jit(do_not_specialize=["rows"])
def sum_rows_kernel(source, target, rows, HEAD_DIM: tl.constexpr, ROW_BLOCK: tl.constexpr, CHANNEL_BLOCK: tl.constexpr):
    """Row b of target is the tree over the rows b * ROW_BLOCK to (b + 1) * ROW_BLOCK - 1 of source [rows, HEAD_DIM]."""
    block = tl.program_id(0).to(tl.int64)
    row = block * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    channel = tl.program_id(1) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    valid = (channel < HEAD_DIM)[:, None] & (row < rows)
    values = tl.load(source + row * HEAD_DIM + channel[:, None], mask=valid, other=0.0)
    sums = tree_sum(values, CHANNEL_BLOCK, ROW_BLOCK).to(target.dtype.element_ty)
    tl.store(target + block * HEAD_DIM + channel, sums, mask=channel < HEAD_DIM)
