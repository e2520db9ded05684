"""The fused contract itself: RMS norm of a head, a rounding, the rotation of its first channels, and their derivative.

What is written here is the fixed order that a claim of ``strict`` is held to. What an implementation in another order
may return is in :mod:`ropecheck.oracle.fused_sets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .floats import fma32
from .norm import Norm, strict_norm, strict_reciprocal_root, tree_sum


@dataclass(frozen=True)
class NormRotation:
    """One fused call on q or on k: the oracle's side of a family ``norm_rotate_gate`` call.

    ``x`` is [T, H, D], ``weight`` [D] of x's dtype or fp32, ``cos`` and ``sin`` [T, R / 2] the rows that the tokens
    read (:func:`gathered_tables`), fp32 or exact in it. Pairs are half-split; channels from R on are normalised only.
    ``fma`` says which sums are strict. Every channel of an ``out_of_range`` token (bool [T]) is NaN; a ``padding``
    token is neither read nor written. Raises ValueError for shapes that do not fit.
    """

    x: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    norm: Norm = field(default_factory=Norm)
    fma: bool = False
    out_of_range: Tensor | None = None
    padding: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.dim() != 3:
            raise ValueError(f"x must be [T, H, D], not {list(self.x.shape)}")
        tokens, _, width = self.x.shape
        if self.weight.shape != (width,):
            raise ValueError(f"weight must be [{width}] like the last dimension of x, not {list(self.weight.shape)}")
        if self.cos.shape != self.sin.shape or self.cos.dim() != 2 or self.cos.shape[0] != tokens:
            shapes = f"{list(self.cos.shape)} and {list(self.sin.shape)}"
            raise ValueError(f"cos and sin must be [{tokens}, R / 2] with a row for each token of x, not {shapes}")
        if not 2 <= self.rotary_dim <= width:
            raise ValueError(f"cos must have R / 2 columns with 2 <= R <= D = {width}, not {self.cos.shape[-1]}")
        for name, mask in (("out_of_range", self.out_of_range), ("padding", self.padding)):
            if mask is not None and (mask.dtype != torch.bool or mask.shape != (tokens,)):
                raise ValueError(f"{name} must be bool [{tokens}], not {mask.dtype} {list(mask.shape)}")

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]

    @property
    def skipped(self) -> Tensor:
        """bool [T]: tokens that are neither read nor written."""
        none = torch.zeros(self.x.shape[0], dtype=torch.bool, device=self.x.device)
        return none if self.padding is None else self.padding

    @property
    def poisoned(self) -> Tensor:
        """bool [T]: tokens whose outputs, and gradients, are NaN."""
        skipped = self.skipped
        return torch.zeros_like(skipped) if self.out_of_range is None else self.out_of_range & ~skipped

    @property
    def judged(self) -> Tensor:
        """int64: the tokens that are neither."""
        return (~self.skipped & ~self.poisoned).nonzero().flatten()

    def at(self, tokens: Tensor) -> NormRotation:
        """The call on the tokens of an int64 index alone, taken as neither out of range nor padding."""
        at = {name: getattr(self, name)[tokens] for name in ("x", "cos", "sin")}
        return replace(self, **at, out_of_range=None, padding=None)


def gathered_tables(
    cos_sin_cache: Tensor, positions: Tensor, axis_map: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(cos, sin, out of range): [T, R / 2] twice and bool [T], of a cache [N, R] and ``positions`` [T] or [3, T].

    Lane ``l`` reads row ``axis_map[l]`` of three. A token is out of range where a row that some lane reads leaves the
    cache; its tables are NaN. Raises ValueError unless a map is given exactly for three rows, one entry a lane.
    """
    lanes = cos_sin_cache.shape[-1] // 2
    if (positions.dim() == 2) != (axis_map is not None):
        raise ValueError("axis_map must be given with positions of three rows, and only with them")
    if axis_map is None:
        rows = positions.long()[:, None].expand(-1, lanes)
    else:
        if len(axis_map) != lanes or not set(axis_map) <= set(range(positions.shape[0])):
            raise ValueError(f"axis_map must have {lanes} entries from 0 to {positions.shape[0] - 1}, got {axis_map}")
        rows = positions.long()[list(axis_map)].T
    outside = ((rows < 0) | (rows >= cos_sin_cache.shape[0])).any(-1)
    lane = torch.arange(lanes, device=rows.device)
    inside = torch.where(outside[:, None], 0, rows)
    cos, sin = (cos_sin_cache[inside, lane + offset] for offset in (0, lanes))
    cos[outside], sin[outside] = float("nan"), float("nan")
    return cos, sin, outside


