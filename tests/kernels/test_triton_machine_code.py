"""Facts of the compiled kernel, read from PTX and SASS made ahead of time: no GPU is needed.

A child process without ``TRITON_INTERPRET`` (this file run as a script) compiles every variant for sm_90 with the
specialisation that a launch with aligned operands has (pointers and strides divisible by 16, unit strides as
constants), since without it the code has 2-byte accesses.
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
    "adjacent": {},
    "adjacent, conjugate": {"conjugate": True},
    "half-split": {"half_split": True},
    "half-split, conjugate": {"half_split": True, "conjugate": True},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "R = 48 of D = 80": {"head_dim": 80, "lanes": 24},
    "largest head": {"head_dim": 256, "lanes": 128, "block": (4, 8, 8)},
    "partial, largest head": {"head_dim": 256, "lanes": 32, "block": (4, 8, 8)},
    "one token": {"block": (1, 32, 4)},
    "few heads": {"block": (16, 2, 4)},
    "pair": {"pair": True},
    "pair, half-split": {"pair": True, "half_split": True},
    "pair, fp32": {"pair": True, "dtype": "fp32"},
    "pair, largest head": {"pair": True, "head_dim": 256, "lanes": 128, "block": (4, 8, 8)},
    "pair, R = 48 of D = 80": {"pair": True, "head_dim": 80, "lanes": 24},
    "pair, conjugate": {"pair": True, "conjugate": True},
    "pair, one token": {"pair": True, "block": (1, 32, 4)},
    "pair, few heads": {"pair": True, "block": (16, 2, 4)},
    "in place": {"pair": True, "in_place": True},
    "in place, half-split": {"pair": True, "in_place": True, "half_split": True},
    "in place, conjugate": {"pair": True, "in_place": True, "conjugate": True},
    "in place, fp32": {"pair": True, "in_place": True, "dtype": "fp32"},
    "in place, largest head": {"pair": True, "in_place": True, "head_dim": 256, "lanes": 128, "block": (4, 8, 8)},
    "in place, R = 48 of D = 80": {"pair": True, "in_place": True, "head_dim": 80, "lanes": 24},
    "in place, one token": {"pair": True, "in_place": True, "block": (1, 32, 4)},
    "in place, few heads": {"pair": True, "in_place": True, "block": (16, 2, 4)},
    "channel stride": {"unit_channel": False},
    "unaligned": {"aligned": False},
}
ALIGNED = [name for name in VARIANTS if name not in ("channel stride", "unaligned")]


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
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    facts: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_contracted(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """Neither PTX nor machine code fuses a product into a sum; both keep separate products and sums."""
    facts = compiled[variant]
    assert facts["ptx_fma"] == 0
    assert facts["sass_ffma"] == 0
    assert facts["sass_fmul"] > 0
    # Four products and two sums for each lane.
    assert facts["sass_fmul"] == 2 * facts["sass_fadd"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_subnormals_are_not_flushed(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """No fp32 instruction flushes subnormals to zero."""
    assert compiled[variant]["ptx_ftz"] == 0


@pytest.mark.parametrize("variant", ALIGNED)
def test_activations_move_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """With unit channel stride and aligned rows no access of x or y is narrower than 16 bytes."""
    facts = compiled[variant]
    assert facts["widths"]["st"] == ["v4.b32"]
    # Tables may be read in narrower pieces; 2-byte reads would be those of a 16-bit x.
    assert "v4.b32" in facts["widths"]["ld"]
    assert not [width for width in facts["widths"]["ld"] if width.endswith("b16")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_spills(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """The registers hold the block: no stack."""
    assert compiled[variant]["stack"] == 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("in place")])
def test_in_place_waits_between_reading_and_writing(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """Each of the two branches has one barrier more than the same rotation out of place."""
    out_of_place = compiled[variant.replace("in place", "pair", 1)]
    assert compiled[variant]["barriers"] == out_of_place["barriers"] + 2


def test_single_rotation_has_no_argument_of_the_second(compiled: dict[str, dict[str, Any]]) -> None:
    """Without a pair k's two pointers, two sizes and six strides are no parameters of the machine code."""
    assert compiled["pair"]["parameters"] == compiled["adjacent"]["parameters"] + 10
    assert compiled["in place"]["parameters"] == compiled["pair"]["parameters"]


