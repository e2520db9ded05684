"""What the tests of the oracle share: rounding on rational numbers, which is all that they trust."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

Nearest = Callable[[Fraction, torch.dtype], float]

# The tensors are small, and threads that wait for one another on a busy machine cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nearest() -> Nearest:
    """``nearest(number, dtype)``: round to nearest even, by Python's own rounding of a fraction to an integer."""

    def rounded(number: Fraction, dtype: torch.dtype) -> float:
        if not number:
            return 0.0
        limits = torch.finfo(dtype)
        magnitude = abs(number)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        least = math.frexp(limits.tiny)[1] - 1
        unit = Fraction(2) ** (max(exponent, least)) * Fraction(limits.eps)
        value = round(number / unit) * unit
        if abs(value) > limits.max:
            return math.copysign(math.inf, number)
        return math.copysign(float(value), number)

    return rounded
