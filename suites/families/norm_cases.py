"""What the judgements ask of family ``norm_rotate_gate`` alone: inputs on which the field's kernels have had faults."""

from __future__ import annotations

from dataclasses import replace

from ..cases import Inputs

_Entry = Inputs | tuple[Inputs, str]

# Rotated channels and channels of a head, with all of a head rotated and not, and no powers of two.
SIZES = ((20, 80), (16, 64), (32, 128), (64, 128), (128, 128), (64, 256), (128, 256), (72, 72), (256, 256),
         (64, 96), (64, 192))  # fmt: skip
# Queries and keys, as models have them.
HEADS = ((16, 4), (24, 4), (64, 8), (8, 1), (4, 4), (32, 32), (1, 1))
# Tokens that a machine without a GPU has no time for.
MANY_TOKENS = (512, 3072)
MAPS = {
    64: (
        "contiguous-11-11-10", "interleaved-1-1-30", "contiguous-1-1-30", "round-robin-11-11-10", "ernie-11-11-10",
        "contiguous-0-16-16+out-of-range", "contiguous-11-11-10+int32-map",
    ),
    128: (
        "contiguous-24-20-20", "interleaved-24-20-20", "contiguous-16-24-24", "interleaved-16-24-24",
        "round-robin-16-24-24",
    ),
}  # fmt: skip
POSITIONS = (
    "int32-positions", "sliced-positions", "transposed-positions", "int32-positions+sliced-positions",
    "int32-positions+transposed-positions", "one-row", "one-row+int32-positions", "one-row+sliced-positions",
    "one-row+transposed-positions", "misaligned-positions", "one-row+int32-positions+misaligned-positions",
)  # fmt: skip
OPTIONS = (
    "no-gate", "plain-weights", "unrounded-norm", "fma", "large-eps", "bfloat16-cache", "float16-cache",
    "float32-weights", "half-offset", "plain-weights+unrounded-norm+fma", "no-gate+plain-weights+float32-weights",
)  # fmt: skip
ONE_ROW = tuple(f"{option}+one-row" for option in OPTIONS)
UNREAD = (
    "slots", "out-of-range", "slots+out-of-range", "slots+out-of-range+int32-positions", "slots+out-of-range+one-row",
    "out-of-range+one-row+int32-positions", "slots+no-gate", "out-of-range+one-row", "slots+int32-slots",
)  # fmt: skip
# With positions that are cut out of a buffer, slots are too.
SPREAD_SLOTS = "slots+transposed-positions"

_SMOKE = (
    Inputs(length=5, options="sliced-positions"),
    Inputs(length=3, options="no-gate+one-row"),
    Inputs(length=6, options="slots+out-of-range"),
)


def _by_heads(q: int, k: int, **dimensions: object) -> Inputs:
    """Of ``q`` queries with their gates and ``k`` keys."""
    return replace(Inputs(heads=2 * q + k, k_heads=k), **dimensions)  # type: ignore[arg-type]


