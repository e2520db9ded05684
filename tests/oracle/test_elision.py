"""Elided roundings: which recipes a compiler may make of one, and which elements none of them admits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.certify import certify
from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.oracle.floats import bits
from ropecheck.oracle.pairing import ADJACENT, HALF_SPLIT
from ropecheck.oracle.recipes import ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS, ONE_ROUNDING, Recipe
from ropecheck.oracle.rotation import Rotation, compare, rotate_strict

ELIDED = [*ACTIVATION_DTYPE.with_roundings_elided(), *ACTIVATION_DTYPE_VJP_ONTO_ZEROS.with_roundings_elided()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rotation(recipe: Recipe, dtype: torch.dtype, scale: float = 1.0) -> Rotation:
    """[2, 16, 4, 40], 32 channels of which are rotated, with a table in the dtype of x."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 16, 4, 40, generator=generator) * scale).to(dtype)
    angle = torch.rand(2, 16, 16, generator=generator) * 6.25
    return Rotation(x, angle.cos().to(dtype), angle.sin().to(dtype), HALF_SPLIT, recipe)


def by_torch(given: Rotation, *, first: bool, second: bool) -> Tensor:
    """The forward with the first, or the second, product of each sum left in fp32; one rounding at the end."""
    dtype = given.x.dtype
    c, s = (t.unsqueeze(-2).float() for t in (given.cos, given.sin))
    x0, x1 = (half.float() for half in given.x[..., :32].chunk(2, dim=-1))

    def product(x: Tensor, table: Tensor, elided: bool) -> Tensor:
        return x * table if elided else (x * table).to(dtype).float()

    y0 = product(x0, c, first) - product(x1, s, second)
    y1 = product(x1, c, first) + product(x0, s, second)
    return torch.cat((y0.to(dtype), y1.to(dtype), given.x[..., 32:]), dim=-1)


def test_variants_of_a_recipe() -> None:
    """A recipe comes first of its variants, which differ in name and in the dtypes of products alone."""
    for recipe in (ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS):
        variants = recipe.with_roundings_elided()
        assert variants[0] is recipe
        assert len({v.name for v in variants}) == 4
        narrow = [sum(step.op == "mul" and step.dtype == "activation" for step in v.steps) for v in variants]
        assert narrow == [4, 2, 2, 0]
        for variant in variants:
            as_before = [replace(step, dtype="activation") for step in variant.steps]
            assert as_before == list(recipe.steps)


def test_a_recipe_in_fp32_has_nothing_to_lose() -> None:
    """Where every intermediate result is fp32 already there is one recipe."""
    for contract in CONTRACTS.values():
        for recipe in (contract.forward, contract.backward):
            alone = all(step.dtype == "float32" for step in recipe.steps)
            assert len(recipe.with_roundings_elided()) == (1 if alone else 4)
    assert ONE_ROUNDING.with_roundings_elided() == (ONE_ROUNDING,)


@dtypes
@pytest.mark.parametrize("recipe", ELIDED, ids=lambda r: r.name)
def test_exact_arithmetic_agrees(recipe: Recipe, dtype: torch.dtype) -> None:
    """What the oracle admits under a variant is certified, extreme magnitudes and special values included."""
    for scale in (1.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max / 64):
        given = rotation(recipe, dtype, scale)
        if scale == 1.0:
            values = torch.tensor([0.0, -0.0, math.inf, math.nan, torch.finfo(dtype).max]).to(dtype)
            given.x[:, ::4] = values[torch.arange(given.x[:, ::4].numel()).reshape(given.x[:, ::4].shape) % 5]
        sample = compare(given, rotate_strict(given)).sample
        assert len(sample) >= 256
        assert certify(recipe, sample, dtype).points >= 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_only_the_variant_with_these_roundings_left_out_admits_them(
    first: bool, second: bool, dtype: torch.dtype
) -> None:
    """Each elision is admitted whole by its own variant, and by no other."""
    given = rotation(ACTIVATION_DTYPE, dtype)
    got = by_torch(given, first=first, second=second)
    plain, of_first, of_second, of_both = ACTIVATION_DTYPE.with_roundings_elided()
    outside = {v: compare(replace(given, recipe=v), got).outside for v in (plain, of_first, of_second, of_both)}
    own = of_both if first and second else of_first if first else of_second
    assert {v for v, count in outside.items() if not count} == {own}
    assert torch.equal(bits(rotate_strict(replace(given, recipe=own))), bits(got))


@pytest.mark.parametrize("pairing", [ADJACENT, HALF_SPLIT], ids=lambda p: p.name)
def test_missed_elements_are_marked(pairing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the rotated elements that were changed are marked, over several blocks; a changed tail is not."""
    import ropecheck.oracle.rotation as rotation_module

    monkeypatch.setitem(rotation_module.PAIRS_AT_ONCE, "cpu", 3 * 4 * 16)
    given = replace(rotation(ONE_ROUNDING, torch.bfloat16), pairing=pairing)  # type: ignore[arg-type]
    got = rotate_strict(given)
    places = [(0, 0, 0, 0), (0, 7, 3, 31), (1, 2, 1, 17), (1, 15, 3, 30), (1, 15, 3, 39)]
    for place in places:
        got[place] += 100
    missed = torch.ones(got.shape, dtype=torch.bool)
    comparison = compare(given, got, missed=missed)
    assert missed.nonzero().tolist() == [list(place) for place in places[:4]]
    assert (comparison.outside, comparison.tail_changed) == (4, 1)


def test_a_mask_does_not_change_the_comparison() -> None:
    """With and without a mask the same is counted and sampled."""
    given = rotation(ACTIVATION_DTYPE, torch.bfloat16)
    got = by_torch(given, first=True, second=True)
    assert compare(given, got) == compare(given, got, missed=torch.empty(got.shape, dtype=torch.bool))
