"""Certification of the fused contract's gradients: real arithmetic lies in the span of every sampled point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .certify import Certificate, CertificationError, arithmetic, exact_numbers, ordered, round_number
from .certify_fused import RowNumbers, middle, numbers_of_rows, real_reciprocal_root
from .floats import format_of
from .fused import NormRotation
from .fused_comparison import FusedPoint
from .norm import LARGEST


def certify_fused_vjp(
    rotation: NormRotation, gradient: Tensor, points: Iterable[FusedPoint], using: str | None = None
) -> Certificate:
    """See that the true gradient of x at each point, of a gradient comparison of ``rotation``, lies in its span.

    Points of rows that hold an infinity or NaN, or that overflow, are left out of the count. Raises
    :class:`~ropecheck.oracle.certify.CertificationError` on the first that does not.
    """
    engine = using or arithmetic()
    points, count = list(points), 0
    with exact_numbers(engine) as number:
        given = numbers_of_rows(rotation, (point.index[:2] for point in points), gradient)
        rows = {place: _true_gradients(number, rotation, numbers) for place, numbers in given.items()}
        for point in points:
            true = rows[point.index[:2]](point.index[2])
            if true is None:
                continue
            if not ordered(point.low) <= ordered(true) <= ordered(point.high):
                where = f"{engine}, at token, head and channel {point.index}"
                raise CertificationError(
                    f"{where}: the true gradient {true!r} is outside [{point.low!r}, {point.high!r}]"
                )
            count += 1
    return Certificate(count, engine)


def certify_weight_gradient(
    rotation: NormRotation, gradient: Tensor, points: Iterable[FusedPoint], using: str | None = None
) -> Certificate:
    """The same for the gradient of the weight, whose points have a channel alone: the sum over all rows but padding.

    It takes a millisecond for each row and some. Nothing is counted where a row holds an infinity or NaN, or overflows.
    """
    engine = using or arithmetic()
    points, count = list(points), 0
    places = [(token, head) for token in rotation.judged.tolist() for head in range(rotation.x.shape[1])]
    form = format_of(rotation.weight.dtype)
    with exact_numbers(engine) as number:
        rows = [_turned_back(number, rotation, given) for given in numbers_of_rows(rotation, places, gradient).values()]
        if any(row is None for row in rows):
            return Certificate(0, engine)
        for point in points:
            channel = point.index[2]
            exact = sum((row.turned[channel] * row.x[channel] * row.root for row in rows if row), number(0.0))
            true = round_number(middle(exact), False, form)
            if not ordered(point.low) <= ordered(true + 0.0) <= ordered(point.high):
                raise CertificationError(
                    f"{engine}, at channel {channel}: the true gradient of the weight {true!r} is outside "
                    f"[{point.low!r}, {point.high!r}]"
                )
            count += 1
    return Certificate(count, engine)


@dataclass(frozen=True)
class _Row:
    """A row in real numbers: x, the reciprocal root, and the incoming gradient turned back."""

    x: list[Any]
    root: Any
    turned: list[Any]


def _turned_back(number: Callable[[float], Any], rotation: NormRotation, given: RowNumbers) -> _Row | None:
    """None where the row has no real numbers."""
    lanes = rotation.rotary_dim // 2
    values = given.x, given.gradient, given.cos, given.sin
    if not all(math.isfinite(v) for each in (*values, given.weight) for v in each):
        return None
    if 2 * sum(v * v for v in given.x) >= LARGEST:
        return None
    x, g, c, s = ([number(v) for v in each] for each in values)
    first = [g[i] * c[i] + g[i + lanes] * s[i] for i in range(lanes)]
    second = [g[i + lanes] * c[i] - g[i] * s[i] for i in range(lanes)]
    total = sum((v * v for v in x), number(0.0))
    root = real_reciprocal_root(total / len(x) + number(rotation.norm.eps))
    return _Row(x, root, [*first, *second, *g[2 * lanes :]])


def _true_gradients(
    number: Callable[[float], Any], rotation: NormRotation, given: RowNumbers
) -> Callable[[int], float | None]:
    """The true gradient of each channel of a row, by the channel; None where it has none that is finite."""
    row = _turned_back(number, rotation, given)
    if row is None:
        return lambda channel: None
    x, root, offset = row.x, row.root, number(rotation.norm.weight_offset)
    h = [turned * (number(w) + offset) for turned, w in zip(row.turned, given.weight, strict=True)]
    mean = sum((a * b for a, b in zip(h, x, strict=True)), number(0.0)) * root / len(x)

    def true_gradient(channel: int) -> float | None:
        exact = root * (h[channel] - x[channel] * root * mean)
        true = round_number(middle(exact), False, format_of(rotation.x.dtype))
        return true if math.isfinite(true) else None

    return true_gradient