_ACCURACY = (
    *(Inputs(length=5, head_dim=width, rotary_dim=rotary) for rotary, width in SIZES),
    *(Inputs(length=5, head_dim=width, rotary_dim=rotary, options="one-row") for rotary, width in SIZES),
    *(_by_heads(q, k, length=2) for q, k in HEADS),
    # As many tokens as a call of three rows of positions has rows.
    *(_by_heads(q, k, length=3, options="one-row") for q, k in HEADS[::2]),
    Inputs(length=5, heads=8, table_view="sliced-rows", options="one-row"),
    # More tokens than a block, a grid or a table of a kernel is likely to be cut for.
    Inputs(length=1025, head_dim=64, rotary_dim=16),
    Inputs(length=0, options="one-row"),
    Inputs(length=1, options="one-row"),
    # At position 0 nothing would turn.
    *(Inputs(length=1, positions="ramp", options=options) for options in ("", "one-row", "no-gate")),
    *(Inputs(length=1, positions="far", options=f"model-cache{rows}") for rows in ("", "+one-row")),
    _by_heads(16, 4, length=1, positions="ramp"),
    Inputs(length=17, heads=4),
    Inputs(batch=2, length=5, options="shared-rows"),
    *(
        Inputs(length=7, head_dim=2 * rotary, rotary_dim=rotary, options=name)
        for rotary, names in MAPS.items()
        for name in names
    ),
    *(Inputs(length=7, heads=8, options=options) for options in POSITIONS + OPTIONS + ONE_ROW),
    *(Inputs(length=11, heads=8, options=options) for options in (*UNREAD, SPREAD_SLOTS)),
    Inputs(length=9, positions="row-ends", options="model-cache"),
    Inputs(length=9, positions="row-ends", options="model-cache+int32-positions+transposed-positions"),
    Inputs(length=9, positions="far", options="model-cache+one-row+sliced-positions"),
    # Two sequences of one call, both from position 0 on, and of image tokens.
    Inputs(batch=2, length=9, options="model-cache"),
    # Slow lanes print their sine at full relative precision at small positions, with a norm whose factor is 1.
    Inputs(length=255, heads=3, payload="basis-first", positions="ramp", options="model-cache"),
    Inputs(length=255, heads=3, payload="basis-second", positions="ramp", options="model-cache+plain-weights"),
    Inputs(length=255, heads=3, payload="basis-first", positions="ramp", options="contiguous-11-11-10"),
    Inputs(length=16, payload="special", options="slots"),
    *(Inputs(length=5, heads=8, k_view=view) for view in ("contiguous", "packed-qkv", "misaligned")),
    Inputs(length=5, x_view="packed-qkv", table_view="sliced-rows", options="sliced-positions"),
    Inputs(length=5, head_dim=80, rotary_dim=20, x_view="packed-qkv-misaligned", options="no-gate"),
)
_BACKWARD = (
    *(Inputs(length=1, positions="ramp", options=options) for options in ("", "one-row")),
    *(Inputs(length=5, head_dim=width, rotary_dim=rotary) for rotary, width in SIZES),
    *(_by_heads(q, k, length=2) for q, k in HEADS),
    *(Inputs(length=3, head_dim=width, rotary_dim=rotary, options="one-row") for rotary, width in SIZES[::3]),
    *(Inputs(length=7, heads=8, options=options) for options in POSITIONS + OPTIONS + ONE_ROW[:4]),
    *(Inputs(length=11, heads=8, options=options) for options in (*UNREAD, SPREAD_SLOTS)),
    Inputs(length=3, head_dim=256, rotary_dim=128, options="interleaved-16-24-24"),
    Inputs(length=16, payload="special", options="slots"),
    Inputs(length=5, heads=8, k_view="packed-qkv"),
    *(Inputs(length=5, options="no-gate", gradient_view=view) for view in ("all-stride-0", "channels-outermost")),
)
_WEIGHTS = (
    (Inputs(length=5), "weights"),
    (Inputs(length=5, heads=8), "weights-and-x"),
    (Inputs(length=5, heads=8, options="one-row+no-gate"), "weights-and-x"),
    (Inputs(length=5, heads=8), "k_weight-alone"),
    (Inputs(length=5, heads=8), "q_weight-alone"),
    (Inputs(length=1, heads=4), "weights"),
    (Inputs(length=17, heads=5, options="one-row+large-eps", gradient_view="channels-outermost"), "weights"),
    (Inputs(length=9, options="plain-weights+float32-weights+no-gate"), "weights"),
    (Inputs(length=11, options="slots"), "weights"),
    (Inputs(length=6, options="fma"), "weights"),
    (Inputs(length=11, options="out-of-range"), "weights"),
    # Sums of nothing, which are zero.
    (Inputs(length=0), "weights"),
    (Inputs(length=2, options="slots+all-padding"), "weights-and-x"),
    (Inputs(length=13, head_dim=80, rotary_dim=20), "weights"),
    (Inputs(length=5, payload="exact-sum", options="contiguous-11-11-10"), "weights"),
    (Inputs(length=40, heads=5, payload="exact-sum"), "weights"),
    (Inputs(length=40, heads=5, payload="exact-sum", options="slots"), "weights"),
    # More than 1024 rows, and no multiple of a power of two.
    (Inputs(length=129, heads=10, k_heads=8, payload="exact-sum", gradient_view="packed-qkv"), "weights"),
    (
        Inputs(
            length=33, head_dim=128, rotary_dim=128, payload="exact-sum", options="float32-weights",
            gradient_view="packed-qkv-misaligned",
        ),
        "weights",
    ),
)
_PURITY = (
    *(Inputs(length=7, options=options) for options in ("no-gate", "one-row", "transposed-positions", "out-of-range")),
    Inputs(length=5, x_view="packed-qkv", table_view="sliced-rows", options="sliced-positions+int32-positions"),
    Inputs(length=5, heads=5, k_view="misaligned", options="float32-weights"),
)
_PADDING = (
    (Inputs(length=9, heads=8, options="slots"), "padding"),
    (Inputs(length=9, options="slots+no-gate+one-row"), "padding"),
    (Inputs(length=9, head_dim=80, rotary_dim=20, options="slots+out-of-range+int32-positions"), "padding"),
)
# Both specialisations of a kernel: for one row of positions, and for three.
_ALIGNED = Inputs(length=16, heads=12, options="one-row")
_TWO_WAYS = tuple(Inputs(length=7, options=options) for options in ("one-row", "no-gate", "sliced-positions"))


