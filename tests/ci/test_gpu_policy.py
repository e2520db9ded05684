"""The shipped policies: what they require of our kernels and need of a machine; how a run under one begins and ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from ropecheck.ci import environment, preflight
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.policy import Policy, Requirement
from ropecheck.ci.policy_file import load_policy, shipped_policies
from ropecheck.ci.preflight import lacking
from ropecheck.ci.verify import Run, without_idle
from ropecheck.suites.adapters.shipped import CANDIDATES
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.families import FAMILIES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judgements.sanitizer import SANITIZER
from ropecheck.suites.judgements.sanitizer import cases as sanitizer_cases
from ropecheck.suites.judging import Selection

Command = Callable[..., "tuple[int, str, str]"]

POOR = 'reason = "poor"\nexpires = 9999-01-01\n'
QUICK = ("--plan", "smoke", "--dtype", "float32", "-n", "1")


def required(name: str, device: str) -> set[tuple[str, str]]:
    """Candidate and judgement of every required cell of a device; each must be named, so that one that is gone is
    missing."""
    own = {c.name for c in CANDIDATES}
    return {(n, j) for _, n, j, d in load_policy(name).required(own) if d == device}


def ours(device: str) -> list[Candidate]:
    return [c for c in CANDIDATES if device in c.devices]


def answerable(candidate: Candidate, judgement: str, device: str) -> bool:
    """Whether a candidate of ours is asked something, and can answer: autograd has no part in a vjp of its own, torch
    operations have no kernel of the candidate's to read, and an interpreted kernel copies by its nature."""
    asked = JUDGEMENTS[judgement]
    return (
        asked.claim in (None, *candidate.provides)
        and candidate.family not in asked.not_of
        and device not in asked.not_on
        and (candidate.vjp is None or judgement not in ("autograd", "higher-vjp", "table-gradient"))
        and (bool(candidate.kernels) or judgement != "codegen")
        and (device == "cuda" or judgement != "no-copy")
        and any(True for _ in asked.cases(candidate, device, "bfloat16", "standard"))
    )


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("cpu", "cuda"), ("gpu", "cuda"), ("gpu-full", "cuda")])
def test_whatever_can_be_answered_is_required(name: str, device: str) -> None:
    """Of every candidate of ours on that device, and nothing that cannot: that would be red for ever."""
    expected = {(c.name, j) for c in ours(device) for j in JUDGEMENTS if answerable(c, j, device)}
    assert {cell for cell in required(name, device) if cell[1] != SANITIZER} == expected


@pytest.mark.parametrize("name", shipped_policies())
def test_every_candidate_is_written_out(name: str) -> None:
    """A pattern would not miss what is gone."""
    named = {candidate for r in load_policy(name).requirements for candidate in r.candidates}
    assert named == {c.name for c in CANDIDATES}


def test_gpu_names_every_judgement() -> None:
    """One that is registered and required of nobody would be asked and gate nothing."""
    assert {judgement for _, judgement in required("gpu", "cuda")} == set(JUDGEMENTS)


@pytest.mark.parametrize("name", shipped_policies())
def test_every_dtype_and_the_claims_that_widen_cases_are_required(name: str) -> None:
    """Every candidate in three dtypes; of all the claims that widen cases and that its family has room for."""
    policy = load_policy(name)
    assert [r for r in policy.requirements if set(r.dtypes) != {"bfloat16", "float16", "float32"}] == []
    claims: dict[str, set[str]] = {}
    for r in policy.requirements:
        for candidate in r.candidates:
            claims.setdefault(candidate, set()).update(r.claims)
    widening = {"strided", "any-shape", "any-dtype", "any-position", "conjugate"}
    assert claims == {c.name: widening - set(FAMILIES[c.family].unclaimable) for c in CANDIDATES}
    assert [c.name for c in CANDIDATES if not claims[c.name] <= set(c.provides)] == []


