"""What act is given, and what its log is taken for."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ropecheck.ci.cli import main
from ropecheck.ci.local import (
    ACTIONS,
    LocalRun,
    LocalRunError,
    Outcome,
    act_command,
    check_inputs,
    environment,
    replacements,
    repository_root,
    workflows,
)

COMMIT = "0123456789" * 4
WORKFLOW = f"""
on: [push]
jobs:
  first:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@{COMMIT} # v1.0.0
      - {{uses: "./here"}}
  second:
    runs-on: ubuntu-24.04
    steps: []
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / ".github" / "workflows").mkdir(parents=True)
    (folder / ".github" / "workflows" / "work.yml").write_text(WORKFLOW)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


@pytest.fixture
def act(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An act that writes the lines of a file and ends with the status in another."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "act"
    script.write_text(f'#!/bin/sh\ncat "{folder}/log"\nexit "$(cat "{folder}/status")"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("ropecheck.ci.local.sys.executable", str(folder / "python"))
    monkeypatch.chdir(repository)
    return folder


def lines(act: Path, status: int, *entries: dict[str, object] | str) -> None:
    (act / "log").write_text("".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in entries))
    (act / "status").write_text(str(status))


def result(job: str, value: str, name: str = "") -> dict[str, object]:
    return {"job": f"work/{name or job}  ", "jobID": job, "jobResult": value, "msg": "over"}


def test_third_party_actions_are_replaced_at_their_pins(repository: Path) -> None:
    """The stand-in is found under the very commit that the workflow names; what is in the repository stays."""
    assert replacements(LocalRun(repository, "work")) == {f"actions/checkout@{COMMIT}": ACTIONS / "checkout"}


@pytest.mark.parametrize("used", ["actions/cache", "somebody/checkout"])
def test_an_action_without_a_stand_in_is_refused(repository: Path, used: str) -> None:
    """It would be downloaded otherwise, or fail late."""
    file = repository / ".github" / "workflows" / "work.yml"
    file.write_text(WORKFLOW.replace("actions/checkout", used))
    with pytest.raises(LocalRunError, match=f"{used} has no local replacement"):
        replacements(LocalRun(repository, "work"))


def test_a_named_repository_comes_from_its_folder(repository: Path, tmp_path: Path) -> None:
    """With its actions and workflows, and the stand-ins for what those take from others."""
    file = repository / ".github" / "workflows" / "work.yml"
    file.write_text(f"jobs:\n  first:\n    uses: some/judge/.github/workflows/verify.yml@{'a' * 40} # v2.0.0\n")
    judge = tmp_path / "judge" / ".github" / "workflows"
    judge.mkdir(parents=True)
    (judge / "verify.yml").write_text(WORKFLOW)
    run = LocalRun(repository, "work", repository=("some/judge", tmp_path / "judge"))
    assert replacements(run) == {
        f"some/judge@{'a' * 40}": tmp_path / "judge",
        f"actions/checkout@{COMMIT}": ACTIONS / "checkout",
    }
    assert environment(run, tmp_path)["ROPECHECK_LOCAL_REPOSITORY"] == str(tmp_path / "judge")


def test_labels_are_served_without_containers(act: Path, repository: Path, tmp_path: Path) -> None:
    """Every label that is served is this machine itself, and no file that lies about is read."""
    command = act_command(LocalRun(repository, "work", event="push", runners=("one", "two")), tmp_path)
    platforms = [value for option, value in pairwise(command) if option == "--platform"]
    assert platforms == ["one=-self-hosted", "two=-self-hosted"]
    for option in ("--env-file", "--secret-file", "--var-file", "--input-file"):
        assert Path(command[command.index(option) + 1]).read_bytes() == b""
    assert command[:2] == [str(act / "act"), "push"]


def test_inputs_are_part_of_the_event(repository: Path, tmp_path: Path, act: Path) -> None:
    """As GitHub has it. One that the workflow does not name would be dropped in silence, and so is refused."""
    file = repository / ".github" / "workflows" / "work.yml"
    file.write_text(WORKFLOW.replace("[push]", "{workflow_dispatch: {inputs: {size: {type: string}}}}"))
    run = LocalRun(repository, "work", event="workflow_dispatch", inputs={"size": "small"})
    check_inputs(run)
    command = act_command(run, tmp_path)
    assert json.loads(Path(command[command.index("--eventpath") + 1]).read_text())["inputs"] == {"size": "small"}
    with pytest.raises(LocalRunError, match="no input colour; its inputs are size"):
        check_inputs(replace(run, inputs={"colour": "red"}))
    with pytest.raises(LocalRunError, match="inputs are for the event workflow_dispatch, not for push"):
        check_inputs(replace(run, event="push"))


def test_every_job_succeeded_is_green(act: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 0, and the answer says what kind of run it was."""
    lines(act, 0, result("first", "success"), result("second", "success", "Second"), "last words")
    assert main(["ci", "local", "--json", "--workflow", "work", "--event", "push"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"event": "push", "jobs": {"Second": "success", "first": "success"}, "runner": "local workflow",
                    "workflow": "work"}  # fmt: skip


def test_a_failed_job_is_red(act: Path) -> None:
    """Whatever act's own status says."""
    lines(act, 0, result("first", "failure"), result("second", "success"))
    assert main(["ci", "local", "--workflow", "work", "--event", "push"]) == 1


def test_a_job_without_a_result_is_red(act: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """act ends with 0 where nobody serves a label: nothing was shown."""
    lines(act, 0, result("first", "success"), {"job": "work/second", "jobID": "second", "msg": "Skipping"})
    assert main(["ci", "local", "--workflow", "work", "--event", "push"]) == 1
    out = capsys.readouterr().out
    assert "no result" in out
    assert "it is no hosted one" in out


def test_a_called_workflow_s_jobs_must_have_results_too(
    act: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that calls a workflow whose runner is nobody's leaves no word of its own."""
    folder = repository / ".github" / "workflows"
    (folder / "caller.yml").write_text("on: [push]\njobs:\n  calls: {uses: ./.github/workflows/work.yml}\n")
    lines(act, 0, result("first", "success"))
    assert main(["ci", "local", "--json", "--workflow", "caller", "--event", "push"]) == 1
    assert json.loads(capsys.readouterr().out)["jobs"] == {"first": "success", "second": "no result"}


def test_act_that_fails_without_a_failed_job_is_an_error(act: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A workflow that act cannot read has no jobs that failed."""
    lines(act, 1, result("first", "success"), result("second", "success"))
    assert main(["ci", "local", "--workflow", "work", "--event", "push"]) == 2
    assert "act ended with status 1" in capsys.readouterr().err
    assert not Outcome().green


def test_a_log_cannot_write_to_the_terminal(act: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a job prints is shown as text: no escape sequence, no markup, no workflow command of an outer run."""
    hostile = {"job": "work/first", "jobID": "first", "raw_output": True, "msg": "\x1b[2J[red]a[/] ::error::b"}
    lines(act, 0, hostile, result("first", "success"), result("second", "success"))
    assert main(["ci", "local", "--workflow", "work", "--event", "push"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "[red]a[/]" in out
    assert "::error" not in out


def test_what_cannot_be_run_is_said_in_one_sentence(
    act: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such workflow, no act, no repository."""
    assert workflows(repository) == ["work"]
    assert main(["ci", "local", "--workflow", "other"]) == 2
    assert "no workflow other" in capsys.readouterr().err
    (act / "act").unlink()
    monkeypatch.setenv("PATH", os.defpath)
    assert main(["ci", "local", "--workflow", "work"]) == 2
    assert "act is not installed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(LocalRunError, match="is in no git repository"):
        repository_root(tmp_path)
