"""``ropecheck contracts``, ``judgements`` and ``doctor``: what there is, as tables and as JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from ropecheck.oracle.contracts import CONTRACTS, contract
from ropecheck.oracle.pins import check_pins, pin, pinned
from ropecheck.suites.candidates import CLAIMS, DTYPES, Candidate
from ropecheck.suites.families import FAMILIES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judgements.judgement import Judgement

from .environment import parts, python_command, record


def contracts() -> list[dict[str, Any]]:
    """Every contract with its five choices and what it is pinned to."""
    rows = []
    for name, own in CONTRACTS.items():
        releases = pin(name).releases if name in pinned() else ()
        rows.append(
            {
                "name": name,
                "summary": own.summary,
                "family": own.family,
                "positions": type(own.positions).__name__,
                "frequencies": type(own.frequencies).__name__,
                "axes": dict(zip(own.positions.axes, own.lanes.dims, strict=True)),
                "pairing": own.pairing.name,
                "head dim": own.head_dim,
                "table dtype": own.table_dtype,
                "forward recipe": own.forward.name,
                "backward recipe": own.backward.name,
                "source": own.source,
                "pinned releases": list(releases),
            }
        )
    return rows


def contract_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="contracts", title_justify="left", show_lines=True)
    for column in ("name", "pairing", "axes (channels)", "table", "recipes", "pinned to"):
        table.add_column(column, overflow="fold")
    for row in rows:
        axes = " ".join(f"{name}:{dims}" for name, dims in row["axes"].items())
        releases = row["pinned releases"]
        pinned = f"{row['source']}" + (f"\n{len(releases)} releases recorded" if releases else "")
        recipes = f"forward: {row['forward recipe']}\nbackward: {row['backward recipe']}"
        table.add_row(row["name"], row["pairing"], axes, row["table dtype"], recipes, escape(pinned))
    return table


def checked_pins(names: Sequence[str]) -> list[dict[str, Any]]:
    """The reports of executing each pinned contract's vendor symbols; unpinned contracts have none."""
    return [asdict(check_pins(contract(name))) for name in names if name in pinned()]


# A contract of each family, whose cases are counted.
_COUNTED = {
    "rotate": "qwen-image", "rotate_pair": "qwen-image", "rotate_qk": "mrope-interleaved",
    "norm_rotate_gate": "qwen3.5-norm-rope-gate",
}  # fmt: skip


def judgements(plan: str) -> list[dict[str, Any]]:
    """Every judgement: its claim, what it asks, and its cases on a GPU in ``plan`` by family and dtype, for a candidate
    that claims all that the family has room for and for one that claims only what the judgement needs."""
    rows = []
    for judgement in JUDGEMENTS.values():
        cases = {}
        for family, name in _COUNTED.items():
            impossible = FAMILIES[family].unclaimable
            if family in judgement.not_of or judgement.claim in impossible:
                continue
            needed = (judgement.claim,) if judgement.claim else ()
            everything = tuple(claim for claim in CLAIMS if claim not in impossible)
            cases[family] = {
                kind: {dtype: _count(judgement, family, name, claims, dtype, plan) for dtype in DTYPES}
                for kind, claims in (("everything", everything), ("least", needed))
            }
        asks = " ".join((judgement.asks or "").split())
        rows.append({"name": judgement.name, "claim": judgement.claim, "asks": asks, "cases": cases})
    return rows


def _count(judgement: Judgement, family: str, name: str, claims: tuple[str, ...], dtype: str, plan: str) -> int:
    probe = Candidate("counting", name, lambda *_, **__: None, provides=claims, family=family)
    return sum(1 for _ in judgement.cases(probe, "cuda", dtype, plan))


def judgement_table(rows: Sequence[dict[str, Any]], plan: str) -> Table:
    title = f"judgements, and the least and most cases of a candidate in plan {plan}, all dtypes together"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("judgement")
    table.add_column("asked of")
    for family in _COUNTED:
        table.add_column(family, justify="right")
    table.add_column("asks", overflow="fold")
    for row in rows:
        cells = []
        for family in _COUNTED:
            found = row["cases"].get(family)
            least, most = sorted(sum(counts.values()) for counts in found.values()) if found else (0, 0)
            cells.append("n/a" if not found else str(least) if least == most else f"{least} to {most}")
        table.add_row(row["name"], f"claim {row['claim']}" if row["claim"] else "all", *cells, escape(row["asks"]))
    return table


def doctor() -> dict[str, Any]:
    """The environment, and what this machine lacks."""
    return {"environment": record(), "parts": [asdict(part) for part in parts()]}


def doctor_table(found: dict[str, Any]) -> Table:
    env = found["environment"]
    title = f"ropecheck {env['ropecheck']}, Python {env['python']}, torch {env['torch']}"
    table = Table(title=title, title_justify="left")
    for column in ("part", "found", "without it"):
        table.add_column(column, overflow="fold")
    for part in found["parts"]:
        have = f"[green]{escape(part['found'])}[/]" if part["found"] else "[yellow]absent[/]"
        table.add_row(part["name"], have, "" if part["found"] else escape(part["without"]))
    return table


def native_lines(found: dict[str, Any]) -> list[str]:
    """The identity of the native library that is there, a line for each fact; paths and hashes are not to be broken."""
    native = found["environment"]["native library"]
    if native["sha256"] is None:
        return []
    facts = {name.replace("_", " "): value for name, value in native.items() if name != "failure"}
    return ["native library", *(
        f"  {name}: {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in facts.items()
    )]  # fmt: skip


class PinCheck:
    """Pins executed in a process of their own while the suites run."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [name for name in names if name in pinned()]
        self.process = None
        if self.names:
            command = [*python_command("ropecheck.ci"), "contracts", "--check", "--json", *self.names]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def reports(self) -> list[dict[str, Any]]:
        """Wait for the process and return its reports. A process that fails to answer is a missing pin."""
        if self.process is None:
            return []
        answer, _ = self.process.communicate()
        try:
            reports: list[dict[str, Any]] = json.loads(answer)["pins"]
        except ValueError:
            unknown = dict.fromkeys(("cases", "within"), 0) | {"package": "", "release": None, "state": "missing"}
            return [{"contract": name, "first_unequal": None, **unknown} for name in self.names]
        return reports
