"""Rotation within the memory of q and k: what is written, what autograd learns of it, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.kernels.overlap import overlap_each_other, overlaps_itself

VIEWS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
B, S, H, D, LANES = 2, 5, 3, 10, 3

# Where q and k lie in a buffer of one dimension: sizes, strides, offset.
PLACES: dict[str, tuple[tuple[Any, Any, int], tuple[Any, Any, int]]] = {
    "two tensors": (((B, S, H, D), (150, 30, 10, 1), 0), ((B, S, 1, D), (50, 10, 10, 1), 300)),
    "packed QKV": (((B, S, H, D), (450, 90, 10, 1), 0), ((B, S, H, D), (450, 90, 10, 1), 30)),
    "packed per head": (((B, S, H, D), (450, 90, 30, 1), 0), ((B, S, H, D), (450, 90, 30, 1), 10)),
    "channels interleaved": (((B, S, H, D), (300, 60, 20, 2), 0), ((B, S, H, D), (300, 60, 20, 2), 1)),
    "heads before tokens": (((B, S, H, D), (150, 10, 50, 1), 7), ((B, S, 2, D), (100, 10, 50, 1), 400)),
    "channels outermost": (((B, S, H, D), (15, 3, 1, 30), 0), ((B, S, 1, D), (5, 1, 1, 10), 301)),
    "rows across each other": (((1, 2, 3, 2), (9, 3, 2, 20), 0), ((1, 2, 3, 2), (9, 3, 2, 20), 9)),
}


def placed(buffer: Tensor, pair: str) -> tuple[Tensor, Tensor]:
    q, k = (buffer.as_strided(*place) for place in PLACES[pair])
    return q, k


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("pair", PLACES)
@pytest.mark.parametrize("dtype", VIEWS, ids=str)
def test_only_rotated_channels_of_q_and_k_are_written(
    dtype: torch.dtype, pair: str, pairing: Any, conjugate: bool
) -> None:
    """q and k themselves come back and hold the out-of-place bytes; the memory around them and the tail keep theirs."""
    buffer = torch.randn(1000).to(dtype)
    wanted = buffer.clone()
    lanes = min(LANES, PLACES[pair][0][0][3] // 2)
    cos, sin = torch.randn(PLACES[pair][0][0][1], lanes), torch.randn(PLACES[pair][0][0][1], lanes)
    for x in placed(wanted, pair):
        x.copy_(multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate))
    q, k = placed(buffer, pair)
    returned = multi_axis_rope_pair(q, k, cos, sin, pairing=pairing, conjugate=conjugate, in_place=True)
    assert returned[0] is q
    assert returned[1] is k
    assert torch.equal(buffer.view(VIEWS[dtype]), wanted.view(VIEWS[dtype]))


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.randn(B, S, H, D), torch.randn(B, S, 1, D), torch.randn(S, LANES), torch.randn(S, LANES)


def public(*operands: Tensor) -> None:
    multi_axis_rope_pair(*operands, in_place=True)


def raw(*operands: Tensor) -> None:
    torch.ops.ropecheck.multi_axis_rope_pair_reference_(*operands, False, False)


CALLS: dict[str, Callable[..., None]] = {"public": public, "raw": raw}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("saved", [0, 1], ids=["q", "k"])
def test_a_saved_tensor_that_was_rotated_is_noticed(saved: int, call: str) -> None:
    """Autograd learns of the write: a backward that needs the old values raises."""
    operands = arguments()
    weight = torch.ones(1, requires_grad=True)
    product_with_saved = weight * operands[saved]
    CALLS[call](*operands)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product_with_saved.sum().backward()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("position", [0, 1], ids=["q", "k"])
def test_a_tensor_that_requires_grad_is_refused(position: int, call: str) -> None:
    """While gradients are recorded it is refused by name and not written; under no_grad it is an ordinary tensor."""
    operands = list(arguments())
    operands[position].requires_grad_()
    before = [x.detach().clone() for x in operands]
    with pytest.raises(ValueError, match=f"^{'qk'[position]}: a tensor that requires grad is not rotated in place"):
        CALLS[call](*operands)
    assert all(map(torch.equal, operands, before))
    with torch.no_grad():
        CALLS[call](*operands)
    assert not torch.equal(operands[position], before[position])


def test_inference_mode_rotates_in_place() -> None:
    """Tensors made in inference mode, and ordinary ones within it, are rotated."""
    q, k, cos, sin = arguments()
    wanted = multi_axis_rope_pair(q, k, cos, sin)
    with torch.inference_mode():
        made = q.clone(), k.clone()
        for pair in (made, (q, k)):
            multi_axis_rope_pair(*pair, cos, sin, in_place=True)
            assert all(map(torch.equal, pair, wanted))


SHARED: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], str]] = {
    "q of expanded heads": (lambda: (torch.randn(B, S, 1, D).expand(B, S, H, D), torch.randn(B, S, 1, D)), "q"),
    "k of expanded samples": (lambda: (torch.randn(B, S, 1, D), torch.randn(1, S, 1, D).expand(B, S, 1, D)), "k"),
    "q of overlapping windows": (
        lambda: (torch.randn(400).as_strided((B, S, H, D), (100, 20, 5, 1)), torch.randn(B, S, 1, D)),
        "q",
    ),
    "k is q": (lambda: (q := torch.randn(B, S, H, D), q), "k"),
    "k is a head of q": (lambda: (q := torch.randn(B, S, H, D), q[:, :, 1:2]), "k"),
    "k starts within q": (
        lambda: (
            (memory := torch.randn(1000)).as_strided((B, S, H, D), (150, 30, 10, 1)),
            memory.as_strided((B, S, H, D), (150, 30, 10, 1), 299),
        ),
        "k",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", SHARED)
def test_elements_that_share_memory_are_refused(case: str, call: str) -> None:
    """What would be rotated twice is refused in one sentence with the argument's name, and not written."""
    make, name = SHARED[case]
    q, k = make()
    before = q.clone(), k.clone()
    with pytest.raises(ValueError, match=f"^{name}: .*elements that share memory") as caught:
        CALLS[call](q, k, torch.randn(S, LANES), torch.randn(S, LANES))
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, (q, k), before))


