"""Cases: one set of inputs for one judgement, named by everything that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.recipes import Recipe
from ropecheck.oracle.rotation import Rotation

from .cache_packing import MODEL_ROWS
from .candidates import DTYPES, Candidate
from .families import FAMILIES, Call, Expected, Family, Held
from .payloads import Slots
from .remembered import digest, remembered, remembers
from .views import BEHIND_A_GAP, FAR_X_VIEWS, STRIDED_TABLE_VIEWS, STRIDED_X_VIEWS, TABLE_VIEWS, X_VIEWS, Placed

PLANS = ("smoke", "standard", "full")

_CERTIFIED_OF_MANY = 8
"""Points of a case that are certified where many candidates are asked one after another."""

_ROW_ENDS = (0, 1, 256, 257, 4095, 4096, 65_536, 131_071, MODEL_ROWS - 1)

POSITIONS = ("sample", "ramp", "far", "row-ends", "grid-64x64", "grid-83x83", "grid-104x58")
"""What the positions of a case are: those of a sample of its length; 1, 2, 3 .. on every axis; the far end of the
vendor's table (of 131,072 positions where there is none); the rows of a model's cache at which numbers of one, two or
three bytes end, and the last one, each axis at another; a real grid of Qwen-Image."""


@dataclass(frozen=True)
class Inputs:
    """The dimensions of a case. ``head_dim`` and ``rotary_dim`` 0 stand for the contract's own.

    ``sin_view`` is the sine's view where it is not the cosine's, ``table_view``. ``k_view`` is for a pair: k then lies
    in memory of its own, where otherwise q and k are the first and the last heads of one x, or both in one projection
    that has a gap between them. ``k_gradient_view``, for a pair too, is that of k's upstream gradient where it is not
    q's, ``gradient_view``: each then lies in memory of its own. ``k_heads`` is how many of the heads are k's, 0
    standing for the family's own choice. ``scaled`` tables have other values than a rotation's: :func:`_scaled`.
    ``options`` are what else the family's call may be asked with, names joined by "+".
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
    k_gradient_view: str = ""
    scaled: bool = False
    conjugate: bool = False
    k_heads: int = 0
    options: str = ""

    @property
    def chosen(self) -> frozenset[str]:
        """The names of the options."""
        return frozenset(self.options.split("+")) if self.options else frozenset()

    def describe(self, own: Contract) -> str:
        """The part of a case's id that these dimensions make."""
        head_dim, rotary_dim = self.head_dim or own.head_dim, self.rotary_dim or own.rotary_dim
        parts = [f"b{self.batch}-s{self.length}-h{self.heads}-d{head_dim}-r{rotary_dim}"]
        parts += [self.payload, f"{self.table}-table", f"{self.positions}-positions"]
        views = [("x", self.x_view), ("table", self.table_view), ("gradient", self.gradient_view)]
        of_its_own = {"sin": self.sin_view, "k": self.k_view, "k-gradient": self.k_gradient_view}
        views += [(name, view) for name, view in of_its_own.items() if view]
        parts += [f"{name}={view}" for name, view in views if view != "contiguous" or name in of_its_own]
        parts += ["scaled"] if self.scaled else []
        parts += [f"k-heads={self.k_heads}"] if self.k_heads else []
        parts += [self.options] if self.options else []
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
    def bound_family(self) -> Family:
        """The family, bound to the contract and the inputs."""
        return FAMILIES[self.family](self.contract, self.inputs)

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
        given, own, claims = self.inputs, self.contract, self.bound_family.needs()
        if (
            given.x_view in STRIDED_X_VIEWS
            or given.x_view in FAR_X_VIEWS
            or given.table_view in STRIDED_TABLE_VIEWS
            or given.sin_view in STRIDED_TABLE_VIEWS
            or given.k_view in (*STRIDED_X_VIEWS, BEHIND_A_GAP)
            # An upstream gradient's strides are its consumer's, and nobody's claim; an odd offset is not usual there.
            or any(view.endswith("misaligned") for view in (given.gradient_view, given.k_gradient_view))
        ):
            claims.add("strided")
        if given.conjugate:
            claims.add("conjugate")
        other = (given.head_dim, given.rotary_dim) not in ((0, 0), (own.head_dim, own.rotary_dim))
        # Two tensors of a model have at most 64 heads each.
        if other or given.heads > 128 or not given.batch * given.length * given.heads:
            claims.add("any-shape")
        return claims

    def suits(self, candidate: Candidate) -> bool:
        """Whether ``candidate`` claims all that the case needs. Writing in place into overlapping memory is no case."""
        given = self.inputs
        views = (given.x_view, given.gradient_view, given.k_view, given.k_gradient_view)
        overlaps = candidate.in_place and any("stride-0" in view for view in views)
        askable = self.bound_family.suits(candidate.run)
        return askable and not overlaps and self.needs() <= set(candidate.provides)

    def generator(self, seed: int) -> torch.Generator:
        """A generator that depends on the seed and on the inputs, not on the order in which cases run."""
        # Not on the judgement or the device: the same inputs are then the same numbers everywhere.
        name = f"{seed}/{self.contract_name}/{self.dtype}/{self.inputs.describe(self.contract)}"
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


