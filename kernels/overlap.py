"""Whether elements share memory, decided exactly from sizes and strides.

What is rotated in place must hold each element once. Sums of strides decide that: element (i, j, ..) lies at
i * stride_i + j * stride_j + .., so two elements share memory where two of these sums are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

from torch import Tensor
from torch.nn import Parameter

Term = tuple[int, int, int]
"""A stride, and the lowest and the highest factor that it is taken with."""

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of ``x`` share memory: a stride-0 dimension, or rows that lie across each other."""
    return x.numel() > 0 and _repeats(tuple(x.shape), x.stride())


def overlap_each_other(left: Tensor, right: Tensor) -> bool:
    """Whether an element of ``left`` and one of ``right``, which have one dtype, share memory.

    False for meta and fake tensors, and for tensors of a Python subclass, which need not have an address.
    """
    if not (_has_address(left) and _has_address(right)) or left.device != right.device:
        return False
    width, distance = left.element_size(), right.data_ptr() - left.data_ptr()
    if distance >= width * _length(left) or -distance >= width * _length(right):
        return False
    # Where the distance is no multiple of the width, an element can lie across two others.
    left_layout, right_layout = (tuple(left.shape), left.stride()), (tuple(right.shape), right.stride())
    return any(_meet(left_layout, right_layout, whole) for whole in {distance // width, -(-distance // width)})


# One layout is asked for once per layer of a model and step; the answer is then a matter of a microsecond.
@lru_cache(maxsize=1024)
def _repeats(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    dimensions = [(stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1]
    for position, (stride, size) in enumerate(dimensions):
        # Two elements differ; this is the first dimension in which they do, and there the one lies behind.
        later = [(stride, 1 - size, size - 1) for stride, size in dimensions[position + 1 :]]
        if _sum_exists([(stride, 1, size - 1), *later], 0):
            return True
    return False


@lru_cache(maxsize=1024)
def _meet(left: Layout, right: Layout, distance: int) -> bool:
    terms = [(stride, 0, size - 1) for size, stride in zip(*left, strict=True)]
    terms += [(stride, 1 - size, 0) for size, stride in zip(*right, strict=True)]
    return _sum_exists(terms, distance)


def _length(x: Tensor) -> int:
    """The elements from the first to the last, those between included that are not of x."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _has_address(x: Tensor) -> bool:
    return type(x) in (Tensor, Parameter) and x.device.type != "meta" and x.numel() > 0


def _sum_exists(terms: Sequence[Term], target: int) -> bool:
    """Whether factors within their bounds exist, with which the strides add up to ``target``."""
    bounds: dict[int, tuple[int, int]] = {}
    for stride, lowest, highest in terms:
        if stride and (lowest or highest):  # else it adds nothing
            low, high = bounds.get(stride, (0, 0))
            bounds[stride] = (low + lowest, high + highest)
    return _reaches(sorted(((stride, *bound) for stride, bound in bounds.items()), reverse=True), target)


def _reaches(terms: Sequence[Term], target: int) -> bool:
    if not terms:
        return target == 0
    if target % gcd(*(stride for stride, _, _ in terms)):
        return False
    (stride, lowest, highest), rest = terms[0], terms[1:]
    rest_lowest = sum(other * low for other, low, _ in rest)
    rest_highest = sum(other * high for other, _, high in rest)
    first = max(lowest, -((rest_highest - target) // stride))
    last = min(highest, (target - rest_lowest) // stride)
    return any(_reaches(rest, target - factor * stride) for factor in range(first, last + 1))
