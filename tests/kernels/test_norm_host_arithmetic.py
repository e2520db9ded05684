"""The CUDA kernels of the normalised rotation, run on the host thread by thread, bit by bit against the reference.

The sources of the kernels are compiled by the host's compiler, with a small emulation of blocks, barriers and shuffles
in place of a GPU: what is tested is all but the machine code.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.native_build import SOURCES
from ropecheck.oracle.rotation import changed_elements

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
STRICT = ("-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")

Compile = Callable[..., ctypes.CDLL]
dtypes = pytest.mark.parametrize("dtype", CODES, ids=str)


class Integers(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("stride", ctypes.c_int64), ("is_int64", ctypes.c_bool))


class Heads(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("heads", ctypes.c_int),
        ("pitch", ctypes.c_int),
    )


class Context(ctypes.Structure):
    _fields_ = (
        ("q", Heads),
        ("k", Heads),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("table_rows", ctypes.c_int64),
        ("table_dtype", ctypes.c_int),
        ("positions", Integers),
        ("position_row_stride", ctypes.c_int64),
        ("axis_map", Integers),
        ("slots", Integers),
        ("tokens", ctypes.c_int64),
        ("head_dim", ctypes.c_int),
        ("lanes", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
        ("weight_is_float32", ctypes.c_bool),
        ("contracted", ctypes.c_bool),
    )


class Results(ctypes.Structure):
    _fields_ = (("heads", ctypes.c_void_p), ("gates", ctypes.c_void_p))


class Arguments(ctypes.Structure):
    _fields_ = (("context", Context), ("q", Results), ("k", Results), ("round_norm", ctypes.c_bool))


class Incoming(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("channel_stride", ctypes.c_int64))


class Gradients(ctypes.Structure):
    _fields_ = (("heads", Incoming), ("gates", Incoming), ("result", ctypes.c_void_p), ("sums", ctypes.c_void_p))


class BackwardArguments(ctypes.Structure):
    _fields_ = (("context", Context), ("q", Gradients), ("k", Gradients))


@dataclass(frozen=True)
class Call:
    """The operands of one call, in the order of the operators."""

    q_gate: Tensor
    k: Tensor
    q_weight: Tensor
    k_weight: Tensor
    table: Tensor
    positions: Tensor
    axis_map: Tensor | None = None
    slots: Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 1.0
    gate: bool = True
    round_norm: bool = True
    fma: bool = False

    @property
    def operands(self) -> tuple[Any, ...]:
        tables = self.table, self.positions, self.axis_map, self.slots
        return self.q_gate, self.k, self.q_weight, self.k_weight, *tables, self.eps, self.weight_offset, self.gate


def integers(tensor: Tensor | None) -> Integers:
    if tensor is None:
        return Integers(None, 0, False)
    return Integers(tensor.data_ptr(), tensor.stride(-1), tensor.dtype == torch.int64)


def heads(x: Tensor, weight: Tensor, pitch: int) -> Heads:
    return Heads(x.data_ptr(), x.stride(0), weight.data_ptr(), x.shape[1] // pitch, pitch)


def context(call: Call) -> Context:
    head_dim = call.q_weight.shape[0]
    pitch = head_dim * (2 if call.gate else 1)
    return Context(
        heads(call.q_gate, call.q_weight, pitch),
        heads(call.k, call.k_weight, head_dim),
        call.table.data_ptr(),
        call.table.stride(0),
        call.table.shape[0],
        CODES[call.table.dtype],
        integers(call.positions),
        call.positions.stride(0) if call.positions.ndim == 2 else 0,
        integers(call.axis_map),
        integers(call.slots),
        call.q_gate.shape[0],
        head_dim,
        call.table.shape[1] // 2,
        call.eps,
        call.weight_offset,
        call.q_weight.dtype == torch.float32,
        call.fma,
    )


@pytest.fixture(scope="module")
def compile_kernels(host_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """``compile_kernels(*options)``: the kernels and the functions beside this file, as a library of this process."""

    def compiled(*options: str) -> ctypes.CDLL:
        library = tmp_path_factory.mktemp("host") / "kernels.so"
        command = [host_compiler, "-std=c++17", "-shared", "-fPIC", *options, f"-I{SOURCES}"]
        done = subprocess.run(
            [*command, str(Path(__file__).with_name("norm_host_arithmetic.cpp")), "-o", str(library)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        kernels = ctypes.CDLL(str(library))
        kernels.norm_forward.restype = kernels.norm_backward.restype = ctypes.c_bool
        return kernels

    return compiled


@pytest.fixture(scope="module")
def kernels(compile_kernels: Compile) -> ctypes.CDLL:
    """The kernels as the compiler must leave them."""
    return compile_kernels(*STRICT, "-O1")


@dataclass(frozen=True)
class Order:
    """In what order the threads of a block take turns, and whether the configuration is that of a large input."""

    backwards: bool = False
    large: bool = True


def forward(kernels: ctypes.CDLL, call: Call, order: Order) -> tuple[list[Tensor], bool]:
    """Queries, keys and gates, in memory full of sevens, and whether the kernel for aligned operands ran."""
    head_dim = call.q_weight.shape[0]
    width = context(call).q.heads * head_dim
    widths = width, call.k.shape[1], width if call.gate else 0
    results = [torch.full((call.k.shape[0], width), 7, dtype=call.k.dtype) for width in widths]
    q, k, gates = (result.data_ptr() for result in results)
    arguments = Arguments(context(call), Results(q, gates if call.gate else None), Results(k, None), call.round_norm)
    wide = kernels.norm_forward(ctypes.byref(arguments), CODES[call.k.dtype], order.large, order.backwards)
    return results, wide


def backward(
    kernels: ctypes.CDLL, call: Call, given: Sequence[Tensor], order: Order, weights: bool
) -> tuple[list[Tensor], bool]:
    """The four gradients, in memory full of sevens, and whether the kernel for aligned operands ran."""
    operands = call.q_gate, call.k, call.q_weight, call.k_weight
    results = [torch.full(x.shape, 7, dtype=x.dtype) for x in operands]
    q, k, gates = (Incoming(gradient.data_ptr(), gradient.stride(0), gradient.stride(1)) for gradient in given)
    arguments = BackwardArguments(
        context(call),
        Gradients(q, gates if call.gate else Incoming(), results[0].data_ptr(), None),
        Gradients(k, Incoming(), results[1].data_ptr(), None),
    )
    places = (ctypes.c_void_p * 2)(*(result.data_ptr() for result in results[2:])) if weights else None
    codes = CODES[call.q_weight.dtype], CODES[call.k.dtype]
    wide = kernels.norm_backward(ctypes.byref(arguments), places, *codes, order.large, order.backwards)
    return results, wide


def changed(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """Elements of other bytes, NaN counted as one value."""
    return [changed_elements(a, b) for a, b in zip(got, wanted, strict=True)]


def judge(kernels: ctypes.CDLL, call: Call, order: Order, given: Sequence[Tensor] | None = None) -> tuple[bool, bool]:
    """Compare forward and backward with the reference; whether each ran the kernel for aligned operands."""
    got, wide = forward(kernels, call, order)
    wanted = torch.ops.ropecheck.qk_norm_rope_gate_reference(*call.operands, call.round_norm, call.fma)
    if call.slots is not None:
        wanted = [y.masked_fill((call.slots == -1)[:, None], 7) for y in wanted]
    assert changed(got, wanted) == [0, 0, 0]
    generator = torch.Generator().manual_seed(9)
    given = given or [torch.randn(y.shape, generator=generator).to(y.dtype) for y in got]
    gradients, backward_wide = backward(kernels, call, given, order, True)
    wanted = torch.ops.ropecheck.qk_norm_rope_gate_backward_reference(*given, *call.operands, call.fma, True)
    assert changed(gradients, wanted) == [0, 0, 0, 0]
    return wide, backward_wide


def make(
    dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    *,
    tokens: int = 5,
    heads: tuple[int, int] = (3, 2),
    three_rows: bool = False,
    padding: bool = False,
    integer: torch.dtype = torch.int64,
    weight_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype = torch.float32,
    pitch: int = 0,
    shift: int = 0,
    outside: bool = False,
    **options: Any,
) -> Call:
    """Random operands; with ``pitch`` or ``shift`` q_gate and k are slices of one projection, positions of others."""
    generator = torch.Generator().manual_seed(head_dim + rotary_dim + tokens)
    rows = 40
    widths = heads[0] * head_dim * (2 if options.get("gate", True) else 1), heads[1] * head_dim
    projection = torch.randn(tokens, shift + sum(widths) + pitch, generator=generator).to(dtype)
    q_gate, k = projection[:, shift : shift + widths[0]], projection[:, shift + widths[0] : shift + sum(widths)]
    if not pitch and not shift:
        q_gate, k = q_gate.clone(), k.clone()
    q_weight, k_weight = torch.randn(2, head_dim, generator=generator).to(weight_dtype or dtype)
    table = torch.randn(rows, rotary_dim + pitch, generator=generator).to(table_dtype)[:, :rotary_dim]
    limits = (-2, rows + 2) if outside else (0, rows)
    if three_rows:
        positions = torch.randint(*limits, (tokens, 3), generator=generator).to(integer).T
        axis_map = torch.randint(0, 3, (rotary_dim // 2, 2), generator=generator).to(integer)[:, 1]
    else:
        positions = torch.randint(*limits, (tokens, 4), generator=generator).to(integer)[:, 1]
        axis_map = None
    slots = torch.randint(-1, 2, (2 * tokens,), generator=generator).to(integer)[::2] if padding else None
    return Call(q_gate, k, q_weight, k_weight, table, positions, axis_map, slots, **options)


WIDE = [(256, 64), (128, 128), (64, 16), (256, 256), (96, 48), (32, 16)]
GENERAL = [(80, 20), (72, 72), (5, 4), (2, 2), (16, 16), (255, 30)]


@pytest.mark.parametrize(("head_dim", "rotary_dim"), WIDE + GENERAL)
@dtypes
def test_the_bytes_are_those_of_the_reference(
    kernels: ctypes.CDLL, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    """Forward and backward, one row of positions and three with padding, whatever order the threads go in."""
    expected = (head_dim, rotary_dim) in WIDE
    for three_rows in (False, True):
        call = make(dtype, head_dim, rotary_dim, three_rows=three_rows, padding=three_rows)
        assert judge(kernels, call, Order(backwards=three_rows)) == (expected, expected)
        assert judge(kernels, call, Order(backwards=not three_rows, large=False)) == (expected, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "no gate": {"gate": False, "tokens": 9},
    "plain weights": {"weight_offset": 0.0, "weight_dtype": torch.float32},
    "fp32 weights": {"weight_offset": 0.25, "weight_dtype": torch.float32},
    "no rounding": {"round_norm": False, "three_rows": True},
    "fma": {"fma": True, "padding": True},
    "fma, no rounding": {"fma": True, "round_norm": False},
    "bf16 table": {"table_dtype": torch.bfloat16, "integer": torch.int32},
    "fp16 table, three rows": {"table_dtype": torch.float16, "integer": torch.int32, "three_rows": True},
    "out of range": {"outside": True, "tokens": 20},
    "out of range, three rows": {"outside": True, "three_rows": True, "padding": True, "tokens": 20},
    "slices": {"pitch": 64, "three_rows": True},
    "one element off": {"shift": 1, "pitch": 7},
    "8 bytes off": {"shift": 4, "pitch": 4, "padding": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_option_and_storage(kernels: ctypes.CDLL, dtype: torch.dtype, option: str) -> None:
    """The same for each option of the call, each dtype of what is read beside x, and strides that callers have."""
    for head_dim, rotary_dim in ((64, 32), (40, 12)):
        judge(kernels, make(dtype, head_dim, rotary_dim, **OPTIONS[option]), Order())


@pytest.mark.parametrize("heads", [(16, 4), (24, 4), (64, 8), (8, 1), (1, 1), (3, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 17])
def test_every_division_of_heads_and_tokens(kernels: ctypes.CDLL, heads: tuple[int, int], tokens: int) -> None:
    """The same for numbers of heads and tokens that leave slots, blocks and chunks half empty."""
    call = make(torch.bfloat16, 32, 16, heads=heads, tokens=tokens)
    for order in (Order(), Order(large=False)):
        judge(kernels, call, order)


@dtypes
def test_special_values(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Signed zeros, infinities, NaN, the largest and the smallest numbers give the reference's bytes, with eps zero."""
    limits = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, -0.0, 1.0, limits.max, limits.tiny, limits.tiny * limits.eps, float("inf"), float("nan")]
    )
    generator = torch.Generator().manual_seed(3)
    for head_dim in (64, 40):
        call = make(dtype, head_dim, 16, tokens=24, eps=0.0)
        for x in (call.q_gate, call.k):
            # The first rows have few values each, so that not everything is NaN.
            highest = torch.arange(1, 25).clamp(max=8)[:, None]
            chosen = (torch.rand(x.shape, generator=generator) * highest).long().clamp(max=7)
            x.copy_(values[chosen].to(dtype) * torch.where(torch.rand(x.shape, generator=generator) < 0.5, 1, -1))
        judge(kernels, call, Order())


