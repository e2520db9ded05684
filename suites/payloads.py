"""Payloads: what the elements of x, or of an incoming gradient, hold.

Each is a pure function of its arguments. Random data sees most faults; the others see what it cannot: basis data
makes a kernel print its own cosine and sine at full relative precision, index-coded data exposes permutations
exactly, and hard-to-round points lie so close to an output boundary that an error far below the output's precision
still crosses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of
from ropecheck.oracle.pairing import Pairing


@dataclass(frozen=True)
class Slots:
    """What a payload fills: [B, S, H, D] of ``dtype``, on the CPU; the tables [.., R / 2] are those of the case."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    pairing: Pairing
    cos: Tensor
    sin: Tensor
    generator: torch.Generator

    def lanes(self, first: Tensor, second: Tensor, tail: Tensor) -> Tensor:
        """[B, S, H, D] from the members of each lane and the pass-through channels."""
        return torch.cat((self.pairing.join(first, second), tail), dim=-1)

    @property
    def halves(self) -> tuple[int, int, int, int]:
        return (*self.shape[:3], self.cos.shape[-1])

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def tail(self) -> Tensor:
        return self.random(*self.shape[:3], self.shape[3] - 2 * self.cos.shape[-1]).to(self.dtype)


def random(slots: Slots) -> Tensor:
    """Standard normal."""
    return slots.random(*slots.shape).to(slots.dtype)


def basis_first(slots: Slots) -> Tensor:
    """First member 1, second 0: the outputs are the kernel's own cosine and sine."""
    ones = torch.ones(slots.halves, dtype=slots.dtype)
    return slots.lanes(ones, torch.zeros_like(ones), slots.tail())


def basis_second(slots: Slots) -> Tensor:
    """First member 0, second 1: the outputs are minus the sine and the cosine."""
    ones = torch.ones(slots.halves, dtype=slots.dtype)
    return slots.lanes(torch.zeros_like(ones), ones, slots.tail())


def index_coded(slots: Slots) -> Tensor:
    """A number made of the element's place, exact in every dtype: (place mod 251 - 125) / 64.

    The multipliers are units modulo the prime 251, so that neighbours along each dimension differ.
    """
    batch, length, heads, channels = (torch.arange(n) for n in slots.shape)
    place = (
        71 * batch[:, None, None, None] + 53 * length[:, None, None] + 101 * heads[:, None] + 37 * channels
    )
    return ((place % 251 - 125) / 64).to(slots.dtype)


def special(slots: Slots) -> Tensor:
    """Signed zeros, infinities, NaN, the extremes of the normal and subnormal range, and ones, in varying company."""
    limits = torch.finfo(slots.dtype)
    least = limits.smallest_normal * limits.eps
    values = [0.0, -0.0, 1.0, -1.0, limits.max, limits.min, limits.smallest_normal, -limits.smallest_normal]
    values += [least, -least, float("inf"), float("-inf"), float("nan")]
    # Ordinary numbers keep most lanes finite, so that a special value's reach can be seen.
    values += [1.5, -0.375, 3.0, 0.1] * 4
    pick = torch.randint(len(values), slots.shape, generator=slots.generator)
    return torch.tensor(values, dtype=torch.float64)[pick].to(slots.dtype)


def magnitudes(slots: Slots) -> Tensor:
    """Normal numbers times powers of two spread over the whole range of the dtype, subnormal results included."""
    form = format_of(slots.dtype)
    low, high = form.least_exponent - form.precision, 1 - form.least_exponent - 3
    exponent = torch.randint(low, high + 1, slots.shape, generator=slots.generator)
    # A lane's members are of like size half of the time: otherwise one of them rarely matters.
    shared = torch.randint(low, high + 1, (*slots.shape[:3], 1), generator=slots.generator)
    alike = torch.rand(slots.shape, generator=slots.generator) < 0.5
    scale = torch.ldexp(torch.ones(slots.shape, dtype=torch.float64), torch.where(alike, shared, exponent))
    return (slots.random(*slots.shape).clamp(-4, 4).double() * scale).to(slots.dtype)


_TRIES = 1 << 13


def hard_to_round(slots: Slots) -> Tensor:
    """For every lane, the pair out of 8,192 whose rotated member lies nearest to an output boundary.

    A boundary is the midpoint of two neighbours of the output dtype. The first and the second member take turns
    from token to token. A table off by one fp32 ulp moves a bf16 result by about 2^-15 of its spacing: with this
    many tries most lanes hold a point that near to a boundary.
    """
    batch, length, heads, lanes = slots.halves
    cos, sin = (t.double().expand(batch, length, lanes) for t in (slots.cos, slots.sin))
    first, second = (torch.empty(slots.halves, dtype=slots.dtype) for _ in range(2))
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                pairs = slots.random(2, _TRIES, lanes).to(slots.dtype)
                x0, x1 = pairs.double()
                c, s = cos[b, t], sin[b, t]
                exact = x0 * c - x1 * s if t % 2 == 0 else x1 * c + x0 * s
                best = _from_boundary(exact, slots.dtype).argmin(dim=0, keepdim=True)
                first[b, t, h], second[b, t, h] = pairs[0].gather(0, best)[0], pairs[1].gather(0, best)[0]
    return slots.lanes(first, second, slots.tail())


def _from_boundary(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of fp64 ``exact`` from the nearest midpoint of two neighbours of ``dtype``, in their spacing."""
    precision = format_of(dtype).precision
    mantissa, _ = torch.frexp(exact)
    return (mantissa.abs() * 2.0**precision % 1.0 - 0.5).abs()


PAYLOADS: dict[str, Callable[[Slots], Tensor]] = {
    "random": random,
    "basis-first": basis_first,
    "basis-second": basis_second,
    "index-coded": index_coded,
    "special": special,
    "magnitudes": magnitudes,
    "hard-to-round": hard_to_round,
}

FINITE_PAYLOADS = tuple(name for name in PAYLOADS if name != "special")
