"""The shipped policy ``gpu``, what it needs of a machine, and how a run under a policy begins and ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ropecheck.ci import environment, preflight
from ropecheck.ci.evidence import load
from ropecheck.ci.policy import Policy, RequiredCell, Requirement, load_policy, required_cells
from ropecheck.ci.preflight import lacking
from ropecheck.ci.verify import Run, without_idle
from ropecheck.suites.adapters.shipped import CANDIDATES
from ropecheck.suites.families import FAMILIES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import Verdict

Command = Callable[..., "tuple[int, str, str]"]

QUICK = ("--plan", "smoke", "--dtype", "float32", "-n", "1")


def test_gpu_names_every_judgement() -> None:
    """One that is registered and required of nobody would be asked and gate nothing."""
    named = {judgement for r in load_policy("gpu").requirements for judgement in r.judgements}
    assert named == set(JUDGEMENTS)


def test_gpu_names_every_candidate_of_ours_on_cuda() -> None:
    """By its full name, so that one that is gone is missing; and on cuda alone."""
    policy = load_policy("gpu")
    named = {candidate for r in policy.requirements for candidate in r.candidates}
    assert named == {c.name for c in CANDIDATES if "cuda" in c.devices}
    assert policy.devices == ["cuda"]


def test_gpu_requires_what_is_claimed_and_has_cases() -> None:
    """What a candidate does not claim would be not-applicable, and what has no case missing: red for ever."""
    policy, candidates = load_policy("gpu"), {c.name: c for c in CANDIDATES}
    required = [(candidates[n], JUDGEMENTS[j]) for r in policy.requirements for n in r.candidates for j in r.judgements]
    assert len(required) == len({(c.name, j.name) for c, j in required})
    assert [(c.name, j.name) for c, j in required if j.claim not in (None, *c.provides)] == []
    empty = [
        (candidate.name, judgement.name)
        for candidate, judgement in required
        for dtype in candidate.dtypes
        if not any(True for _ in judgement.cases(candidate, "cuda", dtype, policy.plan))
    ]
    assert empty == []


def test_gpu_requires_every_dtype_and_the_claims_that_widen_cases() -> None:
    """Every candidate in three dtypes; of all the claims that widen cases and that its family has room for."""
    policy = load_policy("gpu")
    assert [r for r in policy.requirements if set(r.dtypes) != {"bfloat16", "float16", "float32"}] == []
    claims = {name: set(r.claims) for r in policy.requirements if r.claims for name in r.candidates}
    ours = [c for c in CANDIDATES if "cuda" in c.devices]
    widening = {"strided", "any-shape", "any-dtype", "any-position", "conjugate"}
    assert claims == {c.name: widening - set(FAMILIES[c.family].unclaimable) for c in ours}
    assert [c.name for c in ours if not claims[c.name] <= set(c.provides)] == []


def test_gpu_requires_whatever_is_asked() -> None:
    """Each candidate of ours must pass all that it is asked on cuda and that can be answered: autograd has no part in
    a vjp of its own, and torch operations have no kernel of the candidate's to read."""
    policy = load_policy("gpu")
    required = {(n, j) for r in policy.requirements for n in r.candidates for j in r.judgements}
    forgotten = [
        (candidate.name, judgement.name)
        for candidate in CANDIDATES
        for judgement in JUDGEMENTS.values()
        if judgement.claim in (None, *candidate.provides) and (candidate.name, judgement.name) not in required
        if candidate.vjp is None or judgement.name not in ("autograd", "higher-vjp", "table-gradient")
        if candidate.kernels or judgement.name != "codegen"
        if candidate.family not in judgement.not_of
        if any(True for _ in judgement.cases(candidate, "cuda", "bfloat16", policy.plan))
    ]
    assert forgotten == []


def test_gpu_needs_everything_and_lets_device_guard_alone_be_blocked() -> None:
    """And that on one GPU only."""
    policy = load_policy("gpu")
    assert (policy.needs, policy.plan) == (("gpu", "triton", "native"), "standard")
    requirement = policy.requirements[0]
    blocked = [Verdict(requirement.candidates[0], "neox", j, "cuda", "", j, "blocked", "why") for j in JUDGEMENTS]
    inventory = [{"name": c.name, "provides": c.provides} for c in CANDIDATES]
    for gpus, expected in ((1, {"device-guard"}), (2, set())):
        cells = required_cells(policy, blocked, gpus, inventory)
        assert {c.cell.split(" x ")[1] for c in cells if c.state == "permitted"} == expected


@pytest.mark.parametrize(
    ("cuda", "hip", "available", "says"),
    [
        (None, None, False, "built without CUDA"),
        (None, "7.0", True, "built for ROCm"),
        ("13.0", None, False, "nvidia-smi"),
        ("13.0", None, True, ""),
    ],
)
def test_what_a_missing_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None, available: bool, says: str
) -> None:
    """A CPU build, a ROCm build and a hidden GPU each get their own advice."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    sentences = lacking(["gpu"])
    assert bool(sentences) == bool(says)
    assert all(s.startswith("an NVIDIA GPU") and says in s for s in sentences)


def test_what_else_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, the native library and a package without which nothing runs: each is named with what to do."""
    real = preflight.importlib.util.find_spec
    gone = ("triton", "xdist")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda n: None if n in gone else real(n))
    monkeypatch.setattr(preflight, "native_library", lambda: {"failure": "OSError: bad ELF"})
    package, triton, native = lacking(["triton", "native"])
    assert "pip install pytest-xdist" in package
    assert "pip install 'ropecheck[triton]'" in triton
    assert "OSError: bad ELF" in native
    assert "ROPECHECK_CUDA=require pip install ." in native


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU and no native library."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "native_library", lambda: {"failure": "FileNotFoundError: no library"})


