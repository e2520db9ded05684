"""Recipes: what their steps say, and that evaluating them step by step gives the strict bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.admissible import strict
from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.oracle.floats import bits
from ropecheck.oracle.recipes import (
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    Recipe,
)

RECIPES = [
    ONE_ROUNDING,
    ONE_ROUNDING_VJP,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
    ACTIVATION_DTYPE,
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def operands(recipe: Recipe, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x0 and x1 in ``dtype``, c and s in the recipe's table dtype, signed zeros and cancellation among them."""
    generator = torch.Generator().manual_seed(0)
    x0, x1 = (torch.randn(20_000, generator=generator).to(dtype) for _ in range(2))
    angle = torch.rand(20_000, generator=generator) * 6.25
    table = torch.float32 if recipe.name.startswith("fp32") else dtype
    c, s = angle.cos().to(table), angle.sin().to(table)
    x0[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0], dtype=dtype)
    x1[:4] = torch.tensor([0.0, 0.0, -0.0, -0.0], dtype=dtype)
    x1[4:2000], s[4:2000] = x0[4:2000], c[4:2000]
    return x0, x1, c, s


def step_by_step(recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The recipe as separate torch operations, each of which rounds to the dtype of its step."""
    known = {"x0": x0, "x1": x1, "c": c, "s": s, "zero": torch.zeros((), dtype=x0.dtype)}
    for step in recipe.steps:
        if not step.customary:
            known[step.out] = known[step.left]
            continue
        dtype = torch.float32 if step.dtype == "float32" else x0.dtype
        operation = {"mul": torch.mul, "add": torch.add, "sub": torch.sub}[step.op]
        known[step.out] = operation(known[step.left].to(dtype), known[step.right].to(dtype))
    return known["y0"].to(x0.dtype), known["y1"].to(x0.dtype)


@recipes
@dtypes
def test_strict_bytes_are_the_steps_one_by_one(recipe: Recipe, dtype: torch.dtype) -> None:
    """The strict form is what torch's own operations give, one for each step, byte for byte."""
    values = operands(recipe, dtype)
    got = strict(recipe, *(v.double() for v in values), dtype)
    for ours, steps in zip(got, step_by_step(recipe, *values), strict=True):
        assert torch.equal(bits(ours), bits(steps))


@recipes
def test_steps_only_use_what_is_known(recipe: Recipe) -> None:
    """Every operand is an input or an earlier result, no name is used twice, and both outputs are made."""
    known = {"x0", "x1", "c", "s", "zero"}
    for step in recipe.steps:
        assert {step.left, step.right} <= known
        assert step.out not in known
        known.add(step.out)
    assert {"y0", "y1"} <= known


@recipes
def test_only_products_may_be_contracted(recipe: Recipe) -> None:
    """Each multiplication says that it may be fused into its addition, and no addition does."""
    assert all(step.contractible == (step.op == "mul") for step in recipe.steps)


@recipes
def test_only_sums_onto_zero_are_not_customary(recipe: Recipe) -> None:
    """A recipe ends in sums onto zero, customary where its name says so; every other step always is."""
    onto_zero = [step for step in recipe.steps if step.right == "zero"]
    assert [step.out for step in onto_zero] == ["y0", "y1"]
    assert {step.customary for step in onto_zero} <= {"onto zeros" in recipe.name}
    assert all(step.customary for step in recipe.steps if step.right != "zero")


@recipes
def test_the_name_says_where_it_rounds(recipe: Recipe) -> None:
    """Steps round to the dtype in the recipe's name, all to the same."""
    assert {step.dtype for step in recipe.steps} == {"float32" if recipe.name.startswith("fp32") else "activation"}


@dtypes
def test_transposed_is_the_conjugate(dtype: torch.dtype) -> None:
    """The transposed recipe gives the bytes of the forward recipe with the sine negated: it undoes the rotation."""
    x0, x1, c, s = (v.double() for v in operands(ONE_ROUNDING, dtype))
    for ours, conjugate in zip(
        strict(ONE_ROUNDING_VJP, x0, x1, c, s, dtype), strict(ONE_ROUNDING, x0, x1, c, -s, dtype), strict=True
    ):
        assert torch.equal(bits(ours), bits(conjugate))


@dtypes
def test_onto_zeros_only_clears_the_sign_of_a_zero(dtype: torch.dtype) -> None:
    """Gradients summed onto zeros have no -0 where the plain ones do, and are the same bytes everywhere else."""
    values = [v.double() for v in operands(ONE_ROUNDING, dtype)]
    changed = 0
    for onto, plain in zip(
        strict(ONE_ROUNDING_VJP_ONTO_ZEROS, *values, dtype), strict(ONE_ROUNDING_VJP, *values, dtype), strict=True
    ):
        minus_zero = (plain == 0) & plain.signbit()
        changed += int(minus_zero.sum())
        assert not bool(onto[minus_zero].signbit().any())
        assert torch.equal(bits(onto)[~minus_zero], bits(plain)[~minus_zero])
    assert changed


def test_choosing_the_wrong_recipe_shows() -> None:
    """One rounding and three roundings differ in bf16 and in fp16, and are the same recipe in fp32."""
    for dtype in DTYPES:
        values = [v.double() for v in operands(ACTIVATION_DTYPE, dtype)]
        one, three = strict(ONE_ROUNDING, *values, dtype), strict(ACTIVATION_DTYPE, *values, dtype)
        differs = any(not torch.equal(bits(a), bits(b)) for a, b in zip(one, three, strict=True))
        assert differs == (dtype != torch.float32)


def test_contracts_use_these_recipes() -> None:
    """Every contract's backward is a transposed recipe and rounds where its forward does."""
    for it in CONTRACTS.values():
        assert it.forward in RECIPES
        assert it.backward in RECIPES
        assert "transposed" not in it.forward.name
        assert "transposed" in it.backward.name
        assert it.forward.steps[0].dtype == it.backward.steps[0].dtype
