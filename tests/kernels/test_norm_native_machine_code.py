"""The machine code and the PTX of the native library's normalised rotation, forward and backward."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ropecheck.kernels.native_build import ARCHITECTURES
from ropecheck.suites.machine_code import KernelCode, disassembler, of_binary

from_each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
DTYPES = {"Float32": 4, "Float16": 2, "BFloat16": 2}
DIRECTIONS = {"gate": "forward", "backward": "backward"}
_KERNEL = re.compile(r"norm_rope_(gate|backward)_kernelINS_\d+(\w*?Float\d+)ELb([01])ELb([01])EE")

Kernel = tuple[str, str, bool, bool]
"""Direction, dtype, whether there are three rows of positions, and whether operands are aligned."""

KERNELS: set[Kernel] = {
    (d, t, m, w) for d in DIRECTIONS.values() for t in DTYPES for m in (False, True) for w in (False, True)
}


def kernel_of(name: str) -> Kernel | None:
    matched = _KERNEL.search(name)
    return (DIRECTIONS[matched[1]], matched[2], matched[3] == "1", matched[4] == "1") if matched else None


def kernels(library: Path, architecture: str) -> dict[Kernel, KernelCode]:
    found = {kernel_of(name): code for name, code in of_binary(library, architecture).items()}
    return {kernel: code for kernel, code in found.items() if kernel is not None}


def rows_in_flight(kernel: Kernel) -> int:
    """Heads whose channels a thread holds at once."""
    _, dtype, _, aligned = kernel
    return (4 if DTYPES[dtype] == 2 else 2) if aligned else 1


@pytest.fixture(scope="module")
def ptx(disassembled: Path) -> dict[Kernel | None, str]:
    """The PTX by kernel; under None that of the kernel which adds up the weights' gradients."""
    tool = disassembler()
    assert tool is not None
    printed = subprocess.run([tool, "-ptx", disassembled], capture_output=True, text=True, check=True).stdout
    entries = re.split(r"^\.visible \.entry ", printed, flags=re.MULTILINE)[1:]
    return {kernel_of(e.partition("(")[0]): e for e in entries if "norm_rope" in e or "sum_chunks" in e}


def count(text: str, instruction: str) -> int:
    return len(re.findall(rf"\s{re.escape(instruction)}\s", text))


@from_each_architecture
def test_every_kernel_is_there_and_spills_nothing(disassembled: Path, architecture: str) -> None:
    """Each architecture has machine code for both directions, every dtype, one row and three, aligned or not."""
    found = kernels(disassembled, architecture)
    assert set(found) == KERNELS
    assert {kernel: (code.stack, code.local) for kernel, code in found.items()} == dict.fromkeys(KERNELS, (0, 0))


@from_each_architecture
def test_aligned_kernels_write_16_bytes_at_a_time(disassembled: Path, architecture: str) -> None:
    """Activations go out in 16-byte pieces, and so do the backward's sums of a chunk."""
    for kernel, code in kernels(disassembled, architecture).items():
        _, dtype, _, aligned = kernel
        if aligned:
            assert code.stores == (16,), kernel
            assert 16 in code.loads, kernel
        else:
            assert {DTYPES[dtype], 16} <= set(code.stores) & set(code.loads), kernel


def test_aligned_kernels_read_16_bytes_at_a_time(ptx: dict[Kernel | None, str]) -> None:
    """What is narrower is of the table, of a cosine and a sine of each dtype, or of integers."""
    for kernel in KERNELS:
        text = ptx[kernel]
        narrow = {w for w in re.findall(r"\bld\.global\.([\w.]+)", text) if not w.startswith(("v4.", "nc.s"))}
        if kernel[3]:
            assert narrow == {"nc.u16", "nc.f32"}, kernel
            assert (count(text, "ld.global.nc.u16"), count(text, "ld.global.nc.f32")) == (4, 2), kernel


def test_only_the_option_fuses(ptx: dict[Kernel | None, str]) -> None:
    """There is one fma for each channel that a thread turns, which the option asks for, and none anywhere else."""
    assert set(ptx) == {*KERNELS, None}
    fused = {kernel: count(text, "fma.rn.f32") for kernel, text in ptx.items()}
    assert fused == {None: 0} | {kernel: 8 * rows_in_flight(kernel) for kernel in KERNELS}
    assert not [kernel for kernel, text in ptx.items() if re.search(r"\bmad\.\w+\.f|\.ftz\b", text)]


def test_division_and_root_are_rounded_to_nearest(ptx: dict[Kernel | None, str]) -> None:
    """Of divisions, roots and reciprocals only those that round are there; the backward divides a second mean."""
    for kernel in KERNELS:
        operations = re.findall(r"\b(?:div|sqrt|rsqrt|rcp|ex2|lg2)\.[\w.]*f32\b", ptx[kernel])
        wanted = ["div.rn.f32", "rcp.rn.f32", "sqrt.rn.f32"]
        assert sorted(operations) == (wanted if kernel[0] == "forward" else ["div.rn.f32", *wanted]), kernel


def test_one_row_of_positions_is_a_kernel_of_its_own(ptx: dict[Kernel | None, str]) -> None:
    """It reads one position where the other reads three and the axis: six integers of both widths fewer."""
    for direction, dtype, three_rows, aligned in KERNELS:
        if not three_rows:
            reads = [count(ptx[direction, dtype, rows, aligned], "ld.global.nc.s64") for rows in (False, True)]
            assert reads[1] == reads[0] + 3, (direction, dtype, aligned)
