"""Recipes: the rounding of a rotation written down, one typed operation per line.

Inputs of every recipe are the two members ``x0`` and ``x1`` of a lane (or of the incoming gradient), its cosine
``c`` and its sine ``s`` (negated for the conjugate rotation), and the constant ``zero``, which is +0. A step's dtype
is the format that its exact result is rounded to; ``activation`` stands for the dtype of x. Every output is at last
rounded to the activation dtype.

Facts: the recipes were read from and executed against diffusers 0.42.1 and transformers 5.24.0. What vendors'
autograd returns is part of it: several round once forward and three times backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Step:
    """``out = left op right``, rounded to ``dtype``.

    ``contractible`` says whether a multiplication may be fused into the addition that consumes it, its own
    rounding then being lost. Only a candidate's claim ``strict`` takes that freedom away.

    A sum onto ``zero`` turns -0 into +0. Accumulators start with it (a matrix product's, or autograd's in the backward
    of a slice): so it may be left out or put in by everybody, and ``customary`` says which of both is strict.
    """

    out: str
    op: Literal["mul", "add", "sub"]
    left: str
    right: str
    dtype: Literal["float32", "activation"] = "float32"
    contractible: bool = False
    customary: bool = True


@dataclass(frozen=True)
class Recipe:
    """The steps that make ``y0`` and ``y1`` from ``x0``, ``x1``, ``c`` and ``s``."""

    name: str
    steps: tuple[Step, ...]

    def with_roundings_elided(self) -> tuple[Recipe, ...]:
        """Every recipe that a compiler may make of this one by leaving out intermediate roundings, itself first.

        A compiler that fuses several operations keeps what lies between them in fp32: a product that is rounded to
        the activation dtype may lose that rounding, which then leaves it open to contraction. The rounding of a sum
        to the activation dtype is the output's own, and nothing is lost with it. Each output is made of two products
        of its own, so the choices for the first and for the second product of both outputs are all that an element
        can tell apart. A recipe that has no such rounding has no other form.
        """
        sums = [step for step in self.steps if step.op != "mul" and step.right != "zero"]
        if all(step.dtype == "float32" for step in sums):
            return (self,)
        first, second = {step.left for step in sums}, {step.right for step in sums}

        def without(products: set[str], which: str) -> Recipe:
            kept = {step.out for step in self.steps if step.op == "mul"} - products
            steps = tuple(step if step.out in kept else replace(step, dtype="float32") for step in self.steps)
            return Recipe(f"{self.name}, {which} not rounded", steps)

        return (
            self,
            without(first, "first product"),
            without(second, "second product"),
            without(first | second, "products"),
        )


_Dtype = Literal["float32", "activation"]
_Sign = Literal["add", "sub"]


def _rotation(name: str, dtype: _Dtype) -> Recipe:
    return Recipe(name, (*_products(dtype), *_sums("sub", "add", dtype, onto_zero=False)))


def _transposed(name: str, dtype: _Dtype, *, onto_zero: bool) -> Recipe:
    """``onto_zero`` says whether the vendor's autograd accumulates the gradient onto zeros."""
    return Recipe(name, (*_products(dtype), *_sums("add", "sub", dtype, onto_zero=onto_zero)))


def _sums(first: _Sign, second: _Sign, dtype: _Dtype, *, onto_zero: bool) -> tuple[Step, ...]:
    return (
        Step("sum0", first, "x0c", "x1s", dtype),
        Step("sum1", second, "x1c", "x0s", dtype),
        Step("y0", "add", "sum0", "zero", dtype, customary=onto_zero),
        Step("y1", "add", "sum1", "zero", dtype, customary=onto_zero),
    )


def _products(dtype: _Dtype) -> tuple[Step, ...]:
    pairs = (("x0", "c"), ("x1", "s"), ("x1", "c"), ("x0", "s"))
    return tuple(Step(x + table, "mul", x, table, dtype, contractible=True) for x, table in pairs)


ONE_ROUNDING = _rotation("fp32, one rounding", "float32")
ONE_ROUNDING_VJP = _transposed("fp32, one rounding, transposed", "float32", onto_zero=False)
ONE_ROUNDING_VJP_ONTO_ZEROS = _transposed("fp32, one rounding, transposed, onto zeros", "float32", onto_zero=True)
ACTIVATION_DTYPE = _rotation("activation dtype, three roundings", "activation")
ACTIVATION_DTYPE_VJP_ONTO_ZEROS = _transposed(
    "activation dtype, three roundings, transposed, onto zeros", "activation", onto_zero=True
)
