"""Cases: one set of inputs for one judgement, named by everything that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.recipes import Recipe
from ropecheck.oracle.rotation import Rotation

from .candidates import DTYPES, Candidate
from .payloads import PAYLOADS, Slots
from .views import FAR_X_VIEWS, STRIDED_TABLE_VIEWS, STRIDED_X_VIEWS, TABLE_VIEWS, X_VIEWS, Placed

PLANS = ("smoke", "standard", "full")

POSITIONS = ("sample", "ramp", "far", "grid-64x64", "grid-83x83", "grid-104x58")
"""What the positions of a case are: those of a sample of its length; 1, 2, 3 .. on every axis; the far end of the
vendor's table (of 131,072 positions where there is none); a real grid of Qwen-Image."""


@dataclass(frozen=True)
class Inputs:
    """The dimensions of a case. ``head_dim`` and ``rotary_dim`` 0 stand for the contract's own.

    ``sin_view`` is the sine's view where it is not the cosine's, ``table_view``. ``k_view`` is for a pair: k then lies
    in memory of its own, where otherwise q and k are the first and the last heads of one x.
    """

    batch: int = 1
    length: int = 7
    heads: int = 3
    head_dim: int = 0
    rotary_dim: int = 0
    payload: str = "random"
    positions: str = "sample"
    table: str = "shared"
    x_view: str = "contiguous"
    table_view: str = "contiguous"
    sin_view: str = ""
    gradient_view: str = "contiguous"
    k_view: str = ""
    conjugate: bool = False

    def describe(self, own: Contract) -> str:
        """The part of a case's id that these dimensions make."""
        head_dim, rotary_dim = self.head_dim or own.head_dim, self.rotary_dim or own.rotary_dim
        parts = [f"b{self.batch}-s{self.length}-h{self.heads}-d{head_dim}-r{rotary_dim}"]
        parts += [self.payload, f"{self.table}-table", f"{self.positions}-positions"]
        views = [("x", self.x_view), ("table", self.table_view), ("gradient", self.gradient_view)]
        views += [(name, view) for name, view in (("sin", self.sin_view), ("k", self.k_view)) if view]
        parts += [f"{name}={view}" for name, view in views if view != "contiguous" or name in ("sin", "k")]
        return "/".join([*parts, "conjugate"] if self.conjugate else parts)


