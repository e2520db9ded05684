"""Evidence: the folder that a run leaves, closed by a manifest of hashes.

The manifest is written last: a folder without one is half-written. It detects accidents, not forgery; authenticity
comes from an attestation or from review.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropecheck.suites.verdicts import Verdict, canonical, count

SCHEMA = "ropecheck-verdicts/1"
MANIFEST = "manifest.json"
VERDICTS = "verdicts.json"


class EvidenceError(ValueError):
    """A folder is no evidence, or not to be written to. The message is one sentence."""


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


def cells(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The compact form: for each candidate, judgement, device and dtype how many cases had which verdict."""
    groups: dict[tuple[str, str, str, str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        groups[v.candidate, v.contract, v.judgement, v.device, v.dtype].append(v)
    names = ("candidate", "contract", "judgement", "device", "dtype")
    return [
        {
            **dict(zip(names, cell, strict=True)),
            **{verdict: n for verdict, n in count(group).items() if n},
            "reasons": sorted({v.reason for v in group if v.reason}),
            "elements": sum(int(v.facts.get("elements", 0)) for v in group),
            "certified points": sum(int(v.facts.get("certified points", 0)) for v in group),
        }
        for cell, group in sorted(groups.items())
    ]


def close(partial: Path, out: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` and the manifest, then put the folder in the place of ``out``."""
    (partial / VERDICTS).write_text(canonical(document) + "\n")
    verdicts = [Verdict.from_json(v) for v in document["verdicts"]]
    compact = {**document, "schema": "ropecheck-cells/1", "cells": cells(verdicts)}
    del compact["verdicts"]
    (partial / "cells.json").write_text(canonical(compact) + "\n")
    hashes = {
        str(path.relative_to(partial)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    (partial / MANIFEST).write_text(canonical({"schema": "ropecheck-manifest/1", "sha256": hashes}) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def document(
    verdicts: Sequence[Verdict],
    environment: Mapping[str, Any],
    pins: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """The canonical content of ``verdicts.json``: what ran, where, and every verdict, sorted by candidate and case."""
    ordered = sorted(verdicts, key=lambda v: (v.candidate, v.case))
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "run": dict(run),
        "pins": list(pins),
        "verdicts": [v.as_json() for v in ordered],
    }


def load(folder: Path) -> dict[str, Any]:
    """The document of an evidence folder whose files are as its manifest says. Raises :class:`EvidenceError`."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise EvidenceError(f"{folder} holds no {MANIFEST}: the run that wrote it did not end")
    hashes: dict[str, str] = json.loads(manifest.read_text())["sha256"]
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise EvidenceError(f"{path} is missing or not as the manifest says")
    found: dict[str, Any] = json.loads((folder / VERDICTS).read_text())
    if found.get("schema") != SCHEMA:
        raise EvidenceError(f"{folder / VERDICTS} has schema {found.get('schema')!r}, not {SCHEMA!r}")
    return found
