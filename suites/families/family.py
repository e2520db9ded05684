"""What a family is: a call signature, bound to the contract and the inputs of one case.

The judgements think in one logical x [B, S, H, D], or [1, T, H, D] where the family has no batch dimension, and in the
cosines and sines that its tokens read. A family turns these into the arguments of a call, and what comes out back.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..payloads import PAYLOADS, Slots
from ..views import BEHIND_A_GAP, X_VIEWS, Placed, behind_a_gap

if TYPE_CHECKING:
    from ropecheck.oracle.contract import Contract

    from ..cases import Inputs, Operands
    from .expected import Expected

Asked = tuple["Inputs | tuple[Inputs, str]", ...]
"""Inputs of cases, each with the variant of its judgement where that has any."""


@dataclass(frozen=True)
class Wanted:
    """What one tensor that a call returns must be like: ``like`` in dtype and device, of one of ``shapes``."""

    name: str
    like: Tensor
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """What a candidate is given in a call besides the activations. ``tables`` as :meth:`Family.packed` orders them."""

    family: Family
    tables: tuple[Tensor, ...]


@dataclass(frozen=True)
class Keywords:
    """What a function is given by keyword: ``values``, and each of the last tables by one of ``tables``.

    A table whose name there is empty is not given.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tables: tuple[str, ...] = ()

    def arguments(
        self, activations: Sequence[Tensor], tables: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The positional and the keyword arguments of one call."""
        by_place = len(tables) - len(self.tables)
        named = {name: table for name, table in zip(self.tables, tables[by_place:], strict=True) if name}
        return (*activations, *tables[:by_place]), {**self.values, **named}


@dataclass(frozen=True)
class Family(ABC):
    """A call signature, bound to the contract ``own`` and the ``inputs`` of a case.

    ``activations`` and ``outputs`` name what ``run`` takes first and what it returns. A ``flat`` family has no batch
    dimension: the samples of a case lie end to end. One that ``gathers`` is given a cache, of whose rows positions name
    one for each token or lane. ``differentiable_tables`` name what of :meth:`packed` may require a gradient.
    ``options`` are those that its inputs may name, ``unclaimable`` the claims that its signature has no room for, each
    with the reason. Where the derivative needs more than the gradient that comes in, a backward cannot be ``separate``;
    nor can all outputs be written ``in_place``.
    """

    own: Contract
    inputs: Inputs

    name: ClassVar[str]
    activations: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    flat: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    differentiable_tables: ClassVar[tuple[str, ...]]
    options: ClassVar[frozenset[str]] = frozenset()
    unclaimable: ClassVar[Mapping[str, str]] = {}
    separate: ClassVar[bool] = True
    in_place: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def takes(cls, own: Contract) -> bool:
        """Whether candidates of this family can keep a contract."""

    @classmethod
    def fitted(cls, own: Contract, inputs: Inputs) -> Inputs:
        """``inputs`` as near as the family can come to them."""
        return inputs

    @classmethod
    def further(cls, judgement: str, plan: str, device: str) -> Asked:
        """What a judgement asks of this family alone, besides what it asks of all."""
        return ()

    def suits(self, run: Callable[..., Any]) -> bool:
        """Whether the inputs can be asked of ``run``, whatever it claims."""
        return self.inputs.chosen <= self.options

    def needs(self) -> set[str]:
        """The claims that the options of the inputs need."""
        return set()

    @property
    def token_dimension(self) -> int:
        """Which dimension of an activation or an output counts the tokens."""
        return 0 if self.flat else 1

    @abstractmethod
    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The activations that x is made of, all views of its memory; the backward of this only moves values."""

    def apart(self, x: Tensor, *, gradient: bool = False) -> dict[int, Placed]:
        """What the inputs lay apart from x, or from a ``gradient`` like x, by the activation's number.

        As x in dimensions.
        """
        given = self.inputs
        views = {1: given.k_view} if given.k_view else {}
        if gradient and given.k_gradient_view:
            views = {0: given.gradient_view, 1: given.k_gradient_view}
        split = [self.lifted(part) for part in self.split(x)] if views else []
        if views.get(1) == BEHIND_A_GAP:
            return dict(enumerate(behind_a_gap(*split)))
        return {number: X_VIEWS[view](split[number]) for number, view in views.items()}

    def divided(self, x: Tensor, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """As :meth:`split`, but for what the inputs lay apart."""
        return self.with_apart(x, self.apart(x, gradient=gradient))

    def with_apart(self, x: Tensor, apart: Mapping[int, Placed]) -> tuple[Tensor, ...]:
        """As :meth:`split`, but for what lies ``apart``."""
        split = enumerate(self.split(x))
        return tuple(self.lowered(apart[number].view) if number in apart else part for number, part in split)

    @abstractmethod
    def lifted(self, activation: Tensor) -> Tensor:
        """One activation, or a tensor like it, with the dimensions of x."""

    @abstractmethod
    def lowered(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`lifted`, of the same memory."""

    def undivided(self, activations: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`divided`."""
        lifted = tuple(self.lifted(part) for part in activations)
        return lifted[0] if len(lifted) == 1 else torch.cat(lifted, dim=2)

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """The outputs as one tensor like x."""
        return self.undivided(outputs)

    def upstream(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """A gradient like x as one for each output, in views of its memory where that can be."""
        return self.divided(gradient, gradient=True)

    def wanted(self, activations: Sequence[Tensor]) -> tuple[Wanted, ...]:
        """What the outputs for these activations must be like."""
        return tuple(Wanted(n, t, (tuple(t.shape),)) for n, t in zip(self.outputs, activations, strict=True))

    @abstractmethod
    def packed(
        self, cos: Tensor, sin: Tensor, activation: torch.dtype, positions: Tensor | None = None
    ) -> dict[str, Placed]:
        """What ``run`` takes after activations of a dtype, for tokens that read ``cos`` and ``sin`` [.., R / 2].

        ``positions`` int64 [.., axes] are where the tokens stand, for inputs that want real ones.
        """

    @abstractmethod
    def sizes_of_tokens(self, tables: Sequence[Tensor]) -> tuple[int | None, ...]:
        """For each table the dimension whose size depends on the number of tokens; None where none does."""

    @abstractmethod
    def repeated(self, tables: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
        """The tables of one token as those of ``count`` tokens, all where it stands."""

    @abstractmethod
    def gradients_read(
        self, tables: Sequence[Tensor], gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int]:
        """Gradients of tables as those of the ``cos`` and the ``sin`` that each token reads, and how many elements of
        what no token reads are not zero."""

    def turned(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """What the rotation turns, like x, and by how much an admissible evaluation may be off it."""
        x = operands.x.as_given()
        return x, torch.zeros_like(x)

    def call(self, cos: Tensor, sin: Tensor, activation: torch.dtype) -> Call:
        """A call on tables of a judgement's own."""
        return Call(self, tuple(placed.view for placed in self.packed(cos, sin, activation).values()))

    def keywords(self, function: Callable[..., Any]) -> Keywords:
        """What ``function`` is given by keyword."""
        return Keywords()

    def returned(self, result: Any) -> Any:
        """What ``run`` returned, without what stands for an output that is not asked for."""
        return result

    def padding(self, tokens: int) -> Tensor:
        """bool [T]: the tokens that the call itself names as padding."""
        return torch.zeros(tokens, dtype=torch.bool)

    def outputs_of(self, at: int) -> tuple[int, ...]:
        """The numbers of the outputs that the activation number ``at`` alone makes."""
        return (at,)

    def payload(self, slots: Slots, *, gradient: bool) -> Tensor:
        """What x holds, or the gradient that comes in."""
        return PAYLOADS[self.inputs.payload](slots)

    @abstractmethod
    def expected(self, operands: Operands, *, backward: bool) -> Expected:
        """What the outputs, or the gradients of the activations, for ``operands`` must be."""

    @abstractmethod
    def tensor_of(self, head: int) -> str:
        """The name of the output that a head of x belongs to; empty where there is one."""


def heads_of_q(heads: int) -> int:
    """How many heads of x are q's, where a case does not say: two of three, so that k has its own count.

    Of five, and of larger odd numbers, k has one more than q.
    """
    if heads > 3 and heads % 2:
        return heads // 2
    return heads - heads // 3 if heads > 2 else (heads + 1) // 2


def takes_keyword(function: Callable[..., Any], keyword: str) -> bool:
    """Whether ``function`` can be called with ``keyword``; one without a signature is taken to know all."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
