"""Backends of torch.compile that count what they are given, and what the graphs that they are given compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from .operators_seen import is_registered

_MOVES = {
    "_unsafe_view", "alias", "as_strided", "as_strided_scatter", "cat", "clone", "copy", "copy_", "detach",
    "empty", "empty_like", "empty_strided", "expand", "flip", "full", "full_like", "gather", "index",
    "index_select", "lift_fresh_copy", "neg", "new_empty", "new_empty_strided", "new_full", "new_zeros",
    "permute", "repeat", "reshape", "roll", "select", "select_backward", "select_scatter", "slice",
    "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "sym_numel", "sym_size",
    "sym_storage_offset", "sym_stride", "t", "transpose", "unbind", "unsqueeze", "unsqueeze_", "view", "zeros",
    "zeros_like",
}  # fmt: skip
"""Operations of aten that move values, make constants or turn a sign: nothing is rounded, in whatever mode."""


class CountingBackend:
    """Hands every graph to the backend of torch.compile called ``name``; ``compilations`` counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.compilations = 0
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        self.compilations += 1
        return self._compile(graph, inputs)


class CapturingBackend(CountingBackend):
    """As torch's ``aot_eager``: runs the traced forward and backward as they are, and keeps what they consist of.

    ``operators`` are the registered operators and Triton kernels of these graphs, ``computing`` what in them is
    neither one of these nor a move of values.
    """

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd

        super().__init__("aot_eager")
        self.operators: set[str] = set()
        self.computing: set[str] = set()
        self._compile = aot_autograd(fw_compiler=self._kept, bw_compiler=self._kept)

    @property
    def opaque(self) -> bool:
        """Whether nothing is computed outside registered operators and Triton kernels."""
        return not self.computing

    def _kept(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

        for node in graph.graph.nodes:
            if node.op == "call_function":
                self._sort(node)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    def _sort(self, node: Node) -> None:
        target: Any = node.target
        if isinstance(target, HigherOrderOperator):
            name: str = target.name()  # type: ignore[no-untyped-call]
            # The functional form of an operator that writes into its arguments.
            inner = node.args[0] if name.startswith("auto_functionalized") and node.args else None
            if is_registered(inner):
                self.operators.add(str(inner))
            elif name.startswith("triton_kernel_wrapper"):
                self.operators.add("a Triton kernel")
            else:
                self.computing.add(name)
        elif is_registered(target):
            self.operators.add(str(target))
        elif isinstance(target, OpOverload) and target._opname not in _MOVES:
            # Everything else is arithmetic on sizes, or takes one of several results.
            self.computing.add(str(target))


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Within the block, and after it, nothing is compiled yet; Inductor compiles within this process."""
    import torch._dynamo

    torch._dynamo.reset()
    try:
        if torch.cuda.is_available():
            import torch._inductor.config

            with torch._inductor.config.patch(compile_threads=1):
                yield
        else:
            yield
    finally:
        torch._dynamo.reset()
