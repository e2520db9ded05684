"""Faults planted to see a sanitizer detect: one small kernel for each tool, in PTX, which the driver itself compiles.

Each does what its tool exists to report and nothing else. They are launched through the CUDA driver's own interface,
so that neither a compiler nor triton is needed where they run.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

THREADS = 64
"""One block of this many threads: two warps, so that warps can race and disagree."""

_HEAD = f"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry KERNEL(.param .u64 data, .param .u64 result)
{{
    .reg .u64 %a<5>;
    .reg .u32 %v<4>;
    .reg .pred %p;
    .shared .align 4 .b8 cells[{4 * THREADS}];
    ld.param.u64 %a1, [data];
    cvta.to.global.u64 %a1, %a1;
    ld.param.u64 %a2, [result];
    cvta.to.global.u64 %a2, %a2;
    mov.u32 %v1, %tid.x;
    mul.wide.u32 %a3, %v1, 4;
    add.u64 %a1, %a1, %a3;
    add.u64 %a2, %a2, %a3;
"""
_TAIL = """
    st.global.u32 [%a2], %v2;
    ret;
}
"""

# %a1 is the address of this thread's element of data, %a2 that of result, %v1 the thread; %v2 is what is stored.
_BODIES = {
    "memcheck": (
        "planted_read_out_of_bounds",
        f"    ld.global.u32 %v2, [%a1+{4 * THREADS}];",
    ),
    "racecheck": (
        "planted_shared_memory_race",
        """
    mov.u32 %v3, cells;
    mad.lo.u32 %v2, %v1, 4, %v3;
    st.shared.u32 [%v2], %v1;
    xor.b32 %v2, %v1, 32;
    mad.lo.u32 %v2, %v2, 4, %v3;
    ld.shared.u32 %v2, [%v2];""",
    ),
    "initcheck": (
        "planted_read_of_unwritten_memory",
        "    ld.global.u32 %v2, [%a1];",
    ),
    "synccheck": (
        "planted_divergent_barrier",
        """
    mov.u32 %v2, %v1;
    setp.ge.u32 %p, %v1, 16;
    @%p bra past;
    bar.sync 0;
past:""",
    ),
}

KERNELS = {tool: name for tool, (name, _) in _BODIES.items()}
"""The name of each tool's planted kernel, as reports show it."""


def ptx(tool: str) -> str:
    """The PTX of the fault that ``tool`` is to report."""
    name, body = _BODIES[tool]
    return _HEAD.replace("KERNEL", name) + body + _TAIL


def launch(tool: str) -> None:
    """Run the fault that ``tool`` is to report, on the current GPU, and wait for it. Raises RuntimeError."""
    # Never written, and exactly as long as the threads of the block need.
    data, result = (torch.empty(THREADS, dtype=torch.int32, device="cuda") for _ in range(2))
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), ptx(tool).encode() + b"\0"))
    name = KERNELS[tool].encode()
    _check("cuModuleGetFunction", driver.cuModuleGetFunction(ctypes.byref(function), module, name))
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (data, result)]
    arguments: Any = (ctypes.c_void_p * 2)(*(ctypes.addressof(pointer) for pointer in pointers))
    _check("cuLaunchKernel", driver.cuLaunchKernel(function, 1, 1, 1, THREADS, 1, 1, 0, None, arguments, None))
    torch.cuda.synchronize()


def _check(call: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{call} of a planted fault returns {status}")
