"""What the judgements ask of family ``rotate_qk`` alone: how positions are stored, head counts, the model's own cache.

Positions that start again are asked of every family: the samples of a case lie end to end, each counted from zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cases import Inputs
    from .family import Asked

_HEADS = ((16, 4), (24, 4), (64, 8), (8, 1), (4, 4), (32, 32), (1, 1))
_WIDTHS = ((20, 80), (16, 64), (32, 128), (64, 128), (128, 128), (64, 256), (128, 256), (72, 72), (256, 256))
_STORAGES = (
    "int32-positions", "sliced-positions", "transposed-positions", "misaligned-positions",
    "int32-positions+sliced-positions", "int32-positions+transposed-positions", "int32-positions+misaligned-positions",
)  # fmt: skip


def further(judgement: str, plan: str) -> Asked:
    """The inputs, some with a variant, that ``judgement`` asks in ``plan`` besides those of every family."""
    from ..cases import Inputs

    rows = Inputs(batch=2, length=5, heads=4, k_heads=1, options="int32-positions+sliced-positions")
    columns = Inputs(length=13, heads=9, k_heads=1, options="transposed-positions", x_view="packed-qkv")
    apart = Inputs(length=13, heads=5, k_view="packed-qkv", options="int32-positions")
    if judgement in ("accuracy-forward", "accuracy-vjp"):
        asked = (Inputs(options="int32-positions"), rows, columns)
        return asked if plan == "smoke" else (*asked, *_accuracy(plan))
    if judgement == "autocast" and plan != "smoke":
        # Rows that have no number of the narrow dtype.
        return ((Inputs(length=9, positions="row-ends", options="model-cache"), "forward/to=bfloat16"),)
    calls = 100 if plan == "full" else 10
    variants = {
        "strict-bytes": ("forward", "vjp"),
        "purity": ("forward", "vjp"),
        "provenance": ("forward", "vjp"),
        "no-copy": ("forward", "vjp"),
        "graph-replay": ("forward", "vjp"),
        "sanitizer": ("forward", "vjp"),
        "repeatability": (f"forward/calls={calls}", f"vjp/calls={calls}"),
        "fullgraph": ("forward/dynamic",),
        "export": ("dynamic",),
        "device-guard": ("forward/tensors-elsewhere", "vjp/side-stream"),
        "table-gradient": ("both",),
    }.get(judgement, ())
    if judgement == "table-gradient":
        # Both samples are counted from zero, and their tokens share rows of the cache: gradients are added there.
        rows = columns = apart = Inputs(batch=2, length=5, options="shared-rows")
    chosen = (rows,) if plan == "smoke" else (rows, columns, apart)
    return tuple((given, variant) for given in chosen for variant in variants)


def _accuracy(plan: str) -> tuple[Inputs, ...]:
    from ..cases import Inputs

    def of_heads(q: int, k: int, length: int) -> Inputs:
        return Inputs(length=length, heads=q + k, k_heads=k, x_view="packed-qkv", gradient_view="packed-qkv")

    standard = (
        *(Inputs(length=11, heads=5, options=stored) for stored in _STORAGES),
        *(Inputs(length=11, heads=5, k_view="heads-first", options=stored) for stored in _STORAGES),
        *(of_heads(q, k, 17) for q, k in _HEADS),
        # Without the claim strided, too. At position 0 nothing would turn.
        *(Inputs(length=2, heads=q + k, k_heads=k) for q, k in _HEADS),
        *(replace(of_heads(q, k, 1), positions="ramp") for q, k in _HEADS[:2]),
        *(Inputs(length=1, heads=q + k, k_heads=k, positions="far", options="model-cache") for q, k in _HEADS[:2]),
        *(Inputs(length=1, positions="ramp", payload=payload) for payload in ("basis-first", "basis-second")),
        Inputs(batch=2, length=5, options="shared-rows"),
        # The model's own rows, at positions whose numbers end in one, two and three bytes, and two samples from zero.
        Inputs(length=9, positions="row-ends", options="model-cache"),
        Inputs(length=9, positions="row-ends", options="model-cache+int32-positions"),
        Inputs(batch=2, length=17, options="model-cache"),
        *(Inputs(batch=2, length=3, head_dim=width, rotary_dim=rotary) for rotary, width in _WIDTHS),
        *(Inputs(length=5, table_view=view, options="sliced-positions") for view in ("sliced-rows", "transposed")),
    )
    if plan == "standard":
        return standard
    return (*standard, *(of_heads(q, k, length) for q, k in _HEADS[:2] for length in (512, 3072)))
