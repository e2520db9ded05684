"""Position rules: worked examples of the vendor, exact ranges and orders, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ropecheck.oracle.pins as pins_module
from ropecheck.oracle.positions import CentredGrid, Grid2D, Sequential, TextAndImages

RECORDED = json.loads((Path(str(pins_module.__file__)).parent / "pins.json").read_text())
EXAMPLES = RECORDED["qwen-image"]["worked_examples"]
SIZES = st.integers(1, 40)


def _grids(example: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(f, h, w) for f, h, w in example["grids"]]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["id"])
def test_worked_examples(example: dict[str, Any]) -> None:
    """The nine worked examples have the vendor's token count, first and last image position, and text positions."""
    rule = CentredGrid(condition_last=example["layered"])
    image, text = rule.image(_grids(example)), rule.text(_grids(example), example["text_length"])
    assert image.dtype == text.dtype == torch.int64
    assert len(image) == example["image_tokens"]
    assert image[0].tolist() == example["first_image_position"]
    assert image[-1].tolist() == example["last_image_position"]
    assert text.tolist() == [[example["text_start"] + j] * 3 for j in range(example["text_length"])]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 4), SIZES, SIZES), min_size=1, max_size=4))
def test_centred_grid_enumerates_frame_row_column(grids: list[tuple[int, int, int]]) -> None:
    """Tokens run image by image, frame, row, column, over the ranges that the vendor documents."""
    expected = [
        [number + f, row - (h - h // 2), column - (w - w // 2)]
        for number, (frames, h, w) in enumerate(grids)
        for f in range(frames)
        for row in range(h)
        for column in range(w)
    ]
    assert CentredGrid().image(grids).tolist() == expected
    assert CentredGrid().text_start(grids) == max(max(h // 2, w // 2) for _, h, w in grids)


def test_uncentred_grid() -> None:
    """Without centring rows and columns count from zero and text starts at the largest side."""
    rule = CentredGrid(centred=False)
    assert rule.image([(1, 2, 3)]).tolist() == [[0, a, b] for a in range(2) for b in range(3)]
    assert rule.text([(1, 2, 3), (1, 5, 1)], 2).tolist() == [[5] * 3, [6] * 3]


def test_single_row_stands_at_minus_one() -> None:
    """A grid of one row and one column stands at -1, not at 0, and its text starts at 0."""
    assert CentredGrid().image([(1, 1, 1)]).tolist() == [[0, -1, -1]]
    assert CentredGrid().text([(1, 1, 1)], 1).tolist() == [[0, 0, 0]]


def test_condition_image_of_layers() -> None:
    """In the layered rule the last entry stands at frame -1 and the number of layers can decide the text start."""
    rule = CentredGrid(condition_last=True)
    assert rule.image([(1, 1, 1)] * 4)[:, 0].tolist() == [0, 1, 2, -1]
    assert rule.text_start([(1, 1, 1)] * 4) == 3
    with pytest.raises(ValueError, match="condition image must have 1 frame"):
        rule.image([(1, 2, 2), (2, 2, 2)])


@pytest.mark.parametrize("length", [*range(1, 130), 1023, 1024, 1025, 6889])
def test_of_length_takes_the_first_tokens_of_a_near_square(length: int) -> None:
    """A length takes the first tokens of the grid with the least height whose square reaches it."""
    height = next(h for h in range(1, length + 1) if h * h >= length)
    width = next(w for w in range(1, length + 1) if height * w >= length)
    taken = CentredGrid().of_length(length)
    assert taken.tolist() == CentredGrid().image([(1, height, width)])[:length].tolist()
    assert len(taken) == length


@pytest.mark.parametrize(
    ("rule", "axes"), [(CentredGrid(), 3), (Grid2D(), 2), (Sequential(), 1)], ids=["centred", "blocks", "sequence"]
)
def test_of_length_zero_and_refusals(rule: CentredGrid | Grid2D | Sequential, axes: int) -> None:
    """No tokens give an empty tensor with the right number of axes; negative and non-integer lengths are refused."""
    assert rule.of_length(0).shape == (0, axes)
    assert rule.of_length(0).dtype == rule.of_length(5).dtype == torch.int64
    assert len(rule.axes) == axes
    for length in (-1, 2.0, "3", True, None):
        with pytest.raises(ValueError, match="length must be an integer from 0 on"):
            rule.of_length(length)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([], "grids must be a list"),
        (5, "grids must be a list"),
        ("abc", "grids must be a list"),
        ([(1, 2)], r"grids\[0\] must be \(frames, height, width\)"),
        ([(1, 2, 2), 7], r"grids\[1\] must be \(frames, height, width\)"),
        ([(0, 2, 2)], r"grids\[0\] frames must be an integer from 1 on, got 0"),
        ([(1, -2, 2)], r"grids\[0\] height must be an integer from 1 on, got -2"),
        ([(1, 2, 2), (1, 2, 2.5)], r"grids\[1\] width must be an integer from 1 on, got 2.5"),
        ([(1, True, 2)], r"grids\[0\] height must be an integer"),
    ],
)
def test_bad_grids_are_refused(grids: Any, message: str) -> None:
    """Every malformed grid is refused with a sentence that names the argument."""
    for rule in (CentredGrid(), CentredGrid(centred=False), Grid2D()):
        with pytest.raises(ValueError, match=message) as caught:
            rule.image(grids)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        CentredGrid().text(grids, 3)


def test_text_past_the_table_is_refused_and_not_cut() -> None:
    """Text may reach the vendor's last table row; one token more is refused where the vendor cuts silently."""
    rule = CentredGrid()
    assert rule.text([(1, 4, 4)], 4094)[-1].tolist() == [4095] * 3
    with pytest.raises(ValueError, match="length: text of 4095 tokens from position 2"):
        rule.text([(1, 4, 4)], 4095)


def test_table_ends_of_images() -> None:
    """Rows reach -4096 and 4095, frames 4095, and nothing beyond."""
    rows = CentredGrid().image([(1, 8192, 1)])[:, 1]
    assert (int(rows.min()), int(rows.max())) == (-4096, 4095)
    assert int(CentredGrid().image([(4096, 1, 1)])[-1, 0]) == 4095
    for grids, name in ([(1, 8193, 1)], "height"), ([(1, 1, 9000)], "width"), ([(1, 1, 1), (4096, 1, 1)], "frames"):
        with pytest.raises(ValueError, match=f"grids: {name} reaches coordinate"):
            CentredGrid().image(grids)
    with pytest.raises(ValueError, match="height reaches coordinate 4096"):
        CentredGrid(centred=False).image([(1, 4097, 1)])


def test_blocks_of_the_vision_grid() -> None:
    """Tokens run block by block, row-major inside a block; frames and images follow one another."""
    one = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert Grid2D().image([(1, 2, 4)]).tolist() == one
    assert Grid2D().image([(2, 2, 4), (1, 2, 2)]).tolist() == one + one + one[:4]
    assert Grid2D(merge=1).image([(1, 2, 2)]).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    with pytest.raises(ValueError, match="multiples of merge = 2, got 3 x 4"):
        Grid2D().image([(1, 3, 4)])


def test_vision_length_uses_whole_blocks() -> None:
    """A length takes the first tokens of the near-square grid rounded up to whole blocks."""
    assert Grid2D().of_length(11).tolist() == Grid2D().image([(1, 4, 4)])[:11].tolist()
    assert Grid2D().of_length(17).tolist() == Grid2D().image([(1, 6, 4)])[:17].tolist()


def test_sequence() -> None:
    """Text models count tokens from zero."""
    assert Sequential().of_length(4).tolist() == [[0], [1], [2], [3]]


def test_text_and_images_follow_one_another() -> None:
    """Text counts on all rows; an image holds its time row still and counts rows and columns from its start."""
    rule = TextAndImages()
    found = rule.sequence([2, (1, 2, 3), 2])
    assert found.T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert rule.image([(2, 1, 2), (1, 1, 1)]).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1], [2, 2, 2]]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 17, 512])
def test_text_and_images_of_any_length(length: int) -> None:
    """A sample has as many tokens as asked for, starts at zero, and from 17 tokens on its rows differ."""
    found = TextAndImages().of_length(length)
    assert found.shape == (length, 3)
    assert not length or int(found.min()) == 0
    if length >= 17:
        assert len({tuple(row.tolist()) for row in found.T}) == 3


@pytest.mark.parametrize("segments", [[-1], [(1, 0, 2)], [(1, 2)], ["7"], [2.0]], ids=str)
def test_bad_segments_are_refused(segments: list[object]) -> None:
    """A segment that is neither a number of tokens nor a grid is a ValueError."""
    with pytest.raises(ValueError, match=r"segments|grids"):
        TextAndImages().sequence(segments)  # type: ignore[arg-type]