def test_output_stores_stay_wide_for_a_strided_input(compiled: dict[str, dict[str, Any]]) -> None:
    """A channel stride narrows the loads alone, the output being contiguous."""
    assert compiled["channel stride"]["widths"]["st"] == ["v4.b32"]
    assert "b16" in compiled["channel stride"]["widths"]["ld"]


def facts_of(
    dtype: str = "bf16",
    head_dim: int = 128,
    lanes: int = 64,
    half_split: bool = False,
    conjugate: bool = False,
    block: tuple[int, int, int] = (4, 8, 4),
    unit_channel: bool = True,
    aligned: bool = True,
    pair: bool = False,
    in_place: bool = False,
) -> dict[str, Any]:
    """Compile one variant and read its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ropecheck.kernels.triton_kernel import rotation_kernel

    constants: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "LANES": lanes,
        "HALF_SPLIT": half_split,
        "CONJUGATE": conjugate,
        "PAIR": pair,
        "IN_PLACE": in_place,
        "TOKEN_BLOCK": block[0],
        "HEAD_BLOCK": block[1],
        "LANE_BLOCK": triton.next_power_of_2(lanes),
        "TAIL_BLOCK": triton.next_power_of_2(max(head_dim - 2 * lanes, 1)),
        "cos_stride_lane": 1,
        "sin_stride_lane": 1,
        "y_stride_channel": 1,
    }
    if pair:
        constants |= {"k_stride_channel": 1, "k_rotated_stride_channel": 1}
    else:
        constants |= {name: None for name in rotation_kernel.arg_names if name.startswith("k_") or name == "k"}
    if unit_channel:
        constants["x_stride_channel"] = 1
    types = dict.fromkeys(("x", "y", "k", "k_rotated"), f"*{dtype}") | {"cos": "*fp32", "sin": "*fp32"}
    unspecialised = {"sequence", "heads", "k_heads", "token_blocks", "head_blocks", "k_head_blocks"}
    signature, attributes = {}, {}
    for position, name in enumerate(rotation_kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if aligned and name not in constants and name not in unspecialised:
            attributes[(position,)] = [["tt.divisibility", 16]]
    binary = triton.compile(
        ASTSource(rotation_kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": block[2], "enable_fp_fusion": False},
    )
    ptx = binary.asm["ptx"]
    sass, resources = (cuobjdump(binary.asm["cubin"], option) for option in ("-sass", "-res-usage"))
    stack = re.search(r"STACK:(\d+)", resources)
    assert stack is not None
    return {
        "ptx_fma": len(re.findall(r"\bfma\.", ptx)),
        "ptx_ftz": ptx.count(".ftz"),
        "sass_ffma": len(re.findall(r"\bFFMA", sass)),
        "sass_fmul": len(re.findall(r"\bFMUL", sass)),
        "sass_fadd": len(re.findall(r"\bFADD", sass)),
        "stack": int(stack[1]),
        "barriers": len(re.findall(r"\bBAR\.SYNC", sass)),
        "parameters": len(re.findall(r"\.param \.", ptx.split("{")[0])),
        "widths": {kind: sorted(set(re.findall(rf"\b{kind}\.global\.([\w.]+)", ptx))) for kind in ("ld", "st")},
    }


def cuobjdump(cubin: bytes, option: str) -> str:
    """What the disassembler inside the triton wheel says of ``cubin``."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps({name: facts_of(**variant) for name, variant in VARIANTS.items()}))
