"""M-RoPE as serving engines compute it: each lane reads the time, height or width row of the positions.

Conventions of four axis maps, each with the section, pairing and width of a model that uses it. Every lane has the
frequency of its own number, whichever row it reads. Fused kernels rotate in fp32 with one rounding. Unfused ones, and
transformers (but for Ernie), multiply in the activation dtype; and a fused kernel that shares its cache with an
unfused path in SGLang reads a table that was rounded behind its back, and rotates that in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..axis_maps import STYLES
from ..contract import Contract, LaneMap
from ..frequencies import CosineSine
from ..pairing import ADJACENT, HALF_SPLIT, Pairing
from ..positions import TextAndImages
from ..recipes import ACTIVATION_DTYPE, ACTIVATION_DTYPE_VJP_ONTO_ZEROS, ONE_ROUNDING, ONE_ROUNDING_VJP


def sectioned_lanes(style: str, section: Sequence[int]) -> LaneMap:
    """Lanes of an axis map; all three axes have the frequencies of the whole rotary width.

    ``style`` is a key of :data:`~ropecheck.oracle.axis_maps.STYLES`. Raises ValueError as its builder does.
    """
    lanes = sum(section)
    return LaneMap(STYLES[style](section, 2 * lanes), tuple(range(lanes)), (2 * lanes,) * 3)


def _contract(style: str, section: Sequence[int], pairing: Pairing, theta: float, order: str) -> Contract:
    counts = ", ".join(map(str, section))
    return Contract(
        name=f"mrope-{style}",
        summary=f"M-RoPE, {style} map of ({order}) = ({counts}), {pairing.name} pairs, fp32 rotation, one rounding",
        source="a convention of serving engines; no vendor function is pinned",
        family="rotate_qk",
        head_dim=128,
        positions=TextAndImages(),
        frequencies=CosineSine(theta),
        lanes=sectioned_lanes(style, section),
        pairing=pairing,
        forward=ONE_ROUNDING,
        backward=ONE_ROUNDING_VJP,
    )


def _rounded_table(own: Contract) -> Contract:
    summary = f"{own.summary}, of a table in the activation dtype"
    return replace(own, name=f"{own.name}-rounded-table", summary=summary, table_dtype="activation")


def _activation_dtype(own: Contract) -> Contract:
    return replace(
        own,
        name=f"{own.name}-activation-dtype",
        summary=own.summary.replace("fp32 rotation, one rounding", "table and rotation in the activation dtype"),
        table_dtype="activation",
        forward=ACTIVATION_DTYPE,
        backward=ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    )


MROPE_CONTIGUOUS = _contract("contiguous", (16, 24, 24), HALF_SPLIT, 1e6, "time, height, width")
MROPE_INTERLEAVED = _contract("interleaved", (24, 20, 20), HALF_SPLIT, 5e6, "time, height, width")
MROPE_ROUND_ROBIN = _contract("round-robin", (8, 12, 12), HALF_SPLIT, 1e4, "time, height, width")
MROPE_ERNIE = _contract("ernie", (22, 22, 20), ADJACENT, 5e5, "height, width, time")

MROPE = (
    MROPE_CONTIGUOUS,
    MROPE_INTERLEAVED,
    MROPE_ROUND_ROBIN,
    MROPE_ERNIE,
    _rounded_table(MROPE_INTERLEAVED),
    *map(_activation_dtype, (MROPE_CONTIGUOUS, MROPE_INTERLEAVED, MROPE_ROUND_ROBIN, MROPE_ERNIE)),
)
"""The four maps in fp32, and the recipes in which the field uses them besides."""
