"""Certification: a sample of every case computed again, exactly, by an independent arithmetic.

Ball arithmetic (Arb, through python-flint) where it is installed, else mpmath, both at a precision at which every
product and sum of fp32 numbers is exact; which one is recorded. Roundings are made on Python integers. Nothing is
shared with the tensor arithmetic that is being certified except the recipe.
"""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .floats import Format, format_of
from .recipes import Recipe
from .rotation import Point

# Products of fp32 numbers have bits from 2^-298 to 2^256; their sum needs one more.
_EXACT_BITS = 640


class CertificationError(Exception):
    """The oracle's tensor arithmetic and exact arithmetic disagree: the oracle is wrong, not the candidate."""


@dataclass(frozen=True)
class Certificate:
    """How many points were computed again, and by what."""

    points: int
    arithmetic: str


@cache
def arithmetic() -> str:
    """Name of the exact arithmetic in use: 'arb' or 'mpmath'."""
    return "arb" if importlib.util.find_spec("flint") else "mpmath"


def certify(recipe: Recipe, points: Iterable[Point], dtype: torch.dtype, using: str | None = None) -> Certificate:
    """Compute the admissible span and the strict value of each finite point again.

    Points with an input that is infinite or NaN have no exact value and are left out of the count. Raises
    :class:`CertificationError` on the first disagreement.
    """
    engine = using or arithmetic()
    exact = [p for p in points if all(map(math.isfinite, (p.x0, p.x1, p.c, p.s)))]
    with exact_numbers(engine) as number:
        forms = [Walk(number, dtype).output(recipe, point) for point in exact]
    for point, values in zip(exact, forms, strict=True):
        finite = sorted(map(ordered, (v for v in values if math.isfinite(v))))
        expected = (finite[0], finite[-1]) if finite else (ordered(math.nan),) * 2
        found = (ordered(point.low), ordered(point.high))
        if expected != found or ordered(values[0]) != ordered(point.strict):
            raise CertificationError(
                f"{engine} admits {shown(expected)}, strictly {values[0]!r}, where the oracle admits "
                f"{shown(found)}, strictly {point.strict!r}, for {point.output} of x0={point.x0.hex()} "
                f"x1={point.x1.hex()} c={point.c.hex()} s={point.s.hex()} in {dtype} by recipe '{recipe.name}'"
            )
    return Certificate(len(exact), engine)


def ordered(value: float) -> tuple[int, int]:
    """Sorts as the values do, -0 below +0; every NaN alike."""
    if math.isnan(value):
        return (1, 0)
    raw = struct.unpack("<q", struct.pack("<d", value))[0]
    return (0, raw if raw >= 0 else -1 - (raw & 0x7FFF_FFFF_FFFF_FFFF))


def shown(span: tuple[tuple[int, int], ...]) -> str:
    def value(key: tuple[int, int]) -> float:
        raw = key[1] if key[1] >= 0 else (-1 - key[1]) | -0x8000_0000_0000_0000
        return math.nan if key[0] else float(struct.unpack("<d", struct.pack("<q", raw))[0])

    return f"[{value(span[0])!r}, {value(span[1])!r}]"


