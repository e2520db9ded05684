"""Semantic faults of positions: a token, or an axis of it, is taken to stand somewhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.axis_maps import STYLES
from ropecheck.oracle.contract import Contract

from .fault import SHORT, Misreading, Observed
from .part import Part
from .reading import Reading

_NEAR = tuple(range(-8, 9))
Moved = Callable[[Tensor], Tensor]


def _moved(reading: Reading, where: Moved) -> Reading:
    """Every token at ``where`` of its positions [.., axes], in parts of which it is known where their tables are."""

    def change(part: Part) -> Part:
        positions = part.tables.positions
        return part if positions is None else replace(part, tables=part.tables.at(where(positions)))

    return reading.each(change)


def _axes(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    yield from ((axis,) for axis in range(len(reading.own.positions.axes)))


def _axes_and_steps(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    yield from ((axis, by) for axis in range(len(reading.own.positions.axes)) for by in _NEAR if by)


def _steps(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    """Near ones first, then as far as a token's rows go."""
    yield from ((by,) for by in sorted((b for b in _NEAR if b), key=abs))
    positions = reading.parts[0].tables.positions
    reach = 0 if positions is None or not positions.numel() else int(positions.max() - positions.min())
    for by in range(9, min(reach, 64) + 1):
        yield from ((-by,), (by,))


