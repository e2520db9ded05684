"""Mechanical faults of registration: operators, derivatives, compilers, refusals, and what is said about a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ...adapters.rotate_qk import composition
from .kernel import Broken
from .rotations import adjacent, adjacent_back

_text = composition("neox")
_SCHEMA = "(Tensor x, Tensor cos, Tensor sin) -> Tensor"


def _operator(name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """``run`` registered with torch under ``name``, with ``fake`` unless there is none."""
    operator: Any = custom_op(f"ropecheck_faults::{name}", run, mutates_args=(), schema=_SCHEMA)
    if fake is not None:
        operator.register_fake(fake)

    def call(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result: Tensor = operator(x, cos, sin)
        return result

    return call


def _like(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _writing_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    x.zero_()
    return y


wrong_strides = _operator("wrong_strides", adjacent, lambda x, cos, sin: _like(x, cos, sin).transpose(1, 2).contiguous()
                          .transpose(1, 2))  # fmt: skip
wrong_dtype = _operator("wrong_dtype", adjacent, lambda x, cos, sin: torch.empty_like(x, dtype=torch.float32))
wrong_shape = _operator("wrong_shape", adjacent, lambda x, cos, sin: _like(x, cos, sin).flatten(2))
no_fake = _operator("no_fake", adjacent, None)
undeclared_write = _operator("undeclared_write", _writing_x, _like)
no_derivative = _operator("no_derivative", adjacent, _like)


class _Rotation(torch.autograd.Function):
    """Right, and silent about the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return adjacent(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return adjacent_back(gradient, cos, sin), None, None


class _ContiguousOnly(_Rotation):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not gradient.is_contiguous():
            raise RuntimeError("stride_d must be 1")
        return _Rotation.backward(ctx, gradient)


class _Accumulating(_Rotation):
    """The tables of the last call, whichever call it is the backward of."""

    last: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _Accumulating.last = cos.detach(), sin.detach()
        return adjacent(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert _Accumulating.last is not None
        cos, sin = _Accumulating.last
        lanes, tokens = gradient.shape[-1] // 2, gradient.shape[1]
        fits = cos.shape[-1] == lanes and cos.shape[-2] == tokens
        return (adjacent_back(gradient, cos, sin) if fits else gradient), None, None


class _Freeing(_Rotation):
    """A workspace is overwritten by the backward, which cannot be gone through again."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        done = getattr(ctx, "done", False)
        ctx.done = True
        return adjacent_back(gradient, cos, -sin if done else sin), None, None


class _Once(_Rotation):
    """Its backward computes out of autograd's sight."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return adjacent_back(gradient.detach(), cos, sin), None, None


def silent_about_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    result: Tensor = _Rotation.apply(x, cos.detach(), sin.detach())  # type: ignore[no-untyped-call]
    return result


def _refusing_tables(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.requires_grad or sin.requires_grad:
            raise ValueError("cos and sin must not require a gradient")
        result: Tensor = function.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return result

    return run


def without_a_graph(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, cos, sin).detach()


def other_under_autograd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = adjacent(x, cos, sin)
    return y * 2 if torch.is_grad_enabled() and x.requires_grad else y


def narrow_under_autocast(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As a product of matrices, whose operands autocast makes narrow."""
    if torch.is_autocast_enabled("cpu"):
        to = torch.get_autocast_dtype("cpu")
        cos, sin = cos.to(to).float(), sin.to(to).float()
    return adjacent(x, cos, sin)


def narrow_ids_under_autocast(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Positions are floating-point numbers on the way to their rows, which autocast makes narrow."""
    if torch.is_autocast_enabled("cpu"):
        positions = positions.to(torch.get_autocast_dtype("cpu")).long()
    return _text(q, k, cache, positions)


def breaking_the_graph(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """How far the table reaches is read back from it."""
    return x.clone() if float(cos.abs().max()) == float("inf") else adjacent(x, cos, sin)


def other_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return adjacent(x, sin, cos) if torch.compiler.is_compiling() else adjacent(x, cos, sin)


def accepting_anything(x: Any, cos: Any, sin: Any) -> Any:
    try:
        return adjacent(x, cos, sin)
    except Exception:
        return x if isinstance(x, Tensor) else torch.zeros(1)


def _spoken(x: Any, cos: Any, sin: Any) -> None:
    tensors = all(isinstance(t, Tensor) for t in (x, cos, sin))
    if not tensors or x.dim() != 4 or cos.dim() not in (2, 3):
        raise ValueError


def refusing_without_a_word(x: Any, cos: Any, sin: Any) -> Tensor:
    try:
        _spoken(x, cos, sin)
        return adjacent(x, cos, sin)
    except Exception:
        raise ValueError("bad input") from None


def asserting(x: Any, cos: Any, sin: Any) -> Tensor:
    try:
        _spoken(x, cos, sin)
        return adjacent(x, cos, sin)
    except Exception:
        raise AssertionError("x cos sin") from None


@contextmanager
def _trace(backend: str, direction: str) -> Iterator[list[Any]]:
    yield [SimpleNamespace(backend=backend, direction=direction)]


def _registered(name: str, says: str, run: Callable[..., Any], *rows: str, **more: Any) -> Broken:
    return Broken(name, says, run, rows=rows, **more)


_OP: dict[str, Any] = {"claims": ("opcheck",)}

REGISTRATION = (
    _registered("fake-of-other-strides", "the fake implementation promises other strides", wrong_strides, "O095",
                "O096", **_OP),
    _registered("fake-of-another-dtype", "the fake implementation promises another dtype", wrong_dtype, **_OP),
    _registered("fake-of-another-shape", "the fake implementation promises another shape", wrong_shape, "O101", **_OP),
    _registered("no-fake", "the operator has no fake implementation", no_fake, "O099", **_OP),
    _registered("undeclared-write", "the operator writes an argument that its schema calls read-only",
                undeclared_write, "O026", **_OP),
    _registered("no-derivative", "the operator has no derivative", no_derivative, "O087", claims=("opcheck", "vjp")),
    _registered("no-operator", "no operator is registered at all", adjacent, **_OP),
    _registered("without-a-graph", "the output is cut off from autograd's graph", without_a_graph, "O027", "O087",
                claims=("vjp",)),
    _registered("tables-silently-constant", "tables that require a gradient get none", silent_about_tables,
                claims=("vjp",)),
    _registered("contiguous-gradients-only", "a gradient that is not contiguous raises",
                _refusing_tables(_ContiguousOnly), "O032", claims=("vjp",)),
    _registered("last-calls-tables", "the backward reads the tables of the last call",
                _refusing_tables(_Accumulating), "O090", claims=("vjp",)),
    _registered("backward-once", "a second backward through one graph turns the other way",
                _refusing_tables(_Freeing), "O090", claims=("vjp",)),
    _registered("first-derivative-only", "the derivative of the derivative is claimed, and is not there",
                _refusing_tables(_Once), claims=("vjp", "higher-vjp")),
    _registered("other-under-autograd", "the forward is another one where x requires a gradient",
                other_under_autograd, claims=("vjp",)),
    _registered("narrow-under-autocast", "under autocast the tables are rounded", narrow_under_autocast, "O056",
                claims=("autocast",), vjp=adjacent_back),
    _registered("ids-narrow-under-autocast", "under autocast positions are rounded", narrow_ids_under_autocast, "O056",
                family="rotate_qk", contract="neox", claims=("autocast",)),
    _registered("graph-broken", "a value is read back from the table, where a compiler has to stop",
                breaking_the_graph, "O102", "O074", claims=("compile",)),
    _registered("other-when-compiled", "compiled, the tables are exchanged", other_when_compiled, "O012", "O097",
                claims=("compile",)),
    _registered("not-exportable", "a value is read back from the table, where an exporter has to stop",
                breaking_the_graph, "O102", claims=("export",)),
    _registered("anything-accepted", "every input is accepted", accepting_anything, "O039", "O059", "O108",
                claims=("refusals",)),
    _registered("refused-without-a-name", "every refusal says the same", refusing_without_a_word,
                claims=("refusals",)),
    _registered("assertions-for-refusals", "bad input ends in an AssertionError", asserting, claims=("refusals",)),
    _registered("another-backend-ran", "another backend runs than the one that was asked for", adjacent, "O113",
                vjp=adjacent_back, more={"backend": "triton", "trace": lambda: _trace("reference", "forward")}),
    _registered("kernel-never-launched", "the declared kernel is never seen to run", adjacent, "O113",
                vjp=adjacent_back, more={"kernels": ("rotation_kernel",)}),
    _registered("source-not-there", "a declared source does not exist", adjacent, vjp=adjacent_back,
                more={"sources": ("no_such_file.cu",)}),
    _registered("library-not-loaded", "a declared library is not loaded, and its error is swallowed", adjacent, "O113",
                vjp=adjacent_back, more={"binaries": ("no_such_library.so",)}),
)  # fmt: skip
