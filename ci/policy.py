"""Policies: which cells of candidate x judgement x device a run must have passed, and which few may be blocked.

A TOML file, see ``docs/policies.md``::

    plan = "standard"    # every case of this plan, or of a larger one, is asked

    [needs]              # what the machine must have
    gpu = true

    [[require]]
    candidates = ["ropecheck/*"]
    judgements = ["accuracy-forward", "accuracy-vjp"]
    devices = ["cuda"]
    cases = 8            # least number of passed cases in each cell and dtype
    dtypes = ["bfloat16", "float16"]    # dtypes that must each have that many; others that were asked must as well
    claims = ["strided"]                # what each candidate must claim

    [[may_block]]
    candidates = ["ropecheck/*"]
    judgements = ["device-guard"]
    devices = ["cuda"]
    gpus = 1             # only on a machine with no more GPUs than this
    reason = "one GPU cannot be confused with another"

A required cell that is missing, blocked without permission, failed, or not applicable for want of a claim is not met.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ropecheck.suites.candidates import CLAIMS, DEVICES, DTYPES
from ropecheck.suites.cases import PLANS
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judgements.sanitizer import SANITIZER
from ropecheck.suites.verdicts import Verdict, count

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NEEDS = ("gpu", "triton", "native")
"""What a policy can ask of the machine: an NVIDIA GPU, Triton, our native library."""

_FOLDER = files(__package__) / "policies"


class PolicyError(ValueError):
    """A policy cannot be used, or not with the other options. The message is one sentence."""


@dataclass(frozen=True)
class Requirement:
    """Cells that must be passed: every matching candidate with every judgement on every device.

    ``cases`` is the least number of passed cases in each of ``dtypes`` and in each other dtype that was asked;
    ``claims`` is what each candidate must claim.
    """

    candidates: tuple[str, ...]
    judgements: tuple[str, ...]
    devices: tuple[str, ...]
    cases: int = 1
    dtypes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Permission:
    """Cells that may be blocked, and why; with ``gpus``, only on a machine that has no more GPUs than that."""

    candidates: tuple[str, ...]
    judgements: tuple[str, ...]
    devices: tuple[str, ...]
    reason: str
    gpus: int | None = None

    def covers(self, candidate: str, judgement: str, device: str, gpus: int) -> bool:
        """Whether the cell may be blocked on a machine with that many GPUs."""
        named = any(fnmatchcase(candidate, pattern) for pattern in self.candidates)
        here = self.gpus is None or gpus <= self.gpus
        return named and here and judgement in self.judgements and device in self.devices


@dataclass(frozen=True)
class Policy:
    """What a run is held to. ``sha256`` is that of the file; an empty ``plan`` leaves the choice to the run."""

    name: str
    requirements: tuple[Requirement, ...]
    permissions: tuple[Permission, ...] = ()
    needs: tuple[str, ...] = ()
    plan: str = ""
    sha256: str = ""

    @property
    def devices(self) -> list[str]:
        """The devices that some requirement names."""
        return [d for d in DEVICES if any(d in requirement.devices for requirement in self.requirements)]

    def requires(self, candidate: str) -> bool:
        """Whether some requirement names the candidate."""
        return any(fnmatchcase(candidate, p) for requirement in self.requirements for p in requirement.candidates)


@dataclass(frozen=True)
class RequiredCell:
    """One required cell and what became of it: ``permitted`` is blocked with the policy's permission."""

    cell: str
    state: Literal["passed", "permitted", "failed", "not-applicable", "blocked", "missing"]
    reason: str = ""

    @property
    def met(self) -> bool:
        return self.state in ("passed", "permitted")

    @property
    def could_not_run(self) -> bool:
        return self.state in ("blocked", "missing")


