"""Payloads of heads that are normalised before they are rotated, and of their weights, gates and gradients.

What :mod:`ropecheck.suites.payloads` holds does not suit a norm: one infinity makes a whole head NaN, and a head of
ones and zeros comes out as rounded numbers. Here a head's mean square is chosen along with its elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropecheck.oracle.floats import format_of

ROOT = 1024
"""Root of the mean square of basis and exact-sum heads. Its square swallows eps, and its reciprocal is exact."""

_LARGEST_INTEGER = 4


@dataclass(frozen=True)
class Heads:
    """What a payload fills: [T, H, D] of ``dtype`` on the CPU, whose first ``rotary_dim`` channels are rotated."""

    shape: tuple[int, int, int]
    rotary_dim: int
    dtype: torch.dtype
    generator: torch.Generator

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 from ``low`` to ``high``, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator)


def random(heads: Heads) -> Tensor:
    """Standard normal."""
    return heads.random(*heads.shape).to(heads.dtype)


def basis_first(heads: Heads) -> Tensor:
    """First members normalised to 1 or 2, second ones 0: the outputs are the kernel's own cosine and sine."""
    return _basis(heads, zero=slice(heads.rotary_dim // 2, heads.rotary_dim))


def basis_second(heads: Heads) -> Tensor:
    """First members 0, second ones normalised to 1 or 2: the outputs are minus the sine, and the cosine."""
    return _basis(heads, zero=slice(0, heads.rotary_dim // 2))


def _basis(heads: Heads, zero: slice) -> Tensor:
    """The channels of ``zero`` are 0 and all others 1024, but as many 2048, and up to two 0, as give the mean square.

    It is exactly 1024 squared, so that a norm with factor 1 makes 1, 2 and 0 of them. Where these stand moves from
    token to token and from head to head: no lane is 0 for long. A head of too few channels for that keeps its 1024.
    """
    tokens, count, width = heads.shape
    silent = heads.rotary_dim // 2
    used = torch.full((width - silent,), float(ROOT))
    zeros = -silent % 3
    doubled = (silent + zeros) // 3
    if zeros + doubled <= len(used):
        used[:zeros], used[zeros : zeros + doubled] = 0.0, 2.0 * ROOT
    places = torch.arange(width - silent)
    moved = torch.arange(tokens)[:, None] + torch.arange(count)
    x = torch.zeros(heads.shape)
    x[..., [c for c in range(width) if not zero.start <= c < zero.stop]] = used[(places + moved[..., None]) % len(used)]
    return x.to(heads.dtype)


def index_coded(heads: Heads) -> Tensor:
    """A number made of the element's place, exact in every dtype and never 0: (place mod 251 - 125.5) / 64."""
    token, head, channel = (torch.arange(n) for n in heads.shape)
    place = 53 * token[:, None, None] + 101 * head[:, None] + 37 * channel
    return ((place % 251 - 125.5) / 64).to(heads.dtype)


def special(heads: Heads) -> Tensor:
    """Heads of a kind each, in turn: ordinary ones, with signed zeros, all zeros, an infinity, a NaN, the largest
    numbers, whose squares overflow, and subnormal ones. So that a special value's reach can be seen."""
    limits = torch.finfo(heads.dtype)
    least = limits.smallest_normal * limits.eps
    ordinary = heads.random(*heads.shape).to(heads.dtype)
    kind = (torch.arange(heads.shape[0])[:, None] + 3 * torch.arange(heads.shape[1])) % 8
    zeros = ordinary.masked_fill(heads.integers(0, 2, *heads.shape) == 0, 0.0)
    signed_zeros = torch.where(heads.integers(0, 1, *heads.shape) == 0, zeros, -zeros)
    one_channel = torch.arange(heads.shape[2]) == heads.integers(0, heads.shape[2] - 1, *heads.shape[:2], 1)
    infinity = ordinary.masked_fill(one_channel, float("inf"))
    kinds = (
        ordinary,
        signed_zeros,
        -0.0 * ordinary,
        torch.where(heads.integers(0, 1, *heads.shape[:2], 1) == 0, infinity, -infinity),
        ordinary.masked_fill(one_channel, float("nan")),
        torch.where(one_channel, limits.max, ordinary),
        heads.integers(-9, 9, *heads.shape).mul(least).to(heads.dtype),
        torch.where(one_channel, -limits.smallest_normal, ordinary),
    )
    return torch.stack(kinds).gather(0, kind[None, ..., None].expand(1, *heads.shape))[0]


def magnitudes(heads: Heads) -> Tensor:
    """Normal numbers times a power of two for each head, over the whole range of the dtype."""
    form = format_of(heads.dtype)
    exponent = heads.integers(form.least_exponent - form.precision, -form.least_exponent - 2, *heads.shape[:2], 1)
    scale = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent)
    return (heads.random(*heads.shape).clamp(-4, 4).double() * scale).to(heads.dtype)


def exact_sum(heads: Heads) -> Tensor:
    """1024 or -1024: normalised to 1 or -1. See :func:`quarter_turns` and :func:`small_integers`."""
    return (ROOT * (2 * heads.integers(0, 1, *heads.shape) - 1)).to(heads.dtype)


NORM_PAYLOADS: dict[str, Callable[[Heads], Tensor]] = {
    "random": random,
    "basis-first": basis_first,
    "basis-second": basis_second,
    "index-coded": index_coded,
    "special": special,
    "magnitudes": magnitudes,
    "exact-sum": exact_sum,
}
"""What heads of queries and keys hold."""


def gates(name: str, heads: Heads) -> Tensor:
    """Gates, or the gradients that come in for them, beside heads of the payload ``name``: any bytes beside special
    values, the payloads of NaN included, and normal numbers beside others."""
    if name != "special":
        return random(heads)
    form = format_of(heads.dtype)
    limits = torch.iinfo(form.integer)
    return heads.integers(limits.min, limits.max, *heads.shape).to(form.integer).view(heads.dtype)


def gradients(name: str, heads: Heads) -> Tensor:
    """The gradient that comes in for heads of the payload ``name``."""
    if name == "exact-sum":
        return small_integers(heads)
    if name in ("special", "magnitudes"):
        # What such heads make of an ordinary gradient has its whole range of values already.
        return random(heads)
    return NORM_PAYLOADS[name](heads)


def small_integers(heads: Heads) -> Tensor:
    """-4 to 4: what heads of 1024 and a table of :func:`quarter_turns` make of it sums exactly, in every order."""
    return heads.integers(-_LARGEST_INTEGER, _LARGEST_INTEGER, *heads.shape).to(heads.dtype)


def quarter_turns(tokens: int, lanes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(cos, sin), each fp32 [T, lanes]: rotations by 0, 1, 2 or 3 quarters of a turn, at random."""
    turns = torch.randint(4, (tokens, lanes), generator=generator)
    cosine = torch.tensor([1.0, 0.0, -1.0, 0.0])
    return cosine[turns], cosine[(turns + 3) % 4]


def weights(name: str, heads: Heads, weight_offset: float) -> tuple[Tensor, Tensor]:
    """The weights [D] of queries and of keys, beside heads of the payload ``name``: those of factor 1 beside basis
    payloads, which thus print what they are to, and otherwise numbers around the factor 1, unlike for the two."""
    width = heads.shape[-1]
    if name.startswith("basis"):
        one = torch.full((width,), 1.0 - weight_offset, dtype=heads.dtype)
        return one, one.clone()
    q, k = (0.25 * heads.random(2, width) + (1.0 - weight_offset)).to(heads.dtype)
    return q, k
