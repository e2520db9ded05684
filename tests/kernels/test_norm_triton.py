"""The Triton kernels of the normalised rotation return the reference's bytes, interpreted and compiled.

Whether a kernel is interpreted is decided when triton is imported, so one child process (this file run as a
script, with the device as its argument) executes all cases and prints what it found; each test reads its own
case. The interpreter's bf16 conversions are the judge's repaired ones.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import (
    NORM_LAUNCH_CONFIGURATIONS,
    LaunchConfiguration,
    forced_configuration,
    interpreted_launches,
    qk_norm_rope_gate,
    trace_launches,
)

Case = Callable[[], str]
DEVICE = sys.argv[1] if __name__ == "__main__" else "cpu"
VIEWS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = tuple(VIEWS)
ROWS = 50
SIZES = ((20, 80), (16, 64), (32, 128), (64, 128), (128, 128), (64, 256), (256, 256), (72, 72), (2, 3), (2, 2))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain weight": {"weight_offset": 0.0},
    "offset a third": {"weight_offset": 1 / 3},
    "no rounding": {"round_norm": False},
    "fma": {"fma": True},
    "fma, no rounding": {"fma": True, "round_norm": False},
    "large eps": {"eps": 0.3},
    "no eps": {"eps": 0.0},
}


def operands(
    *,
    dtype: torch.dtype = torch.float32,
    tokens: int = 17,
    heads: tuple[int, int] = (3, 2),
    sizes: tuple[int, int] = (16, 24),
    gate: bool = True,
    mrope: bool = True,
) -> dict[str, Any]:
    """Random operands of a call; positions are in range, and each row has its own."""
    rotary_dim, head_dim = sizes
    values: dict[str, Any] = {
        "q_gate": torch.randn(tokens, heads[0] * (2 if gate else 1) * head_dim).to(dtype),
        "k": torch.randn(tokens, heads[1] * head_dim).to(dtype),
        "q_weight": torch.randn(head_dim).to(dtype),
        "k_weight": torch.randn(head_dim).to(dtype),
        "cos_sin_cache": torch.randn(ROWS, rotary_dim),
        "positions": torch.randint(0, ROWS, (3, tokens) if mrope else (tokens,)),
    }
    if mrope:
        values["axis_map"] = torch.randint(0, 3, (rotary_dim // 2,))
    return values | {"gate": gate, "eps": 1e-6}


def placed(x: Any) -> Any:
    """x on the device under test, with the strides and storage offset it had."""
    if not isinstance(x, Tensor):
        return x
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(DEVICE)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def same(x: Tensor, y: Tensor) -> bool:
    """Equal bytes, where a NaN equals any NaN."""
    if (x.shape, x.dtype, x.stride()) != (y.shape, y.dtype, y.stride()):
        return False
    view = VIEWS[x.dtype]
    return bool(((x.view(view) == y.view(view)) | (x.isnan() & y.isnan())).all())


def compare(
    call: dict[str, Any],
    upstream: Callable[[Tensor], Tensor] = torch.randn_like,
    kept: Tensor | None = None,
) -> str:
    """What differs between Triton and the reference, forward and backward; empty if nothing does.

    ``kept``: the tokens whose outputs count, where there is padding.
    """
    call = {name: placed(value) for name, value in call.items()}
    rows = slice(None) if kept is None else kept.to(DEVICE)
    results, gradients = [], None
    for backend in ("triton", "reference"):
        leaves = [call[name].detach().requires_grad_() for name in ("q_gate", "k", "q_weight", "k_weight")]
        with interpreted_launches(), trace_launches() as launches:
            outputs = qk_norm_rope_gate(*leaves, **{k: v for k, v in call.items() if k not in NAMES}, backend=backend)
            outputs = [y for y in outputs if y is not None]
            gradients = gradients or [upstream(y) for y in outputs]
            grads = torch.autograd.grad(outputs, leaves, gradients)
        results.append([*(y[rows] for y in outputs), *grads])
        wanted = ["forward", "backward"] if outputs[0].numel() + outputs[1].numel() else []
        if [(launch.backend, launch.direction) for launch in launches] != [(backend, which) for which in wanted]:
            return f"launches: {launches}"
        if not all(y.is_contiguous() for y in (*outputs, *grads)):
            return "an output is not contiguous"
    equal = [same(x, y) for x, y in zip(*results, strict=True)]
    return "" if all(equal) else f"equal: {equal}"


NAMES = ("q_gate", "k", "q_weight", "k_weight")


def case(**settings: Any) -> str:
    options = {name: settings.pop(name) for name in list(settings) if name not in operands.__kwdefaults__}
    return compare(operands(**settings) | options)


def cases() -> dict[str, Case]:
    """Every case by name; calling one executes it."""
    found: dict[str, Case] = {}
    for number, sizes in enumerate(SIZES):
        for gate in (False, True):
            for mrope in (False, True):
                # Each size meets each dtype; the combinations with gate and rows are spread over them.
                for dtype in DTYPES if (gate, mrope) == (True, True) else (DTYPES[number % 3],):
                    name = f"R, D {sizes}, {'gate' if gate else 'no gate'}, {3 if mrope else 1} rows, {str(dtype)[6:]}"
                    found[name] = partial(case, sizes=sizes, gate=gate, mrope=mrope, dtype=dtype)
    for heads in ((16, 4), (8, 1), (1, 1), (5, 33), (0, 2), (2, 0), (0, 0)):
        found[f"heads {heads}"] = partial(case, heads=heads, tokens=3)
    for tokens in (0, 1, 2, 70):
        for mrope in (False, True):
            found[f"{tokens} tokens, {3 if mrope else 1} rows"] = partial(case, tokens=tokens, mrope=mrope)
    for name, options in OPTIONS.items():
        for dtype in DTYPES:
            found[f"{name}, {str(dtype)[6:]}"] = partial(case, dtype=dtype, **options)
    for layout in LAYOUTS:
        for dtype in DTYPES[:2]:
            found[f"layout: {layout}, {str(dtype)[6:]}"] = partial(laid_out, layout, dtype)
    for configuration in NORM_LAUNCH_CONFIGURATIONS:
        found[f"forced {configuration}"] = partial(forced, configuration)
    for strides in ("expanded", "transposed"):
        found[f"upstream gradients {strides}"] = partial(incoming, strides)
    for dtype in DTYPES:
        found[f"wide weights, {str(dtype)[6:]}"] = partial(wide_weights, dtype)
        found[f"table of {str(dtype)[6:]}"] = partial(narrow_table, dtype)
        found[f"out of range, {str(dtype)[6:]}"] = partial(out_of_range, dtype)
        found[f"gate payloads, {str(dtype)[6:]}"] = partial(gate_payloads, dtype)
    for mrope in (False, True):
        found[f"padding, {3 if mrope else 1} rows"] = partial(padding, mrope)
    found["padding is not written"] = padding_is_not_written
    found["one row of signed zeros"] = signed_zeros
    found["special values"] = special_values
    found["sums of many rows"] = many_rows
    for operand in ("q_gate", "k", "cos_sin_cache", "positions"):
        found[f"offsets past 2**31: {operand}"] = partial(offsets_past_31_bits, operand)
    found["opcheck"] = opcheck
    return found


def projection_slices(call: dict[str, Any]) -> dict[str, Any]:
    """q_gate and k as column slices of one projection, which has other columns before, between and behind."""
    q_gate, k = call["q_gate"], call["k"]
    whole = torch.randn(q_gate.shape[0], q_gate.shape[1] + k.shape[1] + 11).to(q_gate.dtype)
    views = whole[:, 3 : 3 + q_gate.shape[1]], whole[:, 7 + q_gate.shape[1] : 7 + q_gate.shape[1] + k.shape[1]]
    return {"q_gate": views[0], "k": views[1]}


def wide_rows(x: Tensor) -> Tensor:
    """The first quarter of the columns of a buffer four times as wide, whose rest is out of range."""
    buffer = torch.full((*x.shape[:-1], 4 * x.shape[-1]), 10**6, dtype=x.dtype)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


def every_second(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, 1)), -1)[..., 0]


LAYOUTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "slices of one projection": projection_slices,
    "rows of a wider buffer": lambda call: {"positions": wide_rows(call["positions"])},
    "positions stored (T, 3)": lambda call: {"positions": call["positions"].T.contiguous().T},
    "every second position": lambda call: {"positions": every_second(call["positions"])},
    "every row the same": lambda call: {"positions": call["positions"][:1].expand(3, -1)},
    "int32": lambda call: {name: call[name].int() for name in ("positions", "axis_map")},
    "int32 positions alone": lambda call: {"positions": call["positions"].int()},
    "every second lane of a map": lambda call: {"axis_map": every_second(call["axis_map"])},
    "slice of a wider table": lambda call: {"cos_sin_cache": torch.randn(ROWS, 40)[:, 5:21]},
    "every second row of a table": lambda call: {"cos_sin_cache": torch.randn(2 * ROWS, 16)[1::2]},
}


def laid_out(layout: str, dtype: torch.dtype) -> str:
    call = operands(dtype=dtype)
    return compare(call | LAYOUTS[layout](call))


def forced(configuration: LaunchConfiguration) -> str:
    with forced_configuration(configuration):
        return case(heads=(17, 3)) or case(mrope=False)


def incoming(strides: str) -> str:
    if strides == "expanded":
        return compare(operands(), lambda y: torch.randn((), device=DEVICE).expand(y.shape))
    return compare(operands(), lambda y: torch.randn(y.shape[::-1], device=DEVICE).T)


def wide_weights(dtype: torch.dtype) -> str:
    return compare(operands(dtype=dtype) | {name: torch.randn(24) for name in ("q_weight", "k_weight")})


def narrow_table(dtype: torch.dtype) -> str:
    return compare(operands() | {"cos_sin_cache": torch.randn(ROWS, 16).to(dtype)})


def out_of_range(dtype: torch.dtype) -> str:
    """Positions beside and far from the table, the last row, and rows that the map does not use."""
    for mrope in (False, True):
        call = operands(dtype=dtype, tokens=6, mrope=mrope)
        call["positions"][..., :5] = torch.tensor([0, ROWS - 1, ROWS, -1, 2**40])
        if mrope:
            call["positions"][1] = 0
            call["axis_map"] = torch.tensor([0, 2, 0, 2, 0, 0, 0, 2])
            call["positions"][1, 5] = -7
        if found := compare(call):
            return f"{call['positions']}: {found}"
    return ""


def gate_payloads(dtype: torch.dtype) -> str:
    """Gates are moved whatever their bits are."""
    view = VIEWS[dtype]
    call = operands(dtype=dtype, tokens=5, heads=(2, 1))
    bits = torch.randint(torch.iinfo(view).min, torch.iinfo(view).max, (5, 2, 2, 24), dtype=view)
    bits[:, :, 1, 3] = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}[dtype]
    call["q_gate"] = bits.view(dtype).flatten(1)
    call = {name: placed(value) for name, value in call.items()}
    with interpreted_launches():
        gate = qk_norm_rope_gate(**call, backend="triton")[2]
    assert gate is not None
    return "" if torch.equal(gate.view(view), bits[:, :, 1].flatten(1).to(DEVICE)) else "gate changed"


def padding(mrope: bool) -> str:
    """Padding holds NaN, bad positions and slots of a stride; its gradients are zero, and of the weights' no part."""
    call = operands(mrope=mrope)
    slots = torch.arange(17)
    slots[[0, 3, 4, 16]] = -1
    slots[5] = -2
    real = slots != -1
    for name in ("q_gate", "k"):
        call[name][~real] = torch.nan
    call["positions"][..., ~real] = 10**6
    call["slots"] = every_second(slots)

    def upstream(y: Tensor) -> Tensor:
        return torch.where(real[:, None].to(DEVICE), torch.randn_like(y), torch.nan)

    return compare(call, upstream, real) or compare(call | {"slots": slots.int()}, upstream, real)


