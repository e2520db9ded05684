"""Sightings: in which case a judgement first sees a fault, and what of that case it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..cases import Case, Inputs

_VIEWS = ("x_view", "k_view", "table_view", "sin_view", "gradient_view")


@dataclass(frozen=True)
class Sighting:
    """The first ``case``, by its id, in which a judgement sees a fault; ``payload`` and ``layout`` are that case's.

    ``needed`` is in what it is unlike the nearest case that the fault had passed before: nothing where it passed none.
    """

    case: str
    payload: str
    layout: str
    needed: tuple[str, ...] = ()


def sighting(case: Case, passed: Sequence[Case]) -> Sighting:
    """Of ``case``, before which the fault passed the cases ``passed`` of the same judgement, in this order."""
    own = _features(case)
    unlike = [tuple(name for name in own if own[name] != other[name]) for other in map(_features, passed)]
    nearest = min(unlike, key=len, default=())
    return Sighting(case.id, case.inputs.payload, _layout(case), tuple(f"{name} {own[name]}" for name in nearest))


def _features(case: Case) -> dict[str, str]:
    """Everything that a case is made of within its judgement, by name."""
    given, own = case.inputs, case.contract
    sized = replace(given, head_dim=given.head_dim or own.head_dim, rotary_dim=given.rotary_dim or own.rotary_dim)
    features = {name.replace("_", " "): str(value) or "none" for name, value in asdict(sized).items()}
    return {**features, "layout" if _of_layouts(case) else "variant": case.variant}


def _of_layouts(case: Case) -> bool:
    return case.judgement.startswith("invariance")


def _layout(case: Case) -> str:
    """The arrangement of tokens where the judgement is of those, else how the operands lie in memory."""
    if _of_layouts(case):
        return case.variant.partition("/")[0]
    given, plain = asdict(case.inputs), asdict(Inputs())
    views = (f"{name.removesuffix('_view')}={given[name]}" for name in _VIEWS if given[name] != plain[name])
    return "+".join(views) or "contiguous"
