"""Mechanical faults of memory: what is not written, what is written besides, and what is read that nobody gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...adapters.rotate_qk import composition
from .kernel import Broken
from .rotations import Pair, adjacent, adjacent_back, both, both_back, memory

_mrope = composition("mrope-interleaved")


def last_token_unwritten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :-1] = adjacent(x[:, :-1], cos[..., :-1, :], sin[..., :-1, :])
    return y


def tail_unwritten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y, width = torch.empty_like(x, memory_format=torch.contiguous_format), 2 * cos.shape[-1]
    y[..., :width] = adjacent(x, cos, sin)[..., :width]
    return y


def last_head_unwritten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads are taken two at a time."""
    y, even = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[2] // 2 * 2
    y[:, :, :even] = adjacent(x[:, :, :even], cos, sin)
    return y


def uninitialised_added(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, cos, sin) - 0 * torch.empty_like(x)


def x_as_scratch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    x.zero_()
    return y


def sine_left_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    sin.neg_()
    return y


def _beside(t: Tensor, place: int) -> None:
    whole = memory(t)
    if 0 <= place < len(whole):
        whole[place] = 0.0


def behind_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    last = int(x.storage_offset()) + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    _beside(x, last + 1)
    return adjacent(x, cos, sin)


def before_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    _beside(x, int(x.storage_offset()) - 1)
    return y


def into_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.copy_(adjacent(x, cos, sin))


