"""What the operands of the normalised rotation must be; every backend and the fake implementation ask the same."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .operands import ACTIVATION_DTYPES, MAX_HEAD_DIM

INTEGER_DTYPES = (torch.int32, torch.int64)
PADDING_SLOT = -1
"""The slot of a token that is padding."""


@dataclass(frozen=True)
class NormSizes:
    """Sizes of one checked call."""

    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    positions: int
    """Rows of the table."""


def check_norm_operands(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    axis_map: Tensor | None,
    slots: Tensor | None,
    gate: bool,
) -> NormSizes:
    """Refuse operands that no backend can take, naming the argument; values are not looked at.

    Operands as in :func:`ropecheck.kernels.qk_norm_rope_gate`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a rank, size, stride or device is not supported.
    """
    head_dim = _check_weights(q_gate, q_weight, k_weight)
    q_heads = _check_activation("q_gate", q_gate, head_dim, 2 if gate else 1)
    k_heads = _check_activation("k", k, head_dim, 1)
    if k.dtype != q_gate.dtype:
        raise TypeError(f"k: expected the dtype of q_gate, {q_gate.dtype}, got {k.dtype}")
    tokens = q_gate.shape[0]
    if k.shape[0] != tokens:
        raise ValueError(f"k: expected {tokens} tokens, as many as q_gate has, got {k.shape[0]}")
    rotary_dim = _check_cache(cos_sin_cache, head_dim)
    _check_positions(positions, axis_map, tokens, rotary_dim // 2)
    if slots is not None:
        _check_integers("slots", slots)
        if slots.ndim != 1 or slots.shape[0] != tokens:
            raise ValueError(f"slots: expected [{tokens}], one for each token, got shape {list(slots.shape)}")
    for name, operand in (
        ("k", k),
        ("q_weight", q_weight),
        ("k_weight", k_weight),
        ("cos_sin_cache", cos_sin_cache),
        ("positions", positions),
        ("axis_map", axis_map),
        ("slots", slots),
    ):
        if operand is not None and operand.device != q_gate.device:
            raise ValueError(f"{name}: expected the device of q_gate, {q_gate.device}, got {operand.device}")
    return NormSizes(tokens, q_heads, k_heads, head_dim, rotary_dim, cos_sin_cache.shape[0])


def check_norm_gradients(
    q_gradient: Tensor, k_gradient: Tensor, gate_gradient: Tensor, q_gate: Tensor, sizes: NormSizes, gate: bool
) -> None:
    """Refuse incoming gradients that are unlike the outputs of the forward; strides are free.

    Raises:
        TypeError: another dtype than that of q_gate.
        ValueError: another size or device.
    """
    q_width, k_width = sizes.q_heads * sizes.head_dim, sizes.k_heads * sizes.head_dim
    for name, gradient, width in (
        ("q_gradient", q_gradient, q_width),
        ("k_gradient", k_gradient, k_width),
        ("gate_gradient", gate_gradient, q_width if gate else 0),
    ):
        if gradient.ndim != 2 or gradient.shape[0] != sizes.tokens or gradient.shape[1] != width:
            raise ValueError(f"{name}: expected [{sizes.tokens}, {width}], got shape {list(gradient.shape)}")
        if gradient.dtype != q_gate.dtype:
            raise TypeError(f"{name}: expected the dtype of q_gate, {q_gate.dtype}, got {gradient.dtype}")
        if gradient.device != q_gate.device:
            raise ValueError(f"{name}: expected the device of q_gate, {q_gate.device}, got {gradient.device}")


def check_numbers(eps: float, weight_offset: float, **choices: bool) -> None:
    """Refuse what is no usable number, and ``choices`` that are no truth values.

    Raises:
        TypeError: neither an int nor a float; a choice that is no bool.
        ValueError: beyond fp32, or a negative ``eps``.
    """
    for name, choice in choices.items():
        if not isinstance(choice, bool):
            raise TypeError(f"{name}: expected True or False, got {choice!r}")
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected an int or a float, got {type(value).__name__}")
        # Compared, since a program traced with numbers that change cannot ask math.isfinite.
        if not -_LARGEST <= value <= _LARGEST:
            raise ValueError(f"{name}: expected a number that fp32 holds, got {value}")
    if eps < 0:
        raise ValueError(f"eps: expected a number that is not negative, got {eps}")


def check_axis_values(axis_map: Tensor | None) -> None:
    """Refuse an axis map with a value outside 0..2, where its values can be read.

    Reading the values of a CUDA tensor waits for the device, so each is read once, and again only after it was
    written to; nothing is read while a CUDA Graph is captured or a program is traced. The kernels treat a lane of
    such an axis as one whose position is out of range.

    Raises:
        ValueError: a value outside 0..2.
    """
    if axis_map is None or torch.compiler.is_compiling() or isinstance(axis_map, FakeTensor) or axis_map.is_meta:
        return
    if axis_map.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    # An inference tensor has no version, which would say whether it was written to.
    version = -1 if axis_map.is_inference() else axis_map._version
    if axis_map in _checked_axis_maps and _checked_axis_maps[axis_map] == version:
        return
    lowest, highest = (int(value) for value in torch.aminmax(axis_map))
    if lowest < 0 or highest > 2:
        raise ValueError(f"axis_map: expected values 0, 1 or 2, got values from {lowest} to {highest}")
    _checked_axis_maps[axis_map] = version


_LARGEST = torch.finfo(torch.float32).max
_checked_axis_maps = WeakTensorKeyDictionary()


def rounded_to_float32(value: float) -> float:
    """The fp32 nearest to ``value``."""
    return ctypes.c_float(value).value


def _check_weights(q_gate: Tensor, q_weight: Tensor, k_weight: Tensor) -> int:
    if q_gate.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"q_gate: expected float32, float16 or bfloat16, got {q_gate.dtype}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.ndim != 1:
            raise ValueError(f"{name}: expected one dimension [D], got shape {list(weight.shape)}")
        if weight.dtype not in (q_gate.dtype, torch.float32):
            raise TypeError(f"{name}: expected the dtype of q_gate, {q_gate.dtype}, or float32, got {weight.dtype}")
        if weight.shape[0] > 1 and weight.stride(0) != 1:
            raise ValueError(f"{name}: expected elements next to one another, got stride {weight.stride(0)}")
    head_dim = q_weight.shape[0]
    if not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q_weight: expected a head dimension from 2 to {MAX_HEAD_DIM}, got {head_dim}")
    if k_weight.shape[0] != head_dim:
        raise ValueError(f"k_weight: expected {head_dim} channels, as many as q_weight has, got {k_weight.shape[0]}")
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(f"k_weight: expected the dtype of q_weight, {q_weight.dtype}, got {k_weight.dtype}")
    return head_dim


def _check_activation(name: str, x: Tensor, head_dim: int, parts: int) -> int:
    """The number of heads of x [T, heads * parts * D]."""
    if x.ndim != 2:
        raise ValueError(f"{name}: expected two dimensions [T, channels of all heads], got shape {list(x.shape)}")
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {x.dtype}")
    if x.shape[1] % (parts * head_dim):
        each = "of a query and a gate" if parts == 2 else "of a head"
        raise ValueError(f"{name}: expected a multiple of {parts * head_dim} channels {each}, got {x.shape[1]}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: expected channels next to one another, got channel stride {x.stride(1)}")
    return x.shape[1] // (parts * head_dim)


def _check_cache(cos_sin_cache: Tensor, head_dim: int) -> int:
    name = "cos_sin_cache"
    if cos_sin_cache.ndim != 2:
        raise ValueError(f"{name}: expected two dimensions [N, R], got shape {list(cos_sin_cache.shape)}")
    if cos_sin_cache.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, got {cos_sin_cache.dtype}")
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"{name}: expected an even number of columns R, at least 2, got {rotary_dim}")
    if rotary_dim > head_dim:
        raise ValueError(f"{name}: expected at most {head_dim} columns, the head dimension, got {rotary_dim}")
    if cos_sin_cache.stride(1) != 1:
        raise ValueError(f"{name}: expected columns next to one another, got column stride {cos_sin_cache.stride(1)}")
    return rotary_dim


def _check_positions(positions: Tensor, axis_map: Tensor | None, tokens: int, lanes: int) -> None:
    _check_integers("positions", positions)
    if positions.ndim not in (1, 2) or (positions.ndim == 2 and positions.shape[0] != 3):
        raise ValueError(f"positions: expected [T] or [3, T], got shape {list(positions.shape)}")
    if positions.shape[-1] != tokens:
        raise ValueError(f"positions: expected {tokens}, one for each token, got {positions.shape[-1]}")
    if axis_map is None:
        if positions.ndim == 2:
            raise ValueError("axis_map: expected one, since positions has three rows, got None")
        return
    if positions.ndim == 1:
        raise ValueError("axis_map: expected None, since positions has one row, got a tensor")
    _check_integers("axis_map", axis_map)
    if axis_map.ndim != 1 or axis_map.shape[0] != lanes:
        raise ValueError(f"axis_map: expected [{lanes}], one for each lane, got shape {list(axis_map.shape)}")


def _check_integers(name: str, operand: Tensor) -> None:
    if operand.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {operand.dtype}")
