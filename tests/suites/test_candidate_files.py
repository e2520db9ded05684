"""Candidate files: what cannot be used is refused in one line, and what misbehaves costs no other verdict."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropecheck.suites.candidates import Candidate, CandidateError, load_candidates
from ropecheck.suites.verdicts import Verdict

HEAD = "from ropecheck.suites import Candidate\n\ndef run(x, cos, sin):\n    return x\n\n"


def one(arguments: str) -> str:
    return f"{HEAD}CANDIDATES = [Candidate({arguments})]\n"


BAD_FILES = {
    "syntax-error": ("def run(:\n", r"candidate file bad\.py does not import: SyntaxError: .*\(bad\.py:1\)"),
    "import-error": (
        "import no_such_package\n",
        r"candidate file bad\.py does not import: ModuleNotFoundError: .*no_such_package.*\(bad\.py:1\)",
    ),
    "raising": ("x = 1 / 0\n", r"candidate file bad\.py does not import: ZeroDivisionError: .*\(bad\.py:1\)"),
    "exiting": ("import sys\nsys.exit(3)\n", r"candidate file bad\.py does not import: SystemExit: 3 \(bad\.py:2\)"),
    "no-candidates": ("x = 1\n", r"bad\.py does not define CANDIDATES"),
    "empty": ("CANDIDATES = []\n", r"bad\.py defines no candidate"),
    "wrong-type": ("CANDIDATES = 7\n", r"bad\.py must define a list of ropecheck\.suites\.Candidate, not 7"),
    "wrong-element": ("CANDIDATES = [7]\n", r"bad\.py must define a list of ropecheck\.suites\.Candidate, not \[7\]"),
    "two-of-one-name": (
        HEAD + "one = Candidate('mine', 'neox', run)\nCANDIDATES = [one, one]\n",
        r"bad\.py defines two candidates named 'mine'",
    ),
    "contract": (one("'mine', 'qwen', run"), r"candidate mine: unknown contract 'qwen'; known contracts are gptj, "),
    "claim": (
        one("'mine', 'neox', run, provides=('fast',)"),
        r"candidate mine: provides holds 'fast', which is none of",
    ),
    "dtype": (one("'mine', 'neox', run, dtypes=('int8',)"), r"candidate mine: dtypes holds 'int8', which is none of"),
    "device": (one("'mine', 'neox', run, devices=('tpu',)"), r"candidate mine: devices holds 'tpu', which is none of"),
    "a-string-for-a-tuple": (
        one("'mine', 'neox', run, devices=('cuda')"),
        r"candidate mine: devices must be a tuple of strings, not 'cuda'",
    ),
    "no-dtype": (one("'mine', 'neox', run, dtypes=()"), r"candidate mine: dtypes must not be empty"),
    "level": (one("'mine', 'neox', run, level='L3'"), r"candidate mine: level must be 'L1' .*not 'L3'"),
    "name": (one("'my kernel', 'neox', run"), r"name must be made of letters, .*not 'my kernel'"),
    "run": (one("'mine', 'neox', 7"), r"candidate mine: run must be callable, not int"),
    "vjp": (one("'mine', 'neox', run, vjp=7"), r"candidate mine: vjp must be callable, not int"),
    "in-place-vjp": (
        one("'mine', 'neox', run, in_place=True, provides=('vjp',)"),
        r"candidate mine: an in_place candidate that claims vjp must give vjp",
    ),
    "trace": (one("'mine', 'neox', run, backend='triton'"), r"candidate mine: trace and backend go together"),
}


def assert_one_line(error: CandidateError) -> None:
    message = str(error)
    assert "\n" not in message
    assert "Traceback" not in message
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    """Every bad file is a CandidateError whose single line names the culprit, without a traceback."""
    source, message = BAD_FILES[name]
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(CandidateError, match=message) as caught:
        load_candidates(str(file))
    assert_one_line(caught.value)
    assert "ropecheck_candidate_bad" not in sys.modules or not message.startswith("candidate file")


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("no/such/file.py", r"candidate file no/such/file\.py does not exist"),
        ("no_such_module:CANDIDATES", r"candidate module no_such_module does not import: ModuleNotFoundError"),
        (
            "ropecheck.suites.adapters.shipped:NOTHING",
            r"ropecheck\.suites\.adapters\.shipped:NOTHING does not define NOTHING",
        ),
        ("ropecheck.suites.candidates:CLAIMS", r"CLAIMS must define a list of ropecheck\.suites\.Candidate"),
        ("candidates", r"candidate must be FILE\.py or package\.module:attribute, not 'candidates'"),
    ],
    ids=["missing-file", "missing-module", "missing-attribute", "wrong-attribute", "neither"],
)
def test_a_bad_specification_is_refused_in_one_line(specification: str, message: str) -> None:
    """So is whatever names no candidates."""
    with pytest.raises(CandidateError, match=message) as caught:
        load_candidates(specification)
    assert_one_line(caught.value)


def test_a_good_file_and_a_good_attribute(tmp_path: Path) -> None:
    """A list is loaded in its order, one candidate as a list of one, and a file may import its neighbours."""
    (tmp_path / "a_neighbour_of_the_file.py").write_text("def run(x, cos, sin):\n    return x\n")
    file = tmp_path / "good.py"
    file.write_text(
        "from a_neighbour_of_the_file import run\nfrom ropecheck.suites import Candidate\n"
        "SINGLE = Candidate('a', 'neox', run)\nCANDIDATES = [SINGLE, Candidate('b', 'qwen-image', run)]\n"
    )
    loaded = load_candidates(str(file))
    assert [c.name for c in loaded] == ["a", "b"]
    assert loaded[0].module is not None
    assert [c.name for c in load_candidates("ropecheck_candidate_good:SINGLE")] == ["a"]
    assert all(isinstance(c, Candidate) for c in loaded)


def test_pytest_refuses_before_it_asks_anything(tmp_path: Path) -> None:
    """Through pytest too the message is one line, without a traceback, and the exit status that of no run at all."""
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "ropecheck.suites", "-p", "no:cacheprovider"]
    command += ["--candidate", "nowhere.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert "candidate file nowhere.py does not exist" in run.stdout.splitlines()
    assert ".py:" not in run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr


MISBEHAVING = """
import os, sys, time
import torch
from ropecheck.suites import Candidate