def test_gpu_full_requires_the_sanitizer_of_every_kernel() -> None:
    """In each dtype that it requires the plan has cases; and nothing may be blocked on its two GPUs."""
    policy = load_policy("gpu-full")
    asked = {name for name, judgement in required("gpu-full", "cuda") if judgement == SANITIZER}
    assert asked == {c.name for c in CANDIDATES if c.kernels}
    for candidate in (c for c in CANDIDATES if c.kernels):
        dtypes = {case.dtype for case in sanitizer_cases(candidate, policy.plan)}
        assert dtypes == {"bfloat16", "float16", "float32"}
    assert policy.permissions == ()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_device_guard_alone_may_be_blocked(name: str) -> None:
    """And that on one GPU only, and not for ever: where this fails, look whether the permission is still needed."""
    policy = load_policy(name)
    policy.check(c.name for c in CANDIDATES)
    (permission,) = policy.permissions
    assert (permission.judgements, permission.devices, permission.gpus) == (("device-guard",), ("cuda",), 1)
    assert permission.expires >= datetime.now(timezone.utc).date()


def test_what_the_policies_need_and_how_they_take_stale_evidence() -> None:
    """A machine without a GPU is warned of stale GPU evidence; all else is red. Nothing is overridden, and no benchmark
    is required that no command measures."""
    policies = {name: load_policy(name) for name in shipped_policies()}
    assert {n: p.needs for n, p in policies.items()} == {
        "cpu": ("triton",), "gpu": ("gpu", "triton", "native"), "gpu-full": ("gpu", "triton", "native"),
    }  # fmt: skip
    stale = {(n, d, r.stale) for n, p in policies.items() for r in p.requirements for d in r.devices}
    strict = {("cpu", "cpu", "red"), ("gpu", "cuda", "red"), ("gpu-full", "cuda", "red")}
    assert stale == {*strict, ("cpu", "cuda", "annotate")}
    assert {(p.plan, p.overrides, p.benchmarks) for p in policies.values()} == {("standard", (), ())}
    assert policies["cpu"].sensitivity is not None
    assert policies["cpu"].sensitivity.coverage == 1.0
    assert policies["cpu"].of_a_run().devices == ["cpu"]


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
    """Exit status 0, listed with the reason; the evidence names the policy and its hash."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (candidates / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cpu", "cuda")'))
    required = '[[require]]\ncandidates = ["mine/*"]\njudgements = ["purity"]\ndevices = ["cpu", "cuda"]\n'
    permission = required.replace("require", "may_block").replace('"cpu", ', "") + POOR
    (candidates / "lenient.toml").write_text(required + permission)
    asked = ("verify", "mine.py", *QUICK, "--judgement", "purity")
    status, out, err = command(*asked, "--policy", "lenient.toml", "--out", "report")
    assert status == 0, out + err
    assert "blocked (allowed) mine/right x purity x cuda: 1 blocked in float32: no CUDA GPU is available" in out
    assert "allowed until 9999-01-01: poor" in out
    assert "2 cells required, 1 passed, 1 allowed to be blocked, 0 not met" in out
    (document,) = load(candidates / "report").documents
    assert document["run"]["policy"] == {
        "name": "lenient.toml", "sha256": hashlib.sha256((candidates / "lenient.toml").read_bytes()).hexdigest(),
    }  # fmt: skip


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
    assert "blocked mine/right x purity x cuda: 1 blocked in float32: no CUDA GPU" in out
    assert {v.device for v in load(candidates / "report").verdicts or ()} == {"cuda"}


def test_a_run_that_executed_nothing_exits_3(
    command: Command, candidates: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the policy lets every cell be blocked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (candidates / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cuda",)'))
    required = '[[require]]\ncandidates = ["mine/*"]\njudgements = ["purity"]\ndevices = ["cuda"]\n'
    (candidates / "none.toml").write_text(required + required.replace("require", "may_block") + POOR)
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
