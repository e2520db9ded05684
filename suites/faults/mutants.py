"""Wrong candidates made of a misreading: the oracle's own bytes for a call that is read otherwise than it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.fused import gathered_tables, strict_fused_vjp
from ropecheck.oracle.norm import Norm

from ..candidates import Candidate
from ..families.norm_heads import HeadCounts
from .part import Tables, norm_call
from .reading import Reading, of_cache, of_norm, of_rotation, tables_of_rows

Misread = Callable[[Reading], Reading]


def mutant(
    name: str, own: str, family: str, misread: Misread, dtype: str, claims: tuple[str, ...] = ("vjp", "any-shape")
) -> Candidate:
    """A candidate of ``family`` that computes what follows from ``misread`` of each call; right without any change."""
    made = _MAKERS[family](contract(own), misread)
    backward = None if family == "norm_rotate_gate" or "vjp" not in claims else made.vjp
    return Candidate(
        f"fault/{name}", own, made.run, ("cpu",), (dtype,), claims, family=family, vjp=backward
    )


@dataclass(frozen=True)
class _Rotate:
    own: Contract
    misread: Misread

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        return self._outputs(x, cos, sin, conjugate, backward=False)

    def vjp(self, gradient: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        return self._outputs(gradient, cos, sin, conjugate, backward=True)

    def _outputs(self, x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool, *, backward: bool) -> Tensor:
        reading = of_rotation(self.own, (x,), cos, -sin if conjugate else sin, backward=backward)
        return self.misread(reading).outputs()[0]


@dataclass(frozen=True)
class _RotatePair:
    own: Contract
    misread: Misread

    def run(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> tuple[Tensor, ...]:
        return self._outputs(q, k, cos, -sin if conjugate else sin, backward=False)

    def vjp(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> tuple[Tensor, ...]:
        return self._outputs(q, k, cos, -sin if conjugate else sin, backward=True)

    def _outputs(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> tuple[Tensor, ...]:
        return self.misread(of_rotation(self.own, (q, k), cos, sin, backward=backward)).outputs()


@dataclass(frozen=True)
class _RotateQK:
    own: Contract
    misread: Misread

    def run(self, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return self._outputs(q, k, cos_sin_cache, positions, backward=False)

    def vjp(self, q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return self._outputs(q, k, cos_sin_cache, positions, backward=True)

    def _outputs(
        self, q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, *, backward: bool
    ) -> tuple[Tensor, ...]:
        reading = of_cache(self.own, (q[None], k[None]), cache, positions, backward=backward)
        return tuple(y[0] for y in self.misread(reading).outputs())


def right_fused_call(own: Contract) -> Callable[..., tuple[Tensor | None, ...]]:
    """What a mutant of family ``norm_rotate_gate`` runs whose reading is not changed."""
    return _NormRotateGate(own, lambda reading: reading).run


@dataclass(frozen=True)
class _Call:
    """What a fused call is given besides the activations and the weights."""

    cache: Tensor
    positions: Tensor
    axis_map: tuple[int, ...] | None
    norm: Norm
    gate: bool
    fma: bool
    padding: Tensor | None

    def heads(self, q_gate: Tensor, k: Tensor, width: int) -> HeadCounts:
        return HeadCounts(q_gate.shape[1] // (width * (1 + self.gate)), k.shape[1] // width, self.gate)


@dataclass(frozen=True)
class _NormRotateGate:
    own: Contract
    misread: Misread

    def run(
        self,
        q_gate: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        *,
        eps: float,
        axis_map: Tensor | None = None,
        gate: bool = True,
        weight_offset: float = 1.0,
        round_norm: bool = True,
        fma: bool = False,
        slots: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        if cos_sin_cache.requires_grad:
            raise ValueError("cos_sin_cache must not require a gradient")
        lanes = None if axis_map is None else tuple(axis_map.tolist())
        norm = Norm(eps, weight_offset, round_norm)
        call = _Call(
            cos_sin_cache.float(), positions, lanes, norm, gate, fma, None if slots is None else slots == -1
        )
        outputs = _Fused.apply(q_gate, k, q_weight, k_weight, call, self)  # type: ignore[no-untyped-call]
        return (*outputs, *([] if gate else [None]))

    def reading(
        self, q_gate: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], call: _Call, gradient: Tensor | None
    ) -> Reading:
        """As it is misread."""
        width = weights[0].shape[0]
        heads = call.heads(q_gate, k, width)
        parts = [t.reshape(1, t.shape[0], t.shape[1] // width, width) for t in (q_gate, k)]
        _, _, outside = gathered_tables(call.cache, call.positions, call.axis_map)
        padding = call.padding
        tables: Tables = tables_of_rows(call.cache, call.positions, call.axis_map)
        x = torch.cat(parts, dim=2)
        reading = of_norm(
            self.own, x, heads, weights, tables, call.norm, fma=call.fma, out_of_range=outside, padding=padding,
            gradient=gradient,
        )  # fmt: skip
        return self.misread(reading)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, call: _Call, made: _NormRotateGate
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q_gate, k, q_weight, k_weight, call.cache, call.positions)
        ctx.call, ctx.made = call, made
        outputs = made.reading(q_gate, k, (q_weight, k_weight), call, None).outputs()
        return tuple(_written(y[0].flatten(1), call.padding) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_gate, k, q_weight, k_weight, cache, positions = ctx.saved_tensors
        call: _Call = replace(ctx.call, cache=cache, positions=positions)
        width = q_weight.shape[0]
        heads = call.heads(q_gate, k, width)
        of_q, of_k, *of_gate = (g.reshape(1, g.shape[0], g.shape[1] // width, width) for g in gradients)
        incoming = heads.joined(of_q, of_k, of_gate[0] if of_gate else of_q[:, :, :0])
        reading = ctx.made.reading(q_gate, k, (q_weight, k_weight), call, incoming)
        y_q, y_k, *y_gate = reading.outputs()
        whole = heads.joined(y_q, y_k, y_gate[0] if y_gate else y_q[:, :, :0])
        if call.padding is not None:
            whole = whole.masked_fill(call.padding[:, None, None], 0.0)
        of_weights = (strict_fused_vjp(*norm_call(part))[1] for part in reading.parts[:2])
        before = heads.before_keys
        return whole[0, :, :before].flatten(1), whole[0, :, before:].flatten(1), *of_weights, None, None


def _written(y: Tensor, padding: Tensor | None) -> Tensor:
    """y [T, channels] in new memory, of which the rows of padding are left as they come."""
    if padding is None:
        return y
    out = torch.empty_like(y)
    out[~padding] = y[~padding]
    return out


_MAKERS: dict[str, Callable[[Contract, Misread], Any]] = {
    "rotate": _Rotate,
    "rotate_pair": _RotatePair,
    "rotate_qk": _RotateQK,
    "norm_rotate_gate": _NormRotateGate,
}
