"""Sensitivity: the dictionary's faults are seen, right readings are not, and the numbers say what was measured."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.suites.candidates import Candidate
from ropecheck.suites.cases import Case, Inputs
from ropecheck.suites.faults import alone, asking, sensitivity
from ropecheck.suites.faults.alone import Asking, asked_alone
from ropecheck.suites.faults.asking import SensitivityError, Task, carried_out, carry_out
from ropecheck.suites.faults.dictionary import FAULTS
from ropecheck.suites.faults.fault import Fault
from ropecheck.suites.faults.mechanical.compiling import COMPILING
from ropecheck.suites.faults.mechanical.rotations import adjacent
from ropecheck.suites.faults.mutants import mutant
from ropecheck.suites.faults.norms import FUSED
from ropecheck.suites.faults.pure import pure
from ropecheck.suites.faults.sensitivity import NEEDS_A_GPU, Record, Sensitivity, measure
from ropecheck.suites.faults.sighting import Sighting, sighting
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection, judge, questions

OF_EACH_FAMILY = (
    ("rotate", "qwen-image"),
    ("rotate_pair", "qwen-image"),
    ("rotate_qk", "mrope-interleaved"),
    ("norm_rotate_gate", "qwen3.5-norm-rope-gate"),
)
ROTATE = ("qwen-image", "rotate", "bfloat16")


def dictionary(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    """These faults are all that there are, in this process."""
    for module in (sensitivity, asking):
        monkeypatch.setattr(module, "FAULTS", {fault.name: fault for fault in faults})


@pytest.mark.parametrize(("family", "own"), OF_EACH_FAMILY)
def test_a_call_that_is_read_as_it_is_passes(family: str, own: str) -> None:
    """What mutants are made of is right, byte for byte, before anything is changed."""
    right = mutant("right", own, family, lambda reading: reading, "bfloat16", ("vjp", "any-shape", "strict"))
    verdicts = [judge(right, q, 0) for q in questions(right, Selection("smoke", devices=("cpu",)))]
    passed = {v.judgement for v in verdicts if v.verdict == "pass"}
    assert passed >= {"accuracy-forward", "accuracy-vjp", "strict-bytes"}
    assert [(v.case, v.reason) for v in verdicts if v.verdict not in ("pass", "not-applicable")] == []


def test_a_fault_is_seen_by_the_judgements_that_it_is_for() -> None:
    """One fault, measured: the judgements, the case in which each first sees it, and what that case took."""
    found = measure(["first-samples-table"], plan="smoke", workers=0)
    (record,) = found.records
    assert "per-sample-table" in record.killed_by["accuracy-forward"]
    seen = record.sightings["accuracy-forward"]
    assert (seen.case, seen.payload) == (record.killed_by["accuracy-forward"], "random")
    assert "table per-sample" in seen.needed
    assert (record.survives, record.only_by, found.coverage) == (False, "", 1.0)
    assert {"accuracy-forward", "purity", "laws"} <= found.asked
    assert "opcheck" not in found.asked
    assert record.as_json().keys() >= {"name", "kind", "killed_by", "sightings", "needed", "only_by", "equivalent"}


def test_a_fault_that_nothing_sees_lowers_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right candidate in the dictionary survives, and the coverage says so."""
    right = mutant("right", "qwen-image", "rotate", lambda reading: reading, "bfloat16", ())
    harmless = Fault("harmless", "semantic", "nothing is wrong", "rotate", "qwen-image", lambda: right)
    dictionary(monkeypatch, harmless, FAULTS["axes-swapped"])
    found = measure(plan="smoke", workers=0)
    assert [record.name for record in found.survivors] == ["harmless"]
    assert found.coverage == 0.5


