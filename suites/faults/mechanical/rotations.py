"""Right rotations in plain torch operations, of which broken kernels are made: fast, with nothing of the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image and gptj: fp32, one rounding. x [.., S, H, D], tables [.., S, R / 2]."""
    width = 2 * cos.shape[-1]
    c, s = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    x0, x1 = x[..., 0:width:2].float(), x[..., 1:width:2].float()
    turned = torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((turned, x[..., width:]), dim=-1)


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for neox: fp32, one rounding."""
    width, lanes = 2 * cos.shape[-1], cos.shape[-1]
    c, s = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    x0, x1 = x[..., :lanes].float(), x[..., lanes:width].float()
    return torch.cat(((x0 * c - x1 * s).to(x.dtype), (x1 * c + x0 * s).to(x.dtype), x[..., width:]), dim=-1)


def adjacent_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(gradient, cos, -sin)


def half_split_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half_split(gradient, cos, -sin)


def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Right for a pair of qwen-image."""
    return adjacent(q, cos, sin), adjacent(k, cos, sin)


def both_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return both(q, k, cos, -sin)


def gathered(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """Right for neox in family rotate_qk: q [T, Hq, D], k [T, Hk, D]."""
    cos, sin = cos_sin_cache[positions.long()].chunk(2, dim=-1)
    return half_split(q, cos, sin), half_split(k, cos, sin)


def gathered_back(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    cos, sin = cos_sin_cache[positions.long()].chunk(2, dim=-1)
    return half_split(q, cos, -sin), half_split(k, cos, -sin)


def memory(t: Tensor) -> Tensor:
    """All elements of the storage behind ``t``, as a kernel that has its address could reach them."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())


def read_as(t: Tensor, strides: tuple[int, ...], offset: int | None = None) -> Tensor:
    """``t`` as a kernel reads it that takes other ``strides``: a copy, zero where that leaves the storage."""
    whole = memory(t)
    index = torch.full(t.shape, int(t.storage_offset() if offset is None else offset))
    for dimension, (size, stride) in enumerate(zip(t.shape, strides, strict=True)):
        index += (torch.arange(size) * stride).view(-1, *(1,) * (t.dim() - dimension - 1))
    inside = (index >= 0) & (index < len(whole))
    values = whole[index.clamp(0, max(0, len(whole) - 1))] if len(whole) else torch.zeros(t.shape, dtype=t.dtype)
    return torch.where(inside, values, torch.zeros_like(values))


def dense_strides(t: Tensor) -> tuple[int, ...]:
    """The strides of a contiguous tensor of the shape of ``t``."""
    return tuple(torch.empty(t.shape, device="meta").stride())
