"""Merging: the evidence of several machines joined in one folder, each run kept whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ropecheck.suites.verdicts import Verdict

from ..text import plain
from .cells import NAMES
from .form import EVIDENCE, EVIDENCE_SCHEMA, MANIFEST, PARTS, STATEMENT, VERDICTS, EvidenceError
from .reading import Evidence, cell_name
from .writing import close, prepare


def merge(evidence: Sequence[Evidence], out: Path) -> None:
    """Write the runs of all ``evidence`` into the folder ``out``; a run that is in two of them is written once.

    Raises :class:`EvidenceError` where two runs contradict one another, see :func:`contradiction`.
    """
    documents: list[Mapping[str, Any]] = []
    verdicts: dict[str, Sequence[Verdict]] = {}
    copied: dict[str, tuple[Evidence, str]] = {}
    seen = set()
    for one in evidence:
        for number, part in enumerate(one.parts):
            if (identity := _identity(part.document)) in seen:
                continue
            seen.add(identity)
            there = PurePosixPath(PARTS, str(len(documents)))
            documents.append(part.document)
            if part.verdicts is not None:
                verdicts[str(there / VERDICTS)] = part.verdicts
            copied |= {str(there / inside): (one, name) for inside, name in _files(one, number)}
    if said := contradiction(documents):
        raise EvidenceError(said)
    partial = prepare(out)
    for name, (one, source) in copied.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.container.read(source))
    close(partial, out, merged(documents), verdicts)


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of ``evidence.json`` that holds several runs."""
    return {"schema": EVIDENCE_SCHEMA, "run": {"kind": "merge"}, "parts": list(documents)}


def _identity(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _files(one: Evidence, number: int) -> list[tuple[str, str]]:
    """(name within the part, name in the container) of the files that a part has besides its documents."""
    prefix = f"{PARTS}/{number}/" if one.is_merged else ""
    own = {MANIFEST, EVIDENCE, STATEMENT, VERDICTS} if not one.is_merged else {VERDICTS}
    inside = ((name.removeprefix(prefix), name) for name in one.container.names if name.startswith(prefix))
    return [(short, name) for short, name in inside if short not in own]


def contradiction(documents: Sequence[Mapping[str, Any]]) -> str:
    """The sentence that says which cell two runs of the same sources, by the same judging code, answer unlike: one with
    a failure and the other with passes alone. Empty where none do."""
    answers: dict[tuple[str, ...], tuple[bool, Mapping[str, Any]]] = {}
    for document in documents:
        sources = {entry["name"]: entry["sources"]["sha256"] for entry in document["candidates"]}
        for cell in document["cells"]:
            passes = set(cell).isdisjoint(("fail", "blocked", "not-applicable"))
            if not (passes or cell.get("fail")):
                continue
            judging = document["judging"][cell["judgement"]][cell["contract"]]
            key = (*(cell[name] for name in NAMES), sources[cell["candidate"]], judging, str(document["run"]["seed"]))
            earlier = answers.setdefault(key, (passes, document))
            if earlier[0] != passes:
                good, bad = (earlier[1], document) if earlier[0] else (document, earlier[1])
                return f"{cell_name(cell)} passes on {machine(good)} and fails on {machine(bad)}, with the same sources"
    return ""


def machine(document: Mapping[str, Any]) -> str:
    """Where and when a run was, in a few words."""
    environment = document["environment"]
    gpus = [gpu["name"] for gpu in environment["gpus"]]
    what = ", ".join(f"{gpus.count(name)} {name}" for name in dict.fromkeys(gpus)) or "a machine without a GPU"
    return plain(f"{what} (torch {environment['torch']}, {document['run']['started']})")
