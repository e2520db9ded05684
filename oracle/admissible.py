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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .floats import bits, detour_matters, format_of, key, round_double, round_exact, round_to_odd, two_sum
from .recipes import Recipe, Step

SEPARATE = "separate"
"""The form without contraction: each step rounded as written. A claim of ``strict`` is held to it."""


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
        return _gap(key(got), self.low, self.high)

    def outside_by_at(self, got: Tensor, flat: Tensor) -> Tensor:
        """:meth:`outside_by` of the elements at the ``flat`` indices alone."""
        return _gap(key(got[flat]), self.low[flat], self.high[flat])


def _gap(k: Tensor, low: Tensor, high: Tensor) -> Tensor:
    k = k.long()
    return (low.long() - k).clamp(min=0) + (k - high.long()).clamp(min=0)


def admissible(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[AdmissibleSet, AdmissibleSet]:
    """The admissible sets of ``y0`` and ``y1``.

    ``x0``, ``x1``, ``c`` and ``s`` are fp64 tensors of one shape holding values of at most 24 significant bits
    within the fp32 range; ``s`` is already negated for a conjugate rotation. ``dtype`` is the activation dtype.
    """
    sums = _sums(recipe, x0, x1, c, s, dtype)
    return _set(sums["y0"], dtype), _set(sums["y1"], dtype)


def strict(
    recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Only the :data:`SEPARATE` form of ``y0`` and ``y1``; arguments as for :func:`admissible`."""
    sums = _sums(recipe, x0, x1, c, s, dtype)
    first, second = sums["y0"], sums["y1"]
    return _separate(first, dtype, first.onto_zero), _separate(second, dtype, second.onto_zero)


@dataclass(frozen=True)
class _Product:
    """A product in fp64: ``rounded`` as the recipe says, and ``exact`` where contraction may leave it unrounded."""

    label: str
    rounded: Tensor
    exact: Tensor | None

    def at(self, indices: Tensor) -> _Product:
        exact = None if self.exact is None else self.exact.flatten()[indices]
        return _Product(self.label, self.rounded.flatten()[indices], exact)


@dataclass(frozen=True)
class _Sum:
    """``left + right``, or ``left - right``, rounded to ``target``.

    +0 may be added to that, before the last rounding or after it; ``onto_zero`` says that strictly it is, before.
    """

    left: _Product
    right: _Product
    subtracts: bool
    target: torch.dtype
    onto_zero: bool

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right if self.subtracts else left + right

    def at(self, indices: Tensor) -> _Sum:
        return replace(self, left=self.left.at(indices), right=self.right.at(indices))


def _sums(recipe: Recipe, x0: Tensor, x1: Tensor, c: Tensor, s: Tensor, dtype: torch.dtype) -> dict[str, _Sum]:
    """The sum behind each output of ``recipe``."""
    inputs = {"x0": x0, "x1": x1, "c": c, "s": s}
    products: dict[str, _Product] = {}
    sums: dict[str, _Sum] = {}
    for step in recipe.steps:
        target = dtype if step.dtype == "activation" else torch.float32
        if step.op == "mul":
            products[step.out] = _product(step, inputs[step.left] * inputs[step.right], target)
        elif step.right == "zero":
            sums[step.out] = replace(sums.pop(step.left), onto_zero=step.customary)
        else:
            sums[step.out] = _Sum(products[step.left], products[step.right], step.op == "sub", target, False)
    return sums


def _product(step: Step, exact: Tensor, target: torch.dtype) -> _Product:
    # A 16-bit target is reached through fp32, as torch does: innocuous, for 24 bits are at least twice 11 plus 2.
    rounded = exact.to(torch.float32).to(target).double()
    return _Product(step.out, rounded, exact if step.contractible and target == torch.float32 else None)


def _set(total: _Sum, dtype: torch.dtype) -> AdmissibleSet:
    if total.target == dtype:
        forms = _forms(total)
        # Nothing is rounded after zero is added, which therefore only clears the sign of a zero.
        cleared = {name: _cleared(v) for name, v in forms.items()}
        return _span(_either(forms, cleared, total.onto_zero))
    common, doubtful = _settled(total, dtype)
    return _scattered(common, doubtful, _narrowed_forms(total.at(doubtful), dtype))


def _either(without: dict[str, Tensor], onto: dict[str, Tensor], onto_zero: bool) -> dict[str, Tensor]:
    """The forms without and with +0 added, the strict ones first and the others by a name that says so."""
    if onto_zero:
        return onto | {f"{name}, not onto zero": values for name, values in without.items()}
    return without | {f"{name}, onto zero": values for name, values in onto.items()}


def _cleared(values: Tensor) -> Tensor:
    # The bytes of -0 are the least integer; a reduction is a tenth of a comparison.
    minus_zero = torch.iinfo(format_of(values.dtype).integer).min
    return values + 0.0 if values.numel() and int(bits(values).amin()) == minus_zero else values


def _settled(total: _Sum, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum in 16-bit ``dtype`` where all forms agree, and the flat indices where they might not.

    On the way to its last rounding a form rounds a product, and the sum, at most once each to fp32: its value, and
    that value's fp32, lie within 2^-22 (|left| + |right|) of the exact sum, or within 2^-147 more where fp32
    underflows. Rounding is monotone, so where both ends of a wider interval round to the same value, so does
    everything between. The interval is wider by the least positive number of ``dtype``: a zero, whose sign
    depends on the form, is never settled. Nor is a sum whose products might overflow fp32.
    """
    form = format_of(dtype)
    left, right = (p.rounded if p.exact is None else p.exact for p in (total.left, total.right))
    middle, spread = total.of(left, right), left.abs().add_(right.abs())
    if spread.numel() and not float(spread.amax()) < _NEAR_OVERFLOW:
        spread = torch.where(spread < _NEAR_OVERFLOW, spread, float("inf"))
    spread.mul_(2.0**-22).add_(2.0 ** (form.least_exponent - form.precision + 1))
    above = (middle + spread).to(torch.float32).to(dtype)
    below = middle.sub_(spread).to(torch.float32).to(dtype)
    return above, (bits(above) != bits(below)).flatten().nonzero().squeeze(-1)


_NEAR_OVERFLOW = 2.0**127


def _forms(total: _Sum) -> dict[str, Tensor]:
    """All forms of ``total`` in its target, without zero."""
    left, right = total.left, total.right
    forms = {SEPARATE: _separate(total, total.target, False)}
    if left.exact is not None:
        forms[f"fused {left.label}"] = _nearest(total, left.exact, right.rounded)[1]
    if right.exact is not None:
        forms[f"fused {right.label}"] = _nearest(total, left.rounded, right.exact)[1]
    if left.exact is not None and right.exact is not None:
        forms["fp64 via fp32"], forms["exact via fp32"] = _nearest(total, left.exact, right.exact)
    return forms


def _nearest(total: _Sum, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``total`` of fp64 ``left`` and ``right`` in fp32 by way of fp64, and from the exact sum: often one tensor."""
    wide = total.of(left, right)
    narrow = wide.to(torch.float32)
    doubtful = detour_matters(wide, narrow)
    if not len(doubtful):
        return narrow, narrow
    addend = right.flatten()[doubtful]
    sums = two_sum(left.flatten()[doubtful], -addend if total.subtracts else addend)
    return narrow, _put(narrow, doubtful, round_exact(*sums, torch.float32))


def _narrowed_forms(total: _Sum, dtype: torch.dtype) -> dict[str, Tensor]:
    """All forms of ``total``, whose target is fp32, in 16-bit ``dtype``, those with zero added first.

    Meant for few elements: forms are rows of one tensor, for the number of operations is what costs there.
    """
    left, right = total.left, total.right
    fused: dict[str, tuple[Tensor, Tensor]] = {}
    if left.exact is not None:
        fused[f"fused {left.label}"] = left.exact, right.rounded
    if right.exact is not None:
        fused[f"fused {right.label}"] = left.rounded, right.exact
    if left.exact is not None and right.exact is not None:
        fused["exact via fp32"] = left.exact, right.exact
    names, stops = [SEPARATE], [_separate(total, torch.float32, False)[None]]
    direct: Tensor | None = None
    if fused:
        addend = torch.stack([addend for _, addend in fused.values()])
        high, low = two_sum(torch.stack([a for a, _ in fused.values()]), -addend if total.subtracts else addend)
        odd = round_to_odd(high, low)
        names, stops = [*names, *fused], [*stops, odd.to(torch.float32)]
        if "exact via fp32" in fused:
            names, stops = [*names, "fp64 via fp32", "fp64", "exact"], [*stops, high[-1:].to(torch.float32)]
            direct = torch.stack((high[-1], odd[-1]))
    via = torch.cat(stops)

    def rounded(onto_zero: bool) -> dict[str, Tensor]:
        rows = [_plus(via, onto_zero).to(dtype)]
        if direct is not None:
            rows.append(round_double(_plus(direct, onto_zero), dtype))
        return dict(zip(names, torch.cat(rows), strict=True))

    without = rounded(False)
    last = {f"{name}, onto zero at last": _cleared(values) for name, values in without.items()}
    return _either(without, rounded(True), total.onto_zero) | last


def _separate(total: _Sum, dtype: torch.dtype, onto_zero: bool) -> Tensor:
    # Two summands of 24 bits: fp64 first is innocuous (53 >= 2 * 24 + 2).
    rounded = total.of(total.left.rounded, total.right.rounded).to(torch.float32).to(total.target)
    return _plus(rounded, onto_zero).to(dtype)


def _plus(x: Tensor, onto_zero: bool) -> Tensor:
    return x + 0.0 if onto_zero else x


def _scattered(common: Tensor, indices: Tensor, forms: dict[str, Tensor]) -> AdmissibleSet:
    """The set that is ``common`` everywhere but at flat ``indices``, where it is that of ``forms``."""
    first: dict[bytes, str] = {}
    alike = {name: first.setdefault(bits(v).cpu().numpy().tobytes(), name) for name, v in forms.items()}
    few, whole = _span({name: forms[name] for name in first.values()}), _span({SEPARATE: common})
    distinct = {name: _put(common, indices, forms[name]) for name in first.values()}
    spread = {name: distinct[known] for name, known in alike.items()}
    classes = None
    if few.classes is not None or whole.classes is not None:
        none = (torch.zeros_like(common, dtype=torch.bool),) * 3
        pairs = zip(whole.classes or none, few.classes or (n.flatten()[indices] for n in none), strict=True)
        minus, plus, nan = (_put(everywhere, indices, here) for everywhere, here in pairs)
        classes = (minus, plus, nan)
    return AdmissibleSet(spread, _put(whole.low, indices, few.low), _put(whole.high, indices, few.high), classes)


def _put(everywhere: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    out = everywhere.clone()
    out.view(-1)[indices] = values
    return out


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
