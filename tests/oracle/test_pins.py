"""Vendor pins: text, drift, unequal bytes, absence, and the cases that are executed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ropecheck.oracle import pin_cases
from ropecheck.oracle.contracts import CONTRACTS, contract
from ropecheck.oracle.pin_cases import (
    QWEN_GRIDS,
    QWEN_LAYERED_GRIDS,
    QWEN_ROTATED_GRIDS,
    QWEN_UNCENTRED_GRIDS,
    describe_difference,
)
from ropecheck.oracle.pins import PinReport, check_pins, pin, pinned, source_sha256, syntax_sha256

QWEN = "diffusers.models.transformers.transformer_qwenimage"
HAS_DIFFUSERS = importlib.util.find_spec("diffusers") is not None
needs_diffusers = pytest.mark.skipif(not HAS_DIFFUSERS, reason="diffusers is not installed: nothing to patch")


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the small Qwen cases, for tests that are about verdicts."""
    monkeypatch.setattr(pin_cases, "QWEN_GRIDS", QWEN_GRIDS[:3])
    monkeypatch.setattr(pin_cases, "QWEN_ROTATED_GRIDS", QWEN_ROTATED_GRIDS[3:])


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _states(report: PinReport) -> dict[str, str]:
    return {symbol.name.partition(":")[2]: symbol.state for symbol in report.symbols}


@pytest.mark.parametrize("name", pinned())
def test_installed_vendor_agrees(name: str) -> None:
    """Where the vendor is installed its symbols give the contract's bytes; where it is not, nothing passes."""
    report = check_pins(contract(name))
    if importlib.util.find_spec(report.package) is None:
        assert report.state == "not-installed"
        assert not report.passed
        return
    assert report.first_unequal is None
    assert report.passed
    assert report.release == importlib.metadata.version(report.package)
    assert report.cases >= {"qwen-image": 84, "hf-llama": 60, "hf-vision-2d": 24, "qwen3.5-norm-rope-gate": 21}[name]
    if report.release in pin(name).releases:
        assert set(_states(report).values()) == {"known"}


def test_enough_grids() -> None:
    """At least sixty grids are compared, with every kind that the contract distinguishes."""
    every = [*QWEN_GRIDS, *QWEN_UNCENTRED_GRIDS, *QWEN_LAYERED_GRIDS]
    assert len(every) >= 60
    assert len(set(QWEN_GRIDS)) == len(QWEN_GRIDS)
    single = {grids[0] for grids, _ in QWEN_GRIDS if len(grids) == 1}
    assert {(1, 64, 64), (1, 83, 83), (1, 104, 58)} <= single
    rotated = set(QWEN_ROTATED_GRIDS)
    assert {((1, 64, 64),), ((1, 83, 83),), ((1, 104, 58),)} <= rotated
    assert any(len(g) > 1 for g in rotated)
    assert any(g[0][0] > 1 for g in rotated)
    assert any(1 in g[0][1:] for g in rotated)


