"""Diagnosis: every semantic fault is named first for its own mutant, others by their parameters, and strangers not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ropecheck.ci.cli import main
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.cases import Case, Inputs, build
from ropecheck.suites.faults import diagnosis
from ropecheck.suites.faults.diagnosis import Cause, Diagnoses, diagnose, diagnose_case
from ropecheck.suites.faults.dictionary import FAULTS, MISREADINGS
from ropecheck.suites.faults.mutants import mutant
from ropecheck.suites.faults.reading import Reading, divided, of_operands
from ropecheck.suites.judging import Selection, judge, questions

BY_NAME = {fault.name: fault for fault in MISREADINGS}
# Where a plain case cannot tell two faults apart, one that can.
SHOWN_IN = {"frequencies-rounded": "ramp-positions", "first-position-for-all": "s255-h2"}
DIAGNOSED = ("accuracy-forward", "accuracy-vjp", "strict-bytes")


def first_failure(candidate: Candidate, only: str = "") -> Case:
    """The first small case of the standard plan that ``candidate`` fails."""
    for question in questions(candidate, Selection("standard", judgements=DIAGNOSED, devices=("cpu",))):
        wanted = isinstance(question, Case) and only in question.id and "grid-64x64" not in question.id
        if wanted and judge(candidate, question, 0).verdict == "fail":
            return question  # type: ignore[return-value]
    raise AssertionError("no case fails")


@pytest.mark.parametrize("name", BY_NAME)
def test_each_fault_is_named_first_for_its_own_mutant(name: str) -> None:
    """Alone, with the dictionary's parameters, and for every element."""
    candidate = FAULTS[name].candidate()
    case = first_failure(candidate, SHOWN_IN.get(name, ""))
    found = diagnose_case(candidate, case, 0)
    assert found is not None
    assert found.names == (name,)
    assert found.sentence == f"behaves exactly like: {FAULTS[name].says}, 100 % of elements"


def misread_case(inputs: Inputs, own: str, family: str, dtype: str, *causes: Cause, backward: bool = False) -> str:
    """What is said of the bytes that follow from ``causes`` one after the other."""
    judgement = "accuracy-vjp" if backward else "accuracy-forward"
    given = build(Case(judgement, own, "cpu", dtype, inputs, "", family), 0)
    reading = of_operands(given, backward=backward)
    for cause in causes:
        reading = cause.fault.misread(reading, *cause.parameters)
    found = diagnose(given, given.family.undivided([given.family.lowered(y) for y in reading.outputs()]),
                     backward=backward)  # fmt: skip
    return "" if found is None else found.sentence


UNLISTED = (
    ("axis-moved", (1, -3), "qwen-image", "rotate", "bfloat16", "the height coordinate of every token is -3 off"),
    ("tables-scaled", (0.8732,), "qwen-image", "rotate", "bfloat16", "the tables are multiplied by 0.8732"),
    ("tables-scaled", (1.2079442,), "neox", "rotate", "float32", "the tables are multiplied by 1.2079442"),
    ("results-scaled", (1.25,), "qwen-image", "rotate", "float32", "multiplied by 1.25"),
    ("lanes-off-by-one", (17, 40, -1), "neox", "rotate", "float32", "lanes 17 to 40 read the column of the lane -1"),
    ("first-heads-only", (2,), "qwen-image", "rotate", "bfloat16", "heads from 2 on come out as they went in"),
    ("last-tokens-zeroed", (9,), "qwen-image", "rotate", "bfloat16", "tokens from 9 on are zero"),
    ("chunks-from-the-start", (5,), "neox", "rotate_qk", "bfloat16", "positions start again after every 5 tokens"),
    ("position-moved", (-57,), "neox", "rotate_qk", "bfloat16", "every token stands -57 from its position"),
    ("table-an-ulp-off", ("sine", -2), "qwen-image", "rotate", "float32", "the sine is -2 fp32 ulp off"),
    ("whole-blocks-only", (8,), "neox", "rotate", "bfloat16", "the last whole block of 8"),
    ("one-axis-for-all", (2,), "mrope-contiguous", "rotate_qk", "float16", "every lane uses the width row"),
    ("another-base", (5e5,), "qwen-image", "rotate", "bfloat16", "the base of the frequencies is 500000"),
    ("tables-scaled", (1.1221589,), "hf-llama", "rotate", "float32", "the tables are multiplied by 1.12215"),
    ("tables-scaled", (1.2772589,), "qwen-image", "rotate", "float32", "the tables are multiplied by 1.27725"),
    ("input-rounded", (torch.float16,), "neox", "rotate_qk", "float32", "x is rounded to fp16 before it is rotated"),
    ("last-lanes-not-rotated", (41,), "qwen-image", "rotate", "bfloat16", "lanes from 41 on come out"),
)


