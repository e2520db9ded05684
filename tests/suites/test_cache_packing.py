"""Packing tables into a cache with positions: what a token reads, what nobody may read, how positions are stored."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.oracle.floats import same
from ropecheck.oracle.fused import gathered_tables
from ropecheck.suites.cache_packing import (
    MODEL_ROWS,
    axis_map_of,
    gradients_of_cache,
    model_cache,
    pack,
    place_positions,
)

MAPS = {
    "one-row": None,
    "interleaved": (0, 1, 2, 0, 1, 2, 0, 0),
    "contiguous": (0, 0, 1, 1, 1, 2, 2, 2),
    "no-time": (1, 2, 1, 2, 1, 2, 1, 2),
}
EVERY_MAP = pytest.mark.parametrize("axis_map", MAPS.values(), ids=MAPS)
TOKENS, LANES = 7, 8


def tables(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cos, sin = torch.randn(2, tokens, LANES, generator=generator)
    return cos, sin


@EVERY_MAP
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_reads_its_own_tables(axis_map: tuple[int, ...] | None, tokens: int, dtype: torch.dtype) -> None:
    """The oracle's own gather of what was packed gives back every byte, and no token is out of range."""
    cos, sin = (table.to(dtype) for table in tables(tokens))
    packed = pack(cos, sin, axis_map)
    read_cos, read_sin, outside = gathered_tables(packed.cache, packed.positions, axis_map)
    assert bool(same(read_cos, cos).all())
    assert bool(same(read_sin, sin).all())
    assert not bool(outside.any())
    assert packed.cache.dtype == dtype


@EVERY_MAP
def test_every_row_of_positions_has_rows_of_its_own(axis_map: tuple[int, ...] | None) -> None:
    """No cache row is read twice; the ranges of three rows are disjoint; tokens are not in order."""
    positions = torch.atleast_2d(pack(*tables(64), axis_map).positions)
    assert positions.unique().numel() == positions.numel()
    for one, other in itertools.combinations(positions, 2):
        assert int(one.max()) < int(other.min()) or int(other.max()) < int(one.min())
    for row in positions:
        assert not bool((row.diff() == 1).all())
        assert not torch.equal(row, row.sort().values)


@EVERY_MAP
def test_what_nobody_may_read_is_nan(axis_map: tuple[int, ...] | None) -> None:
    """Each number stands in the cache once; everything else, half of the rows at least, is NaN."""
    cos, sin = tables()
    packed = pack(cos, sin, axis_map)
    kept = packed.cache[~packed.cache.isnan()]
    assert torch.equal(kept.sort().values, torch.cat((cos.flatten(), sin.flatten())).sort().values)
    assert bool(packed.cache[packed.nobody].isnan().all())
    assert int(packed.cache.isnan().all(dim=1).sum()) > packed.cache.shape[0] // 2


def test_another_axis_reads_nan() -> None:
    """Every lane of a token, read through another row of the positions, is NaN."""
    axis_map = (0, 1, 2, 0, 1, 2, 0, 0)
    packed = pack(*tables(), axis_map)
    for turned in (1, 2):
        other = tuple((row + turned) % 3 for row in axis_map)
        cos, sin, _ = gathered_tables(packed.cache, packed.positions, other)
        assert bool(cos.isnan().all())
        assert bool(sin.isnan().all())


@EVERY_MAP
def test_the_last_row_of_the_cache_is_read(axis_map: tuple[int, ...] | None) -> None:
    """So that a cache read one row short shows; the first row is read by nobody."""
    packed = pack(*tables(), axis_map)
    assert int(packed.positions.max()) == packed.cache.shape[0] - 1
    assert int(packed.positions.min()) > packed.nobody == 0


def test_the_scatter_depends_on_the_tables_alone() -> None:
    """The same tables are packed alike, others otherwise and into as many rows."""
    one, again, other = pack(*tables()), pack(*tables()), pack(*tables(seed=1))
    assert torch.equal(one.positions, again.positions)
    assert bool(same(one.cache, again.cache).all())
    assert not torch.equal(one.positions, other.positions)
    assert one.cache.shape == other.cache.shape


STORED = {
    "": (1, (7, 1)),
    "sliced-positions": (1, (28, 1)),
    "transposed-positions": (3, (1, 3)),
}


@pytest.mark.parametrize("width", ["", "int32-positions"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows", [1, 3])
def test_positions_lie_as_the_options_say(stored: str, width: str, rows: int) -> None:
    """Values, dtype and strides; all that is not a position names the row that is nobody's, as far as 64 elements."""
    positions = torch.arange(100, 100 + rows * TOKENS).reshape(rows, TOKENS)
    given = positions if rows == 3 else positions[0]
    placed = place_positions(given, {stored, width} - {""}, nobody=5)
    assert torch.equal(placed.view.long(), given)
    assert placed.view.dtype == (torch.int32 if width else torch.int64)
    token, whole = STORED[stored]
    assert placed.view.stride() == (whole if rows == 3 else (token,))
    memory = placed.before.view(placed.view.dtype)
    assert int((memory == 5).sum()) == memory.numel() - given.numel()
    start = placed.view.storage_offset()
    assert bool((memory[:start] == 5).all())
    assert start >= 64


def test_a_write_into_positions_is_seen() -> None:
    """A change of a position, and of memory beside them, is counted."""
    placed = place_positions(torch.arange(TOKENS), {"int32-positions"}, nobody=0)
    assert placed.changed_bytes() == 0
    placed.view[3] += 1
    assert placed.changed_bytes() == 1
    placed.storage[0] = 1
    assert placed.changed_bytes() == 2


@EVERY_MAP
def test_the_gradient_of_a_cache_is_told_token_by_token(axis_map: tuple[int, ...] | None) -> None:
    """What a token reads comes back as its cosine's and sine's; a gradient elsewhere is counted."""
    cos, sin = tables()
    packed = pack(cos, sin, axis_map)
    gradient = packed.cache.nan_to_num(nan=0.0)
    found, beyond = gradients_of_cache(gradient, packed.positions, axis_map)
    assert torch.equal(found["cos"], cos)
    assert torch.equal(found["sin"], sin)
    assert beyond == 0
    gradient[packed.nobody, 3] = 1.0
    assert gradients_of_cache(gradient, packed.positions, axis_map)[1] == 1


@pytest.mark.parametrize("name", ["neox", "mrope-ernie"])
def test_the_models_own_cache_holds_what_the_contract_says(name: str) -> None:
    """Read at positions from one end to the other, it gives the contract's tables byte for byte."""
    own = CONTRACTS[name]
    axes = len(own.positions.axes)
    ends = torch.tensor([0, 1, 256, 257, 4095, 4096, 65_536, 131_071, MODEL_ROWS - 1])
    positions = torch.stack([ends.roll(3 * axis) for axis in range(axes)], dim=-1)
    made = model_cache(own, positions, torch.float32, "cpu")
    assert made.cache.shape == (MODEL_ROWS, own.rotary_dim)
    cos, sin, _ = gathered_tables(made.cache, made.positions, axis_map_of(own))
    expected = own.tables(positions, torch.float32)
    assert bool(same(cos, expected[0]).all())
    assert bool(same(sin, expected[1]).all())


@pytest.mark.parametrize("position", [-1, MODEL_ROWS])
def test_a_position_that_the_model_has_no_row_for_is_refused(position: int) -> None:
    """One sentence names the positions and the rows."""
    with pytest.raises(ValueError, match=f"positions must lie between 0 and {MODEL_ROWS - 1}"):
        model_cache(CONTRACTS["neox"], torch.tensor([[position]]), torch.float32, "cpu")
