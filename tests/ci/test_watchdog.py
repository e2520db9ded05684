"""The watch over a hosted run's queue, against a server that answers as GitHub's API does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci.cli import main
from ropecheck.ci.watchdog import HostedRun, WatchdogError, state_of, watch

LINT = {"name": "Lint", "status": "completed"}


def gpu(status: str, name: str = "GPU job on a") -> dict[str, Any]:
    return {"name": name, "status": status}


@dataclass
class Server:
    """What was asked, with which token, and what is answered: the last answer for ever."""

    address: str = ""
    answers: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def jobs(self, *jobs: dict[str, Any]) -> None:
        self.answers.append((200, json.dumps({"total_count": len(jobs), "jobs": jobs})))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and the variables of a hosted run that has it for its API."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers.get("Authorization", "")))
            status, body = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    for name in ("ACT", "GITHUB_OUTPUT", "GITHUB_ACTIONS", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    variables = {"GITHUB_API_URL": state.address, "GITHUB_REPOSITORY": "some/kernels", "GITHUB_RUN_ID": "7",
                 "GITHUB_RUN_ATTEMPT": "2", "GITHUB_TOKEN": "token"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield state
    listening.shutdown()
    listening.server_close()


@pytest.mark.parametrize(
    ("jobs", "state"),
    [
        ([LINT, gpu("in_progress")], "taken"),
        ([gpu("completed")], "taken"),
        ([gpu("queued")], "no-runner"),
        ([gpu("requested")], "no-runner"),
        ([gpu("pending")], "no-runner"),
        ([gpu("waiting")], "awaiting-approval"),
        ([gpu("in_progress"), gpu("queued", "GPU job on b")], "no-runner"),
        ([gpu("completed"), gpu("waiting", "GPU job on b")], "awaiting-approval"),
        ([LINT], "unknown"),
        ([], "unknown"),
    ],
)
def test_every_job_must_be_taken(jobs: list[dict[str, Any]], state: str) -> None:
    """One job of a matrix that waits is enough, and jobs that are not listed have shown nothing."""
    assert state_of(jobs, "GPU job") == state


def test_it_waits_as_long_as_it_is_told_and_no_longer() -> None:
    """A job that is taken at last is taken; one that never is has waited the whole time."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        assert seconds > 0
        now[0] += seconds

    def later() -> list[dict[str, Any]]:
        return [gpu("queued" if now[0] < 1000 else "in_progress")]

    assert watch(later, "GPU job", 1200, clock=lambda: now[0], sleep=sleep)[0] == "taken"
    assert 1000 <= now[0] < 1200
    now[0] = 0.0
    state, sentence = watch(lambda: [gpu("queued")], "GPU job", 1200, clock=lambda: now[0], sleep=sleep)
    assert (state, sentence) == ("no-runner", "no runner took the job")
    assert now[0] == 1200


def test_a_question_that_fails_is_asked_again() -> None:
    """The API may be away for a moment; where it stays away there is no answer, which is no good one."""
    answers: list[Any] = [WatchdogError("GitHub could not be asked: gone"), [gpu("in_progress")]]

    def jobs() -> list[dict[str, Any]]:
        answer = answers.pop(0)
        if isinstance(answer, WatchdogError):
            raise answer
        return list(answer)

    assert watch(jobs, "GPU job", 60, pause=0.01)[0] == "taken"

    def away() -> list[dict[str, Any]]:
        raise WatchdogError("GitHub could not be asked: gone")

    assert watch(away, "GPU job", 0) == ("unknown", "GitHub could not be asked: gone")


def test_a_job_that_was_taken_ends_the_watch(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This attempt of this run is asked about, with the job's token; the outputs say that nothing waits."""
    server.jobs(LINT, gpu("in_progress"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    assert main(["ci", "watchdog", "GPU job"]) == 0
    assert server.asked == [("/repos/some/kernels/actions/runs/7/attempts/2/jobs?per_page=100", "Bearer token")]
    assert (tmp_path / "output").read_text() == "no-runner=false\nawaiting-approval=false\n"


@pytest.mark.parametrize(("status", "output"), [("queued", "no-runner"), ("waiting", "awaiting-approval")])
def test_a_job_that_waits_is_red(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    status: str, output: str,
) -> None:  # fmt: skip
    """Exit status, annotation and output; the gate's --needs takes the output for why evidence is pending."""
    from ropecheck.ci.needs import of_context

    server.jobs(gpu(status))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["ci", "watchdog", "GPU job", "--minutes", "0"]) == 1
    assert "::error title=ropecheck ci watchdog::GPU job: " in capsys.readouterr().out
    outputs = dict(line.split("=") for line in (tmp_path / "output").read_text().splitlines())
    assert [name for name, value in outputs.items() if value == "true"] == [output]
    # What GitHub makes of a job that has waited for a day.
    needs = {"gpu": {"result": "cancelled", "outputs": {}}, "watchdog": {"result": "failure", "outputs": outputs}}
    _, pending = of_context(json.dumps(needs))
    assert {"no-runner": "no GPU runner took the job", "awaiting-approval": "awaits approval"}[output] in pending


@pytest.mark.parametrize("answer", [(403, "{}"), (200, "no JSON"), (200, "[]"), (200, "{}"), (200, '{"jobs": 3}')])
def test_an_answer_that_says_nothing_is_red(server: Server, answer: tuple[int, str]) -> None:
    """A refusal, or what is no list of jobs, is not taken for jobs that run."""
    server.answers.append(answer)
    assert main(["ci", "watchdog", "GPU job", "--minutes", "0"]) == 1


def test_outside_a_hosted_run_it_says_what_is_missing(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a token there is no watch, and the sentence names the variable."""
    monkeypatch.delenv("GITHUB_TOKEN")
    assert main(["ci", "watchdog", "GPU job"]) == 2
    assert "GITHUB_TOKEN is not set" in capsys.readouterr().err
    assert server.asked == []
    with pytest.raises(WatchdogError, match="GITHUB_API_URL"):
        HostedRun.of({})


def test_a_local_run_has_no_queue(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under act nothing is asked: a job whose label is not served has no result, which the verdict sees by itself."""
    monkeypatch.setenv("ACT", "true")
    assert main(["ci", "watchdog", "GPU job"]) == 0
    assert server.asked == []
