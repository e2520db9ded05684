"""What the judgement of refusals hands over to family ``norm_rotate_gate``: each bad call out of a good one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
BadNamedCall = tuple[Callable[[Arguments], Arguments], str, str]
"""Makes the arguments of the bad call, by name, out of those of a good one; the arguments that a refusal may name, by
"|"; and the keyword without which a candidate is not asked."""


def _with(name: str, change: Callable[[Any], Any], may_name: str = "", keyword: str = "") -> BadNamedCall:
    """The argument ``name`` is changed, which a refusal must name, or one of ``may_name``."""
    return lambda call: call | {name: change(call[name])}, may_name or name, keyword


def _set(name: str, value: Any, may_name: str = "") -> BadNamedCall:
    return lambda call: call | {name: value}, may_name or name, name


def _slots(make: Callable[[int], Tensor]) -> BadNamedCall:
    """A wrong ``slots``, made from the number of tokens."""
    return lambda call: call | {"slots": make(call["k"].shape[0]).to(call["k"].device)}, "slots", "slots"


def _map(change: Callable[[Tensor], Any]) -> BadNamedCall:
    return _with("axis_map", change, keyword="axis_map")


def _first(value: int) -> Callable[[Tensor], Tensor]:
    """The first lane reads another row."""
    return lambda axis_map: torch.cat((torch.full_like(axis_map[:1], value), axis_map[1:]))


def _other_dtype(t: Tensor) -> Tensor:
    return t.to(torch.float16 if t.dtype != torch.float16 else torch.bfloat16)


def _each(names: tuple[str, ...], change: Callable[[Any], Any]) -> BadNamedCall:
    return lambda call: call | {name: change(call[name]) for name in names}, "|".join(names), ""


_X, _WEIGHTS, _CACHE = ("q_gate", "k"), ("q_weight", "k_weight"), "cos_sin_cache"
_ROWS = "axis_map|positions"

_BAD: dict[str, BadNamedCall] = {
    "three-rows-without-a-map": (lambda call: call | {"axis_map": None}, _ROWS, "axis_map"),
    "a-map-without-three-rows": _with("positions", lambda p: p[0], _ROWS, "axis_map"),
    "map-of-a-row-3": _map(_first(3)),
    "q_gate-is-no-tensor": _with("q_gate", Tensor.tolist),
    "map-of-a-row-below-0": _map(_first(-1)),
    "map-of-fewer-lanes": _map(lambda axis_map: axis_map[:-1]),
    "map-of-more-lanes": _map(lambda axis_map: torch.cat((axis_map, axis_map[:1]))),
    "map-of-rank-2": _map(lambda axis_map: axis_map[None]),
    "map-of-fp32": _map(Tensor.float),
    "map-is-no-tensor": _map(Tensor.tolist),
    "map-on-another-device": _map(lambda axis_map: axis_map.to("meta")),
    "positions-of-two-rows": _with("positions", lambda p: p[:2], _ROWS),
    "positions-of-four-rows": _with("positions", lambda p: torch.cat((p, p[:1])), _ROWS),
    "positions-of-rank-3": _with("positions", lambda p: p[None], _ROWS),
    "positions-of-rank-0": _with("positions", lambda p: p[0, 0], _ROWS),
    "positions-of-fp32": _with("positions", Tensor.float),
    "fewer-positions-than-tokens": _with("positions", lambda p: p[:, :-1]),
    "more-positions-than-tokens": _with("positions", lambda p: torch.cat((p, p[:, :1]), dim=1)),
    "positions-on-another-device": _with("positions", lambda p: p.to("meta")),
    "q_gate-of-rank-3": _with("q_gate", lambda x: x[None]),
    "k-of-rank-3": _with("k", lambda x: x[None]),
    "q_gate-and-k-of-int32": _each(_X, lambda x: torch.zeros(x.shape, dtype=torch.int32, device=x.device)),
    "q_gate-and-k-of-fp64": _each(_X, Tensor.double),
    "k-of-another-dtype-than-q_gate": _with("k", _other_dtype),
    "k-of-fewer-tokens-than-q_gate": _with("k", lambda x: x[:-1]),
    "k-on-another-device": _with("k", lambda x: x.to("meta")),
    "q_gate-of-no-whole-heads": _with("q_gate", lambda x: x[:, :-2]),
    "k-of-no-whole-heads": _with("k", lambda x: x[:, :-2]),
    # Half a query and its gate too few.
    "q_gate-without-its-last-gate": (
        lambda call: call | {"q_gate": call["q_gate"][:, : -call["q_weight"].shape[0]]}, "q_gate", "gate",
    ),
    "q_weight-is-no-tensor": _with("q_weight", Tensor.tolist),
    "weights-of-rank-2": _each(_WEIGHTS, lambda w: w[None]),
    "k_weight-of-fewer-channels": _with("k_weight", lambda w: w[:-2], "k_weight|k"),
    "weights-of-another-dtype-than-x": _each(_WEIGHTS, _other_dtype),
    "weights-of-fp64": _each(_WEIGHTS, Tensor.double),
    "k_weight-of-another-dtype-than-q_weight": _with("k_weight", _other_dtype),
    "k_weight-on-another-device": _with("k_weight", lambda w: w.to("meta")),
    "cache-of-rank-1": _with(_CACHE, lambda cache: cache[0]),
    "cache-of-rank-3": _with(_CACHE, lambda cache: cache[None]),
    "cache-of-fp64": _with(_CACHE, Tensor.double),
    "cache-of-int64": _with(_CACHE, lambda cache: torch.zeros(cache.shape, dtype=torch.int64, device=cache.device)),
    "cache-of-odd-width": _with(_CACHE, lambda cache: cache[:, :-1], f"{_CACHE}|axis_map"),
    "cache-of-other-lanes-than-the-map": _with(_CACHE, lambda cache: cache[:, :-2], f"{_CACHE}|axis_map", "axis_map"),
    "cache-wider-than-a-head": _with(_CACHE, lambda cache: cache.repeat(1, 9), f"{_CACHE}|axis_map"),
    "cache-on-another-device": _with(_CACHE, lambda cache: cache.to("meta")),
    "fewer-slots-than-tokens": _slots(lambda tokens: torch.arange(tokens - 1)),
    "slots-of-rank-2": _slots(lambda tokens: torch.arange(tokens)[None]),
    "slots-of-fp32": _slots(lambda tokens: torch.arange(tokens).float()),
    "eps-below-0": _set("eps", -1e-6),
    "eps-is-no-number": _set("eps", "1e-6"),
    "eps-is-not-finite": _set("eps", float("inf")),
    "weight_offset-is-not-finite": _set("weight_offset", float("nan")),
}  # fmt: skip

BAD_NAMED_CALLS: Mapping[str, Mapping[str, BadNamedCall]] = MappingProxyType(
    {"norm_rotate_gate": MappingProxyType(_BAD)}
)
"""For each family whose call has keywords the bad calls by name."""
