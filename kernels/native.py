"""Loading the native library: at most once, and where that fails, with the original error every time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch

from .native_build import INTERFACE, LIBRARY_NAME, NativeInformation, read_information, source_hash

OPERATORS = (
    "multi_axis_rope_cuda",
    "multi_axis_rope_pair_cuda",
    "multi_axis_rope_pair_cuda_",
    "qk_norm_rope_gate_cuda",
    "qk_norm_rope_gate_backward_cuda",
)

LaunchReport = Callable[[str, str, int, str, str], None]
"""Receives operator, direction, device index, configuration and reason of one launch."""

_REBUILD = "install again with ROPECHECK_CUDA=require, which builds it or says why that cannot be done"
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)


class NativeLibrary:
    """The native library at ``path``, which ``load`` brings into the process.

    The schemas of its operators must be defined before it is loaded.
    """

    def __init__(self, path: Path, load: Callable[[str], None] = torch.ops.load_library) -> None:
        self.path = path
        self._load = load
        self._lock = Lock()
        self._loaded = False
        self._error: Exception | None = None

    def information(self) -> NativeInformation | None:
        """What the library says of itself, read without loading it; None where it is absent or says nothing."""
        return read_information(self.path)

    def load(self) -> None:
        """Load the library, at most once.

        Raises:
            FileNotFoundError: there is none.
            ImportError: it has another interface or was made from other sources, or an operator is missing in it.
            OSError, RuntimeError: the loader's own error. Whatever was raised is raised again by a later call.
        """
        with self._lock:
            if self._error is not None:
                # Its traceback would grow with every attempt, and keep the tensors of every caller alive.
                raise self._error.with_traceback(None)
            if not self._loaded:
                try:
                    self._check()
                    self._load(str(self.path))
                    self._check_operators()
                except Exception as error:
                    self._error = error
                    raise
                self._loaded = True

    def failure(self) -> str:
        """Why the library cannot be used, in one line; empty where it can."""
        try:
            self.load()
        except Exception as error:  # whatever the loader raises is the answer
            # torch raises an OSError of its own, which says no more than the path, from that of the dynamic loader.
            said = [f"{type(error).__name__}: {error}", *([f"({error.__cause__})"] if error.__cause__ else [])]
            return " ".join(text.partition("\n")[0] for text in said)
        return ""

    @property
    def loaded(self) -> bool:
        """Whether the library is in the process."""
        return self._loaded

    def _check(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"the native library {self.path} does not exist; {_REBUILD}")
        information = self.information()
        if information is None:
            raise ImportError(f"{self.path} does not say what it was made from; {_REBUILD}")
        if information.interface != INTERFACE:
            raise ImportError(
                f"{self.path} has interface {information.interface}, and this package needs {INTERFACE}; {_REBUILD}"
            )
        if information.source_hash != source_hash():
            raise ImportError(f"{self.path} was made from other sources than those of this package; {_REBUILD}")

    def _check_operators(self) -> None:
        for name in OPERATORS:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"ropecheck::{name}", "CUDA"):
                raise ImportError(
                    f"{self.path} has no CUDA implementation of the operator ropecheck::{name}; {_REBUILD}"
                )


NATIVE = NativeLibrary(Path(__file__).parent / LIBRARY_NAME)
"""The library of this package."""

_report: LaunchReport | None = None


def _forward(operator: bytes, direction: bytes, device_index: int, configuration: bytes, reason: bytes) -> None:
    # Another thread may be on its way here while the reports are turned off.
    if (report := _report) is not None:
        report(operator.decode(), direction.decode(), device_index, configuration.decode(), reason.decode())


# ctypes keeps no reference to what it calls; this one lives as long as the module.
_forward_callback = _Callback(_forward)


def report_launches_to(callback: LaunchReport | None) -> None:
    """Have every launch of the native library reported to ``callback``; None turns the reports off.

    Nothing is done where the library is not loaded.
    """
    global _report
    _report = callback
    if NATIVE.loaded:
        register = ctypes.CDLL(str(NATIVE.path)).ropecheck_set_launch_callback
        register.restype = None
        register.argtypes = [_Callback]
        register(_forward_callback if callback is not None else _Callback())