def test_a_proof_of_equivalence_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is said to be none is not counted, but where its proof fails the judge has."""
    right = mutant("right", "qwen-image", "rotate", lambda reading: reading, "bfloat16", ())
    for wrong in ("", "it differs at 3"):
        listed = Fault(
            "listed", "semantic", "", "rotate", "qwen-image", lambda: right, equivalent="same bytes",
            check=lambda wrong=wrong: wrong,  # type: ignore[misc]
        )  # fmt: skip
        dictionary(monkeypatch, listed)
        if wrong:
            with pytest.raises(SensitivityError, match="it differs at 3"):
                measure(plan="smoke", workers=0)
        else:
            found = measure(plan="smoke", workers=0)
            assert (found.judged, found.coverage) == ([], 1.0)


def test_judgements_that_see_nothing_alone_are_told() -> None:
    """Of each judgement that was asked the faults that it sees, and those that no other does."""
    records = [
        Record("a", "semantic", "", "rotate", "neox", "bfloat16", killed_by={"purity": "p", "laws": "l"}),
        Record("b", "mechanical", "", "rotate", "neox", "bfloat16", killed_by={"purity": "p"}),
        Record("c", "mechanical", "", "rotate", "neox", "bfloat16", blocked="needs a CUDA GPU"),
    ]
    found = Sensitivity(records, frozenset({"codegen"}))
    assert found.by_judgement() == {"purity": (["a", "b"], ["b"]), "laws": (["a"], []), "codegen": ([], [])}
    assert (records[0].only_by, records[1].only_by) == ("", "purity")


def test_what_a_sighting_needed_is_told_by_the_nearest_case_that_was_passed() -> None:
    """Nothing in a judgement's first case; else what no passed case comes nearer to; of layouts, which one."""
    plain = Case("purity", "neox", "cpu", "bfloat16", Inputs())
    batch = replace(plain, inputs=Inputs(batch=2))
    packed = replace(plain, inputs=Inputs(batch=2, x_view="packed-qkv", payload="special"))
    assert sighting(packed, []) == Sighting(packed.id, "special", "x=packed-qkv")
    assert sighting(packed, [plain, batch]).needed == ("payload special", "x view packed-qkv")
    # The contract's own sizes are no other sizes for being named.
    assert sighting(replace(batch, inputs=Inputs(batch=2, head_dim=128)), [plain]).needed == ("batch 2",)
    padded = replace(plain, judgement="invariance-vjp", variant="padded-left/unequal")
    assert sighting(padded, []).layout == "padded-left"
    assert sighting(padded, [replace(padded, variant="packed/unequal")]).needed == ("layout padded-left/unequal",)


def test_the_least_that_a_judgement_needed_is_what_a_fault_needs() -> None:
    """One judgement that sees a fault in its first case is enough."""
    record = Record("a", "semantic", "", "rotate", "neox", "bfloat16")
    record.sightings = {"purity": Sighting("p", "random", "contiguous", ("batch 2", "length 5"))}
    assert record.needed == ("batch 2", "length 5")
    record.sightings["laws"] = Sighting("l", "random", "contiguous")
    assert record.needed == ()


@pytest.mark.parametrize("judgement", ["accuracy-forward", "repeatability"])
def test_what_is_remembered_between_faults_changes_no_verdict(judgement: str) -> None:
    """Many faults asked together, their calls remembered, are seen in the cases in which each is seen alone."""
    names = ("axes-swapped", "first-samples-table", "not-rotated", "gradient-zero")
    together = carry_out(Task(judgement, ROTATE, names), "standard", 0)
    for name in names:
        candidate = FAULTS[name].candidate()
        asked = questions(candidate, Selection("standard", judgements=(judgement,), devices=("cpu",)))
        first = next((q.id for q in asked if judge(candidate, q, 0).verdict == "fail"), None)
        assert (together.seen[name].case if name in together.seen else None) == first


def test_a_mutants_calls_are_remembered_by_their_bytes() -> None:
    """The same bytes give the same result in other memory; what autograd records, or is an argument, is not kept."""
    calls = []

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        calls.append(x)
        return x if float(cos.sum()) == 0 else adjacent(x, cos, sin)

    candidate = pure(Candidate("counting", "qwen-image", run, ("cpu",)))
    x, cos, sin = torch.ones(1, 2, 1, 4), torch.ones(2, 2), torch.ones(2, 2)
    first, second = candidate.run(x, cos, sin), candidate.run(x.clone(), cos, sin)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert len(calls) == 1
    candidate.run(x * 2, cos, sin)
    candidate.run(x.clone().requires_grad_(), cos, sin)
    assert len(calls) == 3
    zeros = torch.zeros(2, 2)
    assert all(candidate.run(x, zeros, sin) is x for _ in range(2))


def test_names_and_sentences_are_distinct() -> None:
    """Nobody can mistake one fault for another."""
    assert len({fault.says for fault in FAULTS.values()}) == len(FAULTS)


def test_a_fault_of_a_gpu_is_blocked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed with the reason and not counted; where there is a GPU, each is asked in a process of its own."""
    monkeypatch.setattr(sensitivity, "blocked_on", lambda device: "no CUDA GPU is available")
    found = measure(["raising-in-a-capture"], workers=0)
    assert [(r.blocked, r.survives) for r in found.records] == [(NEEDS_A_GPU, False)]
    assert found.judged == []
    monkeypatch.setattr(sensitivity, "blocked_on", lambda device: "")
    asked = []

    def each(names: list[str], device: str, *_: object) -> list[list[asking.Answer]]:
        asked.append((tuple(names), device))
        seen = asking.Answer("graph-replay", True, {names[0]: Sighting("c", "random", "contiguous")})
        return [[seen], [asking.Answer("device-guard", False, {}, {names[1]: "one"})]]

    monkeypatch.setattr(sensitivity, "asked_each", each)
    found = measure(["raising-in-a-capture", "current-device-assumed"], workers=0)
    assert asked == [(("raising-in-a-capture", "current-device-assumed"), "cuda")]
    assert [(r.only_by, r.blocked) for r in found.records] == [("graph-replay", ""), ("", "one")]


_MAKERS = """
import os
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.faults.mechanical.rotations import adjacent

