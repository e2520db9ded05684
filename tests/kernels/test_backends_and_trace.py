"""Which backend runs is explicit, recorded, and never a silent fallback."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from ropecheck.kernels import (
    LAUNCH_CONFIGURATIONS,
    Launch,
    LaunchConfiguration,
    forced_configuration,
    interpreted_launches,
    multi_axis_rope,
    trace_launches,
)
from ropecheck.kernels.backends import choose_backend
from ropecheck.kernels.launch_configuration import configuration_for

AUTO_ON_CPU = "auto: a cpu tensor is rotated by the reference"


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 5, 3, 8, requires_grad=True), torch.randn(5, 4), torch.randn(5, 4)


def record(direction: str, reason: str) -> Launch:
    return Launch("multi_axis_rope_reference", "reference", direction, "cpu", None, reason)


def run_child(code: str, **environment: str) -> str:
    """What a fresh interpreter printed."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: its refusals cannot be provoked")


def test_trace_records_both_directions_and_the_reason() -> None:
    """auto on a CPU tensor runs the reference, forward and backward, and says why."""
    x, cos, sin = operands()
    with trace_launches() as launches:
        multi_axis_rope(x, cos, sin).sum().backward()
    assert launches == [record("forward", AUTO_ON_CPU), record("backward", AUTO_ON_CPU)]


def test_trace_records_what_was_requested_and_raw_calls() -> None:
    """An explicit backend and a direct call of the operator have reasons of their own."""
    x, cos, sin = operands()
    with trace_launches() as launches:
        multi_axis_rope(x, cos, sin, backend="reference")
        torch.ops.ropecheck.multi_axis_rope_reference(x, cos, sin, False, False)
    assert launches == [record("forward", "requested"), record("forward", "operator called directly")]


def test_traces_nest_and_end() -> None:
    """Equal but distinct recorders each get what ran within their own block and nothing after it."""
    x, cos, sin = operands()
    with trace_launches() as outer, trace_launches() as inner:
        assert outer == inner
    with trace_launches() as outer:
        with trace_launches() as inner:
            multi_axis_rope(x, cos, sin)
        multi_axis_rope(x, cos, sin)
    multi_axis_rope(x, cos, sin)
    assert (len(outer), len(inner)) == (2, 1)


def test_trace_sees_other_threads() -> None:
    """A backward in another thread is recorded, as autograd runs it there for a GPU."""
    x, cos, sin = operands()
    y = multi_axis_rope(x, cos, sin)
    with trace_launches() as launches:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
    assert launches == [record("backward", AUTO_ON_CPU)]


def test_empty_input_leaves_no_record() -> None:
    """Nothing is executed for an empty input."""
    with trace_launches() as launches:
        multi_axis_rope(torch.randn(0, 5, 3, 8), torch.randn(5, 4), torch.randn(5, 4))
    assert launches == []


def test_auto_chooses_by_device() -> None:
    """auto is the reference for any device but cuda."""
    assert choose_backend("auto", torch.device("cpu")) == ("reference", AUTO_ON_CPU)
    assert choose_backend("auto", torch.device("meta"))[0] == "reference"
    require_triton()
    assert choose_backend("auto", torch.device("cuda")) == ("triton", "auto: a cuda tensor is rotated by triton")