def test_absent_package_is_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed is reported as such, without a release, and does not pass."""

    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    report = check_pins(contract("qwen-image"))
    assert (report.state, report.release, report.cases) == ("not-installed", None, 0)
    assert not report.passed


def _same_bytes(x: torch.Tensor, freqs_cis: torch.Tensor, use_real: bool = True) -> torch.Tensor:
    """The Qwen rotation in real numbers: other text, equal bytes."""
    assert not use_real
    cos, sin = freqs_cis.real.unsqueeze(1), freqs_cis.imag.unsqueeze(1)
    # unbind, for the gradient of a strided slice adds +0 and so loses the sign of a zero.
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


def _gradient_rounded_apart(x: torch.Tensor, freqs_cis: torch.Tensor, use_real: bool = True) -> torch.Tensor:
    """Equal bytes forward, but the pairs are split before they are widened: three roundings in the gradient."""
    assert not use_real
    cos, sin = freqs_cis.real.unsqueeze(1), freqs_cis.imag.unsqueeze(1)
    first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.stack(
        (first.float() * cos - second.float() * sin, first.float() * sin + second.float() * cos), dim=-1
    )
    return turned.flatten(-2).type_as(x)


def _raises(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no such rotation")


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
def test_unknown_text_with_equal_bytes_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source text that no release carries, with equal bytes, is reported as drift and passes."""
    monkeypatch.setattr(_module(QWEN), "apply_rotary_emb_qwen", _same_bytes)
    report = check_pins(contract("qwen-image"))
    assert report.state == "drift"
    assert report.passed
    assert report.first_unequal is None
    assert _states(report)["apply_rotary_emb_qwen"] == "drift"
    symbol = next(s for s in report.symbols if s.name.endswith(":apply_rotary_emb_qwen"))
    assert symbol.releases == ()
    assert symbol.source_sha256 == source_sha256(inspect.getsource(_same_bytes))
    assert not symbol.same_syntax


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(
    ("replacement", "said"),
    [(_gradient_rounded_apart, "gradient: element"), (_raises, "raised RuntimeError: no such rotation")],
    ids=["gradient", "raises"],
)
def test_unequal_bytes_fail(monkeypatch: pytest.MonkeyPatch, replacement: Any, said: str) -> None:
    """A changed gradient, or a symbol that raises, fails with a description of the first case that shows it."""
    monkeypatch.setattr(_module(QWEN), "apply_rotary_emb_qwen", replacement)
    report = check_pins(contract("qwen-image"))
    assert report.state == "unequal"
    assert not report.passed
    assert report.first_unequal is not None
    assert said in report.first_unequal
    assert "rotation of grid" in report.first_unequal
    assert _states(report)["apply_rotary_emb_qwen"] == "unequal"
    assert _states(report)["QwenEmbedRope"] == "known"


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
def test_changed_table_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor class whose positive table starts one position later fails, and other symbols stay known."""
    vendor: Any = _module(QWEN).QwenEmbedRope

    class Later(vendor):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.pos_freqs = self.pos_freqs.roll(1, 0)

    monkeypatch.setattr(_module(QWEN), "QwenEmbedRope", Later)
    report = check_pins(contract("qwen-image"))
    assert report.state == "unequal"
    assert report.first_unequal is not None
    assert "whole tables: positive table: element (0, 0, 0)" in report.first_unequal
    states = _states(report)
    assert states["QwenEmbedRope"] == states["QwenEmbedRope.forward"] == "unequal"
    assert states["QwenEmbedLayer3DRope"] == states["apply_rotary_emb_qwen"] == "known"


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
QWEN35 = "transformers.models.qwen3_5.modeling_qwen3_5"


def _time_row_only(self: Any, freq: torch.Tensor) -> torch.Tensor:
    return torch.cat((freq[0], freq[0]), dim=-1)


def _rounded_early(self: Any, x: torch.Tensor) -> torch.Tensor:
    normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
    return (normed.float() * (1.0 + self.weight.float())).type_as(x)


def _another_order(self: Any, x: torch.Tensor) -> torch.Tensor:
    total = x.double().pow(2).flip(-1).cumsum(-1)[..., -1:].float()
    return (x.float() / torch.sqrt(total / x.shape[-1] + self.eps) * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed: nothing to patch")
@pytest.mark.parametrize(
    ("owner", "method", "replacement", "said"),
    [
        ("Qwen3_5TextRotaryEmbedding", "recomposition_frequencies", _time_row_only, "axis map: axis map: element (1,)"),
        ("Qwen3_5RMSNorm", "forward", _rounded_early, "norm of 1 in torch.float16: norm, beside the nearest"),
        ("Qwen3_5RMSNorm", "forward", _another_order, None),
    ],
)
def test_qwen35_pin_sees_map_and_norm(
    monkeypatch: pytest.MonkeyPatch, owner: str, method: str, replacement: Any, said: str | None
) -> None:
    """A dropped axis and a norm that rounds too early fail; a norm that sums in another order passes."""
    monkeypatch.setattr(getattr(_module(QWEN35), owner), method, replacement)
    report = check_pins(contract("qwen3.5-norm-rope-gate"))
    assert report.passed == (said is None)
    if said is not None:
        assert report.first_unequal is not None
        assert report.first_unequal.startswith(said)
        assert _states(report)[owner] == "unequal"


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
def test_constructor_that_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor class that cannot be built any more is a failing case and not an error of the check."""
    monkeypatch.setattr(_module(QWEN), "QwenEmbedRope", _raises)
    report = check_pins(contract("qwen-image"))
    assert report.state == "unequal"
    assert report.first_unequal is not None
    assert report.first_unequal.startswith("grid, whole tables: raised RuntimeError: no such rotation")


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
def test_missing_symbol_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbol that the release ought to have and has not is missing, which does not pass."""
    monkeypatch.delattr(_module(QWEN), "apply_rotary_emb_qwen")
    report = check_pins(contract("qwen-image"))
    assert report.state == "missing"
    assert not report.passed
    symbol = next(s for s in report.symbols if s.name.endswith(":apply_rotary_emb_qwen"))
    assert symbol.reason is not None
    assert "apply_rotary_emb_qwen" in symbol.reason


@needs_diffusers
@pytest.mark.usefixtures("few_cases")
def test_cosmetic_drift_is_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed docstring and a comment make other text with the same syntax."""
    text = inspect.getsource(_module(QWEN).apply_rotary_emb_qwen)
    changed = text.replace("Apply rotary embeddings to input tensors", "Turn", 1) + "    # a comment\n"
    assert changed != text
    path = tmp_path / "reworded.py"
    path.write_text("from __future__ import annotations\nimport torch\n\n" + changed)
    spec = importlib.util.spec_from_file_location("reworded", path)
    assert spec is not None
    assert spec.loader is not None
    reworded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reworded)
    monkeypatch.setattr(_module(QWEN), "apply_rotary_emb_qwen", reworded.apply_rotary_emb_qwen)
    report = check_pins(contract("qwen-image"))
    symbol = next(s for s in report.symbols if s.name.endswith(":apply_rotary_emb_qwen"))
    assert (report.state, symbol.state, symbol.same_syntax) == ("drift", "drift", True)


