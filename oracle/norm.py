"""RMS norm over a head: the value of one fixed order, and the interval of every order that an implementation may take.

The fixed order is that of our own kernels: an adjacent-pair tree over the squares zero-padded to the next power of
two, division by the number of channels, root and reciprocal correctly rounded, all in fp32.

The interval admits any order of the reduction. A sum of D non-negative terms, each a square rounded once or fused
into its addition, passes a term through at most D roundings, whatever the order: its relative error is at most
gamma(D) = D u / (1 - D u), with u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002,
sections 3.1 and 4.2). What follows may be approximate on a GPU: the division is within 2 ulp (``div.full.f32``), the
reciprocal root within 2 ulp as ``rsqrtf`` and within 3 as an approximate root and such a division (CUDA C++
Programming Guide, "Mathematical functions"; PTX ISA, ``div``, ``sqrt`` and ``rsqrt``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .floats import bits, from_key, key, round_double

UNIT_ROUNDOFF = 2.0**-24
_ULP = 2.0 * UNIT_ROUNDOFF
DIVISION_ULP = 2
RECIPROCAL_ROOT_ULP = 3
LEAST_EPS = 2.0**-126

# The bounds themselves are evaluated in fp64, whose errors over a few thousand channels stay below this.
_SLACK = 2.0**-40
LARGEST = (2.0 - 2.0**-24) * 2.0**127  # from here on a sum rounds to infinity in fp32


@dataclass(frozen=True)
class Norm:
    """The choices of an RMS norm.

    The factor of a channel is its weight plus ``weight_offset`` (1.0 where weights are stored around zero, 0.0 where
    they are stored as they are used). With ``round_norm`` the result is rounded to the activation dtype before it is
    rotated; without, fp32 goes into the rotation. Raises ValueError for an ``eps`` below the least normal fp32 number,
    with which a row of zeros has no finite reciprocal root.
    """

    eps: float = 1e-6
    weight_offset: float = 1.0
    round_norm: bool = True

    def __post_init__(self) -> None:
        if not LEAST_EPS <= self.eps < float("inf"):
            raise ValueError(f"eps must be finite and at least 2**-126, got {self.eps!r}")

    def factor(self, weight: Tensor) -> Tensor:
        """fp32 [D]: ``weight + weight_offset`` rounded to fp32, or the weight itself where the offset is zero."""
        return weight.float() + self.weight_offset if self.weight_offset else weight.float()

    def exact_factor(self, weight: Tensor) -> Tensor:
        """fp64 [D]: the factor before its rounding to fp32."""
        return weight.double() + self.weight_offset


def gamma(operations: int) -> float:
    """Higham's bound ``n u / (1 - n u)`` on the relative error of ``n`` successive fp32 roundings."""
    return operations * UNIT_ROUNDOFF / (1.0 - operations * UNIT_ROUNDOFF)


def tree_sum(terms: Tensor) -> Tensor:
    """fp32 sum over the last dimension by adjacent pairs, level by level, zero-padded to the next power of two."""
    count = terms.shape[-1]
    padded = 1 << max(0, count - 1).bit_length()
    level = torch.nn.functional.pad(terms, (0, padded - count))
    while level.shape[-1] > 1:
        level = level[..., 0::2] + level[..., 1::2]
    return level.squeeze(-1)


def strict_reciprocal_root(x: Tensor, eps: float) -> Tensor:
    """fp32 [..., 1]: the reciprocal root of ``x`` [..., D] in the fixed order, every operation correctly rounded.

    Division and root are made in fp64 and rounded, which is innocuous (Figueroa 1995) and the same on every device.
    """
    wide = x.float()
    total = tree_sum(wide * wide).unsqueeze(-1)
    mean = (total.double() / x.shape[-1]).float()
    root = (mean + torch.tensor(eps, dtype=torch.float32, device=x.device)).double().sqrt().float()
    return (1.0 / root.double()).float()


def strict_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """fp32 [..., D]: what the fixed order hands to the rotation, already rounded to x's dtype with ``round_norm``."""
    scaled = x.float() * strict_reciprocal_root(x, norm.eps) * norm.factor(weight)
    return scaled.to(x.dtype).float() if norm.round_norm else scaled