REFUSED_CALLS = """
import contextlib, torch
from ropecheck.kernels import interpreted_launches, multi_axis_rope
x, t = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
for call in (
    lambda: multi_axis_rope(x, t, t, backend="triton"),
    lambda: torch.ops.ropecheck.multi_axis_rope_triton(x, t, t, False, False),
):
    try:
        with DECLARATION:
            call()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("environment", "declaration", "message"),
    [
        ({}, "contextlib.nullcontext()", "backend: 'triton' needs a cuda tensor, got one on cpu"),
        ({}, "interpreted_launches()", "backend: 'triton' needs a cuda tensor, got one on cpu"),
        ({"TRITON_INTERPRET": "1"}, "contextlib.nullcontext()", "backend: 'triton' is interpreted in this process"),
    ],
    ids=["compiled", "compiled, declared", "interpreted, not declared"],
)
def test_triton_on_a_cpu_tensor_is_refused(environment: dict[str, str], declaration: str, message: str) -> None:
    """Without interpreter and declaration neither the function nor the raw operator runs Triton, or falls back."""
    require_triton()
    printed = run_child(REFUSED_CALLS.replace("DECLARATION", declaration), **environment).splitlines()
    assert [line.startswith(message) for line in printed] == [True, True]


def test_package_works_without_triton() -> None:
    """Rotating needs no triton and imports none; asking for it re-raises its own error, and auto records that error."""
    code = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("triton was built for another machine")

import torch
from ropecheck.kernels import multi_axis_rope
from ropecheck.kernels.backends import choose_backend

x, t = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
assert multi_axis_rope(x, t, t).shape == x.shape
assert "triton" not in sys.modules
sys.meta_path.insert(0, Broken())
for call in (
    lambda: multi_axis_rope(x, t, t, backend="triton"),
    lambda: torch.ops.ropecheck.multi_axis_rope_triton(x, t, t, False, False),
):
    try:
        call()
    except ImportError as error:
        print(error)
print(*choose_backend("auto", torch.device("cuda")), sep="|")
"""
    message = "triton was built for another machine"
    assert run_child(code).splitlines() == [
        message,
        message,
        f"reference|auto: triton cannot be imported (ImportError: {message})",
    ]


def test_backend_choice_for_a_gpu_is_traced_without_a_break() -> None:
    """Choosing Triton for a CUDA tensor leaves a compiled graph whole."""
    require_triton()

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if choose_backend("auto", torch.device("cuda"))[0] == "triton" else 2)

    assert torch.compile(chosen, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1


def test_forced_configuration_is_fitted_and_released() -> None:
    """Within the block the forced entry is used, no larger than the input; after it the table's own."""
    arguments: dict[str, Any] = {"sequence": 4096, "heads": 24, "head_dim": 128, "interpreted": False}
    usual = configuration_for(**arguments)
    for configuration in LAUNCH_CONFIGURATIONS:
        with forced_configuration(configuration):
            assert configuration_for(**arguments) == configuration
            fitted = configuration_for(sequence=3, heads=1, head_dim=128, interpreted=False)
        assert fitted == LaunchConfiguration(min(configuration.tokens, 4), 1, configuration.warps)
    assert configuration_for(**arguments) == usual


def test_forced_configurations_nest() -> None:
    """Leaving an inner block restores the configuration of the block around it."""
    first, second = LAUNCH_CONFIGURATIONS[:2]
    with forced_configuration(first), forced_configuration(second):
        with forced_configuration(first):
            pass
        assert configuration_for(64, 64, 128, interpreted=False) == second


def test_unknown_configuration_is_refused() -> None:
    """Only entries of the table can be forced."""
    unknown = LaunchConfiguration(3, 5, 1)
    with pytest.raises(ValueError, match=r"^configuration: expected an entry"), forced_configuration(unknown):
        pass


@pytest.mark.parametrize("sequence", [1, 2, 4096])
@pytest.mark.parametrize("heads", [1, 7, 8, 24, 64])
@pytest.mark.parametrize("head_dim", [2, 128, 256])
def test_every_shape_has_a_legal_block(sequence: int, heads: int, head_dim: int) -> None:
    """Blocks are powers of two, as Triton demands, and a compiled launch uses an entry of the table, fitted."""
    chosen = configuration_for(sequence, heads, head_dim, interpreted=False)
    assert chosen.tokens & (chosen.tokens - 1) == 0
    assert chosen.heads & (chosen.heads - 1) == 0
    assert chosen in [configuration.fitted(sequence, heads) for configuration in LAUNCH_CONFIGURATIONS]


def test_declaration_ends_with_its_block() -> None:
    """interpreted_launches() is withdrawn when its block ends, also by an error."""
    from ropecheck.kernels.backends import require_launchable

    def fail_within() -> None:
        with interpreted_launches():
            require_launchable(True, torch.device("cpu"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    with pytest.raises(RuntimeError, match="interpreted in this process"):
        require_launchable(True, torch.device("cpu"))
