"""The judgements by name. A new one is a module here and one entry of :data:`JUDGEMENTS`."""

from __future__ import annotations

from .accuracy import ACCURACY_FORWARD, ACCURACY_VJP
from .autocast import AUTOCAST
from .autograd import AUTOGRAD
from .codegen import CODEGEN
from .device_guard import DEVICE_GUARD
from .export import EXPORT
from .fullgraph import FULLGRAPH
from .graph_replay import GRAPH_REPLAY
from .higher_vjp import HIGHER_VJP
from .invariance import INVARIANCE_FORWARD, INVARIANCE_VJP
from .judgement import Judgement
from .laws import LAWS
from .no_copy import NO_COPY
from .opcheck import OPCHECK
from .provenance import PROVENANCE
from .purity import PURITY
from .refusals import REFUSALS
from .repeatability import REPEATABILITY
from .strict_bytes import STRICT_BYTES
from .table_gradient import TABLE_GRADIENT

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
        AUTOGRAD,
        HIGHER_VJP,
        TABLE_GRADIENT,
        LAWS,
        OPCHECK,
        FULLGRAPH,
        EXPORT,
        AUTOCAST,
        GRAPH_REPLAY,
        DEVICE_GUARD,
        CODEGEN,
    )
}

__all__ = ["JUDGEMENTS", "Judgement"]
