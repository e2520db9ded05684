"""Queries and keys in one launch: each as rotated alone, with derivatives jointly and separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair, trace_launches

VIEWS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
B, S, HQ, HK, D = 2, 5, 4, 2, 10


def packed() -> tuple[Tensor, Tensor]:
    """q and k of one packed QKV."""
    q, k, _ = torch.randn(B, S, HQ + 2 * HK, D).split([HQ, HK, HK], dim=2)
    return q, k


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "packed QKV": packed,
    "own layouts": lambda: (torch.randn(B, HQ, S, D).transpose(1, 2), torch.randn(D, B, S, HK).permute(1, 2, 3, 0)),
    "one and the same": lambda: (q := torch.randn(B, S, HQ, D), q),
    "shared keys": lambda: (torch.randn(B, S, HQ, D), torch.randn(B, S, 1, D).expand(B, S, HK, D)),
}


def same_bytes(left: Tensor, right: Tensor) -> bool:
    view = VIEWS[left.dtype]
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(view), right.contiguous().view(view))


def tables(lanes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(S, lanes), torch.randn(S, lanes)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", VIEWS, ids=str)
def test_each_is_rotated_as_alone(dtype: torch.dtype, pair: str, pairing: Any, conjugate: bool) -> None:
    """Both outputs are contiguous and have the bytes of the single operator; the inputs keep theirs."""
    q, k = (x.to(dtype) for x in PAIRS[pair]())
    before = q.clone(), k.clone()
    cos, sin = tables()
    rotated = multi_axis_rope_pair(q, k, cos, sin, pairing=pairing, conjugate=conjugate)
    for y, x, kept in zip(rotated, (q, k), before, strict=True):
        assert same_bytes(y, multi_axis_rope(x, cos, sin, pairing=pairing, conjugate=conjugate))
        assert y.is_contiguous()
        assert same_bytes(x, kept)


def test_table_of_each_sample_serves_both() -> None:
    """A table per sample turns the queries and the keys of its own sample."""
    q, k = packed()
    cos, sin = torch.randn(B, S, 3), torch.randn(B, S, 3)
    rotated = multi_axis_rope_pair(q, k, cos, sin)
    for y, x in zip(rotated, (q, k), strict=True):
        assert same_bytes(y[1:], multi_axis_rope(x[1:], cos[1], sin[1]))


@pytest.mark.parametrize("in_place", [False, True])
def test_pair_is_one_launch(in_place: bool) -> None:
    """The trace has one record of the pair's operator, and none of the single one."""
    q, k = packed()
    with trace_launches() as launches:
        multi_axis_rope_pair(q, k, *tables(), in_place=in_place)
    suffix = "_" if in_place else ""
    assert [launch.operator for launch in launches] == [f"multi_axis_rope_pair_reference{suffix}"]


@pytest.mark.parametrize("in_place", [False, True])
def test_either_may_be_empty(in_place: bool) -> None:
    """No queries, no keys, or neither is no error; neither leaves no record."""
    cos, sin = tables()
    for query_heads, key_heads, records in ((0, HK, 1), (HQ, 0, 1), (0, 0, 0)):
        q, k = torch.randn(B, S, query_heads, D), torch.randn(B, S, key_heads, D)
        wanted = multi_axis_rope(q, cos, sin), multi_axis_rope(k, cos, sin)
        with trace_launches() as launches:
            rotated = multi_axis_rope_pair(q, k, cos, sin, in_place=in_place)
        assert [same_bytes(y, z) for y, z in zip(rotated, wanted, strict=True)] == [True, True]
        assert len(launches) == records


@pytest.mark.parametrize("pairing", ["adjacent", "half-split"])
@pytest.mark.parametrize("dtype", VIEWS, ids=str)
def test_joint_gradient_is_one_conjugate_launch(dtype: torch.dtype, pairing: Any) -> None:
    """Upstream gradients of any strides are rotated back, both in one launch of the pair."""
    q, k = (x.to(dtype).detach().requires_grad_() for x in packed())
    cos, sin = tables()
    upstream = torch.randn(()).to(dtype).expand(B, S, HQ, D), torch.randn(B, HK, S, D).to(dtype).transpose(1, 2)
    rotated = multi_axis_rope_pair(q, k, cos, sin, pairing=pairing)
    with trace_launches() as launches:
        gradients = torch.autograd.grad(rotated, (q, k), upstream)
    for gradient, given in zip(gradients, upstream, strict=True):
        assert same_bytes(gradient, multi_axis_rope(given, cos, sin, pairing=pairing, conjugate=True))
    assert [(launch.operator, launch.direction) for launch in launches] == [
        ("multi_axis_rope_pair_reference", "backward")
    ]


