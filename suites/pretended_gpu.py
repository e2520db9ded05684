"""A GPU that is not there: CPU tensors that call themselves CUDA's, and launches that end with the compiled kernel.

For the process that compiles a candidate's Triton kernels. Tensors keep memory of their own, so that what a wrapper
computes from their values still works; only outputs of the kernels are left unwritten. Whatever else a wrapper asks
of the device is answered for an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_GPU = torch.device("cuda", 0)
_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=150_754_820_096,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448, shared_memory_per_multiprocessor=233_472,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, L2_cache_size=62_914_560,
)  # fmt: skip


@dataclass
class Launches:
    """(name, PTX, cubin) of each kernel that was launched, in order; and what Triton said of one it refused."""

    kernels: list[tuple[str, str, bytes]] = field(default_factory=list)
    fault: str = ""


class _Driver:
    """What Triton's launcher asks of its driver before it launches."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return _GPU


def _on_cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


class _PlacedOnCpu(TorchFunctionMode):
    """Whatever is to be put on a GPU is put on the CPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function is torch.device:
            return function(*arguments, **keywords)
        if function is Tensor.cuda:
            return arguments[0]
        return function(*map(_on_cpu, arguments), **{name: _on_cpu(value) for name, value in keywords.items()})


class _DispatchedToGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Registered operators run the kernel that they have for CUDA, which is the one that launches."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        own = function.namespace not in ("aten", "prim", "prims")
        if own and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CUDA"):
            with self, _PlacedOnCpu():
                return function.redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments, **keywords)
        return function(*arguments, **keywords)


@contextmanager
def pretended_gpu(capability: int) -> Iterator[Launches]:
    """Within the block every tensor is on ``cuda:0`` and Triton compiles for ``capability``, ten times the version."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches = Launches()
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        try:
            kernel = run(self, *arguments, grid=grid, warmup=True, **keywords)
        except CompilationError as error:
            launches.fault = f"kernel {self.fn.__name__} does not compile: {' '.join(str(error).split())[-200:]}"
            raise
        launches.kernels.append((self.fn.__name__, kernel.asm["ptx"], kernel.asm["cubin"]))
        return kernel

    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (capability // 10, capability % 10),
        "get_device_properties": lambda device=None: _H200, "get_device_name": lambda device=None: _H200.name,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, device=_GPU),
        "synchronize": lambda device=None: None, "set_device": lambda device: None,
        "is_current_stream_capturing": lambda: False,
        "_exchange_device": lambda device: 0, "_maybe_exchange_device": lambda device: 0,
    }  # fmt: skip
    driver.set_active(_Driver(capability))
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name, value in (("device", property(lambda _: _GPU)), ("is_cuda", property(lambda _: True)),
                            ("get_device", lambda _: 0)):  # fmt: skip
            stack.enter_context(patch.object(Tensor, name, value))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        stack.enter_context(_PlacedOnCpu())
        stack.enter_context(_DispatchedToGpu())  # type: ignore[no-untyped-call]
        yield launches
