"""Which registered operators run within a block, and with which arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_TORCH = ("aten", "prim", "prims", "profiler", "inductor")
"""Namespaces of what comes with torch."""


def is_registered(operator: Any) -> bool:
    """Whether ``operator`` is an overload that somebody else than torch has registered."""
    return isinstance(operator, OpOverload) and operator.namespace not in _TORCH


@dataclass(frozen=True)
class OperatorCall:
    """One call: the overload, and copies of its arguments as they were before it.

    The copies have the strides and storage offsets of the originals, in storages of the same size, and require a
    gradient where the caller's did and the caller was being differentiated.
    """

    operator: OpOverload
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.operator)

    @property
    def key(self) -> str:
        """Two calls of one key differ in values, and in strides of one order, only."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # What is made like a tensor lies in the order of its strides, which dimensions of one element have not.
            order = sorted((d for d in range(value.dim()) if value.shape[d] > 1), key=value.stride, reverse=True)
            layout = (value.is_contiguous(), order, value.storage_offset() == 0)
            return str((value.dtype, value.requires_grad, tuple(value.shape), layout))

        return f"{self.operator} {tree_map(plain, (self.arguments, dict(self.keywords)))}"

    def copied_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies, for a call of one's own."""
        return tree_map(copied, (self.arguments, dict(self.keywords)))  # type: ignore[no-any-return]


def copied(value: Any) -> Any:
    """A tensor again, with its whole storage, strides, offset and ``requires_grad``; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    storage: Any = value.detach().untyped_storage()
    copy.set_(storage.clone(), value.storage_offset(), value.shape, value.stride())
    return copy.requires_grad_(value.requires_grad)


class OperatorsSeen:
    """``with OperatorsSeen() as seen:`` lists the calls of registered operators in ``seen.calls``, backward included.

    Seen is what the dispatcher hands out below autograd. An operator that is registered as a composition of others
    (``CompositeImplicitAutograd``) has been replaced by them there, for compilers as well.
    """

    def __init__(self) -> None:
        self.calls: list[OperatorCall] = []
        self._differentiates = False
        # Any: the modes' own methods are not typed.
        self._modes: tuple[Any, ...] = (_Calls(self), _Dispatched(self))

    def __enter__(self) -> OperatorsSeen:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)

    def distinct(self) -> list[OperatorCall]:
        """The first call of each key."""
        return list({call.key: call for call in reversed(self.calls)}.values())[::-1]


class _Calls(TorchFunctionMode):
    """Remembers whether an operator is called to be differentiated: below autograd that can no longer be told."""

    def __init__(self, seen: OperatorsSeen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.seen._differentiates
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            self.seen._differentiates = torch.is_grad_enabled()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seen._differentiates = before


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of registered operators, with copies of their arguments."""

    def __init__(self, seen: OperatorsSeen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if is_registered(func):
            arguments, named = tree_map(self._noted, (args, keywords))
            self.seen.calls.append(OperatorCall(func, arguments, named))
        return func(*args, **keywords)

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return copied(value).requires_grad_(value.requires_grad and self.seen._differentiates)
