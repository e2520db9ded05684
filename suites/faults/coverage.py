"""Semantic faults of coverage: channels, heads, tokens, samples or a whole tensor that are left out or mixed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .fault import Misreading, Observed
from .part import Part, evaluated
from .reading import Reading
from .tables import wrong_lanes

_PAIR: dict[str, Any] = {"family": "rotate_pair"}
_PLAIN: dict[str, Any] = {"family": "rotate_qk", "contract": "neox"}


def _everywhere(part: Part) -> Tensor:
    return torch.ones(part.x.shape, dtype=torch.bool)


def unturned(reading: Reading) -> Reading:
    return reading.each(lambda part: part.keeping(_everywhere(part), part.x))


def one_unturned(reading: Reading, name: str) -> Reading:
    return reading.one(name, lambda part: part.keeping(_everywhere(part), part.x))


def _names(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    if len(reading.parts) > 1:
        yield from ((part.name,) for part in reading.parts if part.turned)


def _lane_mask(part: Part, lanes: Tensor) -> Tensor:
    mask = torch.zeros(part.x.shape[-1], dtype=torch.bool)
    mask[: part.width] = part.pairing.join(lanes, lanes)
    return mask


def lanes_unturned(reading: Reading, first: int) -> Reading:
    def change(part: Part) -> Part:
        return part.keeping(_lane_mask(part, torch.arange(part.tables.lanes) >= first % part.tables.lanes), part.x)

    return reading.each(lambda part: change(part) if part.tables.lanes else part)


def _first_wrong_lane(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
    wrong = wrong_lanes(reading, got)
    if len(wrong):
        yield (int(wrong[0]),)


def _tail(part: Part) -> Tensor:
    return torch.arange(part.x.shape[-1]) >= part.width


def tail_zeroed(reading: Reading) -> Reading:
    return reading.each(lambda part: part.keeping(_tail(part), torch.zeros_like(part.x)))


def tail_of_the_next_token(reading: Reading) -> Reading:
    return reading.each(lambda part: part.keeping(_tail(part), part.x.roll(-1, dims=1)))


def tail_turned(reading: Reading) -> Reading:
    """All of a head is rotated, the lanes past the tables by their last column."""

    def change(part: Part) -> Part:
        missing = part.x.shape[-1] // 2 - part.tables.lanes
        if missing <= 0 or not part.tables.lanes:
            return part
        wider = (torch.cat((t, t[..., -1:].expand(*t.shape[:-1], missing)), -1)
                 for t in (part.tables.cos, part.tables.sin))  # fmt: skip
        cos, sin = wider
        return replace(part, tables=replace(part.tables, cos=cos, sin=sin, look_up=None, positions=None))

    return reading.each(change)


def turned_by_the_width(reading: Reading) -> Reading:
    """Pairs lie half a head apart, not half of the rotated channels."""

    def change(part: Part) -> Part:
        half, lanes = part.x.shape[-1] // 2, part.tables.lanes
        if part.pairing.name == "adjacent" or half <= lanes or part.norm is not None:
            return part
        order = torch.cat((torch.arange(lanes), half + torch.arange(lanes)))
        picked = evaluated(replace(part, x=part.x[..., order].contiguous()))
        mask = torch.zeros(part.x.shape[-1], dtype=torch.bool)
        mask[order] = True
        values = part.x.clone()
        values[..., order] = picked
        return part.keeping(torch.ones_like(mask), values)

    return reading.each(change)


def heads_unturned(reading: Reading, first: int) -> Reading:
    return reading.each(lambda part: part.keeping((torch.arange(part.x.shape[2]) >= first)[:, None], part.x))


def _first_wrong(along: int) -> Callable[[Reading, Observed], Iterator[tuple[object, ...]]]:
    def search(reading: Reading, got: Observed) -> Iterator[tuple[object, ...]]:
        for part, may in zip(reading.parts, reading.explains(got), strict=True):
            wrong = (~may).transpose(0, along).flatten(1).any(1).nonzero().flatten()
            if part.turned and len(wrong):
                yield (int(wrong[0]),)

    return search


def heads_rolled(reading: Reading, by: int) -> Reading:
    return reading.each(lambda part: part.keeping(_everywhere(part), evaluated(part).roll(by, dims=2)))


def keys_beyond_queries_unturned(reading: Reading) -> Reading:
    """k has as many heads as q, for whoever counts them."""
    heads = next((part.x.shape[2] for part in reading.parts if part.name == "q"), 0)
    return reading.one("k", lambda part: part.keeping((torch.arange(part.x.shape[2]) >= heads)[:, None], part.x))


def halves_crossed(reading: Reading) -> Reading:
    """Of the heads that q and k both have, the second half of q is that of k, and the first of k that of q."""
    if len(reading.parts) < 2:
        return reading
    q, k = reading.parts[:2]
    heads, half = min(q.x.shape[2], k.x.shape[2]), q.x.shape[3] // 2
    of_q, of_k = q.x.clone(), k.x.clone()
    of_q[:, :, :heads, half:] = k.x[:, :, :heads, half:]
    of_k[:, :, :heads, :half] = q.x[:, :, :heads, :half]
    return replace(reading, parts=(replace(q, x=of_q), replace(k, x=of_k), *reading.parts[2:]))


def tokens_zeroed(reading: Reading, first: int) -> Reading:
    def change(part: Part) -> Part:
        dropped = torch.arange(part.x.shape[1]) >= first
        return part.keeping(dropped[:, None, None], torch.zeros_like(part.x))

    return reading.each(change)


def whole_blocks_only(reading: Reading, block: int) -> Reading:
    """Tokens behind the last whole block stay as they came."""

    def change(part: Part) -> Part:
        length = part.x.shape[1]
        left = torch.arange(length) >= length // block * block
        return part.keeping(left[:, None, None], part.x)

    return reading.each(change)


def other_samples_zeroed(reading: Reading) -> Reading:
    """Of a batch the first sample alone is written, where it has one token."""

    def change(part: Part) -> Part:
        if part.x.shape[1] != 1:
            return part
        return part.keeping((torch.arange(part.x.shape[0]) > 0)[:, None, None, None], torch.zeros_like(part.x))

    return reading.each(change)


def channels_in_reverse(reading: Reading) -> Reading:
    return reading.each(lambda part: part.keeping(_everywhere(part), evaluated(part).flip(-1)))


def previous_tokens_input(reading: Reading) -> Reading:
    return reading.each(lambda part: replace(part, x=part.x.roll(1, dims=1)))


COVERAGE = (
    Misreading("not-rotated", "nothing is rotated", unturned),
    Misreading("k-not-rotated", "{0} comes out as it went in", one_unturned, ("k",), _names,
               rows=("O026",), **_PAIR),
    Misreading("last-lanes-not-rotated", "lanes from {0} on come out as they went in", lanes_unturned, (63,),
               _first_wrong_lane),
    Misreading("tail-zeroed", "the channels behind the rotated ones are zero", tail_zeroed),
    Misreading("tail-of-the-next-token", "the channels behind the rotated ones are the next token's",
               tail_of_the_next_token, rows=("O030",)),
    Misreading("tail-rotated", "all channels of a head are rotated", tail_turned, rows=("O015", "O019"), **_PLAIN),
    Misreading("pairs-half-a-head-apart", "pairs lie half a head apart, not half of the rotated channels",
               turned_by_the_width, rows=("O014", "O040"), **_PLAIN),
    Misreading("first-heads-only", "heads from {0} on come out as they went in", heads_unturned, (1,),
               _first_wrong(2)),
    Misreading("heads-rolled", "every head comes out as head {0:+d} from it", heads_rolled, (1,),
               lambda r, g: ((by,) for by in (1, -1, 2, -2)), rows=("O114",)),
    Misreading("heads-of-q-for-k", "heads of k beyond the number of q's come out as they went in",
               keys_beyond_queries_unturned, rows=("O023",), **_PAIR),
    Misreading("halves-crossed", "the second half of q is that of k, and the first half of k that of q", halves_crossed,
               rows=("O023",), **_PAIR),
    Misreading("last-tokens-zeroed", "tokens from {0} on are zero", tokens_zeroed, (6,), _first_wrong(1)),
    Misreading("whole-blocks-only", "tokens behind the last whole block of {0} come out as they went in",
               whole_blocks_only, (4,), lambda r, g: ((n,) for n in (2, 4, 8, 16, 32, 64, 128, 256))),
    Misreading("first-sample-only", "of samples of one token the first alone is written, the others are zero",
               other_samples_zeroed, rows=("O047",)),
    Misreading("channels-reversed", "the channels of a head come out from the last to the first", channels_in_reverse),
    Misreading("previous-tokens-input", "every token is made of the token before it", previous_tokens_input),
)  # fmt: skip
