"""laws: does what holds of every rotation hold of the candidate's?

Six laws, each asked alone, on tables of the judge's own: at position 0 the rotation is the identity, by value, zeros
with the sign that the recipe gives; rotating back returns x; turning by a and then by b is turning by a + b; a pair's
norm is kept; the dot product of q at m and k at n depends on m - n alone; and x times -8 gives y times -8, byte for
byte where nothing is subnormal. Every other bound is derived from the recipe's roundings (ropecheck.oracle.laws).

What the laws add to accuracy is little, and is this: their angles belong to no contract, and a candidate's outputs are
fed to it again. A candidate that treats every table alike and passes accuracy obeys all of them; one that knows its
contract's tables (snaps to them, or computes its own from the position that it reads off the given one) passes
accuracy on that contract's tables and fails here. A law sees no error that all of its calls share: a table
one ulp off, the other direction, and no rotation at all obey them, but for the sign of zero at position 0; and every
bound leaves the last place of a 16-bit result free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropecheck.oracle.floats import same
from ropecheck.oracle.laws import PairError, pair_error, scales_exactly, tables_of
from ropecheck.oracle.rotation import Rotation, compare

from ..candidates import Candidate
from ..cases import Case, Inputs, Operands, build, cases_of
from ..families import shown
from ..invocation import forward
from ..verdicts import Finding, failed, passed
from .judgement import Judgement, first_of

_POSITIONS = 1 << 17
_SMOKE = (Inputs(),)
_STANDARD = (Inputs(), Inputs(batch=2, length=5, table="per-sample"))
_FULL = (*_STANDARD, Inputs(batch=2, length=64, heads=8), Inputs(batch=3, length=33, table="per-sample"))
_SCALE = -8.0


@dataclass(frozen=True)
class _Asked:
    """What the laws are asked of: a candidate, the operands of a case, and a source of positions.

    Positions depend on the seed and the sizes alone, so that the tables are made once for all dtypes and candidates.
    """

    candidate: Candidate
    given: Operands
    generator: torch.Generator

    @property
    def x(self) -> Tensor:
        return self.given.x.view

    @property
    def error(self) -> PairError:
        case = self.given.case
        return pair_error(case.contract.forward, case.torch_dtype, self.given.cos.view.dtype)

    def positions(self) -> Tensor:
        """int64 of the tables' leading dimensions, at random."""
        return torch.randint(_POSITIONS, self.given.cos.view.shape[:-1], generator=self.generator)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of ``positions``: each lane turns by 10000^(-l / lanes), cut to 30 bits behind the point.

        Every angle of a position below 2^22 is then exact in fp64, and so are sums and differences of angles.
        """
        like = self.given.cos.view
        lanes = like.shape[-1]
        rates = torch.tensor([round(10000.0 ** (-lane / lanes) * 2**30) / 2**30 for lane in range(lanes)]).double()
        cos, sin = tables_of(positions[..., None].double() * rates, like.dtype)
        return cos.to(like.device), sin.to(like.device)

    def rotated(self, x: Tensor, tables: tuple[Tensor, Tensor], *, back: bool = False) -> Tensor:
        """The candidate's rotation of x; ``back`` the other way, by its own flag where it claims to have one."""
        cos, sin = tables
        family = self.given.family
        if back and "conjugate" in self.candidate.provides:
            turned = replace(family, inputs=replace(family.inputs, conjugate=True))
            return forward(self.candidate, x, turned.call(cos, sin, x.dtype))
        return forward(self.candidate, x, family.call(cos, -sin if back else sin, x.dtype))

    def pairs(self, x: Tensor) -> Tensor:
        """fp64 [2, B, S, H, lanes]: the members of each pair."""
        rotary = x[..., : 2 * self.given.cos.view.shape[-1]]
        return torch.stack([half.double() for half in self.given.case.contract.pairing.split(rotary)])


@dataclass(frozen=True)
class _Answer:
    """``deviation`` [B, S, H, lanes or channels] must nowhere exceed ``bound``. ``besides`` says what else is wrong."""

    deviation: Tensor
    bound: Tensor
    besides: str = ""


def _identity(asked: _Asked) -> _Answer:
    x = asked.x.clone()
    channels = torch.arange(x.shape[-1], device=x.device)
    x[..., channels % 5 == 0], x[..., channels % 7 == 0] = 0.0, -0.0
    cos, sin = torch.ones_like(asked.given.cos.view), torch.zeros_like(asked.given.sin.view)
    y, own = asked.rotated(x, (cos, sin)), asked.given.case.contract
    outside = compare(Rotation(x, cos, sin, own.pairing, own.forward), y, samples=0)
    besides = "" if outside.passed else f"{outside.outside + outside.tail_changed} elements are not admissible"
    deviation = (y.double() - x.double()).abs()
    return _Answer(deviation, torch.zeros_like(deviation), besides)


def _inverse(asked: _Asked) -> _Answer:
    tables = asked.tables(asked.positions())
    returned = asked.rotated(asked.rotated(asked.x, tables), tables, back=True)
    x = asked.pairs(asked.x)
    return _Answer(_norm(asked.pairs(returned) - x), asked.error.inverse().of(_norm(x)))


