"""The form of evidence: names of files, schemas, limits."""

from __future__ import annotations

MANIFEST, EVIDENCE, VERDICTS, STATEMENT = "manifest.json", "evidence.json", "verdicts.json", "statement.json"

MANIFEST_SCHEMA = "ropecheck-manifest/1"
EVIDENCE_SCHEMA = "ropecheck-evidence/1"
VERDICTS_SCHEMA = "ropecheck-verdicts/1"

LARGEST_FILE = 64 * 2**20
"""Bytes that one file of evidence may have."""

LARGEST = 256 * 2**20
"""Bytes that all of them may have."""

MOST_FILES = 10_000
DEEPEST = 24
"""How far values of a JSON document may be inside one another."""

LONGEST_NUMBER = 40
"""Characters that a number in a JSON document may have."""

PARTS = "parts"
"""Where a merged folder keeps the files of its parts, each in a folder named by its number."""


class EvidenceError(ValueError):
    """Evidence cannot be used, or not be written. The message is one sentence."""
