"""Certification of the fused contract: a sample computed again by ball arithmetic and by rounding on integers.

Four facts of each point are established without the tensor arithmetic: the ends of the reciprocal root follow from its
bound, in rational numbers; the ends of the span follow from them; the strict value is that of the fixed order; and the
true value, of real arithmetic with the contract's own roundings alone, lies in the span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .certify import (
    Certificate,
    CertificationError,
    Walk,
    arithmetic,
    exact_numbers,
    nearest,
    ordered,
    round_again,
    round_number,
)
from .floats import FLOAT32, Format, format_of
from .fused import NormRotation
from .fused_comparison import FusedPoint
from .norm import DIVISION_ULP, LARGEST, RECIPROCAL_ROOT_ULP, reciprocal_root_interval
from .recipes import ONE_ROUNDING
from .rotation import Point

# What the tensor arithmetic's own errors in fp64 may add to the root's bounds, and to an unrounded product.
_OF_ROOT, _OF_PRODUCT = Fraction(1, 2**37), Fraction(1, 2**50)
_UNIT = Fraction(1, 2**24)
_BITS_OF_QUOTIENT = 128


def certify_fused(rotation: NormRotation, points: Iterable[FusedPoint], using: str | None = None) -> Certificate:
    """Compute each point, of a forward comparison of ``rotation``, again.

    Points of rows that hold an infinity or NaN, or whose squares may overflow fp32, have no exact value and are left
    out of the count. Raises :class:`~ropecheck.oracle.certify.CertificationError` on the first disagreement.
    """
    engine = using or arithmetic()
    points, count = list(points), 0
    with exact_numbers(engine) as number:
        found = numbers_of_rows(rotation, (point.index[:2] for point in points))
        rows = {place: _Row(number, rotation, given) for place, given in found.items()}
        for point in points:
            element = _Element(rows[point.index[:2]], point)
            if element.defined:
                _certify(element, point, engine)
                count += 1
    return Certificate(count, engine)


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of a row, the oracle's ends of its reciprocal root, and the gradient that comes in."""

    x: list[float]
    weight: list[float]
    cos: list[float]
    sin: list[float]
    roots: tuple[float, float]
    gradient: list[float]


def numbers_of_rows(
    rotation: NormRotation, places: Iterable[tuple[int, int]], gradient: Tensor | None = None
) -> dict[tuple[int, int], RowNumbers]:
    """The rows at ``places``, each a token and a head, fetched from their device together."""
    places = sorted(set(places))
    if not places:
        return {}
    tokens, heads = torch.tensor(places, device=rotation.x.device).unbind(-1)
    x = rotation.x[tokens, heads]
    least, greatest = reciprocal_root_interval(x, rotation.norm.eps)
    incoming = x if gradient is None else gradient[tokens, heads]
    columns = (x, rotation.cos[tokens], rotation.sin[tokens], least[:, 0], greatest[:, 0], incoming)
    rows = zip(*(column.double().tolist() for column in columns), strict=True)
    weight = rotation.weight.double().tolist()
    return {
        place: RowNumbers(values, weight, cos, sin, (low, high), g)
        for place, (values, cos, sin, low, high, g) in zip(places, rows, strict=True)
    }


def _certify(element: _Element, point: FusedPoint, engine: str) -> None:
    where = f"{engine}, at token, head and channel {point.index}"
    roots = element.certified_roots(where)
    (outer_low, outer_high), (inner_low, inner_high) = (element.span(roots, slack) for slack in (_OF_PRODUCT, 0))
    low, high = ordered(point.low), ordered(point.high)
    if not (outer_low <= low <= inner_low and inner_high <= high <= outer_high):
        raise CertificationError(f"{where}: exact arithmetic does not end the span at [{point.low!r}, {point.high!r}]")
    strict, true = element.strict(), element.true_value()
    if ordered(strict) != ordered(point.strict):
        raise CertificationError(f"{where}: strictly {strict!r}, where the oracle has {point.strict!r}")
    # Real arithmetic has no sign of zero: either will do.
    if not (low <= ordered(true + 0.0) and ordered(true if true else -0.0) <= high):
        raise CertificationError(f"{where}: the true value {true!r} is outside [{point.low!r}, {point.high!r}]")


