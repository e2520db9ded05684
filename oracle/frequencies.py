"""Frequency rules: how an integer coordinate becomes a cosine and a sine, in a vendor's dtypes and order.

Tables are made on the CPU, whatever the device of the positions, and then moved: the bytes of ``pow``, ``cos``
and ``polar`` depend on the device and on the CPU's vector instructions, and the pins are of the CPU.
Both rules compute, for an axis of ``dims`` channels and ``k`` from 0 to ``dims / 2 - 1``, every step rounded to
fp32: the exponent ``2 k / dims``, the power ``theta ** exponent``, its reciprocal, and the product with the
position. They differ in what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolarRows:
    """Rows of tables that were made once with ``torch.polar``: Qwen-Image (diffusers ``QwenEmbedRope``).

    There are two tables, of positions 0 to ``rows - 1`` and ``-rows`` to -1. They are made whole, as the vendor
    makes them, and rows are gathered: ``polar`` does not give the bytes of ``cos`` and ``sin``.
    """

    theta: int = 10000
    rows: int = 4096

    def table(self, positions: Tensor, dims: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 [..., dims / 2], for integer ``positions`` [...].

        Raises ValueError for positions that are not integers or lie outside ``-rows`` to ``rows - 1``.
        """
        _check_integers(positions)
        if positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            if low < -self.rows or high >= self.rows:
                raise ValueError(
                    f"positions must lie between -{self.rows} and {self.rows - 1}, the vendor's table rows; "
                    f"got {low if low < -self.rows else high}"
                )
        positive, negative = _polar_tables(self.theta, self.rows, dims)
        rows = torch.cat((negative, positive))[positions.cpu().long() + self.rows]
        return rows.real.contiguous().to(positions.device), rows.imag.contiguous().to(positions.device)

    def angles(self, positions: Tensor, dims: int) -> Tensor:
        """fp32 [..., dims / 2] on the CPU: the angles of integer ``positions`` [...]."""
        return _angles(positions, self.theta, dims)


@dataclass(frozen=True)
class CosineSine:
    """fp32 cosine and sine of fp32 angles, computed anew for each position: the rule of transformers."""

    theta: float = 10000.0

    def table(self, positions: Tensor, dims: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each fp32 [..., dims / 2], for integer ``positions`` [...].

        Positions beyond 2**24 are rounded to fp32, as the vendor does. Raises ValueError for positions that are
        not integers.
        """
        angles = self.angles(positions, dims)
        return angles.cos().to(positions.device), angles.sin().to(positions.device)

    def angles(self, positions: Tensor, dims: int) -> Tensor:
        """fp32 [..., dims / 2] on the CPU: the angles of integer ``positions`` [...]."""
        return _angles(positions, self.theta, dims)


def _check_integers(positions: Tensor) -> None:
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions must be integers, got dtype {positions.dtype}")


def _angles(positions: Tensor, theta: float, dims: int) -> Tensor:
    _check_integers(positions)
    return positions.cpu()[..., None].float() * _inverse_frequencies(theta, dims)


@cache
def _inverse_frequencies(theta: float, dims: int) -> Tensor:
    exponent = torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims
    return 1.0 / torch.pow(theta, exponent)


@cache
def _polar_tables(theta: int, rows: int, dims: int) -> tuple[Tensor, Tensor]:
    inverse = _inverse_frequencies(theta, dims)
    tables = []
    for index in (torch.arange(rows, device="cpu"), torch.arange(-rows, 0, device="cpu")):
        angles = torch.outer(index, inverse)
        tables.append(torch.polar(torch.ones_like(angles), angles))
    return tables[0], tables[1]
