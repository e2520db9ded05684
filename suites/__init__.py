"""How a kernel is judged: candidates, layouts, payloads, cases, judgements, and the pytest suites that run them."""

from .candidates import Candidate, CandidateError

__all__ = ["Candidate", "CandidateError"]
