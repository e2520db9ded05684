"""The kernels that a call launches on a GPU: what Triton compiled for it, and how a profiler spells a function."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from .machine_code import KernelCode, of_cubin

Launched = dict[tuple[str, str, bytes], None]
"""Name, PTX and cubin of kernels, in the order of their first launch."""


@contextmanager
def launched_triton_kernels() -> Iterator[list[KernelCode]]:
    """Yield a list that holds, after the block, the code of every Triton kernel launched in it, none twice.

    Leaving the block may raise :class:`~ropecheck.suites.machine_code.NoDisassembler`.
    """
    found: list[KernelCode] = []
    with launched_triton_binaries() as kernels:
        yield found
    found += [_of_cubin(*kernel) for kernel in kernels]


@contextmanager
def launched_triton_binaries() -> Iterator[Launched]:
    """Yield what receives every Triton kernel that is launched in the block, none twice.

    Launches of every thread count, since autograd runs a backward in a thread of its own.
    """
    kernels: Launched = {}
    if importlib.util.find_spec("triton") is None:
        yield kernels
        return
    from triton.runtime.jit import JITFunction

    run, lock = JITFunction.run, threading.Lock()

    def recorded(self: Any, *arguments: Any, **keywords: Any) -> Any:
        kernel = run(self, *arguments, **keywords)
        if kernel is not None:
            with lock:
                kernels[self.fn.__name__, kernel.asm["ptx"], kernel.asm["cubin"]] = None
        return kernel

    with patch.object(JITFunction, "run", recorded):
        yield kernels


_of_cubin = functools.lru_cache(maxsize=256)(of_cubin)


def demangled(name: str) -> str:
    """A C++ function's name as a profiler shows it; ``name`` itself where it is no mangled name."""
    library = _standard_library()
    if library is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    pointer = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not pointer:
        return name
    try:
        return ctypes.string_at(pointer).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(pointer))


@functools.cache
def _standard_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    return library
