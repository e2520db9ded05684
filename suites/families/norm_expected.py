"""What a call of family ``norm_rotate_gate`` must return, and holding what came against it.

Queries and keys are held against :class:`~ropecheck.oracle.fused.NormRotation`, each with its own weight; gates, and
their gradients, must be the given bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.admissible import SEPARATE, AdmissibleSet
from ropecheck.oracle.certify_fused import certify_fused
from ropecheck.oracle.certify_fused_vjp import certify_fused_vjp
from ropecheck.oracle.floats import bits, same
from ropecheck.oracle.fused import NormRotation, strict_fused, strict_fused_vjp
from ropecheck.oracle.fused_comparison import FusedComparison, FusedPoint, compare_fused, compare_fused_vjp
from ropecheck.oracle.fused_gradients import gradient_set
from ropecheck.oracle.fused_sets import fused_sets
from ropecheck.oracle.norm import norm_interval, reciprocal_root_interval, strict_norm

from .expected import Held, shown
from .norm_heads import HeadCounts


@dataclass(frozen=True)
class Half:
    """The oracle's side of the queries or of the keys; with ``gradient`` [T, H, D], of their backward."""

    rotation: NormRotation
    gradient: Tensor | None

    def compare(self, got: Tensor, samples: int, seed: int) -> FusedComparison:
        if self.gradient is None:
            return compare_fused(self.rotation, got, samples=samples, seed=seed)
        return compare_fused_vjp(self.rotation, self.gradient, got, samples=samples, seed=seed)

    def certified(self, found: FusedComparison) -> tuple[int, str]:
        points = [*found.sample, *found.worst]
        if self.gradient is None:
            certificate = certify_fused(self.rotation, points)
        else:
            certificate = certify_fused_vjp(self.rotation, self.gradient, points)
        return certificate.points, certificate.arithmetic

    def strict(self) -> Tensor:
        if self.gradient is None:
            return strict_fused(self.rotation)
        return strict_fused_vjp(self.rotation, self.gradient)[0]

    def missed(self, got: Tensor) -> Tensor:
        """bool like ``got`` [T, H, D]: the elements of ordinary tokens that are not members."""
        mask = torch.zeros(got.shape, dtype=torch.bool, device=got.device)
        tokens = self.rotation.judged
        mask[tokens] = ~self._members(tokens).contains(got[tokens])
        return mask

    def may_be_nan(self) -> Tensor:
        mask = self.rotation.poisoned[:, None, None].expand(self.rotation.x.shape).clone()
        tokens = self.rotation.judged
        members = self._members(tokens)
        strict = members.forms[SEPARATE].isnan()
        mask[tokens] = strict if members.classes is None else strict | members.classes[2]
        return mask

    def _members(self, tokens: Tensor) -> AdmissibleSet:
        part = self.rotation.at(tokens)
        return fused_sets(part).members if self.gradient is None else gradient_set(part, self.gradient[tokens])


