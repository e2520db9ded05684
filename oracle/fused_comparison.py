"""Holding a candidate's tensors against the fused contract, and saying where they are outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .admissible import SEPARATE, AdmissibleSet
from .floats import from_key
from .fused import NormRotation
from .fused_gradients import gradient_set, weight_gradient_set
from .fused_sets import fused_sets, unexplained_rows
from .rotation import changed_elements

# Most of a point's certification is its row's: the sum of squares and the root. So the points drawn share rows.
_ROWS_DRAWN = 8
ELEMENTS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Channels per block, as pairs are bounded in :mod:`ropecheck.oracle.rotation`."""


@dataclass(frozen=True)
class FusedPoint:
    """One output element. ``index`` is (token, head, channel).

    ``low`` and ``high`` end the span of finite admissible values (NaN where there is none), ``strict`` is the value of
    the fixed order and ``outside_by`` the number of representable values between the span and ``got``.
    """

    index: tuple[int, int, int]
    low: float
    high: float
    strict: float
    got: float
    outside_by: int


@dataclass
class FusedComparison:
    """What came out of holding a tensor against the fused contract.

    ``outside`` counts elements that are not members, ``several`` those with more than one admissible value,
    ``strict_differs`` those that are not the strict value, ``unexplained`` the fp32 rows that no single reciprocal
    root explains, of which ``rows`` names some by (token, head). ``unlike_of`` counts, for each part of the output and
    form after a norm in the fixed order, the elements that differ from it. ``worst`` and ``sample`` as in
    :class:`~ropecheck.oracle.rotation.Comparison`.
    """

    elements: int = 0
    outside: int = 0
    several: int = 0
    strict_differs: int = 0
    unexplained: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)
    unlike_of: dict[str, dict[str, int]] = field(default_factory=lambda: {"y0": {}, "y1": {}, "tail": {}})
    worst: list[FusedPoint] = field(default_factory=list)
    sample: list[FusedPoint] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.outside and not self.unexplained

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """The forms of the rotation that reproduce every element after a norm in the fixed order.

        A form may belong to one output only. Empty where an output, or the tail, has none.
        """
        if not all(0 in forms.values() for forms in self.unlike_of.values() if forms):
            return ()
        names = dict.fromkeys(name for forms in self.unlike_of.values() for name in forms)
        whole = [name for name in names if not any(forms.get(name) for forms in self.unlike_of.values())]
        return tuple(name for name in whole if name.partition(",")[0] not in whole or "," not in name)


def compare_fused(
    rotation: NormRotation, got: Tensor, *, samples: int = 256, seed: int = 0, worst: int = 8
) -> FusedComparison:
    """Hold ``got`` [T, H, D] against ``rotation``, drawing ``samples`` elements for certification.

    Padding is left out. Raises ValueError where ``got`` is not of x's shape and dtype.
    """
    result, numbers = _started(rotation, "got", got, samples, seed, worst)
    half = rotation.rotary_dim // 2
    for tokens in _blocks(rotation):
        part, values = rotation.at(tokens), got[tokens]
        sets = fused_sets(part)
        numbers.tally(tokens, sets.members, values)
        split = {"y0": values[..., :half], "y1": values[..., half : 2 * half], "tail": values[..., 2 * half :]}
        for name, forms in sets.forms.items():
            _count(result.unlike_of[name], forms, split[name].reshape(-1))
        if values.dtype == torch.float32:
            odd = unexplained_rows(part, values, sets).nonzero()
            result.unexplained += len(odd)
            result.rows += [(int(tokens[t]), int(h)) for t, h in odd[: worst - len(result.rows)].tolist()]
    return numbers.finished()


def compare_fused_vjp(
    rotation: NormRotation, gradient: Tensor, got: Tensor, *, samples: int = 256, seed: int = 0, worst: int = 8
) -> FusedComparison:
    """Hold ``got`` [T, H, D], the gradient of x for the incoming ``gradient``, against ``rotation``.

    Padding must have a gradient of zero, of either sign. Raises ValueError where ``got`` or ``gradient`` is not of
    x's shape and dtype.
    """
    _check(rotation, "gradient", gradient)
    result, numbers = _started(rotation, "got", got, samples, seed, worst)
    skipped = got[rotation.skipped]
    result.elements += skipped.numel()
    result.outside += int((skipped != 0).sum())
    for tokens in _blocks(rotation):
        numbers.tally(tokens, gradient_set(rotation.at(tokens), gradient[tokens]), got[tokens])
    return numbers.finished()


def compare_weight_gradient(
    rotation: NormRotation, gradient: Tensor, got: Tensor, *, samples: int = 256, seed: int = 0, worst: int = 8
) -> FusedComparison:
    """Hold ``got`` [D], the gradient of the weight, against ``rotation``; a point's index is (0, 0, channel).

    An out-of-range token makes it NaN. Raises ValueError where ``got`` is not of the weight's shape and dtype, or
    ``gradient`` not of x's.
    """
    _check(rotation, "gradient", gradient)
    weight = rotation.weight
    if got.shape != weight.shape or got.dtype != weight.dtype:
        raise ValueError(
            f"got must be {weight.dtype} {list(weight.shape)} like the weight, not {got.dtype} {got.shape}"
        )
    result = FusedComparison()
    if bool(rotation.poisoned.any()):
        result.elements, result.outside = got.numel(), int((~got.isnan()).sum())
        return result
    numbers = _Numbers(result, samples, seed, worst, got.numel(), got.numel())
    members = weight_gradient_set(rotation, gradient, _blocks(rotation))
    numbers.tally(torch.zeros(1, dtype=torch.int64, device=got.device), members, got[None, None])
    return numbers.finished()


