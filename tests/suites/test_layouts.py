"""Layouts: every arrangement holds each logical token once and can be undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.judgements.invariance import LENGTHS
from ropecheck.suites.layouts import (
    LAYOUTS,
    PADDING,
    Layout,
    Rows,
    by_length,
    cumulative_lengths,
    flat_index,
    gather,
    one_call_each,
    packed,
    permuted,
    scatter,
)

UNEQUAL = LENGTHS["unequal"]
EVERY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)


def test_workloads() -> None:
    """One workload has four different lengths, the other four equal ones."""
    assert LENGTHS == {"unequal": (11, 16, 13, 19), "equal": (13, 13, 13, 13)}


@EVERY
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), (1,), (3, 1), (7, 14, 7)], ids=str)
def test_every_layout_can_be_undone(layout: Layout, lengths: tuple[int, ...]) -> None:
    """Gathering into a layout and scattering back restores every logical token's bytes; padding gets its value."""
    logical = torch.randn(sum(lengths), 2, 3)
    found = torch.zeros_like(logical)
    for call in layout.arrange(lengths):
        index = flat_index(call, lengths)
        physical = gather(logical, index, float("nan"))
        assert physical.shape == (*call.shape[:2], 2, 3)
        assert torch.equal(physical.isnan().all(-1).all(-1), index == PADDING)
        scatter(physical, index, found)
    assert torch.equal(found, logical)


@EVERY
@pytest.mark.parametrize("name", CONTRACTS)
def test_a_token_has_one_place_in_the_model(layout: Layout, name: str) -> None:
    """The same (sample, position) has the same coordinates in every layout: those of its sample alone."""
    rule = CONTRACTS[name].positions
    coordinates = torch.cat([rule.of_length(n) for n in UNEQUAL])
    for call in layout.arrange(UNEQUAL):
        placed = gather(coordinates, flat_index(call, UNEQUAL), PADDING)
        for (sample, position), found in zip(call.reshape(-1, 2).tolist(), placed.flatten(0, 1), strict=True):
            if sample != PADDING:
                assert torch.equal(found, rule.of_length(UNEQUAL[sample])[position])


def shapes(name: str, lengths: tuple[int, ...] = UNEQUAL) -> list[tuple[int, ...]]:
    return [tuple(call.shape[:2]) for call in LAYOUTS[name].arrange(lengths)]


def test_shapes_of_the_calls() -> None:
    """Packed is one row of 59; padded is four rows of 21, two more than the longest; a chunk has at most 7 tokens."""
    assert shapes("single") == [(1, 11), (1, 16), (1, 13), (1, 19)]
    assert shapes("batched", LENGTHS["equal"]) == [(4, 13)]
    assert shapes("packed") == shapes("packed-permuted") == [(1, 59)]
    for side in ("left", "right"):
        assert shapes(f"padded-{side}") == shapes(f"padded-{side}-permuted") == [(4, 21)]
        assert shapes(f"padded-{side}-chunked") == [(4, 7)] * 3
    assert [s for _, s in shapes("chunked")] == [7, 4, 7, 7, 2, 7, 6, 7, 7, 5]
    assert shapes("packed-chunked") == shapes("packed-permuted-chunked") == [*[(1, 7)] * 8, (1, 3)]


def test_permutation_and_padding_sides() -> None:
    """Four samples come in the order 2, 0, 3, 1; padding stands on the side that the layout's name says."""
    (row,) = LAYOUTS["packed-permuted"].arrange(UNEQUAL)
    assert torch.unique_consecutive(row[0, :, 0]).tolist() == [2, 0, 3, 1]
    (left,), (right,) = (LAYOUTS[f"padded-{side}-permuted"].arrange(UNEQUAL) for side in ("left", "right"))
    assert left[:, -1, 0].tolist() == right[:, 0, 0].tolist() == [2, 0, 3, 1]
    assert (left[:, :2] == PADDING).all()
    assert (right[:, -2:] == PADDING).all()
    for call in (left, right):
        assert [int(n) for n in (call[..., 0] != PADDING).sum(1)] == [13, 11, 19, 16]


def test_cumulative_lengths() -> None:
    """The packed layout's cu_seqlens, int32 as kernels take them."""
    found = cumulative_lengths(UNEQUAL)
    assert found.tolist() == [0, 11, 27, 40, 59]
    assert found.dtype == torch.int32


def test_batching_by_length_keeps_equal_lengths_together() -> None:
    """Rows of one length make one call."""
    assert [tuple(c.shape[:2]) for c in Layout("batched", (), (by_length,)).arrange((3, 5, 3))] == [(2, 3), (1, 5)]


def losing_a_token(rows: Rows) -> Rows:
    return [rows[0][:-1], *rows[1:]]


def doubling_a_token(rows: Rows) -> Rows:
    return [torch.cat((rows[0], rows[0][-1:])), *rows[1:]]


def one_for_another(rows: Rows) -> Rows:
    return [torch.cat((rows[0][:-1], rows[0][:1])), *rows[1:]]


@pytest.mark.parametrize("fault", [losing_a_token, doubling_a_token, one_for_another], ids=lambda f: f.__name__)
def test_a_lost_or_doubled_token_is_refused(fault: Callable[[Rows], Rows]) -> None:
    """A layout that loses, doubles or exchanges a token raises ValueError and names itself and the lengths."""
    for steps in ((fault,), (permuted, packed, fault), (fault, packed)):
        layout = Layout("faulty", steps, (one_call_each,))
        with pytest.raises(ValueError, match=r"layout faulty loses or doubles a token of lengths \(11, 16, 13, 19\)"):
            layout.arrange(UNEQUAL)


def test_a_lost_call_is_refused() -> None:
    """So does one that leaves out a whole call."""

    def losing_a_call(calls: list[Tensor]) -> list[Tensor]:
        return calls[:-1]

    with pytest.raises(ValueError, match="layout faulty loses"):
        Layout("faulty", (), (one_call_each, losing_a_call)).arrange(UNEQUAL)


def test_every_layout_but_the_canonical_one_differs_from_it() -> None:
    """No two layouts of the unequal workload make the same calls; only batching leaves unequal samples alone."""
    arranged = {name: [c.tolist() for c in layout.arrange(UNEQUAL)] for name, layout in LAYOUTS.items()}
    same = [n for n, calls in arranged.items() if n != "single" and calls == arranged["single"]]
    assert same == ["batched"]
    distinct = [calls for n, calls in arranged.items() if n != "batched"]
    assert all(distinct.count(calls) == 1 for calls in distinct)
