"""Faults that are none: what looks wrong and cannot be told from what is right, each with a proof that is executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ropecheck.oracle.axis_maps import HEIGHT, TIME, WIDTH, interleaved

from .fault import Fault
from .mutants import mutant
from .part import Part
from .reading import Reading

_COUNTS = 40


def at_most(section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """The interleaved map with ``<=`` where it has ``<``: height at lanes 1, 4, 7 .. up to three times its count."""
    _, height, width = section
    lanes = [TIME] * (rotary_dim // 2)
    for lane in range(len(lanes)):
        if lane % 3 == HEIGHT and lane <= 3 * height:
            lanes[lane] = HEIGHT
        if lane % 3 == WIDTH and lane <= 3 * width:
            lanes[lane] = WIDTH
    return tuple(lanes)


def maps_agree() -> str:
    """Where the two maps differ, over all sections of up to 39 lanes a row; empty where they do nowhere."""
    for height in range(_COUNTS):
        for width in range(_COUNTS):
            for time in (0, 1, _COUNTS - 1):
                section = (time, height, width)
                lanes = sum(section)
                if lanes and at_most(section, 2 * lanes) != interleaved(section, 2 * lanes):
                    return f"the maps of section {section} differ"
    return ""


def _mapped(reading: Reading) -> Reading:
    lanes = at_most((24, 20, 20), 128)

    def change(part: Part) -> Part:
        tables = part.tables
        if tables.positions is None or tables.axis_map is None:
            return part
        return replace(part, tables=tables.at(tables.positions, lanes))

    return reading.each(change)


EQUIVALENTS = (
    Fault(
        "interleaved-up-to-and-with", "semantic",
        "lanes of an interleaved map end with three times a row's count, not before it",
        "rotate_qk", "mrope-interleaved",
        partial(mutant, "interleaved-up-to-and-with", "mrope-interleaved", "rotate_qk", _mapped, "bfloat16"),
        rows=("C005",), equivalent="a lane's remainder by three makes < and <= one test", check=maps_agree,
    ),
)  # fmt: skip
