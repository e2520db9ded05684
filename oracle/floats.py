"""Exact floating-point arithmetic on tensors: error-free sums, correct rounding, ordered integer views.

Everything here runs on CPU and GPU tensors alike and is exact; nothing has a tolerance. The proofs are standard:
Knuth's two-sum; Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd" (IEEE Trans. Computers 57, 2008), for rounding to odd before a narrower rounding to nearest;
Figueroa, "When is double rounding innocuous?" (1995), for narrow sums evaluated wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: significant bits, least normal exponent, and its integer view."""

    dtype: torch.dtype
    precision: int
    least_exponent: int
    integer: torch.dtype

    @property
    def magnitude_mask(self) -> int:
        return int(torch.iinfo(self.integer).max)

    @property
    def infinity_key(self) -> int:
        """:func:`key` of plus infinity; minus infinity's is ``-1 - infinity_key``."""
        return int(torch.tensor(float("inf"), dtype=self.dtype).view(self.integer))


BFLOAT16 = Format(torch.bfloat16, 8, -126, torch.int16)
FLOAT16 = Format(torch.float16, 11, -14, torch.int16)
FLOAT32 = Format(torch.float32, 24, -126, torch.int32)
FLOAT64 = Format(torch.float64, 53, -1022, torch.int64)
FORMATS = {f.dtype: f for f in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)}


def format_of(dtype: torch.dtype) -> Format:
    """The :class:`Format` of ``dtype``. Raises ValueError for one that is not a float of 16, 32 or 64 bits."""
    try:
        return FORMATS[dtype]
    except KeyError:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FORMATS))}, not {dtype}") from None


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x`` as signed integers of the same width."""
    return x.view(format_of(x.dtype).integer)


def key(x: Tensor) -> Tensor:
    """Integers that order as the values of ``x`` do, -0 just below +0; neighbours differ by one.

    Infinities stand one step outside the finite values, NaN outside the infinities on the side of its sign.
    """
    form = format_of(x.dtype)
    raw = x.view(form.integer)
    return raw ^ (raw >> (raw.element_size() * 8 - 1)).bitwise_and_(form.magnitude_mask)


def from_key(k: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`key`."""
    form = format_of(dtype)
    k = k.to(form.integer)
    return (k ^ ((k >> (k.element_size() * 8 - 1)) & form.magnitude_mask)).view(dtype)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise byte equality, where any NaN equals any NaN. Zeros of unlike sign differ."""
    return (bits(a) == bits(b)) | (a.isnan() & b.isnan())


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """int64 number of representable values from ``a`` to ``b``, of 16 or 32 bits; -0 and +0 are one apart."""
    return (key(a).long() - key(b).long()).abs()


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``(s, e)`` with ``s = RN(a + b)`` and ``s + e = a + b`` exactly, for fp64 without overflow (Knuth)."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def _towards(x: Tensor, direction: Tensor) -> Tensor:
    """The neighbour of finite, non-zero ``x`` on the side of ``direction``'s sign."""
    step = torch.where((direction > 0) == (x > 0), 1, -1).to(format_of(x.dtype).integer)
    return (bits(x) + step).view(x.dtype)


def round_to_odd(high: Tensor, low: Tensor) -> Tensor:
    """fp64 ``high + low`` rounded to odd, for ``(high, low)`` from :func:`two_sum`.

    An inexact sum becomes the neighbour whose last bit is one, so that a later rounding to nearest with at least
    two bits less is as if made from the exact sum. Infinities and NaN pass through.
    """
    inexact = (low != 0) & high.isfinite() & low.isfinite() & ((bits(high) & 1) == 0)
    return torch.where(inexact, _towards(high, low), high)


def round_double(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Correctly rounded ``dtype`` of an fp64 tensor, in one rounding.

    Also of an exact value that :func:`round_to_odd` left in fp64.

    torch converts fp64 to a 16-bit format through fp32, which rounds twice; here the stop at fp32 rounds to odd.
    """
    narrow = x.to(torch.float32)
    if dtype == torch.float32:
        return narrow
    lost = x - narrow.double()
    # What fp32 rounds to infinity a 16-bit format does too.
    inexact = (lost != 0) & narrow.isfinite() & ((bits(narrow) & 1) == 0)
    # Zero has no neighbour on one side by bit arithmetic: the least subnormal of x's sign is the odd one.
    least = torch.copysign(torch.full_like(narrow, 2.0**-149), x.float())
    odd = torch.where(narrow == 0, least, _towards(narrow, lost))
    return torch.where(inexact, odd, narrow).to(dtype)


def round_exact(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """Correctly rounded ``dtype`` of the exact sum ``high + low`` from :func:`two_sum`."""
    return round_double(round_to_odd(high, low), dtype)


def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 ``RN(a b + c)`` of fp32 tensors with a single rounding: the product is exact in fp64."""
    return round_exact(*two_sum(a.double() * b.double(), c.double()), torch.float32)


def detour_matters(wide: Tensor, narrow: Tensor) -> Tensor:
    """Flat indices where the exact sum behind ``wide`` may round to another fp32 than ``narrow``.

    ``wide`` is the fp64 sum and ``narrow`` its fp32. Rounding is monotone, so the stop at fp64 matters only where
    ``wide`` is the midpoint of two neighbours of fp32. Results near and below the least normal number, whose
    midpoints lie elsewhere, are always included; a zero sum is exact and is not.
    """
    doubtful = (wide.view(torch.int64) & 0x1FFF_FFFF) == 0x1000_0000
    magnitude, bound = narrow.abs(), 2.0 ** (FLOAT32.least_exponent + 1)
    # The reduction costs a fifth of the comparison that it nearly always saves. A NaN among the values makes it NaN.
    if magnitude.numel() and not float(magnitude.amin()) >= bound:
        doubtful |= (magnitude < bound) & (wide != 0)
    return doubtful.flatten().nonzero().squeeze(-1)