@pytest.mark.parametrize("needed", ["q", "k"])
def test_one_that_needs_no_gradient_is_not_rotated_back(needed: str) -> None:
    """With one input that requires grad, only its output does, and only its gradient is computed."""
    tensors = dict(zip("qk", packed(), strict=True))
    tensors[needed] = tensors[needed].clone().requires_grad_()
    cos, sin = tables()
    rotated = dict(zip("qk", multi_axis_rope_pair(tensors["q"], tensors["k"], cos, sin), strict=True))
    assert [name for name, y in rotated.items() if y.requires_grad] == [needed]
    with trace_launches() as launches:
        rotated[needed].sum().backward()
    wanted = multi_axis_rope(torch.ones_like(tensors[needed]), cos, sin, conjugate=True)
    assert tensors[needed].grad is not None
    assert same_bytes(tensors[needed].grad, wanted)
    assert [launch.operator for launch in launches] == ["multi_axis_rope_reference"]


@pytest.mark.parametrize("used", ["q", "k"])
def test_unused_output_leaves_no_gradient(used: str) -> None:
    """Both inputs require grad and one output is used: the other input gets None from autograd, not a rotation."""
    tensors = {name: x.clone().requires_grad_() for name, x in zip("qk", packed(), strict=True)}
    unused = "k" if used == "q" else "q"
    cos, sin = tables()
    rotated = dict(zip("qk", multi_axis_rope_pair(tensors["q"], tensors["k"], cos, sin), strict=True))
    with trace_launches() as launches:
        gradient, nothing = torch.autograd.grad(
            rotated[used].sum(), (tensors[used], tensors[unused]), allow_unused=True
        )
    assert same_bytes(gradient, multi_axis_rope(torch.ones_like(tensors[used]), cos, sin, conjugate=True))
    assert nothing is None
    assert [launch.operator for launch in launches] == ["multi_axis_rope_reference"]


def test_second_and_third_order() -> None:
    """Each further order is one more conjugation, for queries and keys at once."""
    q, k = (x.detach().requires_grad_() for x in packed())
    cos, sin = tables()
    orders = [tuple(torch.randn_like(x).requires_grad_() for x in (q, k)) for _ in range(3)]
    result, source = multi_axis_rope_pair(q, k, cos, sin), (q, k)
    for order, upstream in enumerate(orders, start=1):
        result = torch.autograd.grad(result, source, upstream, create_graph=True)
        source = upstream
        for gradient, given in zip(result, upstream, strict=True):
            assert same_bytes(gradient, multi_axis_rope(given, cos, sin, conjugate=order % 2 == 1))


def test_mixed_second_order() -> None:
    """Differentiating the gradient of the queries alone again gives the rotation of the queries alone."""
    q, k = (x.detach().requires_grad_() for x in packed())
    cos, sin = tables()
    rotated_q, _ = multi_axis_rope_pair(q, k, cos, sin)
    upstream = torch.randn_like(q).requires_grad_()
    (first,) = torch.autograd.grad(rotated_q, q, upstream, create_graph=True)
    again = torch.randn_like(q)
    (second,) = torch.autograd.grad(first, upstream, again)
    assert same_bytes(second, multi_axis_rope(again, cos, sin))


def test_a_table_changed_before_the_backward_is_noticed() -> None:
    """Writing into a saved table raises instead of giving the gradient of another rotation."""
    q, k = (x.detach().requires_grad_() for x in packed())
    cos, sin = tables()
    rotated = multi_axis_rope_pair(q, k, cos, sin)
    sin.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (rotated[0].sum() + rotated[1].sum()).backward()


