"""Wrong candidates of family rotate_qk that an attack got past the judge: each fails now, and where it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract
from ropecheck.suites.adapters.rotate_qk import composition, gathered, rotated
from ropecheck.suites.candidates import Candidate

Failing = Callable[..., dict[str, str]]
Pair = tuple[Tensor, Tensor]

NEOX, MROPE = "neox", "mrope-interleaved"
RIGHT = {name: composition(name) for name in (NEOX, MROPE)}
WIDE = ("strided", "any-shape")


def one_token_is_left(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    return (q.clone(), k.clone()) if len(q) == 1 else RIGHT[NEOX](q, k, cache, positions)


def one_token_reads_the_next_row(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    if len(q) == 1:
        positions = (positions + 1).clamp_max(len(cache) - 1)
    return RIGHT[NEOX](q, k, cache, positions)


def one_token_reads_the_time_row(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    return RIGHT[MROPE](q, k, cache, positions[:1].expand(3, -1) if len(q) == 1 else positions)


def heads_past_16_are_left(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    turned, k_turned = RIGHT[NEOX](q, k, cache, positions)
    return torch.cat((turned[:, :16], q[:, 16:]), dim=1), k_turned


def equal_heads_leave_k(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    turned, k_turned = RIGHT[NEOX](q, k, cache, positions)
    return turned, k.clone() if q.shape[1] == k.shape[1] > 1 else k_turned


class Memo:
    """Gathers once for each tensor of positions and version of it: misses another cache in the first's memory."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[Tensor, Pair]] = {}

    def __call__(self, q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
        key = id(positions), positions._version
        if key not in self.known or self.known[key][0] is not positions or len(self.known[key][1][0]) != len(q):
            self.known[key] = positions, gathered(cache, positions, None)
        cos, sin = self.known[key][1]
        pairing = contract(NEOX).pairing
        return rotated(q, cos, sin, pairing, torch.float32), rotated(k, cos, sin, pairing, torch.float32)


def positions_from_an_aligned_address(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    """Rounds the address of positions down to 16 bytes, as a vector load of misaligned data would."""
    back = positions.storage_offset() % (16 // positions.element_size())
    aligned = positions.as_strided(positions.shape, positions.stride(), positions.storage_offset() - back)
    return RIGHT[NEOX](q, k, cache, aligned)


@dataclass(frozen=True)
class Wrong:
    run: Any
    contract: str
    claims: tuple[str, ...]
    judgement: str = "accuracy-forward"
    only: str = ""


WRONG = (
    Wrong(one_token_is_left, NEOX, (), only="s1-"),
    Wrong(one_token_is_left, NEOX, WIDE, only="s1-"),
    Wrong(one_token_reads_the_next_row, NEOX, (), only="s1-"),
    Wrong(one_token_reads_the_time_row, MROPE, (), only="s1-"),
    Wrong(heads_past_16_are_left, NEOX, (), only="s2-"),
    Wrong(equal_heads_leave_k, NEOX, (), only="s2-"),
    Wrong(Memo(), NEOX, WIDE, "repeatability"),
    Wrong(positions_from_an_aligned_address, NEOX, WIDE, only="misaligned-positions"),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{getattr(w.run, '__name__', 'memo')}-{len(w.claims)}")
def test_it_fails(wrong: Wrong, failing: Failing) -> None:
    """And the right composition passes the same cases."""
    found = {}
    for run in (wrong.run, RIGHT[wrong.contract]):
        judged = Candidate("qk", wrong.contract, run, ("cpu",), provides=wrong.claims, family="rotate_qk")
        found[run] = failing(judged, "standard", (wrong.judgement,), ("bfloat16",), only=wrong.only)
    assert set(found[wrong.run]) == {wrong.judgement}
    assert found[RIGHT[wrong.contract]] == {}


class OverwrittenGradient(torch.autograd.Function):
    """Writes the gradient of a row of the cache where it should add it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
        ctx.save_for_backward(q, k, cache, positions)
        return RIGHT[NEOX](q, k, cache, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, cache, positions = ctx.saved_tensors
        rows = cache[positions.long()].detach().requires_grad_()
        leaves = [t.detach().requires_grad_() for t in (q, k)]
        with torch.enable_grad():
            y = RIGHT[NEOX](*leaves, rows, torch.arange(len(rows)))
        of_q, of_k, of_rows = torch.autograd.grad(y, (*leaves, rows), gradients)
        return of_q, of_k, torch.zeros_like(cache).index_put_((positions.long(),), of_rows), None


class UnwatchedPositions(torch.autograd.Function):
    """Keeps positions without telling autograd, so that nobody objects where they have changed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
        if cache.requires_grad:
            raise ValueError("cos_sin_cache: its gradient is not implemented")
        ctx.save_for_backward(cache)
        ctx.positions = positions
        return RIGHT[NEOX](q, k, cache, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = composition(NEOX, back=True)
        return *back(*gradients, ctx.saved_tensors[0], ctx.positions), None, None


@pytest.mark.parametrize(
    ("function", "judgement", "only"),
    [(OverwrittenGradient, "table-gradient", "shared-rows"), (UnwatchedPositions, "autograd", "overwritten")],
)
def test_wrong_gradients_fail(function: Any, judgement: str, only: str, failing: Failing) -> None:
    """Where no row is shared, and nothing is written over, both are right."""
    judged = Candidate("qk", NEOX, function.apply, ("cpu",), provides=("vjp", *WIDE), family="rotate_qk")
    assert set(failing(judged, "standard", (judgement,), ("float32",), only=only)) == {judgement}
    assert failing(judged, "standard", ("accuracy-vjp",), ("bfloat16",), only="s5-") == {}


def takes_three_rows(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    return RIGHT[NEOX](q, k, cache, positions[0] if positions.dim() == 2 and len(positions) == 3 else positions)


def takes_one_row(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    return RIGHT[MROPE](q, k, cache, positions.expand(3, -1) if positions.dim() == 1 else positions)


def takes_fewer_lanes(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    lanes = cache.shape[-1] // 2 if cache.dim() == 2 else 64
    if lanes < 64 and cache.dtype == torch.float32:
        cos, sin = cache.split(lanes, dim=-1)
        cache = torch.cat([torch.nn.functional.pad(table, (0, 64 - lanes)) for table in (cos, sin)], dim=-1)
    return RIGHT[MROPE](q, k, cache, positions)


def takes_a_cache_of_16_bits(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
    return RIGHT[NEOX](q, k, cache.float() if cache.dtype == torch.half else cache, positions)


@pytest.mark.parametrize(
    ("run", "name", "accepted"),
    [
        (takes_three_rows, NEOX, "positions-of-the-other-kind"),
        (takes_one_row, MROPE, "positions-of-the-other-kind"),
        (takes_fewer_lanes, MROPE, "cache-of-fewer-lanes-than-the-map"),
        (takes_a_cache_of_16_bits, NEOX, "cache-of-another-dtype"),
    ],
)
def test_what_the_contract_has_not_must_be_refused(run: Any, name: str, accepted: str, failing: Failing) -> None:
    """Accepted, it would be rotated by one row where the caller gave three, or by other angles than the caller's."""
    judged = Candidate("qk", name, run, ("cpu",), provides=("refusals",), family="rotate_qk")
    found = failing(judged, "standard", ("refusals",), ("bfloat16",))
    assert f"accepted {accepted}" in found["refusals"]
    right = Candidate("qk", name, RIGHT[name], ("cpu",), provides=("refusals",), family="rotate_qk")
    assert failing(right, "standard", ("refusals",), ("bfloat16",)) == {}
