"""The Triton backend of the normalised rotation: one launch forward, no copy of an operand, no wait.

Importing this module imports triton, and fixes whether the kernels are compiled or interpreted.
"""

# Triton carries no type information.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .backends import require_launchable
from .launch_configuration import norm_configuration_for, norm_row_block
from .norm_operands import (
    PADDING_SLOT,
    NormSizes,
    check_axis_values,
    check_norm_gradients,
    check_norm_operands,
    rounded_to_float32,
)
from .norm_triton_backward_kernel import norm_rope_backward_kernel, sum_rows_kernel
from .norm_triton_kernel import norm_rope_gate_kernel
from .trace import CALLED_DIRECTLY, record_launch
from .triton_kernel import INTERPRETED
from .triton_rotation import MAX_PROGRAMS

SUMMED_ROWS = 64
"""The most rows that one program of the second kernel of the weights' gradients sums."""


def norm_rope_gate_triton(
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

    Raises:
        RuntimeError: the tensor is on a CPU and no interpreter was declared usable.
        ValueError: the launch would need more than 2**31 - 1 programs.
    """
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    check_axis_values(axis_map)
    require_launchable(INTERPRETED, q_gate.device)
    q_width, k_width = sizes.q_heads * sizes.head_dim, sizes.k_heads * sizes.head_dim
    q, k_rotated, gate_values = (
        torch.empty((sizes.tokens, width), dtype=q_gate.dtype, device=q_gate.device)
        for width in (q_width, k_width, q_width if gate else 0)
    )
    if sizes.tokens == 0 or q_width + k_width == 0:
        return q, k_rotated, gate_values
    block = triton.next_power_of_2(sizes.head_dim)
    configuration = norm_configuration_for(
        sizes.tokens, max(sizes.q_heads, sizes.k_heads), block, interpreted=INTERPRETED
    )
    token_blocks = -(-sizes.tokens // configuration.tokens)
    q_blocks, k_blocks = (-(-heads // configuration.heads) for heads in (sizes.q_heads, sizes.k_heads))
    programs = token_blocks * (q_blocks + k_blocks)
    _check_programs(programs, q_gate)
    arguments = (
        q_gate,
        k,
        q,
        k_rotated,
        gate_values if gate else None,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        axis_map,
        slots,
        sizes.tokens,
        sizes.q_heads,
        sizes.k_heads,
        q_blocks,
        k_blocks,
        sizes.positions,
        q_gate.stride(0),
        k.stride(0),
        *_table_strides(cos_sin_cache, positions, axis_map, slots),
        rounded_to_float32(eps),
        rounded_to_float32(weight_offset) if weight_offset else None,
        gate,
        axis_map is not None,
        slots is not None,
        PADDING_SLOT,
        sizes.head_dim,
        sizes.rotary_dim // 2,
        bool(weight_offset),
        round_norm,
        fma,
        configuration.tokens,
        configuration.heads,
        block,
        triton.next_power_of_2(sizes.rotary_dim),
        _alignment(sizes),
    )
    _launch(norm_rope_gate_kernel, (programs,), arguments, configuration.warps, q_gate.device)
    record_launch("qk_norm_rope_gate_triton", "triton", "forward", str(q_gate.device), configuration, reason)
    return q, k_rotated, gate_values


def norm_rope_gate_backward_triton(
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
    """The gradients of q_gate, k and the weights; those of the weights are empty without ``weight_gradients``.

    Raises:
        RuntimeError, ValueError: as in :func:`norm_rope_gate_triton`.
    """
    sizes = check_norm_operands(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, axis_map, slots, gate)
    check_norm_gradients(q_gradient, k_gradient, gate_gradient, q_gate, sizes, gate)
    check_axis_values(axis_map)
    require_launchable(INTERPRETED, q_gate.device)
    gradients, weight_sums = [], []
    for incoming, incoming_gate, x, weight, heads in (
        (q_gradient, gate_gradient if gate else None, q_gate, q_weight, sizes.q_heads),
        (k_gradient, None, k, k_weight, sizes.k_heads),
    ):
        gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = sizes.tokens * heads
        block = triton.next_power_of_2(sizes.head_dim)
        row_block, warps = norm_row_block(rows, block, interpreted=INTERPRETED)
        blocks = -(-rows // row_block)
        _check_programs(blocks, x)
        partial_sums = None
        if weight_gradients:
            partial_sums = torch.empty((blocks, sizes.head_dim), dtype=torch.float32, device=x.device)
        if rows:
            arguments = (
                incoming,
                incoming_gate,
                x,
                weight,
                cos_sin_cache,
                positions,
                axis_map,
                slots,
                gradient,
                partial_sums,
                sizes.tokens,
                heads,
                sizes.positions,
                *incoming.stride(),
                *((None, None) if incoming_gate is None else incoming_gate.stride()),
                x.stride(0),
                *_table_strides(cos_sin_cache, positions, axis_map, slots),
                rounded_to_float32(eps),
                rounded_to_float32(weight_offset) if weight_offset else None,
                incoming_gate is not None,
                axis_map is not None,
                slots is not None,
                PADDING_SLOT,
                sizes.head_dim,
                sizes.rotary_dim // 2,
                bool(weight_offset),
                fma,
                weight_gradients,
                row_block,
                block,
                _alignment(sizes),
            )
            _launch(norm_rope_backward_kernel, (blocks,), arguments, warps, x.device)
        gradients.append(gradient)
        weight_sums.append(weight.new_empty(0) if partial_sums is None else _summed(partial_sums, weight))
    if sizes.tokens and (sizes.q_heads or sizes.k_heads):
        operator = "qk_norm_rope_gate_backward_triton"
        record_launch(operator, "triton", "backward", str(q_gate.device), f"warps={warps}", reason)
    return gradients[0], gradients[1], weight_sums[0], weight_sums[1]


def _summed(sums: Tensor, weight: Tensor) -> Tensor:
    """The tree over the rows of ``sums``, SUMMED_ROWS or fewer at a time, in the weight's dtype."""
    if not sums.shape[0]:
        return torch.zeros_like(weight)
    head_dim = weight.shape[0]
    channels = min(32, triton.next_power_of_2(head_dim))
    while True:
        rows = sums.shape[0]
        row_block = min(SUMMED_ROWS, triton.next_power_of_2(rows))
        blocks = -(-rows // row_block)
        total = torch.empty(
            (blocks, head_dim), dtype=weight.dtype if blocks == 1 else torch.float32, device=sums.device
        )
        grid = (blocks, -(-head_dim // channels))
        _launch(sum_rows_kernel, grid, (sums, total, rows, head_dim, row_block, channels), 4, sums.device)
        if blocks == 1:
            return total.flatten()
        sums = total


def _table_strides(
    cos_sin_cache: Tensor, positions: Tensor, axis_map: Tensor | None, slots: Tensor | None
) -> tuple[int | None, ...]:
    # What is None is no argument of the machine code.
    return (
        cos_sin_cache.stride(0),
        positions.stride(0) if axis_map is not None else None,
        positions.stride(-1),
        None if axis_map is None else axis_map.stride(0),
        None if slots is None else slots.stride(0),
    )


def _alignment(sizes: NormSizes) -> int:
    """The most channels, a power of two up to 16, of which the half of the rotated ones is a multiple."""
    lanes = sizes.rotary_dim // 2
    return min(16, lanes & -lanes)


def _check_programs(programs: int, x: Tensor) -> None:
    if programs > MAX_PROGRAMS:
        raise ValueError(f"q_gate: shape {list(x.shape)} needs {programs} programs, a grid has {MAX_PROGRAMS}")


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], warps: int, device: torch.device) -> None:
    # Contraction would lose the rounding of a product; without it ptxas gets --fmad=false.
    if INTERPRETED:
        kernel[grid](*arguments)
    else:
        with torch.cuda.device(device):
            kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False)
