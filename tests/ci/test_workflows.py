"""The workflows as text: what act takes no notice of is checked here, and what a reviewer must not have to look for."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from ropecheck.ci.local import ACTIONS, RUNNERS, payload

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in sorted((GITHUB / "workflows").glob("*.yml"))}
CONSUMER = ROOT / "tests" / "consumer" / ".github" / "workflows" / "rope.yml"
FILES = [*WORKFLOWS.values(), *sorted((GITHUB / "actions").glob("*/action.yml"))]
LOCAL = sorted(ACTIONS.glob("*/action.yml"))
REQUIRED = ("contracts", "gpu-gate")
"""The workflows whose verdict is a required check."""

PINNED = re.compile(r"^\s*(?:- )?uses: (\S+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")


def read(path: Path) -> dict[str, Any]:
    """Everything as text: in YAML 1.1 the key ``on`` is a truth value."""
    table: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    return table


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [(name, job, body) for name, path in WORKFLOWS.items() for job, body in read(path)["jobs"].items()]


def steps(path: Path) -> list[dict[str, Any]]:
    table = read(path)
    bodies = table["jobs"].values() if "jobs" in table else [table["runs"]]
    return [step for body in bodies for step in body.get("steps", [])]


def scripts() -> list[tuple[str, str]]:
    paths = [*FILES, *LOCAL]
    return [(path.relative_to(ROOT).as_posix(), step["run"]) for path in paths for step in steps(path) if "run" in step]


def uses(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if re.match(r"\s*(- )?uses:", line)]


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    name, *rest = command
    return subprocess.run([str(Path(sys.executable).parent / name), *rest], capture_output=True, text=True, cwd=ROOT)


def test_the_workflows_are_those_that_the_documentation_names() -> None:
    """Every workflow has its row, and no row is left over."""
    rows = re.findall(r"^\| `([\w-]+)\.yml` \|", (ROOT / "docs" / "workflows.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(WORKFLOWS)


def test_every_action_is_pinned_to_a_commit_with_its_version() -> None:
    """A tag can be moved; what is not ours is named by a commit, everywhere the same, as the documentation lists it."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path in FILES:
        for line in uses(path):
            if re.search(r"uses: \./", line):
                continue
            pin = PINNED.match(line)
            assert pin is not None, f"{path.name}: {line.strip()}"
            found.setdefault(pin[1], set()).add((pin[2], pin[3]))
    rows = r"^\| `([\w./-]+)` \| (v[\d.]+) \| `([0-9a-f]{40})` \|"
    listed = re.findall(rows, (ROOT / "docs" / "workflows.md").read_text(), flags=re.MULTILINE)
    assert {name: {(commit, version)} for name, version, commit in listed} == found
    assert {name.partition("/")[0] for name in found} == {"actions"}
    assert len({commit for commits in found.values() for commit, _ in commits}) == len(found)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_permissions_are_given_job_by_job(name: str) -> None:
    """Nothing at the top; a job may read what it checks out, and two jobs of publish may write what they are for."""
    table = read(WORKFLOWS[name])
    assert table["permissions"] == {}
    for job, body in table["jobs"].items():
        granted = set(body["permissions"].items())
        more = {
            ("gpu-gate", "watchdog"): {("actions", "read")},
            ("publish", "attest"): {("attestations", "write"), ("id-token", "write")},
            ("publish", "deploy"): {("pages", "write"), ("id-token", "write")},
        }.get((name, job), set())
        assert granted <= {("contents", "read")} | more, job


