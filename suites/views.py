"""Views: how a tensor lies in memory. The same values with other strides, offsets and neighbours.

Every storage is longer than what the view needs on both sides; the bytes that the view does not reach are guard
bands, filled with a pattern that shows when it is written over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GUARD_BYTE = 0x5A
_GUARD_ELEMENTS = 64
FAR = 2**31
"""Elements: the offsets from here on do not fit into a signed 32-bit number."""


@dataclass(frozen=True)
class Placed:
    """A view and the bytes of its whole storage as they were."""

    view: Tensor
    before: Tensor

    @property
    def storage(self) -> Tensor:
        """The bytes of the storage now, uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.view.device).set_(self.view.untyped_storage())

    def as_given(self) -> Tensor:
        """The view as it was before any call, whatever a candidate has since done to its memory."""
        stored = self.before.view(self.view.dtype)
        return stored.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())

    def again(self) -> Placed:
        """The same memory for another use, put back as it was where it has changed."""
        if not torch.equal(self.storage, self.before):
            self.storage.copy_(self.before)
        return replace(self, view=self.view.detach())

    def changed_bytes(self) -> int:
        """How many bytes of the storage, guard bands included, are not as they were."""
        return int((self.storage != self.before).sum())


@dataclass(frozen=True)
class FarApart(Placed):
    """A view over more memory than a copy is kept of: ``before`` holds the values alone, which are all it watches."""

    def as_given(self) -> Tensor:
        return self.before

    def changed_bytes(self) -> int:
        """How many bytes of the values are not as they were."""
        now, before = (t.contiguous().view(torch.uint8) for t in (self.view, self.before))
        return int((now != before).sum())


def place(values: Tensor, order: tuple[int, ...], steps: tuple[int, ...], offset: int = 0, room: int = 0) -> Placed:
    """Copy ``values`` into a guarded storage.

    ``order`` lists the dimensions from the outermost to the innermost in memory; ``steps[d]`` spaces the elements
    of dimension ``d``, 0 keeping only its first. ``offset`` shifts the start by elements, off every alignment;
    ``room`` is the guard behind the last element, in elements, besides the usual one.
    """
    strides = [0] * values.dim()
    pitch = 1
    for d in reversed(order):
        if steps[d]:
            pitch *= steps[d]
            strides[d] = pitch
            pitch *= max(1, values.shape[d])
    kept = tuple(slice(0, 1) if steps[d] == 0 else slice(None) for d in range(values.dim()))
    length = pitch + 2 * _GUARD_ELEMENTS + offset + room
    raw = torch.full((length * values.element_size(),), _GUARD_BYTE, dtype=torch.uint8, device=values.device)
    start = _GUARD_ELEMENTS + offset
    view = raw.view(values.dtype).as_strided(values.shape, strides, start)
    raw.view(values.dtype).as_strided(values[kept].shape, strides, start).copy_(values[kept])
    return Placed(view, raw.clone())


def _at_the_end(values: Tensor) -> Placed:
    """Contiguous, its last element the last of the allocation, so that an over-read leaves it."""
    raw = torch.full((_GUARD_ELEMENTS + values.numel(),), 0, dtype=values.dtype, device=values.device)
    raw.view(torch.uint8).fill_(_GUARD_BYTE)
    view = raw[_GUARD_ELEMENTS:].view(values.shape)
    view.copy_(values)
    return Placed(view, raw.view(torch.uint8).clone())


def far_apart(values: Tensor, dimension: int, far: int = FAR) -> FarApart:
    """``values`` with ``far`` elements and some more from one index of ``dimension`` to the next.

    Of the memory in between, which nobody else writes, only this is written: NaN wherever a kernel comes to whose
    offsets, in elements or in bytes, are 32 bits wide, signed or not. All of it belongs to the allocation, so that
    such a kernel returns a wrong result and breaks nothing.
    """
    strides = [1] * values.dim()
    for d in reversed(range(values.dim() - 1)):
        strides[d] = strides[d + 1] * values.shape[d + 1]
    strides[dimension] = far + 2 * values.numel()
    reach = strides[dimension] * (values.shape[dimension] - 1) + values.numel()
    try:
        raw = torch.empty(far + reach, dtype=values.dtype, device=values.device)
    except RuntimeError as error:
        if values.is_cuda:
            raise
        # Pages that nobody touches cost nothing, but a machine may promise no more than it has.
        raise MemoryError(f"{far + reach} elements are not to be had") from error
    one = values.select(dimension, 0)
    inner = [stride for d, stride in enumerate(strides) if d != dimension]
    for offset in (index * strides[dimension] for index in range(1, values.shape[dimension])):
        for wrapped in (offset - 2 * far, offset - far):
            if -far <= wrapped:
                raw.as_strided(one.shape, inner, far + wrapped).fill_(float("nan"))
    view = raw.as_strided(values.shape, strides, far)
    view.copy_(values)
    return FarApart(view, values.clone(memory_format=torch.contiguous_format))


