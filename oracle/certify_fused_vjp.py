"""Certification of the fused contract's gradient of x: real arithmetic lies in the span of every sampled point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
        given = numbers_of_rows(rotation, points, gradient)
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


def _true_gradients(
    number: Callable[[float], Any], rotation: NormRotation, given: RowNumbers
) -> Callable[[int], float | None]:
    """The true gradient of each channel of a row, by the channel; None where it has none that is finite."""
    lanes = rotation.rotary_dim // 2
    x, g, w, c, s = given.x, given.gradient, given.weight, given.cos, given.sin
    if not all(map(math.isfinite, (*x, *g, *w, *c, *s))) or 2 * sum(v * v for v in x) >= LARGEST:
        return lambda channel: None
    g, x, w, c, s = ([number(v) for v in values] for values in (g, x, w, c, s))
    first = [g[i] * c[i] + g[i + lanes] * s[i] for i in range(lanes)]
    second = [g[i + lanes] * c[i] - g[i] * s[i] for i in range(lanes)]
    offset = number(rotation.norm.weight_offset)
    h = [turned * (v + offset) for turned, v in zip((*first, *second, *g[2 * lanes :]), w, strict=True)]
    total = sum((v * v for v in x), number(0.0))
    root = real_reciprocal_root(total / len(x) + number(rotation.norm.eps))
    mean = sum((a * b for a, b in zip(h, x, strict=True)), number(0.0)) * root / len(x)

    def true_gradient(channel: int) -> float | None:
        exact = root * (h[channel] - x[channel] * root * mean)
        true = round_number(middle(exact), False, format_of(rotation.x.dtype))
        return true if math.isfinite(true) else None

    return true_gradient
