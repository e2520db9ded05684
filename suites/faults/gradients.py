"""Semantic faults of gradients: the forward is right, and its derivative is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ropecheck.oracle.recipes import (
    ACTIVATION_DTYPE_VJP_ONTO_ZEROS,
    ONE_ROUNDING_VJP_ONTO_ZEROS,
)

from .arithmetic import truncated
from .coverage import tail_zeroed, unturned
from .fault import SHORT, Misreading
from .positions import first_sample
from .reading import Reading
from .tables import factors, rounded, scaled


def without_conjugate(reading: Reading) -> Reading:
    return reading.each(lambda part: replace(part, recipe=reading.own.forward))


def zeroed(reading: Reading) -> Reading:
    return reading.each(lambda part: part.keeping(torch.ones_like(part.x, dtype=torch.bool), torch.zeros_like(part.x)))


def three_roundings(reading: Reading) -> Reading:
    return reading.each(lambda part: replace(part, recipe=ACTIVATION_DTYPE_VJP_ONTO_ZEROS))


def one_rounding(reading: Reading) -> Reading:
    return reading.each(lambda part: replace(part, recipe=ONE_ROUNDING_VJP_ONTO_ZEROS))


def doubled(reading: Reading) -> Reading:
    return reading.each(lambda part: replace(part, x=part.x * 2))


def of_k_zeroed(reading: Reading) -> Reading:
    return reading.one(
        "k", lambda part: part.keeping(torch.ones_like(part.x, dtype=torch.bool), torch.zeros_like(part.x))
    )


_BACK: dict[str, Any] = {"direction": "backward"}

GRADIENTS = (
    Misreading("gradient-without-conjugate", "the gradient is rotated forward, not back", without_conjugate,
               rows=("O085",), **_BACK),
    Misreading("gradient-zero", "the gradient is zero", zeroed, rows=("O027",), **_BACK),
    Misreading("gradient-rounded-three-times", "the gradient is rounded after every operation", three_roundings,
               **_BACK),
    Misreading("gradient-rounded-once", "the gradient is rounded once", one_rounding, contract="hf-llama", **_BACK),
    Misreading("gradient-not-rotated", "the gradient is not rotated", unturned, **_BACK),
    Misreading("gradient-of-the-tail-dropped", "the gradient of the channels behind the rotated ones is zero",
               tail_zeroed, **_BACK),
    Misreading("gradient-by-the-first-sample", "the gradient of every sample is rotated by the first one's table",
               first_sample, **_BACK),
    Misreading("gradient-doubled", "the gradient is counted twice", doubled, **_BACK),
    Misreading("gradient-by-a-scaled-table", "the gradient is rotated by tables times {0:.9g}", scaled, (1.2772589,),
               factors, rows=("O086",), dtype="float32", **_BACK),
    Misreading("gradient-by-a-rounded-table",
               lambda own, dtype: f"the gradient is rotated by tables in {SHORT[dtype]}", rounded,
               (torch.bfloat16,),
               **_BACK),
    Misreading("gradient-truncated", "the gradient is truncated where it should be rounded", truncated, **_BACK),
    Misreading("gradient-of-k-zero", "the gradient of k is zero", of_k_zeroed, family="rotate_pair", **_BACK),
)  # fmt: skip
