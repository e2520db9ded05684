"""Reading evidence: nothing is believed before it is checked, and whatever is wrong is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ropecheck.suites.verdicts import VERDICTS as KNOWN_VERDICTS
from ropecheck.suites.verdicts import Verdict

from ..text import plain
from .cells import NAMES, cells
from .containers import Container, check_manifest
from .form import (
    EVIDENCE,
    EVIDENCE_SCHEMA,
    MANIFEST,
    MANIFEST_SCHEMA,
    PARTS,
    STATEMENT,
    VERDICTS,
    VERDICTS_SCHEMA,
    EvidenceError,
)
from .json_text import check_schema, parsed
from .statement import statement


@dataclass(frozen=True)
class Part:
    """One run: its document, and its verdicts where the evidence has the full form."""

    document: Mapping[str, Any]
    verdicts: Sequence[Verdict] | None = None


@dataclass(frozen=True)
class Evidence:
    """What was read: the runs of a folder or zip file, of which a merged one has several."""

    origin: str
    parts: tuple[Part, ...]
    container: Container = field(compare=False, repr=False)
    is_merged: bool = False

    @property
    def documents(self) -> list[Mapping[str, Any]]:
        """The document of every run."""
        return [part.document for part in self.parts]

    @property
    def verdicts(self) -> list[Verdict] | None:
        """The verdicts of all runs; None where one of them has only the compact form."""
        if any(part.verdicts is None for part in self.parts):
            return None
        return list(chain.from_iterable(part.verdicts or () for part in self.parts))


def load(path: str | Path) -> Evidence:
    """The evidence in a folder or zip file, checked throughout. Raises :class:`EvidenceError`."""
    container = Container(Path(path))
    origin = container.origin
    if MANIFEST not in container.names:
        raise EvidenceError(f"{origin} holds no {MANIFEST}: the run that wrote it did not end, or it is no evidence")
    check_manifest(container, _json(container, MANIFEST, "manifest", MANIFEST_SCHEMA)["sha256"])
    content = _json(container, EVIDENCE, "evidence", EVIDENCE_SCHEMA)
    merged = "parts" in content
    named = [f"{PARTS}/{number}/{VERDICTS}" for number in range(len(content["parts"]))] if merged else [VERDICTS]
    if strange := sorted(n for n in container.names if n.rpartition("/")[2] == VERDICTS and n not in named):
        raise EvidenceError(f"{origin}: {plain(strange[0])} belongs to no run of {EVIDENCE}")
    documents = content["parts"] if merged else [content]
    parts = tuple(_part(container, document, name) for document, name in zip(documents, named, strict=True))
    told = _parsed(container, STATEMENT)
    if told != statement(documents, container.sha256(EVIDENCE)):
        raise EvidenceError(f"{origin}: {STATEMENT} does not say what {EVIDENCE} says")
    return Evidence(origin, parts, container, merged)


def _json(container: Container, name: str, kind: str, schema: str) -> dict[str, Any]:
    content = _parsed(container, name)
    check_schema(content, kind, schema, f"{container.origin}: {name}")
    found: dict[str, Any] = content
    return found


def _parsed(container: Container, name: str) -> Any:
    return parsed(container.read(name), f"{container.origin}: {name}")


def _part(container: Container, document: Mapping[str, Any], name: str) -> Part:
    where = f"{container.origin}: {EVIDENCE}"
    _check_cells(document, where)
    if (found := document.get("sensitivity")) is not None:
        _check_sensitivity(found, where)
    if name not in container.names:
        return Part(document)
    verdicts = _verdicts(_json(container, name, "verdicts", VERDICTS_SCHEMA)["verdicts"], f"{container.origin}: {name}")
    if cells(verdicts) != document["cells"]:
        wrong = _first_unlike(cells(verdicts), document["cells"])
        raise EvidenceError(f"{where} does not count in {wrong} what {plain(name)} holds")
    return Part(document, verdicts)


def _check_cells(document: Mapping[str, Any], where: str) -> None:
    """Every cell stands once, has a case, is of a candidate that is listed and of a judgement with a hash."""
    contracts: dict[str, str] = {}
    for entry in document["candidates"]:
        if entry["name"] in contracts:
            raise EvidenceError(f"{where} lists candidate {plain(entry['name'])} twice")
        contracts[entry["name"]] = entry["contract"]
    seen = set()
    for cell in document["cells"]:
        key = tuple(cell[name] for name in NAMES)
        if key in seen:
            raise EvidenceError(f"{where} holds the cell {cell_name(cell)} twice")
        seen.add(key)
        if not any(cell.get(verdict) for verdict in KNOWN_VERDICTS):
            raise EvidenceError(f"{where} holds the cell {cell_name(cell)} without a case")
        if contracts.get(cell["candidate"]) != cell["contract"]:
            raise EvidenceError(f"{where} lists no candidate {plain(cell['candidate'])} of contract {cell['contract']}")
        if cell["contract"] not in document["judging"].get(cell["judgement"], {}):
            raise EvidenceError(f"{where} does not say what code judged {cell_name(cell)}")


def _check_sensitivity(found: Mapping[str, Any], where: str) -> None:
    judged, seen = found["judged"], found["seen"]
    share = seen / judged if judged else 0.0
    counts = judged + found["blocked"] + found["equivalent"] == found["faults"]
    if not counts or seen + len(found["survivors"]) != judged or found["coverage"] != share:
        raise EvidenceError(f"{where}: the numbers of sensitivity do not agree with one another")


def _verdicts(records: Sequence[Mapping[str, Any]], where: str) -> list[Verdict]:
    verdicts = [Verdict.from_json(record) for record in records]
    seen = set()
    for v in verdicts:
        if (v.candidate, v.case) in seen:
            raise EvidenceError(f"{where} holds two verdicts on {plain(v.case)} of {plain(v.candidate)}")
        seen.add((v.candidate, v.case))
        for fact in ("elements", "certified points"):
            if not isinstance(v.facts.get(fact, 0), int):
                raise EvidenceError(f"{where}: {fact} of {plain(v.case)} must be a whole number")
    return verdicts


def _first_unlike(counted: Sequence[Mapping[str, Any]], listed: Sequence[Mapping[str, Any]]) -> str:
    unlike = [cell for cell in (*listed, *counted) if cell not in counted or cell not in listed]
    return cell_name(unlike[0]) if unlike else "the order of its cells"


def cell_name(cell: Mapping[str, Any]) -> str:
    """What a cell is called in a sentence."""
    return " x ".join(plain(cell[name]) for name in ("candidate", "judgement", "device", "dtype") if cell[name])