@dataclass(frozen=True)
class Case:
    """Inputs for a judgement of a contract in one dtype on one device. ``variant`` belongs to the judgement."""

    judgement: str
    contract_name: str
    device: str
    dtype: str
    inputs: Inputs = field(default_factory=Inputs)
    variant: str = ""
    family: str = "rotate"

    @cached_property
    def contract(self) -> Contract:
        return contract(self.contract_name)

    @cached_property
    def id(self) -> str:
        """Names everything that the case is made of, the seed excepted."""
        parts = [self.judgement, self.device, self.dtype, self.inputs.describe(self.contract)]
        return "/".join([*parts, self.variant] if self.variant else parts)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def needs(self) -> set[str]:
        """The claims without which a candidate is not given this case."""
        given, own, claims = self.inputs, self.contract, set()
        if (
            given.x_view in STRIDED_X_VIEWS
            or given.x_view in FAR_X_VIEWS
            or given.table_view in STRIDED_TABLE_VIEWS
            or given.sin_view in STRIDED_TABLE_VIEWS
            or given.k_view in STRIDED_X_VIEWS
            # An upstream gradient's strides are its consumer's, and nobody's claim; an odd offset is not usual there.
            or given.gradient_view.endswith("misaligned")
        ):
            claims.add("strided")
        if given.conjugate:
            claims.add("conjugate")
        other = (given.head_dim, given.rotary_dim) not in ((0, 0), (own.head_dim, own.rotary_dim))
        if other or not given.batch * given.length * given.heads:
            claims.add("any-shape")
        return claims

    def suits(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` claims all that the case needs. Writing in place into overlapping memory is no case."""
        views = (self.inputs.x_view, self.inputs.gradient_view, self.inputs.k_view)
        overlaps = candidate.in_place and any("stride-0" in view for view in views)
        other_family = bool(self.inputs.k_view) and candidate.family != "rotate_pair"
        return self.needs() <= set(candidate.provides) and not overlaps and not other_family

    def generator(self, seed: int) -> torch.Generator:
        """A generator that depends on the seed and on the inputs, not on the order in which cases run."""
        # Not on the judgement or the device: the same inputs are then the same numbers everywhere.
        name = f"{seed}/{self.contract_name}/{self.dtype}/{self.inputs.describe(self.contract)}"
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


@dataclass(frozen=True)
class Operands:
    """What a case hands to a candidate: x [B, S, H, D], the tables, the gradient, each lying as its view says.

    ``positions`` is int64 [S, axes], or [B, S, axes] where the tables are per sample.
    """

    case: Case
    positions: Tensor
    x: Placed
    cos: Placed
    sin: Placed
    gradient: Placed

    def placed(self) -> dict[str, Placed]:
        return {"x": self.x, "cos": self.cos, "sin": self.sin}

    def rotation(self) -> Rotation:
        """The oracle's side of the forward."""
        return self._rotation(self.x, self.case.contract.forward, is_gradient=False)

    def vjp(self) -> Rotation:
        """The oracle's side of the backward: the gradient of the forward with ``gradient`` coming in."""
        return self._rotation(self.gradient, self.case.contract.backward, is_gradient=True)

    def _rotation(self, x: Placed, recipe: Recipe, *, is_gradient: bool) -> Rotation:
        # As given: a candidate that zeroes its inputs and returns zeros is not to be held against zeros.
        values, cos, sin = (placed.as_given() for placed in (x, self.cos, self.sin))
        pairing, conjugate = self.case.contract.pairing, self.case.inputs.conjugate
        return Rotation(values, cos, sin, pairing, recipe, conjugate, is_gradient)


def build(case: Case, seed: int) -> Operands:
    """The operands of ``case``: values made on the CPU, placed on the case's device."""
    given, own = case.inputs, case.contract
    head_dim, rotary_dim = given.head_dim or own.head_dim, given.rotary_dim or own.rotary_dim
    positions = positions_of(own, given)
    cos, sin = own.tables(positions, case.torch_dtype, rotary_dim)
    shape = (given.batch, given.length, given.heads, head_dim)
    generator = case.generator(seed)
    slots = Slots(shape, case.torch_dtype, own.pairing, cos, sin, generator)
    # The gradient's hard points are those of the transposed rotation.
    transposed = Slots(shape, case.torch_dtype, own.pairing, cos, -sin, generator)
    payload = PAYLOADS[given.payload]
    x, gradient = payload(slots).to(case.device), payload(transposed).to(case.device)
    view, table_view = X_VIEWS[given.x_view], TABLE_VIEWS[given.table_view]
    sin_view = TABLE_VIEWS[given.sin_view or given.table_view]
    return Operands(
        case,
        positions,
        view(x),
        table_view(cos.to(case.device)),
        sin_view(sin.to(case.device)),
        X_VIEWS[given.gradient_view](gradient),
    )


def elsewhere(case: Case) -> Case:
    """``case`` at other positions, so that a table which was kept shows."""
    positions = "far" if case.inputs.positions == "ramp" else "ramp"
    return replace(case, inputs=replace(case.inputs, positions=positions))


def positions_of(own: Contract, given: Inputs) -> Tensor:
    """int64 [S, axes], or [B, S, axes] where the tables are per sample, each sample then at other positions."""
    n, axes = given.length, len(own.positions.axes)
    rows = int(getattr(own.positions, "table_rows", 131_072))
    if given.positions == "sample":
        one = own.positions.of_length(n)
    elif given.positions == "ramp":
        one = torch.arange(1, n + 1)[:, None].expand(n, axes)
    elif given.positions == "far":
        one = torch.arange(rows - 4 * given.batch - n, rows - 4 * given.batch)[:, None].expand(n, axes)
        if hasattr(own.positions, "table_rows"):
            # Every other token at the other end of the table.
            one = torch.where(torch.arange(n)[:, None] % 2 == 1, -1 - one, one)
    elif given.positions in POSITIONS:
        height, width = (int(v) for v in given.positions.removeprefix("grid-").split("x"))
        one = own.positions.image([(1, height, width)])  # type: ignore[attr-defined]
    else:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, not {given.positions!r}")
    if given.table == "shared":
        return one
    if given.table != "per-sample":
        raise ValueError(f"table must be 'shared' or 'per-sample', not {given.table!r}")
    shifted = [one + 3 * b for b in range(given.batch)]
    return torch.stack(shifted) if shifted else one.new_zeros((0, *one.shape))


def cases_of(
    judgement: str,
    candidate: Candidate,
    device: str,
    dtype: str,
    inputs: Iterable[Inputs | tuple[Inputs, str]],
) -> Iterator[Case]:
    """A case for each entry of ``inputs`` that suits ``candidate``, none twice; an entry may carry a variant."""
    seen = set()
    for entry in inputs:
        given, variant = entry if isinstance(entry, tuple) else (entry, "")
        if candidate.family == "rotate_pair" and given.heads == 1:
            # One head for q and one for k.
            given = replace(given, heads=2)
        case = Case(judgement, candidate.contract, device, dtype, given, variant, candidate.family)
        if case.suits(candidate) and case.id not in seen:
            seen.add(case.id)
            yield case


def has_grids(own: Contract) -> bool:
    """Whether the contract's positions can be those of a real image grid."""
    return hasattr(own.positions, "image")


