"""Level L1: a rotation with its table given, compared with a candidate's output element by element.

The comparison streams over tokens, so its memory does not grow with the tensor, and runs on the tensor's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .admissible import SEPARATE, AdmissibleSet, admissible, strict
from .floats import bits, from_key, same
from .pairing import Pairing
from .recipes import Recipe

PAIRS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Pairs per block: on a CPU the temporaries of one block stay in the second-level cache."""


@dataclass(frozen=True)
class Rotation:
    """One rotation of [B, S, H, D] with its recipe; the oracle's side of a family ``rotate`` call.

    ``cos`` and ``sin`` are [S, R / 2] or [B, S, R / 2]; channels from R on pass through. ``is_gradient`` says that x
    is an incoming gradient and the output the gradient of the forward's x.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    pairing: Pairing
    recipe: Recipe
    conjugate: bool = False
    is_gradient: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]


@dataclass(frozen=True)
class Point:
    """One output element with the four numbers that it is made from.

    ``index`` is (batch, token, head, channel), ``lane`` its lane and ``output`` 'y0' or 'y1'. ``low`` and ``high``
    are the ends of the span of finite admissible values (NaN where there is none), ``outside_by`` the number of
    representable values between ``got`` and the span.
    """

    index: tuple[int, int, int, int]
    lane: int
    output: str
    x0: float
    x1: float
    c: float
    s: float
    low: float
    high: float
    strict: float
    got: float
    outside_by: int


@dataclass
class Comparison:
    """What came out of holding a tensor against its admissible sets.

    ``outside`` counts the rotated elements that are not members, ``several`` those with more than one admissible
    value, ``tail_changed`` pass-through elements whose bytes differ. ``unlike_of`` counts, for each output
    and form, the elements that differ from it. ``worst`` holds the elements furthest outside, ``sample`` those drawn
    for certification together with the widest sets.
    """

    elements: int = 0
    outside: int = 0
    several: int = 0
    tail_changed: int = 0
    unlike_of: dict[str, dict[str, int]] = field(default_factory=lambda: {"y0": {}, "y1": {}})
    worst: list[Point] = field(default_factory=list)
    sample: list[Point] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.outside and not self.tail_changed

    @property
    def unlike(self) -> dict[str, int]:
        """For each form the elements that differ from it. A form may belong to one of the two outputs only."""
        total: dict[str, int] = {}
        for forms in self.unlike_of.values():
            for name, count in forms.items():
                total[name] = total.get(name, 0) + count
        return total

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """The forms that reproduce every rotated element, empty where one output has none.

        A form onto zero is named only where the form itself does not reproduce them.
        """
        if not all(0 in forms.values() for forms in self.unlike_of.values() if forms):
            return ()
        whole = [name for name, count in self.unlike.items() if not count]
        return tuple(name for name in whole if name.partition(",")[0] not in whole or "," not in name)

    @property
    def strict_differs(self) -> int:
        """Elements that differ from the recipe evaluated in its own order without contraction."""
        return self.unlike.get(SEPARATE, 0)


def compare(
    rotation: Rotation,
    got: Tensor,
    *,
    samples: int = 128,
    seed: int = 0,
    worst: int = 8,
    missed: Tensor | None = None,
) -> Comparison:
    """Hold ``got`` [B, S, H, D] against ``rotation``, drawing ``samples`` pairs (two points each) for certification.

    ``missed``, a bool tensor like ``got``, is made true at the rotated elements that are not members and false at
    every other: where one of several recipes has to admit an element, their masks are intersected.
    """
    x = rotation.x
    if got.shape != x.shape or got.dtype != x.dtype:
        raise ValueError(f"got must be {x.dtype} {tuple(x.shape)} like x, not {got.dtype} {tuple(got.shape)}")
    result = Comparison()
    if missed is not None:
        missed.fill_(False)
    lanes = rotation.cos.shape[-1]
    pairs = x.shape[0] * x.shape[1] * x.shape[2] * lanes
    drawn = torch.randint(max(1, pairs), (samples,), generator=torch.Generator().manual_seed(seed))
    before = 0
    for block in _blocks(rotation):
        operands = block.operands()
        sets = admissible(rotation.recipe, *operands, x.dtype)
        here = got[block.batch, block.tokens, :, : rotation.rotary_dim]
        outputs = [half.reshape(-1) for half in rotation.pairing.split(here)]
        if missed is not None:
            outside = [~members.contains(values) for members, values in zip(sets, outputs, strict=True)]
            shape = (*here.shape[:-1], lanes)
            joined = rotation.pairing.join(*(mask.reshape(shape) for mask in outside))
            missed[block.batch, block.tokens, :, : rotation.rotary_dim] = joined
        _tally(result, sets, outputs)
        chosen = drawn[(drawn >= before) & (drawn < before + block.pairs)] - before
        for name, members, values in zip(("y0", "y1"), sets, outputs, strict=True):
            numbers = _Numbers(name, *operands, members, values)
            if result.outside and bool((not_members := ~members.contains(values)).any()):
                # A member of no class (a NaN, say) counts as outside though no distance is defined.
                rank = torch.where(not_members, members.outside_by(values) + 1, 0)
                top = rank.topk(min(worst, rank.numel()))
                result.worst += block.points(top.indices[top.values > 0], numbers)
            widest = (members.high - members.low).argmax().reshape(1)
            result.sample += block.points(torch.cat((chosen.to(x.device), widest)), numbers)
        before += block.pairs
    result.worst = sorted(result.worst, key=lambda p: -p.outside_by)[:worst]
    tail, came = x[..., rotation.rotary_dim :], got[..., rotation.rotary_dim :]
    changed = bits(came) != bits(tail)
    if rotation.is_gradient:
        # Accumulated onto zeros, as in the backward of a slice: -0 becomes +0, as in a rotated channel.
        changed &= ~((came == 0) & (tail == 0) & tail.signbit())
    result.tail_changed = int(changed.sum())
    return result


def rotate_strict(rotation: Rotation) -> Tensor:
    """The contract's own bytes, [B, S, H, D] contiguous: the recipe in its order, without contraction."""
    x = rotation.x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., rotation.rotary_dim :] = x[..., rotation.rotary_dim :]
    for block in _blocks(rotation):
        y0, y1 = strict(rotation.recipe, *block.operands(), x.dtype)
        shape = (*x[block.batch, block.tokens].shape[:2], rotation.cos.shape[-1])
        joined = rotation.pairing.join(y0.reshape(shape), y1.reshape(shape))
        out[block.batch, block.tokens, :, : rotation.rotary_dim] = joined
    return out


