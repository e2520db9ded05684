"""Semantic faults of arithmetic: the right numbers are combined in another way, or rounded where they should not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ropecheck.oracle.admissible import admissible
from ropecheck.oracle.floats import bits, format_of
from ropecheck.oracle.pairing import ADJACENT, HALF_SPLIT
from ropecheck.oracle.recipes import Recipe, Step

from .fault import SHORT, Misreading
from .part import Finish, Part, evaluated
from .reading import Reading
from .tables import factors


def other_pairing(reading: Reading) -> Reading:
    def change(part: Part) -> Part:
        other = HALF_SPLIT if part.pairing == ADJACENT else ADJACENT
        return part if part.norm is not None else replace(part, pairing=other)

    return reading.each(change)


def joined_otherwise(reading: Reading) -> Reading:
    """The pairs are right, and their results are put where the other pairing has them."""

    def change(part: Part) -> Part:
        y = evaluated(part)
        other = HALF_SPLIT if part.pairing == ADJACENT else ADJACENT
        moved = torch.cat((other.join(*part.pairing.split(y[..., : part.width])), y[..., part.width :]), dim=-1)
        return part.keeping(torch.ones_like(y, dtype=torch.bool), moved)

    return reading.each(change)


def members_exchanged(reading: Reading) -> Reading:
    def change(part: Part) -> Part:
        y = evaluated(part)
        first, second = part.pairing.split(y[..., : part.width])
        moved = torch.cat((part.pairing.join(second, first), y[..., part.width :]), dim=-1)
        return part.keeping(torch.ones_like(y, dtype=torch.bool), moved)

    return reading.each(change)


def _with_steps(reading: Reading, name: str, change: Callable[[Step], Step]) -> Reading:
    def other(part: Part) -> Part:
        if part.norm is not None:
            return part
        steps = tuple(change(step) for step in part.recipe.steps)
        return replace(part, recipe=Recipe(f"{part.recipe.name}, {name}", steps))

    return reading.each(other)


def products_in(reading: Reading, dtype: Literal["float32", "activation"]) -> Reading:
    return _with_steps(reading, "products", lambda s: replace(s, dtype=dtype) if s.op == "mul" else s)


def one_product_in(reading: Reading, product: str) -> Reading:
    return _with_steps(reading, product, lambda s: replace(s, dtype="activation") if s.out == product else s)


def all_in(reading: Reading, dtype: Literal["float32", "activation"]) -> Reading:
    return _with_steps(reading, dtype, lambda s: replace(s, dtype=dtype, contractible=s.op == "mul"))


def narrow(reading: Reading) -> Reading:
    def tables(part: Part) -> Part:
        cos, sin = (t.to(part.x.dtype).to(t.dtype) for t in (part.tables.cos, part.tables.sin))
        return part.reading(cos=cos, sin=sin)

    return all_in(reading.each(tables), "activation")


def without_minus(reading: Reading) -> Reading:
    return _with_steps(reading, "added", lambda s: replace(s, op="add") if s.op == "sub" else s)


def minus_one_misread(reading: Reading, by: float) -> Reading:
    """The half of a pair that is negated carries another factor than minus one."""

    def change(part: Part) -> Part:
        if part.norm is not None:
            return part
        sin = part.tables.sin
        other = part.reading(sin=(sin.float() * by).to(sin.dtype))
        ones = torch.ones(part.tables.lanes, dtype=torch.bool)
        negated = (~ones, ones) if part.is_gradient else (ones, ~ones)
        mask = torch.zeros(part.x.shape[-1], dtype=torch.bool)
        mask[: part.width] = part.pairing.join(*negated)
        return part.keeping(mask, evaluated(other))

    return reading.each(change)


def input_rounded(reading: Reading, dtype: torch.dtype) -> Reading:
    def change(part: Part) -> Part:
        return part if part.norm is not None else replace(part, x=part.x.to(dtype).to(part.x.dtype))

    return reading.each(change)


def overwritten(reading: Reading) -> Reading:
    """The second member is made of the new first member, as where a kernel writes before it has read."""

    def change(part: Part) -> Part:
        if part.norm is not None:
            return part
        y = evaluated(part)
        first, second = part.pairing.split(part.x[..., : part.width])
        made, _ = part.pairing.split(y[..., : part.width])
        stale = torch.cat((part.pairing.join(made, second), part.x[..., part.width :]), dim=-1)
        mask = torch.zeros_like(y, dtype=torch.bool)
        ones, none = torch.ones_like(first, dtype=torch.bool), torch.zeros_like(first, dtype=torch.bool)
        mask[..., : part.width] = part.pairing.join(none, ones)
        return part.keeping(mask, evaluated(replace(part, x=stale)))

    return reading.each(change)


def twice(reading: Reading) -> Reading:
    return reading.each(lambda part: part if part.norm is not None else replace(part, x=evaluated(part)))


def finished(reading: Reading, finish: Finish) -> Reading:
    """Of a bare rotation in fp32. What a norm hands on, or a narrower recipe, has been rounded before."""

    def change(part: Part) -> Part:
        narrow = any(step.dtype == "activation" for step in part.recipe.steps)
        return part if part.norm is not None or narrow else replace(part, finish=(*part.finish, finish))

    return reading.each(change)


def _truncating(y: Tensor, dtype: torch.dtype) -> Tensor:
    near = y.to(dtype)
    below = (bits(near) - 1).view(dtype)
    return torch.where(near.float().abs() > y.abs(), below, near).float()


def _away(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Ties go to the larger magnitude."""
    shift = 24 - format_of(dtype).precision
    if not shift or dtype == torch.float16:
        return y
    raised = (bits(y) + (1 << (shift - 1))) & -(1 << shift)
    return torch.where(y.isfinite(), raised.view(torch.float32), y)


