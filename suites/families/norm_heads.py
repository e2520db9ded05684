"""Which heads of a logical x [1, T, H, D] of family ``norm_rotate_gate`` are queries, gates and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadCounts:
    """``q`` queries, each followed by its gate where there are gates, and then ``k`` keys."""

    q: int
    k: int
    gate: bool = True

    @classmethod
    def of(cls, heads: int, k: int, gate: bool) -> HeadCounts:
        """The division of ``heads`` with ``k`` keys, or about a third of them where ``k`` is 0.

        Raises ValueError where the other heads cannot be queries and gates.
        """
        parts = 2 if gate else 1
        if heads and not k:
            k = max(1, heads // 3)
            k += (heads - k) % parts
        if (heads - k) % parts or k > heads:
            raise ValueError(f"heads must be keys and queries with a gate each, not {heads} with {k} keys")
        return cls((heads - k) // parts, k, gate)

    @property
    def parts(self) -> int:
        """1, or 2 where every query has a gate."""
        return 2 if self.gate else 1

    @property
    def before_keys(self) -> int:
        return self.q * self.parts

    def queries(self, x: Tensor) -> Tensor:
        """[.., Hq, D] of x [.., H, D], as are the gates and, with Hk, the keys."""
        return x[..., : self.before_keys : self.parts, :]

    def gates(self, x: Tensor) -> Tensor:
        return x[..., 1 : self.before_keys : 2, :] if self.gate else x[..., :0, :]

    def keys(self, x: Tensor) -> Tensor:
        return x[..., self.before_keys :, :]

    def joined(self, queries: Tensor, keys: Tensor, gates: Tensor) -> Tensor:
        """The inverse. Without gates, ``gates`` has no head."""
        if self.gate:
            queries = torch.stack((queries, gates), dim=-2).flatten(-3, -2)
        return torch.cat((queries, keys), dim=-2)

    def tensor_of(self, head: int) -> tuple[str, int]:
        """('q', 'gate' or 'k', the head's number there) of head ``head`` of x."""
        if head >= self.before_keys:
            return "k", head - self.before_keys
        return ("gate" if head % self.parts else "q"), head // self.parts
