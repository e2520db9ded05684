"""What a candidate returned: whether it is an output at all, and whether it is the memory that was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .candidates import printable


def fault_of(name: str, result: Any, given: tuple[Tensor, ...]) -> str:
    """What is wrong with ``result`` of the call ``name``, which must be like ``given``; empty where nothing is."""
    if len(given) == 1:
        return _fault_of_one(name, result, given[0], "x")
    if not isinstance(result, (tuple, list)) or len(result) != len(given):
        return f"{name} returned {printable(type(result).__name__)}, not the two tensors of q and k"
    found = (_fault_of_one(name, r, like, of) for r, like, of in zip(result, given, ("q", "k"), strict=True))
    return next((fault for fault in found if fault), "")


def _fault_of_one(name: str, result: Any, like: Tensor, of: str) -> str:
    if not isinstance(result, Tensor):
        return f"{name} returned {printable(type(result).__name__)}, not a tensor"
    if type(result) not in (Tensor, torch.nn.Parameter):
        return f"{name} returned a {printable(type(result).__name__)}, a subclass of torch.Tensor"
    if result.layout != torch.strided:
        return f"{name} returned a tensor of layout {result.layout}, not a strided one"
    for what, got, expected in (
        ("shape", tuple(result.shape), tuple(like.shape)),
        ("dtype", result.dtype, like.dtype),
        ("device", result.device, like.device),
    ):
        if got != expected:
            return f"{name} returned {what} {got}, where {of} has {what} {expected}"
    return ""


def is_what_was_given(result: Any, given: tuple[Tensor, ...]) -> bool:
    """Whether a call that works in place returned nothing, or the very views that it was given."""
    results = (result,) if isinstance(result, Tensor) else result
    return results is None or (
        isinstance(results, (tuple, list))
        and len(results) == len(given)
        and all(isinstance(r, Tensor) and _same_view(r, g) for r, g in zip(results, given, strict=True))
    )


def _same_view(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip
