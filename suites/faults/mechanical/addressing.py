"""Mechanical faults of addressing: memory that lies otherwise than a kernel takes it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...adapters.rotate_qk import composition
from .kernel import Broken
from .rotations import (
    Pair,
    adjacent,
    adjacent_back,
    both,
    both_back,
    dense_strides,
    gathered,
    gathered_back,
    memory,
    read_as,
)

_STRIDED = ("strided",)
_PAIR: dict[str, Any] = {"family": "rotate_pair", "vjp": both_back}
_CACHE: dict[str, Any] = {"family": "rotate_qk", "contract": "neox", "vjp": gathered_back}


def _dense(t: Tensor) -> Tensor:
    return read_as(t, dense_strides(t))


def x_dense(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(_dense(x), cos, sin)


def table_dense(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, _dense(cos), _dense(sin))


def sine_by_the_cosines_strides(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, cos, read_as(sin, cos.stride()))


def token_pitch_assumed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Samples, heads and channels by their strides, tokens as if they lay one after the other."""
    head, channel = x.stride()[2:]
    token = x.shape[2] * x.shape[3]
    return adjacent(read_as(x, (x.stride(0), token, head, channel)), cos, sin)


def channel_stride_assumed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(read_as(x, (*x.stride()[:3], 1)), cos, sin)


def head_stride_assumed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    token, channel = x.stride(1), x.stride(3)
    return adjacent(read_as(x, (x.stride(0), token, x.shape[3], channel)), cos, sin)


def sample_stride_assumed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(read_as(x, (x.shape[1] * x.stride(1), *x.stride()[1:])), cos, sin)


def heads_before_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Contiguous [B, S, H, D] is taken for [B, H, S, D] with the token fast."""
    tokens, heads, width = x.shape[1:]
    wrong = read_as(x, (tokens * heads * width, width, tokens * width, 1))
    return adjacent(wrong, cos, sin)


def offset_forgotten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reads from the start of the storage."""
    return adjacent(read_as(x, x.stride(), 0), cos, sin)