def shipped_policies() -> list[str]:
    """The names that ``--policy`` takes without a file."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def load_policy(name: str) -> Policy:
    """The policy in FILE.toml, or the shipped one of that name. Raises :class:`PolicyError`."""
    shipped = shipped_policies()
    source = _FOLDER / f"{name}.toml" if name in shipped else Path(name)
    if name not in shipped and not name.endswith(".toml"):
        raise PolicyError(f"--policy must be FILE.toml or one of {', '.join(shipped)}, not {name!r}")
    try:
        content = source.read_bytes()
        table: dict[str, Any] = tomllib.loads(content.decode())
    except OSError as error:
        raise PolicyError(f"--policy {name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PolicyError(f"--policy {name} is not TOML: {' '.join(str(error).split())}") from None
    entries = table.get("require")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise PolicyError(f"--policy {name} must hold at least one [[require]] table")
    if unknown := set(table) - {"require", "may_block", "needs", "plan"}:
        raise PolicyError(f"--policy {name}: unknown key {sorted(unknown)[0]!r}")
    if "plan" in table and table["plan"] not in PLANS:
        plan = table["plan"]
        raise PolicyError(f"--policy {name}: plan must be one of {', '.join(PLANS)}, not {plan!r}")
    return Policy(
        name=name,
        requirements=tuple(_requirement(name, entry) for entry in entries),
        permissions=tuple(_permission(name, entry) for entry in _tables(name, table.get("may_block", []))),
        needs=_needs(name, table.get("needs", {})),
        plan=table.get("plan", ""),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _tables(name: str, entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PolicyError(f"--policy {name}: may_block must be written as [[may_block]] tables")
    return entries


def _needs(name: str, table: Any) -> tuple[str, ...]:
    if not isinstance(table, dict) or not all(value is True for value in table.values()):
        raise PolicyError(f"--policy {name}: [needs] must hold lines such as 'gpu = true' and nothing else")
    if unknown := set(table) - set(NEEDS):
        raise PolicyError(f"--policy {name}: needs {sorted(unknown)[0]!r}, which is none of {', '.join(NEEDS)}")
    return tuple(need for need in NEEDS if need in table)


def _cells(name: str, where: str, entry: dict[str, Any], more: set[str]) -> dict[str, tuple[str, ...]]:
    """The three lists that name cells; every other key of ``entry`` must be one of ``more``."""
    known = {"candidates": None, "judgements": tuple(JUDGEMENTS), "devices": DEVICES}
    for key, allowed in known.items():
        values = entry.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
            raise PolicyError(f"--policy {name}: {key} must be a list of strings in every [[{where}]]")
        for value in values:
            if key == "judgements" and value == SANITIZER:
                raise PolicyError(f"--policy {name}: {SANITIZER} is run by ropecheck sanitize, not under a policy")
            if allowed is not None and value not in allowed:
                raise PolicyError(f"--policy {name}: {key} holds {value!r}, which is none of {', '.join(allowed)}")
    if unknown := set(entry) - {*known, *more}:
        raise PolicyError(f"--policy {name}: unknown key {sorted(unknown)[0]!r} in [[{where}]]")
    return {key: tuple(entry[key]) for key in known}


def _number(name: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"--policy {name}: {key} must be a number from 1 on, not {value!r}")
    return value


def _requirement(name: str, entry: dict[str, Any]) -> Requirement:
    cells = _cells(name, "require", entry, {"cases", "dtypes", "claims"})
    demanded = {k: _names(name, k, entry[k], known) for k, known in _DEMANDED.items() if k in entry}
    return Requirement(**cells, **demanded, cases=_number(name, "cases", entry.get("cases", 1)))


_DEMANDED = {"dtypes": tuple(DTYPES), "claims": tuple(CLAIMS)}


def _names(name: str, key: str, values: Any, known: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(value in known for value in values):
        raise PolicyError(f"--policy {name}: {key} must be a list of some of {', '.join(known)}, not {values!r}")
    return tuple(values)


def _permission(name: str, entry: dict[str, Any]) -> Permission:
    cells = _cells(name, "may_block", entry, {"reason", "gpus"})
    reason = entry.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise PolicyError(f"--policy {name}: reason must say in every [[may_block]] why its cells may be blocked")
    gpus = _number(name, "gpus", entry["gpus"]) if "gpus" in entry else None
    return Permission(**cells, reason=reason, gpus=gpus)


def required_cells(
    policy: Policy, verdicts: Sequence[Verdict], gpus: int, candidates: Sequence[Mapping[str, Any]] = ()
) -> list[RequiredCell]:
    """Every required cell, each once, as ``verdicts`` of a machine with that many GPUs show it.

    ``candidates`` is the run's inventory, of which ``name`` and ``provides`` are read: a candidate that is not in it
    claims nothing.
    """
    claimed = {c["name"]: c["provides"] for c in candidates}
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in verdicts:
        groups.setdefault((v.candidate, v.judgement, v.device), []).append(v)
    names = sorted({v.candidate for v in verdicts})

    def found() -> Iterator[RequiredCell]:
        for requirement in policy.requirements:
            for pattern in requirement.candidates:
                matching = [n for n in names if fnmatchcase(n, pattern)]
                if not matching:
                    yield RequiredCell(pattern, "missing", "no candidate of that name was judged")
                for key in ((n, j, d) for n in matching for j in requirement.judgements for d in requirement.devices):
                    permission = next((p.reason for p in policy.permissions if p.covers(*key, gpus)), "")
                    unclaimed = [claim for claim in requirement.claims if claim not in claimed.get(key[0], ())]
                    state, reason = _state(groups.get(key, []), requirement, unclaimed, permission)
                    yield RequiredCell(" x ".join(key), state, reason)

    return list(dict.fromkeys(found()))


def _state(
    verdicts: Sequence[Verdict], requirement: Requirement, unclaimed: Sequence[str], permission: str
) -> tuple[Literal["passed", "permitted", "failed", "not-applicable", "blocked", "missing"], str]:
    """The state of one cell, and why. Permission is for what is blocked: it never covers a failure or a gap."""
    if not verdicts:
        return "missing", "no case was judged"
    totals = count(verdicts)
    reasons = {kind: next((v.reason for v in verdicts if v.verdict == kind), "") for kind in totals}
    if totals["fail"]:
        return "failed", f"{totals['fail']} fail: {reasons['fail']}"
    if unclaimed:
        return "not-applicable", f"the candidate does not claim {', '.join(unclaimed)}"
    if totals["not-applicable"]:
        return "not-applicable", f"{totals['not-applicable']} not-applicable: {reasons['not-applicable']}"
    if totals["blocked"]:
        said = f"{totals['blocked']} blocked: {reasons['blocked']}"
        return ("permitted", f"{said}; allowed: {permission}") if permission else ("blocked", said)
    for dtype in dict.fromkeys([*requirement.dtypes, *(v.dtype for v in verdicts)]):
        # A case that was judged twice, by two sessions say, is one case.
        passed = len({v.case for v in verdicts if v.dtype == dtype})
        if passed < requirement.cases:
            return "missing", f"{passed} cases in {dtype}, {requirement.cases} are required"
    return "passed", ""


def outcome_of(policy: Policy, cells: Sequence[RequiredCell]) -> dict[str, Any]:
    """What evidence says of the policy that a run was held to."""
    listed = [asdict(cell) for cell in cells if cell.state != "passed"]
    passed = sum(cell.state == "passed" for cell in cells)
    return {"name": policy.name, "sha256": policy.sha256, "required": len(cells), "passed": passed, "others": listed}