Q, K, TABLE = torch.zeros(2, 7, 3, 8), torch.zeros(2, 7, 1, 8), torch.zeros(7, 4)

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q no tensor": ({"q": [1.0]}, TypeError, r"q: expected a torch\.Tensor, got list"),
    "k no tensor": ({"k": None}, TypeError, r"k: expected a torch\.Tensor, got NoneType"),
    "q rank": ({"q": Q[0]}, ValueError, r"q: expected 4 dimensions .* got shape \[7, 3, 8\]"),
    "k rank": ({"k": K[:, :, 0]}, ValueError, r"k: expected 4 dimensions .* got shape \[2, 7, 8\]"),
    "q dtype": ({"q": Q.double()}, TypeError, r"q: expected float32, float16 or bfloat16, got torch\.float64"),
    "k dtype": ({"k": K.double()}, TypeError, r"k: expected float32, float16 or bfloat16, got torch\.float64"),
    "unlike dtypes": ({"k": K.half()}, TypeError, r"k: expected the dtype of q, torch\.float32, got torch\.float16"),
    "unlike devices": ({"k": K.to("meta")}, ValueError, r"k: expected the device of q, cpu, got meta"),
    "unlike samples": ({"k": K[:1]}, ValueError, r"k: expected 2 samples, as many as q has, got 1"),
    "unlike tokens": ({"k": K[:, :6]}, ValueError, r"k: expected 7 tokens, as many as q has, got 6"),
    "unlike channels": ({"k": torch.zeros(2, 7, 1, 12)}, ValueError, r"k: expected 8 channels per head.* got 12"),
    "q D above 256": ({"q": torch.zeros(2, 7, 3, 258)}, ValueError, r"q: .* head dimension of at most 256, got 258"),
    "k D above 256": ({"k": torch.zeros(2, 7, 3, 258)}, ValueError, r"k: .* head dimension of at most 256, got 258"),
    "cos dtype": ({"cos": TABLE.half()}, TypeError, r"cos: expected float32, got torch\.float16"),
    "sin device": ({"sin": TABLE.to("meta")}, ValueError, r"sin: expected the device of q, cpu, got meta"),
    "positions": ({"cos": TABLE[:6], "sin": TABLE[:6]}, ValueError, r"cos: expected 7 positions, .* q has tokens"),
    "cos and sin": ({"sin": TABLE[:, :2]}, ValueError, r"sin: expected the shape of cos"),
    "R above D": (
        {"cos": torch.zeros(7, 5), "sin": torch.zeros(7, 5)},
        ValueError,
        r"cos: expected at most 4 lanes for the head dimension 8 of q, got 5",
    ),
    "pairing": ({"pairing": "interleaved"}, ValueError, r"pairing: .*'half-split', got 'interleaved'"),
    "backend": ({"backend": "eager"}, ValueError, r"backend: expected 'auto', 'cuda', .* got 'eager'"),
    "cos gradient": ({"cos": TABLE.clone().requires_grad_()}, ValueError, r"cos: gradients .* not computed"),
    "sin gradient": ({"sin": TABLE.clone().requires_grad_()}, ValueError, r"sin: gradients .* not computed"),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused(case: str, in_place: bool) -> None:
    """The refusal is one line, of the documented type, and begins with the argument's name."""
    changed, error, message = REFUSALS[case]
    arguments: dict[str, Any] = {"q": Q, "k": K, "cos": TABLE, "sin": TABLE, "in_place": in_place} | changed
    with pytest.raises(error, match="^" + message) as caught:
        multi_axis_rope_pair(
            arguments.pop("q"), arguments.pop("k"), arguments.pop("cos"), arguments.pop("sin"), **arguments
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("table", ["cos", "sin"])
@pytest.mark.parametrize("suffix", ["", "_"], ids=["out of place", "in place"])
def test_raw_operators_refuse_a_table_that_requires_grad(suffix: str, table: str) -> None:
    """The operators themselves raise too, so that a table's gradient is never silently None or zero."""
    operator = getattr(torch.ops.ropecheck, f"multi_axis_rope_pair_reference{suffix}")
    given = {"cos": TABLE.clone(), "sin": TABLE.clone()}
    given[table].requires_grad_()
    with pytest.raises(ValueError, match=f"^{table}: gradients with respect to the table are not computed"):
        operator(Q.clone(), K.clone(), given["cos"], given["sin"], False, False)