def padding_is_not_written() -> str:
    """Rows of the outputs that padding has are as torch.empty left them, which here is NaN."""
    torch.use_deterministic_algorithms(True)
    call = {name: placed(value) for name, value in operands(tokens=6).items()}
    slots = placed(torch.tensor([1, -1, 0, -1, -1, 7]))
    with interpreted_launches():
        outputs = qk_norm_rope_gate(**call, slots=slots, backend="triton")
    torch.use_deterministic_algorithms(False)
    written = [(~y.isnan()).all(1).tolist() for y in outputs if y is not None]
    unwritten = [y.isnan().all(1).tolist() for y in outputs if y is not None]
    wanted = (slots != -1).tolist()
    return "" if written == [wanted] * 3 and unwritten == [[not is_real for is_real in wanted]] * 3 else str(written)


def signed_zeros() -> str:
    """One row of weights' products is not added to anything, and keeps its -0; tables, gradients and x hold zeros."""
    for tokens in (1, 2, 3):
        call = operands(tokens=tokens, heads=(1, 1), sizes=(4, 6))
        zeros = torch.tensor([0.0, -0.0])
        call["cos_sin_cache"] = zeros[torch.randint(0, 2, (ROWS, 4))]
        call["q_gate"][:, ::2] = -0.0
        call["k"][:, ::2] = -0.0
        if found := compare(call, lambda y: -torch.zeros_like(y)) or compare(call):
            return f"{tokens} tokens: {found}"
    return ""