def test_the_tree_over_rows_keeps_the_sign_of_zero(kernels: ctypes.CDLL) -> None:
    """Rows of -0 add up to -0; where their tree is padded, with the +0 of a fourth row, to +0."""
    for tokens, negative in ((1, True), (2, True), (3, False), (4, True)):
        call = make(torch.float32, 64, 16, heads=(1, 1), tokens=tokens)
        given = [torch.zeros(tokens, 64)] * 3
        call.q_gate.fill_(-1.0)
        call.table.fill_(1.0)
        judge(kernels, call, Order(), given)
        gradients, _ = backward(kernels, call, given, Order(), True)
        assert bool(gradients[2][16:].signbit().all()) == negative


@pytest.mark.parametrize("layout", ["expanded", "transposed", "every second channel"])
def test_incoming_gradients_of_any_strides(kernels: ctypes.CDLL, layout: str) -> None:
    """What autograd hands over need not be contiguous: the kernel for operands that are not aligned takes it."""
    call = make(torch.bfloat16, 64, 32)
    generator = torch.Generator().manual_seed(4)
    given = []
    for heads in (3, 2, 3):
        shape = (5, heads * 64)
        if layout == "expanded":
            given.append(torch.randn(1, 1, generator=generator).bfloat16().expand(shape))
        elif layout == "transposed":
            given.append(torch.randn(shape[::-1], generator=generator).bfloat16().T)
        else:
            given.append(torch.randn(5, 2 * heads * 64, generator=generator).bfloat16()[:, ::2])
    assert judge(kernels, call, Order(), given) == (True, False)


