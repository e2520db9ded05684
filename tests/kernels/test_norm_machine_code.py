"""Facts of the compiled kernels of the normalised rotation, read from PTX and SASS made ahead of time.

A child process without ``TRITON_INTERPRET`` (this file run as a script) compiles every variant for sm_90 with the
specialisation that a launch with aligned operands has; no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VARIANTS: dict[str, dict[str, Any]] = {
    "one row of positions": {},
    "three rows": {"mrope": True},
    "three rows, fma, no rounding": {"mrope": True, "fma": True, "round_norm": False},
    "no gate, plain weight": {"gate": False, "add_offset": False},
    "padding, bf16 table": {"slots": True, "cache_dtype": "bf16"},
    "fp16, R = D = 128": {"dtype": "fp16", "head_dim": 128, "lanes": 64, "block": (8, 4, 4)},
    "fp32": {"dtype": "fp32"},
    "R = D = 256": {"lanes": 128},
    "R = 20 of D = 80": {"head_dim": 80, "lanes": 10, "block": (8, 4, 4)},
    "one token, three rows": {"block": (1, 16, 4), "mrope": True},
    "backward": {"backward": True},
    "backward, three rows, fma": {"backward": True, "mrope": True, "fma": True},
    "backward, fp32, padding": {"backward": True, "dtype": "fp32", "slots": True},
    "backward, R = D = 128, no gate": {"backward": True, "gate": False, "head_dim": 128, "lanes": 64, "block": (16, 4)},
}
ALIGNED = [name for name in VARIANTS if "80" not in name]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Facts by variant, from the child process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: no machine code was inspected")
    child = subprocess.run(
        [sys.executable, __file__],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    facts: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("variant", VARIANTS)
def test_fma_is_there_where_it_is_asked_for(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """The PTX has an fma with the option and none without it: nothing is contracted."""
    assert (compiled[variant]["fma"] > 0) == VARIANTS[variant].get("fma", False)
    assert compiled[variant]["products"] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_sum_is_of_two(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """The order of the trees is written down: what the compiler gets to reduce are pairs."""
    summed = compiled[variant]["summed"]
    assert {int(shape.split("x")[-1]) for shape in summed} == {2}
    head_dim = VARIANTS[variant].get("head_dim", 256)
    assert len(summed) >= (head_dim - 1).bit_length()


@pytest.mark.parametrize("variant", VARIANTS)
def test_division_and_root_are_rounded_to_nearest(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """Of divisions, roots and reciprocals only those that round are left, and nothing flushes subnormals."""
    facts = compiled[variant]
    assert facts["divisions"] == ["div.rn.f32", "sqrt.rn.f32"]
    assert facts["flushing"] == 0


@pytest.mark.parametrize("variant", ALIGNED)
def test_activations_are_written_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """With aligned rows every activation is written in 16-byte pieces, and read in them."""
    widths = compiled[variant]["widths"]
    assert "v4.b32" in widths["ld"]
    # Two-byte reads would be those of a 16-bit x; the backward's sums are few per program, and narrower.
    assert not [width for width in widths["ld"] if width.endswith("b16")]
    narrow = {"v2.b32", "b32"} if variant.startswith("backward") else set()
    assert set(widths["st"]) - narrow == {"v4.b32"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_spills(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """The registers hold the block: no stack."""
    assert compiled[variant]["stack"] == 0


def test_one_row_has_no_argument_of_three(compiled: dict[str, dict[str, Any]]) -> None:
    """The specialisation for one row has neither the map nor the stride of the rows: a binary of its own."""
    assert compiled["three rows"]["parameters"] == compiled["one row of positions"]["parameters"] + 2


def facts_of(
    dtype: str = "bf16",
    cache_dtype: str = "fp32",
    head_dim: int = 256,
    lanes: int = 32,
    gate: bool = True,
    mrope: bool = False,
    slots: bool = False,
    add_offset: bool = True,
    round_norm: bool = True,
    fma: bool = False,
    backward: bool = False,
    block: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Compile one variant and read its code; ``block``: tokens, heads and warps, or rows and warps of the backward."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ropecheck.kernels.norm_triton_backward_kernel import norm_rope_backward_kernel
    from ropecheck.kernels.norm_triton_kernel import norm_rope_gate_kernel

    kernel = norm_rope_backward_kernel if backward else norm_rope_gate_kernel
    block = block or ((8, 4) if backward else (4, 4, 4))
    constants: dict[str, Any] = {
        "GATE": gate,
        "MROPE": mrope,
        "SLOTS": slots,
        "PADDING": -1,
        "HEAD_DIM": head_dim,
        "LANES": lanes,
        "ADD_OFFSET": add_offset,
        "FMA": fma,
        "BLOCK": triton.next_power_of_2(head_dim),
        "ALIGNMENT": min(16, lanes & -lanes),
        "position_stride_token": 1,
        "axis_stride": 1 if mrope else None,
        "slot_stride": 1 if slots else None,
    }
    if backward:
        constants |= {"WEIGHT_GRADIENTS": True, "ROW_BLOCK": block[0], "incoming_stride_channel": 1}
        constants |= {"gate_stride_channel": 1} if gate else {}
    else:
        constants |= {"TOKEN_BLOCK": block[0], "HEAD_BLOCK": block[1], "ROUND_NORM": round_norm}
        constants |= {"ROTARY_BLOCK": triton.next_power_of_2(2 * lanes)}
    absent = [] if gate else ["gate", "incoming_gate", "gate_stride_token", "gate_stride_channel"]
    absent += [] if mrope else ["axis_map", "position_stride_row"]
    absent += [] if slots else ["slots"]
    absent += [] if add_offset else ["weight_offset"]
    constants |= dict.fromkeys(name for name in absent if name in kernel.arg_names)
    types = {"cache": f"*{cache_dtype}", "partial_sums": "*fp32", "eps": "fp32", "weight_offset": "fp32"}
    types |= dict.fromkeys(("positions", "axis_map", "slots"), "*i64")
    activations = ("q_gate", "k", "q", "k_rotated", "gate", "x", "gradient", "incoming", "incoming_gate")
    types |= dict.fromkeys(activations, f"*{dtype}")
    # A weight is so short that it is read in small pieces; fp32 ones are told apart from those of a 16-bit x.
    types |= dict.fromkeys(("weight", "q_weight", "k_weight"), "*fp32")
    unspecialised = {"tokens", "heads", "q_heads", "k_heads", "q_head_blocks", "k_head_blocks", "cache_rows"}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name] not in ("constexpr", "fp32") and name not in unspecialised:
            attributes[(position,)] = [["tt.divisibility", 16]]
    binary = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": block[-1], "enable_fp_fusion": False},
    )
    ptx = binary.asm["ptx"]
    stack = re.search(r"STACK:(\d+)", resources_of(binary.asm["cubin"]))
    assert stack is not None
    return {
        "fma": len(re.findall(r"\bfma\.", ptx)),
        "summed": re.findall(r"tt\.reduce.*?\}\) : \(tensor<([\dx]+)xf32>\)", binary.asm["ttir"], re.DOTALL),
        "products": len(re.findall(r"\bmul\.(?:rn\.)?f32", ptx)),
        "flushing": ptx.count(".ftz"),
        "divisions": sorted(set(re.findall(r"\b(?:div|sqrt|rcp|rsqrt)\.[\w.]*f32\b", ptx))),
        "stack": int(stack[1]),
        "parameters": len(re.findall(r"\.param \.", ptx.split("{")[0])),
        "widths": {kind: sorted(set(re.findall(rf"\b{kind}\.global\.([\w.]+)", ptx))) for kind in ("ld", "st")},
    }


def resources_of(cubin: bytes) -> str:
    """What the disassembler inside the triton wheel says of the resources that ``cubin`` uses."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps({name: facts_of(**variant) for name, variant in VARIANTS.items()}))