def test_no_checkout_leaves_its_credentials_behind() -> None:
    """Later steps run code of the change, which must not find a token in .git/config."""
    checkouts = [step for path in FILES for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 10
    assert [step["with"]["persist-credentials"] for step in checkouts] == ["false"] * len(checkouts)


def test_every_job_has_a_time_limit() -> None:
    """GitHub's own limit is six hours; a job that calls a workflow has that one's."""
    for name, job, body in jobs():
        assert "uses" in body or 1 <= int(body["timeout-minutes"]) <= 180, f"{name}: {job}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_runs_of_one_pull_request_share_a_group(name: str) -> None:
    """A later push replaces the run of an earlier one, but never in the middle of a GPU's evidence."""
    concurrency = read(WORKFLOWS[name])["concurrency"]
    if "pull_request" in read(WORKFLOWS[name])["on"] or name == "verify":
        assert "github.event.pull_request.number || github.run_id" in concurrency["group"]
    if name in ("gpu-gate", "verify", "publish"):
        assert concurrency["cancel-in-progress"] == "false"


def test_no_expression_is_written_into_a_script() -> None:
    """A branch called $(..) is text in a variable, and a command where an expression pastes it into a script."""
    assert [where for where, script in scripts() if "${{" in script] == []
    assert len(scripts()) > 20


def test_scripts_are_short_and_parse() -> None:
    """The logic is in ropecheck; what is left is a call, or one of the local stand-ins."""
    for where, script in scripts():
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert where.startswith("ci/local_actions/") or len(script.splitlines()) <= 5, where
    assert subprocess.run(["bash", "-n", str(GITHUB / "install.sh")]).returncode == 0


def test_commands_are_ropecheck_s() -> None:
    """Every subcommand that a workflow calls is one that there is."""
    from ropecheck.ci.cli import main

    names = re.compile(r"ropecheck ([a-z]+(?: (?:local|watchdog|merge))?)\b")
    ours = [script for where, script in scripts() if where.startswith(".github")]
    called = {command for script in ours for command in names.findall(script)}
    assert {"verify", "gate", "sensitivity", "sanitize", "contracts", "ci watchdog", "evidence merge"} <= called
    for command in called:
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0, command


@pytest.mark.parametrize("name", REQUIRED)
def test_the_verdict_is_reached_whatever_happened(name: str) -> None:
    """A skipped job satisfies a required check: the verdict's only condition is always(), and it needs every job."""
    table = read(WORKFLOWS[name])["jobs"]
    verdict = table["verdict"]
    assert verdict["if"] == "always()"
    assert set(verdict["needs"]) == set(table) - {"verdict"}
    (gate,) = [step for step in verdict["steps"] if "ropecheck gate" in step.get("run", "")]
    assert "--needs" in gate["run"]
    assert gate["env"]["NEEDS"] == "${{ toJSON(needs) }}"
    assert "if" not in gate


def test_nothing_fails_unseen() -> None:
    """No job or step goes on over an error, and conditions are the few that are meant."""
    for path in FILES:
        assert "continue-on-error" not in path.read_text()
        assert {step["if"] for step in steps(path) if "if" in step} <= {
            "always()", "${{ !env.ACT }}", "inputs.packages == 'download'", "inputs.devices != 'none'",
            "always() && inputs.devices != 'none'",
        }  # fmt: skip
    labelled = "github.event_name != 'pull_request' || contains(github.event.pull_request.labels.*.name, 'gpu')"
    conditions = {(name, job): body["if"] for name, job, body in jobs() if "if" in body}
    assert conditions == {
        ("contracts", "verdict"): "always()", ("gpu-gate", "verdict"): "always()", ("gpu-gate", "gpu"): labelled,
    }  # fmt: skip


def test_what_act_sees_skips_downloads_alone() -> None:
    """A condition on ACT is no way around a check: it stands before one pip install, and in install.sh."""
    skipped = [step for path in FILES for step in steps(path) if "ACT" in step.get("if", "")]
    assert [step["run"].startswith("python -m pip install") for step in skipped] == [True]
    assert "".join(path.read_text() for path in FILES).count("env.ACT") == 1


def test_no_event_gives_a_stranger_s_code_rights() -> None:
    """pull_request_target and workflow_run act with the repository's own rights; no secret is named."""
    for path in FILES:
        text = path.read_text()
        assert "secrets." not in text
        assert "secrets:" not in text
        if path.parent.name == "workflows":
            assert set(read(path)["on"]) <= {
                "pull_request", "push", "merge_group", "workflow_call", "workflow_dispatch", "schedule",
            }  # fmt: skip


def test_gpu_jobs_of_forks_wait_for_approval() -> None:
    """The one job on a self-hosted machine has an environment, which for a fork is the one that asks for approval."""
    machines = {(name, job): body for name, job, body in jobs() if "self-hosted" in body.get("runs-on", "")}
    (body,) = [machines[key] for key in machines]
    assert body["environment"] == "${{ github.event.pull_request.head.repo.fork && 'gpu-fork' || 'gpu' }}"
    assert "runs-on" not in {key for key in body if key == "container"}


def test_required_workflows_have_no_path_filter() -> None:
    """A required check whose run is filtered away stays open for ever, and whoever lifts it lifts it for all."""
    for name in REQUIRED:
        table = read(WORKFLOWS[name])["on"]
        assert {"merge_group", "pull_request"} <= set(table)
        assert not {"paths", "paths-ignore", "branches", "branches-ignore"} & set(table["pull_request"] or {})
        assert not table["merge_group"]


def tracked() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_path_filters_are_complete() -> None:
    """Every tracked file that is installed, or that an installation is made with, matches where paths are named."""
    filtered = {
        name: event["paths"]
        for name, path in WORKFLOWS.items()
        for event in read(path)["on"].values()
        if isinstance(event, dict) and "paths" in event
    }
    assert set(filtered) == {"upstream"}
    installed = ("oracle/", "kernels/", "suites/", "ci/")
    # What cannot change what an installed ropecheck answers. A file of a new kind has to be put on one side.
    others = ("docs/", "tests/", "evidence/", ".ci/", ".github/")
    loose = {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "MANIFEST.in", "mkdocs.yml", ".gitignore"}
    for name, paths in filtered.items():
        needed = [f for f in tracked() if not f.startswith(others) and f not in loose]
        needed += [".github/install.sh", f".github/workflows/{name}.yml"]
        assert {f.split("/")[0] + "/" for f in needed} >= set(installed)
        missed = [f for f in needed if not any(fnmatchcase(f, pattern.replace("**", "*")) for pattern in paths)]
        assert missed == []


def test_every_label_is_served_locally() -> None:
    """A job without a runner has no result: the labels of our workflows are those of a local run."""
    labels = {body["runs-on"] for name, _, body in jobs() if isinstance(body.get("runs-on"), str) and name != "verify"}
    inputs = read(WORKFLOWS["verify"])["on"]["workflow_call"]["inputs"]
    assert labels | {inputs["runner"]["default"]} <= set(RUNNERS)
    assert '["ropecheck-gpu"]' in WORKFLOWS["gpu-gate"].read_text()


def test_every_action_has_a_local_stand_in_that_knows_its_inputs() -> None:
    """An input that a stand-in does not know would be dropped in silence."""
    for path in FILES:
        for step in steps(path):
            if (used := step.get("uses", "")).startswith("actions/"):
                name = used.partition("@")[0].partition("/")[2]
                known = read(ACTIONS / name / "action.yml").get("inputs", {})
                assert name in ("attest", "deploy-pages") or set(step.get("with", {})) <= set(known), used


def test_reusable_workflow_and_action_take_the_same_inputs() -> None:
    """The workflow hands every input of the action on, under its name, and adds runner and Python."""
    action = read(GITHUB / "actions" / "verify" / "action.yml")
    called = read(WORKFLOWS["verify"])["on"]["workflow_call"]
    assert set(called["inputs"]) == set(action["inputs"]) - {"directory"} | {"runner", "python"}
    assert set(called["outputs"]) == set(action["outputs"]) == {"verdict", "evidence"}
    (step,) = [s for s in steps(WORKFLOWS["verify"]) if s.get("uses", "").endswith("/actions/verify")]
    given = step["with"]
    assert set(given) == set(action["inputs"])
    assert all(given[name] == f"${{{{ inputs.{name} }}}}" for name in set(given) - {"directory"})


def test_the_documentation_lists_every_input() -> None:
    """The page for other repositories names the inputs of the workflow, and no other."""
    page = (ROOT / "docs" / "gate-your-repository.md").read_text()
    table = page.partition("| input | what |")[2].partition("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(read(WORKFLOWS["verify"])["on"]["workflow_call"]["inputs"])


def test_torch_comes_from_one_place() -> None:
    """The index of builds without CUDA is one variable, everywhere the same."""
    texts = [path.read_text() for path in (*FILES, GITHUB / "install.sh")]
    found = {address for text in texts for address in re.findall(r"https://download\.[\w./]+", text)}
    assert found == {"https://download.pytorch.org/whl/cpu"}


def test_payloads_are_of_a_labelled_pull_request() -> None:
    """A local run on a pull request is one that the GPU job takes."""
    assert payload("pull_request", {})["pull_request"]["labels"] == [{"name": "gpu"}]
    assert payload("pull_request", {})["pull_request"]["head"]["repo"]["fork"] is False


def test_zizmor_has_no_finding() -> None:
    """Its strictest persona for what concerns everybody; the one audit that is off is named with its reason."""
    assert read(GITHUB / "zizmor.yml") == {"rules": {"self-repository": {"disable": "true"}}}
    done = tool("zizmor", "--offline", "--no-progress", "--pedantic", str(GITHUB))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No findings to report" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", [*WORKFLOWS.values(), CONSUMER]),
        ("vendor.github-actions", [*FILES[len(WORKFLOWS) :], *LOCAL]),
    ],
    ids=["workflows", "actions"],
)
def test_files_follow_github_s_schema(schema: str, files: list[Path]) -> None:
    """The schemas come with check-jsonschema: no network."""
    assert files
    done = tool("check-jsonschema", "--builtin-schema", schema, *map(str, files))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_check_sees_a_slip() -> None:
    """The check that passes above can fail: a job without a runner is none."""
    text = WORKFLOWS["upstream"].read_text().replace("    runs-on: ubuntu-24.04\n", "")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows", "-"],
        input=text, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
