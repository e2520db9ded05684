"""``ropecheck sanitize``: what becomes of everything that compute-sanitizer can write, or fail to write."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci import sanitize, sanitize_command
from ropecheck.ci.evidence.reading import load
from ropecheck.ci.sanitizer_output import read
from ropecheck.ci.verify import Run, expected
from ropecheck.suites.judgements.sanitizer import TOOLS
from ropecheck.suites.judging import Selection
from ropecheck.suites.planted_faults import KERNELS

Command = Callable[..., "tuple[int, str, str]"]
Asked = Callable[..., "tuple[int, list[dict[str, Any]], dict[str, Any]]"]

_CANDIDATES = """
from ropecheck.suites import Candidate

def rotate(x, cos, sin):
    raise AssertionError("nothing is called: the sanitizer is not real")

CANDIDATES = [
    Candidate(name="mine/first", contract="neox", run=rotate),
    Candidate(name="mine/second", contract="neox", run=rotate, dtypes=("float32",)),
]
"""

# Stands in for compute-sanitizer: it writes what the real one does around the marks of the process that it runs.
_FAKE = """
import json, os, signal, sys, time

HEADS = {
    "memcheck": "Invalid __global__ read of size 4 bytes", "racecheck": "Error: Race reported between Write access",
    "initcheck": "Uninitialized __global__ memory read of size 4 bytes",
    "synccheck": "Barrier error detected. Divergent thread(s) in block",
}
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1")
    raise SystemExit
tool = sys.argv[sys.argv.index("--tool") + 1]
request = json.load(open(sys.argv[-1]))
assert request["tool"] == tool
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and "TRITON_INTERPRET" not in os.environ
mode, planted = os.environ["FAKE"], json.loads(os.environ["FAKE_KERNELS"])[tool]
errors = 0

def say(text):
    print("=========", text, flush=True)

def mark(event, number, told=None):
    print(f"\\nropecheck-sanitized {event} {number} {json.dumps(told)}", flush=True)

def report(kernel):
    global errors
    errors += 1
    say(HEADS[tool])
    say(f"    at {kernel}+0x1a0 in kernels.py:42")
    say("    by thread (0,0,0) in block (0,0,0)")

def end(status=0):
    if mode != "cut":
        hazards = f"RACECHECK SUMMARY: {errors} hazards displayed ({errors} errors, 0 warnings)"
        say(hazards if tool == "racecheck" else f"ERROR SUMMARY: {errors} errors")
    if mode == "aborted":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit({"odd": 3, "errors": 99, "ended-badly": 134}.get(mode, status))

say("COMPUTE-SANITIZER")
if mode == "vanish":
    print("Segmentation fault")
    raise SystemExit(139)
for number, asked in request["cases"]:
    first = asked["candidate"] == "mine/first"
    mark("begin", number)
    if mode == "unsupported":
        say("Error: Device not supported. Please refer to the documentation.")
        print("RuntimeError: CUDA error: unknown error")
        end(1)
    if mode == "crash":
        say("Internal Sanitizer Error: the sanitizer encountered an error and needs to stop")
        raise SystemExit(1)
    if mode == "partial" and first:
        print("tuning 3 of 8", end=" ")
    if mode in ("found", "partial") and first:
        report("rotation_kernel")
    if mode == "deadly" and first:
        say("Error: process didn't terminate successfully")
        end(1)
    if mode == "hang" and first:
        time.sleep(60)
    mark("end", number, {"fault": "run raised ValueError: no"} if mode == "fault" and first else {})
mark("begin", "plant")
if mode == "late":
    report("rotation_kernel")
if mode != "blind":
    report(planted)
if mode == "ended-badly":
    say("Error: process didn't terminate successfully")
if mode == "early":
    say("ERROR SUMMARY: 1 error")
mark("end", "plant", {})
if mode == "early":
    raise SystemExit
if mode == "several":
    say("ERROR SUMMARY: 5 errors")
if mode == "hidden":
    errors += 1
if mode == "malformed":
    print("\\nropecheck-sanitized end 0 {")
if mode == "unasked":
    mark("begin", 99)
if mode == "unprinted":
    say("ERROR SUMMARY: 7 errors were not printed. Use --print-limit option to adjust the number of printed errors")
