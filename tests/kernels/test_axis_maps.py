"""Axis maps: the published examples, the refusals, and how a map lives in a module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ropecheck.kernels import contiguous_axis_map, ernie_axis_map, interleaved_axis_map, round_robin_axis_map
from ropecheck.oracle.axis_maps import STYLES

# Builder, order, section, and the axes of the lanes in order.
EXAMPLES: dict[str, tuple[Callable[..., Tensor], str, list[int], str]] = {
    "contiguous": (contiguous_axis_map, "thw", [11, 11, 10], "0" * 11 + "1" * 11 + "2" * 10),
    "contiguous without width": (contiguous_axis_map, "thw", [3, 1, 0], "0001"),
    "interleaved": (interleaved_axis_map, "thw", [11, 11, 10], "012" * 10 + "01"),
    "interleaved, more time": (interleaved_axis_map, "thw", [24, 20, 20], "012" * 20 + "0000"),
    "interleaved, saturated": (interleaved_axis_map, "thw", [16, 24, 24], "012" * 21 + "0"),
    "interleaved, one of width": (interleaved_axis_map, "thw", [1, 1, 30], "012" + "002" * 9 + "00"),
    "round robin": (round_robin_axis_map, "thw", [2, 3, 3], "01201212"),
    "round robin, exhausted": (round_robin_axis_map, "thw", [8, 12, 12], "012" * 8 + "11211222"),
    "round robin, no time": (round_robin_axis_map, "thw", [0, 2, 2], "1122"),
    "Ernie": (ernie_axis_map, "hwt", [22, 22, 20], "12" * 22 + "0" * 20),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_lanes(example: str) -> None:
    """The map is int64 on the CPU and has the axes of the published table, lane by lane."""
    build, order, section, lanes = EXAMPLES[example]
    axis_map = build(section, 2 * sum(section), order=order)
    assert axis_map.dtype == torch.int64
    assert axis_map.device.type == "cpu"
    assert "".join(map(str, axis_map.tolist())) == lanes


def test_maps_are_those_of_the_oracle() -> None:
    """The judge builds its own maps; for sections of up to 7 lanes an axis the two agree, or both refuse."""
    for section in product(range(8), repeat=3):
        rotary_dim = 2 * sum(section)
        for style, (build, order) in ANY_BUILDER.items():
            results = []
            for function, options in ((STYLES[style], {}), (build, {"order": order})):
                try:
                    results.append([int(axis) for axis in function(section, rotary_dim, **options)])
                except ValueError:
                    results.append([])
            assert results[0] == results[1], (style, section)


def test_interleaved_counts_may_differ_from_the_section() -> None:
    """A section that is not balanced enough does not get the lanes it says; the other builders give them."""
    section = [16, 24, 24]
    assert torch.bincount(interleaved_axis_map(section, 128, order="thw")).tolist() == [22, 21, 21]
    for build in (contiguous_axis_map, round_robin_axis_map):
        assert torch.bincount(build(section, 128, order="thw")).tolist() == section


ANY_BUILDER = {
    "contiguous": (contiguous_axis_map, "thw"),
    "interleaved": (interleaved_axis_map, "thw"),
    "round-robin": (round_robin_axis_map, "thw"),
    "ernie": (ernie_axis_map, "hwt"),
}
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "short": ({"section": [3, 3, 1]}, ValueError, r"section: .* sum to 8, half of rotary_dim, got \[3, 3, 1\]"),
    "long": ({"section": [3, 3, 3]}, ValueError, r"section: .* sum to 8, half of rotary_dim, got \[3, 3, 3\]"),
    "two counts": ({"section": [4, 4]}, ValueError, r"section: expected three counts"),
    "four counts": ({"section": [2, 2, 2, 2]}, ValueError, r"section: expected three counts"),
    "negative": ({"section": [5, 5, -2]}, ValueError, r"section: expected three counts"),
    "fractions": ({"section": [3.0, 3.0, 2.0]}, TypeError, r"section: expected three integers"),
    "no sequence": ({"section": 8}, TypeError, r"section: expected three integers in a sequence, got 8"),
    "nothing": ({"section": None}, TypeError, r"section: expected three integers in a sequence, got None"),
    "a set": ({"section": {3, 2}}, TypeError, r"section: expected three integers in a sequence, got \{2, 3\}"),
    "a bool": ({"section": [True, 5, 2]}, TypeError, r"section: expected three integers"),
    "fractional R": ({"rotary_dim": 16.0}, TypeError, r"rotary_dim: expected an even integer .* got 16.0"),
    "odd R": ({"rotary_dim": 15}, ValueError, r"rotary_dim: expected an even integer .* got 15"),
    "no R": ({"rotary_dim": 0}, ValueError, r"rotary_dim: expected an even integer .* got 0"),
    "unknown order": ({"order": "wht"}, ValueError, r"order: expected '(thw|hwt)', .* got 'wht'"),
}


@pytest.mark.parametrize("builder", ANY_BUILDER)
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, builder: str) -> None:
    """A section that does not account for every lane is refused, not rescaled, in one sentence."""
    build, order = ANY_BUILDER[builder]
    changed, error, message = REFUSALS[case]
    arguments: dict[str, Any] = {"section": [3, 3, 2], "rotary_dim": 16, "order": order} | changed
    with pytest.raises(error, match="^" + message) as caught:
        build(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("builder", ANY_BUILDER)
def test_order_is_named_and_no_other_is_taken(builder: str) -> None:
    """Ernie's map does not take a section of time, height, width, nor the others one of height, width, time."""
    build, order = ANY_BUILDER[builder]
    other = "hwt" if order == "thw" else "thw"
    with pytest.raises(ValueError, match=f"^order: expected '{order}', .* got '{other}'"):
        build([3, 3, 2], 16, order=other)
    with pytest.raises(TypeError, match="order"):
        build([3, 3, 2], 16)


def test_ernie_alternates_equal_counts() -> None:
    """Ernie's section written as time, height, width has unequal first counts, and is refused for that too."""
    with pytest.raises(ValueError, match=r"^section: expected as many lanes of height as of width"):
        ernie_axis_map([20, 22, 22], 128, order="hwt")


def test_map_survives_a_cast_and_is_not_saved() -> None:
    """As a buffer that is not persistent the map keeps dtype and values, and no state holds it."""
    module = nn.Linear(2, 2)
    module.register_buffer("axis_map", interleaved_axis_map([11, 11, 10], 64, order="thw"), persistent=False)
    wanted = module.get_buffer("axis_map").clone()
    for cast in (module.half, module.bfloat16, module.double):
        assert torch.equal(cast().get_buffer("axis_map"), wanted)
        assert module.get_buffer("axis_map").dtype == torch.int64
    assert "axis_map" not in module.state_dict()


@pytest.mark.parametrize("builder", ANY_BUILDER)
def test_integers_of_any_kind_are_counts(builder: str) -> None:
    """NumPy's too, and those of a tensor; a module that is built on the meta device gets a map there."""
    build, order = ANY_BUILDER[builder]
    wanted = build([3, 3, 2], 16, order=order)
    assert torch.equal(build(np.array([3, 3, 2]), np.int64(16), order=order), wanted)
    assert torch.equal(build(torch.tensor([3, 3, 2]), 16, order=order), wanted)
    with torch.device("meta"):
        assert build([3, 3, 2], 16, order=order).shape == wanted.shape