def test_gradients_without_those_of_the_weights(kernels: ctypes.CDLL) -> None:
    """The gradients of q_gate and k are the same, and no memory is needed for the weights'."""
    call = make(torch.bfloat16, 64, 32, padding=True)
    given = [torch.ones(5, heads * 64, dtype=torch.bfloat16) for heads in (3, 2, 3)]
    with_weights, _ = backward(kernels, call, given, Order(), True)
    without, _ = backward(kernels, call, given, Order(), False)
    assert changed(without[:2], with_weights[:2]) == [0, 0]
    assert all(bool((result == 7).all()) for result in without[2:])


def test_a_long_tree_over_chunks(kernels: ctypes.CDLL) -> None:
    """More chunks than one pass of the second kernel sums: its passes have the bytes of the one tree."""
    call = make(torch.bfloat16, 32, 16, heads=(2, 1), tokens=520)
    judge(kernels, call, Order(large=False))


def test_contraction_would_be_seen(compile_kernels: Compile) -> None:
    """The same source compiled with contraction gives other bytes."""
    options = ["-O2", "-ffp-contract=fast", "-Wno-unknown-pragmas"]
    if platform.machine() == "x86_64":
        if " fma " not in Path("/proc/cpuinfo").read_text():
            pytest.skip("this processor has no fma: nothing can be contracted on it")
        options.append("-mfma")
    call = make(torch.float32, 64, 32, tokens=17)
    got, _ = forward(compile_kernels(*options), call, Order())
    wanted = torch.ops.ropecheck.qk_norm_rope_gate_reference(*call.operands, True, False)
    assert changed(got, wanted)[0] > 0
    assert changed(got, wanted)[2] == 0