def special_values() -> str:
    """Infinities, NaN, subnormals, the largest numbers and rows of zeros, with and without eps."""
    call = operands(tokens=8)
    special = [torch.inf, -torch.inf, torch.nan, 1e-45, -1e-40, 3.4e38, 1e-25, 0.0]
    for token, value in enumerate(special):
        call["q_gate"][token, token] = value
        call["k"][token, ::5] = value
    call["q_gate"][7] = 0.0
    return compare(call) or compare(call | {"eps": 0.0})


def many_rows() -> str:
    """More rows than one program sums, and more programs than one of the second kernel does."""
    from ropecheck.kernels.norm_triton import SUMMED_ROWS, _summed

    if found := case(tokens=61, heads=(9, 1), sizes=(2, 4)):
        return found
    weight = torch.zeros(24, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 2, SUMMED_ROWS, SUMMED_ROWS + 1, 3 * SUMMED_ROWS + 5):
        sums = torch.randn(rows, 24, device=DEVICE)
        wanted = sums
        while wanted.shape[0] > 1:
            padded = torch.cat((wanted, torch.zeros(wanted.shape[0] % 2, 24, device=DEVICE)))
            wanted = padded[::2] + padded[1::2]
        if not same(_summed(sums, weight), wanted[0].bfloat16()):
            return f"{rows} rows"
    return ""


