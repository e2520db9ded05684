"""What a candidate's tensors are held against, whatever the family: admissible sets, strict bytes, certification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ropecheck.oracle.certify import certify
from ropecheck.oracle.rotation import Comparison, Point, Rotation, compare, rotate_strict

if TYPE_CHECKING:
    from .family import Family


@dataclass(frozen=True)
class Held:
    """What came out of holding a tensor against what is expected.

    ``outside`` counts computed elements that are not admissible, ``moved`` elements that should have been moved bit
    for bit and were not. ``worst`` describes the worst elements, ``fingerprint`` names the forms of evaluation that
    reproduce all of them, and ``unlike`` counts for each form those that it does not.
    """

    reason: str
    outside: int
    moved: int
    facts: dict[str, Any]
    worst: tuple[dict[str, Any], ...] = ()
    fingerprint: tuple[str, ...] = ()
    unlike: dict[str, int] = field(default_factory=dict)


class Expected(Protocol):
    """The oracle's side of one call, forward or backward. All tensors have the dimensions of x."""

    def held(self, got: Tensor, *, seed: int = 0, samples: int = 128, missed: Tensor | None = None) -> Held:
        """Hold ``got`` against the admissible sets, with ``samples`` points certified (none: no certification).

        ``missed``, bool like ``got``, is made true where an element is not admissible and false elsewhere. Raises
        :class:`~ropecheck.oracle.certify.CertificationError`.
        """
        ...

    def strict(self) -> Tensor:
        """The contract's own bytes."""
        ...

    def may_be_nan(self) -> Tensor:
        """bool: the elements of which a NaN is admissible."""
        ...

    def with_upstream(self, gradient: Tensor) -> Expected:
        """The derivative in which ``gradient`` comes in."""
        ...

    def part(self, at: int) -> Expected:
        """What belongs to the activation number ``at`` alone, of a backward."""
        ...

    def elided(self) -> Iterator[tuple[str, Expected]]:
        """What may come out under a compiler that leaves out intermediate roundings, each with its recipe's name."""
        ...


@dataclass(frozen=True)
class ExpectedRotation:
    """As :class:`Expected`, of a bare rotation. ``positions`` int64 [S, axes] or [B, S, axes] are for reports."""

    rotation: Rotation
    family: Family
    positions: Tensor

    def held(self, got: Tensor, *, seed: int = 0, samples: int = 128, missed: Tensor | None = None) -> Held:
        comparison = compare(self.rotation, got, seed=seed, samples=samples, missed=missed)
        facts: dict[str, Any] = {
            "elements": comparison.elements,
            "outside": comparison.outside,
            "with several admissible values": comparison.several,
            "tail elements changed": comparison.tail_changed,
            "fingerprint": list(comparison.fingerprint),
        }
        if samples:
            points = [*comparison.sample, *comparison.worst]
            certificate = certify(self.rotation.recipe, points, got.dtype)
            facts |= {"certified points": certificate.points, "certified by": certificate.arithmetic}
        worst = tuple(self._element(point) for point in comparison.worst)
        reason = _in_words(comparison)
        return Held(
            reason, comparison.outside, comparison.tail_changed, facts, worst, comparison.fingerprint, comparison.unlike
        )

    def strict(self) -> Tensor:
        return rotate_strict(self.rotation)

    def may_be_nan(self) -> Tensor:
        return self.strict().isnan()

    def with_upstream(self, gradient: Tensor) -> ExpectedRotation:
        return replace(self, rotation=replace(self.rotation, x=gradient, is_gradient=True))

    def part(self, at: int) -> ExpectedRotation:
        x = self.family.lifted(self.family.divided(self.rotation.x)[at])
        return replace(self, rotation=replace(self.rotation, x=x))

    def elided(self) -> Iterator[tuple[str, ExpectedRotation]]:
        for recipe in self.rotation.recipe.with_roundings_elided():
            yield recipe.name, replace(self, rotation=replace(self.rotation, recipe=recipe))

    def _element(self, point: Point) -> dict[str, Any]:
        """An element as a person needs it: which token, head and lane, what was admissible, what came."""
        sample, token, head, channel = point.index
        where = self.positions[token] if self.positions.dim() == 2 else self.positions[sample, token]
        tensor = self.family.tensor_of(head)
        return {
            **({"tensor": tensor} if tensor else {}),
            "sample": sample,
            "token": token,
            "head": head,
            "channel": channel,
            "lane": point.lane,
            "position": where.tolist(),
            "member": "first" if point.output == "y0" else "second",
            "inputs": {"x0": shown(point.x0), "x1": shown(point.x1), "cos": shown(point.c), "sin": shown(point.s)},
            "admissible": [shown(point.low), shown(point.high)],
            "strict": shown(point.strict),
            "got": shown(point.got),
            "outside_by_ulp": point.outside_by,
        }


def _in_words(comparison: Comparison) -> str:
    parts = []
    if comparison.outside:
        share = 100 * comparison.outside / comparison.elements
        parts.append(f"{comparison.outside} of {comparison.elements} elements ({share:.3g} %) are not admissible")
    if comparison.tail_changed:
        parts.append(f"{comparison.tail_changed} pass-through elements changed")
    return "; ".join(parts)


def shown(value: float) -> str:
    """A float's shortest decimal and its exact hexadecimal form."""
    return f"{value:.9g} ({value.hex()})" if value == value and abs(value) != float("inf") else str(value)
