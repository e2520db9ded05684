"""The state of the process that a candidate shares with the judge, put back after every call.

A library that switches the CPU to flush-to-zero, or changes torch's default dtype or device, changes what the oracle
computes beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Surroundings:
    """What is put back."""

    dtype: torch.dtype
    device: torch.device
    gradients: bool
    flushes: bool
    autocast: tuple[bool, ...]

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), flushes_subnormals(),
            tuple(torch.is_autocast_enabled(device) for device in _AUTOCAST),
        )  # fmt: skip

    def restore(self) -> str:
        """Put back what has changed since, and say in words what it was; empty where nothing was."""
        changes = []
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
            changes.append("torch's default dtype")
        if torch.get_default_device() != self.device:
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
            changes.append("torch's default device")
        if torch.is_grad_enabled() != self.gradients:
            torch.set_grad_enabled(self.gradients)
            changes.append("torch's gradient mode")
        if flushes_subnormals() != self.flushes:
            torch.set_flush_denormal(self.flushes)
            changes.append("the CPU's treatment of subnormal numbers")
        for device, before in zip(_AUTOCAST, self.autocast, strict=True):
            if torch.is_autocast_enabled(device) != before:
                torch.set_autocast_enabled(device, before)
                changes.append(f"autocast on {device}")
        return " and ".join(changes)


def flushes_subnormals() -> bool:
    """Whether the CPU takes the half of a least normal fp32 for zero."""
    # numpy, for a judgement may be counting what torch allocates.
    return bool(_LEAST_NORMAL * np.float32(0.5) == 0)


_AUTOCAST = ("cpu", "cuda")
_LEAST_NORMAL = np.float32(2.0**-126)
