"""Difference: what changed between two pieces of evidence, cell by cell, in the toolchain and in the sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ropecheck.suites.verdicts import VERDICTS

from .reading import Evidence, cell_name

_COMPARED = (
    "ropecheck", "python", "platform", "vector instructions", "torch", "triton", "cuda runtime", "cuda driver",
    "driver", "gpus", "runner", "commit", "exact arithmetic", "numpy", "diffusers", "transformers",
)  # fmt: skip

Key = tuple[str, str, str, str]


def difference(first: Evidence, second: Evidence) -> dict[str, list[dict[str, Any]]]:
    """``environment``, ``sources``, ``judging`` and ``cells``: each a list of what was and what is, empty where nothing
    changed. Of merged evidence all runs count together; None stands for what one side has not."""
    sides = [_Side(first), _Side(second)]
    return {
        "environment": _unlike(*(side.environment for side in sides)),
        "sources": [_files(row, *sides) for row in _unlike(*(side.sources for side in sides))],
        "judging": _unlike(*(side.judging for side in sides)),
        "cells": _unlike(*(side.cells for side in sides)),
    }


class _Side:
    """One piece of evidence, by what it is compared by."""

    def __init__(self, evidence: Evidence) -> None:
        documents = evidence.documents
        self.environment = {
            name: _one([_shown(document["environment"].get(name)) for document in documents]) for name in _COMPARED
        }
        candidates = list(chain.from_iterable(document["candidates"] for document in documents))
        self.sources = {
            name: _one([c["sources"]["sha256"] for c in candidates if c["name"] == name])
            for name in sorted({c["name"] for c in candidates})
        }
        self.files = {c["name"]: c["sources"]["files"] for c in candidates}
        judging: dict[str, list[str]] = {}
        for document in documents:
            for judgement, hashes in document["judging"].items():
                for contract, sha256 in hashes.items():
                    judging.setdefault(f"{judgement} of {contract}", []).append(sha256)
        self.judging = {name: _one(found) for name, found in judging.items()}
        cells: dict[str, list[Mapping[str, Any]]] = {}
        for cell in chain.from_iterable(document["cells"] for document in documents):
            cells.setdefault(cell_name(cell), []).append(cell)
        self.cells = {name: _one([_counts(cell) for cell in found]) for name, found in cells.items()}


def _one(values: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(sorted(values)))


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value[name]}" for name in sorted(value))
    return "; ".join(_shown(one) for one in value) if isinstance(value, list) else str(value)


def _counts(cell: Mapping[str, Any]) -> str:
    """How many cases had which verdict, and which cases they were."""
    counts = ", ".join(f"{cell[verdict]} {verdict}" for verdict in VERDICTS if cell.get(verdict))
    return f"{counts} (cases {cell['cases'][:12]})"


def _unlike(first: Mapping[str, str], second: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "was": first.get(name), "is": second.get(name)}
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]


def _files(row: dict[str, Any], first: _Side, second: _Side) -> dict[str, Any]:
    """A row of sources with the names of the files that changed."""
    was, now = (side.files.get(row["name"], {}) for side in (first, second))
    return {**row, "files": sorted(name for name in {*was, *now} if was.get(name) != now.get(name))}
