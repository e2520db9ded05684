"""Reading a policy: a TOML file in which every key is known and every value has the right type.

A slip of the pen must not weaken a policy, so that whatever is not understood is an error which names the key.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropecheck.suites.candidates import CLAIMS, DEVICES, DTYPES
from ropecheck.suites.cases import PLANS

from .policy import (
    NEEDS,
    RED,
    REQUIRABLE,
    STALE,
    BenchmarkFloor,
    Override,
    Permission,
    Policy,
    PolicyError,
    Requirement,
    SensitivityFloor,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FOLDER = files(__package__) / "policies"
_TABLES = ("include", "require", "may_block", "override", "benchmark")
_KEYS = {*_TABLES, "needs", "plan", "max_age_days", "toolchain", "sensitivity"}
TOOLCHAIN = ("torch", "triton", "python", "cuda runtime")
"""What of a machine's toolchain a policy may hold to a range of versions, as evidence names it."""


def shipped_policies() -> list[str]:
    """The names that ``--policy`` takes without a file."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def load_policy(name: str) -> Policy:
    """The policy in FILE.toml, or the shipped one of that name. Raises :class:`PolicyError`."""
    content, table = _content(name, name)
    whole = hashlib.sha256(content)
    requirements: list[Requirement] = []
    read = _Reader(name)
    read.keys(table, _KEYS, "")
    entries = {key: read.tables(key, table.get(key, [])) for key in _TABLES}
    for entry in entries["include"]:
        read.keys(entry, {"policy", "stale"}, " in [[include]]")
        included = read.text("policy", entry.get("policy"), "[[include]]")
        if included.endswith(".toml"):
            included = str(Path(name).parent / included)
        other, its_table = _content(included, name)
        if "include" in its_table:
            raise PolicyError(f"--policy {name}: include names {included}, which includes another policy itself")
        whole.update(other)
        stale = read.one_of("stale", entry.get("stale", RED), STALE)
        theirs = _Reader(included)
        theirs.keys(its_table, _KEYS, "")
        requirements += [
            replace(theirs.requirement(required), stale=stale)
            for required in theirs.tables("require", its_table.get("require", []))
        ]
    requirements += map(read.requirement, entries["require"])
    if not requirements:
        raise PolicyError(f"--policy {name} must hold at least one [[require]] table")
    return Policy(
        name=name,
        requirements=tuple(requirements),
        permissions=tuple(map(read.permission, entries["may_block"])),
        overrides=tuple(map(read.override, entries["override"])),
        benchmarks=tuple(map(read.benchmark, entries["benchmark"])),
        needs=read.needs(table.get("needs", {})),
        plan=read.one_of("plan", table["plan"], PLANS) if "plan" in table else "",
        max_age_days=read.number("max_age_days", table["max_age_days"]) if "max_age_days" in table else None,
        toolchain=read.toolchain(table.get("toolchain", {})),
        sensitivity=read.sensitivity(table["sensitivity"]) if "sensitivity" in table else None,
        sha256=whole.hexdigest(),
    )


def _content(name: str, policy: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes and the table of a file or shipped policy that ``policy`` is or includes."""
    shipped = shipped_policies()
    source = _FOLDER / f"{name}.toml" if name in shipped else Path(name)
    if name not in shipped and not name.endswith(".toml"):
        raise PolicyError(f"--policy must be FILE.toml or one of {', '.join(shipped)}, not {name!r}")
    said = name if name == policy else f"{policy}: include of {name}"
    try:
        content = source.read_bytes()
        return content, tomllib.loads(content.decode())
    except OSError as error:
        raise PolicyError(f"--policy {said} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PolicyError(f"--policy {said} is not TOML: {' '.join(str(error).split())}") from None


class _Reader:
    """Reads the parts of one policy; every refusal names it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refused(self, sentence: str) -> PolicyError:
        return PolicyError(f"--policy {self.name}: {sentence}")

    def keys(self, table: dict[str, Any], known: set[str], where: str) -> None:
        if unknown := set(table) - known:
            raise self.refused(f"unknown key {sorted(unknown)[0]!r}{where}")

    def tables(self, key: str, entries: Any) -> list[dict[str, Any]]:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.refused(f"{key} must be written as [[{key}]] tables")
        return entries

    def text(self, key: str, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.refused(f"{key} must be a sentence or name in every {where}, not {value!r}")
        return value

    def one_of(self, key: str, value: Any, known: Sequence[str]) -> str:
        if not isinstance(value, str) or value not in known:
            raise self.refused(f"{key} must be one of {', '.join(known)}, not {value!r}")
        return value

    def some_of(self, key: str, values: Any, known: Sequence[str]) -> tuple[str, ...]:
        if not isinstance(values, list) or not values or not all(value in known for value in values):
            raise self.refused(f"{key} must be a list of some of {', '.join(known)}, not {values!r}")
        return tuple(values)

    def number(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(f"{key} must be a number from 1 on, not {value!r}")
        return value

    def share(self, key: str, value: Any, most: float) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 < value <= most:
            to = f" to {most:g}" if math.isfinite(most) else " on"
            raise self.refused(f"{key} must be a number above 0{to}, not {value!r}")
        return float(value)

    def day(self, value: Any, where: str) -> date:
        # A datetime is a date as well, and has an hour that nobody would apply.
        if not isinstance(value, date) or isinstance(value, datetime):
            raise self.refused(f"expires must be a date such as 2030-01-31 in every {where}, not {value!r}")
        return value

    def cells(self, where: str, entry: dict[str, Any], more: set[str]) -> dict[str, tuple[str, ...]]:
        """The three lists that name cells; every other key of ``entry`` must be one of ``more``."""
        known = {"candidates": None, "judgements": REQUIRABLE, "devices": DEVICES}
        for key, allowed in known.items():
            values = entry.get(key)
            if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
                raise self.refused(f"{key} must be a list of strings in every [[{where}]]")
            for value in values:
                if allowed is not None and value not in allowed:
                    raise self.refused(f"{key} holds {value!r}, which is none of {', '.join(allowed)}")
        self.keys(entry, {*known, *more}, f" in [[{where}]]")
        return {key: tuple(entry[key]) for key in known}

    def requirement(self, entry: dict[str, Any]) -> Requirement:
        cells = self.cells("require", entry, {"cases", "dtypes", "claims", "stale"})
        known = {"dtypes": tuple(DTYPES), "claims": tuple(CLAIMS)}
        demanded = {key: self.some_of(key, entry[key], names) for key, names in known.items() if key in entry}
        stale = self.one_of("stale", entry.get("stale", RED), STALE)
        return Requirement(**cells, **demanded, cases=self.number("cases", entry.get("cases", 1)), stale=stale)

    def permission(self, entry: dict[str, Any]) -> Permission:
        cells = self.cells("may_block", entry, {"reason", "gpus", "expires"})
        gpus = self.number("gpus", entry["gpus"]) if "gpus" in entry else None
        reason = self.text("reason", entry.get("reason"), "[[may_block]]")
        return Permission(**cells, reason=reason, expires=self.day(entry.get("expires"), "[[may_block]]"), gpus=gpus)

    def override(self, entry: dict[str, Any]) -> Override:
        cells = self.cells("override", entry, {"who", "why", "expires"})
        who, why = (self.text(key, entry.get(key), "[[override]]") for key in ("who", "why"))
        return Override(**cells, who=who, why=why, expires=self.day(entry.get("expires"), "[[override]]"))

    def benchmark(self, entry: dict[str, Any]) -> BenchmarkFloor:
        self.keys(entry, {"name", "device", "ratio"}, " in [[benchmark]]")
        return BenchmarkFloor(
            self.text("name", entry.get("name"), "[[benchmark]]"),
            self.text("device", entry.get("device"), "[[benchmark]]"),
            self.share("ratio", entry.get("ratio"), math.inf),
        )

    def sensitivity(self, table: Any) -> SensitivityFloor:
        if not isinstance(table, dict):
            raise self.refused("sensitivity must be written as a [sensitivity] table")
        self.keys(table, {"coverage", "faults"}, " in [sensitivity]")
        return SensitivityFloor(
            self.share("coverage", table.get("coverage"), 1.0), self.number("faults", table.get("faults"))
        )

    def needs(self, table: Any) -> tuple[str, ...]:
        if not isinstance(table, dict) or not all(value is True for value in table.values()):
            raise self.refused("[needs] must hold lines such as 'gpu = true' and nothing else")
        if unknown := set(table) - set(NEEDS):
            raise self.refused(f"needs {sorted(unknown)[0]!r}, which is none of {', '.join(NEEDS)}")
        return tuple(need for need in NEEDS if need in table)

    def toolchain(self, table: Any) -> dict[str, str]:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        if not isinstance(table, dict):
            raise self.refused("toolchain must be written as a [toolchain] table")
        for key, value in table.items():
            self.one_of("a key of [toolchain]", key, TOOLCHAIN)
            try:
                SpecifierSet(self.text(key, value, "[toolchain]"))
            except InvalidSpecifier:
                raise self.refused(f"{key} must be a range such as '>=2.10,<2.14', not {value!r}") from None
        return dict(table)
