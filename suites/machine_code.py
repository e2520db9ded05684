"""Machine code as facts: what PTX and SASS say of contraction, flushing, local memory and the width of accesses.

Read from text, so no GPU is needed: SASS is what ``cuobjdump`` prints, which comes with triton and with the CUDA
toolkit. In SASS a fused instruction is not always a contraction. One with a zero multiplicand moves a constant, one
with a zero addend is a product, one with the multiplicand 1 a sum: these are not counted. Correctly rounded roots and
divisions are made of fused instructions; where a function holds one, ``expands_functions`` says so.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FUSED_PTX = re.compile(r"\bfma\.r[nzmp](?:\.ftz)?(?:\.sat)?\.f(?:32|32x2|64)\b")
_FUSED_SASS = re.compile(r"(?:FFMA|DFMA|HFMA2)\w*")
# Conversions flush too, in the division of integers, where nothing is subnormal.
_ARITHMETIC = re.compile(r"F(?:ADD|MUL|FMA)|H(?:ADD|MUL|FMA)2")
_EXPANSION = re.compile(r"FCHK|MUFU\.(?:RSQ|SQRT|EX2|LG2|SIN|COS|TANH)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s*([^\s:]+):?\s*$", re.MULTILINE)
_LOADS = re.compile(r"(?:LDG|LDGSTS|LD)\b")
_STORES = re.compile(r"(?:STG|ST)\b")
_LOCAL = re.compile(r"(?:LDL|STL)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


class NoDisassembler(Exception):  # noqa: N818 - it says what a machine lacks
    """There is no ``cuobjdump``, or it cannot read what it was given. The message is one sentence."""


@dataclass(frozen=True)
class KernelCode:
    """The facts of one kernel.

    ``ptx_fused`` and ``ptx_flushing`` count instructions of its PTX, None where there is none; ``fused`` and
    ``flushing`` those of its SASS. ``loads`` and ``stores`` are the widths in bytes of accesses to global memory.
    ``stack`` is bytes a thread, ``local`` the number of accesses to local memory.
    """

    name: str
    ptx_fused: int | None
    ptx_flushing: int | None
    fused: int
    flushing: int
    expands_functions: bool
    stack: int
    local: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]

    @property
    def contractions(self) -> int:
        """Products that lose their rounding. SASS is not asked where it expands a root or a division."""
        return (self.ptx_fused or 0) or (0 if self.expands_functions else self.fused)

    @property
    def flushes(self) -> int:
        """Instructions that take subnormal numbers for zero; SASS is asked where there is no PTX."""
        if self.ptx_flushing is not None:
            return self.ptx_flushing
        return 0 if self.expands_functions else self.flushing


def read(name: str, ptx: str | None, sass: str, resources: str) -> KernelCode:
    """The facts of one kernel from its PTX, its SASS and the line of its resource usage."""
    instructions = [(match[1], match[2]) for match in _INSTRUCTION.finditer(sass)]
    if not instructions:
        raise NoDisassembler(f"cuobjdump shows no instruction of {name}")
    opcodes = [opcode for opcode, _ in instructions]
    stack = re.search(r"STACK:(\d+)", resources)
    return KernelCode(
        name=name,
        ptx_fused=None if ptx is None else len(_FUSED_PTX.findall(ptx)),
        ptx_flushing=None if ptx is None else len(re.findall(r"\.ftz\b", ptx)),
        fused=sum(_contracts(opcode, operands) for opcode, operands in instructions),
        flushing=sum(".FTZ" in opcode for opcode in opcodes if _ARITHMETIC.match(opcode)),
        expands_functions=any(_EXPANSION.match(opcode) for opcode in opcodes),
        stack=int(stack[1]) if stack else 0,
        local=sum(bool(_LOCAL.match(opcode)) for opcode in opcodes),
        loads=_widths(opcode for opcode in opcodes if _LOADS.match(opcode)),
        stores=_widths(opcode for opcode in opcodes if _STORES.match(opcode)),
    )


def _contracts(opcode: str, operands: str) -> bool:
    """Whether a SASS instruction fuses a product into a sum."""
    if not _FUSED_SASS.match(opcode):
        return False
    # A packed immediate takes two places: HFMA2 R1, R2, 1, 1, R3.
    _, *values = (operand.strip().lstrip("-+|").partition(".")[0] for operand in operands.split(","))
    zeros, ones = [v in ("RZ", "0") for v in values], [v == "1" for v in values]
    return not (any(zeros[:2]) or zeros[-1] or any(ones[:2]))


def _widths(opcodes: Iterable[str]) -> tuple[int, ...]:
    """Bytes that each access moves, in increasing order, none twice; 4 where the instruction does not say."""
    return tuple(sorted({next((_BYTES[p] for p in o.split(".")[1:] if p in _BYTES), 4) for o in opcodes}))


def of_cubin(name: str, ptx: str | None, cubin: bytes) -> KernelCode:
    """The facts of a kernel compiled by Triton. Raises :class:`NoDisassembler`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return read(name, ptx, _cuobjdump("-sass", file.name), _cuobjdump("-res-usage", file.name))


def of_binary(path: Path, architecture: str) -> dict[str, KernelCode]:
    """The facts of every kernel in a shared library or executable, by mangled name.

    ``architecture`` such as ``sm_90`` picks what is read of a binary for several. Raises :class:`NoDisassembler`,
    also for a binary without machine code for it.
    """
    return _of_binary(path, architecture, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _of_binary(path: Path, architecture: str, changed: int) -> dict[str, KernelCode]:
    choice = ("-arch", architecture, str(path))
    sass, resources = dict(_functions(_cuobjdump("-sass", *choice))), _cuobjdump("-res-usage", *choice)
    usage = dict(_functions(resources))
    found = {name: read(name, None, code, usage.get(name, "")) for name, code in sass.items()}
    if not found:
        raise NoDisassembler(f"{path.name} holds no machine code for {architecture}")
    return found


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each function of what cuobjdump prints."""
    heads = list(_FUNCTION.finditer(text))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        yield head[1], text[head.end() : following.start() if following else len(text)]


def _cuobjdump(*arguments: str) -> str:
    tool = disassembler()
    if tool is None:
        raise NoDisassembler("there is no cuobjdump, in the triton wheel or in a CUDA toolkit on the path")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoDisassembler(f"cuobjdump {arguments[0]} ends with status {done.returncode}: {' '.join(said)[:200]}")
    return done.stdout


@functools.cache
def disassembler() -> str | None:
    """Path of ``cuobjdump``, None where there is none."""
    specification = importlib.util.find_spec("triton")
    for root in (specification.submodule_search_locations or ()) if specification else ():
        inside = Path(root) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if inside.is_file():
            return str(inside)
    return shutil.which("cuobjdump")
