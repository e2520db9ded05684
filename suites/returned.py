"""What a candidate returned: whether it is an output at all, and whether it is the memory that was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .candidates import printable
from .families import Wanted


def fault_of(name: str, result: Any, wanted: tuple[Wanted, ...]) -> str:
    """What is wrong with ``result`` of the call ``name``, which must be what is ``wanted``; empty where nothing is."""
    if len(wanted) == 1:
        return _fault_of_one(name, result, wanted[0])
    if not isinstance(result, (tuple, list)) or len(result) != len(wanted):
        names = ", ".join(each.name for each in wanted[:-1])
        count = {2: "two", 3: "three"}[len(wanted)]
        came = printable(type(result).__name__)
        came += f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        return f"{name} returned {came}, not the {count} tensors of {names} and {wanted[-1].name}"
    return next((fault for r, each in zip(result, wanted, strict=True) if (fault := _fault_of_one(name, r, each))), "")


def _fault_of_one(name: str, result: Any, wanted: Wanted) -> str:
    if not isinstance(result, Tensor):
        return f"{name} returned {printable(type(result).__name__)}, not a tensor, for {wanted.name}"
    if type(result) not in (Tensor, torch.nn.Parameter):
        return f"{name} returned a {printable(type(result).__name__)}, a subclass of torch.Tensor"
    if result.layout != torch.strided:
        return f"{name} returned a tensor of layout {result.layout}, not a strided one"
    shapes, like = " or ".join(map(str, wanted.shapes)), wanted.like
    for what, got, expected, right in (
        ("shape", tuple(result.shape), shapes, tuple(result.shape) in wanted.shapes),
        ("dtype", result.dtype, like.dtype, result.dtype == like.dtype),
        ("device", result.device, like.device, result.device == like.device),
    ):
        if not right:
            return f"{name} returned {what} {got}, where {wanted.name} has {what} {expected}"
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