def run(x, cos, sin):
    if x.shape[1] == 1:
        os._exit(7)
    return adjacent(x, cos, sin) * (2 if x.shape[:2] == (2, 7) else 1)

def ending():
    return Candidate("ending", "qwen-image", run, ("cpu",), ("bfloat16",))

def unmade():
    raise RuntimeError("there is none")
"""


@pytest.fixture
def makers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that another process can import: a candidate that ends its process for one token, and none at all."""
    (tmp_path / "makers_of_faults.py").write_text(_MAKERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("makers_of_faults")
    del sys.modules["makers_of_faults"]


def test_a_fault_that_ends_its_process_is_seen_where_it_does(makers: Any, tmp_path: Path) -> None:
    """The case that was asked is the one that fails; the judgements that are left are asked by another process."""
    said = tmp_path / "said"
    said.mkdir()
    judgements = ("strict-bytes", "repeatability", "accuracy-forward")
    answers = asked_alone(Asking("ends", makers.ending, "cpu", "smoke", 0, judgements), said)
    of = {answer.judgement: answer for answer in answers}
    assert "b2-s1-" in of["repeatability"].seen["ends"].case
    assert "b2-s7-" in of["accuracy-forward"].seen["ends"].case
    assert not of["strict-bytes"].asked


def test_a_fault_that_cannot_be_made_is_the_judges_failure(makers: Any, tmp_path: Path) -> None:
    """What the process said last is in the message."""
    said = tmp_path / "said"
    said.mkdir()
    with pytest.raises(SensitivityError, match="there is none"):
        asked_alone(Asking("none", makers.unmade, "cpu", "smoke", 0, ("purity",)), said)


def test_a_fault_of_the_dictionary_can_be_asked_alone(tmp_path: Path) -> None:
    """As the faults of a GPU are, by its name."""
    make = partial(alone._of_dictionary, "x-used-as-scratch")
    (answer,) = asked_alone(Asking("x-used-as-scratch", make, "cpu", "smoke", 0, ("purity",)), tmp_path)
    assert "x-used-as-scratch" in answer.seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.device == "cuda"])
def test_a_fault_of_a_gpu_is_seen(name: str) -> None:
    """By some judgement, in the standard plan; one that needs two GPUs is blocked where there is one."""
    (record,) = measure([name], workers=1).records
    assert not record.survives
    assert not record.blocked or torch.cuda.device_count() == 1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: nothing is compiled")
def test_codegen_alone_sees_what_is_wrong_in_machine_code_alone() -> None:
    """Interpreted, every byte of these kernels is right; compiled, each is wrong in its own way."""
    names = tuple(fault.name for fault in COMPILING if fault.contract == "neox")
    others = ("accuracy-forward", "purity", "strict-bytes")
    tasks = [Task(judgement, ("neox", "rotate", "bfloat16"), names) for judgement in ("codegen", *others)]
    answers = {answer.judgement: answer for answer in carried_out(tasks, "smoke", 1, 0)}
    assert set(answers["codegen"].seen) == set(names)
    for judgement in others:
        assert (answers[judgement].asked, answers[judgement].seen, answers[judgement].blocked) == (True, {}, {})


def test_the_dictionary_does_without_triton() -> None:
    """It imports where triton does not, and what needs triton is then blocked for that reason."""
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; sys.modules['triton'] = None\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'triton' else found(name, *more)\n"
        "from ropecheck.suites.faults.sensitivity import measure\n"
        "(record,) = measure(['registers-spilled'], plan='smoke', workers=0).records\n"
        "print(record.blocked)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "triton is not installed"


# Those that are quick to ask come first; any one that sees a fault will do.
ORDER = sorted(JUDGEMENTS, key=lambda name: (name.startswith("accuracy"), name.startswith("invariance"), name))
# The misreadings that a diagnosis knows are seen in its own tests, and what is compiled above.
COMPILED = {fault.name for fault in COMPILING}
OTHERS = [
    name for name, fault in FAULTS.items()
    if fault.kind == "mechanical" and fault.device == "cpu" and name not in COMPILED
]  # fmt: skip


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