def strict_fused(rotation: NormRotation) -> Tensor:
    """[T, H, D]: the contract's own bytes. Out-of-range tokens are NaN; padding is zero here and means nothing."""
    x, lanes = rotation.x, rotation.rotary_dim // 2
    y = strict_norm(x, rotation.weight, rotation.norm)
    a, b = y[..., :lanes], y[..., lanes : 2 * lanes]
    c, s = _tables(rotation)
    if rotation.fma:
        first, second = fma32(a, c, -(b * s)), fma32(b, c, a * s)
    else:
        first, second = a * c - b * s, b * c + a * s
    out = torch.cat((first, second, y[..., 2 * lanes :]), dim=-1).to(x.dtype)
    out[rotation.poisoned] = float("nan")
    out[rotation.skipped] = 0.0
    return out


def strict_fused_vjp(rotation: NormRotation, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of x [T, H, D], gradient of the weight [D]) in the fixed order, for ``gradient`` like x.

    Straight through at rounding points. Padding has a zero gradient and adds nothing to the weight's; an out-of-range
    token's is NaN, and so is the weight's then. The weight's gradient is an adjacent-pair tree over the rows
    (token, head), zero-padded to the next power of two. Raises ValueError where ``gradient`` is not like x.
    """
    x = rotation.x
    turned = turned_back(rotation, gradient)
    root = strict_reciprocal_root(x, rotation.norm.eps)
    xhat = x.float() * root
    h = turned * rotation.norm.factor(rotation.weight)
    mean = (tree_sum(h * xhat).unsqueeze(-1).double() / x.shape[-1]).float()
    of_x = (root * (h - xhat * mean)).to(x.dtype)
    of_x[rotation.skipped] = 0.0
    terms = (turned * xhat).masked_fill(rotation.skipped[:, None, None], 0.0)
    of_weight = tree_sum(terms.reshape(-1, x.shape[-1]).T)
    return of_x, of_weight.to(rotation.weight.dtype)


def turned_back(rotation: NormRotation, gradient: Tensor) -> Tensor:
    """fp32 [T, H, D]: the gradient of the normalised channels in the fixed order; NaN for out-of-range tokens.

    Raises ValueError where ``gradient`` is not of x's shape and dtype.
    """
    if gradient.shape != rotation.x.shape or gradient.dtype != rotation.x.dtype:
        raise ValueError(
            f"gradient must be {rotation.x.dtype} {tuple(rotation.x.shape)} like x, "
            f"not {gradient.dtype} {tuple(gradient.shape)}"
        )
    lanes = rotation.rotary_dim // 2
    g = gradient.float()
    first, second = g[..., :lanes], g[..., lanes : 2 * lanes]
    c, s = _tables(rotation)
    if rotation.fma:
        turned = fma32(first, c, second * s), fma32(second, c, -(first * s))
    else:
        turned = first * c + second * s, second * c - first * s
    whole = torch.cat((*turned, g[..., 2 * lanes :]), dim=-1)
    whole[rotation.poisoned] = float("nan")
    return whole


def _tables(rotation: NormRotation) -> tuple[Tensor, Tensor]:
    """fp32 [T, H, R / 2] twice, the same for every head."""
    heads = rotation.x.shape[1]
    c, s = (t.float()[:, None].expand(-1, heads, -1) for t in (rotation.cos, rotation.sin))
    return c, s