@pytest.mark.parametrize(("name", "parameters", "own", "family", "dtype", "says"), UNLISTED)
def test_parameters_that_the_dictionary_does_not_list_are_found(
    name: str, parameters: tuple[object, ...], own: str, family: str, dtype: str, says: str
) -> None:
    """The search reads them off the bytes."""
    options = "model-cache" if family == "rotate_qk" else ""
    positions = "ramp" if name == "position-moved" else "sample"
    inputs = Inputs(length=70 if name == "position-moved" else 13, options=options, positions=positions)
    cause = Cause(BY_NAME[name], parameters)
    said = misread_case(inputs, own, family, dtype, cause)
    assert said.startswith("behaves exactly like: ")
    assert says in said


COMPOSED = (
    (("axes-swapped", ((0, 2, 1),)), ("table-rounded", (torch.bfloat16,))),
    (("axis-zeroed", (1,)), ("truncated", ())),
    (("sine-negated", ()), ("first-heads-only", (2,))),
    (("axis-moved", (2, 1)), ("table-rounded", (torch.bfloat16,)), ("first-heads-only", (2,))),
    (("other-pairing", ()), ("table-rounded", (torch.float16,)), ("last-tokens-zeroed", (11,))),
)


@pytest.mark.parametrize("causes", COMPOSED, ids=lambda causes: "+".join(name for name, _ in causes))
def test_up_to_three_faults_at_once_are_found(causes: tuple[tuple[str, tuple[object, ...]], ...]) -> None:
    """Each is named, and together they explain every element."""
    given = tuple(Cause(BY_NAME[name], parameters) for name, parameters in causes)
    said = misread_case(Inputs(length=13), "qwen-image", "rotate", "bfloat16", *given)
    assert said.startswith("behaves exactly like: ")
    for cause in given:
        assert cause.fault.sentence("qwen-image", *cause.parameters) in said


def test_faults_of_heads_compose_with_faults_of_tables_and_of_heads() -> None:
    """Tables of each head are no longer those of the positions: whatever else is misread, the call stays one."""
    inputs = Inputs(options="model-cache")
    given = build(Case("accuracy-forward", "neox", "cpu", "bfloat16", inputs, "", "rotate_qk"), 0)
    of = [BY_NAME[name] for name in ("head-added-to-the-id", "head-added-to-the-position", "head-for-the-position")]
    for first in of:
        for second in MISREADINGS:
            reading = second.misread(first.misread(of_operands(given), *first.given), *second.given)
            assert [y.shape for y in reading.outputs()] == [part.x.shape for part in reading.parts], second.name