def good(x, cos, sin):
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def raising(x, cos, sin):
    raise KeyError("no kernel\\nfor this")


def exiting(x, cos, sin):
    sys.exit("enough")


def once(trouble):
    # One token and two samples: one case of the smoke plan.
    return lambda x, cos, sin: trouble() if x.shape[1] == 1 else good(x, cos, sin)


RUNS = {
    "good-before": good,
    "raising": raising,
    "wrong-shape": lambda x, cos, sin: good(x, cos, sin)[..., :-1],
    "wrong-dtype": lambda x, cos, sin: good(x, cos, sin).double(),
    "wrong-device": lambda x, cos, sin: good(x, cos, sin).to("meta"),
    "wrong-type": lambda x, cos, sin: [good(x, cos, sin)],
    "nothing": lambda x, cos, sin: None,
    "exiting": exiting,
    "dying": lambda x, cos, sin: os._exit(0),
    "aborting-once": once(os.abort),
    "hanging-once": once(lambda: time.sleep(1000)),
    "good-after": good,
}
CANDIDATES = [Candidate(name, "qwen-image", run, devices=("cpu",)) for name, run in RUNS.items()]
"""
CASES = 5
ANSWERS = {
    "raising": "run raised KeyError: 'no kernel\\nfor this' (candidates_under_test.py:14)",
    "wrong-shape": "run returned shape (1, 7, 3, 127), where x has shape (1, 7, 3, 128)",
    "wrong-dtype": "run returned dtype torch.float64, where x has dtype torch.bfloat16",
    "wrong-device": "run returned device meta, where x has device cpu",
    "wrong-type": "run returned list, not a tensor, for x",
    "nothing": "run returned NoneType, not a tensor, for x",
    "exiting": "run raised SystemExit: enough (candidates_under_test.py:18)",
}
LIMIT = 6
DEATHS = ("the process died", f"no answer within {LIMIT} s")


def test_misbehaving_candidates(verdicts_of_a_run: Callable[..., list[Any]]) -> None:
    """Each gets a failing verdict with one clear sentence in every case, and no other candidate loses a verdict."""
    options = ["--plan", "smoke", "--judgement", "accuracy-forward", "--judgement", "strict-bytes"]
    options += ["--dtype", "bfloat16", "-n", "1", "--case-limit", str(LIMIT)]
    every = verdicts_of_a_run(MISBEHAVING, *options)
    # What is not claimed stays not applicable, however often the process died before.
    unclaimed = [v for v in every if v.judgement == "strict-bytes"]
    assert "dying" in {v.candidate for v in unclaimed}
    assert {v.verdict for v in unclaimed} == {"not-applicable"}
    verdicts = [v for v in every if v not in unclaimed]
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.candidate, []).append(verdict)
        assert "\n" not in verdict.reason
    assert Counter({name: len(held) for name, held in found.items()}) == dict.fromkeys(
        [*ANSWERS, "good-before", "good-after", "dying", "aborting-once", "hanging-once"], CASES
    )
    for name in ("good-before", "good-after"):
        assert [v.verdict for v in found[name]] == ["pass"] * CASES
    for name, answer in ANSWERS.items():
        assert [v.verdict for v in found[name]] == ["fail"] * CASES
        assert answer in [v.reason for v in found[name]]
    for name, answer in zip(("aborting-once", "hanging-once"), DEATHS, strict=True):
        failed = [v for v in found[name] if v.verdict == "fail"]
        assert [v.reason for v in failed] == [answer]
        assert "b2-s1-" in failed[0].case
        assert [v.verdict for v in found[name] if v not in failed] == ["pass"] * (CASES - 1)
    # Three processes are enough: the rest is not run, which is not a pass.
    assert [v.verdict for v in found["dying"]] == ["fail"] * 3 + ["blocked"] * (CASES - 3)
    assert {v.reason for v in found["dying"] if v.verdict == "fail"} == {DEATHS[0]}
    blocked = {v.reason for v in found["dying"] if v.verdict == "blocked"}
    assert blocked == {"not run: the candidate has taken down its process three times"}
    for held in found.values():
        assert {(v.judgement, v.device, v.dtype) for v in held if v.verdict != "blocked"} == {
            ("accuracy-forward", "cpu", "bfloat16")
        }
        # A verdict over a dead process knows no contract: the command line, which has the candidates, fills it in.
        assert {v.contract for v in held if v.reason not in DEATHS} == {"qwen-image"}
