"""Broken: a mechanical fault, which is a kernel that breaks a rule of calls, memory or registration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...candidates import Candidate
from ..fault import Fault


@dataclass(frozen=True)
class Broken:
    """``run`` is the kernel, or with ``stateful`` makes one anew for each candidate. ``more`` are a candidate's fields.

    ``vjp`` is the backward where it is separate; the claim ``vjp`` comes with it.
    """

    name: str
    says: str
    run: Callable[..., Any]
    vjp: Callable[..., Any] | None = None
    family: str = "rotate"
    contract: str = "qwen-image"
    dtype: str = "bfloat16"
    claims: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    stateful: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    more: Mapping[str, Any] = field(default_factory=dict)

    def fault(self) -> Fault:
        return Fault(
            self.name, "mechanical", self.says, self.family, self.contract, self._candidate, self.dtype, self.rows,
            self.device,
        )  # fmt: skip

    def _candidate(self) -> Candidate:
        run = self.run() if self.stateful else self.run
        claims = tuple(dict.fromkeys((*self.claims, *(("vjp",) if self.vjp is not None else ()))))
        return Candidate(
            f"fault/{self.name}", self.contract, run, (self.device,), (self.dtype,), claims, family=self.family,
            vjp=self.vjp, **self.more,
        )  # fmt: skip
