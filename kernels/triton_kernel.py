"""The Triton kernel of the rotation: any strides, one tensor or a pair, into new memory or in place.

Importing this module imports triton, and fixes whether the kernel is compiled or interpreted.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def rotate_block(
    x,
    x_strides,
    y,
    y_strides,
    cos,
    cos_strides,
    sin,
    sin_strides,
    batch,
    token_block,
    head_block,
    sequence,
    heads,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    CONJUGATE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    """Rotate one block of tokens and heads of x into y, which is x where IN_PLACE."""
    # Offsets are 64 bits wide from the first product on: any of them may pass 2**31 elements.
    token = token_block.to(tl.int64) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    head = head_block.to(tl.int64) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    lane = tl.arange(0, LANE_BLOCK).to(tl.int64)
    token_valid = token < sequence
    row_valid = (token_valid[:, None] & (head < heads)[None, :])[:, :, None]
    x_row = x + batch * x_strides[0]
    x_row += (token[:, None] * x_strides[1] + head[None, :] * x_strides[2])[:, :, None]
    y_row = y + batch * y_strides[0]
    y_row += (token[:, None] * y_strides[1] + head[None, :] * y_strides[2])[:, :, None]

    # The table is read once per token and shared by the heads of the block.
    table_valid = token_valid[:, None] & (lane < LANES)[None, :]
    cos_row = cos + batch * cos_strides[0] + token[:, None] * cos_strides[1]
    sin_row = sin + batch * sin_strides[0] + token[:, None] * sin_strides[1]
    c = tl.load(cos_row + lane[None, :] * cos_strides[2], mask=table_valid, other=0.0)[:, None, :]
    s = tl.load(sin_row + lane[None, :] * sin_strides[2], mask=table_valid, other=0.0)[:, None, :]

    if HALF_SPLIT:
        first = lane[None, None, :]
        second = first + LANES
        lane_valid = row_valid & (first < LANES)
        x0 = tl.load(x_row + first * x_strides[3], mask=lane_valid, other=0.0)
        x1 = tl.load(x_row + second * x_strides[3], mask=lane_valid, other=0.0)
    else:
        # Both members of a lane come in one contiguous read, which can then be 16 bytes wide per thread.
        channel = tl.arange(0, 2 * LANE_BLOCK).to(tl.int64)[None, None, :]
        channel_valid = row_valid & (channel < 2 * LANES)
        pairs = tl.load(x_row + channel * x_strides[3], mask=channel_valid, other=0.0)
        x0, x1 = tl.split(tl.reshape(pairs, (TOKEN_BLOCK, HEAD_BLOCK, LANE_BLOCK, 2)))

    x0 = x0.to(tl.float32)
    x1 = x1.to(tl.float32)
    # Negating the sine negates its products exactly, so the conjugate exchanges addition and subtraction.
    if CONJUGATE:
        y0 = x0 * c + x1 * s
        y1 = x1 * c - x0 * s
    else:
        y0 = x0 * c - x1 * s
        y1 = x1 * c + x0 * s
    y0 = y0.to(y.dtype.element_ty)
    y1 = y1.to(y.dtype.element_ty)

    if IN_PLACE:
        # The thread that writes an element need not be the one that read it, nor has one thread to read it once.
        tl.debug_barrier()
    if HALF_SPLIT:
        tl.store(y_row + first * y_strides[3], y0, mask=lane_valid)
        tl.store(y_row + second * y_strides[3], y1, mask=lane_valid)
    else:
        tl.store(y_row + channel * y_strides[3], tl.interleave(y0, y1), mask=channel_valid)

    if HEAD_DIM > 2 * LANES and not IN_PLACE:
        tail = 2 * LANES + tl.arange(0, TAIL_BLOCK).to(tl.int64)[None, None, :]
        tail_valid = row_valid & (tail < HEAD_DIM)
        moved = tl.load(x_row + tail * x_strides[3], mask=tail_valid)
        tl.store(y_row + tail * y_strides[3], moved, mask=tail_valid)


# Sizes are not specialised: a sequence of 1 or of a multiple of 16 needs no binary of its own.
@triton.jit(do_not_specialize=["sequence", "heads", "k_heads", "token_blocks", "head_blocks", "k_head_blocks"])
def rotation_kernel(
    x,
    y,
    k,
    k_rotated,
    cos,
    sin,
    sequence,
    heads,
    k_heads,
    token_blocks,
    head_blocks,
    k_head_blocks,
    x_stride_batch,
    x_stride_token,
    x_stride_head,
    x_stride_channel,
    y_stride_batch,
    y_stride_token,
    y_stride_head,
    y_stride_channel,
    k_stride_batch,
    k_stride_token,
    k_stride_head,
    k_stride_channel,
    k_rotated_stride_batch,
    k_rotated_stride_token,
    k_rotated_stride_head,
    k_rotated_stride_channel,
    cos_stride_batch,
    cos_stride_token,
    cos_stride_lane,
    sin_stride_batch,
    sin_stride_token,
    sin_stride_lane,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    CONJUGATE: tl.constexpr,
    PAIR: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    """Rotate x into y; with PAIR x and y are the queries, and k is rotated into k_rotated too.

    One program rotates one block. Programs next to one another have one batch and token block, so they share their
    rows of the table: first the head blocks of x, then those of k. Without PAIR the arguments of k are None.
    """
    program = tl.program_id(0)
    all_head_blocks = head_blocks + k_head_blocks if PAIR else head_blocks
    head_block = program % all_head_blocks
    token_block = program // all_head_blocks % token_blocks
    batch = (program // all_head_blocks // token_blocks).to(tl.int64)
    # One condition would not do: joined with a run-time one, a compile-time condition is a run-time one.
    if PAIR:  # noqa: SIM102
        if head_block >= head_blocks:
            rotate_block(
                k,
                (k_stride_batch, k_stride_token, k_stride_head, k_stride_channel),
                k_rotated,
                (k_rotated_stride_batch, k_rotated_stride_token, k_rotated_stride_head, k_rotated_stride_channel),
                cos,
                (cos_stride_batch, cos_stride_token, cos_stride_lane),
                sin,
                (sin_stride_batch, sin_stride_token, sin_stride_lane),
                batch,
                token_block,
                head_block - head_blocks,
                sequence,
                k_heads,
                HEAD_DIM,
                LANES,
                HALF_SPLIT,
                CONJUGATE,
                IN_PLACE,
                TOKEN_BLOCK,
                HEAD_BLOCK,
                LANE_BLOCK,
                TAIL_BLOCK,
            )
            return
    rotate_block(
        x,
        (x_stride_batch, x_stride_token, x_stride_head, x_stride_channel),
        y,
        (y_stride_batch, y_stride_token, y_stride_head, y_stride_channel),
        cos,
        (cos_stride_batch, cos_stride_token, cos_stride_lane),
        sin,
        (sin_stride_batch, sin_stride_token, sin_stride_lane),
        batch,
        token_block,
        head_block,
        sequence,
        heads,
        HEAD_DIM,
        LANES,
        HALF_SPLIT,
        CONJUGATE,
        IN_PLACE,
        TOKEN_BLOCK,
        HEAD_BLOCK,
        LANE_BLOCK,
        TAIL_BLOCK,
    )


INTERPRETED = not isinstance(rotation_kernel, JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when triton was imported."""