def changed_elements(a: Tensor, b: Tensor) -> int:
    """How many elements of two tensors of one shape and dtype differ in bytes, any NaN equal to any NaN."""
    return int((~same(a, b)).sum())


@dataclass(frozen=True)
class _Block:
    """Some tokens of one batch row."""

    rotation: Rotation
    batch: int
    tokens: slice

    @property
    def pairs(self) -> int:
        heads = self.rotation.x.shape[2]
        tokens: int = self.tokens.stop - self.tokens.start
        return tokens * heads * self.rotation.cos.shape[-1]

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x0, x1, c and s, flat, in fp64."""
        r = self.rotation
        x = r.x[self.batch, self.tokens, :, : r.rotary_dim]
        x0, x1 = (half.double().reshape(-1) for half in r.pairing.split(x))
        row = (self.batch, self.tokens) if r.cos.dim() == 3 else (self.tokens,)
        c, s = (t[row].double().unsqueeze(1).expand(-1, x.shape[1], -1).reshape(-1) for t in (r.cos, r.sin))
        return x0, x1, c, -s if r.conjugate else s

    def points(self, flat: Tensor, numbers: _Numbers) -> list[Point]:
        """The elements of int64 ``flat`` indices, brought to the CPU together."""
        r = self.rotation
        lanes, heads = r.cos.shape[-1], r.x.shape[2]
        points = []
        for place, (x0, x1, c, s, low, high, strict_value, got, outside) in zip(
            flat.tolist(), numbers.at(flat), strict=True
        ):
            token, head, lane = place // (heads * lanes), place // lanes % heads, place % lanes
            channel = r.pairing.channels(lane, lanes)[numbers.output == "y1"]
            index = (self.batch, self.tokens.start + token, head, channel)
            points.append(
                Point(index, lane, numbers.output, x0, x1, c, s, low, high, strict_value, got, int(outside))
            )
        return points


@dataclass(frozen=True)
class _Numbers:
    """All that is known of a block's elements of one output, flat."""

    output: str
    x0: Tensor
    x1: Tensor
    c: Tensor
    s: Tensor
    members: AdmissibleSet
    values: Tensor

    def at(self, flat: Tensor) -> list[list[float]]:
        """x0, x1, c, s, low, high, strict, got and the distance outside, as a row of fp64 for each index."""
        members, dtype = self.members, self.values.dtype
        low, high = members.low[flat], members.high[flat]
        empty = low > high
        ends = [torch.where(empty, float("nan"), from_key(k, dtype).double()) for k in (low, high)]
        given = [t[flat] for t in (self.x0, self.x1, self.c, self.s)]
        results = [members.strict[flat].double(), self.values[flat].double()]
        outside = torch.where(empty, 0, members.outside_by_at(self.values, flat)).double()
        rows: list[list[float]] = torch.stack([*given, *ends, *results, outside], dim=-1).tolist()
        return rows


def _blocks(rotation: Rotation) -> Iterator[_Block]:
    batch, length, heads, _ = rotation.x.shape
    per_token = max(1, heads * rotation.cos.shape[-1])
    step = max(1, PAIRS_AT_ONCE[rotation.x.device.type] // per_token)
    for b in range(batch):
        for start in range(0, length, step):
            block = _Block(rotation, b, slice(start, min(start + step, length)))
            if block.pairs:
                yield block


def _tally(result: Comparison, sets: tuple[AdmissibleSet, AdmissibleSet], outputs: list[Tensor]) -> None:
    for unlike, members, values in zip(result.unlike_of.values(), sets, outputs, strict=True):
        result.elements += values.numel()
        result.outside += int((~members.contains(values)).sum())
        result.several += int((members.low < members.high).sum())
        counted: dict[int, int] = {}
        for name, form in members.forms.items():
            # Paths that agree everywhere share one tensor.
            if id(form) not in counted:
                counted[id(form)] = changed_elements(form, values)
            unlike[name] = unlike.get(name, 0) + counted[id(form)]
