"""How a kernel is judged: candidates, layouts, payloads, cases, judgements, and the pytest suites that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .candidates import Candidate, CandidateError

__all__ = ["Candidate", "CandidateError"]


def __getattr__(name: str) -> Any:
    # Late, because pytest loads this package's plugin in every session, and most have no use for torch.
    if name in __all__:
        from . import candidates

        return getattr(candidates, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
