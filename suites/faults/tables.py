"""Semantic faults of tables: other cosines and sines than those that are given, or a lane's by another lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.floats import from_key, key

from .fault import SHORT, Misreading, Observed
from .part import Part, evaluated
from .reading import Reading

Angles = Callable[[Contract, Tensor, int], Tensor]
"""fp32 [.., n / 2] of positions [..] on an axis of n channels."""

_BASES = (1e2, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 15e4, 2e5, 25e4, 5e5, 1e6, 2e6, 5e6, 1e7, 5e7, 1e8)


def _changed(reading: Reading, cos: Callable[[Tensor], Tensor], sin: Callable[[Tensor], Tensor]) -> Reading:
    return reading.each(lambda part: part.reading(cos=cos(part.tables.cos), sin=sin(part.tables.sin)))


def _unchanged(table: Tensor) -> Tensor:
    return table


def rounded(reading: Reading, dtype: torch.dtype) -> Reading:
    return _changed(reading, *(lambda t: t.to(dtype).to(t.dtype),) * 2)


def ulps_off(reading: Reading, which: str, by: int) -> Reading:
    """The numbers ``by`` ulp above, or below, those of one table, or of both."""

    def off(table: Tensor) -> Tensor:
        toward = torch.full_like(table, torch.inf if by > 0 else -torch.inf)
        for _ in range(abs(by)):
            table = torch.nextafter(table, toward)
        return table

    return _changed(reading, off if which != "sine" else _unchanged, off if which != "cosine" else _unchanged)


def _ulps(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    for by in (1, -1, 2, -2, 3, -3):
        yield from ((which, by) for which in ("cosine", "sine", "cosine and the sine"))


def negated(reading: Reading) -> Reading:
    return _changed(reading, _unchanged, torch.neg)


def exchanged(reading: Reading) -> Reading:
    return reading.each(lambda part: part.reading(cos=part.tables.sin, sin=part.tables.cos))


def sine_for_both(reading: Reading) -> Reading:
    return reading.each(lambda part: part.reading(cos=part.tables.sin))


def without_sine(reading: Reading) -> Reading:
    return _changed(reading, _unchanged, torch.zeros_like)


def scaled(reading: Reading, by: float) -> Reading:
    return _changed(reading, *(lambda t: (t.float() * by).to(t.dtype),) * 2)


def factors(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    """The one number with which right results round to the observed ones, with as few decimals as that leaves it."""
    least, greatest, product, square = 0.0, torch.inf, 0.0, 0.0
    for part, came in zip(reading.parts, got, strict=True):
        if not part.turned or not part.x.numel():
            continue
        # In fp32 the middles are no nearer than the error of y: there the fit by squares is better.
        y = evaluated(part if part.norm is not None else replace(part, x=part.x.float(), kept=()))
        y, z = (t[..., : part.width].contiguous() for t in (y, came))
        plain = y.isfinite() & z.isfinite() & (z != 0) & (y.abs() > y.nan_to_num(0.0, 0.0, 0.0).abs().max() / 256)
        y, z = y[plain].double(), z[plain]
        # A result is any number between the middles of its neighbourhood.
        ends = [(z.double() + from_key(key(z) + step, z.dtype).double()) / 2 / y for step in (-1, 1)]
        if y.numel():
            low, high = torch.minimum(*ends), torch.maximum(*ends)
            least, greatest = max(least, float(low.max())), min(greatest, float(high.min()))
            product, square = product + float((y * z).sum()), square + float((y * y).sum())
    if square and product:
        narrow = got[0].dtype != torch.float32 and least < greatest
        fitted = (least + greatest) / 2 if narrow else product / square
        yield from ((value,) for value in dict.fromkeys(float(f"{fitted:.{digits}g}") for digits in range(2, 10)))


def lane_moved(reading: Reading, by: int) -> Reading:
    return _by_lane(reading, lambda lane, lanes: (lane + by) % lanes)


def range_off(reading: Reading, first: int, last: int, by: int) -> Reading:
    """Lanes ``first`` to ``last`` read the column of the lane ``by`` further."""

    def column(lane: Tensor, lanes: int) -> Tensor:
        inside = (lane >= first) & (lane <= last)
        return torch.where(inside, (lane + by).clamp(0, lanes - 1), lane)

    return _by_lane(reading, column)


def _ranges(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    """The lanes that are not as they should be, as one run."""
    wrong = wrong_lanes(reading, got)
    if len(wrong):
        yield from ((int(wrong[0]), int(wrong[-1]), by) for by in (1, -1, 2, -2))


def wrong_lanes(reading: Reading, got: Observed) -> Tensor:
    """int64: the lanes of which some element is not one that a right implementation may return."""
    found = torch.zeros(0, dtype=torch.bool)
    for part, may in zip(reading.parts, reading.explains(got), strict=True):
        if part.turned and part.tables.lanes:
            halves = part.pairing.split(~may[..., : part.width])
            lanes = (halves[0] | halves[1]).reshape(-1, part.tables.lanes).any(0)
            found = lanes if not found.numel() else found | lanes
    return found.nonzero().flatten()


def first_half_twice(reading: Reading) -> Reading:
    return _by_lane(reading, lambda lane, lanes: lane % max(1, lanes // 2))


def columns_in_twos(reading: Reading) -> Reading:
    """Each column of a table stands for two lanes, as where it was made for channels and not for lanes."""
    return _by_lane(reading, lambda lane, lanes: lane // 2)


def every_other_column(reading: Reading) -> Reading:
    return _by_lane(reading, lambda lane, lanes: 2 * lane % lanes)


def reversed_lanes(reading: Reading) -> Reading:
    return _by_lane(reading, lambda lane, lanes: lanes - 1 - lane)


def _by_lane(reading: Reading, column: Callable[[Tensor, int], Tensor]) -> Reading:
    def change(part: Part) -> Part:
        columns = column(torch.arange(part.tables.lanes), part.tables.lanes)
        return part.reading(cos=part.tables.cos[..., columns], sin=part.tables.sin[..., columns])

    return reading.each(change)


def turned_further(reading: Reading, first: int, by: int) -> Reading:
    """Lanes from ``first`` on stand elsewhere, as where a range of them is off by one."""

    def change(part: Part) -> Part:
        tables = part.tables
        # Tables of each head are another fault's, and no longer those of the positions.
        if tables.positions is None or tables.cos.dim() == 4:
            return part
        further = tables.at(tables.positions + by)
        slow = torch.arange(tables.lanes) >= first
        return part.reading(
            cos=torch.where(slow, further.cos, tables.cos), sin=torch.where(slow, further.sin, tables.sin)
        )

    return reading.each(change)


def _from_lane(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    wrong = wrong_lanes(reading, got)
    if len(wrong):
        yield from ((int(wrong[0]), by) for by in (1, -1, 2, -2))


def by_angles(reading: Reading, angles: Angles) -> Reading:
    """Tables that are made anew, from the ``angles`` of each axis of the contract."""

    def change(part: Part) -> Part:
        tables, own = part.tables, reading.own
        if tables.positions is None or tables.lanes != own.lanes.lanes:
            return part
        per_axis = [angles(own, tables.positions[..., a], n) for a, n in enumerate(own.lanes.dims)]
        lanes = zip(own.lanes.axis, own.lanes.frequency, strict=True)
        whole = torch.stack([per_axis[axis][..., number] for axis, number in lanes], dim=-1)
        return replace(part, tables=replace(
            tables, cos=whole.cos().to(tables.cos.dtype), sin=whole.sin().to(tables.sin.dtype)
        ))  # fmt: skip

    return reading.each(change)


def _rates(own: Contract, channels: int, theta: float = 0.0, of: int = 0) -> Tensor:
    base = theta or float(getattr(own.frequencies, "theta", 1e4))
    return 1.0 / base ** (torch.arange(0, channels, 2, dtype=torch.float32) / (of or channels))


def rates_rounded(reading: Reading, dtype: torch.dtype) -> Reading:
    return by_angles(reading, lambda own, p, n: p[..., None].float() * _rates(own, n).to(dtype).float())


def angles_rounded(reading: Reading, dtype: torch.dtype) -> Reading:
    return by_angles(reading, lambda own, p, n: (p[..., None].float() * _rates(own, n)).to(dtype).float())


def exponent_over(reading: Reading, channels: int) -> Reading:
    return by_angles(reading, lambda own, p, n: p[..., None].float() * _rates(own, n, of=channels))


def another_base(reading: Reading, theta: float) -> Reading:
    return by_angles(reading, lambda own, p, n: p[..., None].float() * _rates(own, n, theta))


def interpolated(reading: Reading, factor: float) -> Reading:
    return by_angles(reading, lambda own, p, n: p[..., None].float() / factor * _rates(own, n))


def reduced_roughly(reading: Reading) -> Reading:
    """Angles are brought into one turn by an fp32 number for 2 pi."""
    turn = torch.tensor(2 * torch.pi, dtype=torch.float32)

    def angles(own: Contract, p: Tensor, n: int) -> Tensor:
        angle = p[..., None].float() * _rates(own, n)
        return angle - (angle / turn).round() * turn

    return by_angles(reading, angles)


_EXACT: dict[str, Any] = {"dtype": "float32"}

TABLES = (
    Misreading("table-rounded",
               lambda own, dtype: f"the tables are rounded to {SHORT[dtype]}", rounded,
               (torch.bfloat16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), rows=("O059",)),
    Misreading("table-an-ulp-off", "the {0} is {1:+d} fp32 ulp off", ulps_off, ("cosine", 1), _ulps, **_EXACT),
    Misreading("sine-negated", "the sine has the other sign", negated),
    Misreading("tables-exchanged", "the cosine is taken for the sine, and the sine for the cosine", exchanged),
    Misreading("one-table-for-both", "the sine is taken for the cosine, too", sine_for_both),
    Misreading("sine-dropped", "the sine is zero", without_sine),
    Misreading("tables-scaled", "the tables are multiplied by {0:.9g}", scaled, (1.4158883,), factors,
               rows=("O062", "O063"), **_EXACT),
    Misreading("lane-moved", "every lane reads the column of the lane {0:+d} from it", lane_moved, (1,),
               lambda r, g: ((by,) for by in (1, -1, 2, -2, 3, -3)), contract="neox"),
    Misreading("lanes-off-by-one", "lanes {0} to {1} read the column of the lane {2:+d} from them", range_off,
               (56, 62, 1), _ranges, **_EXACT),
    Misreading("slow-lanes-off", "lanes from {0} on stand {1:+d} from their position", turned_further, (48, 1),
               _from_lane),
    Misreading("first-half-of-the-table", "the second half of the lanes reads the columns of the first",
               first_half_twice, rows=("O021",)),
    Misreading("columns-in-twos", "each column of the tables is read by two neighbouring lanes", columns_in_twos,
               contract="neox"),
    Misreading("every-other-column", "every other column of the tables is read, twice", every_other_column,
               contract="neox"),
    Misreading("lanes-reversed", "the lanes read the columns from the last to the first", reversed_lanes,
               contract="neox"),
    Misreading("angles-rounded", lambda own, dtype: f"the angles are rounded to {SHORT[dtype]}", angles_rounded,
               (torch.float16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), rows=("O053",)),
    Misreading("frequencies-rounded",
               lambda own, dtype: f"the inverse frequencies are rounded to {SHORT[dtype]}", rates_rounded,
               (torch.bfloat16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), rows=("O054", "O060")),
    Misreading("exponent-over-the-head", "the exponent of the frequencies is divided by {0} channels", exponent_over,
               (128,), lambda r, g: ((n,) for n in (16, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256)),
               rows=("O014",)),
    Misreading("another-base", "the base of the frequencies is {0:.9g}", another_base, (1e6,),
               lambda r, g: ((base,) for base in _BASES)),
    Misreading("positions-interpolated", "every angle is divided by {0:.9g}", interpolated, (4.0,),
               lambda r, g: ((f,) for f in (2.0, 4.0, 8.0, 16.0, 32.0, 64.0))),
    Misreading("angles-reduced-roughly", "angles are reduced by an fp32 number for 2 pi", reduced_roughly,
               rows=("O057",), **_EXACT),
)  # fmt: skip
