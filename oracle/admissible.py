"""Admissible sets: every value that an implementation obeying a recipe may return, by enumeration.

A recipe is walked step by step on fp64 tensors that hold exact values. A product of two numbers of at most 24 bits
is exact in fp64, so a product has two forms: rounded as the recipe says, or exact where it may be contracted into
the addition that consumes it. A sum of two exact products may moreover be evaluated in fp64 or without any
rounding, with or without a stop at fp32 before the output dtype: more accurate than the recipe, hence admitted.

The same enumeration yields the strict bytes (the first form) and the fingerprint (which forms reproduce a
candidate's output). Contraction never crosses a rounding to a 16-bit format: that is a conversion, and no compiler
fuses a multiplication into an addition across one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .floats import bits, detour_matters, format_of, key, round_double, round_exact, two_sum
from .recipes import Recipe, Step

SEPARATE = "separate"
"""The form without contraction: each step rounded as written. A claim of ``strict`` is held to it."""


@dataclass(frozen=True)
class _Form:
    """One way to have evaluated a value: its label, the fp64 tensor, and whether it is an unrounded product."""

    label: str
    value: Tensor
    exact_product: bool = False


@dataclass(frozen=True)
class AdmissibleSet:
    """The set for one tensor of outputs.

    ``forms`` maps a form's name to its values in the output dtype, :data:`SEPARATE` first. ``low`` and ``high`` are
    the ordered integers (:func:`~ropecheck.oracle.floats.key`) of the least and greatest finite form; ``low >
    high`` where no form is finite. Infinities of either sign and NaN are members only where a form is one:
    ``classes`` holds (minus infinity, plus infinity, NaN) as boolean tensors, or None where every form is finite.
    """

    forms: dict[str, Tensor]
    low: Tensor
    high: Tensor
    classes: tuple[Tensor, Tensor, Tensor] | None

    @property
    def strict(self) -> Tensor:
        """The one value of the recipe evaluated in its own order without contraction."""
        return self.forms[SEPARATE]

    def contains(self, got: Tensor) -> Tensor:
        """Elementwise: is ``got``, of the output dtype, a member?"""
        k = key(got)
        inside = (k >= self.low) & (k <= self.high)
        if self.classes is None:
            return inside
        minus, plus, nan = self.classes
        special = torch.where(got.isnan(), nan, torch.where(got > 0, plus, minus))
        return torch.where(got.isfinite(), inside, special)

    def outside_by(self, got: Tensor) -> Tensor:
        """int64: how many representable values separate ``got`` from the span; 0 inside it."""
        k = key(got).long()
        return (self.low.long() - k).clamp(min=0) + (k - self.high.long()).clamp(min=0)


def admissible(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[AdmissibleSet, AdmissibleSet]:
    """The admissible sets of ``y0`` and ``y1``.

    ``x0``, ``x1``, ``c`` and ``s`` are fp64 tensors of one shape holding values of at most 24 significant bits
    within the fp32 range; ``s`` is already negated for a conjugate rotation. ``dtype`` is the activation dtype.
    """
    values = _walk(recipe, x0, x1, c, s, dtype, strict=False)
    return _span(values["y0"]), _span(values["y1"])


def strict(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Only the :data:`SEPARATE` form of ``y0`` and ``y1``; arguments as for :func:`admissible`."""
    values = _walk(recipe, x0, x1, c, s, dtype, strict=True)
    return values["y0"][SEPARATE], values["y1"][SEPARATE]


def _walk(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype, *, strict: bool
) -> dict[str, dict[str, Tensor]]:
    known = {name: (_Form("", v),) for name, v in (("x0", x0), ("x1", x1), ("c", c), ("s", s))}
    onto_zero = {step.left: step.out for step in recipe.steps if step.right == "zero"}
    outputs: dict[str, dict[str, Tensor]] = {}
    for step in recipe.steps:
        target = dtype if step.dtype == "activation" else torch.float32
        if step.op == "mul":
            known[step.out] = _product(step, known[step.left][0].value, known[step.right][0].value, target, strict)
        elif step.right != "zero":
            summands = (known[step.left], known[step.right], step.op, target, dtype)
            if step.out not in onto_zero:
                outputs[step.out] = _sum(*summands, None)
                continue
            forms = outputs[onto_zero[step.out]] = _sum(*summands, 0.0)
            if not strict:
                forms.update({f"{name}, not onto zero": v for name, v in _sum(*summands, None).items()})
    return outputs


