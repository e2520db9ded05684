"""strict-bytes: does the candidate return the contract's own order without contraction, byte for byte?

Asked of a candidate that claims ``strict``: out of the admissible set only the one value counts that the recipe
gives when every step is rounded as written. The finding names the forms of evaluation that reproduce every element
(the rounding fingerprint), so that a failure says which contraction or which extra precision was used. Forms that
agree on all elements of a case cannot be told apart by it; in 16-bit dtypes most cases are like that, which is why
hard-to-round points and fp32 are among them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ropecheck.oracle.floats import from_key, key, same

from ..candidates import Candidate
from ..cases import Case, Inputs, build, cases_of
from ..families import shown
from ..invocation import forward, vjp
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of

_SMOKE = (Inputs(length=64), Inputs(length=3, heads=8, payload="hard-to-round", positions="ramp"))
_STANDARD = (
    Inputs(length=64),
    Inputs(batch=2, length=16, heads=5, table="per-sample"),
    Inputs(length=3, heads=8, payload="hard-to-round", positions="ramp"),
    Inputs(length=16, payload="magnitudes"),
    Inputs(length=13, payload="special"),
    Inputs(length=255, heads=1, payload="basis-first", positions="ramp"),
    Inputs(length=255, heads=1, payload="basis-second", positions="ramp"),
    Inputs(length=11, heads=5, payload="index-coded"),
    Inputs(length=19, positions="far"),
    Inputs(length=37, conjugate=True),
    Inputs(batch=2, length=37, x_view="packed-qkv", gradient_view="heads-first"),
    Inputs(batch=2, length=37, table="per-sample", table_view="sliced-rows"),
    Inputs(batch=2, length=37, head_dim=80, rotary_dim=48),
)


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    chosen = {"smoke": _SMOKE, "standard": _STANDARD, "full": (*_STANDARD, Inputs(length=1024, heads=8))}[plan]
    for given in chosen:
        yield given, "forward"
        if "vjp" in candidate.provides:
            yield given, "vjp"


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    given = build(case, seed)
    backward = case.variant == "vjp"
    if backward:
        got = vjp(candidate, given.x.view, given.call, given.gradient.view)
    else:
        got = forward(candidate, given.x.view, given.call)
    expected, held = given.strict(backward=backward), given.held(got, backward=backward, samples=0)
    differs = ~same(got, expected)
    facts = {
        "elements": got.numel(),
        "unlike": int(differs.sum()),
        "fingerprint": list(held.fingerprint),
        "elements unlike each form": held.unlike,
    }
    if not facts["unlike"]:
        return passed(**facts)
    index = first_of(differs)
    below, above = (from_key(key(expected[index].reshape(1)) + step, got.dtype) for step in (-1, 1))
    worst = {
        **dict(zip(("sample", "token", "head", "channel"), index, strict=True)),
        "strict": shown(float(expected[index])),
        "neighbours": [shown(float(below)), shown(float(above))],
        "got": shown(float(got[index])),
    }
    forms = " and ".join(held.fingerprint) or "no single form"
    unlike = f"{facts['unlike']} of {facts['elements']} elements are not the strict bytes"
    reason = f"{unlike}; {forms} reproduces all of them"
    return failed(reason, worst, **facts)


STRICT_BYTES = Judgement(
    "strict-bytes",
    "strict",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "strict-bytes", candidate, device, dtype, _variants(candidate, plan)
    ),
    judge,
)
