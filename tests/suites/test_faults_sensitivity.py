"""Sensitivity: the dictionary's faults are seen, right readings are not, and the numbers say what was measured."""

from __future__ import annotations

import json

import pytest

from ropecheck.ci.cli import main
from ropecheck.suites.faults import sensitivity
from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.fault import Fault
from ropecheck.suites.faults.mutants import mutant
from ropecheck.suites.faults.norms import FUSED
from ropecheck.suites.faults.sensitivity import Record, Sensitivity, SensitivityError, Task, carry_out, measure
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection, judge, questions

OF_EACH_FAMILY = (
    ("rotate", "qwen-image"),
    ("rotate_pair", "qwen-image"),
    ("rotate_qk", "mrope-interleaved"),
    ("norm_rotate_gate", "qwen3.5-norm-rope-gate"),
)


@pytest.mark.parametrize(("family", "own"), OF_EACH_FAMILY)
def test_a_call_that_is_read_as_it_is_passes(family: str, own: str) -> None:
    """What mutants are made of is right, byte for byte, before anything is changed."""
    right = mutant("right", own, family, lambda reading: reading, "bfloat16", ("vjp", "any-shape", "strict"))
    verdicts = [judge(right, q, 0) for q in questions(right, Selection("smoke", devices=("cpu",)))]
    passed = {v.judgement for v in verdicts if v.verdict == "pass"}
    assert passed >= {"accuracy-forward", "accuracy-vjp", "strict-bytes"}
    assert [(v.case, v.reason) for v in verdicts if v.verdict not in ("pass", "not-applicable")] == []


def test_a_fault_is_seen_by_the_judgements_that_it_is_for() -> None:
    """One fault, measured: the judgements, the case in which each first sees it, and that none alone does."""
    found = measure(["first-samples-table"], plan="smoke", workers=1)
    (record,) = found.records
    assert "accuracy-forward" in record.killed_by
    assert "per-sample-table" in record.killed_by["accuracy-forward"]
    assert (record.survives, found.coverage) == (False, 1.0)
    assert record.as_json().keys() >= {"name", "kind", "killed_by", "only_by", "equivalent"}


def test_a_fault_that_nothing_sees_lowers_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right candidate in the dictionary survives, the coverage says so, and the exit status is 1."""
    right = mutant("right", "qwen-image", "rotate", lambda reading: reading, "bfloat16", ())
    harmless = Fault("harmless", "semantic", "nothing is wrong", "rotate", "qwen-image", lambda: right)
    monkeypatch.setattr(sensitivity, "FAULTS", {"harmless": harmless, "axes-swapped": FAULTS["axes-swapped"]})
    found = measure(plan="smoke", workers=1)
    assert [record.survives for record in found.records] == [True, False]
    assert found.coverage == 0.5
    assert main(["sensitivity", "--plan", "smoke", "-n", "1"]) == 1


def test_a_proof_of_equivalence_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is said to be none is not counted, but where its proof fails the judge has."""
    right = mutant("right", "qwen-image", "rotate", lambda reading: reading, "bfloat16", ())
    for wrong in ("", "it differs at 3"):
        listed = Fault(
            "listed", "semantic", "", "rotate", "qwen-image", lambda: right, equivalent="same bytes",
            check=lambda wrong=wrong: wrong,  # type: ignore[misc]
        )  # fmt: skip
        monkeypatch.setattr(sensitivity, "FAULTS", {"listed": listed})
        if wrong:
            with pytest.raises(SensitivityError, match="it differs at 3"):
                measure(plan="smoke", workers=1)
        else:
            found = measure(plan="smoke", workers=1)
            assert (found.judged, found.coverage) == ([], 1.0)


def test_judgements_that_see_nothing_alone_are_told() -> None:
    """Of each judgement the faults that it sees, and those that no other does."""
    records = [
        Record("a", "semantic", "", "rotate", "neox", "bfloat16", killed_by={"purity": "p", "laws": "l"}),
        Record("b", "mechanical", "", "rotate", "neox", "bfloat16", killed_by={"purity": "p"}),
        Record("c", "mechanical", "", "rotate", "neox", "bfloat16", blocked="needs a CUDA GPU"),
    ]
    found = Sensitivity(records)
    assert found.by_judgement() == {"purity": (["a", "b"], ["b"]), "laws": (["a"], [])}
    assert (records[0].only_by, records[1].only_by) == ("", "purity")


def test_what_is_remembered_between_faults_changes_no_verdict() -> None:
    """Many faults asked together are seen in the cases in which each is seen alone."""
    names = ("axes-swapped", "first-samples-table", "axis-zeroed")
    group = ("qwen-image", "rotate", "bfloat16")
    together = carry_out(Task("accuracy-forward", group, names), "standard", 0)
    for name in names:
        candidate = FAULTS[name].candidate()
        asked = questions(candidate, Selection("standard", judgements=("accuracy-forward",), devices=("cpu",)))
        first = next(q.id for q in asked if judge(candidate, q, 0).verdict == "fail")
        assert together[name] == first


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has one record for each fault; an unknown name is one sentence and status 2."""
    assert main(["sensitivity", "--json", "--plan", "smoke", "-n", "1", "--fault", "axes-swapped"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["kind"]) for r in said["faults"]] == [("axes-swapped", "semantic")]
    assert said["coverage"] == 1.0
    assert main(["sensitivity", "--fault", "nosuch"]) == 2
    assert "--fault must be one of" in capsys.readouterr().err


def test_names_and_sentences_are_distinct() -> None:
    """Nobody can mistake one fault for another."""
    assert len({fault.says for fault in FAULTS.values()}) == len(FAULTS)


# Those that are quick to ask come first; any one that sees a fault will do.
ORDER = sorted(JUDGEMENTS, key=lambda name: (name.startswith("accuracy"), name.startswith("invariance"), name))
# The misreadings that a diagnosis knows are seen in its own tests.
OTHERS = [name for name, fault in FAULTS.items() if fault.kind == "mechanical" and fault.device == "cpu"]


@pytest.mark.parametrize("name", [*OTHERS, *(fault.name for fault in FUSED)])
def test_every_other_fault_is_seen(name: str) -> None:
    """By some judgement, in the standard plan, and not because the judge fails."""
    candidate = FAULTS[name].candidate()
    for judgement in ORDER:
        for question in questions(candidate, Selection("standard", judgements=(judgement,), devices=("cpu",))):
            if "grid-64x64" in question.id:
                continue
            verdict = judge(candidate, question, 0)
            assert "judge failed" not in verdict.facts, verdict.reason
            if verdict.verdict == "fail":
                return
    raise AssertionError("no judgement sees it")