SMALL = '''
@decorate(1)
def turn(x: int, *, y: float = 2.0) -> int:
    """Says something."""
    z: int = x
    return f"{z!r:>4}" if y else lambda q: q[..., 1:2]
'''


def test_syntax_hash_is_the_same_on_every_python() -> None:
    """The syntax hash is the one that Python 3.11 makes of this text, whatever Python runs."""
    assert syntax_sha256(SMALL) == "b1be68fc9118f4d8253a166db76d017f7379b00d78e3a14215f912359da06932"


def test_syntax_hash_sees_code_and_nothing_else() -> None:
    """Docstrings, comments, layout and signature annotations leave the syntax hash alone; code does not."""
    plain = SMALL.replace('    """Says something."""\n', "").replace("x: int, *, y: float", "x, *, y")
    plain = plain.replace(" -> int", "").replace("return f", "# remark\n    return f")
    assert source_sha256(plain) != source_sha256(SMALL)
    assert syntax_sha256(plain) == syntax_sha256(SMALL)
    assert syntax_sha256("\n".join("    " + line for line in SMALL.splitlines())) == syntax_sha256(SMALL)
    assert syntax_sha256(SMALL.replace("2.0", "3.0")) != syntax_sha256(SMALL)
    assert syntax_sha256(SMALL.replace("decorate(1)", "decorate(2)")) != syntax_sha256(SMALL)


def test_expected_symbols_follow_the_release() -> None:
    """A symbol is expected from the first release that has it on; between two recorded releases, perhaps."""
    recorded = pin("qwen-image")
    layered = "diffusers.models.transformers.transformer_qwenimage:QwenEmbedLayer3DRope"
    expected = {r: [layered in names for names in recorded.expected_symbols(r)] for r in recorded.releases}
    assert {r: e for r, e in expected.items() if e == [False]}.keys() == {"0.35.0", "0.35.1", "0.35.2", "0.36.0"}
    assert [layered in names for names in recorded.expected_symbols("0.36.5")] == [False, True]
    assert [layered in names for names in recorded.expected_symbols("1.0.0.dev0")] == [True]
    assert recorded.expected_symbols("0.1") == recorded.expected_symbols("0.35.0")
    vision = pin("hf-vision-2d")
    names = [{n.partition(":")[2] for n in names} for names in vision.expected_symbols("5.17.0")]
    assert ["VisionRotaryEmbedding" in n for n in names] == [True, False]
    assert ["Qwen2VLVisionRotaryEmbedding" in n for n in names] == [False, True]



@pytest.mark.parametrize("name", pinned())
def test_every_recorded_text_is_of_distinct_releases(name: str) -> None:
    """Per symbol each release has one text, hashes are whole, and no text is listed twice."""
    for texts in pin(name).symbols.values():
        releases = [r for text in texts for r in text.releases]
        assert len(releases) == len(set(releases))
        assert len({text.source_sha256 for text in texts}) == len(texts)
        assert all(len(text.source_sha256) == len(text.syntax_sha256) == 64 for text in texts)


def test_only_conventions_are_unpinned() -> None:
    """Each pin is of a contract, and the contracts without one are those that say that they are a convention."""
    assert set(pinned()) == {n for n, c in CONTRACTS.items() if not c.source.startswith("a convention")}
    assert {n.partition("-")[0] for n in set(CONTRACTS) - set(pinned())} == {"neox", "gptj", "mrope"}


@pytest.mark.parametrize("ask", [lambda: pin("neox"), lambda: check_pins(contract("neox"))], ids=["pin", "check_pins"])
def test_unpinned_contract_is_refused(ask: Callable[[], object]) -> None:
    """Asking for a pin that is not recorded, or checking it, names the contract and the pinned ones."""
    with pytest.raises(ValueError, match="contract 'neox' has no vendor pin; pinned are hf-llama, hf-vision-2d, qwen-"):
        ask()


def test_difference_counts_signed_zeros_and_shapes() -> None:
    """Zeros of unlike sign differ, equal tensors do not, and another shape or dtype is told as such."""
    zero = torch.tensor([1.0, 0.0])
    assert describe_difference(zero, zero.clone()) is None
    said = describe_difference(zero, torch.tensor([1.0, -0.0]))
    assert said is not None
    assert said.startswith("element (1,) is 0.0")
    assert "1 of 2 elements differ" in said
    assert "torch.float32 (2,)" in str(describe_difference(zero, zero.half()))
    assert describe_difference(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None


OFFLINE = """
import socket, sys
def refuse(*arguments, **named):
    raise OSError("a connection was attempted")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import ropecheck.oracle.pins as pins
from ropecheck.oracle.contracts import CONTRACTS
assert not {"diffusers", "transformers"} & set(sys.modules), "a vendor was imported"
print([pins.check_pins(c).release for n, c in CONTRACTS.items() if n in pins.pinned()])
"""


def test_quiet_offline_and_lazy() -> None:
    """Importing imports no vendor; checking makes no connection and leaves nothing on the error stream."""
    probe = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=120)
    assert probe.returncode == 0, probe.stderr
    assert probe.stderr == ""
    assert probe.stdout.count("\n") == 1
