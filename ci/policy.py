"""Policies: which cells of candidate x judgement x device a run must have passed.

A TOML file::

    [[require]]
    candidates = ["ropecheck/*"]
    judgements = ["accuracy-forward", "accuracy-vjp"]
    devices = ["cpu"]
    cases = 8            # least number of passed cases in each cell and dtype

A required cell that is missing, blocked, failed, or not applicable for want of a claim is not met.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ropecheck.suites.candidates import DEVICES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.verdicts import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class PolicyError(ValueError):
    """A policy file cannot be used. The message is one sentence."""


@dataclass(frozen=True)
class Requirement:
    """Cells that must be passed: every matching candidate with every judgement on every device."""

    candidates: tuple[str, ...]
    judgements: tuple[str, ...]
    devices: tuple[str, ...]
    cases: int = 1


@dataclass(frozen=True)
class Unmet:
    """A required cell that is not passed. ``blocked`` says that it could not run, rather than failed."""

    cell: str
    reason: str
    blocked: bool


def load_policy(path: Path) -> list[Requirement]:
    """The requirements of a policy file. Raises :class:`PolicyError`."""
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise PolicyError(f"--policy {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"--policy {path} is not TOML: {error}") from None
    entries = table.pop("require", [])
    if table or not entries or not isinstance(entries, list):
        raise PolicyError(f"--policy {path} must hold [[require]] tables and nothing else")
    return [_requirement(path, entry) for entry in entries]


def _requirement(path: Path, entry: dict[str, Any]) -> Requirement:
    known = {"candidates": None, "judgements": tuple(JUDGEMENTS), "devices": DEVICES}
    for key, allowed in known.items():
        values = entry.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
            raise PolicyError(f"--policy {path}: {key} must be a list of strings in every [[require]]")
        for value in values:
            if allowed is not None and value not in allowed:
                raise PolicyError(f"--policy {path}: {key} holds {value!r}, which is none of {', '.join(allowed)}")
    cases = entry.get("cases", 1)
    if not isinstance(cases, int) or cases < 1:
        raise PolicyError(f"--policy {path}: cases must be a number from 1 on, not {cases!r}")
    if unknown := set(entry) - {*known, "cases"}:
        raise PolicyError(f"--policy {path}: unknown key {sorted(unknown)[0]!r}")
    return Requirement(tuple(entry["candidates"]), tuple(entry["judgements"]), tuple(entry["devices"]), cases)


def unmet(requirements: Sequence[Requirement], verdicts: Sequence[Verdict]) -> Iterator[Unmet]:
    """The required cells that ``verdicts`` do not show as passed, each with its reason."""
    names = sorted({v.candidate for v in verdicts})
    for requirement in requirements:
        for pattern in requirement.candidates:
            matching = [n for n in names if fnmatchcase(n, pattern)]
            if not matching:
                yield Unmet(pattern, "no candidate of that name was judged", True)
            for name in matching:
                for judgement in requirement.judgements:
                    for device in requirement.devices:
                        cell = [
                            v for v in verdicts if (v.candidate, v.judgement, v.device) == (name, judgement, device)
                        ]
                        yield from _unmet(f"{name} x {judgement} x {device}", cell, requirement.cases)


def _unmet(cell: str, verdicts: Sequence[Verdict], cases: int) -> Iterator[Unmet]:
    if not verdicts:
        yield Unmet(cell, "missing: no case was judged", True)
    for kind, blocked in (("fail", False), ("blocked", True), ("not-applicable", False)):
        found = [v for v in verdicts if v.verdict == kind]
        if found:
            yield Unmet(cell, f"{len(found)} {kind}: {found[0].reason}", blocked)
            return
    for dtype, count in Counter(v.dtype for v in verdicts).items():
        if count < cases:
            yield Unmet(cell, f"{count} cases in {dtype}, {cases} are required", True)
