"""Freshness: does evidence that was recorded elsewhere, at another commit, speak of what is at hand?

It does while the candidate's sources, the code that judged it and the contract are the same, the toolchain is within
the policy's ranges, and it is neither too old nor from the future. The commit is recorded and not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from .at_hand import AtHand, KnownCandidate
from .policy import Policy

_CLOCKS_DIFFER = timedelta(minutes=5)


def unfit(document: Mapping[str, Any], policy: Policy, now: datetime) -> str:
    """Why nothing of a document counts under ``policy`` at the time ``now``; empty where it may."""
    try:
        started = datetime.fromisoformat(document["run"]["started"].replace("Z", "+00:00"))
    except ValueError:
        return f"the evidence was recorded at {document['run']['started']}, which is no time"
    if started > now + _CLOCKS_DIFFER:
        return f"the evidence was recorded in the future, at {started:%Y-%m-%d %H:%M} UTC"
    if policy.max_age_days is not None and now - started > timedelta(days=policy.max_age_days):
        return (
            f"the evidence is {(now - started).days} days old, recorded on {started:%Y-%m-%d}, and the policy allows "
            f"{policy.max_age_days}"
        )
    return _outside(document["environment"], policy)


def outdated(document: Mapping[str, Any], candidate: str, judgement: str, at_hand: AtHand) -> str:
    """Why a document does not speak of a candidate as it is now, and of the judgement as it is asked now."""
    if changed := outdated_sources(document, candidate, at_hand):
        return changed
    contract = at_hand.candidates[candidate].contract
    if document["judging"][judgement][contract] != at_hand.judging.get(judgement, {}).get(contract):
        return f"the code that judges {judgement} for contract {contract} has changed since"
    return ""


def outdated_sources(document: Mapping[str, Any], candidate: str, at_hand: AtHand) -> str:
    """Why a document does not speak of a candidate as it is now."""
    entry = next(c for c in document["candidates"] if c["name"] == candidate)
    known = at_hand.candidates.get(candidate)
    if known is None:
        return f"no candidate named {candidate} is at hand"
    if entry["contract"] != known.contract:
        return f"the candidate was judged by contract {entry['contract']}, and its contract is {known.contract}"
    if entry["sources"]["sha256"] != known.sources:
        return f"the candidate's sources have changed since: {_changed(entry, known)}"
    return ""


def _outside(environment: Mapping[str, Any], policy: Policy) -> str:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    for package, allowed in policy.toolchain.items():
        found = environment.get(package)
        try:
            fits = found is not None and SpecifierSet(allowed).contains(Version(str(found)), prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            return f"the evidence was recorded with {package} {found}, and the policy allows {allowed}"
    return ""


def _changed(entry: Mapping[str, Any], known: KnownCandidate) -> str:
    then = entry["sources"]["files"]
    names = sorted(name for name in {*then, *known.files} if then.get(name) != known.files.get(name))
    shown = ", ".join(names[:3]) or "the files are the same, their total is not"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
