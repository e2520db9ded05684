"""Cases: what the plans hold, how a case is named, and what its numbers depend on."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.adapters import diffusers, shipped, transformers
from ropecheck.suites.candidates import CLAIMS, DTYPES, Candidate
from ropecheck.suites.cases import PLANS, POSITIONS, Case, Inputs, build, has_grids, positions_of
from ropecheck.suites.families import FAMILIES, Rotate
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection, check_selection, questions


def stranger(name: str, contract: str, *claims: str, **keywords: object) -> Candidate:
    return Candidate(name, contract, lambda x, cos, sin: x, ("cpu",), provides=claims, **keywords)  # type: ignore[arg-type]


ROTATIONS = tuple(name for name, own in CONTRACTS.items() if Rotate.takes(own))


def claims_of(family: str) -> tuple[str, ...]:
    return tuple(claim for claim in CLAIMS if claim not in FAMILIES[family].unclaimable)


CANDIDATES = (
    *(
        # As if every one of them ran on a CPU.
        replace(c, unavailable="", devices=("cpu",))
        for c in (*shipped.CANDIDATES, *diffusers.CANDIDATES, *transformers.CANDIDATES)
    ),
    *(stranger(f"{contract}-{claim}", contract, claim) for contract in ROTATIONS for claim in claims_of("rotate")),
    *(stranger(f"{contract}-nothing", contract) for contract in ROTATIONS),
    *(stranger(f"{contract}-everything", contract, *claims_of("rotate")) for contract in ROTATIONS),
    stranger("in-place", "qwen-image", "vjp", in_place=True, vjp=lambda gradient, cos, sin: gradient),
    *(
        stranger(f"{contract}-rotate_qk-{'-'.join(claims) or 'nothing'}", contract, *claims, family="rotate_qk")
        for contract in ("neox", "mrope-interleaved")
        for claims in ((), ("vjp",), ("strided", "vjp"), claims_of("rotate_qk"))
    ),
)


TRACED = ("opcheck", "fullgraph", "export", "autocast", "table-gradient", "codegen")
"""On a CPU these cost a tracing or a compilation each, and the dtype changes little of what they see."""


def cases(candidate: Candidate, plan: str) -> list[Case]:
    asked = questions(candidate, Selection(plan, devices=("cpu",)))
    return [q for q in asked if isinstance(q, Case)]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_standard_asks_every_claim_in_eight_cases_or_more(candidate: Candidate) -> None:
    """Each judgement that a candidate's claims call for has eight cases in each of its dtypes, or one if it traces."""
    counts = Counter((case.judgement, case.dtype) for case in cases(candidate, "standard"))
    here = [j for j in JUDGEMENTS.values() if "cpu" not in j.not_on and candidate.family not in j.not_of]
    asked = [j.name for j in here if j.claim is None or j.claim in candidate.provides]
    assert set(counts) == {(judgement, dtype) for judgement in asked for dtype in candidate.dtypes}
    # Where the backward is separate there is no graph of autograd's to ask about.
    one_is_enough = (*TRACED, "autograd") if candidate.vjp is not None else TRACED
    few = {name: n for (name, dtype), n in counts.items() if n < (1 if name in one_is_enough else 8)}
    assert not few


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_every_plan_asks_every_claim(candidate: Candidate) -> None:
    """Smoke leaves no judgement out, and every plan asks all that the smaller one asks of accuracy and strictness."""
    found = {plan: cases(candidate, plan) for plan in PLANS}
    per_plan = {plan: {(c.judgement, c.dtype) for c in held} for plan, held in found.items()}
    assert per_plan["smoke"] == per_plan["standard"] == per_plan["full"]
    assert len(found["smoke"]) < len(found["standard"]) < len(found["full"])
    assert {c.id for c in found["standard"]} - {c.id for c in found["full"]} == changed_calls(found["standard"])


def changed_calls(held: list[Case]) -> set[str]:
    """The repeatability cases of few calls: the full plan makes more calls, which is another case."""
    return {c.id for c in held if "calls=10" in c.id.split("/") and "calls=100" not in c.id}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_case_ids_are_unique(candidate: Candidate, plan: str) -> None:
    """Within a candidate an id names one case, and begins with judgement, device and dtype."""
    held = cases(candidate, plan)
    repeated = [name for name, n in Counter(c.id for c in held).items() if n > 1]
    assert repeated == []
    assert all(c.id.split("/")[:3] == [c.judgement, c.device, c.dtype] for c in held)


@pytest.mark.parametrize("name", ROTATIONS)
def test_every_planned_position_can_be_made(name: str) -> None:
    """No case of any plan asks for a grid that the contract's model cannot have."""
    held = {c.inputs for c in cases(stranger("all", name, *claims_of("rotate")), "full") if c.inputs.table != "logical"}
    for given in held:
        assert positions_of(CONTRACTS[name], given).shape[-2] == given.length


