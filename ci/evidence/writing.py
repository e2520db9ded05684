"""Writing evidence: the folder grows beside the earlier one and takes its place once it is closed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropecheck.suites.verdicts import Verdict, canonical

from ..sources import candidate_packages, candidate_sources, judging_hash, sensitivity_hash
from .cells import cells
from .form import (
    EVIDENCE,
    EVIDENCE_SCHEMA,
    LARGEST_FILE,
    MANIFEST,
    MANIFEST_SCHEMA,
    STATEMENT,
    VERDICTS,
    VERDICTS_SCHEMA,
    EvidenceError,
)
from .statement import statement

_OF_A_CANDIDATE = (
    "name", "specification", "contract", "family", "provides", "devices", "dtypes", "unavailable", "sources",
    "packages",
)  # fmt: skip


def prepare(out: Path) -> Path:
    """The folder that a run may write to while it lasts: ``out`` with the suffix ``.partial``, empty.

    Raises :class:`EvidenceError` where ``out`` is something that an earlier run did not leave.
    """
    if out.exists() and not out.is_dir():
        raise EvidenceError(f"--out {out} is a file")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise EvidenceError(f"--out {out} is not empty and holds no {MANIFEST} of an earlier run")
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def with_sources(inventory: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The candidates of an inventory with the hashes of their sources, as they are now."""
    return [
        {**entry, "sources": candidate_sources(entry), "packages": candidate_packages(entry)} for entry in inventory
    ]


def document(
    candidates: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Verdict],
    environment: Mapping[str, Any],
    pins: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    sensitivity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The canonical content of ``evidence.json``: what ran, where, what was judged, what judged it, what came of it.

    ``candidates`` come from :func:`with_sources` before the run. Raises :class:`EvidenceError` where a source has
    changed since.
    """
    for entry in candidates:
        then, now = entry["sources"]["files"], candidate_sources(entry)["files"]
        if changed := sorted(name for name in {*then, *now} if then.get(name) != now.get(name)):
            raise EvidenceError(f"{changed[0]} of {entry['name']} was changed while it was judged")
    counted = cells(verdicts)
    judging: dict[str, dict[str, str]] = {}
    for cell in counted:
        judging.setdefault(cell["judgement"], {})[cell["contract"]] = judging_hash(cell["judgement"], cell["contract"])
    return {
        "schema": EVIDENCE_SCHEMA,
        "environment": dict(environment),
        "run": dict(run),
        "pins": list(pins),
        "candidates": [{name: entry[name] for name in _OF_A_CANDIDATE} for entry in candidates],
        "judging": judging,
        "cells": counted,
        **({"sensitivity": dict(sensitivity)} if sensitivity is not None else {}),
    }


def measured(records: Sequence[Any]) -> dict[str, Any]:
    """The part of a document that says what a measurement of sensitivity found, from the records of its faults."""
    judged = [r for r in records if not r.blocked and not r.equivalent]
    survivors = sorted(r.name for r in judged if r.survives)
    seen = len(judged) - len(survivors)
    return {
        "faults": len(records),
        "judged": len(judged),
        "seen": seen,
        "blocked": sum(bool(r.blocked) for r in records),
        "equivalent": sum(bool(r.equivalent) and not r.blocked for r in records),
        "coverage": seen / len(judged) if judged else 0.0,
        "survivors": survivors,
        "judging": sensitivity_hash(),
    }


def close(
    partial: Path,
    out: Path,
    content: Mapping[str, Any],
    verdicts: Mapping[str, Sequence[Verdict]] | Sequence[Verdict] = (),
) -> None:
    """Write the documents, the statement and the manifest, then put the folder in the place of ``out``.

    ``content`` is a document, or a merged one with ``parts``. ``verdicts`` are those of the document; of a merged one,
    those of its parts by the names of their files. Where there are none the folder is the compact form. A file that is
    too large to be read again is left out, and a small one says so: where it is the verdicts, the form is compact.
    """
    if not isinstance(verdicts, Mapping):
        verdicts = {VERDICTS: verdicts} if verdicts else {}
    for name, listed in verdicts.items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_listed(listed))
    for path in [p for p in partial.rglob("*") if p.is_file() and p.stat().st_size > LARGEST_FILE]:
        size = path.stat().st_size >> 20
        path.unlink()
        path.with_name(f"{path.name}.left-out").write_text(f"{path.name} had {size} MiB, more than evidence may hold\n")
    text = canonical(content) + "\n"
    (partial / EVIDENCE).write_text(text)
    told = statement(content.get("parts", [content]), hashlib.sha256(text.encode()).hexdigest())
    (partial / STATEMENT).write_text(canonical(told) + "\n")
    hashes = {
        path.relative_to(partial).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    (partial / MANIFEST).write_text(canonical({"schema": MANIFEST_SCHEMA, "sha256": hashes}) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def _listed(verdicts: Sequence[Verdict]) -> str:
    """The text of ``verdicts.json``; of very many failures each with its worst element alone."""
    ordered = sorted(verdicts, key=lambda v: (v.candidate, v.case))
    text = canonical({"schema": VERDICTS_SCHEMA, "verdicts": [v.as_json() for v in ordered]}) + "\n"
    if len(text) <= LARGEST_FILE:
        return text
    records = [{**v.as_json(), "facts": {k: f for k, f in v.facts.items() if k != "worst elements"}} for v in ordered]
    return canonical({"schema": VERDICTS_SCHEMA, "verdicts": records}) + "\n"
