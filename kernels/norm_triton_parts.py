"""Device functions that the forward and the backward kernel of the normalised rotation share.

Channels lie side by side in blocks of P, the power of two that D is padded to. Importing this module imports triton.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernel import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _add(left, right):
    return left + right


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums [ROWS] of the rows of x [ROWS, COLUMNS]: neighbours are added, then neighbouring sums, and so on.

    A reduction of more than two elements would leave the order open. One of two is one addition, which the compiler
    makes of a shuffle; of ``tl.split`` it makes spills (seen with triton 3.6). The interpreter reduces one element
    after another, and in its ``tl.sum`` -0 and -0 are +0.
    """
    for level in tl.static_range(0, 31):
        if (COLUMNS >> level) > 1:
            pairs = tl.reshape(x, (ROWS, COLUMNS >> (level + 1), 2))
            if _INTERPRETED:
                left, right = tl.split(pairs)
                x = left + right
            else:
                x = tl.reduce(pairs, 2, _add)
    return tl.reshape(x, (ROWS,))


@triton.jit
def reciprocal_root(x, eps, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """1 / root(mean square + eps) [ROWS] of x [ROWS, BLOCK], fp32, each operation rounded to nearest."""
    total = tree_sum(x * x, ROWS, BLOCK)
    mean = tl.div_rn(total, tl.full((ROWS,), HEAD_DIM, tl.float32))
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def load_factor(weight, channel, valid, weight_offset, ADD_OFFSET: tl.constexpr):
    """The factor of each channel: the weight, or the weight plus an offset."""
    factor = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    if ADD_OFFSET:
        factor += weight_offset
    return factor


@triton.jit
def partner_of(channel, LANES: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The channel that each is turned with; those from 2 LANES on have none, and stand for themselves."""
    partner = tl.where(channel < LANES, channel + LANES, tl.where(channel < 2 * LANES, channel - LANES, channel))
    # Aligned groups of ALIGNMENT channels have partners side by side: known here, and not to the compiler.
    return tl.max_contiguous(tl.multiple_of(partner, ALIGNMENT), ALIGNMENT)


@triton.jit
def lane_of(channel, LANES: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The lane of each channel below 2 LANES."""
    lane = tl.where(channel < LANES, channel, channel - LANES)
    return tl.max_contiguous(tl.multiple_of(lane, ALIGNMENT), ALIGNMENT)


@triton.jit
def _outside_of_rows(axis, valid, time, height, width, cache_rows):
    """Whether a position that a lane reads is out of range [N]: by the rows that any ``valid`` lane reads, or all where
    one names none.

    A reduction over the lanes of each token would say the same, and the compiler would hold all of them in each thread.
    """
    # In each byte how many lanes, of 128 at most, read a row; in the last one how many read none.
    kind = tl.where((axis >= 0) & (axis <= 2), axis, 3).to(tl.int32)
    read = tl.sum(tl.where(valid, 1 << (8 * kind), 0), axis=0)
    outside = ((read & 0xFF) != 0) & ((time < 0) | (time >= cache_rows))
    outside |= ((read & 0xFF00) != 0) & ((height < 0) | (height >= cache_rows))
    outside |= ((read & 0xFF0000) != 0) & ((width < 0) | (width >= cache_rows))
    return outside | ((read >> 24) != 0)


@triton.jit
def load_turn(
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
    channel,
    LANES: tl.constexpr,
    MROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Cosine and sine [N, P] of the lane of each channel and token [N], and whether a token is out of range [N].

    Nothing is read for a lane whose position is out of range, nor for a token that is not valid.
    """
    rotated = channel < 2 * LANES
    lane = lane_of(channel, LANES, ALIGNMENT)
    first = positions + token * position_stride_token
    if MROPE:
        # The rows are read once per token, and chosen from per lane.
        axis = tl.load(axis_map + lane.to(tl.int64) * axis_stride, mask=rotated, other=0)
        second = first + position_stride_row
        time = tl.load(first, mask=token_valid, other=0)
        height = tl.load(second, mask=token_valid, other=0)
        width = tl.load(second + position_stride_row, mask=token_valid, other=0)
        outside = _outside_of_rows(axis, channel < LANES, time, height, width, cache_rows)
        axis = axis[None, :]
        position = tl.where(axis == 0, time[:, None], tl.where(axis == 1, height[:, None], width[:, None]))
        inside = (position >= 0) & (position < cache_rows) & (axis >= 0) & (axis <= 2)
    else:
        position = tl.load(first, mask=token_valid, other=0)
        outside = (position < 0) | (position >= cache_rows)
        position = position[:, None]
        inside = ~outside[:, None]
    valid = token_valid[:, None] & rotated[None, :] & inside
    row = cache + position.to(tl.int64) * cache_stride + lane[None, :]
    c = tl.load(row, mask=valid, other=0.0).to(tl.float32)
    s = tl.load(row + LANES, mask=valid, other=0.0).to(tl.float32)
    return c, s, outside


@triton.jit
def turn(own, partner, c, s, FMA: tl.constexpr):
    """own * c + partner * s, both products and the sum rounded; with FMA the first product is not."""
    if FMA:
        return tl.fma(own, tl.broadcast_to(c, own.shape), partner * s)
    return own * c + partner * s
