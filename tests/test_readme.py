"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.M | re.S)
CANDIDATE = next(text for _, text in BLOCKS if "CANDIDATES = [" in text)
CHANGED_LINE = next(text for _, text in BLOCKS if text.lstrip().startswith("c, s = ("))
FAILURE = next(text for _, text in BLOCKS if text.startswith("fail mylib/rope"))


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropecheck.ci", "verify", "my_rope.py", "--plan", "smoke", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_candidate_has_ten_lines_and_passes(tmp_path: Path) -> None:
    """The file is as short as promised and right."""
    assert len(CANDIDATE.splitlines()) <= 10
    (tmp_path / "my_rope.py").write_text(CANDIDATE)
    done = verify(tmp_path, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr


def test_failure_looks_as_shown(tmp_path: Path) -> None:
    """Line for line the same, but for numbers, which depend on the machine's table bytes."""
    good = next(line for line in CANDIDATE.splitlines(keepends=True) if "c, s = " in line)
    (tmp_path / "my_rope.py").write_text(CANDIDATE.replace(good, CHANGED_LINE))
    done = verify(tmp_path, "--judgement", "accuracy-forward", "--dtype", "bfloat16")
    assert done.returncode == 1, done.stdout + done.stderr
    shape = re.compile(r"-?0x[0-9a-f.p+-]+|-?\d[\d.e+-]*")
    shown = [shape.sub("#", line) for line in FAILURE.splitlines()]
    came = [shape.sub("#", line) for line in done.stdout.splitlines()]
    start = came.index(shown[0])
    assert came[start : start + len(shown)] == shown


def test_every_claim_is_listed() -> None:
    """The README's list of claims is the code's."""
    from ropecheck.suites.candidates import CLAIMS

    listed = re.search(r"lists what you claim \((.*?)\)", README, flags=re.S)
    assert listed is not None
    assert re.findall(r"`([\w-]+)`", listed.group(1)) == list(CLAIMS)
