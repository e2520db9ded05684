"""Layouts: physical arrangements of the same logical tokens.

A logical token is (sample_id, token_position). A layout turns samples of given lengths into calls, each an int64
tensor [B, S, 2] of logical tokens, with (-1, -1) for padding. Every logical token stands in exactly one place, so a
layout can be undone. A new layout is one entry of :data:`LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = list[Tensor]
"""Rows of logical tokens, each int64 [length, 2]."""

PADDING = -1


def samples(lengths: Sequence[int]) -> Rows:
    """One row a sample, its tokens in order."""
    return [torch.stack((torch.full((n,), i), torch.arange(n)), dim=-1) for i, n in enumerate(lengths)]


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """int32 [samples + 1]: the ``cu_seqlens`` of the packed layout."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def permuted(rows: Rows) -> Rows:
    """Four samples in the order [2, 0, 3, 1]; any other number, reversed."""
    order = [2, 0, 3, 1] if len(rows) == 4 else list(reversed(range(len(rows))))
    return [rows[i] for i in order]


def packed(rows: Rows) -> Rows:
    """All samples behind one another in a single row, as ``cu_seqlens`` describes it."""
    return [torch.cat(rows)] if rows else []


def padded_left(rows: Rows) -> Rows:
    return [torch.cat((_padding(_width(rows) - len(row)), row)) for row in rows]


def padded_right(rows: Rows) -> Rows:
    return [torch.cat((row, _padding(_width(rows) - len(row)))) for row in rows]


def _width(rows: Rows) -> int:
    """Two tokens more than the longest row, so that every row has padding: 21 for the lengths 11, 16, 13, 19."""
    return max(len(row) for row in rows) + 2


def _padding(length: int) -> Tensor:
    return torch.full((length, 2), PADDING)


def one_call_each(rows: Rows) -> list[Tensor]:
    """A call with B = 1 for every row."""
    return [row.unsqueeze(0) for row in rows]


def one_call(rows: Rows) -> list[Tensor]:
    """A single call; the rows have one length."""
    return [torch.stack(rows)]


def by_length(rows: Rows) -> list[Tensor]:
    """A call for every distinct length, its rows batched."""
    lengths = dict.fromkeys(len(row) for row in rows)
    return [torch.stack([row for row in rows if len(row) == n]) for n in lengths]


def chunked(calls: list[Tensor]) -> list[Tensor]:
    """Every call cut along its sequence into calls of 7 tokens, the last one shorter."""
    return [chunk for call in calls for chunk in torch.split(call, 7, dim=1)]


@dataclass(frozen=True)
class Layout:
    """A named arrangement: how rows are made of the samples, and calls of the rows."""

    name: str
    rows: tuple[Callable[[Rows], Rows], ...]
    calls: tuple[Callable[..., list[Tensor]], ...]

    def arrange(self, lengths: Sequence[int]) -> list[Tensor]:
        """The calls, each int64 [B, S, 2], for samples of ``lengths``.

        Raises ValueError for a token that is lost or doubled.
        """
        rows = samples(lengths)
        for step in self.rows:
            rows = step(rows)
        calls: list[Tensor] = self.calls[0](rows)
        for cut in self.calls[1:]:
            calls = cut(calls)
        found = torch.cat([call.reshape(-1, 2) for call in calls])
        found = found[found[:, 0] != PADDING]
        expected = torch.cat(samples(lengths))
        one, other = (torch.unique(tokens, dim=0) for tokens in (found, expected))
        if len(found) != len(expected) or not torch.equal(one, other):
            raise ValueError(f"layout {self.name} loses or doubles a token of lengths {tuple(lengths)}")
        return calls


SINGLE = Layout("single", (), (one_call_each,))
"""The canonical layout: every sample alone."""

LAYOUTS = {
    layout.name: layout
    for layout in (
        SINGLE,
        Layout("batched", (), (by_length,)),
        Layout("packed", (packed,), (one_call_each,)),
        Layout("packed-permuted", (permuted, packed), (one_call_each,)),
        Layout("padded-left", (padded_left,), (one_call,)),
        Layout("padded-right", (padded_right,), (one_call,)),
        Layout("padded-left-permuted", (permuted, padded_left), (one_call,)),
        Layout("padded-right-permuted", (permuted, padded_right), (one_call,)),
        Layout("chunked", (), (one_call_each, chunked)),
        Layout("packed-chunked", (packed,), (one_call_each, chunked)),
        Layout("packed-permuted-chunked", (permuted, packed), (one_call_each, chunked)),
        Layout("padded-left-chunked", (padded_left,), (one_call, chunked)),
        Layout("padded-right-chunked", (padded_right,), (one_call, chunked)),
        Layout("padded-left-permuted-chunked", (permuted, padded_left), (one_call, chunked)),
    )
}


def flat_index(call: Tensor, lengths: Sequence[int]) -> Tensor:
    """int64 [B, S]: where each token of ``call`` stands in the samples laid end to end, PADDING for padding."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return torch.where(call[..., 0] == PADDING, PADDING, starts[call[..., 0].clamp(min=0)] + call[..., 1])


def gather(logical: Tensor, index: Tensor, padding: float) -> Tensor:
    """[B, S, ...]: rows of ``logical`` [tokens, ...] by ``index`` [B, S], ``padding`` where that is PADDING."""
    out = logical[index.clamp(min=0)]
    out[index == PADDING] = padding
    return out


def scatter(physical: Tensor, index: Tensor, logical: Tensor) -> None:
    """The inverse of :func:`gather`: write ``physical`` [B, S, ...] back into ``logical``, dropping padding."""
    active = index != PADDING
    logical[index[active]] = physical[active]