class _Row:
    """One head of a token: what all of its elements share."""

    def __init__(self, number: Callable[[float], Any], rotation: NormRotation, given: RowNumbers) -> None:
        self.number, self.rotation, self.given, self.x = number, rotation, given, given.x
        self.eps = rotation.norm.eps
        self.defined = all(map(math.isfinite, self.x)) and 2 * sum(v * v for v in self.x) < LARGEST

    @cached_property
    def total(self) -> Fraction:
        ratios = [v.as_integer_ratio() for v in self.x]
        # All denominators are powers of two.
        whole = max(denominator for _, denominator in ratios)
        return Fraction(sum((n * (whole // d)) ** 2 for n, d in ratios), whole**2)

    @cached_property
    def roots(self) -> tuple[float, float] | None:
        """The oracle's ends of the reciprocal root; None where they do not follow from the counted roundings.

        Each is compared with the bound in squares: rational numbers.
        """
        count, eps = len(self.x), Fraction(self.eps)
        narrow = Fraction(_round(eps, FLOAT32))
        gamma = count * _UNIT / (1 - count * _UNIT)
        for end, side in zip(self.given.roots, (1, -1), strict=True):
            # The least root is that of the greatest sum.
            shifted = max(self.total * (1 + side * gamma) + side * Fraction(count, 2**150), Fraction(0)) / count
            shifted = shifted * (1 + side * 2 * DIVISION_ULP * _UNIT) + (max if side > 0 else min)(eps, narrow)
            shifted *= 1 + side * _UNIT
            root = 1 - side * 2 * RECIPROCAL_ROOT_ULP * _UNIT
            beyond = Fraction(_neighbour(end, -side))
            tight = side * (beyond**2 * shifted - root**2) < 0
            loose = side * (Fraction(end) ** 2 * shifted - (root * (1 - side * _OF_ROOT)) ** 2) >= 0
            if not (tight and loose):
                return None
        return self.given.roots

    @cached_property
    def strict_root(self) -> float:
        """The reciprocal root of the fixed order."""
        level = [self.product(v, v) for v in self.x]
        level += [0.0] * ((1 << max(0, len(level) - 1).bit_length()) - len(level))
        while len(level) > 1:
            level = [self._sum(a, b) for a, b in zip(level[0::2], level[1::2], strict=True)]
        mean = _round(Fraction(level[0]) / len(self.x), FLOAT32)
        shifted = self._sum(mean, _round(Fraction(self.eps), FLOAT32))
        return _round(1 / Fraction(_root(shifted)), FLOAT32)

    @cached_property
    def true_root(self) -> Any:
        """The reciprocal root of real arithmetic."""
        total = self.number(self.total.numerator) / self.number(self.total.denominator)
        return real_reciprocal_root(total / len(self.x) + self.number(self.eps))

    def product(self, a: float, b: float) -> float:
        # Of two numbers of fp32 it is exact in fp64.
        return round_again(a * b, FLOAT32)

    def _sum(self, a: float, b: float) -> float:
        """Of numbers that are not negative."""
        (first, of_first), (second, of_second) = a.as_integer_ratio(), b.as_integer_ratio()
        whole = max(of_first, of_second)
        total = first * (whole // of_first) + second * (whole // of_second)
        return nearest(total, 1 - whole.bit_length(), FLOAT32) if total else 0.0


class _Element:
    """One output element: its row, and the one or two channels that make it."""

    def __init__(self, row: _Row, point: FusedPoint) -> None:
        rotation, channel = row.rotation, point.index[2]
        lanes = rotation.rotary_dim // 2
        self.row, self.rotation, self.turns = row, rotation, channel < 2 * lanes
        self.activation = format_of(rotation.x.dtype)
        self.output, lane = "y1" if channel >= lanes else "y0", channel % lanes
        self.channels = (lane, lane + lanes) if self.turns else (channel,)
        self.weights = [row.given.weight[channel] for channel in self.channels]
        self.c, self.s = (row.given.cos[lane], row.given.sin[lane]) if self.turns else (0.0, 0.0)
        self.defined = row.defined and all(map(math.isfinite, (*self.weights, self.c, self.s)))
        # The ends of a span are mostly the same with and without the slack.
        self.forms: dict[tuple[tuple[int, int], tuple[int, int]], list[float]] = {}
        if self.defined:
            offset = Fraction(rotation.norm.weight_offset)
            self.exact_factors = [Fraction(w) + offset for w in self.weights]
            self.factors = [
                _round(f, FLOAT32) if offset else w for f, w in zip(self.exact_factors, self.weights, strict=True)
            ]

    def certified_roots(self, where: str) -> tuple[float, float]:
        """The oracle's ends of the reciprocal root. Raises CertificationError where exact arithmetic has others."""
        if self.row.roots is None:
            raise CertificationError(f"{where}: the reciprocal root does not end there by exact arithmetic")
        return self.row.roots

    def span(self, roots: tuple[float, float], slack: Fraction | int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The ordered ends of the output's finite values, an unrounded product being off by at most ``slack``."""
        members = [self._members(n, roots, slack) for n in range(len(self.channels))]
        if not self.turns:
            values = [round_again(v, self.activation) for v in members[0]]
        else:
            ends = [(min(m, key=ordered), max(m, key=ordered)) for m in members]
            values = [v for a, b in product(*ends) for v in self._turned(a, b)]
        finite = sorted(ordered(v) for v in values if math.isfinite(v))
        return finite[0], finite[-1]

    def strict(self) -> float:
        """The value of the fixed order."""
        members = []
        for channel, factor in zip(self.channels, self.factors, strict=True):
            scaled = self._product(self.row.x[channel], self.row.strict_root)
            members.append(self._handed_on(self._product(scaled, factor)))
        if not self.turns:
            return round_again(members[0], self.activation)
        forms = self._turned(*members)
        # Of the forms of a sum, the second fuses the left product: the one with the cosine.
        return forms[1] if self.rotation.fma else forms[0]

    def true_value(self) -> float:
        """Real arithmetic, rounded where the contract rounds."""
        number, members = self.row.number, []
        for channel, factor in zip(self.channels, self.exact_factors, strict=True):
            numerator, denominator = (number(v) for v in (factor.numerator, factor.denominator))
            members.append(number(self.row.x[channel]) * self.row.true_root * numerator / denominator)
        if self.rotation.norm.round_norm or not self.turns:
            members = [number(round_number(middle(m), False, self.activation)) for m in members]
        if not self.turns:
            return float(members[0])
        (a, b), c, s = members, number(self.c), number(self.s)
        turned = a * c - b * s if self.output == "y0" else b * c + a * s
        return round_number(middle(turned), False, self.activation)

    def _members(self, which: int, roots: tuple[float, float], slack: Fraction | int) -> list[float]:
        """Every form of a normalised channel at both ends of the root, as it goes on to the rotation."""
        x, factor, exact_factor = self.row.x[self.channels[which]], self.factors[which], self.exact_factors[which]
        negative = (math.copysign(1.0, x) < 0) ^ (exact_factor < 0)
        values = []
        for root in roots:
            rounded = [self._product(self._product(x, root), factor), self._product(x, self._product(root, factor))]
            for unrounded in (Fraction(x) * Fraction(root) * f for f in (Fraction(factor), exact_factor)):
                for exact in (unrounded * (1 - slack), unrounded * (1 + slack)):
                    near = _round(exact, FLOAT32, negative)
                    rounded.append(near)
                    if self.rotation.norm.round_norm:
                        values.append(_round(exact, self.activation, negative))
                    elif near != exact:
                        values.append(_neighbour(near, 1 if near < exact else -1))
            values += map(self._handed_on, rounded)
        return values

    def _handed_on(self, value: float) -> float:
        return round_again(value, self.activation) if self.rotation.norm.round_norm else value

    def _turned(self, a: float, b: float) -> list[float]:
        """Every form of the output for two members, the strict one first."""
        # Zeros of either sign are two members.
        key = ordered(a), ordered(b)
        if key not in self.forms:
            none = math.nan
            point = Point((0, 0, 0, 0), 0, self.output, a, b, self.c, self.s, none, none, none, none, 0)
            self.forms[key] = Walk(self.row.number, self.rotation.x.dtype).output(ONE_ROUNDING, point)
        return self.forms[key]

    def _product(self, a: float, b: float) -> float:
        return self.row.product(a, b)


def _round(exact: Fraction, form: Format, negative: bool = False) -> float:
    """Round to nearest even, by a quotient of many bits whose last one says that there is a remainder."""
    if not exact:
        return -0.0 if negative else 0.0
    shift = max(0, _BITS_OF_QUOTIENT + exact.denominator.bit_length() - exact.numerator.bit_length())
    quotient, rest = divmod(abs(exact.numerator) << shift, exact.denominator)
    magnitude = quotient << 1 | bool(rest)
    return nearest(-magnitude if exact < 0 else magnitude, -shift - 1, form)


def _root(value: float) -> float:
    """The fp32 root of a positive number, by an integer root of many bits likewise."""
    numerator, denominator = value.as_integer_ratio()
    # The denominator is a power of two; an even one has a whole root.
    exponent = denominator.bit_length() - 1
    widened = numerator << (2 * _BITS_OF_QUOTIENT + exponent % 2)
    root = math.isqrt(widened)
    return nearest(root << 1 | (root * root != widened), -_BITS_OF_QUOTIENT - (exponent + 1) // 2 - 1, FLOAT32)


def _neighbour(value: float, side: int) -> float:
    towards = torch.tensor(side * math.inf, dtype=torch.float32)
    return float(torch.nextafter(torch.tensor(value, dtype=torch.float32), towards))


def real_reciprocal_root(value: Any) -> Any:
    if hasattr(value, "rsqrt"):
        return value.rsqrt()
    return 1 / value.context.sqrt(value)


def middle(value: Any) -> Any:
    """The middle of a ball: its radius is far below what could matter to a rounding."""
    return value.mid() if hasattr(value, "mid") else value