def _composition(asked: _Asked) -> _Answer:
    a, b = asked.positions(), asked.positions()
    twice = asked.rotated(asked.rotated(asked.x, asked.tables(a)), asked.tables(b))
    once = asked.rotated(asked.x, asked.tables(a + b))
    deviation = _norm(asked.pairs(twice) - asked.pairs(once))
    return _Answer(deviation, asked.error.composition().of(_norm(asked.pairs(asked.x))))


def _pair_norm(asked: _Asked) -> _Answer:
    before = _norm(asked.pairs(asked.x))
    after = _norm(asked.pairs(asked.rotated(asked.x, asked.tables(asked.positions()))))
    return _Answer((after - before).abs(), asked.error.norm().of(before))


def _relative_dot(asked: _Asked) -> _Answer:
    q, k = asked.x, asked.given.gradient.view
    m, n, shift = (asked.positions() for _ in range(3))

    def dot(moved: Tensor | int) -> Tensor:
        rotated_q = asked.pairs(asked.rotated(q, asked.tables(m + moved)))
        return (rotated_q * asked.pairs(asked.rotated(k, asked.tables(n + moved)))).sum(0)

    sizes = _norm(asked.pairs(q)), _norm(asked.pairs(k))
    largest = max((float(size.max()) for size in sizes if size.numel()), default=0.0)
    return _Answer((dot(0) - dot(shift)).abs(), asked.error.relative_dot(largest).of(sizes[0] * sizes[1]))


def _scaling(asked: _Asked) -> _Answer:
    tables, own, x = asked.tables(asked.positions()), asked.given.case.contract, asked.x
    expected, got = asked.rotated(x, tables) * _SCALE, asked.rotated(x * _SCALE, tables)
    c, s = (t.double().unsqueeze(-2) for t in tables)
    x0, x1 = asked.pairs(x)
    exact = own.pairing.join(*scales_exactly(own.forward, x0, x1, c, s, x.dtype))
    rotary = exact.shape[-1]
    unlike = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    unlike[..., :rotary] = exact
    unlike[..., rotary:] = x[..., rotary:].abs() >= torch.finfo(x.dtype).smallest_normal
    unlike &= ~same(expected.contiguous(), got.contiguous())
    deviation = torch.where(unlike, (expected.double() - got.double()).abs(), 0.0)
    return _Answer(deviation, torch.zeros_like(deviation), f"{int(unlike.sum())} bytes differ" if unlike.any() else "")


_LAWS: dict[str, tuple[Callable[[_Asked], _Answer], str]] = {
    "identity": (_identity, "position 0 is not the identity"),
    "inverse": (_inverse, "rotating back does not return x"),
    "composition": (_composition, "turning by a and then by b is not turning by a + b"),
    "pair-norm": (_pair_norm, "a pair's norm is not kept"),
    "relative-dot": (_relative_dot, "the dot product of q at m and k at n does not depend on m - n alone"),
    "scaling": (_scaling, f"x times {_SCALE:g} does not give y times {_SCALE:g}"),
}


def _norm(pairs: Tensor) -> Tensor:
    return pairs.square().sum(0).sqrt()


def _variants(candidate: Candidate, plan: str) -> Iterator[tuple[Inputs, str]]:
    for law in ("identity", "composition") if plan == "smoke" else _LAWS:
        for given in {"smoke": _SMOKE, "standard": _STANDARD, "full": _FULL}[plan]:
            yield given, law


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    law, broken = _LAWS[case.variant]
    answer = law(_Asked(candidate, build(case, seed), torch.Generator().manual_seed(seed)))
    # Not "greater than": a NaN obeys no law.
    outside = ~(answer.deviation <= answer.bound)
    facts: dict[str, Any] = {"elements": outside.numel(), "outside the bound": int(outside.sum())}
    if answer.bound.numel() and bool((answer.bound > 0).all()):
        facts["largest share of the bound"] = float(f"{float((answer.deviation / answer.bound).max()):.3g}")
    if not facts["outside the bound"] and not answer.besides:
        return passed(**facts)
    worst = None
    if facts["outside the bound"]:
        excess = torch.where(outside, (answer.deviation - answer.bound).nan_to_num(nan=torch.inf), -1.0)
        index = first_of(excess == excess.max())
        last = "channel" if case.variant in ("identity", "scaling") else "lane"
        worst = {
            **dict(zip(("sample", "token", "head", last), index, strict=True)),
            "deviation": shown(float(answer.deviation[index])),
            "bound": shown(float(answer.bound[index])),
        }
    count = f"{facts['outside the bound']} of {facts['elements']} elements deviate by more than the derived bound"
    return failed("; ".join(part for part in (broken, count if worst else "", answer.besides) if part), worst, **facts)


LAWS = Judgement(
    "laws",
    None,
    __doc__,
    lambda candidate, device, dtype, plan: cases_of("laws", candidate, device, dtype, _variants(candidate, plan)),
    judge,
    not_of={"norm_rotate_gate": "what is normalised first obeys no law of rotations"},
)
