"""What an implementation of the fused contract may return as gradients, whatever the order of its reductions.

With h = f R^T g, xhat = x inv and m = mean(h xhat): the gradient of x is inv (h - xhat m), of the weight the sum of
R^T g xhat over tokens and heads; straight through at rounding points. Both are sums of exact products, so that their
bounds follow by counting roundings: a term that passes through at most n of them is off by gamma(n) times the sum of
its parts' magnitudes (Higham 2002, section 3.1), and the reciprocal root's interval enters once for each factor inv.
The counts admit the usual rearrangements (inv h - inv^3 x mean(h x), multiplication with 1 / D, fused additions).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .admissible import SEPARATE, AdmissibleSet
from .floats import format_of, key, round_double
from .fused import NormRotation, strict_fused_vjp, turned_back
from .norm import gamma, reciprocal_root_bounds, strict_reciprocal_root

# Products and a sum of the rotation, a factor, the product with it, the subtraction, the product with inv.
_ROUNDINGS_OF_H = 6
# Those of h up to its product, three of xhat and its products, four for the division, five of rearrangements, and the
# last two. The additions of the reduction come on top.
_ROUNDINGS_OF_MEAN = 17
_ROUNDINGS_OF_WEIGHT = 8
_NEAR_OVERFLOW = 2.0**126


@dataclass(frozen=True)
class _Parts:
    """fp64 parts of the gradient: G and what its summands' magnitudes sum to, and the reciprocal root's interval."""

    turned: Tensor
    size: Tensor
    xhat: Tensor
    root: Tensor
    spread: Tensor


def gradient_set(rotation: NormRotation, gradient: Tensor) -> AdmissibleSet:
    """The set of x's gradient [T, H, D]; out-of-range and padding tokens as if they were none.

    A row with a NaN in x or ``gradient`` is NaN throughout. A row with an infinity, or whose numbers may overflow
    fp32 on the way, depends on the order in class as well as in value: everything is admitted there.
    """
    x, parts = rotation.x, _parts(rotation, gradient)
    width = x.shape[-1]
    factor = rotation.norm.exact_factor(rotation.weight)
    h, size = parts.turned * factor, parts.size * factor.abs()
    mean, mean_size = (h * parts.xhat).mean(-1, keepdim=True), (size * parts.xhat.abs()).mean(-1, keepdim=True)
    wider, scale = 1 + parts.spread, parts.root * parts.xhat.abs()
    of_h = parts.root * (gamma(_ROUNDINGS_OF_H) * size * wider + parts.spread * h.abs())
    of_mean = scale * (gamma(width + _ROUNDINGS_OF_MEAN) * mean_size * wider**3 + (wider**3 - 1) * mean.abs())
    # Underflow adds at most 2^-149 at each step, times what is multiplied with it later.
    underflow = 2.0**-145 * (1 + width) * (1 + factor.abs().amax()) * (1 + parts.root) ** 3
    # Rearranged, the root's third power is multiplied with x and the mean of h x.
    wide = x.double().abs()
    of_power = 2.0**-147 * wide * (size * wide).mean(-1, keepdim=True)
    low, high = _ends(parts.root * (h - parts.xhat * mean), of_h + of_mean + underflow + of_power, x.dtype)
    undefined = (x.isnan() | gradient.isnan()).any(-1, keepdim=True)
    peak = torch.maximum(size, (1 + parts.root) * (1 + parts.xhat.abs()) * mean_size * width)
    # A reciprocal root that may be zero is that of squares that may overflow.
    loose = ~undefined & (~(peak < _NEAR_OVERFLOW).all(-1, keepdim=True) | ~(parts.spread < 1))
    limit = format_of(x.dtype).infinity_key
    low = torch.where(loose, -limit, torch.where(undefined, limit, low)).to(low.dtype)
    high = torch.where(loose, limit - 1, torch.where(undefined, -limit, high)).to(high.dtype)
    strict = strict_fused_vjp(rotation, gradient)[0]
    minus, plus = loose | (low == -1 - limit), loose | (high == limit)
    nan = (loose | undefined).expand_as(plus)
    return AdmissibleSet({SEPARATE: strict}, low, high, (minus, plus, nan))


def weight_gradient_set(rotation: NormRotation, gradient: Tensor, blocks: Iterable[Tensor]) -> AdmissibleSet:
    """The set of the weight's gradient, [1, 1, D], over the tokens of ``blocks`` (int64 indices) together.

    Where a row is NaN, infinite or may overflow fp32, everything is admitted. The bound grows with the number of rows
    and is of use at few tokens; :func:`exact_weight_gradient` judges at many.
    """
    dtype, rows = rotation.weight.dtype, rotation.x.shape[0] * rotation.x.shape[1]
    overflows = False
    centre, reach, underflow = (torch.zeros_like(rotation.weight, dtype=torch.float64)[None, None] for _ in range(3))
    for tokens in blocks:
        parts = _parts(rotation.at(tokens), gradient[tokens])
        size = parts.size * parts.xhat.abs()
        bound = gamma(rows + _ROUNDINGS_OF_WEIGHT) * size * (1 + parts.spread)
        centre += (parts.turned * parts.xhat).sum((0, 1))
        reach += (bound + parts.spread * (parts.turned * parts.xhat).abs()).sum((0, 1))
        overflows |= not bool((parts.spread < 1).all())
        underflow += (2.0**-146 * (1 + parts.xhat.abs()) * (1 + parts.root)).sum((0, 1))
    strict = strict_fused_vjp(rotation, gradient)[1][None, None]
    low, high = _ends(centre, reach + underflow, dtype)
    loose = ~(centre.abs() + reach < _NEAR_OVERFLOW) | overflows
    limit = format_of(dtype).infinity_key
    low = torch.where(loose, -limit, low).to(low.dtype)
    high = torch.where(loose, limit - 1, high).to(high.dtype)
    return AdmissibleSet({SEPARATE: strict}, low, high, (loose | (low == -1 - limit), loose | (high == limit), loose))


def exact_weight_gradient(rotation: NormRotation, gradient: Tensor) -> Tensor:
    """[D], in the weight's dtype: the weight's gradient where it is the same in every order, to be compared by bytes.

    It is where every normalised channel and every turned gradient is an integer and their products sum to at most
    2^24 in magnitude: x = +-1024 with an eps that vanishes beside 2^20, a table of 0 and +-1, small integer gradients.
    Raises ValueError where that does not hold.
    """
    skipped = rotation.skipped[:, None, None]
    root = strict_reciprocal_root(rotation.x, rotation.norm.eps).double()
    wide = rotation.x.double()
    xhat = wide * root
    exact_root = (root * root * (wide * wide).mean(-1, keepdim=True) == 1) | skipped
    terms = (turned_back(rotation, gradient).double() * xhat).masked_fill(skipped, 0.0)
    whole = (xhat == xhat.round()) | skipped
    if not bool(exact_root.all() & whole.all() & (terms == terms.round()).all()):
        raise ValueError("x, table and gradient must make integers of every normalised channel and turned gradient")
    if bool((terms.abs().sum((0, 1)) > 2.0**24).any()):
        raise ValueError("gradient is too large: its products with the normalised channels sum to more than 2**24")
    return round_double(terms.sum((0, 1)), rotation.weight.dtype)


def _parts(rotation: NormRotation, gradient: Tensor) -> _Parts:
    lanes = rotation.rotary_dim // 2
    g = gradient.double()
    first, second = g[..., :lanes], g[..., lanes : 2 * lanes]
    c, s = rotation.cos.double()[:, None], rotation.sin.double()[:, None]
    turned = torch.cat((first * c + second * s, second * c - first * s, g[..., 2 * lanes :]), dim=-1)
    products = [(t * table).abs() for t in (first, second) for table in (c, s)]
    size = torch.cat((products[0] + products[3], products[2] + products[1], g[..., 2 * lanes :].abs()), dim=-1)
    wide = rotation.x.double()
    root = 1 / ((wide * wide).mean(-1, keepdim=True) + rotation.norm.eps).sqrt()
    low, high = reciprocal_root_bounds(rotation.x, rotation.norm.eps)
    spread = torch.maximum(1 - low / root, high / root - 1)
    return _Parts(turned, size, wide * root, root, spread)


def _ends(centre: Tensor, reach: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ordered integers of ``centre`` minus and plus ``reach``, rounded to ``dtype`` with and without a stop at fp32."""
    low, high = (
        [key(end.float().to(dtype)), key(round_double(end, dtype))] for end in (centre - reach, centre + reach)
    )
    least, greatest = torch.minimum(*low), torch.maximum(*high)
    # Autograd adds it onto zeros, as in the backward of a slice: -0 becomes +0.
    negative_zero = key(torch.tensor([-0.0], dtype=dtype, device=centre.device))
    return least, torch.where(greatest == negative_zero, greatest + 1, greatest)
