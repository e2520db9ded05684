"""What the heads of family norm_rotate_gate hold, how they are divided, and how its positions are marked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract
from ropecheck.oracle.floats import bits
from ropecheck.oracle.fused import NormRotation, gathered_tables
from ropecheck.oracle.fused_gradients import exact_weight_gradient
from ropecheck.oracle.norm import Norm, strict_norm
from ropecheck.suites.cases import Case, Inputs, Operands, build
from ropecheck.suites.families import NormRotateGate
from ropecheck.suites.families.norm_heads import HeadCounts
from ropecheck.suites.norm_payloads import NORM_PAYLOADS, Heads, gates, gradients, quarter_turns, weights

CONTRACT = "qwen3.5-norm-rope-gate"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SIZES = [(20, 80), (16, 64), (32, 128), (64, 128), (128, 128), (64, 256), (128, 256), (72, 72), (256, 256)]


def heads(dtype: torch.dtype, rotary_dim: int = 64, width: int = 256, tokens: int = 9, count: int = 8) -> Heads:
    return Heads((tokens, count, width), rotary_dim, dtype, torch.Generator().manual_seed(0))


def operands(length: int = 11, dtype: str = "float32", **dimensions: object) -> Operands:
    given = Inputs(length=length, **dimensions)  # type: ignore[arg-type]
    return build(Case("accuracy-forward", CONTRACT, "cpu", dtype, given, "", "norm_rotate_gate"), seed=0)


@dtypes
@pytest.mark.parametrize("name", NORM_PAYLOADS)
def test_payloads_are_functions_of_their_arguments(name: str, dtype: torch.dtype) -> None:
    """Shape and dtype are those asked for, the same seed gives the same bytes, and only special is not finite."""
    for make in (NORM_PAYLOADS[name], lambda h: gradients(name, h), lambda h: gates(name, h)):
        one, again = (make(heads(dtype)) for _ in range(2))
        assert (one.shape, one.dtype) == ((9, 8, 256), dtype)
        assert torch.equal(bits(one), bits(again))
        assert bool(one.isfinite().all()) or name == "special"
    assert bool(NORM_PAYLOADS[name](heads(dtype)).isfinite().all()) == (name != "special")


@dtypes
@pytest.mark.parametrize(("rotary_dim", "width"), SIZES)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_basis_heads_print_cosine_and_sine(
    dtype: torch.dtype, rotary_dim: int, width: int, weight_offset: float
) -> None:
    """The norm makes exactly 0 of one member of each pair, and of the other 1 or 2, or 0 on two lanes at most, which
    are others at the next token."""
    lanes = rotary_dim // 2
    for name, zero in (("basis-first", slice(lanes, rotary_dim)), ("basis-second", slice(0, lanes))):
        given = heads(dtype, rotary_dim, width)
        weight, _ = weights(name, given, weight_offset)
        y = strict_norm(NORM_PAYLOADS[name](given), weight, Norm(weight_offset=weight_offset))
        assert bool((y[..., zero] == 0).all())
        other = torch.cat((y[..., : zero.start], y[..., zero.stop :]), dim=-1)
        assert set(other.unique().tolist()) <= {0.0, 1.0, 2.0}
        silent = other == 0
        assert int(silent.sum(-1).max()) <= 2
        assert not bool((silent[1:] & silent[:-1]).all(0).any())


@dtypes
def test_exact_sums_are_exact(dtype: torch.dtype) -> None:
    """The oracle agrees that every order gives the one result, and a token that is missing changes nearly all of it."""
    given = heads(dtype, tokens=40, count=5)
    x, gradient = NORM_PAYLOADS["exact-sum"](given), gradients("exact-sum", given)
    weight, _ = weights("exact-sum", given, 1.0)
    cos, sin = quarter_turns(40, 32, given.generator)
    whole, less = (
        exact_weight_gradient(NormRotation(x[:kept], weight, cos[:kept], sin[:kept]), gradient[:kept])
        for kept in (40, 39)
    )
    assert bool((whole == whole.round()).all())
    assert float((whole != less).float().mean()) > 0.8


@dtypes
def test_special_heads_are_of_a_kind_each(dtype: torch.dtype) -> None:
    """Half of the heads stay finite throughout; infinities and NaN stand alone in theirs."""
    x = NORM_PAYLOADS["special"](heads(dtype, tokens=16))
    strange = (~x.isfinite()).sum(-1)
    assert set(strange.unique().tolist()) == {0, 1}
    assert float((strange == 0).float().mean()) == 0.75
    limits = torch.finfo(dtype)
    assert bool(x.isnan().any() & x.isinf().any() & (x == limits.max).any())
    assert bool(((x == 0) & x.signbit()).any() & ((x != 0) & (x.abs() < limits.smallest_normal)).any())


def test_weights_of_queries_and_of_keys_differ() -> None:
    """Or a kernel that exchanges them would not show."""
    q, k = weights("random", heads(torch.float32), 1.0)
    assert not bool((q == k).any())
    assert abs(float(q.mean())) < 0.1
    assert abs(float(weights("random", heads(torch.float32), 0.0)[0].mean()) - 1) < 0.1


@pytest.mark.parametrize(
    ("count", "k", "gate", "divided"),
    [
        (3, 0, True, (1, 1)), (4, 0, True, (1, 2)), (8, 0, True, (3, 2)), (24, 0, True, (8, 8)), (36, 4, True, (16, 4)),
        (17, 1, True, (8, 1)), (2, 0, False, (1, 1)), (20, 4, False, (16, 4)), (0, 0, True, (0, 0)),
    ],
)  # fmt: skip
def test_heads_are_divided_and_joined_again(count: int, k: int, gate: bool, divided: tuple[int, int]) -> None:
    """Each query is followed by its gate, keys come last, and joining undoes it."""
    found = HeadCounts.of(count, k, gate)
    assert (found.q, found.k) == divided
    x = torch.arange(count, dtype=torch.float32)[None, :, None].expand(2, -1, 4)
    parts = found.queries(x), found.keys(x), found.gates(x)
    assert torch.equal(found.joined(*parts), x)
    for name, part in zip(("q", "k", "gate"), parts, strict=True):
        for number in range(part.shape[1]):
            assert found.tensor_of(int(part[0, number, 0])) == (name, number)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    """A query without a gate, or more keys than heads."""
    for count, k in ((4, 1), (3, 5)):
        with pytest.raises(ValueError, match="heads must be keys and queries with a gate each"):
            HeadCounts.of(count, k, True)


def positions_of(given: Operands) -> Tensor:
    return given.tables["positions"].view.long()


def test_what_a_call_is_given_reads_the_case_back() -> None:
    """Through cache, positions and map each token reads its cosines and sines, wherever and in whichever dtype they
    lie; rows of positions are disjoint."""
    for options in ("", "one-row", "int32-positions+transposed-positions", "sliced-positions", "model-cache",
                    "contiguous-11-11-10", "bfloat16-cache"):  # fmt: skip
        given = operands(options=options)
        family = given.family
        assert isinstance(family, NormRotateGate)
        cache, positions = given.tables["cos_sin_cache"].view.float(), positions_of(given)
        cos, sin, outside = gathered_tables(cache, positions, family.axis_map)
        expected = [t.as_given() for t in (given.cos, given.sin)]
        if options == "bfloat16-cache":
            expected = [t.bfloat16().float() for t in expected]
        assert not bool(outside.any())
        assert torch.equal(cos, expected[0])
        assert torch.equal(sin, expected[1])
        if options not in ("one-row", "model-cache"):
            rows = [set(row.tolist()) for row in positions]
            assert not rows[0] & rows[1]
            assert not rows[1] & rows[2]
            assert not rows[0] & rows[2]


def test_marked_tokens_are_marked() -> None:
    """Padding has slot -1, a position far beyond the cache and NaN in x; a token out of range leaves the cache in one
    row of its positions, at either end and by as much as 32 bits hold."""
    given = operands(length=21, options="slots+out-of-range")
    family, positions = given.family, positions_of(given)
    assert isinstance(family, NormRotateGate)
    padding, outside = family.padding(21), family.out_of_range(21)
    assert (int(padding.sum()), int(outside.sum())) == (5, 11)
    assert torch.equal(given.tables["slots"].view == -1, padding)
    assert bool((positions[:, padding] == 1 << 30).all())
    assert bool(given.x.view[0, padding].isnan().all())
    assert bool(given.x.view[0, ~padding].isfinite().all())
    rows = given.tables["cos_sin_cache"].view.shape[0]
    wrong = (positions < 0) | (positions >= rows)
    assert wrong[:, outside].sum(0).tolist() == [1] * 11
    assert not bool(wrong[:, ~(padding | outside)].any())
    far = positions_of(operands(length=40, options="out-of-range+one-row"))
    beyond = far[(far < 0) | (far >= operands(length=40, options="one-row").tables["cos_sin_cache"].view.shape[0])]
    assert bool((beyond < 0).any() & (beyond >= 1 << 32).any())


@pytest.mark.parametrize("view", ["contiguous", "packed-qkv", "misaligned"])
def test_activations_are_views_of_one_projection(view: str) -> None:
    """q_gate and k are slices of x's memory with its row pitch, and come together again."""
    given = operands(x_view=view, heads=8)
    x = given.x.view
    q_gate, k = given.family.divided(x)
    assert (q_gate.shape, k.shape) == ((11, 6 * 256), (11, 2 * 256))
    assert q_gate.stride() == k.stride() == (x.stride(1), 1)
    assert q_gate.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(given.family.undivided((q_gate, k)), x)
    assert contract(CONTRACT).head_dim == 256
