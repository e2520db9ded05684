"""Families: one logical x becomes the arguments of a call and comes back, and which contract has which family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.oracle.floats import same
from ropecheck.suites.candidates import CLAIMS, Candidate
from ropecheck.suites.cases import Case, Inputs, build, elsewhere
from ropecheck.suites.families import FAMILIES, Family
from ropecheck.suites.invocation import as_function, parts, put_together
from ropecheck.suites.judging import Selection, questions

OF_ROTATIONS = ("rotate", "rotate_pair", "rotate_qk")
EVERY = pytest.mark.parametrize("family", OF_ROTATIONS)


def case(family: str, inputs: Inputs, contract: str = "neox") -> Case:
    return Case("accuracy-forward", contract, "cpu", "float32", inputs, family=family)


def bound(family: str, inputs: Inputs, contract: str = "neox") -> Family:
    return FAMILIES[family](CONTRACTS[contract], inputs)


def x_of(family: Family) -> Tensor:
    batch = 1 if family.flat else 2
    return torch.randn(batch, 3, family.inputs.heads, 8)


@EVERY
@pytest.mark.parametrize("k_heads", [0, 1, 3])
@pytest.mark.parametrize("k_view", ["", "heads-first"])
def test_what_is_divided_is_put_together_again(family: str, k_heads: int, k_view: str) -> None:
    """Activations and incoming gradients are the heads of x in order, and their inverse is x."""
    if family == "rotate":
        k_heads, k_view = 0, ""
    made = bound(family, Inputs(heads=7, k_heads=k_heads, k_view=k_view))
    x = x_of(made)
    activations, upstream = made.divided(x), made.upstream(x)
    assert len(activations) == len(made.activations)
    assert len(upstream) == len(made.outputs)
    assert torch.equal(made.undivided(activations), x)
    assert torch.equal(made.joined(upstream), x)
    if k_heads:
        assert activations[1].shape[-2] == k_heads
    for activation in activations:
        assert made.lifted(activation).shape[:2] == x.shape[:2]
        assert activation.shape[made.token_dimension] == 3


@pytest.mark.parametrize("family", ["rotate_pair", "rotate_qk"])
@pytest.mark.parametrize("of_k", [True, False])
def test_one_of_two_upstream_gradients_is_contiguous(family: str, of_k: bool) -> None:
    """Each lies as its own consumer has made it, in memory of its own."""
    views = ("packed-qkv", "contiguous") if of_k else ("contiguous", "packed-qkv")
    made = bound(family, Inputs(heads=5, gradient_view=views[0], k_gradient_view=views[1]))
    upstream = made.upstream(x_of(made))
    assert [gradient.is_contiguous() for gradient in upstream] == [not of_k, of_k]


@EVERY
def test_what_is_split_is_a_view(family: str) -> None:
    """Neither a candidate that works in place nor a compiler is given copies."""
    made = bound(family, Inputs(heads=5, k_view="" if family == "rotate" else "packed-qkv"))
    x = x_of(made)
    assert {part.untyped_storage().data_ptr() for part in made.split(x)} == {x.untyped_storage().data_ptr()}


@EVERY
def test_a_function_only_moves_values_around_the_candidate(family: str) -> None:
    """A candidate that returns what it is given makes a function that returns x, whatever autograd adds to it."""

    def unchanged(*arguments: Tensor) -> object:
        return arguments[0] if family == "rotate" else arguments[:2]

    given = build(case(family, Inputs(heads=5)), 0)
    candidate = Candidate("unchanged", "neox", unchanged, ("cpu",), family=family)
    function = as_function(candidate, given.family)
    x = given.x.view.clone().requires_grad_()
    y = put_together(given.family, function(x, *given.call.tables))
    (gradient,) = torch.autograd.grad(y, x, given.gradient.view)
    assert bool(same(y.detach(), given.x.view).all())
    assert bool(same(gradient, given.gradient.view).all())


@EVERY
def test_without_the_claim_strided_activations_are_contiguous(family: str) -> None:
    """With it they are views of x, of which two have its pitch in common."""
    made = bound(family, Inputs(heads=5))
    x = x_of(made)
    plain = parts(Candidate("c", "neox", print, family=family), made, x)
    assert all(part.is_contiguous() for part in plain)
    strided = parts(Candidate("c", "neox", print, family=family, provides=("strided",)), made, x)
    assert all(part.data_ptr() >= x.data_ptr() for part in strided)
    assert len({part.stride(made.token_dimension) for part in strided}) == 1


def test_samples_of_a_flat_family_lie_end_to_end() -> None:
    """Positions start again with each sample, or three further where the tables are per sample."""
    shared = build(case("rotate_qk", Inputs(batch=2, length=4)), 0)
    apart = build(case("rotate_qk", Inputs(batch=2, length=4, table="per-sample")), 0)
    assert shared.x.view.shape == (1, 8, 3, 128)
    assert shared.cos.view.shape == (8, 64)
    assert shared.positions.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert apart.positions.flatten().tolist() == [0, 1, 2, 3, 3, 4, 5, 6]


@EVERY
def test_other_positions_fit_into_the_memory_of_the_first(family: str) -> None:
    """A table is written over the first one's memory where a stale one is looked for; both differ."""
    for contract in ("neox", "mrope-interleaved"):
        first = case(family, Inputs(batch=2, length=5), contract)
        one, other = build(first, 0).tables, build(elsewhere(first), 0).tables
        assert list(one) == list(other)
        assert all(one[name].view.shape == other[name].view.shape for name in one)
        assert not any(torch.equal(one[name].view, other[name].view) for name in one)


