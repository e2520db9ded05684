"""Policies: which cells of candidate x judgement x device evidence must show passed, and what little may be otherwise.

``docs/policies.md`` shows the file that :func:`~ropecheck.ci.policy_file.load_policy` reads. Here is what it says: each
object answers which cells it is about. A cell is named by candidate, judgement and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase

from ropecheck.suites.candidates import DEVICES
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judgements.sanitizer import SANITIZER

NEEDS = ("gpu", "triton", "native")
"""What a policy can ask of the machine: an NVIDIA GPU, Triton, our native library."""

REQUIRABLE = (*JUDGEMENTS, SANITIZER)
"""What a policy may require: the judgements of ``ropecheck verify``, and that of ``ropecheck sanitize``."""

RED, ANNOTATE = "red", "annotate"
STALE = (RED, ANNOTATE)
"""What stale evidence is to a requirement: not met, or met with a warning."""


class PolicyError(ValueError):
    """A policy cannot be used, or not with the other options. The message is one sentence."""


@dataclass(frozen=True)
class Cells:
    """The cells of every matching candidate with every judgement on every device. Candidates are shell patterns."""

    candidates: tuple[str, ...]
    judgements: tuple[str, ...]
    devices: tuple[str, ...]

    def hold(self, candidate: str, judgement: str, device: str) -> bool:
        """Whether the cell is one of these."""
        return judgement in self.judgements and device in self.devices and self.name(candidate)

    def name(self, candidate: str) -> bool:
        """Whether the candidate is one of these cells'."""
        return any(fnmatchcase(candidate, pattern) for pattern in self.candidates)


@dataclass(frozen=True)
class Requirement(Cells):
    """Cells that must be passed.

    ``cases`` is the least number of passed cases in each of ``dtypes`` and in each other dtype that is asked;
    ``claims`` is what each candidate must claim; ``stale`` is what evidence of other sources, another judge or another
    toolchain is: ``red``, or ``annotate``.
    """

    cases: int = 1
    dtypes: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    stale: str = RED


@dataclass(frozen=True)
class Permission(Cells):
    """Cells that may be blocked up to and on the day ``expires``, and why; with ``gpus``, only where the evidence comes
    from a machine that has no more GPUs than that."""

    reason: str
    expires: date
    gpus: int | None = None

    def covers(self, candidate: str, judgement: str, device: str, gpus: int) -> bool:
        """Whether the cell may be blocked on a machine with that many GPUs, the day aside."""
        return (self.gpus is None or gpus <= self.gpus) and self.hold(candidate, judgement, device)


@dataclass(frozen=True)
class Override(Cells):
    """Cells that do not turn the gate red up to and on the day ``expires``: on whose word, and why."""

    who: str
    why: str
    expires: date


@dataclass(frozen=True)
class SensitivityFloor:
    """Of at least ``faults`` judged faults the suite must see at least the share ``coverage``."""

    coverage: float
    faults: int


@dataclass(frozen=True)
class BenchmarkFloor:
    """The benchmark ``name`` on ``device`` may take at most ``ratio`` times what it is compared with."""

    name: str
    device: str
    ratio: float


@dataclass(frozen=True)
class Policy:
    """What evidence is held to. ``sha256`` is that of the files; an empty ``plan`` leaves the choice to the run;
    ``toolchain`` maps package names to version specifiers."""

    name: str
    requirements: tuple[Requirement, ...]
    permissions: tuple[Permission, ...] = ()
    overrides: tuple[Override, ...] = ()
    needs: tuple[str, ...] = ()
    plan: str = ""
    max_age_days: int | None = None
    toolchain: Mapping[str, str] = field(default_factory=dict)
    sensitivity: SensitivityFloor | None = None
    benchmarks: tuple[BenchmarkFloor, ...] = ()
    sha256: str = ""

    @property
    def devices(self) -> list[str]:
        """The devices that some requirement names."""
        return [d for d in DEVICES if any(d in requirement.devices for requirement in self.requirements)]

    def requires(self, candidate: str) -> bool:
        """Whether some requirement names the candidate."""
        return any(requirement.name(candidate) for requirement in self.requirements)

    def of_a_run(self) -> Policy:
        """What one run of ``ropecheck verify`` can answer for: not what another command writes, and not what evidence
        that was recorded earlier may answer for as well."""
        kept = (
            replace(r, judgements=tuple(j for j in r.judgements if j in JUDGEMENTS))
            for r in self.requirements
            if r.stale == RED
        )
        return replace(self, requirements=tuple(r for r in kept if r.judgements), sensitivity=None, benchmarks=())

    def required(self, names: Iterable[str]) -> Iterator[tuple[Requirement, str, str, str]]:
        """Each requirement with each of its cells, for the candidates called ``names``; a pattern that is no name of
        them stands for itself."""
        known = sorted(names)
        for requirement in self.requirements:
            for pattern in requirement.candidates:
                for candidate in [n for n in known if fnmatchcase(n, pattern)] or [pattern]:
                    for judgement in requirement.judgements:
                        for device in requirement.devices:
                            yield requirement, candidate, judgement, device

    def check(self, names: Iterable[str]) -> None:
        """Raise :class:`PolicyError` for a permission or override that is about no required cell of the candidates
        called ``names``: a slip of the pen that would stay unseen until it is needed."""
        cells = {tuple(cell) for _, *cell in self.required(names)}
        for key, entries in (("may_block", self.permissions), ("override", self.overrides)):
            for entry in entries:
                for pattern in entry.candidates:
                    for judgement in entry.judgements:
                        alone = replace(entry, candidates=(pattern,), judgements=(judgement,))
                        if not any(alone.hold(*cell) for cell in cells):
                            raise PolicyError(
                                f"--policy {self.name}: {pattern!r} with {judgement} in [[{key}]] is no required cell "
                                "of a candidate at hand"
                            )
