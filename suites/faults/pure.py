"""Remembering what a mutant returned: it depends on the bytes that it is given, and on nothing else.

A semantic fault is a misreading of one call. Judgements give it the same call again and again, to see whether the
answer is the same: that is known here, and computing it is most of the time that asking takes.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..candidates import Candidate
from ..remembered import digest

_CALLS = 32
"""How many calls are remembered: a layout's, and the canonical ones of its payloads."""

_BYTES = 1 << 18
"""Larger results are made anew."""


def pure(candidate: Candidate) -> Candidate:
    """``candidate`` with a memory of its last calls.

    Calls that autograd records, and results that are the memory of an argument, are the candidate's own.
    """
    vjp = None if candidate.vjp is None else _remembering(candidate.vjp)
    return replace(candidate, run=_remembering(candidate.run), vjp=vjp)


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    kept: OrderedDict[object, Any] = OrderedDict()

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = (*arguments, *keywords.values())
        tensors = [value for value in given if isinstance(value, Tensor)]
        if any(t.requires_grad for t in tensors) or sum(t.numel() * t.element_size() for t in tensors) > _BYTES:
            return function(*arguments, **keywords)
        key = (tuple(keywords), tuple(_name(value) for value in given))
        if key in kept:
            kept.move_to_end(key)
            return _copied(kept[key])
        result = function(*arguments, **keywords)
        places = {t.untyped_storage().data_ptr() for t in tensors}
        if not any(part.untyped_storage().data_ptr() in places for part in _parts(result)):
            kept[key] = _copied(result)
            if len(kept) > _CALLS:
                kept.popitem(last=False)
        return result

    return call


def _parts(result: Any) -> list[Tensor]:
    return [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]


def _name(value: Any) -> object:
    return (digest(value), value.shape, value.dtype) if isinstance(value, Tensor) else value


def _copied(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(None if part is None else part.clone() for part in result)
