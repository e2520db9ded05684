"""Faults: named, parametrised ways to be wrong, each with the wrong candidate that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract

from ..candidates import Candidate
from .mutants import mutant
from .reading import Reading

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Dtypes as sentences have them."""

Change = Callable[..., Reading]
"""``change(reading, *parameters)``: the call as it is misread. Where that makes no sense, the reading as it was."""

Observed = Sequence[Tensor]
"""What came out, [B, S, H, D] for each part of a reading."""

Search = Callable[[Reading, Observed], Iterable[tuple[object, ...]]]
"""The parameters with which a misreading is tried as an explanation."""


@dataclass(frozen=True)
class Fault:
    """One way to be wrong. ``says`` is what a diagnosis prints; ``candidate`` makes the wrong candidate anew.

    ``dtype`` is the one in which it is judged, ``rows`` the public reports that it stands for. Where ``equivalent``
    is not empty it says why this one is no fault after all, and ``check`` executes the proof: it says where that fails.
    """

    name: str
    kind: Literal["semantic", "mechanical"]
    says: str
    family: str
    contract: str
    candidate: Callable[[], Candidate]
    dtype: str = "bfloat16"
    rows: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    equivalent: str = ""
    check: Callable[[], str] | None = None


@dataclass(frozen=True)
class Misreading:
    """A semantic fault: ``change`` with the parameters ``given`` in the dictionary, and others that a
    ``search`` finds.

    Without a ``search`` these alone are tried as an explanation. ``says`` is formatted with the parameters, or called
    as ``says(own, *parameters)``. ``direction`` says which of forward and backward are misread.
    """

    name: str
    says: str | Callable[..., str]
    change: Change
    given: tuple[object, ...] = ()
    search: Search | None = None
    family: str = "rotate"
    contract: str = "qwen-image"
    dtype: str = "bfloat16"
    rows: tuple[str, ...] = ()
    claims: tuple[str, ...] = ("vjp", "any-shape")
    direction: Literal["both", "forward", "backward"] = "both"

    def sentence(self, own: str, *parameters: object) -> str:
        """What a diagnosis says of this fault with ``parameters``, for the contract called ``own``."""
        return self.says.format(*parameters) if isinstance(self.says, str) else self.says(contract(own), *parameters)

    def searched(self, reading: Reading, got: Observed) -> Iterable[tuple[object, ...]]:
        """The parameters with which this fault is tried as an explanation of ``got``."""
        return (self.given,) if self.search is None else self.search(reading, got)

    def misread(self, reading: Reading, *parameters: object) -> Reading:
        """``reading`` as it is misread, if its direction is one that is."""
        if self.direction != "both" and (self.direction == "backward") != reading.backward:
            return reading
        return self.change(reading, *parameters)

    def fault(self) -> Fault:
        """With the dictionary's own parameters."""
        return Fault(
            self.name, "semantic", self.sentence(self.contract, *self.given), self.family, self.contract,
            lambda: mutant(
                self.name, self.contract, self.family, lambda r: self.misread(r, *self.given), self.dtype, self.claims
            ),
            self.dtype, self.rows,
        )  # fmt: skip
