"""What is in the native library: its machine code for each architecture, its PTX, what it needs and what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ropecheck.kernels.native_build import ARCHITECTURES, PTX_ARCHITECTURE, SOURCES
from ropecheck.suites.machine_code import KernelCode, disassembler, of_binary

from_each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
DTYPES = {"Float32": 4, "Float16": 2, "BFloat16": 2}
PAIRINGS = {"0": "adjacent", "1": "half-split"}
ACCESSES = {"0": "by alignment", "1": "16 bytes"}
_KERNEL = re.compile(r"rotation_kernelINS_\d+(\w*?Float\d+)ELNS_7PairingE([01])ELb([01])E")

# All in libtorch_cpu.so of torch 2.10.0 too, the oldest that the library is for.
TORCH_SYMBOLS = {
    *(f"aoti_torch_{name}" for name in ("abi_version", "device_type_cpu", "device_type_cuda", "empty_strided")),
    *(f"aoti_torch_dtype_{name}" for name in ("bfloat16", "float16", "float32", "float64", "int32", "int64")),
    *(f"aoti_torch_get_{name}" for name in ("data_ptr", "device_index", "device_type", "dim", "dtype", "size")),
    *("aoti_torch_get_stride", "aoti_torch_new_tensor_handle", "aoti_torch_library_init_impl"),
    *("aoti_torch_delete_library_object", "aoti_torch_delete_tensor_object"),
    *("torch_library_impl", "torch_string_c_str", "torch_delete_string"),
}
SYSTEM_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6"}


def kernels(library: Path, architecture: str) -> dict[tuple[str, str, str], KernelCode]:
    """The kernels of the rotation by dtype, pairing and access."""
    found = {}
    for name, code in of_binary(library, architecture).items():
        if matched := _KERNEL.search(name):
            found[matched[1], PAIRINGS[matched[2]], ACCESSES[matched[3]]] = code
    return found


@from_each_architecture
def test_no_kernel_is_left_unjudged(disassembled: Path, architecture: str) -> None:
    """Every kernel of the library is one of the rotation, judged here, or of the normalised rotation."""
    others = [name for name in of_binary(disassembled, architecture) if not _KERNEL.search(name)]
    assert others
    assert not [name for name in others if not re.search(r"norm_rope_(?:gate|backward)_kernel|sum_chunks_kernel", name)]


@from_each_architecture
def test_every_kernel_is_there(disassembled: Path, architecture: str) -> None:
    """Each architecture has machine code for every dtype, pairing and access."""
    wanted = {(d, p, a) for d in DTYPES for p in PAIRINGS.values() for a in ACCESSES.values()}
    assert set(kernels(disassembled, architecture)) == wanted


@from_each_architecture
def test_nothing_is_contracted_and_nothing_spills(disassembled: Path, architecture: str) -> None:
    """No product loses its rounding, no subnormal its value, and registers hold everything."""
    for kernel, code in kernels(disassembled, architecture).items():
        assert (code.fused, code.expands_functions, code.flushing) == (0, False, 0), kernel
        assert (code.stack, code.local) == (0, 0), kernel


@from_each_architecture
def test_wide_kernels_move_16_bytes_at_a_time(disassembled: Path, architecture: str) -> None:
    """The kernels for aligned operands have no narrower access; the two table values of a thread are 8 bytes."""
    for (dtype, pairing, access), code in kernels(disassembled, architecture).items():
        if access == "16 bytes":
            assert code.stores == (16,), (dtype, pairing)
            assert code.loads == ((8, 16) if (dtype, pairing) == ("Float32", "adjacent") else (16,)), (dtype, pairing)
        else:
            # What is aligned after all still moves 16 bytes.
            assert code.stores == (DTYPES[dtype], 16), (dtype, pairing)
            assert {DTYPES[dtype], 16} <= set(code.loads), (dtype, pairing)


def test_each_lane_costs_four_products_and_two_sums(disassembled: Path) -> None:
    """There are twice as many fp32 products as sums, and both are there."""
    functions = _cuobjdump("-sass", "-arch", ARCHITECTURES[0], str(disassembled)).split("Function : ")[1:]
    sass = "".join(function for function in functions if _KERNEL.search(function))
    products, sums = (len(re.findall(rf"\b{opcode}\b", sass)) for opcode in ("FMUL", "FADD"))
    assert products == 2 * sums > 0


def test_ptx_for_other_gpus(disassembled: Path) -> None:
    """There is PTX for the oldest architecture alone; it neither fuses nor flushes."""
    ptx = _cuobjdump("-ptx", str(disassembled))
    assert set(re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)) == {PTX_ARCHITECTURE.replace("compute", "sm")}
    entries = re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]
    rotations = [entry for entry in entries if _KERNEL.search(entry.partition("(")[0])]
    assert len(rotations) == len(DTYPES) * len(PAIRINGS) * len(ACCESSES)
    for entry in rotations:
        assert "mul.rn.f32" in entry
        assert not re.search(r"\bfma\.|\bmad\.\w+\.f|\.ftz\b", entry)


@pytest.fixture(scope="module")
def dynamic(native_library: Path, lacking: Callable[[str], NoReturn]) -> dict[str, str]:
    """What readelf prints of the dynamic section and of the dynamic symbols."""
    tool = shutil.which("readelf") or lacking("readelf of the binutils is not found")
    options = {"section": "--dynamic", "symbols": "--dyn-syms"}
    return {
        name: subprocess.run([tool, option, "-W", native_library], capture_output=True, text=True, check=True).stdout
        for name, option in options.items()
    }


def test_it_needs_torch_and_neither_cuda_nor_python(dynamic: dict[str, str]) -> None:
    """Of torch it needs libtorch_cpu.so alone, so that it loads beside every build of torch in every Python."""
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", dynamic["section"]))
    others = {name for name in needed if not name.startswith("ld-linux")} - SYSTEM_LIBRARIES
    assert others == {"libtorch_cpu.so"}
    assert not re.search(r"\((?:RPATH|RUNPATH)\)", dynamic["section"])


def test_it_asks_for_no_later_torch(dynamic: dict[str, str]) -> None:
    """The functions of torch that it calls are those of the stable interface of torch 2.10, and no C++ of torch."""
    undefined = re.findall(r" UND (\w+)", dynamic["symbols"])
    assert {name for name in undefined if "torch" in name or "c10" in name} == TORCH_SYMBOLS


def test_it_exports_two_names_of_its_own(dynamic: dict[str, str]) -> None:
    """Nothing but its information and its callback is visible to other libraries, CUDA's runtime least of all."""
    rows = re.findall(r" (?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+(\d+) (\S+)", dynamic["symbols"])
    exported = {name for _, name in rows if not name.startswith(("_ZNSt", "_ZSt", "_ZTISt", "_ZTSSt", "_ZZNSt"))}
    assert exported - {"__bss_start", "_edata", "_end"} == {
        "ropecheck_native_information",
        "ropecheck_set_launch_callback",
    }


def test_it_names_no_path_of_the_machine_that_built_it(native_library: Path) -> None:
    """Neither the folders of sources, of torch and of Python are in it, nor anybody's home."""
    content = native_library.read_bytes()
    folders = {SOURCES, Path(torch.__file__).parent, Path(sys.prefix), Path(sys.base_prefix)}
    for folder in (*map(str, folders), "/home/", "/root/", "/tmp/", "/Users/", "site-packages"):
        assert folder.encode() not in content, folder


def _cuobjdump(*arguments: str) -> str:
    tool = disassembler()
    assert tool is not None
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout
