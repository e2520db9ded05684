"""Right rotations in Triton, of which kernels with wrong machine code are made.

Importing this module imports triton, and fixes whether its kernels are compiled or interpreted.
"""

# Triton carries no type information, and the compile-time constants of a kernel are written in capitals.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


def rotate_halves(x, cos, sin, y, rows, tables, heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Right for neox: x and y [rows, 2 HALF], tables [tables, HALF], all contiguous; ``heads`` rows read one table."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    at, table, valid = row * 2 * HALF + lane, row // heads % tables * HALF + lane, row < rows
    a, b = tl.load(x + at, mask=valid).to(tl.float32), tl.load(x + at + HALF, mask=valid).to(tl.float32)
    c, s = tl.load(cos + table, mask=valid), tl.load(sin + table, mask=valid)
    tl.store(y + at, (a * c - b * s).to(y.dtype.element_ty), mask=valid)
    tl.store(y + at + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=valid)


def rotate_by_width(x, cos, sin, y, rows, tables, heads, half, ROWS: tl.constexpr, HALF: tl.constexpr):
    """As the one before, the width being a number like any other."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    at, table, valid = row * 2 * half + lane, row // heads % tables * half + lane, (row < rows) & (lane < half)
    a, b = tl.load(x + at, mask=valid).to(tl.float32), tl.load(x + at + half, mask=valid).to(tl.float32)
    c, s = tl.load(cos + table, mask=valid), tl.load(sin + table, mask=valid)
    tl.store(y + at, (a * c - b * s).to(y.dtype.element_ty), mask=valid)
    tl.store(y + at + half, (b * c + a * s).to(y.dtype.element_ty), mask=valid)


def rotate_scaled(x, cos, sin, y, rows, tables, heads, exponent, ROWS: tl.constexpr, HALF: tl.constexpr):
    """As the first, the tables times two to the power of ``exponent``, which is zero."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    at, table, valid = row * 2 * HALF + lane, row // heads % tables * HALF + lane, row < rows
    a, b = tl.load(x + at, mask=valid).to(tl.float32), tl.load(x + at + HALF, mask=valid).to(tl.float32)
    scale = tl.exp2(exponent)
    c, s = tl.load(cos + table, mask=valid) * scale, tl.load(sin + table, mask=valid) * scale
    tl.store(y + at, (a * c - b * s).to(y.dtype.element_ty), mask=valid)
    tl.store(y + at + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=valid)


def rotate_neighbours(x, cos, sin, y, rows, tables, heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Right for qwen-image: the members of a pair lie side by side, and are loaded and stored one by one."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, HALF)[None, :]
    at, table, valid = row * 2 * HALF + 2 * lane, row // heads % tables * HALF + lane, row < rows
    a, b = tl.load(x + at, mask=valid).to(tl.float32), tl.load(x + at + 1, mask=valid).to(tl.float32)
    c, s = tl.load(cos + table, mask=valid), tl.load(sin + table, mask=valid)
    tl.store(y + at, (a * c - b * s).to(y.dtype.element_ty), mask=valid)
    tl.store(y + at + 1, (b * c + a * s).to(y.dtype.element_ty), mask=valid)


halves = triton.jit(rotate_halves)
halves_anywhere = triton.jit(rotate_halves, do_not_specialize=["x", "y"])
by_width = triton.jit(rotate_by_width, do_not_specialize=["half"])
scaled = triton.jit(rotate_scaled)
neighbours = triton.jit(rotate_neighbours)