def behind_a_gap(q: Tensor, k: Tensor) -> tuple[Placed, Placed]:
    """q and k [B, S, H, D] as views of one projection, of equal strides, with a head between that is neither's."""
    between = torch.full((*q.shape[:2], q.shape[3] * q.element_size()), _GUARD_BYTE, dtype=torch.uint8, device=q.device)
    whole = place(torch.cat((q, between.view(q.dtype).unsqueeze(2), k), dim=2), (0, 1, 2, 3), (1, 1, 1, 1))
    first = q.shape[2]
    return Placed(whole.view[:, :, :first], whole.before), Placed(whole.view[:, :, first + 1 :], whole.before)


BEHIND_A_GAP = "behind-a-gap"
"""The view of k, and of q with it, that :func:`behind_a_gap` makes."""

View = Callable[[Tensor], Placed]

# x, gradients: dimensions are batch 0, sequence 1, head 2, channel 3.
X_VIEWS: dict[str, View] = {
    "contiguous": lambda x: place(x, (0, 1, 2, 3), (1, 1, 1, 1)),
    # One of q, k, v in a packed projection: the sequence stride spans three tensors.
    "packed-qkv": lambda x: place(x, (0, 1, 2, 3), (1, 3, 1, 1)),
    "heads-first": lambda x: place(x, (0, 2, 1, 3), (1, 1, 1, 1)),
    "sequence-first": lambda x: place(x, (1, 0, 2, 3), (1, 1, 1, 1)),
    "heads-outermost": lambda x: place(x, (2, 0, 1, 3), (1, 1, 1, 1)),
    "heads-stride-2": lambda x: place(x, (0, 1, 2, 3), (1, 1, 2, 1)),
    "heads-stride-0": lambda x: place(x, (0, 1, 2, 3), (1, 1, 0, 1)),
    "channels-stride-2": lambda x: place(x, (0, 1, 2, 3), (1, 1, 1, 2)),
    "heads-and-channels-stride-2": lambda x: place(x, (0, 1, 2, 3), (1, 1, 2, 2)),
    "channels-stride-0": lambda x: place(x, (0, 1, 2, 3), (1, 1, 1, 0)),
    "channels-outermost": lambda x: place(x, (3, 0, 1, 2), (1, 1, 1, 1)),
    "batch-stride-0": lambda x: place(x, (0, 1, 2, 3), (0, 1, 1, 1)),
    "all-stride-0": lambda x: place(x, (0, 1, 2, 3), (0, 0, 0, 0)),
    "wider-heads": lambda x: place(x, (0, 1, 2, 3), (2, 1, 3, 1)),
    "misaligned": lambda x: place(x, (0, 1, 2, 3), (1, 1, 1, 1), offset=1),
    "packed-qkv-misaligned": lambda x: place(x, (0, 1, 2, 3), (1, 3, 1, 1), offset=3),
}

STRIDED_X_VIEWS = tuple(name for name in X_VIEWS if name != "contiguous")
"""The views that only a candidate which claims ``strided`` is given, as those of :data:`FAR_X_VIEWS` are."""

# x again, in two cases of their own: the memory between is 8 GiB in 16 bits.
FAR_X_VIEWS: dict[str, View] = {
    "samples-far-apart": lambda x: far_apart(x, 0),
    "tokens-far-apart": lambda x: far_apart(x, 1),
}

# Tables: the last two dimensions are sequence and lane, before them the batch or nothing.
TABLE_VIEWS: dict[str, View] = {
    "contiguous": lambda t: place(t, tuple(range(t.dim())), (1,) * t.dim()),
    "end-of-allocation": _at_the_end,
    "misaligned": lambda t: place(t, tuple(range(t.dim())), (1,) * t.dim(), offset=1),
    # Columns cut out of a wider table: the row pitch is not the width.
    "sliced-rows": lambda t: place(t, tuple(range(t.dim())), (*(1,) * (t.dim() - 2), 2, 1)),
    "lanes-stride-2": lambda t: place(t, tuple(range(t.dim())), (*(1,) * (t.dim() - 1), 2)),
    "transposed": lambda t: place(t, (*range(t.dim() - 2), t.dim() - 1, t.dim() - 2), (1,) * t.dim()),
    "batch-stride-0": lambda t: place(t, tuple(range(t.dim())), (*(0,) * (t.dim() - 2), 1, 1)),
}

STRIDED_TABLE_VIEWS = tuple(n for n in TABLE_VIEWS if n not in ("contiguous", "end-of-allocation"))