def _each_way(inputs: tuple[Inputs, ...]) -> tuple[_Entry, ...]:
    return tuple((given, variant) for given in inputs for variant in ("forward", "vjp"))


_STANDARD: dict[str, tuple[_Entry, ...]] = {
    "accuracy-forward": _ACCURACY,
    "accuracy-vjp": (*_BACKWARD, *_WEIGHTS),
    "strict-bytes": _each_way(tuple(Inputs(length=7, heads=8, options=o) for o in OPTIONS + UNREAD + ONE_ROW[:4])),
    "purity": (*_each_way(_PURITY), *_PADDING),
    "no-copy": _each_way(_TWO_WAYS),
    "table-gradient": ((Inputs(batch=2, length=5, options="shared-rows"), "both"),),
    "provenance": _each_way(_TWO_WAYS[:2]),
    "graph-replay": _each_way(_TWO_WAYS),
    "codegen": (*_each_way((_ALIGNED,)), (replace(_ALIGNED, options="no-gate"), "forward")),
    "fullgraph": (
        (Inputs(length=5, x_view="packed-qkv", gradient_view="packed-qkv", options="sliced-positions"), "vjp/static"),
        (Inputs(length=5, options="no-gate+one-row"), "forward/dynamic"),
    ),
    "opcheck": (
        (Inputs(length=5, x_view="packed-qkv", options="sliced-positions+int32-positions"), "vjp"),
        (Inputs(length=5, options="no-gate+one-row"), "forward"),
        (Inputs(length=0, options="one-row"), "forward"),
    ),
    "export": (
        (Inputs(length=5, x_view="packed-qkv", options="sliced-positions"), "static"),
        (Inputs(length=5, options="no-gate+one-row"), "dynamic"),
    ),
    "sanitizer": (
        *_each_way((Inputs(length=13, options="slots+out-of-range"),)),
        *_each_way((Inputs(length=5, x_view="packed-qkv", options="one-row+sliced-positions+int32-positions"),)),
        (Inputs(length=9, positions="row-ends", options="model-cache+transposed-positions"), "forward"),
        (Inputs(length=5, head_dim=72, rotary_dim=72, table_view="end-of-allocation"), "forward"),
    ),
}
_SMOKE_OF: dict[str, tuple[_Entry, ...]] = {
    "accuracy-forward": _SMOKE,
    "accuracy-vjp": (*_SMOKE, *_WEIGHTS[:1], *_WEIGHTS[7:8]),
    "strict-bytes": _each_way(_SMOKE),
    "purity": _PADDING[:1],
}


def further(judgement: str, plan: str, device: str) -> tuple[_Entry, ...]:
    """The inputs that ``judgement`` has for this family alone; the largest only on a GPU."""
    if plan == "smoke":
        return _SMOKE_OF.get(judgement, ())
    chosen = _STANDARD.get(judgement, ())
    if judgement == "repeatability":
        calls = 100 if plan == "full" else 10
        chosen += tuple((given, f"{way}/calls={calls}") for given in _TWO_WAYS[:2] for way in ("forward", "vjp"))
    if device == "cuda" and judgement == "accuracy-forward":
        chosen += tuple(_by_heads(16, 4, length=tokens, options="sliced-positions") for tokens in MANY_TOKENS)
    if device == "cuda" and judgement == "accuracy-vjp":
        chosen += (_by_heads(16, 4, length=512), (_by_heads(16, 4, length=513, payload="exact-sum"), "weights"))
    return chosen
