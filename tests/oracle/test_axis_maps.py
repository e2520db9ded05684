"""Axis maps: the published lane strings, counts, orders, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ropecheck.oracle.axis_maps import STYLES, contiguous, ernie, interleaved, require, round_robin


def lanes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.replace(" ", "")))


@pytest.mark.parametrize(
    ("section", "expected", "counts"),
    [
        ((11, 11, 10), "012" * 10 + "01", (11, 11, 10)),
        ((24, 20, 20), "012" * 20 + "0000", (24, 20, 20)),
        ((16, 24, 24), "012" * 21 + "0", (22, 21, 21)),
        ((1, 1, 30), "012" + "002" * 9 + "00", (21, 1, 10)),
    ],
    ids=str,
)
def test_interleaved_lanes(section: tuple[int, int, int], expected: str, counts: tuple[int, int, int]) -> None:
    """Interleaved maps are the published strings; an unbalanced section's counts are not those of the map."""
    made = interleaved(section, 2 * sum(section))
    assert made == lanes(expected)
    assert tuple(map(made.count, range(3))) == counts


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ((8, 12, 12), "012" * 8 + "11211222"),
        ((2, 3, 3), "01201212"),
        ((0, 0, 4), "2222"),
        ((3, 0, 1), "0200"),
    ],
    ids=str,
)
def test_round_robin_lanes(section: tuple[int, int, int], expected: str) -> None:
    """Round robin passes over a row whose quota is exhausted, and every quota is used up exactly."""
    made = round_robin(section, 2 * sum(section))
    assert made == lanes(expected)
    assert tuple(map(made.count, range(3))) == section


@pytest.mark.parametrize("section", [(16, 24, 24), (8, 12, 12), (11, 11, 10), (1, 1, 30), (5, 0, 3)], ids=str)
def test_contiguous_lanes(section: tuple[int, int, int]) -> None:
    """Contiguous maps are the rows in order, each as often as the section says."""
    made = contiguous(section, 2 * sum(section))
    assert made == tuple(sorted(made))
    assert tuple(map(made.count, range(3))) == section


def test_ernie_takes_height_width_time() -> None:
    """Ernie's section is (height, width, time): height and width in turn, time in the last lanes."""
    assert ernie((22, 22, 20), 128) == (1, 2) * 22 + (0,) * 20


@pytest.mark.parametrize("section", [(20, 22, 22), (16, 24, 24), (24, 20, 20), (8, 12, 12)], ids=str)
def test_ernie_refuses_the_order_of_the_rows(section: tuple[int, int, int]) -> None:
    """A section written (time, height, width) is refused by Ernie's builder with a question that says so."""
    with pytest.raises(ValueError, match=r"section must be \(height, width, time\).*written \(time, height, width\)"):
        ernie(section, 2 * sum(section))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("section", "rotary_dim", "said"),
    [
        ((11, 11, 10), 128, r"section must sum to rotary_dim / 2 = 64 lanes, got \(11, 11, 10\) with sum 32"),
        ((11, 11, 11), 64, "section must sum to rotary_dim / 2 = 32 lanes"),
        ((16, 16), 64, "section must be three counts"),
        ((34, -1, -1), 64, "section must be three counts"),
        ((11.0, 11.0, 10.0), 64, "section must be three counts"),
        (32, 64, "section must be three counts"),
        ((11, 11, 10), 63, "rotary_dim must be an even integer from 2 on, got 63"),
        ((0, 0, 0), 0, "rotary_dim must be an even integer from 2 on, got 0"),
    ],
    ids=str,
)
def test_bad_sections_are_refused(style: str, section: object, rotary_dim: int, said: str) -> None:
    """A section that does not sum to the lanes, is no triple of counts, or an impossible width is a ValueError."""
    with pytest.raises(ValueError, match=said):
        STYLES[style](section, rotary_dim)  # type: ignore[arg-type]


def test_a_consumer_of_one_style_gets_exactly_that() -> None:
    """A map of another style, of another length, or of an unknown style is refused by name."""
    section = (8, 12, 12)
    made = round_robin(section, 64)
    assert require("round-robin", made, section, 64) == made
    with pytest.raises(ValueError, match="axis_map is not round-robin: lane 24 reads row 0 where round-robin reads r"):
        require("round-robin", interleaved(section, 64), section, 64)
    with pytest.raises(ValueError, match="axis_map is not ernie: lane 0 reads row 0 where ernie reads row 1"):
        require("ernie", contiguous((20, 22, 22), 128), (22, 22, 20), 128)
    with pytest.raises(ValueError, match="axis_map must have 32 entries, one for each lane, not 31"):
        require("round-robin", made[:-1], section, 64)
    with pytest.raises(ValueError, match="style must be one of contiguous, interleaved, round-robin, ernie, not 'glm'"):
        require("glm", made, section, 64)


@pytest.mark.parametrize("given", [None, 3, ["x"] * 8, [0.5] * 8, torch.zeros(2, 4, dtype=torch.int64)])
def test_what_is_no_map_is_said_to_be_none(given: object) -> None:
    """Nothing is rounded or read from text on the way."""
    with pytest.raises(ValueError, match=r"^axis_map must be a sequence of integers, not "):
        require("contiguous", given, (3, 3, 2), 16)  # type: ignore[arg-type]
