"""The gate: what became of each cell that a policy requires, given evidence and what is at hand.

A cell is passed only where evidence shows it: whatever is missing, or cannot be told, is red and says why. Where
several runs judged a cell, a failure counts before a pass, and a pass before a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from typing import Any

from ropecheck.suites.cases import PLANS

from .at_hand import AtHand, KnownCandidate
from .evidence.merging import contradiction
from .floors import benchmark_of, sensitivity_of
from .freshness import outdated, unfit
from .policy import ANNOTATE, REQUIRABLE, Policy, Requirement
from .states import Cell, decided, worst

Key = tuple[str, str, str]
"""Candidate, judgement, device."""

_OTHERS = ("fail", "not-applicable", "blocked")


@dataclass(frozen=True)
class Witness:
    """One document of evidence, and why nothing of it counts (empty where it may)."""

    document: Mapping[str, Any]
    unfit: str

    @cached_property
    def cells(self) -> dict[Key, list[Mapping[str, Any]]]:
        found: dict[Key, list[Mapping[str, Any]]] = {}
        for cell in self.document["cells"]:
            found.setdefault((cell["candidate"], cell["judgement"], cell["device"]), []).append(cell)
        return found

    @property
    def gpus(self) -> int:
        return len(self.document["environment"]["gpus"])

    @property
    def plan(self) -> str:
        """The plan that was asked; empty where the run had none."""
        plan: str = (self.document["run"].get("selection") or {}).get("plan", "")
        return plan

    def stale(self, key: Key, at_hand: AtHand) -> str:
        """Why the document does not speak of the cell as it would be judged now."""
        return self.unfit or outdated(self.document, key[0], key[1], at_hand)

    def failures(self, key: Key) -> str:
        """What failed in the cell, empty where nothing did."""
        failing = [cell for cell in self.cells.get(key, []) if cell.get("fail")]
        return f"{sum(cell['fail'] for cell in failing)} fail: {_reason(failing)}" if failing else ""


def gated(
    policy: Policy, documents: Sequence[Mapping[str, Any]], at_hand: AtHand, now: datetime, pending: str = ""
) -> list[Cell]:
    """Every cell that the policy requires, and whatever else in ``documents`` turns the gate red.

    ``pending`` says why evidence may still be to come; a cell that no document holds is then pending.
    """
    witnesses = [Witness(document, unfit(document, policy, now)) for document in documents]
    gate = _Gate(policy, witnesses, at_hand, now.date(), pending)
    dated = [(w.document, w.unfit) for w in witnesses]
    cells = list(gate.required())
    if policy.sensitivity is not None:
        cells.append(sensitivity_of(policy.sensitivity, dated, at_hand))
    cells += [benchmark_of(floor, dated, at_hand) for floor in policy.benchmarks]
    return [*cells, *dict.fromkeys(gate.unasked_for({cell.parts for cell in cells}))]


@dataclass(frozen=True)
class _Gate:
    policy: Policy
    witnesses: Sequence[Witness]
    at_hand: AtHand
    today: date
    pending: str

    def required(self) -> Iterator[Cell]:
        """Each required cell once."""
        found: dict[Key, list[Cell]] = {}
        for requirement, *parts in self.policy.required(self.at_hand.candidates):
            asked = (parts[0], parts[1], parts[2])
            found.setdefault(asked, []).append(self._cell(requirement, asked))
        for key, cells in found.items():
            yield self._overridden(key, worst(cells))

    def _cell(self, requirement: Requirement, key: Key) -> Cell:
        known = self.at_hand.candidates.get(key[0])
        if known is None:
            return Cell(key, "missing", "no candidate of that name is at hand")
        if unclaimed := [claim for claim in requirement.claims if claim not in known.provides]:
            return Cell(key, "missing", f"the candidate does not claim {', '.join(unclaimed)}")
        holding = [witness for witness in self.witnesses if key in witness.cells]
        if not holding:
            reason = "no evidence holds this cell"
            return Cell(key, "pending", f"{reason}: {self.pending}") if self.pending else Cell(key, "missing", reason)
        fresh = [witness for witness in holding if not witness.stale(key, self.at_hand)]
        if not fresh:
            return self._outdated(requirement, key, holding)
        asked = known.asked.get(fresh[0].plan, {})
        dtypes = [*requirement.dtypes, *(d for judgement, device, d in asked if d and (judgement, device) == key[1:])]
        return worst(
            decided([self._account(requirement, key, known, dtype, witness) for witness in fresh])
            for dtype in dict.fromkeys(dtypes or [""])
        )

    def _outdated(self, requirement: Requirement, key: Key, holding: Sequence[Witness]) -> Cell:
        # The newest is the one that somebody would want to bring up to date.
        newest = max(holding, key=lambda witness: str(witness.document["run"].get("started")))
        why = newest.stale(key, self.at_hand)
        if failures := newest.failures(key):
            return Cell(key, "failed", f"{failures}; and the evidence is stale: {why}")
        return Cell(key, "stale", why, allowed=requirement.stale == ANNOTATE)

    def _account(self, requirement: Requirement, key: Key, known: KnownCandidate, dtype: str, witness: Witness) -> Cell:
        """What one document, which is fresh, says of one dtype of a cell. A cell without dtype was not asked at all,
        for a reason that holds for all of them."""
        found = next((c for c in witness.cells[key] if c["dtype"] in (dtype, "")), None)
        said = f" in {dtype}" if dtype else ""
        if found is None:
            return Cell(key, "missing", f"0 cases{said}, {requirement.cases} are required")
        totals = {verdict: found.get(verdict, 0) for verdict in ("pass", *_OTHERS)}
        reason = _reason([found])
        if totals["fail"]:
            return Cell(key, "failed", witness.failures(key))
        if totals["not-applicable"]:
            return Cell(key, "missing", f"{totals['not-applicable']} not-applicable{said}: {reason}")
        if totals["blocked"]:
            return self._blocked(key, witness, f"{totals['blocked']} blocked{said}: {reason}")
        short = self._too_little(requirement, key, known, found, witness)
        return Cell(key, "missing", short) if short else Cell(key, "passed")

    def _blocked(self, key: Key, witness: Witness, said: str) -> Cell:
        permissions = [p for p in self.policy.permissions if p.covers(*key, witness.gpus)]
        if not permissions:
            return Cell(key, "blocked", said)
        last = max(permissions, key=lambda permission: permission.expires)
        if last.expires < self.today:
            return Cell(key, "expired", f"{said}; the permission for it ended on {last.expires}: {last.reason}")
        return Cell(key, "blocked", f"{said}; allowed until {last.expires}: {last.reason}", allowed=True)

    def _too_little(
        self, requirement: Requirement, key: Key, known: KnownCandidate, found: Mapping[str, Any], witness: Witness
    ) -> str:
        """Why the passes of a document are not all that must be; empty where they are."""
        said = f" in {found['dtype']}" if found["dtype"] else ""
        if key[2] == "cuda" and not witness.gpus:
            return "the evidence says that it was recorded on a machine without a GPU"
        if witness.plan not in PLANS:
            return f"the plan {witness.plan!r} was asked, which there is not"
        if self.policy.plan and PLANS.index(witness.plan) < PLANS.index(self.policy.plan):
            return f"plan {witness.plan} was asked, which is less than {self.policy.plan}"
        if not found.get("pass"):
            return f"zero cases were judged{said}"
        number, digest = known.asked.get(witness.plan, {}).get((key[1], key[2], found["dtype"]), (0, ""))
        if found["pass"] != number:
            return f"{found['pass']} cases{said} were judged, and plan {witness.plan} has {number} at hand"
        if found["cases"] != digest:
            return f"other cases{said} were judged than plan {witness.plan} has at hand"
        if found["pass"] < requirement.cases:
            return f"{found['pass']} cases{said}, {requirement.cases} are required"
        return ""

    def _overridden(self, key: Key, cell: Cell) -> Cell:
        overrides = [override for override in self.policy.overrides if override.hold(*key)]
        if cell.met or not overrides:
            return cell
        last = max(overrides, key=lambda override: override.expires)
        was = f"{cell.state}: {cell.reason}"
        if last.expires < self.today:
            return Cell(key, "expired", f"the override of {last.who} ended on {last.expires}; it is {was}")
        return Cell(key, "overridden", f"OVERRIDDEN by {last.who} until {last.expires}: {last.why}; it is {was}")

    def unasked_for(self, required: Collection[tuple[str, ...]]) -> Iterator[Cell]:
        """What is red though it is not ``required``: failures, cells that nobody knows, a judge that failed."""
        if not any(witness.cells for witness in self.witnesses):
            yield Cell(("evidence",), "missing", "the evidence holds not one judged cell")
        if said := contradiction([witness.document for witness in self.witnesses]):
            yield Cell(("evidence",), "failed", said)
        for witness in self.witnesses:
            if wrong := _beyond_cells(witness.document):
                yield Cell(("evidence",), "failed", wrong)
            for key, cells in witness.cells.items():
                if unknown := self._unknown(key, cells, witness):
                    yield Cell(key, "stale", unknown)
                elif (
                    key not in required and not witness.stale(key, self.at_hand) and (failures := witness.failures(key))
                ):
                    yield Cell(key, "failed", f"{failures}; no policy requires it, and none excuses it")

    def _unknown(self, key: Key, cells: Sequence[Mapping[str, Any]], witness: Witness) -> str:
        known = self.at_hand.candidates.get(key[0])
        if known is None:
            return "unknown cell: no candidate of that name is at hand"
        if key[1] not in REQUIRABLE:
            return "unknown cell: no judgement has that name"
        if witness.stale(key, self.at_hand):
            return ""
        asked = known.asked.get(witness.plan, {})
        extra = [c["dtype"] for c in cells if c["dtype"] and (key[1], key[2], c["dtype"]) not in asked]
        return f"unknown cell: plan {witness.plan} asks it nothing in {', '.join(extra)}" if extra else ""


def _reason(cells: Sequence[Mapping[str, Any]]) -> str:
    return next((reason for cell in cells for reason in cell["reasons"]), "no reason is given")


def _beyond_cells(document: Mapping[str, Any]) -> str:
    """What a run says of itself that no cell shows; empty where nothing is wrong with it."""
    # A run that is not over yet has no exit status.
    status = document["run"].get("exit status")
    if status == 4:
        return "the oracle or the judge itself failed in a run: its exit status is 4"
    if unequal := [pin["contract"] for pin in document["pins"] if pin["state"] == "unequal"]:
        return f"a vendor's function does not return the bytes that {', '.join(unequal)} is pinned to"
    if status == 1 and document["cells"] and not any(c.get("fail") for c in document["cells"]):
        return "the exit status of a run is 1, and none of its cells holds a failure"
    return ""