@pytest.mark.usefixtures("bare_machine")
def test_a_machine_that_lacks_something_is_refused(command: Command, tmp_path: Path) -> None:
    """Exit status 3, a sentence for each missing thing, and nothing written or run."""
    status, out, err = command("verify", "--policy", "gpu", "--out", "report")
    assert status == 3
    lines = err.strip().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "ropecheck: policy gpu needs an NVIDIA GPU",
        "ropecheck: policy gpu needs the native library",
    ]
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "gpuu"), "--policy must be FILE.toml or one of"),
        (("--policy", "gpu", "--plan", "smoke"), "--plan smoke asks less than standard"),
        (("--policy", "gpu", "--dtype", "float32"), "--dtype leaves out cases"),
        (("--policy", "gpu", "--contract", "neox"), "--contract leaves out cases"),
        (("--policy", "missing.toml"), "--policy missing.toml cannot be read"),
        (("--policy", "right.py"), "--policy must be FILE.toml"),
    ],
)
def test_a_policy_that_cannot_be_applied_exits_2(
    command: Command, candidates: Path, arguments: tuple[str, ...], says: str
) -> None:
    """One sentence that names the option; said before the machine is looked at."""
    status, _, err = command("verify", *arguments)
    assert status == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_blocked_cell_that_is_permitted_turns_nothing(
    command: Command, candidates: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 0, listed with the reason, in the evidence as well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (candidates / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cpu", "cuda")'))
    required = '[[require]]\ncandidates = ["mine/*"]\njudgements = ["purity"]\ndevices = ["cpu", "cuda"]\n'
    permission = required.replace("require", "may_block").replace('"cpu", ', "") + 'reason = "poor"\n'
    (candidates / "lenient.toml").write_text(required + permission)
    asked = ("verify", "mine.py", *QUICK, "--judgement", "purity")
    status, out, err = command(*asked, "--policy", "lenient.toml", "--out", "report")
    assert status == 0, out + err
    assert "allowed to be blocked mine/right x purity x cuda" in out
    assert "2 cells required, 1 passed, 1 allowed to be blocked, 0 not met" in out
    said = load(candidates / "report")["run"]["policy"]
    assert [(c["state"], "allowed: poor" in c["reason"]) for c in said["others"]] == [("permitted", True)]


def test_a_required_cell_that_is_blocked_is_named(
    command: Command, candidates: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without permission the exit status is 3, and only the device that the policy names was asked about."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (candidates / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cpu", "cuda")'))
    required = '[[require]]\ncandidates = ["mine/*"]\njudgements = ["purity"]\ndevices = ["cuda"]\n'
    (candidates / "strict.toml").write_text(required)
    status, out, _ = command("verify", "mine.py", *QUICK, "--policy", "strict.toml", "--out", "report")
    assert status == 3
    assert "required mine/right x purity x cuda: blocked: 1 blocked: no CUDA GPU" in out
    assert {v["device"] for v in load(candidates / "report")["verdicts"]} == {"cuda"}


def test_a_run_that_executed_nothing_exits_3(
    command: Command, candidates: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy lets every cell be blocked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (candidates / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cuda",)'))
    required = '[[require]]\ncandidates = ["mine/*"]\njudgements = ["purity"]\ndevices = ["cuda"]\n'
    (candidates / "none.toml").write_text(required + required.replace("require", "may_block") + 'reason = "poor"\n')
    status, out, err = command("verify", "mine.py", *QUICK, "--judgement", "purity", "--policy", "none.toml")
    assert status == 3, out + err
    assert "1 cells required, 0 passed, 1 allowed to be blocked, 0 not met" in out


def test_files_of_which_nothing_is_required_are_not_run() -> None:
    """A policy that names our kernels runs no vendor's; one that names nobody runs everything, and says so."""
    run = Run(("ours.py", "theirs.py"), Selection())
    inventory = [{"specification": "ours.py", "name": "a/x"}, {"specification": "theirs.py", "name": "b/y"}]
    for pattern, left in (("a/*", ("ours.py",)), ("*", run.specifications), ("c/*", run.specifications)):
        policy = Policy("p", (Requirement((pattern,), ("purity",), ("cpu",)),))
        assert without_idle(run, inventory, policy).specifications == left


def test_the_doctor_names_the_native_library(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path, hash, architectures and torch target where it is there; why it cannot be used where it is not."""
    library = {
        "path": "/somewhere/lib.so", "sha256": "ab" * 32, "architectures": ["sm_90"], "torch_target": "2.10",
        "failure": "",
    }  # fmt: skip
    monkeypatch.setattr(environment, "native_library", lambda: library)
    status, out, _ = command("doctor")
    assert status == 0
    assert [word for word in ("/somewhere/lib.so", "ab" * 32, "sm_90", "2.10") if word not in out] == []
    assert json.loads(command("doctor", "--json")[1])["environment"]["native library"] == library
    monkeypatch.setattr(environment, "native_library", lambda: {"path": "x", "sha256": None, "failure": "OSError: y"})
    assert "backend='cuda' is refused: OSError: y" in command("doctor")[1]


def test_required_cells_are_values() -> None:
    """A cell is met by a pass and by a permitted block only."""
    states = ("passed", "permitted", "failed", "not-applicable", "blocked", "missing")
    assert [s for s in states if RequiredCell("c", s).met] == ["passed", "permitted"]  # type: ignore[arg-type]
