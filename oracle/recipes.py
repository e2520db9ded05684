"""Recipes: the rounding of a rotation written down, one typed operation per line.

Inputs of every recipe are the two members ``x0`` and ``x1`` of a lane (or of the incoming gradient), its cosine
``c`` and its sine ``s`` (negated for the conjugate rotation). A step's dtype is the format that its exact result
is rounded to; ``activation`` stands for the dtype of x. Every output is at last rounded to the activation dtype.

Facts: the seven recipes of ``vendor-pins.md``, read from and executed against diffusers 0.42.1 and
transformers 5.24.0. What vendors' autograd returns is part of it: several round once forward and three times
backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Step:
    """``out = left op right``, rounded to ``dtype``.

    ``contractible`` says whether a multiplication may be fused into the addition that consumes it, its own
    rounding then being lost. Only a candidate's claim ``strict`` takes that freedom away.
    """

    out: str
    op: Literal["mul", "add", "sub"]
    left: str
    right: str
    dtype: Literal["float32", "activation"] = "float32"
    contractible: bool = False


@dataclass(frozen=True)
class Recipe:
    """The steps that make ``y0`` and ``y1`` from ``x0``, ``x1``, ``c`` and ``s``."""

    name: str
    steps: tuple[Step, ...]


def _rotation(name: str, dtype: Literal["float32", "activation"]) -> Recipe:
    return Recipe(
        name,
        (
            Step("x0c", "mul", "x0", "c", dtype, contractible=True),
            Step("x1s", "mul", "x1", "s", dtype, contractible=True),
            Step("y0", "sub", "x0c", "x1s", dtype),
            Step("x1c", "mul", "x1", "c", dtype, contractible=True),
            Step("x0s", "mul", "x0", "s", dtype, contractible=True),
            Step("y1", "add", "x1c", "x0s", dtype),
        ),
    )


def _transposed(name: str, dtype: Literal["float32", "activation"]) -> Recipe:
    return Recipe(
        name,
        (
            Step("x0c", "mul", "x0", "c", dtype, contractible=True),
            Step("x1s", "mul", "x1", "s", dtype, contractible=True),
            Step("y0", "add", "x0c", "x1s", dtype),
            Step("x1c", "mul", "x1", "c", dtype, contractible=True),
            Step("x0s", "mul", "x0", "s", dtype, contractible=True),
            Step("y1", "sub", "x1c", "x0s", dtype),
        ),
    )


ONE_ROUNDING = _rotation("fp32, one rounding", "float32")
ONE_ROUNDING_VJP = _transposed("fp32, one rounding, transposed", "float32")
ACTIVATION_DTYPE = _rotation("activation dtype, three roundings", "activation")
ACTIVATION_DTYPE_VJP = _transposed("activation dtype, three roundings, transposed", "activation")