end()
"""


@dataclass(frozen=True)
class Listing:
    """The smoke plan's cases of the two candidates, and the candidates."""

    cases: list[sanitize.Asked]
    inventory: list[dict[str, Any]]


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Listing:
    """Listed once for all tests."""
    folder = tmp_path_factory.mktemp("listing")
    (folder / "two.py").write_text(_CANDIDATES)
    names = (str(folder / "two.py"),)
    cases = sanitize.questions(sanitize.Sanitizing(names, plan="smoke"), folder)
    return Listing(cases, expected(Run(names, Selection("smoke"))))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, listing: Listing) -> Asked:
    """``asked(mode, *options)``: exit status, verdicts and the run's record, with the fake in that mode."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\n{_FAKE}")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize_command, "questions", lambda what, folder: listing.cases)
    monkeypatch.setattr(sanitize_command, "expected", lambda run: listing.inventory)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setenv("FAKE_KERNELS", json.dumps(KERNELS))
    monkeypatch.setattr(sanitize, "obstacle", lambda path: "")

    def run(mode: str, *options: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        monkeypatch.setenv("FAKE", mode)
        status, out, err = command("sanitize", "two.py", "--out", "report", *options)
        assert status in (0, 1, 3), out + err
        found = load(tmp_path / "report")
        (document,) = found.documents
        return status, [v.as_json() for v in found.verdicts or ()], dict(document["run"])

    return run


def kinds(verdicts: list[dict[str, Any]], name: str) -> set[str]:
    return {v["verdict"] for v in verdicts if v["candidate"] == name}


def test_silence_passes_under_every_tool(asked: Asked, tmp_path: Path) -> None:
    """Every case passes under each tool, and the folder holds each tool's output and its planted fault."""
    status, verdicts, run = asked("clean")
    assert status == 0
    assert {v["verdict"] for v in verdicts} == {"pass"}
    assert {v["case"].rpartition("/")[2] for v in verdicts} == set(TOOLS)
    assert {v["judgement"] for v in verdicts} == {"sanitizer"}
    assert run["compute-sanitizer"] == "Version 2025.3.1"
    for tool in TOOLS:
        assert KERNELS[tool] in run["planted faults"][tool]
        assert KERNELS[tool] in (tmp_path / "report" / f"planted-{tool}.txt").read_text()
        assert "COMPUTE-SANITIZER" in (tmp_path / "report" / f"{tool}.txt").read_text()


def test_the_evidence_holds_the_cases_that_are_asked(asked: Asked, tmp_path: Path, listing: Listing) -> None:
    """What a machine without a GPU expects of the sanitizer is what one with a GPU writes, to the digest."""
    asked("found", "--plan", "smoke")
    (document,) = load(tmp_path / "report").documents
    wanted = {
        (c["name"], row["dtype"]): (row["count"], row["cases"])
        for c in listing.inventory for row in c["asked"] if row["judgement"] == "sanitizer"
    }  # fmt: skip
    found = {
        (cell["candidate"], cell["dtype"]): (cell.get("pass", 0) + cell.get("fail", 0), cell["cases"])
        for cell in document["cells"]
    }
    assert found == wanted
    assert document["judging"].keys() == {"sanitizer"}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_report_fails_the_case_in_which_it_came(asked: Asked, tool: str) -> None:
    """The candidate that is reported fails with what the tool says; the other passes."""
    status, verdicts, _ = asked("found", "--tool", tool)
    assert status == 1
    assert kinds(verdicts, "mine/first") == {"fail"}
    assert kinds(verdicts, "mine/second") == {"pass"}
    failed = next(v for v in verdicts if v["verdict"] == "fail")
    assert failed["facts"]["reports"] == 1
    assert "rotation_kernel" in failed["facts"]["first reports"][0]
    assert failed["reason"].split()[0] in ("Invalid", "Error:", "Uninitialized", "Barrier")


def test_a_report_behind_an_unfinished_line_is_seen(asked: Asked) -> None:
    """What a kernel prints without ending its line does not hide what the tool says on the same line."""
    status, verdicts, _ = asked("partial", "--tool", "memcheck")
    assert status == 1
    assert kinds(verdicts, "mine/first") == {"fail"}
    assert kinds(verdicts, "mine/second") == {"pass"}


@pytest.mark.parametrize("mode", ["errors", "ended-badly"])
def test_the_planted_fault_may_show_in_the_exit_status(asked: Asked, mode: str) -> None:
    """The tool's status for errors found, and that of a process which the plant ended, as the tool says, both pass."""
    status, verdicts, _ = asked(mode, "--tool", "memcheck")
    assert status == 0
    assert {v["verdict"] for v in verdicts} == {"pass"}


@pytest.mark.parametrize("line", ["", " begin", " begin x null", " end 0", " end 0 {", " end 0 5", " stop 0 null"])
def test_a_line_that_was_cut_is_doubt(line: str) -> None:
    """A line of the process that cannot be read raises nothing, and silence then proves nothing."""
    session = read(f"ropecheck-sanitized{line}\n========= ERROR SUMMARY: 0 errors\n", "memcheck")
    assert f"cannot be read: ropecheck-sanitized{line}" in session.doubt


