"""Family ``norm_rotate_gate``: RMS norm of every head, rotation by positions, and gates set apart, in one call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ropecheck.oracle.axis_maps import STYLES
from ropecheck.oracle.fused import NormRotation
from ropecheck.oracle.norm import Norm

from ..cache_packing import STRIDED_POSITIONS, axis_map_of, gradients_of_cache, model_cache, pack, place_positions
from ..norm_payloads import NORM_PAYLOADS, Heads, gates, gradients, weights
from ..payloads import Slots
from ..views import TABLE_VIEWS, Placed, View, place
from .family import Asked, Family, Keywords, Wanted, takes_keyword
from .norm_expected import ExpectedNorm
from .norm_heads import HeadCounts

if TYPE_CHECKING:
    from ropecheck.oracle.contract import Contract

    from ..cases import Inputs, Operands

# All heads and channels of a token are one dimension of what a candidate is given.
_X_VIEWS = ("contiguous", "packed-qkv", "misaligned", "packed-qkv-misaligned", "tokens-far-apart")
_CACHE_VIEWS = ("contiguous", "end-of-allocation", "misaligned", "sliced-rows")
# A gradient comes in for each output, [T, channels].
_GRADIENT_VIEWS: Mapping[str, View] = {
    "contiguous": partial(place, order=(0, 1), steps=(1, 1)),
    "packed-qkv": partial(place, order=(0, 1), steps=(3, 1)),
    "misaligned": partial(place, order=(0, 1), steps=(1, 1), offset=1),
    "packed-qkv-misaligned": partial(place, order=(0, 1), steps=(3, 1), offset=3),
    "channels-stride-2": partial(place, order=(0, 1), steps=(1, 2)),
    "channels-outermost": partial(place, order=(1, 0), steps=(1, 1)),
    "all-stride-0": partial(place, order=(0, 1), steps=(0, 0)),
}
_CACHE_DTYPES = {"bfloat16-cache": torch.bfloat16, "float16-cache": torch.float16}
# Other maps than the contract's, by the order and the counts of their sections.
_MAPS = {
    f"{style}-{'-'.join(map(str, section))}": (style, section)
    for style in ("contiguous", "interleaved", "round-robin")
    for section in ((11, 11, 10), (24, 20, 20), (16, 24, 24), (1, 1, 30), (0, 16, 16))
} | {"ernie-11-11-10": ("ernie", (11, 11, 10))}
# Each with the keyword that the candidate must have for it, where it needs one.
_OPTIONS = {
    "no-gate": "gate",
    "plain-weights": "weight_offset",
    "half-offset": "weight_offset",
    "unrounded-norm": "round_norm",
    "fma": "fma",
    "large-eps": "eps",
    **dict.fromkeys(("slots", "int32-slots", "all-padding"), "slots"),
    "int32-map": "axis_map",
    **dict.fromkeys(_MAPS, "axis_map"),
    **dict.fromkeys(("one-row", "out-of-range", "float32-weights", "model-cache", *_CACHE_DTYPES), ""),
    **dict.fromkeys(("int32-positions", "shared-rows", *STRIDED_POSITIONS), ""),
}
_LARGE_EPS = 0.3
_POISON = 1 << 30
"""The position of padding, beyond every cache."""


@dataclass(frozen=True)
class NormRotateGate(Family):
    """``run(q_gate, k, q_weight, k_weight, cos_sin_cache, positions, *, eps, axis_map=None, gate=True,
    weight_offset=1.0, round_norm=True, fma=False, slots=None) -> (q, k, gate)``.

    q_gate [T, Hq * 2 * D], each head's query and then its gate, or [T, Hq * D] with ``gate=False``, and k [T, Hk * D];
    the outputs are [T, Hq * D], [T, Hk * D] and [T, Hq * D], or have a dimension for the heads. A candidate that takes
    fewer keywords is asked what their defaults are, eps being the contract's. In x [1, T, H, D] each query is followed
    by its gate, and the keys are behind.
    """

    name: ClassVar[str] = "norm_rotate_gate"
    activations: ClassVar[tuple[str, ...]] = ("q_gate", "k")
    outputs: ClassVar[tuple[str, ...]] = ("q", "k", "gate")
    flat: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    differentiable_tables: ClassVar[tuple[str, ...]] = ("cos_sin_cache",)
    separate: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset(_OPTIONS)
    unclaimable: ClassVar[Mapping[str, str]] = {
        "conjugate": "a norm is not undone by turning the other way",
        "higher-vjp": "the contract has one derivative",
    }

    @classmethod
    def takes(cls, own: Contract) -> bool:
        return own.norm is not None

    @classmethod
    def fitted(cls, own: Contract, inputs: Inputs) -> Inputs:
        """Of each kind of heads there is one, at least, and all lie in their token's row: rows are strided instead."""
        least = 2 if "no-gate" in inputs.chosen else 3
        heads = least if 0 < inputs.heads < least else inputs.heads
        views = ("packed-qkv" if view == "heads-first" else view
                 for view in (inputs.x_view, inputs.k_view, inputs.gradient_view))  # fmt: skip
        x, k, gradient = views
        return replace(inputs, heads=heads, x_view=x, k_view=k, gradient_view=gradient)

    @classmethod
    def further(cls, judgement: str, plan: str, device: str) -> Asked:
        # The cases are made of inputs, and those are of families.
        from .norm_cases import further

        return further(judgement, plan, device)

    def suits(self, run: Callable[..., Any]) -> bool:
        given = self.inputs
        if not super().suits(run) or given.conjugate or given.sin_view or given.gradient_view not in _GRADIENT_VIEWS:
            return False
        if given.payload not in NORM_PAYLOADS:
            return False
        if given.x_view not in _X_VIEWS or given.k_view not in ("", *_X_VIEWS) or given.table_view not in _CACHE_VIEWS:
            return False
        # Without the keyword a kernel has the contract's map, which has no other width.
        if self.axis_map not in (None, axis_map_of(self.own)) and not takes_keyword(run, "axis_map"):
            return False
        return all(not (keyword := _OPTIONS[option]) or takes_keyword(run, keyword) for option in given.chosen)

    def needs(self) -> set[str]:
        claims = {
            "strided": STRIDED_POSITIONS,
            "any-dtype": {"float32-weights", *_CACHE_DTYPES},
            "any-position": {"out-of-range"},
        }
        return {claim for claim, options in claims.items() if self.inputs.chosen & options}

    @property
    def head_dim(self) -> int:
        return self.inputs.head_dim or self.own.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.inputs.rotary_dim or self.own.rotary_dim

    @property
    def heads(self) -> HeadCounts:
        given = self.inputs
        return HeadCounts.of(given.heads, given.k_heads, "no-gate" not in given.chosen)

    @property
    def norm(self) -> Norm:
        """The contract's norm as the options change it."""
        own, chosen = self.own.norm, self.inputs.chosen
        assert own is not None
        return Norm(
            _LARGE_EPS if "large-eps" in chosen else own.eps,
            0.0 if "plain-weights" in chosen else 0.5 if "half-offset" in chosen else own.weight_offset,
            own.round_norm and "unrounded-norm" not in chosen,
        )

    @property
    def axis_map(self) -> tuple[int, ...] | None:
        """Which row of the positions each lane reads; None where they have one row."""
        chosen, lanes = self.inputs.chosen, self.rotary_dim // 2
        for name in chosen & set(_MAPS):
            style, section = _MAPS[name]
            return STYLES[style](section, self.rotary_dim)
        own = axis_map_of(self.own)
        if own is None or "one-row" in chosen:
            return None
        # As the contract spreads its lanes over another width.
        return tuple(own[lane * len(own) // lanes] for lane in range(lanes))

    def padding(self, tokens: int) -> Tensor:
        chosen = self.inputs.chosen
        return ((torch.arange(tokens) % 4 == 1) | ("all-padding" in chosen)) & ("slots" in chosen)

    def out_of_range(self, tokens: int) -> Tensor:
        """bool [T]: the tokens that have a position outside the cache, and are no padding."""
        return (torch.arange(tokens) % 2 == 0) & ("out-of-range" in self.inputs.chosen) & ~self.padding(tokens)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        at = self.heads.before_keys
        return tuple(part.flatten(1) for part in torch.split(x[0], [at, x.shape[2] - at], dim=1))

    def lifted(self, activation: Tensor) -> Tensor:
        tokens, width = activation.shape[0], self.head_dim
        heads = activation.shape[1] if activation.dim() == 3 else activation.shape[1] // width
        return activation.reshape(1, tokens, heads, width)

    def lowered(self, x: Tensor) -> Tensor:
        return x[0].flatten(1)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """As x. What padding holds nobody says: here it is zero."""
        q, k, *gate = (self.lifted(y) for y in outputs if y is not None)
        whole = self.heads.joined(q, k, gate[0] if gate else q[:, :, :0])
        if "slots" not in self.inputs.chosen:
            return whole
        return whole.masked_fill(self.padding(whole.shape[1])[:, None, None].to(whole.device), 0.0)

    def upstream(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """A gradient for each output, in memory of its own: the heads of queries and of gates take turns in x."""
        heads, view = self.heads, self.inputs.gradient_view
        views = (view, self.inputs.k_gradient_view or view, view)
        parts = (heads.queries(gradient), heads.keys(gradient), *([heads.gates(gradient)] if heads.gate else []))
        return tuple(_GRADIENT_VIEWS[v](part[0].flatten(1)).view for part, v in zip(parts, views, strict=False))

    def wanted(self, activations: Sequence[Tensor]) -> tuple[Wanted, ...]:
        q_gate, k = activations
        tokens, heads, width = k.shape[0], self.heads, self.head_dim
        counts = (("q", heads.q, q_gate), ("k", heads.k, k), *([("gate", heads.q, q_gate)] if heads.gate else []))
        return tuple(Wanted(n, like, ((tokens, h * width), (tokens, h, width))) for n, h, like in counts)

    def returned(self, result: Any) -> Any:
        """Without gates None stands in their place."""
        if not self.heads.gate and isinstance(result, (tuple, list)) and len(result) == 3 and result[2] is None:
            return result[:2]
        return result

    def outputs_of(self, at: int) -> tuple[int, ...]:
        return (0, 2)[: self.heads.parts] if at == 0 else (1,)

    def payload(self, slots: Slots, *, gradient: bool) -> Tensor:
        _, tokens, _, width = slots.shape
        heads, name = self.heads, self.inputs.payload
        rotary_dim = 2 * slots.cos.shape[-1]
        q, k, gate = (
            Heads((tokens, n, width), rotary_dim, slots.dtype, slots.generator) for n in (heads.q, heads.k, heads.q)
        )
        fill = partial(gradients, name) if gradient else NORM_PAYLOADS[name]
        x = heads.joined(fill(q), fill(k), gates(name, gate) if heads.gate else torch.zeros(tokens, 0, width))[None]
        # It must not be read: neither by what comes out of a call nor by a sum over tokens.
        return x.masked_fill(self.padding(tokens)[:, None, None], float("nan"))

    def packed(
        self, cos: Tensor, sin: Tensor, activation: torch.dtype, positions: Tensor | None = None
    ) -> dict[str, Placed]:
        given, tokens, device = self.inputs, cos.shape[0], cos.device
        axis_map, dtype = self.axis_map, torch.float32 if "float32-weights" in given.chosen else activation
        generator = torch.Generator().manual_seed(zlib.crc32(given.describe(self.own).encode()))
        heads = Heads((0, 0, self.head_dim), self.rotary_dim, dtype, generator)
        q_weight, k_weight = (w.to(device) for w in weights(given.payload, heads, self.norm.weight_offset))
        if "model-cache" in given.chosen:
            if positions is None:
                raise ValueError("positions must be given where the model's own cache is read")
            made = model_cache(self.own, positions, cos.dtype, device)
            if axis_map is None and made.positions.dim() == 2:
                made = replace(made, positions=_one_row(made.positions))
        else:
            made = pack(self._cached(cos), self._cached(sin), axis_map, shared="shared-rows" in given.chosen)
        cache = made.cache.to(self._cache_dtype)
        where = place_positions(self._marked_positions(made.positions, len(cache)), given.chosen, made.nobody)
        tables = {
            "q_weight": place(q_weight, (0,), (1,)),
            "k_weight": place(k_weight, (0,), (1,)),
            "cos_sin_cache": TABLE_VIEWS[given.table_view](cache),
            "positions": where,
        }
        # Where positions are cut out of a buffer of other numbers, so are the other integers.
        step = 2 if given.chosen & STRIDED_POSITIONS else 1
        if axis_map is not None:
            whole = torch.int32 if "int32-map" in given.chosen else torch.int64
            tables["axis_map"] = place(torch.tensor(axis_map, dtype=whole, device=device), (0,), (step,))
        if "slots" in given.chosen:
            slots = torch.randperm(2 * tokens, generator=generator)[:tokens].masked_fill(self.padding(tokens), -1)
            whole = torch.int32 if "int32-slots" in given.chosen else where.view.dtype
            tables["slots"] = place(slots.to(whole).to(device), (0,), (step,))
        return tables

    def sizes_of_tokens(self, tables: Sequence[Tensor]) -> tuple[int | None, ...]:
        named = {"axis_map": None, "slots": 0}
        return (None, None, 0, tables[3].dim() - 1, *(named[name] for name in self._named_tables))

    def repeated(self, tables: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        q_weight, k_weight, cache, positions, *others = tables
        return q_weight, k_weight, cache, positions.expand(*positions.shape[:-1], count).contiguous(), *others

    def keywords(self, function: Callable[..., Any]) -> Keywords:
        """Those that ``function`` takes."""
        norm = self.norm
        values = {
            "eps": norm.eps, "weight_offset": norm.weight_offset, "round_norm": norm.round_norm,
            "gate": self.heads.gate, "fma": "fma" in self.inputs.chosen,
        }  # fmt: skip
        tables = tuple(name if takes_keyword(function, name) else "" for name in self._named_tables)
        return Keywords({name: value for name, value in values.items() if takes_keyword(function, name)}, tables)

    def expected(self, operands: Operands, *, backward: bool) -> ExpectedNorm:
        heads, x = self.heads, operands.x.as_given()
        cos, sin = (self._cached(table.as_given()) for table in (operands.cos, operands.sin))
        padding, outside = (mark(x.shape[1]).to(x.device) for mark in (self.padding, self.out_of_range))
        q, k = (
            NormRotation(
                of(x)[0], operands.tables[name].as_given(), cos, sin, self.norm, "fma" in self.inputs.chosen, outside,
                padding,
            )
            for of, name in ((heads.queries, "q_weight"), (heads.keys, "k_weight"))
        )  # fmt: skip
        gradient = operands.gradient.as_given() if backward else None
        return ExpectedNorm(heads, q, k, x, operands.positions, gradient)

    def gradients_read(
        self, tables: Sequence[Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        (gradient,) = gradients.values()
        return gradients_of_cache(gradient, tables[3], self.axis_map)

    def turned(self, operands: Operands) -> tuple[Tensor, Tensor]:
        return self.expected(operands, backward=False).normalised()

    def tensor_of(self, head: int) -> str:
        return self.heads.tensor_of(head)[0]

    @property
    def _named_tables(self) -> tuple[str, ...]:
        """The tables that are given by name."""
        used = {"axis_map": self.axis_map is not None, "slots": "slots" in self.inputs.chosen}
        return tuple(name for name, is_used in used.items() if is_used)

    @property
    def _cache_dtype(self) -> torch.dtype:
        return next((_CACHE_DTYPES[name] for name in self.inputs.chosen & set(_CACHE_DTYPES)), torch.float32)

    def _cached(self, table: Tensor) -> Tensor:
        """fp32, as the cache's dtype holds it."""
        return table.to(self._cache_dtype).float()

    def _marked_positions(self, positions: Tensor, rows: int) -> Tensor:
        """``positions`` with those of padding beyond every cache, one row of each token that is out of range, and the
        rows that no lane reads, which put no token out of range."""
        padding, outside = self.padding(positions.shape[-1]), self.out_of_range(positions.shape[-1])
        wrong = [-1, rows, rows + 1, -(1 << 31)]
        # As 32 bits, these would be rows of the cache.
        wrong += [] if "int32-positions" in self.inputs.chosen else [1 << 32, (1 << 32) + rows - 1]
        moved = positions.clone()
        used = sorted(set(self.axis_map or ()))
        if "out-of-range" in self.inputs.chosen and used:
            moved[[row for row in range(len(moved)) if row not in used]] = -1
        for number, token in enumerate(outside.nonzero().flatten().tolist()):
            place_of = (used[number % len(used)], token) if used else (token,)
            moved[place_of] = wrong[number % len(wrong)]
        return torch.where(padding.to(moved.device), _POISON, moved)


def _one_row(positions: Tensor) -> Tensor:
    if not bool((positions == positions[0]).all()):
        raise ValueError("positions must be the same in every row where one row is to stand for all")
    return positions[0]