def reciprocal_root_bounds(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The least and greatest reciprocal root, fp64 [..., 1], that an admissible evaluation of ``x`` [..., D] may have.

    A row with an infinity has zero and one with a NaN has NaN. Where the sum may overflow fp32 the least is zero.
    """
    count = x.shape[-1]
    wide = x.double()
    total = (wide * wide).sum(-1, keepdim=True)
    underflow = count * 2.0**-150
    error = gamma(count) + _SLACK
    least, greatest = (total * (1 - error) - underflow).clamp(min=0), total * (1 + error) + underflow
    rounded_eps = torch.tensor(eps, dtype=torch.float32).item()
    division, sum_ = DIVISION_ULP * _ULP + _SLACK, UNIT_ROUNDOFF + _SLACK
    low_shifted = (least / count * (1 - division) + min(eps, rounded_eps)) * (1 - sum_)
    high_shifted = (greatest / count * (1 + division) + max(eps, rounded_eps)) * (1 + sum_)
    root = RECIPROCAL_ROOT_ULP * _ULP + _SLACK
    low, high = (1 - root) / high_shifted.sqrt(), (1 + root) / low_shifted.sqrt()
    return torch.where(greatest >= LARGEST, 0.0, low), high


def reciprocal_root_interval(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The fp32 numbers [..., 1] at the ends of :func:`reciprocal_root_bounds`, within them."""
    low, high = reciprocal_root_bounds(x, eps)
    return neighbours(low)[1], neighbours(high)[0]


def norm_interval(
    x: Tensor, weight: Tensor, norm: Norm, reciprocal_roots: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """fp32 [..., D], least and greatest: what may go into the rotation, given the ends of the root, fp32 [..., 1].

    The product is (x inv) f, x (inv f) or unrounded, the factor f rounded or not. Each is monotone in inv, and so are
    the roundings after it: the ends of inv give the ends of every form. A product that nothing rounds lies between
    two neighbours of fp32, and both are in. Ordered with -0 below +0.
    """
    factors = [norm.factor(weight).double()]
    if not torch.equal(norm.exact_factor(weight), factors[0]):
        factors.append(norm.exact_factor(weight))
    shape = x.shape
    every = [t.expand(shape).reshape(-1) for t in (x, *reciprocal_roots, *factors)]
    if x.dtype == torch.float32 or not norm.round_norm:
        low, high = _ends(every, norm.round_norm)
        return low.reshape(shape), high.reshape(shape)
    common, doubtful = _settled(*every[:4])
    low, high = (common.index_put((doubtful,), end) for end in _ends([t[doubtful] for t in every], norm.round_norm))
    return low.reshape(shape), high.reshape(shape)


def _settled(x: Tensor, low: Tensor, high: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The result in 16 bits, as fp32, where all forms agree, and the flat indices where they might not.

    A form rounds at most four times to fp32, this estimate likewise: where both ends of an interval wider than that
    round to one value, so does every form. Numbers near the subnormal ones of fp32, and NaN, are never settled.
    """
    scaled = x.float() * factor.float()
    inner, outer = scaled * low * (1 - 2.0**-20), scaled * high * (1 + 2.0**-20)
    least, greatest = inner.to(x.dtype), outer.to(x.dtype)
    safe = (outer.abs() >= 2.0**-100) | (x == 0) & (outer == 0)
    return greatest.float(), ((bits(least) != bits(greatest)) | ~safe).nonzero().flatten()


def _ends(every: list[Tensor], round_norm: bool) -> tuple[Tensor, Tensor]:
    """Least and greatest, fp32, of all forms at both ends, flat: of x, the ends of the root, and one or two factors."""
    x, *roots = every[:3]
    keys = [key(value) for root in roots for value in _products(x, root, every[3:], round_norm)]
    low = high = keys[0]
    for rank in keys[1:]:
        low, high = torch.minimum(low, rank), torch.maximum(high, rank)
    return from_key(low, torch.float32), from_key(high, torch.float32)


def _products(x: Tensor, root: Tensor, factors: list[Tensor], round_norm: bool) -> list[Tensor]:
    """Every form of ``x root f``, fp32, rounded to x's dtype on the way with ``round_norm``."""
    dtype, wide, factor = x.dtype, x.float(), factors[0].float()
    rounded = [wide * root * factor, wide * (root * factor)]
    # x root is exact in fp64. The product with f is rounded there; the values on both sides enclose the exact one.
    unrounded = [wide.double() * root.double() * f * side for f in factors for side in (1 - 2.0**-51, 1 + 2.0**-51)]
    if not round_norm:
        return rounded + [neighbour for v in unrounded for neighbour in neighbours(v)]
    values = [*rounded, *(v.float() for v in unrounded)]
    if dtype == torch.float32:
        return values
    return [v.to(dtype).float() for v in values] + [round_double(v, dtype).float() for v in unrounded]


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest fp32 number not above an fp64 number, and the least not below it."""
    narrow = x.float()
    rank, wide = key(narrow), narrow.double()
    return (
        torch.where(wide > x, from_key(rank - 1, torch.float32), narrow),
        torch.where(wide < x, from_key(rank + 1, torch.float32), narrow),
    )