class Walk:
    """Evaluates a recipe on exact numbers. A value is a float, or an exact number of the engine with its sign."""

    def __init__(self, number: Callable[[float], Any], dtype: torch.dtype) -> None:
        self.number = number
        self.activation = format_of(dtype)
        self.fp32 = format_of(torch.float32)
        self.fp64 = format_of(torch.float64)

    def output(self, recipe: Recipe, point: Point) -> list[float]:
        """Every form of ``point``'s element in the activation format, the strict one first."""
        known: dict[str, list[Any]] = {"x0": [point.x0], "x1": [point.x1], "c": [point.c], "s": [point.s]}
        onto_zero = {step.left: step for step in recipe.steps if step.right == "zero"}
        for step in recipe.steps:
            target = self.activation if step.dtype == "activation" else self.fp32
            if step.op == "mul":
                exact = _Product(self.number, known[step.left][0], known[step.right][0])
                rounded = round_number(exact.number, exact.negative, self.fp32)
                rounded = round_again(rounded, target)
                fuses = step.contractible and target is self.fp32
                known[step.out] = [rounded, exact] if fuses else [rounded]
            elif step.right != "zero" and onto_zero.get(step.out, step).out == point.output:
                summands = (known[step.left], known[step.right], step.op == "sub", target)
                plain = self._sums(*summands, clears=False)
                if step.out not in onto_zero:
                    return plain
                cleared = self._sums(*summands, clears=True)
                last = [value + 0.0 for value in plain]
                return (cleared + plain if onto_zero[step.out].customary else plain + cleared) + last
        raise ValueError(f"recipe '{recipe.name}' has no output {point.output!r}")

    def _sums(self, left: list[Any], right: list[Any], negate: bool, target: Format, *, clears: bool) -> list[float]:
        values = []
        for r in right:
            for a in left:
                stops: list[tuple[Format, ...]] = [(self.fp32, target)]
                if isinstance(a, _Product) and isinstance(r, _Product):
                    stops += [(self.fp64, self.fp32), (self.fp64,), ()]
                values += [self._sum(a, r, negate, path, clears) for path in stops]
        return values

    def _sum(self, a: Any, r: Any, negate: bool, stops: tuple[Format, ...], clears: bool) -> float:
        """The sum rounded at each of ``stops`` and to the activation format; ``clears``: +0 is added before that."""
        parts = [(v.number, v.negative) if isinstance(v, _Product) else (v, _negative(v)) for v in (a, r)]
        (first, first_negative), (second, second_negative) = parts
        second_negative ^= negate
        if any(isinstance(v, float) and not math.isfinite(v) for v in (first, second)):
            # A rounded product overflowed: IEEE arithmetic on infinities, which Python floats follow.
            as_floats = [
                v if isinstance(v, float) else math.copysign(0.0, -1.0 if n else 1.0)
                for v, n in ((first, first_negative), (second, second_negative))
            ]
            return as_floats[0] + math.copysign(abs(as_floats[1]), -1.0 if second_negative else 1.0)
        first, second = (self.number(v) if isinstance(v, float) else v for v in (first, second))
        total = first - second if negate else first + second
        is_zero = integers(total)[0] == 0
        value: float | None = None
        for form in stops:
            if value is None:
                value = round_number(total, first_negative and second_negative, form)
            else:
                value = round_again(value, form)
        if value is None:
            value = round_number(total, first_negative and second_negative and not clears, self.activation)
        elif clears and (is_zero or value == 0):
            value += 0.0
        return round_again(value, self.activation)


class _Product:
    """An exact product with the sign that IEEE 754 gives it, zero included."""

    def __init__(self, number: Callable[[float], Any], left: float, right: float) -> None:
        self.number = number(left) * number(right)
        self.negative = _negative(left) ^ _negative(right)


def _negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0


@contextmanager
def exact_numbers(engine: str) -> Iterator[Callable[[float], Any]]:
    """The engine's constructor, within a context whose precision keeps every product and sum exact."""
    if engine == "arb":
        import flint

        with flint.ctx.workprec(_EXACT_BITS):
            yield flint.arb
    else:
        import mpmath

        with mpmath.workprec(_EXACT_BITS):
            yield mpmath.mpf


def integers(number: Any) -> tuple[int, int]:
    """(mantissa, exponent) of an exact number. A ball with a radius means that the precision was too small."""
    if hasattr(number, "is_exact"):
        if not number.is_exact():
            raise CertificationError(f"{number} is not exact at {_EXACT_BITS} bits")
        mantissa, exponent = number.man_exp()
        return int(mantissa), int(exponent)
    sign, mantissa, exponent, _ = number._mpf_
    return (-int(mantissa) if sign else int(mantissa)), int(exponent)


def round_number(number: Any, negative: bool, form: Format) -> float:
    """Round to nearest even into ``form``; an exact zero takes the sign ``negative``."""
    mantissa, exponent = integers(number)
    if mantissa == 0:
        return -0.0 if negative else 0.0
    return nearest(mantissa, exponent, form)


def round_again(value: float, form: Format) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    numerator, denominator = value.as_integer_ratio()
    return nearest(numerator, 1 - denominator.bit_length(), form)


def nearest(mantissa: int, exponent: int, form: Format) -> float:
    sign, magnitude = (-1.0, -mantissa) if mantissa < 0 else (1.0, mantissa)
    least = max(exponent + magnitude.bit_length() - form.precision, form.least_exponent - form.precision + 1)
    if least > exponent:
        quotient, rest = divmod(magnitude, 1 << (least - exponent))
        half = 1 << (least - exponent - 1)
        magnitude = quotient + (rest > half or (rest == half and quotient & 1))
        exponent = least
    if magnitude and exponent + magnitude.bit_length() > 1 - form.least_exponent + 1:
        return math.copysign(math.inf, sign)
    return math.copysign(math.ldexp(magnitude, exponent), sign)
