"""accuracy-forward and accuracy-vjp: is every element one that the contract's recipe may return?

Each output element is held against its admissible set: the span of all legal evaluations of the recipe, contracted
or not, for the very bytes of x and table that the candidate was given. Nothing is tolerated beyond it, and the
channels past the rotary dimension must come through bit for bit. The tables are given (level L1): a wrong table, or
positions wrong for the model, cannot be seen here, and neither can a fault too small to move any element of the
case to another value of its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ropecheck.oracle.contracts import contract

from ..candidates import Candidate
from ..cases import Case, Inputs, build, cases_of, has_grids
from ..invocation import differentiated, forward, vjp
from ..verdicts import PASS, Finding
from ..views import BEHIND_A_GAP, STRIDED_TABLE_VIEWS, STRIDED_X_VIEWS
from .far_offsets import VARIANT, far_inputs, judge_far
from .judgement import Judgement, finding_of
from .norm_weights import WEIGHTS, judge_weights

_SMOKE = (
    Inputs(),
    Inputs(batch=2, table="per-sample"),
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(length=64, heads=1, payload="basis-first", positions="ramp"),
    Inputs(batch=2, length=13, payload="special"),
    Inputs(batch=2, x_view="packed-qkv", gradient_view="all-stride-0"),
    Inputs(conjugate=True),
    Inputs(head_dim=80, rotary_dim=48),
)

_STANDARD = (
    Inputs(),
    # One table for two samples: a kernel that reads the second sample's rows past its end shows here.
    # As many tokens as samples: a table's first dimension is still that of tokens.
    Inputs(batch=3, length=3),
    Inputs(batch=2, length=7, table="per-sample"),
    # Decode: one token, several samples.
    Inputs(batch=2, length=1, table="per-sample"),
    Inputs(batch=2, length=1),
    # Of a single sample, at a position where something turns.
    Inputs(length=1, positions="far"),
    Inputs(batch=3, length=11, heads=5, payload="index-coded", table="first-two-alike"),
    # Slow lanes print their sine at full relative precision at small positions.
    Inputs(length=255, heads=1, payload="basis-first", positions="ramp"),
    Inputs(length=255, heads=1, payload="basis-second", positions="ramp"),
    Inputs(batch=2, length=13, payload="special", table="per-sample"),
    Inputs(batch=2, length=16, payload="magnitudes"),
    Inputs(length=3, heads=8, payload="hard-to-round", positions="ramp"),
    Inputs(batch=2, length=19, positions="far", table="per-sample"),
    Inputs(batch=2, heads=1, table_view="misaligned"),
    Inputs(batch=2, table_view="end-of-allocation", table="per-sample"),
    Inputs(batch=0),
    Inputs(length=0),
    Inputs(batch=2, length=11, table="per-sample", conjugate=True),
    Inputs(length=255, heads=1, payload="basis-first", positions="ramp", conjugate=True),
    *(Inputs(batch=2, length=5, table="per-sample", x_view=v, gradient_view=v) for v in STRIDED_X_VIEWS),
    *(Inputs(batch=2, length=5, table="per-sample", table_view=v) for v in STRIDED_TABLE_VIEWS),
    # Sizes beyond one block of a kernel: batch and heads, sequence, a sequence that is a power of two.
    Inputs(batch=9, length=2, heads=33, table="per-sample", scaled=True),
    Inputs(batch=2, length=260, heads=2, table="per-sample"),
    Inputs(length=128),
    Inputs(heads=0),
    Inputs(batch=0, conjugate=True),
    Inputs(batch=2, length=13, payload="special", conjugate=True),
    Inputs(batch=2, length=16, payload="magnitudes", conjugate=True),
    # Views of x and of the tables at once, alike and unlike.
    Inputs(batch=2, length=5, table="per-sample", x_view="heads-first", table_view="sliced-rows"),
    Inputs(batch=2, length=5, x_view="packed-qkv", table_view="sliced-rows"),
    Inputs(batch=2, length=5, table="per-sample", table_view="sliced-rows", sin_view="contiguous"),
    Inputs(batch=2, length=5, table="per-sample", table_view="contiguous", sin_view="transposed"),
    Inputs(batch=2, length=13, payload="special", x_view="packed-qkv", gradient_view="packed-qkv"),
    Inputs(batch=2, length=5, head_dim=80, rotary_dim=48, x_view="packed-qkv", gradient_view="heads-first"),
    Inputs(
        batch=2, length=5, head_dim=80, rotary_dim=48, x_view="packed-qkv", gradient_view="heads-first",
        table="per-sample", table_view="sliced-rows", conjugate=True,
    ),
    Inputs(batch=2, length=13, head_dim=80, rotary_dim=48, payload="magnitudes"),
    Inputs(batch=2, length=3, heads=131, head_dim=64, rotary_dim=64),
    Inputs(batch=2, length=5, head_dim=72, rotary_dim=72, table="per-sample"),
    Inputs(batch=2, length=5, head_dim=128, rotary_dim=64, table="per-sample"),
    Inputs(batch=2, length=5, head_dim=80, rotary_dim=80, table="per-sample"),
    Inputs(length=13, head_dim=128, rotary_dim=64, payload="special"),
    Inputs(length=13, head_dim=256, rotary_dim=256, table="per-sample"),
    Inputs(length=13, head_dim=256, rotary_dim=64),
    Inputs(batch=2, heads=7, head_dim=6, rotary_dim=2),
    Inputs(length=13, head_dim=67, rotary_dim=66, payload="index-coded", x_view="packed-qkv"),
    # A pair only: k in memory of its own, lying otherwise than q. Not expanded: its values are those of x.
    Inputs(batch=2, length=5, heads=5, table="per-sample", k_view="contiguous", k_gradient_view="packed-qkv"),
    *(
        Inputs(batch=2, length=5, heads=5, table="per-sample", k_view=v)
        for v in ("heads-first", BEHIND_A_GAP, "channels-stride-2", "misaligned", "heads-stride-2")
    ),
    Inputs(batch=2, length=5, heads=5, x_view="heads-first", k_view="wider-heads", payload="index-coded"),
    # As many heads of k as of q.
    Inputs(
        batch=2, length=5, heads=8, k_heads=4, table="per-sample",
        gradient_view="packed-qkv", k_gradient_view="contiguous",
    ),
    Inputs(batch=2, length=5, heads=8, x_view="wider-heads", k_view="heads-first", table="per-sample"),
    Inputs(batch=2, length=5, heads=7, x_view="packed-qkv", k_view="sequence-first", gradient_view="heads-first"),
)

# How an incoming gradient lies is autograd's choice and no claim of the caller's: that of a sum is expanded, that of a
# transposed consumer transposed, that of a slice or of one of several joined tensors cut out of a wider one.
_UPSTREAM = (
    Inputs(batch=2, length=5, gradient_view="all-stride-0"),
    Inputs(batch=2, length=5, gradient_view="heads-first", table="per-sample"),
    *(
        Inputs(batch=2, length=3, gradient_view=v, table="per-sample")
        for v in (
            "batch-stride-0", "heads-stride-0", "channels-stride-0", "sequence-first", "heads-outermost",
            "channels-outermost", "packed-qkv", "wider-heads", "channels-stride-2", "heads-and-channels-stride-2",
            "misaligned", "packed-qkv-misaligned",
        )
    ),
)  # fmt: skip

_FULL = (
    *(Inputs(batch=2, length=37, heads=5, payload=p, table="per-sample") for p in ("random", "special", "magnitudes")),
    *(Inputs(batch=2, length=1024, heads=1, payload=p, positions="ramp") for p in ("basis-first", "basis-second")),
    Inputs(length=29, heads=8, payload="hard-to-round", positions="ramp"),
    Inputs(batch=2, length=4096 // 8, heads=24, table="per-sample"),
    *(Inputs(batch=2, head_dim=d, rotary_dim=r) for d in (16, 64, 96, 192) for r in (d, d // 2, d // 4)),
)

_GRIDS = {"grid-64x64": 4096, "grid-104x58": 6032, "grid-83x83": 6889}


def inputs(candidate: Candidate, dtype: str, plan: str) -> Iterator[Inputs]:
    """The dimensions of both accuracy judgements."""
    yield from {"smoke": _SMOKE, "standard": _STANDARD, "full": _STANDARD + _FULL}[plan]
    own = contract(candidate.contract)
    if has_grids(own) and plan != "smoke":
        for grid, length in _GRIDS.items():
            sides = (int(side) for side in grid.removeprefix("grid-").split("x"))
            if any(side % getattr(own.positions, "merge", 1) for side in sides):
                continue
            # The square grid is every plan's real load; the others, and other dtypes, are for machines with a GPU.
            if plan == "full" or (grid == "grid-64x64" and dtype == "bfloat16"):
                yield Inputs(length=length, heads=24, positions=grid)


def upstream(plan: str) -> tuple[Inputs, ...]:
    """What accuracy-vjp asks besides: the layouts in which a gradient comes in."""
    return () if plan == "smoke" else _UPSTREAM


def judge_forward(candidate: Candidate, case: Case, seed: int) -> Finding:
    if case.variant == VARIANT:
        return judge_far(candidate, case, seed)
    given = build(case, seed)
    got = forward(candidate, given.x.view, given.call)
    return finding_of(given.held(got, seed=seed))


def judge_vjp(candidate: Candidate, case: Case, seed: int) -> Finding:
    if case.variant in WEIGHTS:
        return judge_weights(candidate, case, seed)
    given = build(case, seed)
    operands = (given.x.view, given.call, given.gradient.view)
    y = None
    if candidate.vjp is not None:
        got = vjp(candidate, *operands)
    else:
        y, got = differentiated(candidate, *operands)
    finding = finding_of(given.held(got, backward=True, seed=seed))
    if y is None or finding.verdict != PASS:
        return finding
    # A kernel may take another path where a gradient is wanted.
    forward_finding = finding_of(given.held(y, samples=0))
    if forward_finding.verdict == PASS:
        return finding
    return replace(forward_finding, reason=f"the forward under autograd: {forward_finding.reason}")


ACCURACY_FORWARD = Judgement(
    "accuracy-forward",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "accuracy-forward",
        candidate,
        device,
        dtype,
        [*inputs(candidate, dtype, plan), *far_inputs(candidate, device, dtype, plan)],
    ),
    judge_forward,
)
ACCURACY_VJP = Judgement(
    "accuracy-vjp",
    "vjp",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "accuracy-vjp", candidate, device, dtype, [*inputs(candidate, dtype, plan), *upstream(plan)]
    ),
    judge_vjp,
)
