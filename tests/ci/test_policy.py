"""Policies: what is required, what may be blocked, and why a cell does not meet it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.policy import (
    Permission,
    Policy,
    PolicyError,
    RequiredCell,
    Requirement,
    load_policy,
    outcome_of,
    required_cells,
    shipped_policies,
)
from ropecheck.ci.verify import held_to
from ropecheck.suites.judging import Selection
from ropecheck.suites.verdicts import Verdict

NEED = Requirement(("mine/*",), ("purity",), ("cpu",), cases=2)
POLICY = Policy("p", (NEED,))
ALLOWED = Permission(("mine/*",), ("purity",), ("cpu",), "there is only one")
REQUIRE = "[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['cpu']\n"
MAY_BLOCK = "[[may_block]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['cpu']\n"


def verdicts(*kinds: Any, dtype: str = "float32") -> list[Verdict]:
    return [Verdict("mine/a", "neox", "purity", "cpu", dtype, f"purity/{i}", k, "why") for i, k in enumerate(kinds)]


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (verdicts("pass", "pass"), "passed", ""),
        (verdicts("pass"), "missing", "1 cases in float32, 2 are required"),
        (verdicts("pass", "pass", "fail"), "failed", "1 fail: why"),
        (verdicts("pass", "pass", "blocked"), "blocked", "1 blocked: why"),
        (verdicts("not-applicable"), "not-applicable", "1 not-applicable: why"),
        ([], "missing", "no candidate of that name was judged"),
        (verdicts("pass", "pass") + verdicts("pass", dtype="float16"), "missing", "1 cases in float16, 2 are required"),
    ],
)
def test_states(found: list[Verdict], state: str, reason: str) -> None:
    """Only enough passes and nothing else meet a requirement."""
    (cell,) = required_cells(POLICY, found, gpus=0)
    assert (cell.state, cell.reason, cell.met) == (state, reason, state == "passed")


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (verdicts("blocked"), "permitted"),
        (verdicts("pass", "blocked"), "permitted"),
        (verdicts("pass", "pass"), "passed"),
        # Permission is for what could not run, and for nothing else.
        (verdicts("blocked", "fail"), "failed"),
        (verdicts("blocked", "not-applicable"), "not-applicable"),
        (verdicts("pass"), "missing"),
    ],
)
def test_what_may_be_blocked_may_not_fail(found: list[Verdict], state: str) -> None:
    """A permission covers blocked cases; failures, missing cases and unclaimed judgements stay unmet."""
    (cell,) = required_cells(Policy("p", (NEED,), (ALLOWED,)), found, gpus=0)
    assert (cell.state, cell.met) == (state, state in ("passed", "permitted"))
    assert ("there is only one" in cell.reason) == (state == "permitted")


@pytest.mark.parametrize(
    ("permission", "gpus", "state"),
    [
        (Permission(("mine/*",), ("purity",), ("cpu",), "r", gpus=1), 1, "permitted"),
        (Permission(("mine/*",), ("purity",), ("cpu",), "r", gpus=1), 2, "blocked"),
        (Permission(("other/*",), ("purity",), ("cpu",), "r"), 1, "blocked"),
        (Permission(("mine/*",), ("refusals",), ("cpu",), "r"), 1, "blocked"),
        (Permission(("mine/*",), ("purity",), ("cuda",), "r"), 1, "blocked"),
    ],
)
def test_permission_is_for_the_cells_it_names(permission: Permission, gpus: int, state: str) -> None:
    """Another candidate, judgement, device, or a machine with more GPUs has no permission."""
    (cell,) = required_cells(Policy("p", (NEED,), (permission,)), verdicts("blocked"), gpus)
    assert cell.state == state


def test_a_required_dtype_has_cases_of_its_own() -> None:
    """A candidate that lists one dtype alone does not meet a requirement of two."""
    policy = Policy("p", (Requirement(("mine/*",), ("purity",), ("cpu",), dtypes=("float32", "float16")),))
    (cell,) = required_cells(policy, verdicts("pass"), 0)
    assert (cell.state, cell.reason) == ("missing", "0 cases in float16, 1 are required")
    (cell,) = required_cells(policy, verdicts("pass") + verdicts("pass", dtype="float16"), 0)
    assert cell.met


@pytest.mark.parametrize(
    ("provides", "kind", "state"),
    [
        ([("mine/a", ["strided", "vjp"])], "pass", "passed"),
        ([("mine/a", ["vjp"])], "pass", "not-applicable"),
        ([("mine/a", ["vjp"])], "blocked", "not-applicable"),
        ([("mine/b", ["strided", "vjp"])], "pass", "not-applicable"),
        ([], "pass", "not-applicable"),
    ],
)
def test_a_required_claim_is_read_from_the_inventory(provides: list[Any], kind: str, state: str) -> None:
    """Passed cases without the claim, or a candidate that the inventory does not hold, do not meet it."""
    policy = Policy("p", (Requirement(("mine/*",), ("purity",), ("cpu",), claims=("vjp", "strided")),), (ALLOWED,))
    inventory = [{"name": name, "provides": claims} for name, claims in provides]
    (cell,) = required_cells(policy, verdicts(kind), 0, inventory)
    assert cell.state == state
    assert cell.met or cell.reason.startswith("the candidate does not claim")


def test_a_case_that_is_judged_twice_counts_once() -> None:
    """Two verdicts on one case are one case."""
    (cell,) = required_cells(POLICY, verdicts("pass") * 2, 0)
    assert (cell.state, cell.reason) == ("missing", "1 cases in float32, 2 are required")


def test_missing_cell() -> None:
    """A candidate that was judged on something else only has not met it."""
    other = [Verdict("mine/a", "neox", "refusals", "cpu", "float32", "refusals/0", "pass")]
    assert required_cells(POLICY, other, 0) == [RequiredCell("mine/a x purity x cpu", "missing", "no case was judged")]


def test_each_cell_is_listed_once() -> None:
    """Two patterns that name one cell do not count it twice, and evidence lists what is not passed."""
    policy = Policy("p", (NEED, Requirement(("mine/a",), ("purity",), ("cpu",), cases=2)), sha256="00")
    assert len(required_cells(policy, verdicts("pass", "pass"), 0)) == 1
    said = outcome_of(policy, required_cells(policy, verdicts("blocked"), 0))
    others = [{"cell": "mine/a x purity x cpu", "state": "blocked", "reason": "1 blocked: why"}]
    assert said == {"name": "p", "sha256": "00", "required": 1, "passed": 0, "others": others}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one [[require]]"),
        ("x = [", "is not TOML"),
        ("require = ['a']", "at least one [[require]]"),
        ("[[require]]\ncandidates = ['a']\ndevices = ['cpu']", "judgements must be a list of strings"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['beauty']\ndevices = ['cpu']", "'beauty'"),
        ("[[require]]\ncandidates = ['a']\njudgements = ['purity']\ndevices = ['tpu']", "'tpu'"),
        (REQUIRE + "cases = 0", "cases must be"),
        (REQUIRE + "cases = true", "cases must be"),
        (REQUIRE + "retry = 3", "key 'retry' in [[require]]"),
        (REQUIRE + "[other]\nx = 1", "unknown key 'other'"),
        *((f"plan = {plan}\n" + REQUIRE, "plan must be one of") for plan in ("'tiny'", "''", "false", "0", "[]", "{}")),
        (REQUIRE + "dtypes = []", "dtypes must be a list of some of bfloat16"),
        (REQUIRE + "dtypes = ['float64']", "['float64']"),
        (REQUIRE + "claims = 'strided'", "claims must be a list of some of vjp"),
        (REQUIRE + "claims = [['strided']]", "claims must be a list of some of vjp"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'\nclaims = ['vjp']", "key 'claims' in [[may_block]]"),
        (REQUIRE.replace("purity", "sanitizer"), "sanitizer is run by ropecheck sanitize"),
        (REQUIRE + "[needs]\ntpu = true", "needs 'tpu'"),
        (REQUIRE + "[needs]\ngpu = false", "[needs] must hold"),
        (REQUIRE + "[may_block]\nreason = 'r'", "[[may_block]] tables"),
        (REQUIRE + MAY_BLOCK, "reason must say in every [[may_block]]"),
        (REQUIRE + MAY_BLOCK + "reason = ' '", "reason must say in every [[may_block]]"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'\ngpus = 0", "gpus must be a number from 1 on"),
        (REQUIRE + MAY_BLOCK + "reason = 'r'\ncases = 2", "key 'cases' in [[may_block]]"),
        (REQUIRE + MAY_BLOCK.replace("['purity']", "['beauty']") + "reason = 'r'", "'beauty'"),
        (REQUIRE + "[[may_block]]\nreason = 'r'\njudgements = ['purity']", "candidates must be a list of strings"),
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
    """Every key arrives where it belongs, and the hash is that of the file."""
    path = tmp_path / "p.toml"
    path.write_text(
        f"plan = 'full'\n{REQUIRE}cases = 3\ndtypes = ['float16']\nclaims = ['vjp']\n{MAY_BLOCK}gpus = 1\n"
        "reason = 'r'\n[needs]\nnative = true\ngpu = true\n"
    )
    policy = load_policy(str(path))
    assert policy.requirements == (Requirement(("a",), ("purity",), ("cpu",), 3, ("float16",), ("vjp",)),)
    assert policy.permissions == (Permission(("a",), ("purity",), ("cpu",), "r", 1),)
    assert (policy.needs, policy.plan, policy.devices) == (("gpu", "native"), "full", ["cpu"])
    assert len(policy.sha256) == 64


def test_unknown_name_lists_the_shipped_policies() -> None:
    """A name that is neither shipped nor a TOML file is refused with the names that exist."""
    assert "gpu" in shipped_policies()
    with pytest.raises(PolicyError, match=r"must be FILE.toml or one of .*gpu.*, not 'gpuu'"):
        load_policy("gpuu")


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
