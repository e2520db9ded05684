"""The Triton backend of the rotation: one launch, any strides, no copy of the input.

Importing this module imports triton, and fixes whether the kernel is compiled or interpreted.
"""

# Triton carries no type information.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .backends import require_launchable
from .launch_configuration import configuration_for
from .operands import check_in_place, check_operands, check_pair_operands
from .trace import CALLED_DIRECTLY, record_launch
from .triton_kernel import INTERPRETED, rotation_kernel

MAX_PROGRAMS = 2**31 - 1
"""CUDA's limit of the first grid dimension; the other two end at 65,535, so the grid has one."""


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
    _launch("multi_axis_rope_triton", [(x, y)], cos, sin, half_split, conjugate, direction, reason)
    return y


def rotate_pair_triton(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the table; operands as in :func:`ropecheck.kernels.multi_axis_rope_pair`.

    Raises:
        RuntimeError, ValueError: as in :func:`rotate_triton`.
    """
    check_pair_operands(q, k, cos, sin)
    require_launchable(INTERPRETED, q.device)
    q_rotated, k_rotated = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    moves = [(q, q_rotated), (k, k_rotated)]
    _launch("multi_axis_rope_pair_triton", moves, cos, sin, half_split, conjugate, direction, reason)
    return q_rotated, k_rotated


def rotate_pair_triton_in_place(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str = "forward",
    reason: str = CALLED_DIRECTLY,
) -> None:
    """Rotate q and k within their memory; operands as in :func:`ropecheck.kernels.multi_axis_rope_pair`.

    Raises:
        RuntimeError, ValueError: as in :func:`rotate_triton`.
    """
    check_pair_operands(q, k, cos, sin)
    check_in_place(q, k)
    require_launchable(INTERPRETED, q.device)
    moves = [(q, q), (k, k)]
    _launch("multi_axis_rope_pair_triton_", moves, cos, sin, half_split, conjugate, direction, reason)


def _launch(
    operator: str,
    moves: list[tuple[Tensor, Tensor]],
    cos: Tensor,
    sin: Tensor,
    half_split: bool,
    conjugate: bool,
    direction: str,
    reason: str,
) -> None:
    """Rotate each source of ``moves`` into its target, at most two, in one launch; nothing where all are empty."""
    moves = [(source, target) for source, target in moves if source.numel()]
    if not moves:
        return
    (x, y), *second = moves
    batch, sequence, _, head_dim = x.shape
    lanes = cos.shape[-1]
    heads = [source.shape[2] for source, _ in moves]
    configuration = configuration_for(sequence, max(heads), head_dim, interpreted=INTERPRETED)
    token_blocks = -(-sequence // configuration.tokens)
    head_blocks = [-(-count // configuration.heads) for count in heads]
    programs = batch * token_blocks * sum(head_blocks)
    if programs > MAX_PROGRAMS:
        raise ValueError(f"x: shape {list(x.shape)} needs {programs} programs, a grid has {MAX_PROGRAMS}")
    # What is None is no argument of the machine code.
    k, k_rotated = second[0] if second else (None, None)
    no_strides = (None,) * 4
    per_sample = cos.ndim == 3
    arguments = (
        x,
        y,
        k,
        k_rotated,
        cos,
        sin,
        sequence,
        heads[0],
        heads[1] if second else None,
        token_blocks,
        head_blocks[0],
        head_blocks[1] if second else None,
        *x.stride(),
        *y.stride(),
        *(no_strides if k is None else k.stride()),
        *(no_strides if k_rotated is None else k_rotated.stride()),
        cos.stride(0) if per_sample else 0,
        *cos.stride()[-2:],
        sin.stride(0) if per_sample else 0,
        *sin.stride()[-2:],
        head_dim,
        lanes,
        half_split,
        conjugate,
        k is not None,
        y is x,
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
    record_launch(operator, "triton", direction, str(x.device), configuration, reason)
