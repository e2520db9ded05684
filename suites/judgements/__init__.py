"""The judgements by name. A new one is a module here and one entry of :data:`JUDGEMENTS`."""

from __future__ import annotations

from .accuracy import ACCURACY_FORWARD, ACCURACY_VJP
from .invariance import INVARIANCE_FORWARD, INVARIANCE_VJP
from .judgement import Judgement
from .no_copy import NO_COPY
from .provenance import PROVENANCE
from .purity import PURITY
from .refusals import REFUSALS
from .repeatability import REPEATABILITY
from .strict_bytes import STRICT_BYTES

JUDGEMENTS: dict[str, Judgement] = {
    judgement.name: judgement
    for judgement in (
        ACCURACY_FORWARD,
        ACCURACY_VJP,
        INVARIANCE_FORWARD,
        INVARIANCE_VJP,
        STRICT_BYTES,
        PURITY,
        NO_COPY,
        REPEATABILITY,
        REFUSALS,
        PROVENANCE,
    )
}

__all__ = ["JUDGEMENTS", "Judgement"]