def test_nothing_is_said_of_what_nothing_explains() -> None:
    """Noise, and another operation altogether."""
    given = build(Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", Inputs()), 0)
    noise = torch.randn(given.x.view.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert diagnose(given, noise) is None
    assert diagnose(given, given.x.view.float().square().bfloat16()) is None


def test_nothing_is_said_of_right_bytes() -> None:
    """The contract's own need no explanation, in either direction."""
    given = build(Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", Inputs()), 0)
    assert diagnose(given, given.strict()) is None
    assert diagnose(given, given.strict(backward=True), backward=True) is None


def test_a_share_is_told_where_other_elements_are_right_by_themselves() -> None:
    """A fault of some tokens alone explains all that is wrong, and is not said to explain all."""
    given = build(Case("accuracy-forward", "neox", "cpu", "bfloat16", Inputs(length=13)), 0)
    got = given.strict().clone()
    reading = of_operands(given)
    wrong = BY_NAME["members-exchanged"].misread(reading).outputs()[0]
    got[:, 3:5] = wrong[:, 3:5]
    found = diagnose(given, got)
    assert found is not None
    assert found.sentence.startswith("behaves like: ")
    assert "100 %" not in found.sentence


@pytest.mark.parametrize(
    ("own", "family", "inputs"),
    [
        ("qwen-image", "rotate", Inputs(batch=2, table="per-sample")),
        ("hf-llama", "rotate", Inputs(length=1)),
        ("hf-vision-2d", "rotate", Inputs(length=0)),
        ("qwen-image", "rotate_pair", Inputs(head_dim=80, rotary_dim=48)),
        ("mrope-ernie", "rotate_qk", Inputs(batch=2, payload="special")),
        ("neox", "rotate_qk", Inputs(heads=0)),
        ("qwen3.5-norm-rope-gate", "norm_rotate_gate", Inputs(length=3)),
        ("qwen3.5-norm-rope-gate", "norm_rotate_gate", Inputs(length=6, options="slots+out-of-range+no-gate")),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_no_fault_is_confused_by_a_call_that_it_does_not_fit(
    own: str, family: str, inputs: Inputs, backward: bool
) -> None:
    """Whatever the family, every misreading of a call has outputs like the call's own; unchanged, they explain it."""
    given = build(Case("accuracy-forward", own, "cpu", "bfloat16", inputs, "", family), 0)
    reading = of_operands(given, backward=backward)
    got = divided(given, given.strict(backward=backward))
    assert all(bool(may.all()) for may in reading.explains(got))
    for fault in MISREADINGS:
        for parameters in (fault.given, *list(fault.searched(reading, got))[:2]):
            changed: Reading = fault.misread(reading, *parameters)
            assert [y.shape for y in changed.outputs()] == [y.shape for y in got], fault.name


def test_a_vain_search_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two cases without an explanation a cell is searched no more; one that was found is tried first."""
    asked: list[tuple[tuple[Cause, ...], bool]] = []

    def none(candidate: Candidate, case: Case, seed: int, *, known: tuple[Cause, ...], search: bool) -> None:
        asked.append((known, search))

    monkeypatch.setattr("ropecheck.suites.faults.diagnosis.diagnose_case", none)
    candidate = FAULTS["axes-swapped"].candidate()
    case = Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", Inputs())
    verdict = judge(candidate, case, 0)
    diagnoses = Diagnoses()
    for _ in range(4):
        assert diagnoses.explained(candidate, case, verdict) is verdict
    assert [search for _, search in asked] == [True, True, False, False]


WRONG = """
import torch
from ropecheck.suites import Candidate

def run(x, cos, sin):
    height, width = slice(8, 36), slice(36, 64)
    cos, sin = (torch.cat((t[..., :8], t[..., width], t[..., height]), -1).unsqueeze(-2) for t in (cos, sin))
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)

CANDIDATES = [Candidate("swapped", "qwen-image", run, devices=("cpu",), dtypes=("bfloat16",))]
"""


def test_the_diagnosis_is_in_the_terminal_and_in_the_verdicts(
    tmp_path: object, capsys: pytest.CaptureFixture[str], verdicts_of_a_run: Callable[..., list[object]]
) -> None:
    """A stranger's kernel that swaps height and width is told so, by verify's session and by explain."""
    verdicts = verdicts_of_a_run(WRONG, "--plan", "smoke", "--judgement", "accuracy-forward", "-n", "0")
    said = [v.facts.get("diagnosis") for v in verdicts if v.verdict == "fail"]  # type: ignore[attr-defined]
    assert said[0] == (
        "behaves exactly like: the axes are read in the order frame, width, height, 100 % of elements"
    )
    file = f"{tmp_path}/candidates_under_test.py"
    case = next(v.case for v in verdicts if v.verdict == "fail")  # type: ignore[attr-defined]
    assert main(["explain", f"{case}@swapped", "--candidate", file]) == 1
    assert "the axes are read in the order frame, width, height" in capsys.readouterr().out


def test_a_right_mutant_explains_itself() -> None:
    """The check of the checks: what mutants are made of has no diagnosis, because nothing fails."""
    right = mutant("right", "neox", "rotate_qk", lambda reading: reading, "bfloat16")
    with pytest.raises(AssertionError, match="no case fails"):
        first_failure(right, "b1-s7-h3-d128-r128/random")




def test_nan_alone_is_not_composed() -> None:
    """Whatever goes astray gives NaN: faults that give it would together explain whatever is NaN."""
    inputs = Inputs(length=13, options="model-cache")
    given = build(Case("accuracy-forward", "neox", "cpu", "bfloat16", inputs, "", "rotate_qk"), 0)
    got = given.expected().strict().clone()
    got[:, ::2] = float("nan")
    assert diagnose(given, got) is None


def test_a_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a case is its candidate's."""
    given = build(Case("accuracy-forward", "neox", "cpu", "bfloat16", Inputs(length=13), "", "rotate"), 0)
    assert diagnose(given, given.x.view.clone()) is not None
    monkeypatch.setattr(diagnosis, "_SECONDS", 0.0)
    assert diagnose(given, given.x.view.clone()) is None
