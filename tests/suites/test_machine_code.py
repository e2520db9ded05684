"""What is read of PTX and SASS: on lines of a disassembler, and on small programs assembled here."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from ropecheck.suites import planted_faults
from ropecheck.suites.launched import demangled
from ropecheck.suites.machine_code import NoDisassembler, of_binary, of_cubin, read

_USAGE = " Function kernel:\n  REG:32 STACK:{} SHARED:0 LOCAL:0 CONSTANT[0]:592"


def sass(*instructions: str) -> str:
    """Instructions as cuobjdump prints them."""
    return "".join(f"        /*{16 * n:04x}*/                   {text} ;   /* 0x00 */\n"
                   for n, text in enumerate(instructions))  # fmt: skip


def code(*instructions: str, ptx: str | None = None, stack: int = 0):  # type: ignore[no-untyped-def]
    return read("kernel", ptx, sass(*instructions), _USAGE.format(stack))


@pytest.mark.parametrize(
    ("instruction", "fuses"),
    [
        ("FFMA R5, R2, R3, R4", True),
        ("@!P0 FFMA R5, R2, R3, -R4", True),
        ("DFMA R2, R4, R6, R8", True),
        ("HFMA2.BF16_V2 R5, R2, R3, R4", True),
        ("FFMA2 R4, R6, R8, R10", True),
        # How constants are moved, products written, and sums.
        ("HFMA2 R7, -RZ, RZ, 0, 0", False),
        ("HFMA2.MMA R7, -RZ, RZ, 1.875, 0", False),
        ("HFMA2.BF16_V2 R5, R2, R3, -RZ", False),
        ("HFMA2.BF16_V2 R5, R2, 1, 1, R3", False),
        ("FFMA R5, R2, 1, R3", False),
        ("FMUL R5, R2, R3", False),
        ("FADD R5, R2, R3", False),
        ("IMAD R5, R2, R3, R4", False),
    ],
)
def test_what_is_a_contraction(instruction: str, fuses: bool) -> None:
    """A product that loses its rounding in a sum, and not the other uses of a fused instruction."""
    assert code(instruction).contractions == int(fuses)


def test_roots_and_divisions_hold_fused_instructions() -> None:
    """SASS is not asked where a correctly rounded root is expanded; its PTX still is."""
    expanded = ("MUFU.RSQ R3, R2", "FFMA R5, R2, R3, R4")
    assert code(*expanded, ptx="sqrt.rn.f32 %f1, %f2;").contractions == 0
    assert code(*expanded, ptx="fma.rn.f32 %f1, %f2, %f3, %f4;").contractions == 1
    # The division of integers takes a reciprocal, and no fused instruction.
    assert code("MUFU.RCP R3, R2", "FFMA R5, R2, R3, R4").contractions == 1


def test_flushing() -> None:
    """Arithmetic that flushes counts; the conversions of an integer division do not; PTX has the first word."""
    assert code("FMUL.FTZ R5, R2, R3").flushes == 1
    assert code("F2I.FTZ.U32.F32.TRUNC.NTZ R5, R2").flushes == 0
    assert code("FMUL R5, R2, R3", ptx="mul.rn.ftz.f32 %f1, %f2, %f3;").flushes == 1


def test_widths_of_accesses() -> None:
    """Bytes by instruction, for global memory alone; 4 where nothing is said."""
    found = code(
        "LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.U16 R4, desc[UR4][R2.64]", "@P0 LDG.E.CONSTANT R4, desc[UR4][R2.64]",
        "STG.E.64 desc[UR4][R2.64], R4", "LDS.128 R4, [R2]", "STS.U8 [R2], R4",
    )  # fmt: skip
    assert found.loads == (2, 4, 16)
    assert found.stores == (8,)
    assert found.local == 0


def test_local_memory() -> None:
    """A stack and accesses to it are seen."""
    found = code("STL [R1], R2", "LDL.64 R2, [R1]", stack=16)
    assert (found.stack, found.local) == (16, 2)


def test_nothing_to_read_is_an_error() -> None:
    """Text without an instruction is not the code of a kernel without faults."""
    with pytest.raises(NoDisassembler, match="no instruction"):
        read("kernel", "", "", "")


_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry fused(.param .u64 data)
{
    .reg .u64 %a<2>;
    .reg .f32 %f<5>;
    ld.param.u64 %a1, [data];
    ld.global.v2.f32 {%f1, %f2}, [%a1];
    OPERATION
    st.global.f32 [%a1], %f4;
    ret;
}
"""


def assembled(ptx: str, folder: Path) -> bytes:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: there is no assembler")
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "ptxas"
    source, out = folder / "code.ptx", folder / "code.cubin"
    source.write_text(ptx)
    subprocess.run([tool, "-arch=sm_90", source, "-o", out], check=True, capture_output=True)
    return out.read_bytes()


@pytest.mark.parametrize(
    ("operation", "contractions"),
    [("fma.rn.f32 %f4, %f1, %f2, %f2;", 1), ("mul.rn.f32 %f3, %f1, %f2;\n add.rn.f32 %f4, %f3, %f2;", 0)],
)
def test_an_assembled_kernel(operation: str, contractions: int, tmp_path: Path) -> None:
    """The real disassembler's text is understood, with and without a contraction."""
    ptx = _PTX.replace("OPERATION", operation)
    found = of_cubin("fused", ptx, assembled(ptx, tmp_path))
    assert found.contractions == contractions
    assert found.fused == contractions
    assert (found.loads, found.stores, found.stack) == ((8,), (4,), 0)


def test_a_binary_is_read_function_by_function(tmp_path: Path) -> None:
    """Each function has its own facts; a file that holds no machine code is an error, not a kernel without faults."""
    path = tmp_path / "library.cubin"
    path.write_bytes(assembled(_PTX.replace("OPERATION", "add.rn.f32 %f4, %f1, %f2;"), tmp_path))
    found = of_binary(path, "sm_90")
    assert list(found) == ["fused"]
    path.write_bytes(b"no binary at all")
    with pytest.raises(NoDisassembler):
        of_binary(path, "sm_90")


@pytest.mark.parametrize("tool", planted_faults.KERNELS)
def test_planted_faults_assemble(tool: str, tmp_path: Path) -> None:
    """The PTX of each planted fault is accepted, and is a kernel of the name that reports are searched for."""
    assert list(of_binary_text(planted_faults.ptx(tool), tmp_path)) == [planted_faults.KERNELS[tool]]


def of_binary_text(ptx: str, folder: Path) -> dict[str, object]:
    path = folder / "planted.cubin"
    path.write_bytes(assembled(ptx, folder))
    return dict(of_binary(path, "sm_90"))


def test_mangled_names() -> None:
    """A function is spelt as a profiler spells it; other names stay."""
    assert demangled("_ZN3one3twoEfi") == "one::two(float, int)"
    assert demangled("rotation_kernel") == "rotation_kernel"
    assert demangled("_Z") == "_Z"
