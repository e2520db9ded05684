"""Mechanical faults of launches and of state: sizes that a path gets wrong, and calls that are not alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...adapters.rotate_qk import composition
from .kernel import Broken
from .rotations import Pair, adjacent, adjacent_back, both, both_back, gathered, gathered_back


def decode_by_the_first_sample(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """With one token a sample, the batch is left out of the address of a table's row."""
    if x.shape[1] == 1 and cos.dim() == 3:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return adjacent(x, cos, sin)


def decode_one_row_late(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """A single token is taken to stand where the next one will."""
    by = 1 if len(q) == 1 else 0
    return gathered(q, k, cos_sin_cache, (positions + by) % max(1, len(cos_sin_cache)))


def partners_of_the_first_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of many tokens a warp has four heads, and where not all of a head is rotated each shuffles with the first."""
    width = 2 * cos.shape[-1]
    y = adjacent(x, cos, sin)
    if width == x.shape[-1] or x.shape[1] < 8:
        return y
    first = x[:, :, torch.arange(x.shape[2]) // 4 * 4]
    for mine, partner in ((0, 1), (1, 0)):
        mixed = x.clone()
        mixed[..., partner:width:2] = first[..., partner:width:2]
        y[..., mine:width:2] = adjacent(mixed, cos, sin)[..., mine:width:2]
    return y


def long_rows_by_the_first_sample(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Another kernel for rows of more than 16 tokens, which has the table of one sample."""
    if cos.dim() == 3 and x.shape[1] > 16:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return adjacent(x, cos, sin)


def chunk_off_by_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A chunk of four tokens starts at the second row of its table."""
    shift = -1 if x.shape[1] == 4 else 0
    return adjacent(x, cos.roll(shift, dims=-2), sin.roll(shift, dims=-2))


def tokens_beyond_the_grid(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A grid that ends at 256 tokens, as others end at 65,535."""
    y = adjacent(x, cos, sin)
    y[:, 256:] = 0
    return y


def heads_beyond(last: int) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((adjacent(x[:, :, :last], cos, sin), x[:, :, last:]), dim=2)

    return run


def samples_beyond_the_grid(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    y[8:] = x[8:]
    return y


def even_lengths_only(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tokens are taken in pairs: of a power of two a specialised path takes each pair's first row."""
    length = x.shape[1]
    if length >= 64 and not length & (length - 1):
        rows = torch.arange(length) // 2 * 2
        cos, sin = cos[..., rows, :], sin[..., rows, :]
    return adjacent(x, cos, sin)


def wide_heads_in_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads wider than 128 are rotated in two blocks, both by the first lanes of the table."""
    lanes = cos.shape[-1]
    if lanes > 64:
        columns = torch.arange(lanes) % 64
        cos, sin = cos[..., columns], sin[..., columns]
    return adjacent(x, cos, sin)


def raising_when_empty(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not x.numel():
        raise RuntimeError("invalid configuration argument")
    return adjacent(x, cos, sin)


def dividing_by_the_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    blocks = 1024 // x.shape[2]
    return adjacent(x, cos, sin) if blocks >= 0 else x


def widened(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x.float(), cos, sin)


def flattened(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, cos, sin).flatten(2)


def leaving_a_default(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    torch.set_default_dtype(torch.float64)
    return y


def flag_ignored(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    return adjacent(x, cos, sin)


def outputs_exchanged(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Where head counts agree nothing but the values tells."""
    y, z = both(q, k, cos, sin)
    return (z, y) if q.shape == k.shape else (y, z)


def one_tensor_only(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return both(q, k, cos, sin)[0]


_text = composition("neox")


def longer_positions(q: Any, k: Any, cos_sin_cache: Any, positions: Any) -> Pair:
    """Those of the first tokens are read."""
    if isinstance(positions, Tensor) and isinstance(q, Tensor) and positions.dim():
        positions = positions[..., : len(q)]
    return _text(q, k, cos_sin_cache, positions)


def last_row_refused(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """The last row of the cache counts as outside, and the one before it is read."""
    return gathered(q, k, cos_sin_cache, positions.clamp(max=max(0, len(cos_sin_cache) - 2)))


class OneCallLate:
    """From the second call of a shape on, the result of the call before is returned."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = adjacent(x, cos, sin)
        late = self.kept.get(tuple(x.shape), y)
        self.kept[tuple(x.shape)] = y
        return late.clone()


class FirstResultKept:
    """A cache whose key is the shape alone."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.kept.setdefault(tuple(x.shape), adjacent(x, cos, sin)).clone()


class RaisingTheSecondTime:
    """A second call with the same tensor raises."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x is self.last:
            raise RuntimeError("workspace already in use")
        self.last = x
        return adjacent(x, cos, sin)


class TurnedTwiceTheFirstTime:
    """Configurations are tried on the live buffer: the first call of each shape rotates more than once."""

    def __init__(self) -> None:
        self.tuned: set[tuple[int, ...]] = set()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        for _ in range(1 if tuple(x.shape) in self.tuned else 2):
            x.copy_(adjacent(x, cos, sin))
        self.tuned.add(tuple(x.shape))


class BufferReused:
    """One output buffer for each shape, used again by the next call."""

    def __init__(self) -> None:
        self.of: dict[object, Tensor] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.of.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(adjacent(x, cos, sin))


class TableKept:
    """The table is prepared once for each address and never read again."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kept = self.of.get(cos.data_ptr())
        if kept is None or kept[0].shape != cos.shape:
            kept = self.of[cos.data_ptr()] = (cos.clone(), sin.clone())
        return adjacent(x, *kept)


class PositionsKept:
    """The rows of the last call of a shape are gathered once, by the address of the positions."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
        name = (cos_sin_cache.data_ptr(), positions.data_ptr(), *cos_sin_cache.shape, *positions.shape)
        rows = self.of.setdefault(name, cos_sin_cache[positions.long()].clone())
        return gathered(q, k, rows, torch.arange(len(rows)))


class ShortAfterLong:
    """What a long sequence switched stays switched for the next short one."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        stale = self.longest > 200 and x.shape[1] < 100
        self.longest = x.shape[1]
        return adjacent(x, cos, sin) * (0.5 if stale else 1)


class WornOut:
    """Every call starts one row further down the table."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.calls += 1
        shift = -(self.calls % 5)
        return adjacent(x, cos.roll(shift, dims=-2), sin.roll(shift, dims=-2))


class Racing:
    """Now and then a few elements keep their unrotated values, as where two stores race."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = adjacent(x, cos, sin)
        lost = torch.rand(x.shape, generator=self.generator) < 0.008
        return torch.where(lost, x, y)


_wide_blocks = False


@contextmanager
def wide_blocks() -> Iterator[None]:
    """A launch configuration, which is the wrong one."""
    global _wide_blocks
    _wide_blocks = True
    try:
        yield
    finally:
        _wide_blocks = False


def wrong_in_one_configuration(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    if _wide_blocks:
        y[:, -1:] = x[:, -1:]
    return y


def _launch(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, **{"vjp": adjacent_back, **more})


def _state(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, stateful=True, **more)


_PAIR: dict[str, Any] = {"family": "rotate_pair", "vjp": both_back}
_CACHE: dict[str, Any] = {"family": "rotate_qk", "contract": "neox"}

LAUNCHING = (
    _launch("batch-ignored-in-decode", "with one token a sample, all samples read the first one's table",
            decode_by_the_first_sample, "O047"),
    _launch("decode-one-row-late", "a single token is taken to stand where the next one will", decode_one_row_late,
            "O002", "O080", vjp=gathered_back, **_CACHE),
    _launch("partners-of-the-first-head", "of many partly rotated heads each is paired with the first of four",
            partners_of_the_first_head, "O016", claims=("any-shape",)),
    _launch("longer-positions-accepted", "positions of more tokens than q has are accepted", longer_positions,
            "O078", claims=("refusals",), vjp=None, **_CACHE),
    _launch("batch-ignored-in-long-rows", "in rows of more than 16 tokens all samples read the first one's table",
            long_rows_by_the_first_sample),
    _launch("chunk-off-by-one", "a chunk of four tokens starts one row late", chunk_off_by_one),
    _launch("tokens-beyond-the-grid", "tokens from 256 on are zero", tokens_beyond_the_grid, "O043"),
    _launch("heads-beyond-the-block", "heads from 32 on come out as they went in", heads_beyond(32)),
    _launch("heads-beyond-64", "heads from 64 on come out as they went in", heads_beyond(64), claims=("any-shape",)),
    _launch("samples-beyond-the-grid", "samples from 8 on come out as they went in", samples_beyond_the_grid, "O043"),
    _launch("specialised-lengths", "in powers of two of tokens each pair reads one row of the tables",
            even_lengths_only),
    _launch("wide-heads-in-two-blocks", "heads of more than 64 lanes read the first 64 columns twice",
            wide_heads_in_two, claims=("any-shape",)),
    _launch("empty-input-fails", "an empty input raises", raising_when_empty, "O045", claims=("any-shape",)),
    _launch("no-heads-divides-by-zero", "an input without heads raises", dividing_by_the_heads, "O046",
            claims=("any-shape",)),
    _launch("fp32-returned", "the output is fp32, whatever x is", widened),
    _launch("another-shape-returned", "heads and channels come back as one dimension", flattened),
    _launch("default-dtype-left-changed", "torch's default dtype is left changed", leaving_a_default),
    _launch("conjugate-ignored", "the keyword conjugate changes nothing", flag_ignored, claims=("conjugate",),
            vjp=None),
    _launch("outputs-exchanged", "q and k come back in the other order where their shapes agree", outputs_exchanged,
            **_PAIR, claims=("any-shape",)),
    _launch("one-of-two-returned", "q alone comes back", one_tensor_only, **_PAIR),
    _launch("last-row-refused", "the last row of the cache is never read", last_row_refused, "O050",
            vjp=gathered_back, **_CACHE),
    _launch("one-configuration-wrong", "under one launch configuration the last token is not rotated",
            wrong_in_one_configuration, "O094", more={"configs": {"wide-blocks": wide_blocks}}),
    _state("one-call-late", "the result of the call before is returned", OneCallLate),
    _state("first-result-kept", "the first result of a shape is returned for ever", FirstResultKept),
    _state("second-call-raises", "a second call with the same tensor raises", RaisingTheSecondTime),
    _state("first-call-turns-twice", "in place, the first call of a shape rotates twice", TurnedTwiceTheFirstTime,
           "O094", more={"in_place": True}),
    _state("output-buffer-reused", "the next call writes over an output", BufferReused),
    _state("table-kept-by-address", "a table is read once and kept by its address", TableKept, "O103"),
    _state("positions-kept-by-address", "gathered rows are kept by the address of the positions", PositionsKept,
           "O104", **_CACHE),
    _state("mode-kept-after-long", "what a long sequence switched stays switched", ShortAfterLong, "O070"),
    _state("worn-out", "every call starts one row further down the table", WornOut),
    _state("racing", "in every call other elements keep their unrotated values", Racing, "O091", "O092"),
)  # fmt: skip
