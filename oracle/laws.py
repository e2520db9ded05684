"""Laws of a rotation: how far a candidate that obeys its recipe can be from what holds exactly of a rotation.

Tables are of a caller's own angles, which are exact dyadic numbers, so that sums and differences of angles are exact
too; each cosine and sine is rounded once to the table's dtype.

**One rotation.** Let u = 2^-p be the unit roundoff of a format of p bits (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, SIAM 2002, section 2.2: fl(a op b) = (a op b)(1 + d), |d| <= u, and below the least normal
number an absolute error of half the least subnormal besides, of products and conversions only: a sum that underflows
is exact, problem 2.19). With r = |(x0, x1)|, R the exact rotation and c', s' the rounded table:

* Table: |c' - c| <= t |c| and |s' - s| <= t |s|, so |R' - R| = |(c' - c, s' - s)| <= t, and |(c', s')| <= 1 + t.
* Arithmetic: every form of an output passes at most its product's rounding, the sum's and the last conversion's, so
  its error is at most e (|x0 c'| + |x1 s'|) with 1 + e = (1 + u_product)(1 + u_sum)(1 + u_output). (Contracted and
  more accurate forms pass fewer.) The two sums of magnitudes form a vector of norm at most sqrt(2) r |(c', s')|, for
  (|a| + |b|)^2 + (|a'| + |b'|)^2 <= 2 (a^2 + b^2 + a'^2 + b'^2) = 2 r^2 |(c', s')|^2.

Together the computed y has |y - R x| <= n r + m, n = t + sqrt(2) e (1 + t); m collects the underflows.

**Laws.** Rotations keep norms, so k rotations in a row end within ((1 + n)^k - 1) r + m k (1 + n)^(k - 1) of the exact
result; each law follows by the triangle inequality. All constants are exact fractions, rounded up once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import mpmath
import torch
from torch import Tensor

from .floats import format_of
from .recipes import Recipe

_SQRT2 = Fraction(math.nextafter(math.sqrt(2), 2))
JUDGED_IN_FP64 = Fraction(1, 2**49)
"""What the judge's own fp64 adds, relative to r (to r_q r_k for a dot product): a law's two sides are differences,
squares, sums and roots of numbers of at most 24 bits and take fewer than eight fp64 roundings together."""


@dataclass(frozen=True)
class Bound:
    """``relative`` times the norm of the pair (of both pairs, for a dot product), and ``absolute`` besides."""

    relative: Fraction
    absolute: Fraction

    def of(self, size: Tensor) -> Tensor:
        """fp64 bound for each fp64 ``size``, the judge's own fp64 roundings included."""
        relative, absolute = (_up(part) for part in (self.relative + JUDGED_IN_FP64, self.absolute))
        return size * relative + absolute


@dataclass(frozen=True)
class PairError:
    """One rotation's error: ``relative`` is n and ``absolute`` m of the module's derivation."""

    relative: Fraction
    absolute: Fraction

    def after(self, rotations: int) -> Bound:
        """How far ``rotations`` in a row end from the exact result, for a pair of norm r."""
        grown = 1 + self.relative
        return Bound(grown**rotations - 1, rotations * grown ** (rotations - 1) * self.absolute)

    def inverse(self) -> Bound:
        """|R^T(R x) - x|: two rotations whose exact result is x."""
        return self.after(2)

    def composition(self) -> Bound:
        """|R_b(R_a x) - R_(a + b) x|: two rotations against one, both near the same exact result."""
        twice, once = self.after(2), self.after(1)
        return Bound(twice.relative + once.relative, twice.absolute + once.absolute)

    def norm(self) -> Bound:
        """| |y| - |x| |: a rotation keeps the norm, and y is within one rotation's error of it."""
        return self.after(1)

    def relative_dot(self, largest: float) -> Bound:
        """|<q_m, k_n> - <q_(m + t), k_(n + t)>| relative to r_q r_k, for pairs of norm at most ``largest``.

        With q' = R_m q + f, |f| <= n r_q + m, and k' alike, <q', k'> is within |f| r_k + |g| r_q + |f| |g| of the exact
        dot product, which depends on m - n alone; the two sides differ by at most twice that.
        """
        n, m, r = self.relative, self.absolute, Fraction(largest)
        return Bound(2 * (2 * n + n * n), 2 * (2 * (1 + n) * r * m + m * m))


