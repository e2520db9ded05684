"""Triton's interpreter, with its bfloat16 conversions and its fma repaired, and a record of what it launched.

Measured with triton 3.6 and 3.9: the interpreter truncates fp32 to bf16, which makes half of all values wrong,
mishandles subnormal bf16, and computes with the raw integer of a bf16 in arithmetic, in comparisons and in
conversions to other types than fp32. Its fp32 fma rounds twice in triton 3.6, and once in 3.9. Every interpreted
candidate is judged with the exact round-to-nearest-even conversions and the fma below, and the provenance records
it. Reductions of bf16 (``tl.sum``) stay as upstream has them. ``tests/suites/test_interpreter.py`` says when upstream
no longer needs this.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_launched: list[str] = []


def interpreting() -> bool:
    """Whether Triton kernels decorated from now on run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launched_kernels() -> list[str]:
    """Names of the kernels that the interpreter has run since the last call, in order."""
    names = list(_launched)
    _launched.clear()
    return names


def bfloat16_to_float32(raw: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Exact: every bf16 is an fp32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: npt.NDArray[np.float32], *, truncate: bool = False) -> npt.NDArray[np.uint16]:
    """Round to nearest even, as ``cvt.rn.bf16.f32`` does; ``truncate`` is ``cvt.rz``. NaN stays NaN."""
    raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    nan = np.isnan(values)
    if not truncate:
        with np.errstate(over="ignore"):
            raw = raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))
    cut = (raw >> np.uint32(16)).astype(np.uint16)
    rounded: npt.NDArray[np.uint16] = np.where(nan, np.uint16(0x7FFF), cut)
    return rounded


def float32_fma(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], z: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """x * y + z, rounded once, to nearest even: the product is exact in fp64, and the sum is rounded to odd there."""
    with np.errstate(all="ignore"):
        product, addend = np.multiply(x, y, dtype=np.float64), np.asarray(z, dtype=np.float64)
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        raw = total.view(np.int64)
        # The last bit then stands for all that was lost, so that the second rounding sees no tie that is none.
        lost = np.isfinite(total) & (error != 0) & (raw & 1 == 0)
        towards = np.where((error > 0) == (total > 0), 1, -1)
        rounded: npt.NDArray[np.float32] = np.where(lost, raw + towards, raw).view(np.float64).astype(np.float32)
    return rounded


@functools.cache
def repair() -> bool:
    """Install the conversions and the launch record in this process. False where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def involves_bfloat16(source: Any, target: Any) -> bool:
        return tl.bfloat16 in (source.dtype.scalar, target.scalar) and source.dtype.scalar != target.scalar

    def exact_cast(source: Any, target: Any, *, truncate: bool = False) -> Any:
        data = source.data
        if source.dtype.scalar == tl.bfloat16:
            data = bfloat16_to_float32(data)
        if target.scalar == tl.bfloat16:
            return handle(float32_to_bfloat16(data.astype(np.float32), truncate=truncate), tl.bfloat16)
        return handle(data.astype(interpreter._get_np_dtype(target.scalar)), target.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return exact_cast(source, target) if involves_bfloat16(source, target) else cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if not involves_bfloat16(source, target):
            return convert(self, source, target, rounding_mode)
        return exact_cast(source, target, truncate="RTZ" in str(rounding_mode).upper())

    def widened(value: Any) -> Any:
        is_narrow = value.dtype.scalar == tl.bfloat16
        return handle(bfloat16_to_float32(value.data), tl.float32) if is_narrow else value

    def narrowed(result: Any) -> Any:
        # A comparison keeps its boolean data; arithmetic was done in fp32 and is rounded once.
        if result.data.dtype == np.float32:
            return handle(float32_to_bfloat16(result.data), tl.bfloat16)
        return result

    def elementwise(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def exact(self: Any, *arguments: Any) -> Any:
            *values, numpy_function = arguments
            if not any(v.dtype.scalar == tl.bfloat16 for v in values):
                return operation(self, *arguments)
            return narrowed(operation(self, *map(widened, values), numpy_function))

        return exact

    fma = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.float32:
            return fma(self, x, y, z)
        return handle(float32_fma(x.data, y.data, z.data), tl.float32)

    run = interpreter.GridExecutor.__call__

    @functools.wraps(run)
    def recorded(self: Any, *arguments: Any, **keywords: Any) -> Any:
        _launched.append(self.fn.__name__)
        return run(self, *arguments, **keywords)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.create_fma = create_fma
    builder.binary_op, builder.unary_op = elementwise(builder.binary_op), elementwise(builder.unary_op)
    interpreter.GridExecutor.__call__ = recorded
    return True
