"""Remembering what does not depend on a candidate, where many candidates are asked one case after another.

Outside :func:`remembering` nothing is remembered. Inside, the operands of a case are made once; before each further use
their memory is looked at byte by byte, and put back where a candidate has changed it. What the oracle says of an output
is kept by the output's bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_kept: dict[object, Any] | None = None


@contextmanager
def remembering() -> Iterator[None]:
    """Within the block, what is made for one case of a contract is kept until the block ends."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def remembers() -> bool:
    """Whether something made now is kept."""
    return _kept is not None


def remembered(key: Callable[[], object], make: Callable[[], T]) -> T:
    """``make()``, or what it was when it was made for the same ``key()`` in this block."""
    if _kept is None:
        return make()
    name = key()
    if name not in _kept:
        _kept[name] = make()
    result: T = _kept[name]
    return result


def digest(tensor: Tensor) -> bytes:
    """Of the bytes of a tensor on the CPU."""
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=16).digest()