@dataclass(frozen=True)
class Operands:
    """What a case hands to a candidate: x [B, S, H, D], the tables, the gradient, each lying as its view says.

    ``positions`` is int64 [S, axes], or [B, S, axes] where the tables are per sample, and ``cos`` and ``sin`` are what
    the tokens read; ``tables`` is how the family's call is given it. Of a flat family B is 1 and S all tokens.
    ``made_of`` is all that the values depend on.
    """

    case: Case
    positions: Tensor
    x: Placed
    cos: Placed
    sin: Placed
    gradient: Placed
    tables: Mapping[str, Placed]
    made_of: tuple[object, ...] = ()

    def placed(self) -> dict[str, Placed]:
        return {"x": self.x, **self.tables}

    def again(self, case: Case) -> Operands:
        """The same memory, as it was made, for another case of the same inputs."""
        tables = {name: placed.again() for name, placed in self.tables.items()}
        cos, sin = (tables[n] if n in tables else p.again() for n, p in (("cos", self.cos), ("sin", self.sin)))
        return replace(
            self, case=case, x=self.x.again(), cos=cos, sin=sin, gradient=self.gradient.again(), tables=tables
        )

    @property
    def family(self) -> Family:
        return self.case.bound_family

    @property
    def call(self) -> Call:
        """What the candidate is given besides the activations."""
        return Call(self.family, tuple(placed.view for placed in self.tables.values()))

    def expected(self, *, backward: bool = False) -> Expected:
        """What comes out must be this; ``backward``, the gradient."""
        return self.family.expected(self, backward=backward)

    def held(self, got: Tensor, *, backward: bool = False, seed: int = 0, samples: int = 128) -> Held:
        """What came out held against :meth:`expected`."""
        if remembers():
            # It is candidates that are measured there, by the hundred; a run of the judge certifies the oracle.
            samples = min(samples, _CERTIFIED_OF_MANY)
        return remembered(
            lambda: (self.made_of, backward, seed, samples, digest(got)),
            lambda: self.expected(backward=backward).held(got, seed=seed, samples=samples),
        )

    def strict(self, *, backward: bool = False) -> Tensor:
        """The contract's own bytes of what comes out; not to be written into."""
        return remembered(
            lambda: (self.made_of, backward, "strict"), lambda: self.expected(backward=backward).strict()
        )

    def may_be_nan(self, *, backward: bool = False) -> Tensor:
        """bool: the elements of which a NaN is admissible; not to be written into."""
        return remembered(
            lambda: (self.made_of, backward, "NaN"), lambda: self.expected(backward=backward).may_be_nan()
        )

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
    made_of = (case.contract_name, case.family, case.device, case.dtype, case.inputs, seed)
    made = remembered(lambda: made_of, lambda: replace(_built(case, seed), made_of=made_of))
    return made.again(case) if remembers() else made