def offsets_past_31_bits(operand: str) -> str:
    """Three rows of one operand lie 2**30 elements apart, so the last is at 2**31."""
    call = operands(tokens=3, heads=(1, 1), sizes=(4, 6)) | {"cos_sin_cache": torch.randn(3, 4)}
    call["positions"] = torch.tensor([[2, 1, 0], [0, 1, 2], [1, 2, 0]])
    dense = call[operand]
    call = {name: placed(value) for name, value in call.items()}
    spread = reserved(2**31 + dense.shape[1], dense.dtype).as_strided(dense.shape, (2**30, 1))
    call[operand] = spread.copy_(dense)
    leaves = {name: call[name] for name in NAMES}
    rest = {name: value for name, value in call.items() if name not in NAMES}
    with interpreted_launches():
        got, wanted = (qk_norm_rope_gate(**leaves, **rest, backend=backend) for backend in ("triton", "reference"))
    equal = [same(x, y) for x, y in zip(got, wanted, strict=True) if x is not None and y is not None]
    return "" if all(equal) else f"equal: {equal}"


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory of ``elements`` elements; on a CPU its pages exist once they are touched, so it may exceed RAM."""
    if DEVICE == "cuda":
        return torch.empty(elements, dtype=dtype, device=DEVICE)
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.11 on
    pages = mmap.mmap(-1, dtype.itemsize * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=dtype)


def opcheck() -> str:
    call = {name: placed(value) for name, value in operands(tokens=3).items()}
    leaves = [call[name].requires_grad_() for name in NAMES]
    tables = call["cos_sin_cache"], call["positions"], call["axis_map"], None
    upstream = [placed(torch.randn(3, width)) for width in (72, 48, 72)]
    detached = [leaf.detach() for leaf in leaves]
    operators = torch.ops.ropecheck
    with interpreted_launches():
        for operator, arguments in (
            (operators.qk_norm_rope_gate_triton, (*leaves, *tables, 1e-6, 1.0, True, True, False)),
            (
                operators.qk_norm_rope_gate_backward_triton,
                (*upstream, *detached, *tables, 1e-6, 1.0, True, False, True),
            ),
        ):
            result = torch.library.opcheck(operator.default, arguments)
            if set(result.values()) != {"SUCCESS"}:
                return str(result)
    return ""


def run_cases(device: str, **environment: str) -> dict[str, str]:
    """What a child process found, by case."""
    child = subprocess.run(
        [sys.executable, __file__, device],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    found: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """Differences of the interpreted kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: the interpreted kernels were not compared")
    return run_cases("cpu", TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", list(cases()))
def test_interpreted_kernels(interpreted: dict[str, str], name: str) -> None:
    """The case ran in the interpreter and nothing differed from the reference."""
    assert interpreted[name] == ""


def test_compiled_kernels() -> None:
    """On a GPU every case has the bytes of the reference there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: the compiled kernels were not executed")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: the compiled kernels were not executed")
    found = run_cases("cuda")
    assert set(found) == set(cases())
    assert {name: difference for name, difference in found.items() if difference} == {}


def main() -> None:
    """Run every case and print one JSON object."""
    if DEVICE == "cpu":
        from ropecheck.suites.interpreter import repair

        repair()
    torch.manual_seed(0)
    found = {}
    for name, run in cases().items():
        try:
            found[name] = run()
        except Exception as error:  # the test of this case reports it; the others still run
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
