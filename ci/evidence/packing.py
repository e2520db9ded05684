"""Packing: one file made of evidence, the same bytes for the same content; and the compact form, which is committed."""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

from .form import EvidenceError
from .merging import merged
from .reading import Evidence
from .writing import close, prepare

_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(evidence: Evidence, out: Path) -> None:
    """Write the zip file ``out``: members by name, without times or owners.

    Raises :class:`EvidenceError` where ``out`` exists.
    """
    if out.exists():
        raise EvidenceError(f"{out} exists: name a file that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name in evidence.container.names:
                member = zipfile.ZipInfo(name, _EPOCH)
                member.compress_type, member.create_system = zipfile.ZIP_DEFLATED, 3
                member.external_attr = (stat.S_IFREG | 0o644) << 16
                archive.writestr(member, evidence.container.read(name))
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def compact(evidence: Evidence, out: Path) -> None:
    """Write the folder ``out`` with the documents alone: no verdicts, no logs."""
    documents = evidence.documents
    close(prepare(out), out, merged(documents) if evidence.is_merged else documents[0])
