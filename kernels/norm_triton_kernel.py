"""The Triton kernel of the normalised rotation, forward: queries, keys and gates in one launch.

Importing this module imports triton, and fixes whether the kernel is compiled or interpreted.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from .norm_triton_parts import load_factor, load_turn, partner_of, reciprocal_root, turn


@triton.jit
def norm_rope_block(
    x,
    x_stride_token,
    y,
    gate,
    weight,
    weight_offset,
    c,
    s,
    outside,
    eps,
    token,
    token_valid,
    head_block,
    heads,
    GATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    ADD_OFFSET: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    FMA: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Normalise and rotate a block of tokens and heads of x into y; with GATE each head of x has its gate behind it."""
    parts: tl.constexpr = 2 if GATE else 1
    rows: tl.constexpr = TOKEN_BLOCK * HEAD_BLOCK
    head = head_block.to(tl.int64) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    row_valid = (token_valid[:, None] & (head < heads)[None, :])[:, :, None]
    x_row = x + (token[:, None] * x_stride_token + head[None, :] * (parts * HEAD_DIM))[:, :, None]
    y_row = ((token[:, None] * heads + head[None, :]) * HEAD_DIM)[:, :, None]
    outside = outside[:, None, None]

    channel = tl.arange(0, BLOCK)
    every = channel[None, None, :]
    valid = row_valid & (every < HEAD_DIM)
    x_value = tl.load(x_row + every, mask=valid, other=0.0).to(tl.float32)
    inverse = reciprocal_root(tl.reshape(x_value, (rows, BLOCK)), eps, rows, HEAD_DIM, BLOCK)
    inverse = tl.reshape(inverse, (TOKEN_BLOCK, HEAD_BLOCK))[:, :, None]
    if HEAD_DIM > 2 * LANES:
        factor = load_factor(weight, channel, channel < HEAD_DIM, weight_offset, ADD_OFFSET)
        tail = tl.where(outside, float("nan"), x_value * inverse * factor[None, None, :])
        tl.store(y + y_row + every, tail.to(y.dtype.element_ty), mask=valid & (every >= 2 * LANES))

    # The rotated channels are read again, each beside its partner: the cache has them, and within the registers they
    # lie in other threads.
    channel = tl.arange(0, ROTARY_BLOCK)
    partner_channel = partner_of(channel, LANES, ALIGNMENT)
    rotated = channel < 2 * LANES
    valid_rotated = row_valid & rotated[None, None, :]
    own = tl.load(x_row + channel[None, None, :], mask=valid_rotated, other=0.0).to(tl.float32)
    partner = tl.load(x_row + partner_channel[None, None, :], mask=valid_rotated, other=0.0).to(tl.float32)
    own = own * inverse * load_factor(weight, channel, rotated, weight_offset, ADD_OFFSET)[None, None, :]
    partner_factor = load_factor(weight, partner_channel, rotated, weight_offset, ADD_OFFSET)
    partner = partner * inverse * partner_factor[None, None, :]
    if ROUND_NORM:
        own = own.to(y.dtype.element_ty).to(tl.float32)
        partner = partner.to(y.dtype.element_ty).to(tl.float32)
    # The sine is negated for the first members. Triton's minus is a difference from +0 and makes +0 of it.
    sign = tl.where(channel < LANES, -1.0, 1.0)
    turned = turn(own, partner, c[:, None, :], (s * sign[None, :])[:, None, :], FMA)
    turned = tl.where(outside, float("nan"), turned).to(y.dtype.element_ty)
    tl.store(y + y_row + channel[None, None, :], turned, mask=valid_rotated)

    if GATE:
        moved = tl.load(x_row + HEAD_DIM + every, mask=valid)
        tl.store(gate + y_row + every, moved, mask=valid)


# Sizes are not specialised: a token more or less needs no binary of its own.
@triton.jit(do_not_specialize=["tokens", "q_heads", "k_heads", "q_head_blocks", "k_head_blocks", "cache_rows"])
def norm_rope_gate_kernel(
    q_gate,
    k,
    q,
    k_rotated,
    gate,
    q_weight,
    k_weight,
    cache,
    positions,
    axis_map,
    slots,
    tokens,
    q_heads,
    k_heads,
    q_head_blocks,
    k_head_blocks,
    cache_rows,
    q_gate_stride,
    k_stride,
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
    ROUND_NORM: tl.constexpr,
    FMA: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """One program takes one block of tokens and heads, of the queries (with their gates) or of the keys.

    Programs next to one another have one token block, so they share their rows of the table: first the head blocks
    of the queries, then those of the keys. Without GATE, MROPE or SLOTS their tensors and strides are None.
    """
    program = tl.program_id(0)
    head_blocks = q_head_blocks + k_head_blocks
    head_block = program % head_blocks
    # Offsets are 64 bits wide from the first product on: any of them may pass 2**31 elements.
    token = (program // head_blocks).to(tl.int64) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    token_valid = token < tokens
    if SLOTS:
        token_valid &= tl.load(slots + token * slot_stride, mask=token_valid, other=PADDING) != PADDING
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
        token_valid,
        tl.arange(0, ROTARY_BLOCK),
        LANES,
        MROPE,
        ALIGNMENT,
    )
    if head_block < q_head_blocks:
        norm_rope_block(
            q_gate,
            q_gate_stride,
            q,
            gate,
            q_weight,
            weight_offset,
            c,
            s,
            outside,
            eps,
            token,
            token_valid,
            head_block,
            q_heads,
            GATE,
            HEAD_DIM,
            LANES,
            ADD_OFFSET,
            ROUND_NORM,
            FMA,
            TOKEN_BLOCK,
            HEAD_BLOCK,
            BLOCK,
            ROTARY_BLOCK,
            ALIGNMENT,
        )
    else:
        norm_rope_block(
            k,
            k_stride,
            k_rotated,
            None,
            k_weight,
            weight_offset,
            c,
            s,
            outside,
            eps,
            token,
            token_valid,
            head_block - q_head_blocks,
            k_heads,
            False,
            HEAD_DIM,
            LANES,
            ADD_OFFSET,
            ROUND_NORM,
            FMA,
            TOKEN_BLOCK,
            HEAD_BLOCK,
            BLOCK,
            ROTARY_BLOCK,
            ALIGNMENT,
        )
