"""Axis maps: which row of the positions each lane of a sectioned rotation reads.

Rows are (time, height, width), numbered 0 to 2, whatever order the section is written in. There is no default
style: fields that differ in style share sections and shapes, and a wrong map rotates text correctly.

Facts: SGLang 0.5.19 to 0.5.23 (``MRotaryEmbedding._build_axis_map``) for the first three styles, and transformers
5.24.0 for Ernie 4.5 VL's (``Ernie4_5_VLMoeTextRotaryEmbedding``). SGLang and vLLM silently rescale, or assert on, a
section that does not fit its rotary width; here it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from types import MappingProxyType

TIME, HEIGHT, WIDTH = range(3)

Builder = Callable[[Sequence[int], int], tuple[int, ...]]


def contiguous(section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """All lanes of the time row, then of the height row, then of the width row: Qwen2-VL.

    ``section`` counts the lanes of (time, height, width); the map has ``rotary_dim / 2`` entries. Raises ValueError
    for a section that is not three counts that sum to that, or a ``rotary_dim`` that is not positive and even.
    """
    checked = _section(section, rotary_dim, "time, height, width")
    return tuple(row for row, count in enumerate(checked) for _ in range(count))


def interleaved(section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """Height at lanes 1, 4, 7, ... below three times its count, width at 2, 5, 8, ..., time elsewhere: Qwen3-VL.

    Lanes end before an unbalanced section is used up, so that a row may get more or fewer lanes than its count:
    (16, 24, 24) gives 22, 21 and 21. Arguments and errors as for :func:`contiguous`.
    """
    _, height, width = _section(section, rotary_dim, "time, height, width")
    lanes = [TIME] * (rotary_dim // 2)
    for row, count in ((HEIGHT, height), (WIDTH, width)):
        for lane in range(row, min(3 * count, len(lanes)), 3):
            lanes[lane] = row
    return tuple(lanes)


def round_robin(section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """Lane ``l`` starts at row ``l mod 3`` and goes on to the next while a row's count is used up: GLM in SGLang.

    No class of transformers up to 5.24.0 uses it. Arguments and errors as for :func:`contiguous`.
    """
    left = list(_section(section, rotary_dim, "time, height, width"))
    lanes = []
    for lane in range(rotary_dim // 2):
        row = next((lane + step) % 3 for step in range(3) if left[(lane + step) % 3])
        left[row] -= 1
        lanes.append(row)
    return tuple(lanes)


def ernie(section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """Height and width in turn, then time: Ernie 4.5 VL.

    ``section`` counts the lanes of (height, width, time), in this order, while the rows of the positions are still
    (time, height, width). Height and width take turns, so their counts must be equal: a section written in the
    order of the rows is refused where that shows. Other errors as for :func:`contiguous`.
    """
    height, width, time = _section(section, rotary_dim, "height, width, time")
    if height != width:
        raise ValueError(
            f"section must be (height, width, time) with as many lanes for height as for width, got "
            f"{tuple(section)}; is it written (time, height, width)?"
        )
    return (HEIGHT, WIDTH) * height + (TIME,) * time


STYLES: Mapping[str, Builder] = MappingProxyType(
    {"contiguous": contiguous, "interleaved": interleaved, "round-robin": round_robin, "ernie": ernie}
)
"""The builders by name."""


def require(style: str, axis_map: Sequence[int], section: Sequence[int], rotary_dim: int) -> tuple[int, ...]:
    """``axis_map`` where it is exactly the one of ``style``, for consumers that know a single style.

    Raises ValueError with the first lane that differs, for an unknown style, and as the style's builder does.
    """
    if not isinstance(style, str) or style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
    expected = STYLES[style](section, rotary_dim)
    try:
        given = tuple(map(_integer, axis_map))
    except TypeError:
        raise ValueError(f"axis_map must be a sequence of integers, not {axis_map!r}") from None
    if len(given) != len(expected):
        raise ValueError(f"axis_map must have {len(expected)} entries, one for each lane, not {len(given)}")
    for lane, (wanted, got) in enumerate(zip(expected, given, strict=True)):
        if wanted != got:
            raise ValueError(f"axis_map is not {style}: lane {lane} reads row {got} where {style} reads row {wanted}")
    return given


def _section(section: Sequence[int], rotary_dim: int, order: str) -> tuple[int, int, int]:
    try:
        odd = _integer(rotary_dim) % 2
    except TypeError:
        odd = True
    if odd or rotary_dim < 2:
        raise ValueError(f"rotary_dim must be an even integer from 2 on, got {rotary_dim!r}")
    try:
        counts = tuple(_integer(section[row]) for row in range(len(section)))
    except (TypeError, KeyError):
        counts = ()
    if len(counts) != 3 or min(counts) < 0:
        raise ValueError(f"section must be three counts ({order}) from 0 on, got {section!r}")
    if sum(counts) != rotary_dim // 2:
        raise ValueError(
            f"section must sum to rotary_dim / 2 = {rotary_dim // 2} lanes, got {counts} with sum {sum(counts)}"
        )
    first, second, third = counts
    return first, second, third


def _integer(value: object) -> int:
    """``value`` where it is an integer of any kind. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)  # type: ignore[arg-type]
