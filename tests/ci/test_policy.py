"""Policies: a slip of the pen is an error that names the key, and what a policy says is about the cells it names."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from ropecheck.ci.policy import (
    BenchmarkFloor,
    Override,
    Permission,
    Policy,
    PolicyError,
    Requirement,
    SensitivityFloor,
)
from ropecheck.ci.policy_file import load_policy, shipped_policies
from ropecheck.ci.verify import held_to
from ropecheck.suites.judging import Selection

DAY = date(2030, 1, 31)
NEED = Requirement(("mine/*",), ("purity",), ("cpu",), cases=2)
POLICY = Policy("p", (NEED,))
ALLOWED = Permission(("mine/*",), ("purity",), ("cpu",), "there is only one", DAY)
CELLS = "candidates = ['a']\njudgements = ['purity']\ndevices = ['cpu']\n"
REQUIRE = f"[[require]]\n{CELLS}"
MAY_BLOCK = f"[[may_block]]\n{CELLS}"
OVERRIDE = f"[[override]]\n{CELLS}"
ENDS = "expires = 2030-01-31\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one [[require]]"),
        ("x = [", "is not TOML"),
        ("require = ['a']", "require must be written as [[require]] tables"),
        ("[require]\nx = 1", "require must be written as [[require]] tables"),
        ("[[require]]\ncandidates = ['a']\ndevices = ['cpu']", "judgements must be a list of strings"),
        ("[[require]]\ncandidates = ['']\njudgements = ['purity']\ndevices = ['cpu']", "candidates must be a list"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['beauty']\ndevices = ['cpu']", "'beauty'"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['tpu']", "'tpu'"),
        (REQUIRE + "cases = 0", "cases must be"),
        (REQUIRE + "cases = true", "cases must be"),
        (REQUIRE + "retry = 3", "key 'retry' in [[require]]"),
        (REQUIRE + "stale = 'green'", "stale must be one of red, annotate, not 'green'"),
        (REQUIRE + "stale = true", "stale must be one of red, annotate"),
        (REQUIRE + "[other]\nx = 1", "unknown key 'other'"),
        *((f"plan = {plan}\n" + REQUIRE, "plan must be one of") for plan in ("'tiny'", "''", "false", "0", "[]", "{}")),
        *((f"max_age_days = {days}\n" + REQUIRE, "max_age_days must be") for days in ("0", "-1", "'30'", "true")),
        (REQUIRE + "dtypes = []", "dtypes must be a list of some of bfloat16"),
        (REQUIRE + "dtypes = ['float64']", "['float64']"),
        (REQUIRE + "claims = 'strided'", "claims must be a list of some of vjp"),
        (REQUIRE + "claims = [['strided']]", "claims must be a list of some of vjp"),
        (REQUIRE + "[needs]\ntpu = true", "needs 'tpu'"),
        (REQUIRE + "[needs]\ngpu = false", "[needs] must hold"),
        (REQUIRE + "[toolchain]\ntorch = '2.10 or so'", "torch must be a range such as"),
        (REQUIRE + "[toolchain]\ntorch = ''", "torch must be a sentence or name"),
        (REQUIRE + "[toolchain]\nthe-torch = '>=2'", "a key of [toolchain] must be one of torch"),
        ("toolchain = '>=2'\n" + REQUIRE, "toolchain must be written as a [toolchain] table"),
        (REQUIRE + "[sensitivity]\nfaults = 10", "coverage must be a number above 0 to 1"),
        (REQUIRE + "[sensitivity]\ncoverage = 1.01\nfaults = 10", "coverage must be a number above 0 to 1, not 1.01"),
        (REQUIRE + "[sensitivity]\ncoverage = nan\nfaults = 10", "coverage must be a number above 0 to 1, not nan"),
        (REQUIRE + "[sensitivity]\ncoverage = 1.0", "faults must be a number from 1 on"),
        (REQUIRE + "[sensitivity]\ncoverage = 1.0\nfaults = 1\nmin = 1", "unknown key 'min' in [sensitivity]"),
        (REQUIRE + "[[benchmark]]\nname = 'b'\ndevice = 'd'", "ratio must be a number above 0 on"),
        (REQUIRE + "[[benchmark]]\nname = 'b'\ndevice = 'd'\nratio = inf", "ratio must be a number above 0 on"),
        (REQUIRE + "[[benchmark]]\nname = 'b'\nratio = 1", "device must be a sentence or name in every [[benchmark]]"),
        (REQUIRE + "[may_block]\nreason = 'r'", "[[may_block]] tables"),
        (REQUIRE + MAY_BLOCK + ENDS, "reason must be a sentence or name in every [[may_block]]"),
        (REQUIRE + MAY_BLOCK + ENDS + "reason = ' '", "reason must be a sentence or name in every [[may_block]]"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'", "expires must be a date such as 2030-01-31 in every [[may_block]]"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'\nexpires = '2030-01-31'", "expires must be a date"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'\nexpires = 2030-01-31T10:00:00", "expires must be a date"),
        (REQUIRE + MAY_BLOCK + ENDS + "reason = 'r'\ngpus = 0", "gpus must be a number from 1 on"),
        (REQUIRE + MAY_BLOCK + ENDS + "reason = 'r'\ncases = 2", "key 'cases' in [[may_block]]"),
        (REQUIRE + MAY_BLOCK + ENDS + "reason = 'r'\nclaims = ['vjp']", "key 'claims' in [[may_block]]"),
        (REQUIRE + MAY_BLOCK.replace("['purity']", "['beauty']") + "reason = 'r'", "'beauty'"),
        (REQUIRE + "[[may_block]]\nreason = 'r'\njudgements = ['purity']", "candidates must be a list of strings"),
        (REQUIRE + OVERRIDE + ENDS + "why = 'w'", "who must be a sentence or name in every [[override]]"),
        (REQUIRE + OVERRIDE + ENDS + "who = 'w'", "why must be a sentence or name in every [[override]]"),
        (REQUIRE + OVERRIDE + "who = 'w'\nwhy = 'w'", "expires must be a date such as 2030-01-31 in every"),
        (REQUIRE + OVERRIDE + ENDS + "who = 'w'\nwhy = 'w'\ngpus = 1", "key 'gpus' in [[override]]"),
        (REQUIRE + "[[include]]\nstale = 'red'", "policy must be a sentence or name in every [[include]]"),
        (REQUIRE + "[[include]]\npolicy = 'gpuu'", "must be FILE.toml or one of"),
        (REQUIRE + "[[include]]\npolicy = 'gone.toml'", "cannot be read"),
        (REQUIRE + "[[include]]\npolicy = 'cpu'", "include names cpu, which includes another policy itself"),
        (REQUIRE + "[[include]]\npolicy = 'gpu'\nstale = 'never'", "stale must be one of red, annotate"),
        (REQUIRE + "[[include]]\npolicy = 'gpu'\nwhen = 1", "unknown key 'when' in [[include]]"),
    ],
)
def test_unusable_policy(tmp_path: Path, text: str, says: str) -> None:
    """One sentence that names the file and the key."""
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match="--policy") as refusal:
        load_policy(str(path))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_whole_policy_is_read(tmp_path: Path) -> None:
    """Every key arrives where it belongs."""
    path = tmp_path / "p.toml"
    path.write_text(
        f"plan = 'full'\nmax_age_days = 30\n{REQUIRE}cases = 3\ndtypes = ['float16']\nclaims = ['vjp']\n"
        f"stale = 'annotate'\n{MAY_BLOCK}{ENDS}gpus = 1\nreason = 'r'\n{OVERRIDE}{ENDS}who = 'A'\nwhy = 'w'\n"
        "[needs]\nnative = true\ngpu = true\n[toolchain]\ntorch = '>=2.10,<3'\n[sensitivity]\ncoverage = 1\n"
        "faults = 200\n[[benchmark]]\nname = 'b'\ndevice = 'H200'\nratio = 1.05\n"
    )
    policy = load_policy(str(path))
    cells = (("a",), ("purity",), ("cpu",))
    assert policy.requirements == (Requirement(*cells, 3, ("float16",), ("vjp",), "annotate"),)
    assert policy.permissions == (Permission(*cells, "r", DAY, 1),)
    assert policy.overrides == (Override(*cells, "A", "w", DAY),)
    assert (policy.needs, policy.plan, policy.devices) == (("gpu", "native"), "full", ["cpu"])
    assert (policy.max_age_days, policy.toolchain) == (30, {"torch": ">=2.10,<3"})
    assert policy.sensitivity == SensitivityFloor(1.0, 200)
    assert policy.benchmarks == (BenchmarkFloor("b", "H200", 1.05),)


def test_what_is_included_is_what_is_required(tmp_path: Path) -> None:
    """The requirements of a file beside it, stale as the including policy says; nothing that allows less, and a hash
    that changes with either file."""
    other = tmp_path / "other.toml"
    other.write_text(f"plan = 'full'\n{REQUIRE}{MAY_BLOCK}{ENDS}reason = 'r'\n{OVERRIDE}{ENDS}who = 'A'\nwhy = 'w'")
    mine = tmp_path / "mine.toml"
    mine.write_text(f"{REQUIRE.replace('purity', 'laws')}[[include]]\npolicy = 'other.toml'\nstale = 'annotate'")
    policy = load_policy(str(mine))
    assert [(r.judgements, r.stale) for r in policy.requirements] == [(("purity",), "annotate"), (("laws",), "red")]
    assert (policy.permissions, policy.overrides, policy.plan) == ((), (), "")
    other.write_text(other.read_text() + "\n")
    assert load_policy(str(mine)).sha256 != policy.sha256


def test_unknown_name_lists_the_shipped_policies() -> None:
    """A name that is neither shipped nor a TOML file is refused with the names that exist."""
    assert shipped_policies() == ["cpu", "gpu", "gpu-full"]
    with pytest.raises(PolicyError, match=r"must be FILE.toml or one of cpu, gpu, gpu-full, not 'gpuu'"):
        load_policy("gpuu")


def test_each_required_cell_with_its_requirement() -> None:
    """For every candidate that a pattern matches; a pattern that matches none stands for itself."""
    policy = Policy("p", (replace(NEED, candidates=("mine/*", "your/*"), devices=("cpu", "cuda")),))
    cells = [cell for _, *cell in policy.required(["mine/a", "mine/b", "other"])]
    assert cells == [[n, "purity", d] for n in ("mine/a", "mine/b", "your/*") for d in ("cpu", "cuda")]


@pytest.mark.parametrize(
    "slip",
    [
        {"candidates": ("mime/*",)},
        {"candidates": ("mine/a", "mine/c")},
        {"judgements": ("refusals",)},
        {"judgements": ("purity", "refusals")},
        {"devices": ("cuda",)},
    ],
)
def test_a_permission_for_nothing_is_a_slip(slip: dict[str, tuple[str, ...]]) -> None:
    """So is an override: neither may sit there unseen until somebody needs it."""
    override = Override(("mine/*",), ("purity",), ("cpu",), "A", "w", DAY)
    replace(POLICY, permissions=(ALLOWED,), overrides=(override,)).check(["mine/a", "mine/b"])
    for key, policy in (
        ("may_block", replace(POLICY, permissions=(replace(ALLOWED, **slip),))),
        ("override", replace(POLICY, overrides=(replace(override, **slip),))),
    ):
        with pytest.raises(PolicyError, match=rf"in \[\[{key}\]\] is no required cell of a candidate at hand"):
            policy.check(["mine/a", "mine/b"])


def test_a_run_answers_for_what_it_can_judge() -> None:
    """Not for the sanitizer, for sensitivity, for benchmarks, nor for evidence that may be from earlier."""
    policy = Policy(
        "p",
        (
            replace(NEED, judgements=("purity", "sanitizer")),
            replace(NEED, judgements=("sanitizer",)),
            replace(NEED, devices=("cuda",), stale="annotate"),
        ),
        sensitivity=SensitivityFloor(1.0, 1),
        benchmarks=(BenchmarkFloor("b", "d", 1.0),),
    )
    assert policy.of_a_run() == POLICY
    assert held_to(Selection(), policy).devices == ["cpu"]


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection("smoke"), "--plan smoke asks less than standard"),
        (Selection(dtypes=["float32"]), "--dtype leaves out cases"),
        (Selection(contracts=["neox"]), "--contract leaves out cases"),
        (Selection(cases=["x"]), "--case leaves out cases"),
    ],
)
def test_a_plan_that_a_policy_names_is_asked_whole(selection: Selection, says: str) -> None:
    """A smaller plan, contract, dtype or single cases cannot meet it; without a plan they are a choice."""
    with pytest.raises(PolicyError, match=says):
        held_to(selection, Policy("p", (NEED,), plan="standard"))
    assert held_to(selection, POLICY).plan == selection.plan
    assert held_to(Selection("full"), Policy("p", (NEED,), plan="standard")).plan == "full"


def test_only_the_devices_of_the_policy_are_run() -> None:
    """Where no device was chosen the policy's are, and a choice stays."""
    assert held_to(Selection(), POLICY).devices == ["cpu"]
    assert held_to(Selection(devices=["cuda"]), POLICY).devices == ["cuda"]
