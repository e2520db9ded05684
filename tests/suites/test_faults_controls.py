"""What must pass: the six controls of the page of reports, and kernels that are right in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

from ropecheck.oracle.contracts import contract
from ropecheck.oracle.floats import key
from ropecheck.oracle.positions import CentredGrid
from ropecheck.suites.adapters.rotate_qk import composition
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.cases import Case, Inputs, build
from ropecheck.suites.faults.arithmetic import contracted
from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.equivalents import at_most, maps_agree
from ropecheck.suites.faults.mechanical.rotations import adjacent, adjacent_back, half_split
from ropecheck.suites.faults.mutants import mutant, right_fused_call

Failing = Callable[..., dict[str, str]]
ACCURACY = ("accuracy-forward", "accuracy-vjp")
FORMS = (
    "fused x0c and fused x1c",
    "fused x1s and fused x0s",
    "fp64 via fp32 and fp64 via fp32",
    "exact via fp32 and exact via fp32",
)


def lanes(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = 2 * cos.shape[-1]
    return x[..., 0:width:2], x[..., 1:width:2], x[..., width:]


def in_fp64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp64 throughout, by way of fp32 into the activation dtype, as torch converts."""
    x0, x1, tail = lanes(x, cos)
    c, s = cos.unsqueeze(-2).double(), sin.unsqueeze(-2).double()
    turned = torch.stack((x0.double() * c - x1.double() * s, x1.double() * c + x0.double() * s), dim=-1)
    return torch.cat((turned.flatten(-2).float().to(x.dtype), tail), dim=-1)


def complex_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair is one complex number."""
    x0, x1, tail = lanes(x, cos)
    turned = torch.complex(x0.float(), x1.float()) * torch.complex(cos, sin).unsqueeze(-2)
    return torch.cat((torch.view_as_real(turned).flatten(-2).to(x.dtype), tail), dim=-1)


def matrix_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A 2 x 2 matrix on each lane, whose accumulator starts at +0."""
    x0, x1, tail = lanes(x, cos)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turn = torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)
    turned = (turn * torch.stack((x0, x1), -1).float().unsqueeze(-2)).sum(-1)
    return torch.cat((turned.flatten(-2).to(x.dtype), tail), dim=-1)