def pair_error(recipe: Recipe, activation: torch.dtype, table: torch.dtype) -> PairError:
    """The error of one rotation by ``recipe``, its table in dtype ``table``."""
    # A table is rounded to fp64, to fp32 and, where it is narrower, once more (:func:`tables_of`).
    t = (1 + _unit(torch.float64)) * (1 + _unit(torch.float32)) - 1
    if table != torch.float32:
        t = (1 + t) * (1 + _unit(table)) - 1
    products = {_dtype(step.dtype, activation) for step in recipe.steps if step.op == "mul"}
    sums = {_dtype(step.dtype, activation) for step in recipe.steps if step.op != "mul" and step.right != "zero"}
    product, total = (max(dtypes, key=_unit) for dtypes in (products, sums))
    converts = total != activation
    growth = (1 + _unit(product)) * (1 + _unit(total)) * (1 + (_unit(activation) if converts else 0)) - 1
    later = (1 + _unit(total)) * (1 + (_unit(activation) if converts else 0))
    underflow = 2 * _least(product) * later + (_least(activation) if converts else 0)
    return PairError(t + _SQRT2 * growth * (1 + t), _SQRT2 * underflow)


def tables_of(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of fp64 ``angles``, which are taken to be exact: rounded to fp64, to fp32, and to ``dtype``."""
    values = _cosines_and_sines(tuple(angles.double().flatten().tolist()))
    both = torch.tensor(values, dtype=torch.float64).reshape(*angles.shape, 2)
    both = both.to(torch.float32).to(dtype)
    return both[..., 0].contiguous(), both[..., 1].contiguous()


@lru_cache(64)
def _cosines_and_sines(angles: tuple[float, ...]) -> list[tuple[float, float]]:
    with mpmath.workprec(113):
        return [(float(mpmath.cos(a)), float(mpmath.sin(a))) for a in angles]


def scales_exactly(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Where y0 and y1 are multiplied exactly when x is multiplied by a power of two above one, or its negative.

    Rounding to nearest commutes with that while a rounded result is normal, whatever the form of evaluation. So the
    products must be zero or normal in the recipe's dtypes, and the sum normal in the output dtype: a form's sum is
    within (2 u + u^2) (|a| + |b|) of the exact a - b. Arguments are as for
    :func:`~ropecheck.oracle.admissible.admissible`; overflow is the caller's to avoid.
    """
    working = max((_dtype(step.dtype, dtype) for step in recipe.steps), key=_unit)
    u, (of_product, of_output) = float(_unit(working)), (torch.finfo(t).smallest_normal for t in (working, dtype))

    def scales(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
        normal = [(p.abs() >= of_product) | (p == 0) for p in (a, b)]
        return normal[0] & normal[1] & (total.abs() >= 2 * of_output + 3 * u * (a.abs() + b.abs()))

    products = x0 * c, x1 * s, x1 * c, x0 * s
    first = scales(products[0], products[1], products[0] - products[1])
    return first, scales(products[2], products[3], products[2] + products[3])


def _dtype(named: str, activation: torch.dtype) -> torch.dtype:
    return activation if named == "activation" else torch.float32


def _unit(dtype: torch.dtype) -> Fraction:
    """The unit roundoff, 2^-p."""
    return Fraction(1, 2 ** format_of(dtype).precision)


def _least(dtype: torch.dtype) -> Fraction:
    """Half the least subnormal number: the absolute error of a rounding that underflows."""
    form = format_of(dtype)
    return Fraction(2) ** (form.least_exponent - form.precision)


def _up(value: Fraction) -> float:
    return math.nextafter(float(value), math.inf)