@EVERY
@pytest.mark.parametrize("contract", ["neox", "mrope-ernie"])
def test_a_part_is_expected_as_in_the_whole(family: str, contract: str) -> None:
    """Of q's gradient alone, or k's, the oracle expects the bytes that it has among x's heads."""
    given = build(case(family, Inputs(length=5, heads=5), contract), 0)
    whole = given.expected(backward=True)
    strict = whole.strict()
    for at, expected in enumerate(given.family.divided(strict)):
        assert bool(same(whole.part(at).strict(), given.family.lifted(expected).contiguous()).all())
    turned = whole.with_upstream(-given.gradient.view).strict()
    assert bool(same(turned.abs(), strict.abs()).all())


@EVERY
def test_strict_bytes_are_held(family: str) -> None:
    """The contract's own bytes are admissible, and one that is not is described by tensor, token and head."""
    given = build(case(family, Inputs(length=5, heads=5)), 0)
    expected = given.expected()
    strict = expected.strict()
    held = expected.held(strict)
    assert (held.reason, held.outside, held.moved) == ("", 0, 0)
    assert held.facts["certified points"] > 0
    strict[0, 3, 4, 2] += 1
    missed = torch.zeros(strict.shape, dtype=torch.bool)
    held = expected.held(strict, samples=0, missed=missed)
    assert held.outside == 1
    assert missed.nonzero().tolist() == [[0, 3, 4, 2]]
    (worst,) = held.worst
    assert (worst["token"], worst["head"], worst["channel"], worst["lane"]) == (3, 4, 2, 2)
    assert worst.get("tensor") == (None if family == "rotate" else "k")
    assert "certified points" not in held.facts


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_contract_has_a_family(contract: str) -> None:
    """The family that a contract names takes it; a cache takes no grid of two or of signed coordinates."""
    own = CONTRACTS[contract]
    takes = {name for name, family in FAMILIES.items() if family.takes(own)}
    assert own.family in takes
    cached = {"neox", "gptj", "hf-llama"} | {name for name in CONTRACTS if name.startswith(("gptj-", "mrope-"))}
    assert ("rotate_qk" in takes) == (contract in cached)
    assert ("rotate" in takes) == ("rotate_pair" in takes) == (own.norm is None)


@EVERY
@pytest.mark.parametrize("plan", ["smoke", "standard", "full"])
def test_no_case_asks_what_its_family_has_not(family: str, plan: str) -> None:
    """Options and head counts of every case are those of a family that has them, and one tensor has none."""
    claims = tuple(claim for claim in CLAIMS if claim not in FAMILIES[family].unclaimable)
    everything = Candidate("everything", "neox", print, ("cpu",), provides=claims, family=family)
    asked = [q for q in questions(everything, Selection(plan, dtypes=("bfloat16",))) if isinstance(q, Case)]
    assert all(q.inputs.chosen <= FAMILIES[family].options for q in asked)
    assert all(0 <= q.inputs.k_heads < max(1, q.inputs.heads) for q in asked)
    found = set().union(*(q.inputs.chosen for q in asked))
    assert found == (FAMILIES[family].options if plan != "smoke" else found)
    pairs = family == "rotate_pair" and plan != "smoke"
    assert any(q.inputs.k_heads for q in asked) == (pairs or family == "rotate_qk")


def test_new_dimensions_show_in_the_id() -> None:
    """Head counts and options stand behind the views, in front of the conjugate; without any an id is what it was."""
    given = Inputs(heads=20, k_heads=4, options="int32-positions+sliced-positions", k_view="heads-first")
    name = "accuracy-forward/cpu/float32/b1-s7-h20-d128-r128/random/shared-table/sample-positions"
    assert case("rotate_qk", given).id == f"{name}/k=heads-first/k-heads=4/int32-positions+sliced-positions"
    assert case("rotate_qk", Inputs(heads=20)).id == name == case("rotate_pair", Inputs(heads=20)).id