def _check(rotation: NormRotation, name: str, given: Tensor) -> None:
    x = rotation.x
    if given.shape != x.shape or given.dtype != x.dtype:
        raise ValueError(f"{name} must be {x.dtype} {tuple(x.shape)} like x, not {given.dtype} {tuple(given.shape)}")


def _started(
    rotation: NormRotation, name: str, got: Tensor, samples: int, seed: int, worst: int
) -> tuple[FusedComparison, _Numbers]:
    """A comparison that holds the out-of-range tokens, all of which must be NaN."""
    _check(rotation, name, got)
    result, poisoned = FusedComparison(), got[rotation.poisoned]
    result.elements += poisoned.numel()
    result.outside += int((~poisoned.isnan()).sum())
    elements = len(rotation.judged) * got.shape[1] * got.shape[2]
    return result, _Numbers(result, samples, seed, worst, elements, got.shape[2])


def _blocks(rotation: NormRotation) -> Iterator[Tensor]:
    per_token = max(1, rotation.x.shape[1] * rotation.x.shape[2])
    step = max(1, ELEMENTS_AT_ONCE[rotation.x.device.type] // per_token)
    if rotation.x.shape[1]:
        judged = rotation.judged
        for start in range(0, len(judged), step):
            yield judged[start : start + step]


def _count(unlike: dict[str, int], forms: dict[str, Tensor], values: Tensor) -> None:
    counted: dict[int, int] = {}
    for name, form in forms.items():
        # Forms that agree everywhere share one tensor.
        if id(form) not in counted:
            counted[id(form)] = changed_elements(form, values)
        unlike[name] = unlike.get(name, 0) + counted[id(form)]


class _Numbers:
    """Adds up a comparison block by block, and picks the worst points, the drawn ones and the one with most values."""

    def __init__(
        self, result: FusedComparison, samples: int, seed: int, worst: int, elements: int, width: int
    ) -> None:
        self.result, self.worst, self.before = result, worst, 0
        self.widest: tuple[int, list[FusedPoint]] = (-1, [])
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(max(1, elements // max(1, width)), (_ROWS_DRAWN,), generator=generator)
        channels = torch.randint(max(1, width), (samples,), generator=generator)
        self.drawn = rows[torch.arange(samples) % _ROWS_DRAWN] * width + channels

    def tally(self, tokens: Tensor, members: AdmissibleSet, values: Tensor) -> None:
        """``members`` and ``values`` are [t, H, D], of the tokens of an int64 index."""
        result = self.result
        missed = ~members.contains(values)
        result.elements += values.numel()
        result.outside += int(missed.sum())
        result.several += int((members.low < members.high).sum())
        result.strict_differs += changed_elements(members.strict, values)
        if bool(missed.any()):
            # A member of no class (a NaN, say) counts as outside though no distance is defined.
            rank = torch.where(missed, members.outside_by(values) + 1, 0).flatten()
            top = rank.topk(min(self.worst, rank.numel()))
            result.worst += self._points(top.indices[top.values > 0], tokens, members, values)
        here = self.drawn[(self.drawn >= self.before) & (self.drawn < self.before + values.numel())] - self.before
        result.sample += self._points(here.to(values.device), tokens, members, values)
        width, place = (members.high.long() - members.low.long()).flatten().max(0)
        if int(width) > self.widest[0]:
            self.widest = int(width), self._points(place.reshape(1), tokens, members, values)
        self.before += values.numel()

    def finished(self) -> FusedComparison:
        self.result.sample += self.widest[1]
        self.result.worst = sorted(self.result.worst, key=lambda p: -p.outside_by)[: self.worst]
        return self.result

    def _points(self, flat: Tensor, tokens: Tensor, members: AdmissibleSet, values: Tensor) -> list[FusedPoint]:
        heads, width = values.shape[1:]
        low, high = members.low.flatten()[flat], members.high.flatten()[flat]
        empty = low > high
        ends = [torch.where(empty, float("nan"), from_key(k, values.dtype).double()) for k in (low, high)]
        came = [t.flatten()[flat].double() for t in (members.forms[SEPARATE], values)]
        far = torch.where(empty, 0, members.outside_by(values).flatten()[flat]).double()
        rows = torch.stack([*ends, *came, far], dim=-1).tolist()
        points = []
        for place, (least, greatest, strict, got, outside) in zip(flat.tolist(), rows, strict=True):
            index = (int(tokens[place // (heads * width)]), place // width % heads, place % width)
            points.append(FusedPoint(index, least, greatest, strict, got, int(outside)))
        return points
