"""The gradients of a norm's weights: the cases of accuracy-vjp that are asked of family ``norm_rotate_gate`` alone.

A weight's gradient is a sum over all tokens and heads, whose order is an implementation's own. The bound that holds in
every order grows with their number and is of use at few; at many, payloads are used whose sums are exact in every
order, and the result has one right value. Of a ``strict`` candidate the contract's own order is asked besides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.certify_fused_vjp import certify_weight_gradient
from ropecheck.oracle.floats import from_key, same
from ropecheck.oracle.fused import NormRotation, strict_fused_vjp
from ropecheck.oracle.fused_comparison import compare_weight_gradient
from ropecheck.oracle.fused_gradients import exact_weight_gradient, weight_gradient_set

from ..candidates import Candidate
from ..cases import Case, Operands, build
from ..families import Call, Wanted, shown
from ..families.norm_expected import ExpectedNorm
from ..invocation import CandidateFault, applied, guarded, parts
from ..norm_payloads import quarter_turns
from ..returned import fault_of
from ..verdicts import Finding, failed, passed
from ..views import TABLE_VIEWS
from .autograd import Derivative
from .judgement import first_of

_NAMES = ("q_weight", "k_weight")
WEIGHTS = {
    "weights": (_NAMES, False),
    "weights-and-x": (_NAMES, True),
    "q_weight-alone": (_NAMES[:1], False),
    "k_weight-alone": (_NAMES[1:], False),
}
"""Which weights require a gradient in a variant, and whether x does, as in training."""

_EXACT = "exact-sum"
_CERTIFIED = 128


def judge_weights(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    if case.inputs.payload == _EXACT:
        given = _with_quarter_turns(given, seed)
    expected = given.expected(backward=True)
    assert isinstance(expected, ExpectedNorm)
    asked, of_x = WEIGHTS[case.variant]
    got, of_activations = weight_gradients(candidate, given, asked, of_x=of_x)
    facts: dict[str, Any] = {"rows": {}, "outside": 0, "not strict": 0, "exact": case.inputs.payload == _EXACT}
    if of_x:
        of_x_too = given.family.undivided(of_activations)
        derivative = Derivative("x's gradient beside those of the weights", expected, of_x_too)
        if reason := derivative.fault("strict" in candidate.provides):
            return failed(reason, derivative.worst(), **facts)
    for name, half in zip(_NAMES, expected.halves(), strict=True):
        if name not in got:
            continue
        rotation, upstream, gradient = half.rotation, half.gradient, got[name]
        assert upstream is not None
        facts["rows"][name] = rotation.x.shape[0] * rotation.x.shape[1]
        if facts["exact"]:
            outside, worst = _off_the_exact_sum(rotation, upstream, gradient)
        else:
            outside, worst = _outside(rotation, upstream, gradient, facts, seed)
        facts["outside"] += outside
        if outside:
            reason = f"{outside} of {len(gradient)} elements of {name}'s gradient are not admissible"
            return failed(reason, {"tensor": name, **worst}, **facts)
        unlike = ~same(gradient, strict_fused_vjp(rotation, upstream)[1])
        facts["not strict"] += int(unlike.sum())
        if "strict" in candidate.provides and bool(unlike.any()):
            place = {"tensor": name, "channel": first_of(unlike)[0]}
            return failed(f"{int(unlike.sum())} elements of {name}'s gradient are not the strict bytes", place, **facts)
    return passed(**facts)


def weight_gradients(
    candidate: Candidate, given: Operands, asked: tuple[str, ...], *, of_x: bool
) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """The gradients of the weights ``asked`` for and, with ``of_x``, of the activations, by autograd.

    Raises :class:`~ropecheck.suites.invocation.CandidateFault`.
    """
    family, tables = given.family, given.call.tables
    named = dict(zip(_NAMES, tables, strict=False))
    weights = {name: weight.detach().requires_grad_(name in asked) for name, weight in named.items()}
    activations = tuple(part.detach().requires_grad_(of_x) for part in parts(candidate, family, given.x.view))
    results = applied(candidate, activations, Call(family, (*weights.values(), *tables[len(_NAMES) :])))
    upstream = family.upstream(given.gradient.view)
    # A gate that was only copied does not depend on the weights.
    reached = [(y, g.view(y.shape)) for y, g in zip(results, upstream, strict=True) if y.requires_grad]
    if not reached:
        raise CandidateFault("run returns tensors without gradient for weights that require one")
    ys, gradients = zip(*reached, strict=True)
    leaves = {name: weights[name] for name in asked}
    leaves |= dict(zip(family.activations, activations, strict=True)) if of_x else {}
    pulled = guarded(
        "the backward of run", lambda: torch.autograd.grad(ys, tuple(leaves.values()), gradients, allow_unused=True)
    )
    found = dict(zip(leaves, pulled, strict=True))
    for name, gradient in found.items():
        if gradient is None:
            raise CandidateFault(f"the backward of run has no gradient for {name}")
        wanted = Wanted(name, leaves[name], (tuple(leaves[name].shape),))
        if fault := fault_of("the backward of run", gradient, (wanted,)):
            raise CandidateFault(fault)
    found = {name: gradient.resolve_neg() for name, gradient in found.items()}
    return {name: found[name] for name in asked}, tuple(found[name] for name in family.activations) if of_x else ()


def _with_quarter_turns(given: Operands, seed: int) -> Operands:
    """``given`` with a table with which the sums of its payload are exact."""
    tokens, lanes = given.cos.view.shape
    device, generator = given.cos.view.device, torch.Generator().manual_seed(seed)
    cos, sin = (table.to(device) for table in quarter_turns(tokens, lanes, generator))
    tables = given.family.packed(cos, sin, given.x.view.dtype)
    placed = TABLE_VIEWS["contiguous"]
    return replace(given, cos=placed(cos), sin=placed(sin), tables=tables)


def _outside(
    rotation: NormRotation, upstream: Tensor, got: Tensor, facts: dict[str, Any], seed: int
) -> tuple[int, dict[str, Any]]:
    """How many elements are not admissible, and the worst of them. A sample is certified."""
    found = compare_weight_gradient(rotation, upstream, got, samples=_CERTIFIED, seed=seed)
    certificate = certify_weight_gradient(rotation, upstream, [*found.sample, *found.worst])
    facts["certified points"] = facts.get("certified points", 0) + certificate.points
    facts["certified by"] = certificate.arithmetic
    if not found.outside:
        return 0, {}
    if not found.worst:
        return found.outside, {"got": "finite, where a token out of range makes NaN"}
    worst = found.worst[0]
    ends = [shown(worst.low), shown(worst.high)]
    return found.outside, {"channel": worst.index[2], "admissible": ends, "got": shown(worst.got)}


def _off_the_exact_sum(rotation: NormRotation, upstream: Tensor, got: Tensor) -> tuple[int, dict[str, Any]]:
    """The same where every order gives one sum. A reciprocal root that misses 2^-10 by an ulp is as admissible as
    elsewhere, where what it may change is less than the 1 that a row changes."""
    right = exact_weight_gradient(rotation, upstream)
    members = weight_gradient_set(rotation, upstream, (rotation.judged,))
    low, high = (from_key(end, got.dtype).double() for end in (members.low, members.high))
    near = (members.contains(got[None, None]) & (high - low < 1))[0, 0]
    # A sum that is zero may have either sign.
    unlike = ~same(got, right) & ~((got == 0) & (right == 0)) & ~near
    if not bool(unlike.any()):
        return 0, {}
    channel = first_of(unlike)[0]
    ends = [shown(float(right[channel]))] * 2
    return int(unlike.sum()), {"channel": channel, "admissible": ends, "got": shown(float(got[channel]))}
