"""The Triton backend of the rotation: one launch, any strides, no copy of the input.

Importing this module imports triton, and fixes whether the kernel is compiled or interpreted.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from .backends import require_launchable
from .launch_configuration import configuration_for
from .operands import check_operands
from .trace import CALLED_DIRECTLY, record_launch

MAX_PROGRAMS = 2**31 - 1
"""CUDA's limit of the first grid dimension; the other two end at 65,535, so the grid has one."""


# Sizes are not specialised: a sequence of 1 or of a multiple of 16 needs no binary of its own.
@triton.jit(do_not_specialize=["sequence", "heads", "token_blocks", "head_blocks"])
def rotation_kernel(
    x,
    cos,
    sin,
    y,
    sequence,
    heads,
    token_blocks,
    head_blocks,
    x_stride_batch,
    x_stride_token,
    x_stride_head,
    x_stride_channel,
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
    TOKEN_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    head_block = program % head_blocks
    token_block = program // head_blocks % token_blocks
    batch = (program // head_blocks // token_blocks).to(tl.int64)

    # Offsets are 64 bits wide from the first product on: any of them may pass 2**31 elements.
    token = token_block.to(tl.int64) * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK)
    head = head_block.to(tl.int64) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    lane = tl.arange(0, LANE_BLOCK).to(tl.int64)
    token_valid = token < sequence
    row_valid = (token_valid[:, None] & (head < heads)[None, :])[:, :, None]
    x_row = x + batch * x_stride_batch
    x_row += (token[:, None] * x_stride_token + head[None, :] * x_stride_head)[:, :, None]
    y_row = y + (((batch * sequence + token)[:, None] * heads + head[None, :]) * HEAD_DIM)[:, :, None]

    # The table is read once per token and shared by the heads of the block.
    table_valid = token_valid[:, None] & (lane < LANES)[None, :]
    cos_row = cos + batch * cos_stride_batch + token[:, None] * cos_stride_token
    sin_row = sin + batch * sin_stride_batch + token[:, None] * sin_stride_token
    c = tl.load(cos_row + lane[None, :] * cos_stride_lane, mask=table_valid, other=0.0)[:, None, :]
    s = tl.load(sin_row + lane[None, :] * sin_stride_lane, mask=table_valid, other=0.0)[:, None, :]

    if HALF_SPLIT:
        first = lane[None, None, :]
        second = first + LANES
        lane_valid = row_valid & (first < LANES)
        x0 = tl.load(x_row + first * x_stride_channel, mask=lane_valid, other=0.0)
        x1 = tl.load(x_row + second * x_stride_channel, mask=lane_valid, other=0.0)
    else:
        # Both members of a lane come in one contiguous read, which can then be 16 bytes wide per thread.
        channel = tl.arange(0, 2 * LANE_BLOCK).to(tl.int64)[None, None, :]
        channel_valid = row_valid & (channel < 2 * LANES)
        pairs = tl.load(x_row + channel * x_stride_channel, mask=channel_valid, other=0.0)
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

    if HALF_SPLIT:
        tl.store(y_row + first, y0, mask=lane_valid)
        tl.store(y_row + second, y1, mask=lane_valid)
    else:
        tl.store(y_row + channel, tl.interleave(y0, y1), mask=channel_valid)

    if HEAD_DIM > 2 * LANES:
        tail = 2 * LANES + tl.arange(0, TAIL_BLOCK).to(tl.int64)[None, None, :]
        tail_valid = row_valid & (tail < HEAD_DIM)
        tl.store(y_row + tail, tl.load(x_row + tail * x_stride_channel, mask=tail_valid), mask=tail_valid)


INTERPRETED = not isinstance(rotation_kernel, JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when triton was imported."""


def rotate_triton(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> Tensor:
    """Rotate x [B, S, H, D] by the table; operands as in :func:`ropecheck.kernels.multi_axis_rope`.

    Raises:
        RuntimeError: the tensor is on a CPU and no interpreter was declared usable.
        ValueError: the launch would need more than 2**31 - 1 programs.
    """
    check_operands(x, cos, sin)
    require_launchable(INTERPRETED, x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    batch, sequence, heads, head_dim = x.shape
    lanes = cos.shape[-1]
    configuration = configuration_for(sequence, heads, head_dim, interpreted=INTERPRETED)
    token_blocks = -(-sequence // configuration.tokens)
    head_blocks = -(-heads // configuration.heads)
    programs = batch * token_blocks * head_blocks
    if programs > MAX_PROGRAMS:
        raise ValueError(f"x: shape {list(x.shape)} needs {programs} programs, a grid has {MAX_PROGRAMS}")
    per_sample = cos.ndim == 3
    arguments = (
        x,
        cos,
        sin,
        y,
        sequence,
        heads,
        token_blocks,
        head_blocks,
        *x.stride(),
        cos.stride(0) if per_sample else 0,
        *cos.stride()[-2:],
        sin.stride(0) if per_sample else 0,
        *sin.stride()[-2:],
        head_dim,
        lanes,
        half_split,
        conjugate,
        configuration.tokens,
        configuration.heads,
        triton.next_power_of_2(lanes),
        triton.next_power_of_2(max(head_dim - 2 * lanes, 1)),
    )
    launcher = rotation_kernel[(programs,)]
    # Contraction would lose the rounding of a product; without it ptxas gets --fmad=false.
    if INTERPRETED:
        launcher(*arguments)
    else:
        with torch.cuda.device(x.device):
            launcher(*arguments, num_warps=configuration.warps, enable_fp_fusion=False)
    record_launch("multi_axis_rope_triton", "triton", direction, str(x.device), configuration, reason)
    return y