def _product(step: Step, left: Tensor, right: Tensor, target: torch.dtype, strict: bool) -> tuple[_Form, ...]:
    exact = left * right
    # A 16-bit target is reached through fp32, as torch does: innocuous, for 24 bits are at least twice 11 plus 2.
    rounded = _Form("", exact.to(torch.float32).to(target).double())
    if strict or not step.contractible or target != torch.float32:
        return (rounded,)
    return rounded, _Form(step.out, exact, exact_product=True)


def _sum(
    left: tuple[_Form, ...],
    right: tuple[_Form, ...],
    op: str,
    target: torch.dtype,
    dtype: torch.dtype,
    zero: float | None,
) -> dict[str, Tensor]:
    """All forms of a sum in ``dtype``; ``zero``, where it is not None, is added to the sum rounded to ``target``."""
    forms: dict[str, Tensor] = {}
    for r in right:
        addend = -r.value if op == "sub" else r.value
        for a in left:
            if a.exact_product and r.exact_product:
                paths = _WIDER if dtype == torch.float32 else {**_WIDER, **_WIDER_DIRECT}
                forms.update(_by_path(a.value, addend, dtype, zero, paths))
            elif a.exact_product or r.exact_product:
                fused = f"fused {a.label or r.label}"
                forms.update(_by_path(a.value, addend, dtype, zero, {fused: _exact_via_fp32}))
            else:
                # Two summands of 24 bits: fp64 first is innocuous (53 >= 2 * 24 + 2).
                rounded = (a.value + addend).to(torch.float32).to(target)
                forms[SEPARATE] = _plus(rounded, zero).to(dtype)
    return forms


_Path = Callable[[Tensor, Tensor, torch.dtype, "float | None"], Tensor]


def _plus(x: Tensor, zero: float | None) -> Tensor:
    return x if zero is None else x + zero


def _exact_via_fp32(a: Tensor, b: Tensor, dtype: torch.dtype, zero: float | None) -> Tensor:
    return _plus(round_exact(*two_sum(a, b), torch.float32), zero).to(dtype)


def _exact(a: Tensor, b: Tensor, dtype: torch.dtype, zero: float | None) -> Tensor:
    high, low = two_sum(a, b)
    return round_exact(_plus(high, zero), low, dtype)


# The forms more accurate than the recipe: fp64 and exact sums, with and without a stop at fp32.
_WIDER: dict[str, _Path] = {
    "fp64 via fp32": lambda a, b, dtype, zero: _plus((a + b).to(torch.float32), zero).to(dtype),
    "exact via fp32": _exact_via_fp32,
}
_WIDER_DIRECT: dict[str, _Path] = {
    "fp64": lambda a, b, dtype, zero: round_double(_plus(a + b, zero), dtype),
    "exact": _exact,
}


def _by_path(
    a: Tensor, b: Tensor, dtype: torch.dtype, zero: float | None, paths: dict[str, _Path]
) -> dict[str, Tensor]:
    """``a + b`` in ``dtype`` by each of ``paths``; one tensor serves all paths that agree everywhere."""
    wide = _plus(a + b, zero)
    narrow = wide.to(torch.float32)
    common = narrow.to(dtype)
    doubtful = detour_matters(wide, narrow, dtype)
    forms = dict.fromkeys(paths, common)
    if len(doubtful):
        at_a, at_b, at_common = a.flatten()[doubtful], b.flatten()[doubtful], bits(common).flatten()[doubtful]
        for name, path in paths.items():
            values = path(at_a, at_b, dtype, zero)
            if not torch.equal(bits(values), at_common):
                forms[name] = common.clone()
                forms[name].view(-1)[doubtful] = values
    return forms


def _span(forms: dict[str, Tensor]) -> AdmissibleSet:
    distinct = list({id(v): v for v in forms.values()}.values())
    keys = [key(v) for v in distinct]
    low = high = keys[0]
    for k in keys[1:]:
        low, high = torch.minimum(low, k), torch.maximum(high, k)
    infinity = format_of(distinct[0].dtype).infinity_key
    if not low.numel() or (int(high.max()) < infinity and int(low.min()) > -1 - infinity):
        return AdmissibleSet(forms, low, high, None)
    values, stacked = torch.stack(distinct), torch.stack(keys)
    finite, limits = values.isfinite(), torch.iinfo(stacked.dtype)
    low = torch.where(finite, stacked, limits.max).amin(0)
    high = torch.where(finite, stacked, limits.min).amax(0)
    minus, plus = (values == float("-inf")).any(0), (values == float("inf")).any(0)
    return AdmissibleSet(forms, low, high, (minus, plus, values.isnan().any(0)))
