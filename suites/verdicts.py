"""Verdicts: the answer to one judgement on one case, and how it is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

PASS, FAIL, NOT_APPLICABLE, BLOCKED = "pass", "fail", "not-applicable", "blocked"
VERDICTS = (PASS, FAIL, NOT_APPLICABLE, BLOCKED)


@dataclass(frozen=True)
class Verdict:
    """One case's outcome.

    ``verdict`` is pass, fail, not-applicable (with the reason) or blocked (could not run); blocked is never pass.
    ``facts`` holds what was measured, JSON values only. ``worst`` describes the worst element of a failure.
    """

    candidate: str
    contract: str
    judgement: str
    device: str
    dtype: str
    case: str
    verdict: Literal["pass", "fail", "not-applicable", "blocked"]
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    worst: Mapping[str, Any] | None = None
    level: str = "L1"
    seed: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Verdict:
        return cls(**record)

    def timed(self, seconds: float) -> Verdict:
        return replace(self, seconds=round(seconds, 4))


@dataclass(frozen=True)
class Finding:
    """What a judgement found on one case, before it is attached to the candidate and the case."""

    verdict: Literal["pass", "fail", "not-applicable", "blocked"]
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    worst: Mapping[str, Any] | None = None


def passed(**facts: Any) -> Finding:
    return Finding("pass", facts=facts)


def failed(reason: str, worst: Mapping[str, Any] | None = None, **facts: Any) -> Finding:
    return Finding("fail", reason, facts, worst)


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, infinities and NaN as strings."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many of each of the four."""
    totals = dict.fromkeys(VERDICTS, 0)
    for v in verdicts:
        totals[v.verdict] += 1
    return totals
