"""Position rules: the int64 coordinates of every logical token on each axis of a contract.

Facts: diffusers 0.35.0 to 0.42.1 (``QwenEmbedRope``, ``QwenEmbedLayer3DRope``) and transformers 5.24.0
(``get_vision_position_ids``), executed by :mod:`ropecheck.oracle.pins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from operator import index
from typing import ClassVar

import torch
from torch import Tensor

from .contract import Grid


@dataclass(frozen=True)
class CentredGrid:
    """Image tokens on a grid centred at zero, text tokens behind it: the rule of Qwen-Image.

    A grid of ``height`` rows covers ``-(height - height // 2)`` to ``height // 2 - 1``: an odd size has its
    extra line on the negative side and a single row stands at -1. Columns likewise. The frame coordinate is the
    frame number plus the number of the image in the sample. Text token ``j`` has ``text_start + j`` on all axes.

    ``centred=False`` counts rows and columns from zero (the vendor's ``scale_rope=False``).
    ``condition_last=True`` is the layered variant: the last grid is the condition image, at frame -1.

    The vendor keeps ``table_rows`` coordinates of either sign. It cuts text short, silently, at the end of its
    table; here every coordinate outside ``-table_rows`` to ``table_rows - 1`` is refused.
    """

    centred: bool = True
    condition_last: bool = False
    table_rows: int = 4096
    axes: ClassVar[tuple[str, ...]] = ("frame", "height", "width")

    def image(self, grids: Sequence[Grid]) -> Tensor:
        """int64 [tokens, 3] of all ``grids`` of one sample, each frame by frame, row by row.

        Raises ValueError where ``grids`` is empty, is not made of three integers from 1 on each, or leaves the
        vendor's table.
        """
        checked = _grids(grids)
        parts = []
        for number, (frames, height, width) in enumerate(checked):
            start = number
            if self.condition_last and number == len(checked) - 1:
                if frames != 1:
                    raise ValueError(f"grids: the condition image must have 1 frame, got {frames}")
                start = -1
            self._within(start + frames - 1, "frames")
            parts.append(
                _mesh(torch.arange(start, start + frames), self._line(height, "height"), self._line(width, "width"))
            )
        return torch.cat(parts)

    def text(self, grids: Sequence[Grid], length: int) -> Tensor:
        """int64 [length, 3] of the text of a sample whose images are ``grids``.

        Raises ValueError as :meth:`image` does, for a negative ``length``, and where the text would pass the end
        of the vendor's table.
        """
        length = _integer(length, "length", 0)
        start = self.text_start(grids)
        if start + length > self.table_rows:
            raise ValueError(
                f"length: text of {length} tokens from position {start} passes the vendor's {self.table_rows} table "
                f"rows (the vendor would cut it to {max(self.table_rows - start, 0)} tokens)"
            )
        return torch.arange(start, start + length)[:, None].repeat(1, 3)

    def text_start(self, grids: Sequence[Grid]) -> int:
        """The coordinate of the first text token: the largest ``max(height // 2, width // 2)`` of all grids."""
        checked = _grids(grids)
        start = max(max(h // 2, w // 2) if self.centred else max(h, w) for _, h, w in checked)
        return max(start, len(checked) - 1) if self.condition_last else start

    def of_length(self, length: int) -> Tensor:
        """int64 [length, 3]: the first ``length`` tokens of one grid with ``height = ceil(sqrt(length))`` and
        ``width = ceil(length / height)``. Raises ValueError for a negative ``length``."""
        length = _integer(length, "length", 0)
        return self.image([(1, *_square(length))])[:length] if length else torch.zeros(0, 3, dtype=torch.int64)

    def _line(self, size: int, name: str) -> Tensor:
        first = -(size - size // 2) if self.centred else 0
        self._within(first, name)
        self._within(first + size - 1, name)
        return torch.arange(first, first + size)

    def _within(self, coordinate: int, name: str) -> None:
        if not -self.table_rows <= coordinate < self.table_rows:
            raise ValueError(
                f"grids: {name} reaches coordinate {coordinate}, outside the vendor's table "
                f"(-{self.table_rows} to {self.table_rows - 1})"
            )


@dataclass(frozen=True)
class TextAndImages:
    """Text and images in one sequence with rows (time, height, width): the rule of M-RoPE models.

    A text token has one number, the same on all rows, and counts on. An image that starts at ``s`` has
    ``(s + frame, s + row, s + column)``, row by row, and what follows it goes on at ``s + max(height, width)``. Grids
    are counted in tokens, after the merging of patches. Facts: transformers 5.4.0 to 5.24.0, ``get_rope_index`` of
    Qwen3.5; until 5.0.0, and in SGLang, a video of more frames than that moved what follows further.
    """

    axes: ClassVar[tuple[str, ...]] = ("time", "height", "width")

    def sequence(self, segments: Sequence[int | Grid]) -> Tensor:
        """int64 [tokens, 3] of a sample made of text (a number of tokens) and images (a grid), in their order.

        Raises ValueError for a negative number, or a grid that is not three integers from 1 on.
        """
        start, parts = 0, [torch.zeros(0, 3, dtype=torch.int64)]
        for segment in segments:
            if isinstance(segment, int):
                length = _integer(segment, "segments: text", 0)
                parts.append(torch.arange(start, start + length)[:, None].repeat(1, 3))
                start += length
            else:
                frames, height, width = _grids([segment])[0]
                parts.append(start + _mesh(torch.arange(frames), torch.arange(height), torch.arange(width)))
                start += max(height, width)
        return torch.cat(parts)

    def image(self, grids: Sequence[Grid]) -> Tensor:
        """int64 [tokens, 3] of images one after the other. Raises ValueError as :meth:`sequence`, or without any."""
        return self.sequence(_grids(grids))

    def of_length(self, length: int) -> Tensor:
        """int64 [length, 3]: a fifth of text, an image about half as long, and text again.

        Raises ValueError for a negative ``length``.
        """
        length = _integer(length, "length", 0)
        height, width = _square(length // 2) if length > 1 else (0, 0)
        image = [(1, height, width)] if length > 1 else []
        return self.sequence([length // 5, *image, length])[:length]


@dataclass(frozen=True)
class Sequential:
    """Tokens counted from zero on one axis: the rule of text models."""

    axes: ClassVar[tuple[str, ...]] = ("position",)

    def of_length(self, length: int) -> Tensor:
        """int64 [length, 1]. Raises ValueError for a negative ``length``."""
        return torch.arange(_integer(length, "length", 0))[:, None]


@dataclass(frozen=True)
class Grid2D:
    """(row, column) from zero, enumerated ``merge`` x ``merge`` block by block: the rule of Qwen2-VL's vision tower.

    Frames repeat the same coordinates.
    """

    merge: int = 2
    axes: ClassVar[tuple[str, ...]] = ("height", "width")

    def image(self, grids: Sequence[Grid]) -> Tensor:
        """int64 [tokens, 2] of all ``grids`` of one sample.

        Raises ValueError where ``grids`` is empty, is not made of three integers from 1 on each, or where a
        height or width is no multiple of ``merge``.
        """
        parts = []
        for frames, height, width in _grids(grids):
            if height % self.merge or width % self.merge:
                raise ValueError(
                    f"grids: height and width must be multiples of merge = {self.merge}, got {height} x {width}"
                )
            cells = _mesh(torch.arange(height), torch.arange(width))
            blocks = cells.view(height // self.merge, self.merge, width // self.merge, self.merge, 2)
            parts.append(blocks.transpose(1, 2).reshape(-1, 2).repeat(frames, 1))
        return torch.cat(parts)

    def of_length(self, length: int) -> Tensor:
        """int64 [length, 2]: the first ``length`` tokens, in the vendor's block order, of one grid with
        ``height = ceil(sqrt(length))`` and ``width = ceil(length / height)``, each rounded up to a multiple of
        ``merge`` (the vendor has no other grids). Raises ValueError for a negative ``length``."""
        length = _integer(length, "length", 0)
        if not length:
            return torch.zeros(0, 2, dtype=torch.int64)
        height, width = (-(-size // self.merge) * self.merge for size in _square(length))
        return self.image([(1, height, width)])[:length]


def _square(length: int) -> tuple[int, int]:
    """(ceil(sqrt(length)), ceil(length / that)) in integers, for ``length`` from 1 on."""
    height = isqrt(length - 1) + 1
    return height, -(-length // height)


def _mesh(*lines: Tensor) -> Tensor:
    """int64 [product of sizes, axes]: every combination, the last axis fastest."""
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).reshape(-1, len(lines))


def _integer(value: object, name: str, least: int) -> int:
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an integer from {least} on, got {value!r}")
    return number


def _grids(grids: Sequence[Grid]) -> list[Grid]:
    if isinstance(grids, str) or not isinstance(grids, Sequence) or not grids:
        raise ValueError(f"grids must be a list of (frames, height, width) with at least one entry, got {grids!r}")
    checked: list[Grid] = []
    for number, grid in enumerate(grids):
        if isinstance(grid, str) or not isinstance(grid, Sequence) or len(grid) != 3:
            raise ValueError(f"grids[{number}] must be (frames, height, width), got {grid!r}")
        frames, height, width = (
            _integer(size, f"grids[{number}] {name}", 1)
            for size, name in zip(grid, ("frames", "height", "width"), strict=True)
        )
        checked.append((frames, height, width))
    return checked