def aligned_down(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sixteen bytes at a time, from the boundary in front of where x begins."""
    whole = 16 // x.element_size()
    return adjacent(read_as(x, x.stride(), int(x.storage_offset()) // whole * whole), cos, sin)


def table_aligned_down(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first = [int(t.storage_offset()) // 4 * 4 for t in (cos, sin)]
    return adjacent(x, *(read_as(t, t.stride(), at) for t, at in zip((cos, sin), first, strict=True)))


def tail_dense(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    return torch.cat((adjacent(x, cos, sin)[..., :width], _dense(x)[..., width:]), dim=-1)


def sample_pitch_of_a_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A table that all samples share is walked on for the second, into what lies behind it."""
    if cos.dim() == 3 or x.shape[0] < 2:
        return adjacent(x, cos, sin)
    wrong = (read_as(t.expand(x.shape[0], *t.shape), (t.shape[0] * t.stride(0), *t.stride())) for t in (cos, sin))
    return adjacent(x, *wrong)


def k_by_the_strides_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return both(q, read_as(k, q.stride()), cos, sin)


def k_behind_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """k is taken to begin where the heads of q end."""
    return both(q, read_as(k, k.stride(), int(q.storage_offset()) + q.shape[2] * q.stride(2)), cos, sin)


def one_projection(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Of equal strides and of one storage: k is taken to begin where the heads of q end."""
    together = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() and q.stride() == k.stride()
    return k_behind_q(q, k, cos, sin) if together else both(q, k, cos, sin)


def rows_of_positions_dense(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    return gathered(q, k, cos_sin_cache, _dense(positions))


def cache_pitch_assumed(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    return gathered(q, k, _dense(cos_sin_cache), positions)


def positions_as(width: torch.dtype) -> Callable[..., Pair]:
    """Ids are read with ``width``, whatever they are."""

    def run(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
        # A copy, in whose memory there is nothing else.
        raw = memory(positions.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
        words = raw[: len(raw) // 8 * 8].view(width)
        found = words[torch.arange(positions.numel()) % max(1, len(words))] if len(words) else positions
        return gathered(q, k, cos_sin_cache, (found.long() % max(1, len(cos_sin_cache))).reshape(positions.shape))

    return run


def columns_of_the_next_row(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """Half of a head is taken for the rotated half: sines are read past the end of a row."""
    lanes, half = cos_sin_cache.shape[1] // 2, q.shape[2] // 2
    if half == lanes:
        return gathered(q, k, cos_sin_cache, positions)
    flat = cos_sin_cache.reshape(-1)
    start = positions.long()[:, None] * cos_sin_cache.shape[1] + torch.arange(lanes)
    cos, sin = flat[start], flat[(start + half).clamp(max=max(0, len(flat) - 1))]
    return gathered(q, k, torch.cat((cos, sin), dim=-1), torch.arange(len(positions)))


def as_wide_as_the_head(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """All of a head is rotated, by as many columns: those that a row of the cache has not are the next row's."""
    pitch, half = cos_sin_cache.shape[1], q.shape[2] // 2
    flat = cos_sin_cache.reshape(-1)
    start = positions.long()[:, None] * pitch + torch.arange(half)
    cos, sin = (flat[(start + by).clamp(max=max(0, len(flat) - 1))] for by in (0, half))
    return gathered(q, k, torch.cat((cos, sin), dim=-1), torch.arange(len(positions)))


_mrope = composition("mrope-interleaved")


def rows_of_ids_end_to_end(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
    """From one row of ids to the next lie as many as there are tokens."""
    return _mrope(q, k, cos_sin_cache, read_as(positions, (positions.shape[1], positions.stride(1))))


def as_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are viewed as complex numbers, which only adjacent channels can be."""
    width = 2 * cos.shape[-1]
    pairs = torch.view_as_complex(x[..., :width].float().view(*x.shape[:-1], width // 2, 2))
    turned = torch.view_as_real(pairs * torch.complex(cos.float(), sin.float()).unsqueeze(-2)).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def offsets_in_32_bits(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A sample that lies past 2^31 elements is read from where 32 bits take it."""
    limit = 2**31
    if x.shape[0] < 2 or x.stride(0) * (x.shape[0] - 1) < limit:
        return adjacent(x, cos, sin)
    wrapped = x.storage_offset() + x.stride(0) - 2 * limit
    near = x.as_strided(x.shape[1:], x.stride()[1:], max(0, wrapped))
    return adjacent(torch.stack([x[0], *(near for _ in range(x.shape[0] - 1))]), cos, sin)


def _addressing(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, **{"claims": _STRIDED, "vjp": adjacent_back, **more})


ADDRESSING = (
    _addressing("x-taken-for-contiguous", "x is read as if it were contiguous", x_dense, "O028"),
    _addressing("tables-taken-for-contiguous", "the tables are read as if they were contiguous", table_dense, "O033"),
    _addressing("one-stride-for-both-tables", "the sine is read with the strides of the cosine",
                sine_by_the_cosines_strides),
    _addressing("token-pitch-assumed", "the pitch of tokens is taken to be that of contiguous heads",
                token_pitch_assumed, "O028", "O076"),
    _addressing("channel-stride-assumed", "the stride of channels is taken to be 1", channel_stride_assumed),
    _addressing("head-stride-assumed", "the stride of heads is taken to be their width", head_stride_assumed),
    _addressing("sample-stride-assumed", "samples are taken to lie end to end", sample_stride_assumed),
    _addressing("heads-before-tokens", "tokens and heads are taken to lie in the other order", heads_before_tokens,
                "O018", claims=()),
    _addressing("storage-offset-forgotten", "x is read from the start of its storage", offset_forgotten, claims=()),
    _addressing("rounded-down-to-16-bytes", "x is read from the 16-byte boundary in front of it", aligned_down),
    _addressing("table-rounded-down-to-16-bytes", "tables are read from the 16-byte boundary in front of them",
                table_aligned_down),
    _addressing("tail-taken-for-contiguous", "the channels behind the rotated ones are read as if x were contiguous",
                tail_dense, "O030", claims=("strided", "any-shape")),
    _addressing("table-walked-past-its-end", "a table that samples share is walked on for the second sample",
                sample_pitch_of_a_table, "O082", claims=()),
    _addressing("k-by-the-strides-of-q", "k is read with the strides of q", k_by_the_strides_of_q, "O023", "O029",
                **_PAIR),
    _addressing("k-taken-to-lie-behind-q", "k is taken to begin where the heads of q end", k_behind_q, "O029", **_PAIR),
    _addressing("projection-taken-to-have-no-gap", "of one projection, k is taken to begin where the heads of q end",
                one_projection, **_PAIR),
    _addressing("positions-taken-for-contiguous", "positions are read as if they were contiguous",
                rows_of_positions_dense, **_CACHE),
    _addressing("rows-of-ids-end-to-end", "rows of positions are taken to be as far apart as there are tokens",
                rows_of_ids_end_to_end, "O001", family="rotate_qk", contract="mrope-interleaved", vjp=None),
    _addressing("cache-taken-for-contiguous", "rows of the cache are taken to lie end to end", cache_pitch_assumed,
                "O033", **_CACHE),
    _addressing("ids-read-as-32-bits", "64-bit ids are read through a pointer to 32 bits", positions_as(torch.int32),
                "O048", **{**_CACHE, "claims": ()}),
    _addressing("ids-read-as-64-bits", "32-bit ids are read through a pointer to 64 bits", positions_as(torch.int64),
                "O049", **{**_CACHE, "claims": ()}),
    _addressing("sines-of-the-next-row", "sines are read past the end of a row of the cache", columns_of_the_next_row,
                "O040", **{**_CACHE, "claims": ("any-shape",)}),
    _addressing("as-wide-as-the-head", "all of a head is rotated, by columns past the end of a row of the cache",
                as_wide_as_the_head, "O015", **{**_CACHE, "claims": ("any-shape",)}),
    _addressing("complex-views", "pairs are viewed as complex numbers, which refuses strides", as_complex_numbers,
                "O098"),
    _addressing("offsets-in-32-bits", "a sample past 2^31 elements is read from where 32 bits take it",
                offsets_in_32_bits, "O041", vjp=None),
)  # fmt: skip
