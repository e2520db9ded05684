"""Which two channels a lane turns: the pairing, one of a contract's five choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairing:
    """How the first ``2 n`` channels of a head form ``n`` lanes.

    ``adjacent`` pairs channels ``(2 k, 2 k + 1)`` (GPT-J, FLUX, Qwen-Image); ``half-split`` pairs
    ``(k, k + n)`` (GPT-NeoX, Llama).
    """

    name: Literal["adjacent", "half-split"]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and second member of each lane: ``[..., 2 n]`` to two ``[..., n]``."""
        if self.name == "adjacent":
            return x[..., 0::2], x[..., 1::2]
        return x.chunk(2, dim=-1)[0], x.chunk(2, dim=-1)[1]

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """The inverse of :meth:`split`, as a new tensor ``[..., 2 n]``."""
        if self.name == "adjacent":
            return torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((first, second), dim=-1)

    def channels(self, lane: int, lanes: int) -> tuple[int, int]:
        """The two channel numbers of ``lane`` out of ``lanes``."""
        return (2 * lane, 2 * lane + 1) if self.name == "adjacent" else (lane, lane + lanes)


ADJACENT = Pairing("adjacent")
HALF_SPLIT = Pairing("half-split")
