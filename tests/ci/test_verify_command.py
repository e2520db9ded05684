"""``ropecheck verify`` from outside: exit status, report folder, messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ropecheck.ci.evidence.reading import load

Command = Callable[..., "tuple[int, str, str]"]

QUICK = ("--plan", "smoke", "--dtype", "float32", "--judgement", "accuracy-forward", "-n", "1")


def test_right_candidate_exits_0_and_leaves_a_closed_report(shell: Command, candidates: Path) -> None:
    """Verdicts, JUnit and manifest are there, and the manifest's hashes hold."""
    status, out, err = shell("verify", "right.py", *QUICK, "--out", "report")
    assert status == 0, out + err
    assert {v.verdict for v in load(candidates / "report").verdicts or ()} == {"pass"}
    assert (candidates / "report" / "cpu" / "junit.xml").is_file()
    assert not (candidates / "report.partial").exists()


def test_wrong_candidate_exits_1_and_is_explained(shell: Command, command: Command, candidates: Path) -> None:
    """The report names the worst element and a command, and that command shows the same failure alone."""
    status, out, err = shell("verify", "wrong.py", *QUICK)
    assert status == 1, out + err
    assert "worst element: sample" in out
    assert "ulp outside" in out
    line = next(line for line in out.splitlines() if line.strip().startswith("ropecheck explain "))
    status, out, err = command(*line.split()[1:], "--json")
    assert status == 1, err
    assert json.loads(out)["verdict"] == "fail"


def test_json_goes_to_standard_output_alone(command: Command, candidates: Path) -> None:
    """With --json standard output is one canonical document."""
    _, out, err = command("verify", "right.py", *QUICK, "--json")
    assert json.loads(out)["schema"] == "ropecheck-evidence/1"
    assert "cases for 1 candidate" in err


def test_both_candidates_in_one_run(command: Command, candidates: Path) -> None:
    """One candidate's failure costs the other nothing."""
    status, _, _ = command("verify", "right.py", "wrong.py", *QUICK, "--out", "report")
    assert status == 1
    verdicts = load(candidates / "report").verdicts or ()
    assert {v.verdict for v in verdicts if v.candidate == "mine/right"} == {"pass"}
    assert "fail" in {v.verdict for v in verdicts if v.candidate == "mine/wrong"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "does not define CANDIDATES"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
        ("CANDIDATES = []", "defines no candidate"),
        ("import os; os._exit(7)", "takes down the process that imports it (status 7)"),
        ("import os; os.abort()", "takes down the process that imports it (status -6)"),
    ],
)
def test_unusable_files_exit_2_with_one_sentence(command: Command, tmp_path: Path, source: str, says: str) -> None:
    """A file that cannot be judged is a usage error, said in one line and without a traceback."""
    (tmp_path / "mine.py").write_text(source)
    status, out, err = command("verify", "mine.py", *QUICK)
    assert status == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "missing.py"), "candidate file missing.py does not exist"),
        (("verify", "right.py", "--contract", "nope"), "--contract"),
        (("verify", "right.py", "--case", "no/such/case"), "no case matches"),
        (("verify", "right.py", "--seed", "-1"), "--seed"),
        (("verify", "right.py", "-n", "0"), "-n"),
        (("verify", "right.py", "--policy", "missing.toml"), "--policy missing.toml cannot be read"),
        (("verify", "right.py", "--out", "right.py"), "--out"),
        (("explain", "no/such/case", "--candidate", "right.py"), "no plan has the case"),
        (("explain", "x@nobody", "--candidate", "right.py"), "no candidate is called 'nobody'"),
        (("contracts", "nope"), "unknown contract 'nope'"),
        ((), "COMMAND"),
    ],
)
def test_bad_arguments_exit_2_with_one_sentence(
    command: Command, candidates: Path, arguments: tuple[str, ...], says: str
) -> None:
    """The sentence names the argument."""
    status, _, err = command(*arguments)
    assert status == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_a_folder_of_somebody_else_is_left_alone(command: Command, candidates: Path) -> None:
    """--out refuses a folder that no run of ours has left."""
    (candidates / "precious").mkdir()
    (candidates / "precious" / "data.txt").write_text("mine")
    status, _, _ = command("verify", "right.py", *QUICK, "--out", "precious")
    assert status == 2
    assert (candidates / "precious" / "data.txt").read_text() == "mine"


def test_gpu_asked_for_without_one_exits_3(
    shell: Command, tmp_path: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked is never a pass."""
    (tmp_path / "mine.py").write_text(right.replace('devices=("cpu",)', 'devices=("cuda",)'))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, out, _ = shell("verify", "mine.py", *QUICK)
    assert status == 3
    assert "no CUDA GPU is available" in out


def test_policy_demands_a_claim(command: Command, candidates: Path) -> None:
    """A candidate without the claim passes without the policy, and with it something required was not asked."""
    required = 'judgements = ["accuracy-forward", "accuracy-vjp"]'
    policy = f'[[require]]\ncandidates = ["mine/*"]\n{required}\ndevices = ["cpu"]\n'
    (candidates / "gate.toml").write_text(policy)
    arguments = ("verify", "right.py", *QUICK, "--judgement", "accuracy-vjp")
    assert command(*arguments)[0] == 0
    status, out, _ = command(*arguments, "--policy", "gate.toml")
    assert status == 3
    assert "missing mine/right x accuracy-vjp x cpu: 1 not-applicable: the candidate does not claim vjp" in out


def test_hostile_candidate_loses_nothing(command: Command, candidates: Path, right: str) -> None:
    """A candidate that hangs or kills its process fails; the verdicts of the other are all there."""
    deadly = right.replace("mine/right", "mine/deadly").replace(
        "def rotate(x, cos, sin):",
        "def rotate(x, cos, sin):\n    import os, time\n"
        "    time.sleep(60) if x.shape[1] == 64 else os._exit(3) if x.shape[1] == 1 else None",
    )
    (candidates / "deadly.py").write_text(deadly)
    asked = ("--plan", "smoke", "--dtype", "float32", "--judgement", "accuracy-forward")
    arguments = (*asked, "-n", "2", "--case-limit", "4", "--out", "report")
    status, out, err = command("verify", "right.py", "deadly.py", *arguments)
    assert status == 1, out + err
    verdicts = load(candidates / "report").verdicts or []
    reasons = {v.reason for v in verdicts if v.candidate == "mine/deadly" and v.verdict == "fail"}
    assert reasons == {"the process died", "no answer within 4 s"}
    assert {v.verdict for v in verdicts if v.candidate == "mine/right"} == {"pass"}
    cases = {name: {v.case for v in verdicts if v.candidate == f"mine/{name}"} for name in ("right", "deadly")}
    assert cases["right"] == cases["deadly"]
    assert len(verdicts) == 2 * len(cases["right"])