def made_contiguous(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A copy first, which only a claim of no-copy forbids."""
    return adjacent(x.contiguous(), cos.contiguous(), sin.contiguous())


def summands_exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x0, x1, tail = lanes(x, cos)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.stack((-(x1.float() * s) + x0.float() * c, x0.float() * s + x1.float() * c), dim=-1)
    return torch.cat((turned.flatten(-2).to(x.dtype), tail), dim=-1)


def negated_lazily(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """torch marks the result as negated."""
    return torch._neg_view(-adjacent(x, cos, sin))


def token_by_token(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch for each token."""
    parts = [adjacent(x[:, t : t + 1], cos[..., t : t + 1, :], sin[..., t : t + 1, :]) for t in range(x.shape[1])]
    return torch.cat(parts, dim=1) if parts else x.clone()


ROTATIONS = (
    in_fp64, complex_product, matrix_product, made_contiguous, summands_exchanged, negated_lazily, token_by_token,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("run", ROTATIONS, ids=lambda run: run.__name__)
def test_another_right_rotation_passes(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: str, failing: Failing
) -> None:
    """Forward and backward, with strides where they are claimed."""
    claims = ("vjp", "any-shape", "strided")
    right = Candidate(
        "right", "qwen-image", run, ("cpu",), (dtype,), claims, vjp=lambda g, c, s: run(g, c, -s)
    )
    assert failing(right, "smoke") == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_sum_passes_where_strict_is_not_claimed(form: str, dtype: str, failing: Failing) -> None:
    """Either contraction, fp64 and the exact sum; with the claim the first of them is a fault of the dictionary."""
    right = mutant("right", "qwen-image", "rotate", lambda r: r if r.backward else contracted(r, form), dtype)
    assert failing(right, "standard", ACCURACY, only="hard-to-round") == {}
    assert failing(right, "smoke", ACCURACY) == {}


def test_a_gradient_added_onto_zeros_passes(failing: Failing) -> None:
    """As autograd adds up the gradients of slices."""
    right = Candidate("right", "qwen-image", adjacent, ("cpu",), provides=("vjp", "any-shape"),
                      vjp=lambda g, c, s: torch.zeros_like(g) + adjacent_back(g, c, s))  # fmt: skip
    assert failing(right, "standard", ("accuracy-vjp",), ("bfloat16",), only="special") == {}


def norm_in(order: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The fused call with its mean square summed by ``order`` [.., D] to [..]."""

    def run(
        q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor,
        *, eps: float, axis_map: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        tokens, width = k.shape[0], q_weight.shape[0]
        lanes = cos_sin_cache.shape[1] // 2
        rows, lane = positions.long()[axis_map.long()].T, torch.arange(lanes)
        cos, sin = cos_sin_cache[rows, lane], cos_sin_cache[rows, lane + lanes]
        parts = q_gate.view(tokens, q_gate.shape[1] // (2 * width), 2 * width)
        made = []
        for x, weight in ((parts[..., :width], q_weight), (k.view(tokens, k.shape[1] // width, width), k_weight)):
            wide = x.float()
            root = (order(wide * wide)[..., None] / width + eps).rsqrt()
            y = (wide * root * (1.0 + weight.float())).to(x.dtype).float()
            a, b = y[..., :lanes], y[..., lanes : 2 * lanes]
            c, s = cos[:, None], sin[:, None]
            made.append(torch.cat((a * c - b * s, b * c + a * s, y[..., 2 * lanes :]), -1).to(x.dtype).flatten(1))
        return made[0], made[1], parts[..., width:].flatten(1)

    return run


def backwards(terms: Tensor) -> Tensor:
    """One after the other, from the last to the first."""
    total = torch.zeros(terms.shape[:-1])
    for channel in reversed(range(terms.shape[-1])):
        total = total + terms[..., channel]
    return total


def in_halves(terms: Tensor) -> Tensor:
    """The first half of the channels onto the second, again and again, as warps shuffle."""
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = torch.cat((terms[..., :half] + terms[..., half : 2 * half], terms[..., 2 * half :]), dim=-1)
    return terms[..., 0]


ORDERS = (
    lambda terms: terms.sum(-1), lambda terms: terms.double().sum(-1).float(), backwards, in_halves,
)  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=["torch's", "fp64", "backwards", "in-halves"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_order_of_the_norms_sum_passes(
    order: Callable[[Tensor], Tensor], dtype: str, failing: Failing
) -> None:
    """Four reductions, none of them the contract's tree."""
    right = Candidate("right", "qwen3.5-norm-rope-gate", norm_in(order), ("cpu",), (dtype,),
                      family="norm_rotate_gate")  # fmt: skip
    plain = "random/shared-table/sample-positions"
    assert failing(right, "smoke", ("accuracy-forward",), only=f"s7-h3-d256-r64/{plain}") == {}


def test_c001_the_grid_is_centred_as_pinned() -> None:
    """The negative side of an odd size has one line more; the frame axis is not centred."""
    for size, lines in ((5, [-3, -2, -1, 0, 1]), (4, [-2, -1, 0, 1])):
        positions = CentredGrid().image([(1, size, size)])
        assert positions[:, 1].unique().tolist() == positions[:, 2].unique().tolist() == lines
        assert positions[:, 0].unique().tolist() == [0]


def test_c002_both_layouts_of_ids_have_the_same_bytes() -> None:
    """Three disjoint rows: end to end, cut out of wider rows, and stored one triple for each token."""
    ids = torch.stack((torch.arange(100, 107), torch.arange(3, 10), torch.arange(50, 57)))
    wide, triples = torch.zeros(3, 64, dtype=torch.int64), torch.zeros(7, 3, dtype=torch.int64)
    wide[:, :7], triples[:] = ids, ids.T
    generator = torch.Generator().manual_seed(0)
    q, k, cache = (torch.randn(shape, generator=generator) for shape in ((7, 5, 128), (7, 2, 128), (128, 128)))
    run, stored = composition("mrope-interleaved"), (ids, wide[:, :7], triples.T, ids.int(), triples.int().T)
    assert [t.stride() for t in stored[:3]] == [(7, 1), (64, 1), (1, 3)]
    results = [run(q.bfloat16(), k.bfloat16(), cache, t) for t in stored]
    assert all(torch.equal(y, z) for result in results for y, z in zip(result, results[0], strict=True))


@pytest.mark.parametrize("stored", ["sliced-positions", "transposed-positions"])
def test_c002_both_layouts_of_ids_pass(stored: str, failing: Failing) -> None:
    """A kernel that takes any strides of positions has the same bytes for all of them."""
    right = Candidate("right", "mrope-interleaved", composition("mrope-interleaved"), ("cpu",), ("bfloat16",),
                      ("strided", "any-shape"), family="rotate_qk")  # fmt: skip
    assert failing(right, "standard", ("accuracy-forward",), only=stored) == {}


def elided_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """hf-llama, eager in the activation dtype, compiled with what lies between in fp32."""
    if torch.compiler.is_compiling():
        return half_split(x, cos, sin)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)


def test_c003_roundings_that_a_compiler_leaves_out_pass_compiled_and_fail_eager(failing: Failing) -> None:
    """The same bytes from an eager kernel are the dictionary's fault rounding-skipped."""
    composed = Candidate("right", "hf-llama", elided_when_compiled, ("cpu",), ("bfloat16",), ("compile",))
    assert failing(composed, "smoke", ("accuracy-forward", "fullgraph")) == {}
    assert FAULTS["rounding-skipped"].contract == "hf-llama"
    assert "accuracy-forward" in failing(FAULTS["rounding-skipped"].candidate(), "smoke", ("accuracy-forward",))


_elided: Any = custom_op(
    "ropecheck_tests::elided", half_split, mutates_args=(), schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor"
)
_elided.register_fake(lambda x, cos, sin: torch.empty_like(x, memory_format=torch.contiguous_format))


def opaque_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The bytes of :func:`elided_when_compiled`, from an operator that no compiler looks into."""
    result: Tensor = _elided(x, cos, sin) if torch.compiler.is_compiling() else elided_when_compiled(x, cos, sin)
    return result


def test_c003_the_same_bytes_from_an_opaque_kernel_fail(failing: Failing) -> None:
    """No compiler has left anything out of an operator; eager, the candidate is right."""
    opaque = Candidate("opaque", "hf-llama", opaque_when_compiled, ("cpu",), ("bfloat16",), ("compile",))
    found = failing(opaque, "smoke", ("accuracy-forward", "fullgraph"))
    assert list(found) == ["fullgraph"]
    assert "are not those of an eager call" in found["fullgraph"]


def test_c004_a_result_one_ulp_from_another_right_one_passes(failing: Failing) -> None:
    """Where a bf16 value has two admissible neighbours, both pass: the fp64 form at hard-to-round points."""
    hard = Inputs(length=3, heads=8, payload="hard-to-round", positions="ramp")
    given = build(Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", hard), 0)
    other, strict = in_fp64(given.x.view, given.cos.view, given.sin.view), given.strict()
    apart = (key(other.contiguous()) - key(strict.contiguous())).abs()
    assert int((apart == 1).sum()) > 0
    assert int((apart == 0).sum()) > apart.numel() // 2
    right = Candidate("right", "qwen-image", in_fp64, ("cpu",), ("bfloat16",))
    assert failing(right, "standard", ("accuracy-forward",), only="hard-to-round") == {}


def test_c005_the_two_tests_of_an_interleaved_map_are_one(failing: Failing) -> None:
    """The proof is executed, sees a map that does differ, and the candidate passes."""
    assert maps_agree() == ""
    assert at_most((24, 20, 20), 128) == contract("mrope-interleaved").lanes.axis
    listed = FAULTS["interleaved-up-to-and-with"]
    assert failing(listed.candidate(), "smoke", ("accuracy-forward",)) == {}


def test_c006_one_row_of_positions_and_three_equal_ones_agree() -> None:
    """Text has the same tables either way, byte for byte."""
    own = contract("mrope-interleaved")
    text = torch.arange(13)[:, None]
    three = own.tables(text.expand(-1, 3), torch.bfloat16)
    one = [own.frequencies.table(text[:, 0], own.lanes.dims[0])[part] for part in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(three, one, strict=True))


def test_c006_one_row_and_three_equal_ones_have_the_same_bytes() -> None:
    """In a rotation and in a fused call, whose kernels read one row or three."""
    generator, ids = torch.Generator().manual_seed(0), torch.tensor([5, 0, 7, 7, 31])
    cache = torch.randn(32, 128, generator=generator)
    q, k = (torch.randn(5, heads, 128, generator=generator).bfloat16() for heads in (4, 1))
    pairs = [composition("neox")(q, k, cache, ids), composition("mrope-interleaved")(q, k, cache, ids.expand(3, -1))]
    run, axis_map = right_fused_call(contract("qwen3.5-norm-rope-gate")), torch.arange(32) % 3
    heads, weights = (q.flatten(1).repeat(1, 4), k.repeat(1, 1, 2).flatten(1)), torch.randn(2, 256, generator=generator)
    fused = [
        run(*heads, *weights.bfloat16(), cache[:, :64], rows, eps=1e-6, axis_map=lanes)
        for rows, lanes in ((ids, None), (ids.expand(3, -1), axis_map))
    ]
    for one, three in (pairs, fused):
        assert all(y is not None and z is not None and torch.equal(y, z) for y, z in zip(one, three, strict=True))


def test_there_are_at_least_twelve_ways_to_be_right() -> None:
    """Of distinct mechanism, rotations and norms together."""
    assert len(ROTATIONS) + len(FORMS) + len(ORDERS) >= 12