def test_unclaimed_judgements_are_not_applicable_with_the_reason() -> None:
    """Each judgement has a case or one cell without a case, never nothing."""
    asked = list(questions(stranger("plain", "qwen-image"), Selection("smoke")))
    unasked = {q.judgement: (q.verdict, q.reason) for q in asked if not isinstance(q, Case)}
    expected = {j.name: j.claim for j in JUDGEMENTS.values() if j.claim is not None}
    assert unasked == {n: ("not-applicable", f"the candidate does not claim {claim}") for n, claim in expected.items()}
    assert {q.judgement for q in asked} == set(JUDGEMENTS)


def test_an_unavailable_candidate_is_blocked() -> None:
    """What cannot run on this machine is blocked with its own reason, and has no case."""
    asked = list(questions(stranger("absent", "neox", unavailable="the library is missing"), Selection("smoke")))
    assert not [q for q in asked if isinstance(q, Case)]
    assert {q.reason for q in asked if q.verdict == "blocked"} == {"the library is missing"}  # type: ignore[union-attr]


BASE = Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", Inputs())


def numbers(case: Case, seed: int) -> list[float]:
    return torch.rand(4, generator=case.generator(seed)).tolist()


def test_numbers_do_not_depend_on_judgement_device_or_variant() -> None:
    """The same inputs are the same numbers wherever and whatever for they are asked."""
    for other in (replace(BASE, judgement="purity"), replace(BASE, device="cuda"), replace(BASE, variant="vjp")):
        assert numbers(other, 0) == numbers(BASE, 0)


def test_numbers_depend_on_seed_contract_dtype_and_inputs() -> None:
    """Every one of these changes them."""
    others = [numbers(replace(BASE, contract_name="neox"), 0), numbers(replace(BASE, dtype="float16"), 0)]
    others += [numbers(replace(BASE, inputs=given), 0) for given in changed_inputs()]
    others += [numbers(BASE, 1), numbers(BASE, 0)]
    assert len({tuple(n) for n in others}) == len(others)


def changed_inputs() -> list[Inputs]:
    """One change of every dimension of the inputs."""
    changes: dict[str, object] = {
        "batch": 2, "length": 8, "heads": 4, "head_dim": 80, "rotary_dim": 48, "payload": "special",
        "positions": "ramp", "table": "per-sample", "x_view": "packed-qkv", "table_view": "misaligned",
        "sin_view": "contiguous", "gradient_view": "heads-first", "k_view": "heads-first",
        "k_gradient_view": "heads-first", "scaled": True, "conjugate": True,
        "k_heads": 1, "options": "int32-positions",
    }  # fmt: skip
    assert list(changes) == [f.name for f in fields(Inputs)]
    return [replace(Inputs(), **{name: value}) for name, value in changes.items()]  # type: ignore[arg-type]


def test_every_dimension_shows_in_the_id() -> None:
    """No two inputs share an id; the contract's own dimensions are written out."""
    ids = [replace(BASE, inputs=given).id for given in (Inputs(), *changed_inputs())]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "accuracy-forward/cpu/bfloat16/b1-s7-h3-d128-r128/random/shared-table/sample-positions"
    assert replace(BASE, variant="vjp").id == ids[0] + "/vjp"


def test_needs() -> None:
    """Strides, the conjugate, and sizes that the model has not each need their claim; the rest needs none."""
    needed = {replace(BASE, inputs=g).id: replace(BASE, inputs=g).needs() for g in (Inputs(), *changed_inputs())}
    by_change = dict(zip(["nothing", *[f.name for f in fields(Inputs)]], needed.values(), strict=True))
    claims = {"head_dim": "any-shape", "rotary_dim": "any-shape", "x_view": "strided", "table_view": "strided"}
    # An upstream gradient comes as its consumer makes it: no claim is needed.
    claims |= {"conjugate": "conjugate", "k_view": "strided"}
    assert by_change == {name: {claims[name]} if name in claims else set() for name in by_change}
    for unusual in (Inputs(batch=0), Inputs(length=0), Inputs(heads=0), Inputs(heads=129)):
        assert replace(BASE, inputs=unusual).needs() == {"any-shape"}
    assert replace(BASE, inputs=Inputs(k_view="behind-a-gap")).needs() == {"strided"}
    assert replace(BASE, inputs=Inputs(table_view="end-of-allocation")).needs() == set()


@pytest.mark.parametrize(
    "given", [Inputs(x_view="all-stride-0"), Inputs(gradient_view="all-stride-0")], ids=["x", "gradient"]
)
def test_overlapping_memory_is_no_case_for_writing_in_place(given: Inputs) -> None:
    """A view whose elements share memory cannot be written into, be it x or the gradient."""
    writer = stranger("w", "qwen-image", "strided", "vjp", in_place=True, vjp=lambda gradient, cos, sin: gradient)
    overlapping = replace(BASE, inputs=given)
    assert not overlapping.suits(writer)
    assert overlapping.suits(replace(writer, in_place=False))


