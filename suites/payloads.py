"""Payloads: what the elements of x, or of an incoming gradient, hold.

Each is a pure function of its arguments. Random data sees most faults; the others see what it cannot: basis data
makes a kernel print its own cosine and sine at full relative precision, index-coded data exposes permutations
exactly, and hard-to-round points lie so close to an output boundary that an error far below the output's precision
still crosses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropecheck.oracle.floats import bits, format_of
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
    place = 71 * batch[:, None, None, None] + 53 * length[:, None, None] + 101 * heads[:, None] + 37 * channels
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


_TRIES = {"near": 1 << 12, "table": 1 << 10, "form": 1 << 8}


def hard_to_round(slots: Slots) -> Tensor:
    """For every lane, pairs whose rotated member lies next to an output boundary, found by search.

    A boundary is the midpoint of two neighbours of the output dtype. From head to head the first and the second
    member take turns, and of each in turn

    * the pair out of 4,096 whose member lies nearest to a boundary: it sees any small relative error;
    * two pairs whose products nearly cancel, with a boundary between what the given tables can make of them, however
      contracted, and what they can with the cosine (the sine, for the second member) one fp32 ulp larger, or smaller;
    * a pair of which the contraction changes the result: it tells the forms of evaluation apart.

    A table off by one fp32 ulp moves a bf16 result by about 2^-15 of its spacing, and by 2^-7 where the products
    cancel to 2^-8. Eight heads hold every kind for each lane and token. The search knows the recipe with one
    rounding; for others its points are ordinary ones.
    """
    cos, sin = (t.expand(slots.halves[0], *t.shape[-2:]) for t in (slots.cos, slots.sin))
    first, second = (torch.zeros(slots.halves, dtype=slots.dtype) for _ in range(2))
    for batch, token, head in itertools.product(*map(range, slots.shape[:3])):
        of_first = head % 2 == 0
        c, s = cos[batch, token], sin[batch, token]
        # y0 = x0 c - x1 s and y1 = x1 c + x0 s: both are p u + q w.
        u, w = c, -s if of_first else s
        kind = head // 2 % 4
        if kind == 0:
            p, q = _near(slots, u, w)
        elif kind == 3:
            p, q = _form(slots, u, w)
        else:
            # The magnitude of w shrinks where that of u grows.
            p, q = _table(slots, u, w, grow=1 if (kind == 1) == of_first else -1, watched=0 if of_first else 1)
        first[batch, token, head], second[batch, token, head] = (p, q) if of_first else (q, p)
    return slots.lanes(first, second, slots.tail())


def _near(slots: Slots, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(p, q), each [R / 2]: the tries with p u + q w nearest to a boundary."""
    p, q = slots.random(2, _TRIES["near"], len(u)).to(slots.dtype)
    mantissa, _ = torch.frexp(p.double() * u + q.double() * w)
    return _best(p, q, -(mantissa.abs() * 2.0 ** format_of(slots.dtype).precision % 1.0 - 0.5).abs())


def _table(slots: Slots, u: Tensor, w: Tensor, grow: int, watched: int) -> tuple[Tensor, Tensor]:
    """(p, q): every form of p u + q w rounds below every form with |u| ``grow`` ulp, or |w| ``-grow`` ulp, larger.

    Of the two tables the ``watched`` one counts more.
    """
    p, q = _cancelling(slots, u, w, _TRIES["table"], grow)
    (low_a, high_a), (low_b, high_b) = _ends(p, u), _ends(q, w)
    high = (high_a + high_b).to(slots.dtype)
    low_if_u, low_if_w = _ends(p, _grown(u, grow))[0] + low_b, low_a + _ends(q, _grown(w, -grow))[0]
    score = torch.zeros(p.shape, dtype=torch.uint8)
    for table, low in enumerate((low_if_u, low_if_w)):
        score += (high < low.to(slots.dtype)) * (2 if table == watched else 1)
    return _best(p, q, score)


def _ends(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The lesser and the greater of the exact product and its fp32, in fp64."""
    exact = p.double() * u
    rounded = exact.float().double()
    return torch.minimum(exact, rounded), torch.maximum(exact, rounded)


def _form(slots: Slots, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(p, q): without contraction p u + q w rounds to another value than contracted, in most of the ways to do so."""
    p, q = _cancelling(slots, u, w, _TRIES["form"], 1)
    a, b = p.double() * u, q.double() * w
    rounded_a, rounded_b = a.float().double(), b.float().double()
    separate = (rounded_a + rounded_b).to(slots.dtype)
    contracted = (a + rounded_b, rounded_a + b, a + b)
    return _best(p, q, torch.stack([form.to(slots.dtype) != separate for form in contracted]).sum(0))


def _cancelling(slots: Slots, u: Tensor, w: Tensor, tries: int, sign: int) -> tuple[Tensor, Tensor]:
    """Random (p, q), each [tries, R / 2], with p u of ``sign`` and q w nearly its negative.

    The sum's spacing is then about 2^-16 of a product: above what rounding a product to fp32 costs, and as little
    above it as leaves most tries with one admissible value.
    """
    shape = (tries, len(u))
    free = ((1 + torch.rand(shape, generator=slots.generator)) * 2.0**12).to(slots.dtype)
    swap = u.abs() < w.abs()
    large, small = torch.where(swap, w, u).double(), torch.where(swap, u, w).double()
    # bf16 has few neighbours to choose from: several degrees of cancellation hold more of them than one.
    degree = min(format_of(slots.dtype).precision, 12) - 16 + 4 * torch.rand(shape, generator=slots.generator)
    apart = torch.exp2(degree) * slots.random(*shape)
    # The larger factor takes the smaller member.
    derived = (free.double() * (-small / large) * (1 + apart)).to(slots.dtype)
    p, q = torch.where(swap, free, derived), torch.where(swap, derived, free)
    turn = ((p < 0) ^ (u < 0)) == (sign > 0)
    return torch.where(turn, -p, p), torch.where(turn, -q, q)


def _grown(table: Tensor, by: int) -> Tensor:
    """``table`` with each magnitude moved by ``by`` of its own ulp."""
    return (bits(table) + by).view(table.dtype)


def _best(p: Tensor, q: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    best = score.argmax(dim=0, keepdim=True)
    return p.gather(0, best)[0], q.gather(0, best)[0]


PAYLOADS: dict[str, Callable[[Slots], Tensor]] = {
    "random": random,
    "basis-first": basis_first,
    "basis-second": basis_second,
    "index-coded": index_coded,
    "special": special,
    "magnitudes": magnitudes,
    "hard-to-round": hard_to_round,
}