def test_a_late_report_is_not_lost_in_the_plant(asked: Asked) -> None:
    """A report of another kernel that comes while the planted fault runs is charged to the last case."""
    status, verdicts, _ = asked("late", "--tool", "memcheck")
    assert status == 1
    assert [v["verdict"] for v in verdicts].count("fail") == 1
    assert kinds(verdicts, "mine/first") == {"pass"}


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("blind", "did not report the planted fault"),
        ("unsupported", "Device not supported"),
        ("crash", "Internal Sanitizer Error"),
        ("vanish", "ended early: Segmentation fault"),
        ("cut", "ended without a summary"),
        ("unprinted", "did not print all"),
        ("hidden", "counts 2 errors, and wrote of 1"),
        ("several", "counts 5 errors, and wrote of 1"),
        ("early", "ended without a summary"),
        ("aborted", "ended with status -9"),
        ("odd", "ended with status 3"),
        ("malformed", "cannot be read: ropecheck-sanitized end 0 {"),
        ("unasked", "began case 99, which was not asked"),
    ],
)
def test_a_tool_that_does_not_work_blocks(asked: Asked, mode: str, says: str) -> None:
    """Nothing passes, nothing fails, the reason is named, and the command exits 3."""
    status, verdicts, _ = asked(mode, "--tool", "memcheck")
    assert status == 3
    assert {v["verdict"] for v in verdicts} == {"blocked"}
    assert all(says in v["reason"] for v in verdicts)


@pytest.mark.parametrize(("mode", "says"), [("deadly", "the process died"), ("hang", "no answer within 1 s")])
def test_a_case_that_ends_its_process_fails_alone(asked: Asked, mode: str, says: str) -> None:
    """The other candidate's cases are asked in a further process, and pass."""
    status, verdicts, _ = asked(mode, "--tool", "memcheck", "--case-limit", "1")
    assert status == 1
    assert kinds(verdicts, "mine/first") == {"fail"}
    assert kinds(verdicts, "mine/second") == {"pass"}
    assert any(says in v["reason"] for v in verdicts)


def test_what_the_candidate_raises_fails(asked: Asked) -> None:
    """An error of the candidate's is its failure, under a tool as without one."""
    status, verdicts, _ = asked("fault", "--tool", "racecheck")
    assert status == 1
    assert {v["reason"] for v in verdicts if v["verdict"] == "fail"} == {"run raised ValueError: no"}


def test_without_the_tool_everything_is_blocked(command: Command, tmp_path: Path, monkeypatch: Any) -> None:
    """A machine without compute-sanitizer says so, in every cell, and exits 3."""
    (tmp_path / "two.py").write_text(_CANDIDATES)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    status, out, _ = command("sanitize", "two.py", "--plan", "smoke", "--json")
    assert status == 3
    verdicts = json.loads(out)["verdicts"]
    assert {v["verdict"] for v in verdicts} == {"blocked"}
    assert all("compute-sanitizer is not installed" in v["reason"] for v in verdicts)


def test_no_case_is_a_usage_error(command: Command, tmp_path: Path) -> None:
    """Asking for nothing is not a success."""
    (tmp_path / "two.py").write_text(_CANDIDATES)
    status, _, err = command("sanitize", "two.py", "--case", "no/such/case")
    assert status == 2
    assert "no case on a GPU" in err


def test_our_own_kernels_have_sixty_cases(tmp_path: Path) -> None:
    """Of both backends, in every dtype, forward and backward, in place, strided, misaligned."""
    cases = sanitize.questions(sanitize.Sanitizing(), tmp_path)
    assert len(cases) >= 60
    ids = [asked.case["id"] for asked in cases]
    for part in ("bfloat16", "float16", "float32", "/vjp", "misaligned", "end-of-allocation", "channels-stride-2"):
        assert any(part in id_ for id_ in ids), part
    names = {asked.candidate for asked in cases}
    assert {"triton", "cuda"} == {name.split("/")[1].split("-")[0] for name in names}
    assert any("pair" in name for name in names)
    assert any("in-place" in name for name in names)


def test_a_message_nobody_knows_is_a_report() -> None:
    """What a future tool finds is not mistaken for silence."""
    text = "ropecheck-sanitized begin 0 null\n========= A new kind of trouble\n=========     at kernel+0x10\n"
    session = read(text + "ropecheck-sanitized end 0 {}\n========= ERROR SUMMARY: 1 error\n", "memcheck")
    assert [report.head for report in session.reports[0]] == ["A new kind of trouble"]
