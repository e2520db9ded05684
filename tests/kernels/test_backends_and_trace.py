"""Which backend runs is explicit, recorded, and never a silent fallback."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
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
    multi_axis_rope_pair,
    operators,
    trace,
    trace_launches,
)
from ropecheck.kernels.backends import choose_backend
from ropecheck.kernels.launch_configuration import configuration_for
from ropecheck.kernels.native import NativeLibrary

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
    """auto is the reference for any device but cuda, whatever could be loaded."""
    for failure in ("", "OSError: broken"):
        assert choose_backend("auto", torch.device("cpu"), failure, failure) == ("reference", AUTO_ON_CPU)
        assert choose_backend("auto", torch.device("meta"), failure, failure)[0] == "reference"


def raising(error: Exception) -> Callable[[str], None]:
    """A loader that fails."""

    def load(path: str) -> None:
        raise error

    return load


LIBRARY_ERRORS: dict[str, Exception] = {
    "absent": FileNotFoundError("no library"),
    "ImportError": ImportError("made from other sources"),
    "OSError": OSError("libtorch_cpu.so: undefined symbol"),
    "RuntimeError": RuntimeError("registered twice"),
}


class BrokenLibrary(NativeLibrary):
    """A fresh registry whose one library fails to load with the given error, as often as it is asked."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Path("libropecheck_cuda.so"), raising(error))

    def _check(self) -> None:
        """The file is not what fails."""


@pytest.mark.parametrize("case", LIBRARY_ERRORS)
def test_auto_passes_over_a_broken_library_and_says_why(case: str) -> None:
    """auto on a CUDA tensor moves on from the native library to Triton, and from there to the reference."""
    error = LIBRARY_ERRORS[case]
    failure = BrokenLibrary(error).failure()
    why = f"auto: the native library cannot be loaded ({type(error).__name__}: {error})"
    device = torch.device("cuda", 1)
    assert choose_backend("auto", device, "", "") == ("cuda", "auto: a cuda tensor is rotated by the native library")
    assert choose_backend("auto", device, failure, "") == ("triton", f"{why}; a cuda tensor is rotated by triton")
    assert choose_backend("auto", device, failure, "ImportError: no triton") == (
        "reference",
        f"{why}; triton cannot be imported (ImportError: no triton); a cuda tensor is rotated by the reference",
    )


@pytest.mark.parametrize("case", LIBRARY_ERRORS)
def test_an_explicit_request_raises_the_original_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="cuda" and the raw operators raise the very object that loading raised, every time."""
    monkeypatch.setattr(operators, "NATIVE", BrokenLibrary(LIBRARY_ERRORS[case]))
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(5, 4), torch.randn(5, 4)
    for call in (
        lambda: multi_axis_rope(x, cos, sin, backend="cuda"),
        lambda: multi_axis_rope_pair(x, x.clone(), cos, sin, backend="cuda"),
        lambda: multi_axis_rope_pair(x, x.clone(), cos, sin, backend="cuda", in_place=True),
        lambda: torch.ops.ropecheck.multi_axis_rope_cuda(x, cos, sin, False, False),
    ):
        with pytest.raises(type(LIBRARY_ERRORS[case])) as caught:
            call()
        assert caught.value is LIBRARY_ERRORS[case]


@pytest.mark.parametrize("in_place", [False, True])
def test_cuda_on_a_cpu_tensor_is_refused(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that loads, a CPU tensor is refused in one sentence and not rotated by another backend."""

    class LoadedLibrary(BrokenLibrary):
        def load(self) -> None:
            """Nothing fails."""

    monkeypatch.setattr(operators, "NATIVE", LoadedLibrary(OSError()))
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(5, 4), torch.randn(5, 4)
    with trace_launches() as launches:
        with pytest.raises(RuntimeError, match=r"^backend: 'cuda' needs a cuda tensor, got one on cpu$"):
            multi_axis_rope(x, cos, sin, backend="cuda")
        with pytest.raises(RuntimeError, match=r"^backend: 'cuda' needs a cuda tensor, got one on cpu$"):
            multi_axis_rope_pair(x, x.clone(), cos, sin, backend="cuda", in_place=in_place)
    assert launches == []


