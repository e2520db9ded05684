"""sanitizer: does a checker of memory, races, initialisation or barriers report anything of the candidate's kernels?

Asked by ``ropecheck sanitize``, which calls the candidate under each tool of NVIDIA's compute-sanitizer: memcheck
(accesses outside an allocation, or misaligned), racecheck (races in shared memory), initcheck (reads of device memory
that nobody wrote) and synccheck (barriers that not every thread reaches). Every operand ends where its allocation ends,
and torch takes each allocation from the driver, so that an access beyond an operand is one beyond its memory. One
report is a failure. The tools see what ran: a path that no case takes, and races in global memory, go unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from ..candidates import Candidate
from ..cases import Case, Inputs, cases_of
from ..families import FAMILIES

SANITIZER = "sanitizer"
"""The judgement's name. It is asked by a command of its own, so it is not one of ``JUDGEMENTS``."""

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

ASKS = __doc__

_SMOKE = ((Inputs(batch=2), "forward"), (Inputs(batch=2, x_view="packed-qkv", gradient_view="packed-qkv"), "vjp"))
_STANDARD = (
    *_SMOKE,
    (Inputs(length=13, heads=5, table="per-sample", x_view="misaligned", table_view="misaligned"), "forward"),
    (Inputs(batch=2, length=5, x_view="channels-stride-2", table_view="lanes-stride-2", conjugate=True), "forward"),
    (Inputs(batch=2, length=1, heads=33, table="per-sample", table_view="end-of-allocation"), "forward"),
    (Inputs(batch=2, length=19, head_dim=80, rotary_dim=48, positions="far"), "forward"),
    (Inputs(batch=2, length=5, heads=5, head_dim=67, rotary_dim=34, x_view="packed-qkv-misaligned"), "forward"),
    (Inputs(batch=2, length=17, heads=9, gradient_view="heads-first", table_view="transposed"), "vjp"),
    (Inputs(length=64, heads=24), "forward"),
)
_FULL = (
    *_STANDARD,
    (Inputs(batch=2, length=5, x_view="wider-heads", table_view="sliced-rows", table="per-sample"), "forward"),
    (Inputs(batch=2, length=5, heads=5, k_view="channels-stride-2"), "forward"),
    (Inputs(batch=2, length=5, x_view="all-stride-0", table_view="batch-stride-0", table="per-sample"), "forward"),
    (Inputs(length=13, head_dim=256, rotary_dim=64), "vjp"),
    (Inputs(batch=2, heads=7, head_dim=6, rotary_dim=2, x_view="misaligned"), "forward"),
    (Inputs(batch=9, length=2, heads=33, table="per-sample", gradient_view="misaligned"), "vjp"),
    (Inputs(length=260, heads=2), "forward"),
)


def cases(candidate: Candidate, plan: str) -> Iterator[Case]:
    """The cases of a plan, on a GPU, in turn in each of the candidate's dtypes; in the full plan each in all."""
    alone = FAMILIES[candidate.family].further(SANITIZER, plan, "cuda")
    chosen = (*{"smoke": _SMOKE, "standard": _STANDARD, "full": _FULL}[plan], *alone)
    for entry, turn in zip(chosen, cycle(candidate.dtypes), strict=False):
        given, variant = entry if isinstance(entry, tuple) else (entry, "forward")
        if variant == "vjp" and "vjp" not in candidate.provides:
            continue
        for dtype in candidate.dtypes if plan == "full" else (turn,):
            yield from cases_of(SANITIZER, candidate, "cuda", dtype, [(given, variant)])