@pytest.mark.parametrize("case", [case for case, (_, name) in SHARED.items() if name in case[:1]])
@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_fake_operators_refuse_what_strides_show(backend: str, case: str) -> None:
    """Elements of one tensor that share memory are refused without an address, so also while a graph is traced."""
    make, name = SHARED[case]
    table = torch.empty(S, LANES, device="meta")
    q, k = (torch.empty_strided(x.shape, x.stride(), device="meta") for x in make())
    if overlaps_itself(q) or overlaps_itself(k):
        with pytest.raises(ValueError, match=f"^{name}: elements that share memory"):
            getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_{backend}_")(q, k, table, table, False, False)


def addresses(x: Tensor) -> list[int]:
    return [
        x.storage_offset() + sum(i * stride for i, stride in zip(index, x.stride(), strict=True))
        for index in product(*map(range, x.shape))
    ]


def test_overlap_is_decided_as_by_listing_every_address() -> None:
    """Over 4000 small layouts with strides 0 to 12 both questions have the answer that the addresses give."""
    draw = random.Random(0)
    memory = torch.zeros(400)
    answers = set()
    for _ in range(4000):
        left, right = (
            memory.as_strided(
                [draw.choice((1, 2, 3)) for _ in range(4)],
                [draw.randrange(13) for _ in range(4)],
                draw.randrange(40),
            )
            for _ in range(2)
        )
        itself = len(set(addresses(left))) < left.numel()
        each_other = not set(addresses(left)).isdisjoint(addresses(right))
        assert overlaps_itself(left) == itself, (left.shape, left.stride())
        assert overlap_each_other(left, right) == each_other, (left.shape, left.stride(), right.shape, right.stride())
        answers.add((itself, each_other))
    assert len(answers) == 4


def test_an_element_that_lies_across_two_overlaps_both() -> None:
    """A distance that is no multiple of the element's width counts as an overlap, and a whole element's does not."""
    memory = torch.zeros(64, dtype=torch.uint8)
    left = memory[:16].view(torch.float32)
    assert overlap_each_other(left, torch.frombuffer(memory.numpy().data, dtype=torch.float32, offset=14, count=2))
    assert not overlap_each_other(left, torch.frombuffer(memory.numpy().data, dtype=torch.float32, offset=16, count=2))


def test_tensors_without_addresses_do_not_overlap() -> None:
    """Meta tensors share nothing, and neither do empty ones."""
    x = torch.empty(2, 3, device="meta")
    assert not overlap_each_other(x, x)
    empty = torch.empty(0, 3)
    assert not overlap_each_other(empty, empty)
    assert not overlaps_itself(empty.expand(2, 0, 3))