PLACED = [(n, p) for n, own in CONTRACTS.items() for p in POSITIONS if has_grids(own) or not p.startswith("grid")]


@pytest.mark.parametrize(("name", "positions"), PLACED)
def test_positions(name: str, positions: str) -> None:
    """One coordinate for each axis and token; samples of a per-sample table lie three positions apart."""
    own = CONTRACTS[name]
    height, width = (int(n) for n in positions[5:].split("x")) if positions.startswith("grid") else (1, 9)
    if positions == "grid-83x83" and name == "hf-vision-2d":
        with pytest.raises(ValueError, match="multiples of merge"):
            positions_of(own, Inputs(length=height * width, positions=positions))
        return
    given = Inputs(batch=2, length=height * width, positions=positions)
    shared, apart = positions_of(own, given), positions_of(own, replace(given, table="per-sample"))
    assert shared.shape == (given.length, len(own.positions.axes))
    assert shared.dtype == torch.int64
    assert torch.equal(apart, torch.stack((shared, shared + 3)))


def test_far_positions_reach_both_ends_of_the_vendors_table() -> None:
    """Far tokens alternate between the highest and the lowest rows that Qwen-Image's table has."""
    own, given = CONTRACTS["qwen-image"], Inputs(batch=2, length=19, positions="far", table="per-sample")
    found = positions_of(own, given)
    assert int(found.max()) >= 4096 - 16
    assert int(found.min()) <= -4096 + 16
    cos, _ = own.tables(found, torch.float32)
    assert cos.shape == (2, 19, 64)


def test_unknown_dimensions_are_refused() -> None:
    """A position rule or table that does not exist gets one sentence naming the argument."""
    with pytest.raises(ValueError, match="positions must be one of sample, ramp"):
        positions_of(CONTRACTS["neox"], Inputs(positions="nowhere"))
    with pytest.raises(ValueError, match="table must be 'shared', 'per-sample' or 'first-two-alike'"):
        positions_of(CONTRACTS["neox"], Inputs(table="per-head"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_lie_as_the_case_says(dtype: str) -> None:
    """x, tables and gradient have the case's dtype and views; vendors' narrow tables are narrow."""
    given = Inputs(
        batch=2, table="per-sample", x_view="packed-qkv", table_view="sliced-rows", gradient_view="heads-first"
    )
    made = build(replace(BASE, dtype=dtype, inputs=given), seed=3)
    assert made.x.view.dtype == made.gradient.view.dtype == DTYPES[dtype]
    assert made.cos.view.dtype == made.sin.view.dtype == torch.float32
    assert made.cos.view.shape == (2, 7, 64)
    assert not any(placed.view.is_contiguous() for placed in (made.x, made.cos, made.sin, made.gradient))
    assert not torch.equal(made.x.view, made.gradient.view)
    llama = build(replace(BASE, contract_name="hf-llama", dtype=dtype, inputs=Inputs()), seed=3)
    assert llama.cos.view.dtype == DTYPES[dtype]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(contracts=("qwen",)), "--contract must be one of qwen-image, .*, not 'qwen'"),
        (Selection(judgements=("speed",)), "--judgement must be one of accuracy-forward, .*, not 'speed'"),
        (Selection(devices=("tpu",)), "--device must be one of cpu, cuda, not 'tpu'"),
        (Selection(dtypes=("int8",)), "--dtype must be one of bfloat16, float16, float32, not 'int8'"),
    ],
    ids=["contract", "judgement", "device", "dtype"],
)
def test_a_selection_that_nothing_can_meet_is_refused(selection: Selection, message: str) -> None:
    """One sentence names the option and the known values."""
    with pytest.raises(ValueError, match=message) as caught:
        check_selection(selection)
    assert "\n" not in str(caught.value)


def test_scaled_tables_hold_more_than_one_and_subnormal_numbers() -> None:
    """Whoever clamps a table to what a cosine can be, or takes its subnormal numbers for zero, returns another y."""
    given = build(Case("accuracy-forward", "hf-llama", "cpu", "float16", Inputs(scaled=True)), 0)
    size = given.cos.view.abs()
    assert bool((size > 1).any())
    assert bool(((size > 0) & (size < torch.finfo(torch.float16).smallest_normal)).any())


def test_the_first_two_samples_alike() -> None:
    """The third sample of such a table is at other positions than the first two."""
    positions = positions_of(CONTRACTS["neox"], Inputs(batch=3, length=5, table="first-two-alike"))
    assert torch.equal(positions[0], positions[1])
    assert not torch.equal(positions[0], positions[2])
