"""The statement of a run's result in the form that attestations take: in-toto, predicate test-result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .form import EVIDENCE

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"


def statement(documents: Sequence[Mapping[str, Any]], sha256: str) -> dict[str, Any]:
    """The statement of what ``documents`` found; ``sha256`` is that of the file that holds them.

    A test is a cell. A cell that was blocked is a warning, one with a failure a failure, and the result is no better
    than the worst of them; a run whose exit status is neither 0 nor that of something blocked has failed.
    """
    passed, warned, failed = set[str](), set[str](), set[str]()
    for document in documents:
        for cell in document["cells"]:
            of = failed if cell.get("fail") else warned if cell.get("blocked") else passed if cell.get("pass") else None
            if of is not None:
                of.add(" x ".join(cell[name] or "any dtype" for name in ("candidate", "judgement", "device", "dtype")))
    passed -= warned | failed
    statuses = {document["run"]["exit status"] for document in documents}
    is_failed = bool(failed or statuses - {0, 3})
    predicate = {
        "result": "FAILED" if is_failed else "WARNED" if warned or 3 in statuses else "PASSED",
        "configuration": [entry for document in documents for entry in _configuration(document)],
        "passedTests": sorted(passed),
        "warnedTests": sorted(warned - failed),
        "failedTests": sorted(failed),
    }
    urls = sorted({url for document in documents if (url := document["environment"].get("run url"))})
    if len(urls) == 1:
        predicate["url"] = urls[0]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": EVIDENCE, "digest": {"sha256": sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }


def _configuration(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Resource descriptors of what a run depended on: the judge's packages, its policy, the candidates' sources."""
    found = {f"ropecheck.{package}": sha256 for package, sha256 in document["environment"]["sources"].items()}
    if policy := document["run"].get("policy"):
        found[f"policy {policy['name']}"] = policy["sha256"]
    found |= {f"sources of {entry['name']}": entry["sources"]["sha256"] for entry in document["candidates"]}
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(found.items())]