def _built(case: Case, seed: int) -> Operands:
    given, own = case.inputs, case.contract
    head_dim, rotary_dim = given.head_dim or own.head_dim, given.rotary_dim or own.rotary_dim
    family, positions, batch, length = case.bound_family, positions_of(own, given), given.batch, given.length
    if family.flat:
        # The samples lie end to end.
        positions = positions.flatten(0, 1) if positions.dim() == 3 else positions.repeat(batch, 1)
        batch, length = 1, batch * length
    cos, sin = own.tables(positions, case.torch_dtype, rotary_dim)
    if given.scaled:
        cos, sin = _scaled(cos), _scaled(sin)
    shape = (batch, length, given.heads, head_dim)
    generator = case.generator(seed)
    slots = Slots(shape, case.torch_dtype, own.pairing, cos, sin, generator)
    # The gradient's hard points are those of the transposed rotation.
    transposed = Slots(shape, case.torch_dtype, own.pairing, cos, -sin, generator)
    x = family.payload(slots, gradient=False).to(case.device)
    gradient = family.payload(transposed, gradient=True).to(case.device)
    tables = family.packed(cos.to(case.device), sin.to(case.device), case.torch_dtype, positions)
    read = tables
    if "cos" not in tables:
        read = {n: TABLE_VIEWS["contiguous"](t.to(case.device)) for n, t in (("cos", cos), ("sin", sin))}
    return Operands(
        case,
        positions,
        X_VIEWS[given.x_view](x),
        read["cos"],
        read["sin"],
        X_VIEWS[given.gradient_view](gradient),
        tables,
    )


def _scaled(table: Tensor) -> Tensor:
    """``table`` times 3/2, 2^-15 and 1 in turn from lane to lane.

    A table is used as it is given, whatever made it: models whose attention is scaled multiply theirs, by more than 1
    too. Times 2^-15 all numbers of an fp16 table are subnormal.
    """
    factors = torch.tensor([1.5, 2.0**-15, 1.0])[torch.arange(table.shape[-1]) % 3]
    return (table.float() * factors).to(table.dtype)


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
    elif given.positions == "row-ends":
        ends = torch.tensor(_ROW_ENDS)
        one = ends[(torch.arange(n)[:, None] + 3 * torch.arange(axes)) % len(ends)]
    elif given.positions in POSITIONS:
        height, width = (int(v) for v in given.positions.removeprefix("grid-").split("x"))
        one = own.positions.image([(1, height, width)])  # type: ignore[attr-defined]
    else:
        raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, not {given.positions!r}")
    if given.table == "shared":
        return one
    if given.table not in ("per-sample", "first-two-alike"):
        raise ValueError(f"table must be 'shared', 'per-sample' or 'first-two-alike', not {given.table!r}")
    alike = given.table == "first-two-alike"
    shifted = [one + 3 * (0 if alike and b == 1 else b) for b in range(given.batch)]
    return torch.stack(shifted) if shifted else one.new_zeros((0, *one.shape))


def cases_of(
    judgement: str,
    candidate: Candidate,
    device: str,
    dtype: str,
    inputs: Iterable[Inputs | tuple[Inputs, str]],
) -> Iterator[Case]:
    """A case for each entry of ``inputs`` that suits ``candidate``, none twice; an entry may carry a variant."""
    seen, family, own = set(), FAMILIES[candidate.family], contract(candidate.contract)
    for entry in inputs:
        given, variant = entry if isinstance(entry, tuple) else (entry, "")
        given = family.fitted(own, given)
        case = Case(judgement, candidate.contract, device, dtype, given, variant, candidate.family)
        if case.suits(candidate) and case.id not in seen:
            seen.add(case.id)
            yield case


def has_grids(own: Contract) -> bool:
    """Whether the contract's positions can be those of a real image grid."""
    return hasattr(own.positions, "image")