def test_native_reports_are_on_while_any_trace_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trace turns the library's reports on, the last one off, and a report becomes a record."""
    receivers: list[Callable[..., None] | None] = []
    monkeypatch.setattr(trace, "report_launches_to", receivers.append)
    with trace_launches() as outer:
        with trace_launches() as inner:
            assert len(receivers) == 1
            assert receivers[0] is not None
            receivers[0]("multi_axis_rope_pair_cuda_", "forward", 1, "threads=128", "requested")
            receivers[0]("multi_axis_rope_cuda", "backward", 0, "", "operator called directly")
        assert len(receivers) == 1
    assert receivers[1:] == [None]
    assert (
        outer
        == inner
        == [
            Launch("multi_axis_rope_pair_cuda_", "cuda", "forward", "cuda:1", "threads=128", "requested"),
            Launch("multi_axis_rope_cuda", "cuda", "backward", "cuda:0", None, "operator called directly"),
        ]
    )


REFUSED_CALLS = """
import contextlib, torch
from ropecheck.kernels import interpreted_launches, multi_axis_rope, multi_axis_rope_pair
x, t = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
for call in (
    lambda: multi_axis_rope(x, t, t, backend="triton"),
    lambda: multi_axis_rope_pair(x, x, t, t, backend="triton"),
    lambda: multi_axis_rope_pair(x, x.clone(), t, t, backend="triton", in_place=True),
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
    assert [line.startswith(message) for line in printed] == [True] * 4


@pytest.mark.parametrize("error", [ImportError, ModuleNotFoundError])
def test_package_works_without_triton(error: type[ImportError]) -> None:
    """Where triton cannot be imported the package works; asking for it re-raises its own error, auto records that."""
    code = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ERROR("triton was built for another machine")

import torch
sys.meta_path.insert(0, Broken())
from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.kernels.backends import choose_backend

x, t = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
assert multi_axis_rope(x, t, t).shape == x.shape
for call in (
    lambda: multi_axis_rope(x, t, t, backend="triton"),
    lambda: multi_axis_rope_pair(x, x, t, t, backend="triton"),
    lambda: torch.ops.ropecheck.multi_axis_rope_triton(x, t, t, False, False),
):
    try:
        call()
    except ImportError as error:
        print(error)
print(*choose_backend("auto", torch.device("cuda"), "OSError: broken"), sep="|")
""".replace("ERROR", error.__name__)
    message = "triton was built for another machine"
    assert run_child(code).splitlines() == [
        *[message] * 3,
        "reference|auto: the native library cannot be loaded (OSError: broken); triton cannot be imported "
        f"({error.__name__}: {message}); a cuda tensor is rotated by the reference",
    ]


@pytest.mark.parametrize(
    ("failures", "number"), [(("", ""), 0), (("broken", ""), 1), (("broken", "broken"), 2)], ids=str
)
def test_backend_choice_for_a_gpu_is_traced_without_a_break(failures: tuple[str, str], number: int) -> None:
    """The choice for a CUDA tensor leaves a compiled graph whole, whichever libraries are there."""
    torch._dynamo.reset()

    def chosen(x: torch.Tensor) -> torch.Tensor:
        chosen, _ = choose_backend("auto", torch.device("cuda"), *failures)
        return x + ("cuda", "triton", "reference").index(chosen)

    assert torch.compile(chosen, backend="eager", fullgraph=True)(torch.zeros(1)).item() == number


def test_forced_configuration_is_fitted_and_released() -> None:
    """Within the block the forced entry is used, no larger than the input; after it the table's own."""
    arguments: dict[str, Any] = {"sequence": 4096, "heads": 24, "head_dim": 128, "interpreted": False}
    usual = configuration_for(**arguments)
    for configuration in LAUNCH_CONFIGURATIONS:
        with forced_configuration(configuration):
            assert configuration_for(**arguments) == configuration
            fitted = configuration_for(sequence=3, heads=1, head_dim=128, interpreted=False)
        # Tokens take the place of the heads that are not there, as far as there are tokens.
        assert fitted == LaunchConfiguration(min(configuration.tokens * configuration.heads, 4), 1, configuration.warps)
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