@dataclass(frozen=True)
class ExpectedNorm:
    """What is expected of one call: ``q`` and ``k``, and of x [1, T, H, D] the gates.

    With ``gradient`` [1, T, H, D] it is the gradient of x for it, coming in. ``positions`` [T, axes] are for reports.
    """

    heads: HeadCounts
    q: NormRotation
    k: NormRotation
    x: Tensor
    positions: Tensor
    gradient: Tensor | None = None

    def held(self, got: Tensor, *, seed: int = 0, samples: int = 128, missed: Tensor | None = None) -> Held:
        """Hold ``got`` [1, T, H, D] against the contract, and certify ``samples`` elements of q and of k.

        Rows of padding are not looked at, but their gradients must be zero. Raises
        :class:`~ropecheck.oracle.certify.CertificationError` on the first disagreement.
        """
        halves = self.halves()
        parts = [of(got[0]) for of in (self.heads.queries, self.heads.keys)]
        found = [half.compare(part, samples, seed) for half, part in zip(halves, parts, strict=True)]
        changed = self._gates_changed(got[0])
        if missed is not None:
            masks = [half.missed(part) for half, part in zip(halves, parts, strict=True)]
            missed.copy_(self.heads.joined(masks[0], masks[1], torch.zeros_like(self.heads.gates(got[0]).bool()))[None])
        elements = sum(f.elements for f in found) + changed.numel()
        facts: dict[str, Any] = {
            "elements": elements,
            "outside": sum(f.outside for f in found),
            "with several admissible values": sum(f.several for f in found),
            "rows that no one root explains": sum(f.unexplained for f in found),
            "gate elements changed": int(changed.sum()),
        }
        unlike: Counter[str] = Counter()
        for forms in (forms for f in found for forms in f.unlike_of.values()):
            unlike.update(forms)
        fingerprint = tuple(name for name in found[0].fingerprint if name in found[1].fingerprint)
        facts["fingerprint"] = list(fingerprint)
        if samples:
            certified = [half.certified(f) for half, f in zip(halves, found, strict=True)]
            facts["certified points"] = sum(points for points, _ in certified)
            facts["certified by"] = certified[0][1]
        worst = [self._described(name, p) for name, f in zip(("q", "k"), found, strict=True) for p in f.worst]
        worst.sort(key=lambda described: -described["outside_by_ulp"])
        outside = facts["outside"] + facts["rows that no one root explains"]
        moved, reason = facts["gate elements changed"], self._reason(found, facts)
        return Held(reason, outside, moved, facts, tuple(worst), fingerprint, dict(unlike))

    def strict(self) -> Tensor:
        """[1, T, H, D]: the contract's own bytes; zeros for padding, as the family joins its outputs."""
        q, k = (half.strict() for half in self.halves())
        gates = self.heads.gates(self.x if self.gradient is None else self.gradient)[0]
        return self.heads.joined(q, k, gates.masked_fill(self.q.skipped[:, None, None], 0.0))[None]

    def may_be_nan(self) -> Tensor:
        q, k = (half.may_be_nan() for half in self.halves())
        gates = self.heads.gates(self.x if self.gradient is None else self.gradient)[0]
        return self.heads.joined(q, k, gates.isnan())[None]

    def normalised(self) -> tuple[Tensor, Tensor]:
        """fp64 [1, T, H, D] twice: the normalised heads in the fixed order, zero in place of gates, and how far from
        them any order may be."""
        parts = []
        for rotation in (self.q, self.k):
            x, weight, norm = rotation.x, rotation.weight, rotation.norm
            low, high = norm_interval(x, weight, norm, reciprocal_root_interval(x, norm.eps))
            fixed = strict_norm(x, weight, norm).double()
            parts.append((fixed, torch.maximum(high.double() - fixed, fixed - low.double())))
        nothing = torch.zeros_like(self.heads.gates(self.x)[0], dtype=torch.float64)
        fixed, spread = (self.heads.joined(q, k, nothing)[None] for q, k in zip(*parts, strict=True))
        return fixed, spread

    def with_upstream(self, gradient: Tensor) -> ExpectedNorm:
        return replace(self, gradient=gradient)

    def part(self, at: int) -> ExpectedNorm:
        """Of q_gate alone (0), or of k (1): its heads are all that there are."""
        of_q = at == 0
        kept = slice(self.heads.before_keys) if of_q else slice(self.heads.before_keys, None)
        heads = replace(self.heads, k=0) if of_q else replace(self.heads, q=0)
        q, k = (replace(r, x=r.x if keep else r.x[:, :0]) for r, keep in ((self.q, of_q), (self.k, not of_q)))
        gradient = None if self.gradient is None else self.gradient[..., kept, :]
        return replace(self, heads=heads, q=q, k=k, x=self.x[..., kept, :], gradient=gradient)

    def elided(self) -> Iterator[tuple[str, ExpectedNorm]]:
        """A compiler may leave out the rounding between norm and rotation; the backward has none to leave out."""
        yield "fp32, the norm rounded" if self.q.norm.round_norm else "fp32", self
        if self.q.norm.round_norm and self.gradient is None:
            norm = replace(self.q.norm, round_norm=False)
            q, k = (replace(rotation, norm=norm) for rotation in (self.q, self.k))
            yield "fp32, the norm not rounded", replace(self, q=q, k=k)

    def halves(self) -> tuple[Half, Half]:
        """Queries and keys."""
        gradient = None if self.gradient is None else self.gradient[0]
        q, k = (
            Half(rotation, None if gradient is None else of(gradient))
            for rotation, of in ((self.q, self.heads.queries), (self.k, self.heads.keys))
        )
        return q, k

    def _gates_changed(self, got: Tensor) -> Tensor:
        """bool, the elements of gates, or of their gradients, that are not what they must be."""
        given = self.heads.gates(self.x if self.gradient is None else self.gradient)[0]
        wanted, came, skipped = given.contiguous(), self.heads.gates(got).contiguous(), self.q.skipped
        if self.gradient is None:
            return (bits(came) != bits(wanted))[~skipped]
        # Accumulated onto zeros, as in the backward of a slice: -0 becomes +0, and a NaN another NaN.
        differs = ~same(came, wanted) & ~((came == 0) & (wanted == 0) & wanted.signbit())
        return torch.where(skipped[:, None, None], came != 0, differs)

    def _reason(self, found: list[FusedComparison], facts: dict[str, Any]) -> str:
        parts = []
        if outside := facts["outside"]:
            share = 100 * outside / facts["elements"]
            parts.append(f"{outside} of {facts['elements']} elements ({share:.3g} %) are not admissible")
        if unexplained := facts["rows that no one root explains"]:
            name, (token, head) = next((n, f.rows[0]) for n, f in zip(("q", "k"), found, strict=True) if f.rows)
            where = f"the first at token {token} and head {head} of {name}"
            parts.append(f"no one reciprocal root explains {unexplained} rows, {where}")
        if changed := facts["gate elements changed"]:
            parts.append(f"{changed} gate elements changed")
        return "; ".join(parts)

    def _described(self, name: str, point: FusedPoint) -> dict[str, Any]:
        token, head, channel = point.index
        lanes = self.q.rotary_dim // 2
        whole = head * self.heads.parts if name == "q" else self.heads.before_keys + head
        return {
            "tensor": name,
            "head of the tensor": head,
            "sample": 0,
            "token": token,
            "head": whole,
            "channel": channel,
            "lane": channel % lanes if channel < 2 * lanes else None,
            "position": self.positions[token].tolist(),
            "admissible": [shown(point.low), shown(point.high)],
            "strict": shown(point.strict),
            "got": shown(point.got),
            "outside_by_ulp": point.outside_by,
        }