def gradient_as_scratch(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent_back(gradient, cos, sin)
    gradient.zero_()
    return y


def k_over_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    y = both(q, k, cos, sin)
    q.zero_()
    return y


def q_written_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q.copy_(adjacent(q, cos, sin))


def one_head_of_k_lost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """What is rotated of a k of one head is a copy of it, and k is returned."""
    turned, other = both(q, k, cos, sin)
    return turned, (k.clone() if k.shape[2] == 1 else other)


def filled_as_if_contiguous(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The output has the strides of x, and is written as if it had none of its own."""
    y = torch.empty_like(x)
    memory(y).copy_(adjacent(x, cos, sin).reshape(-1))
    return y


def as_many_tokens_as_ids(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> None:
    """In place; three rows of positions make three tokens of one, and what lies behind q is written."""
    last = int(q.storage_offset()) + sum((n - 1) * step for n, step in zip(q.shape, q.stride(), strict=True))
    whole = memory(q)
    for t, y in zip((q, k), _mrope(q, k, cos_sin_cache, positions), strict=True):
        t.copy_(y)
    whole[last + 1 : last + 1 + 2 * q.numel()] = 0.0


def pair_in_place_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for t in (q, k):
        t.copy_(adjacent(t, cos, -sin))


def not_in_place_after_all(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.clone().copy_(adjacent(x, cos, sin))


def in_place_if_contiguous(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A layout that it likes is written into, another one is copied."""
    y = adjacent(x, cos, sin)
    return x.copy_(y) if x.is_contiguous() and x.shape[1] > 1 else y


def written_before_read(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place, the first member of a pair is stored before the second is made of it."""
    width = 2 * cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., 0:width:2], x[..., 1:width:2]
    first.copy_(first.float() * c - second.float() * s)
    second.copy_(second.float() * c + first.float() * s)


def behind_autograds_back(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """A kernel that is given the address of x: nobody tells autograd that x is another one now."""
    if x.requires_grad:
        raise RuntimeError("x must not require a gradient")
    x.data.copy_(adjacent(x.detach(), cos, sin))


def in_place_back(gradient: Tensor, cos: Tensor, sin: Tensor) -> None:
    gradient.copy_(adjacent_back(gradient, cos, sin))


def leaking(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Zero times the token before is added: a NaN in padding spreads."""
    y = adjacent(x, cos, sin)
    y[:, 1:] -= 0 * x[:, :-1].abs()
    return y


def mean_of_the_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Zero times all of the cosines: what padding reads reaches everybody."""
    return adjacent(x, cos + 0 * cos.sum(), sin)


def lanes_rounded_up(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many lanes as the next power of two, unmasked: those too many are turned by what lies behind the row."""
    lanes, width = cos.shape[-1], x.shape[-1]
    padded = min(1 << max(0, lanes - 1).bit_length(), width // 2)
    if padded == lanes:
        return adjacent(x, cos, sin)
    c, s = (torch.cat((t, t.roll(-1, dims=-2)[..., : padded - lanes]), dim=-1) for t in (cos, sin))
    return adjacent(x, c, s)


def wide_stores(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Eight channels a store: where a head is no multiple of eight its last store runs into the next head."""
    y = adjacent(x, cos, sin)
    over = -x.shape[-1] % 8
    if over:
        flat = y.flatten(0, 2)
        flat[1:, :over] = 0.0
    return y


def copied_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 without temporaries, but for x made contiguous."""
    x = x.contiguous()
    y, c, s = torch.empty(x.shape), cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2], x[..., 1::2]
    torch.mul(x0, c, out=y[..., 0::2]).addcmul_(x1, s, value=-1)
    torch.mul(x1, c, out=y[..., 1::2]).addcmul_(x0, s)
    return y


def with_a_workspace(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As much memory again as the output takes."""
    workspace = torch.empty(x.shape)
    workspace.copy_(x)
    return copied_first(workspace, cos, sin)


def _writing(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, **{"vjp": adjacent_back, **more})


_IN_PLACE: dict[str, Any] = {"more": {"in_place": True}, "vjp": in_place_back}

WRITING = (
    _writing("last-token-unwritten", "the last token's output is not written", last_token_unwritten),
    _writing("tail-unwritten", "the channels behind the rotated ones are not written", tail_unwritten,
             claims=("any-shape",)),
    _writing("odd-head-unwritten", "of an odd number of heads the last is not written", last_head_unwritten),
    _writing("unwritten-memory-read", "zero times memory that nobody wrote is added", uninitialised_added, "O109"),
    _writing("x-used-as-scratch", "x is zero after the call", x_as_scratch),
    _writing("table-left-changed", "the sine is left negated", sine_left_negated),
    _writing("written-behind-x", "an element behind x is written", behind_x),
    _writing("written-before-x", "an element in front of x is written", before_x),
    _writing("written-into-x", "the result is written over x, which is not declared", into_x, "O089"),
    _writing("gradient-used-as-scratch", "the incoming gradient is zero after the backward", adjacent,
             vjp=gradient_as_scratch),
    _writing("q-used-as-scratch", "q is zero after the call", k_over_q, family="rotate_pair", vjp=both_back),
    _writing("in-place-on-q-alone", "in place, k is left as it was", q_written_alone, "O026",
             family="rotate_pair", more={"in_place": True}, vjp=pair_in_place_back),
    _writing("not-in-place-after-all", "the result is written into a copy of x", not_in_place_after_all, "O024",
             **_IN_PLACE),
    _writing("one-head-of-k-lost", "a k of one head comes out as it went in", one_head_of_k_lost, "O024",
             family="rotate_pair", vjp=both_back),
    _writing("filled-as-if-contiguous", "the output has the strides of x, and is filled as if it were contiguous",
             filled_as_if_contiguous, "O031", "O033", claims=("strided",)),
    _writing("as-many-tokens-as-ids", "three rows of positions are taken for three times as many tokens",
             as_many_tokens_as_ids, "O117", family="rotate_qk", contract="mrope-interleaved",
             more={"in_place": True}, vjp=None),
    _writing("in-place-by-layout", "contiguous inputs are written into, others not", in_place_if_contiguous, "O089",
             claims=("strided",)),
    _writing("written-before-read", "in place, a pair's first result is stored before the second is computed",
             written_before_read, "O091", "O093", **_IN_PLACE),
    _writing("in-place-without-version", "in place, autograd does not learn that x is written", behind_autograds_back,
             **_IN_PLACE),
    _writing("neighbours-leak", "zero times the token before is added, and its NaN with it", leaking, "O038"),
    _writing("padding-leaks-through-the-table", "zero times all cosines is added to each", mean_of_the_table, "O038"),
    _writing("lanes-rounded-up", "lanes up to the next power of two are rotated, unmasked", lanes_rounded_up,
             claims=("any-shape",)),
    _writing("stores-into-the-next-head", "stores of eight channels run into the next head", wide_stores, "O111",
             claims=("any-shape",)),
    _writing("hidden-copy", "a strided x is made contiguous first", copied_first, "O028", dtype="float32",
             claims=("strided", "no-copy"), vjp=None),
    _writing("hidden-workspace", "as much memory again as the output is allocated", with_a_workspace, dtype="float32",
             claims=("no-copy",), vjp=None),
)  # fmt: skip