def truncated(reading: Reading) -> Reading:
    return finished(reading, _truncating)


def ties_away(reading: Reading) -> Reading:
    return finished(reading, _away)


def multiplied(reading: Reading, by: float) -> Reading:
    return finished(reading, lambda y, dtype: y * by)


def through(reading: Reading, dtype: torch.dtype) -> Reading:
    return finished(reading, lambda y, _: y.to(dtype).float())


def flushed(reading: Reading) -> Reading:
    def flush(y: Tensor, dtype: torch.dtype) -> Tensor:
        least = torch.finfo(dtype).smallest_normal
        return torch.where(y.to(dtype).float().abs() < least, torch.zeros_like(y), y)

    return finished(reading, flush)


def overflowing(reading: Reading, power: int) -> Reading:
    """A power of two is multiplied in and divided out."""
    return finished(reading, lambda y, dtype: (y * 2.0**power) / 2.0**power)


def saturated(reading: Reading) -> Reading:
    return finished(reading, lambda y, dtype: y.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max))


def nan_cleared(reading: Reading) -> Reading:
    return finished(reading, lambda y, dtype: y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))


def sign_of_zero_lost(reading: Reading) -> Reading:
    return finished(reading, lambda y, dtype: y + 0.0)


def contracted(reading: Reading, form: str) -> Reading:
    """One of the forms that are admissible without a claim of strict, in place of the contract's own."""

    def change(part: Part) -> Part:
        lanes, x, tables = part.tables.lanes, part.x, part.tables
        halves = [half.double().contiguous() for half in part.pairing.split(x[..., : part.width])]
        per_head = (t if t.dim() == 4 else t.unsqueeze(-2) for t in (tables.cos, tables.sin))
        c, s = (t.double().expand(halves[0].shape).contiguous() for t in per_head)
        sets = admissible(part.recipe, halves[0], halves[1], c, s, x.dtype)
        made = [of.forms.get(name) for of, name in zip(sets, form.split(" and "), strict=True)]
        if any(y is None for y in made):
            return part
        whole = torch.cat((part.pairing.join(*made), x[..., 2 * lanes :]), dim=-1)  # type: ignore[arg-type]
        return part.keeping(torch.ones_like(x, dtype=torch.bool), whole)

    return reading.each(change)


ARITHMETIC = (
    Misreading("other-pairing", "channels are paired in the other way (half-split for adjacent, or back)",
               other_pairing, rows=("O012", "O013", "O017")),
    Misreading("joined-otherwise", "results are stored in the order of the other pairing", joined_otherwise),
    Misreading("members-exchanged", "the two results of every pair have changed places", members_exchanged),
    Misreading("products-rounded", "products are rounded to the activation dtype before the sum",
               products_in, ("activation",)),
    Misreading("one-product-rounded", "the product {0} alone is rounded to the activation dtype", one_product_in,
               ("x0s",), lambda r, g: ((p,) for p in ("x0c", "x1s", "x1c", "x0s")), dtype="float16"),
    Misreading("rounding-added", "the tables and every operation are rounded to the activation dtype", narrow),
    Misreading("rounding-skipped", "the results of operations are kept in fp32, and rounded once", all_in,
               ("float32",), contract="hf-llama"),
    Misreading("minus-forgotten", "the second product is added where it should be subtracted", without_minus),
    Misreading("minus-one-misread", "the negated half of every pair is {0:.8g} times what it should be",
               minus_one_misread, (1.0058441,), rows=("O112",)),
    Misreading("read-after-write", "the second of a pair is made of the new value of the first", overwritten),
    Misreading("applied-twice", "the rotation is applied to its own result", twice, rows=("O089", "O094")),
    Misreading("truncated", "results are truncated where they should be rounded", truncated),
    Misreading("ties-away", "ties are rounded away from zero", ties_away),
    Misreading("results-scaled", "results are multiplied by {0:.9g}", multiplied, (1.004,), factors,
               dtype="float32"),
    Misreading("through-another-dtype",
               lambda own, dtype: f"results pass through {SHORT[dtype]} on their way", through,
               (torch.float16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), dtype="float32"),
    Misreading("input-rounded", lambda own, dtype: f"x is rounded to {SHORT[dtype]} before it is rotated",
               input_rounded, (torch.bfloat16,),
               lambda r, g: ((torch.bfloat16,), (torch.float16,)), rows=("O058",), dtype="float32"),
    Misreading("subnormals-flushed", "subnormal results are zero", flushed, dtype="float16"),
    Misreading("overflow-on-the-way", "results are multiplied by 2^{0} and divided by it in fp32", overflowing, (16,),
               lambda r, g: ((n,) for n in (8, 12, 16, 24, 32)), dtype="float32"),
    Misreading("saturated", "infinite results become the largest finite number", saturated),
    Misreading("nan-cleared", "results that are NaN become zero", nan_cleared),
    Misreading("sign-of-zero-lost", "a negative zero becomes a positive one", sign_of_zero_lost,
               claims=("vjp", "any-shape", "strict"), dtype="float32"),
    Misreading("contracted-though-strict", "the sums are evaluated as {0}, which the claim strict rules out",
               contracted, ("fused x0c and fused x1c",),
               lambda r, g: ((f,) for f in ("fused x0c and fused x1c", "fused x1s and fused x0s",
                                            "exact via fp32 and exact via fp32")),
               claims=("vjp", "any-shape", "strict"), dtype="float32"),
)  # fmt: skip