def _lengths(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    yield from ((n,) for n in range(1, got[0].shape[1]))


def one_axis(reading: Reading, axis: int) -> Reading:
    return _moved(reading, lambda p: p[..., axis : axis + 1].expand(p.shape) if axis < p.shape[-1] else p)


def reordered(reading: Reading, order: tuple[int, ...]) -> Reading:
    return _moved(reading, lambda p: p[..., list(order)] if p.shape[-1] == len(order) else p)


def _swaps(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    axes = range(len(reading.own.positions.axes))
    yield from ((order,) for order in permutations(axes) if sum(a != b for a, b in zip(order, axes, strict=True)) == 2)


def _cycles(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    axes = range(len(reading.own.positions.axes))
    yield from ((order,) for order in permutations(axes) if all(a != b for a, b in zip(order, axes, strict=True)))


def zero_axis(reading: Reading, axis: int) -> Reading:
    return _moved(reading, lambda p: p * (torch.arange(p.shape[-1]) != axis))


def axis_moved(reading: Reading, axis: int, by: int) -> Reading:
    def where(p: Tensor) -> Tensor:
        return p + by * (torch.arange(p.shape[-1]) == axis)

    return _moved(reading, where)


def all_moved(reading: Reading, by: int) -> Reading:
    return _moved(reading, lambda p: p + by)


def multiplied(reading: Reading, by: int) -> Reading:
    return _moved(reading, lambda p: p * by)


def divided(reading: Reading, by: int) -> Reading:
    return _moved(reading, lambda p: torch.div(p, by, rounding_mode="floor"))


def counted(reading: Reading) -> Reading:
    return _moved(reading, lambda p: torch.arange(p.shape[-2])[:, None].expand(p.shape).contiguous())


def restarted(reading: Reading, length: int) -> Reading:
    return _moved(reading, lambda p: p[..., torch.arange(p.shape[-2]) % length, :])


def run_on(reading: Reading) -> Reading:
    """Of tables of each sample, those of a later sample count on where the one before it ended."""

    def where(p: Tensor) -> Tensor:
        if p.dim() == 2:
            return p
        samples = torch.arange(p.shape[0])[:, None, None]
        return p[:1] + samples * p.shape[1]

    return _moved(reading, where)


def uncentred(reading: Reading) -> Reading:
    def where(p: Tensor) -> Tensor:
        lowest = p.flatten(0, -2).amin(0).clamp(max=0) if p.numel() else 0
        return p - lowest

    return _moved(reading, where)


def columns_first(reading: Reading) -> Reading:
    """The tokens of a grid are taken to lie column by column."""

    def where(p: Tensor) -> Tensor:
        if p.shape[-1] < 2 or not p.numel():
            return p
        flat = p.reshape(-1, *p.shape[-2:])
        done = []
        for one in flat:
            rows = one.tolist()
            order = sorted(range(len(rows)), key=lambda i: (*rows[i][:-2], rows[i][-1], rows[i][-2]))
            done.append(one[order])
        return torch.stack(done).reshape(p.shape) if done else p

    return _moved(reading, where)


def text_moved(reading: Reading, by: int) -> Reading:
    """Text behind the last token that stands at unlike coordinates."""

    def where(p: Tensor) -> Tensor:
        if not p.numel():
            return p
        image = (p != p[..., :1]).any(-1)
        behind = torch.arange(p.shape[-2]) > torch.where(image, torch.arange(p.shape[-2]), -1).amax(-1, keepdim=True)
        text = behind & image.any(-1, keepdim=True)
        return torch.where(text[..., None], p + by, p)

    return _moved(reading, where)


def in_dtype(reading: Reading, dtype: torch.dtype) -> Reading:
    return _moved(reading, lambda p: p.to(dtype).clamp(-65504, 65504).long())


def sixteen_bits(reading: Reading) -> Reading:
    return _moved(reading, lambda p: p.to(torch.int16).long())


def clamped(reading: Reading, rows: int) -> Reading:
    return _moved(reading, lambda p: p.clamp(max=rows - 1))


def negative_from_the_other_end(reading: Reading, rows: int) -> Reading:
    return _moved(reading, lambda p: torch.where(p < 0, -rows - 1 - p, p))


def ids_by_token(reading: Reading) -> Reading:
    """Ids that were laid down token by token are read as whole rows, one for each axis."""
    return _moved(reading, lambda p: p.reshape(*p.shape[:-2], p.shape[-1], p.shape[-2]).transpose(-1, -2))


def first_for_all(reading: Reading) -> Reading:
    return _moved(reading, lambda p: p[..., :1, :].expand(p.shape))


def halves_of_words(reading: Reading) -> Reading:
    """Small 64-bit numbers read as twice as many of 32 bits: every other one is the high half of its neighbour."""

    def where(p: Tensor) -> Tensor:
        words = p.transpose(-1, -2).clone(memory_format=torch.contiguous_format).view(torch.int32)[..., : p.shape[-2]]
        return words.transpose(-1, -2).long()

    return _moved(reading, where)


def mapped(reading: Reading, style: str) -> Reading:
    """Which axis a lane reads, by another style of map of as many lanes of each."""

    def change(part: Part) -> Part:
        tables = part.tables
        if tables.axis_map is None or tables.positions is None:
            return part
        counts = [tables.axis_map.count(row) for row in range(3)]
        section = (counts[1], counts[2], counts[0]) if style == "ernie" else counts
        try:
            lanes = STYLES[style](section, 2 * tables.lanes)
        except ValueError:
            return part
        return replace(part, tables=tables.at(tables.positions, lanes))

    return reading.each(change)


def first_sample(reading: Reading) -> Reading:
    def change(part: Part) -> Part:
        cos, sin = part.tables.cos, part.tables.sin
        return part.reading(cos=cos[:1].expand_as(cos), sin=sin[:1].expand_as(sin)) if cos.dim() == 3 else part

    return reading.each(change)


def row_moved(reading: Reading, by: int) -> Reading:
    """Whatever the tables are: a token reads the row of the token ``by`` further on, round the end."""
    return reading.each(lambda part: part.reading(
        cos=part.tables.cos.roll(-by, dims=-2), sin=part.tables.sin.roll(-by, dims=-2)
    ))  # fmt: skip


def head_added(reading: Reading) -> Reading:
    """A head's number counts as a step along the sequence."""
    return _by_head(reading, lambda tokens, heads: (tokens[:, None] + heads) % max(1, len(tokens)))


def head_added_to_the_id(reading: Reading) -> Reading:
    """As :func:`head_added`, where a position is looked up in a cache, which has rows that no token stands at."""

    def change(part: Part) -> Part:
        positions = part.tables.positions
        if positions is None or positions.dim() != 2:
            return part
        where = positions[:, None] + torch.arange(part.x.shape[2])[:, None]
        there = part.tables.at(where.flatten(0, 1))
        shape = (1, *where.shape[:2], part.tables.lanes)
        return part.reading(cos=there.cos.reshape(shape), sin=there.sin.reshape(shape))

    return reading.each(change)


def head_for_token(reading: Reading) -> Reading:
    """The row of the tables is the head's number."""
    return _by_head(reading, lambda tokens, heads: (heads + 0 * tokens[:, None]) % max(1, len(tokens)))


def _by_head(reading: Reading, row: Callable[[Tensor, Tensor], Tensor]) -> Reading:
    def change(part: Part) -> Part:
        length, heads = part.x.shape[1:3]
        if part.tables.cos.dim() == 4:
            return part
        rows = row(torch.arange(length), torch.arange(heads))
        cos, sin = (t[..., rows, :] for t in (part.tables.cos, part.tables.sin))
        cos, sin = (t if t.dim() == 4 else t[None] for t in (cos, sin))
        return part.reading(cos=cos, sin=sin)

    return reading.each(change)


def _named(own: Contract, axis: int) -> str:
    return own.positions.axes[axis]


_MROPE: dict[str, Any] = {"family": "rotate_qk", "contract": "mrope-interleaved"}
_TEXT: dict[str, Any] = {"family": "rotate_qk", "contract": "neox"}

POSITIONS = (
    Misreading(
        "one-axis-for-all", lambda own, axis: f"every lane uses the {_named(own, axis)} row (the others ignored)",
        one_axis, (0,), _axes, rows=("O001", "O004"), **_MROPE,
    ),
    Misreading(
        "axes-swapped", lambda own, order: f"the axes are read in the order {', '.join(_named(own, a) for a in order)}",
        reordered, ((0, 2, 1),), _swaps, rows=("O003", "O006", "O007", "O008"),
    ),
    Misreading(
        "axes-in-a-circle",
        lambda own, order: f"the axes are read in the order {', '.join(_named(own, a) for a in order)}",
        reordered, ((1, 2, 0),), _cycles,
    ),
    Misreading(
        "axis-zeroed", lambda own, axis: f"the {_named(own, axis)} coordinate of every token is zero",
        zero_axis, (1,), _axes, rows=("O003",),
    ),
    Misreading(
        "axis-moved", lambda own, axis, by: f"the {_named(own, axis)} coordinate of every token is {by:+d} off",
        axis_moved, (2, 1), _axes_and_steps,
    ),
    Misreading("position-moved", "every token stands {0:+d} from its position", all_moved, (1,), _steps,
               rows=("O002", "O080"), **_TEXT),
    Misreading("positions-multiplied", "every position is taken {0} times", multiplied, (2,),
               lambda r, g: ((n,) for n in (2, 3, 4, 8)), rows=("O072",)),
    Misreading("positions-divided", "every position is divided by {0} and rounded down", divided, (2,),
               lambda r, g: ((n,) for n in (2, 3, 4, 8))),
    Misreading("positions-counted", "positions are counted from zero, not read", counted, rows=("O074",), **_TEXT),
    Misreading("chunks-from-the-start", "positions start again after every {0} tokens", restarted, (4,), _lengths,
               rows=("O081", "O073"), **_TEXT),
    Misreading("samples-run-on", "a sample's positions go on where the sample before it ended", run_on, rows=("O082",)),
    Misreading("grid-uncentred", "coordinates are counted from zero, not from the middle of the grid", uncentred,
               rows=("O008",)),
    Misreading("grid-transposed", "tokens of a grid are taken to lie column by column", columns_first, rows=("O008",)),
    Misreading("text-moved", "text behind an image stands {0:+d} from its position", text_moved, (2,), _steps,
               **_MROPE),
    Misreading("positions-rounded",
               lambda own, dtype: f"positions are rounded to {SHORT[dtype]}", in_dtype,
               (torch.bfloat16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), rows=("O055", "O056"), **_TEXT),
    Misreading("positions-in-16-bits", "positions are cut to 16 bits", sixteen_bits, **_TEXT),
    Misreading("positions-clamped", "positions end at row {0} of the table", clamped, (4096,),
               lambda r, g: ((n,) for n in (512, 1024, 2048, 4096, 8192, 32768, 65536)),
               rows=("O050",), **_TEXT),
    Misreading("negative-from-the-other-end", "negative coordinates count from the other end of a table of {0} rows",
               negative_from_the_other_end, (4096,), rows=("O009",)),
    Misreading("ids-in-32-bit-words", "64-bit positions are read as twice as many of 32 bits", halves_of_words,
               rows=("O048",), **_TEXT),
    Misreading("ids-token-by-token", "positions are laid down token by token, and read row by row", ids_by_token,
               rows=("O005",), **_MROPE),
    Misreading("first-position-for-all", "every token stands where the first one does", first_for_all,
               family="rotate_qk", contract="gptj", rows=("O115",)),
    Misreading("another-map", "lanes are given to axes by the {0} map", mapped, ("contiguous",),
               lambda r, g: ((style,) for style in STYLES), **_MROPE),
    Misreading("first-samples-table", "every sample reads the first sample's table", first_sample,
               rows=("O075",)),
    Misreading("row-moved", "every token reads the row of the token {0:+d} from it", row_moved, (1,),
               lambda r, g: ((by,) for by in sorted((b for b in _NEAR if b), key=abs)), contract="hf-llama"),
    Misreading("head-added-to-the-position", "a head's number is added to the position", head_added, contract="neox",
               rows=("O018",)),
    Misreading("head-added-to-the-id", "a head's number is added to the position that is looked up",
               head_added_to_the_id, rows=("O025",), **_TEXT),
    Misreading("head-for-the-position", "the row of the tables is the head's number", head_for_token, contract="neox",
               rows=("O020", "O034")),
)  # fmt: skip
