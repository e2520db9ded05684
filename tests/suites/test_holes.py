"""Faults that once passed, right kernels that once failed, and what a candidate does to the process around it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropecheck.suites.candidates import Candidate, CandidateError, described
from ropecheck.suites.cases import Case, Inputs
from ropecheck.suites.judging import judge
from ropecheck.suites.surroundings import flushes_subnormals

Failing = Callable[..., dict[str, str]]


def right(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """Plain torch, partial rotary by slices: autograd adds the parts of its gradient to zeros."""
    turned = 2 * cos.shape[-1]
    x0, x1 = x[..., :turned:2].float(), x[..., 1:turned:2].float()
    c, s = cos.unsqueeze(-2), (-sin if conjugate else sin).unsqueeze(-2)
    y = torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((y, x[..., turned:]), dim=-1)


def by_matrix_product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A 2 x 2 matrix on each lane: an accumulator that starts at +0."""
    pairs = x.float().unflatten(-1, (-1, 2))
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turn = torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)
    return (turn * pairs.unsqueeze(-2)).sum(-1).flatten(-2).to(x.dtype)


def candidate(run: Callable[..., object], *claims: str, **fields: object) -> Candidate:
    return Candidate("c", "qwen-image", run, devices=("cpu",), provides=claims, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradient_added_to_zeros_is_right(failing: Failing, dtype: str) -> None:
    """In rotated channels and in the tail, before and after the last rounding."""
    claims = ("vjp", "any-shape", "conjugate")
    found = failing(candidate(right, *claims, dtypes=(dtype,)), "standard", ("accuracy-vjp",), only="special")
    found |= failing(candidate(right, *claims, dtypes=(dtype,)), "standard", ("accuracy-vjp",), only="magnitudes")
    assert found == {}


def test_accumulation_from_zero_is_right(failing: Failing) -> None:
    """-0 + -0 onto +0 is +0."""
    assert failing(candidate(by_matrix_product), "standard", ("accuracy-forward",), only="special") == {}


def test_negative_view_is_right(failing: Failing) -> None:
    """torch marks some results as negated instead of negating them."""
    lazily = candidate(lambda x, cos, sin: torch._neg_view(-right(x, cos, sin)), dtypes=("float32",))
    assert failing(lazily, "smoke", ("accuracy-forward",)) == {}


def wrong_under_autograd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Another path where a gradient is wanted, wrong by one."""
    y = right(x, cos, sin)
    return y + 1 if torch.is_grad_enabled() else y


def test_forward_under_autograd(failing: Failing) -> None:
    """Only the judgements that ask for a gradient, of x or of a table, take that path."""
    found = failing(candidate(wrong_under_autograd, "vjp", dtypes=("float32",)), "smoke")
    assert list(found) == ["accuracy-vjp", "table-gradient"]


def test_declared_in_place_but_is_not(failing: Failing) -> None:
    """The right answer in other memory leaves x unrotated."""
    found = failing(candidate(right, in_place=True, dtypes=("float32",)), "smoke", ("accuracy-forward",))
    assert list(found) == ["accuracy-forward"]


class _Buffers:
    """One output buffer for each shape, used again by the next call."""

    def __init__(self) -> None:
        self.of: dict[object, Tensor] = {}

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        buffer = self.of.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return buffer.copy_(right(x, cos, sin))


class _CachedTable:
    """The table is prepared once for each tensor object and never read again."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kept = self.of.setdefault(id(cos), (cos, cos.clone(), sin.clone()))
        return right(x, kept[1], kept[2])


class _ShortAfterLong:
    """Frequencies that were switched by a long sequence stay switched for the next short one."""

    def __init__(self) -> None:
        self.longest = 0

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        stale = self.longest > 200 and x.shape[1] < 100
        self.longest = x.shape[1]
        return right(x, cos, sin) * (0.5 if stale else 1)


@pytest.mark.parametrize("kind", [_Buffers, _CachedTable, _ShortAfterLong])
def test_state_between_calls(failing: Failing, kind: type[_Buffers | _CachedTable | _ShortAfterLong]) -> None:
    """Repeatability sees an output that is overwritten, a table that is not read again, and a mode that stays."""
    found = failing(candidate(kind().run, dtypes=("float32",)), "standard", ("repeatability",))
    assert list(found) == ["repeatability"]


def sine_by_the_strides_of_the_cosine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One set of strides for both tables."""
    return right(x, cos, torch.as_strided(sin, cos.shape, cos.stride(), sin.storage_offset()))


def test_tables_of_unlike_strides(failing: Failing) -> None:
    """Both tables otherwise lie alike in every case."""
    guilty = candidate(sine_by_the_strides_of_the_cosine, "strided", dtypes=("float32",))
    assert list(failing(guilty, "standard", ("accuracy-forward",), only="sin=")) == ["accuracy-forward"]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return right(x, cos, sin)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if not gradient.is_contiguous():
            raise RuntimeError("gradient must be contiguous")
        cos, sin = ctx.saved_tensors
        return right(gradient, cos, -sin), None, None


def test_upstream_gradient_of_a_sum(failing: Failing) -> None:
    """The gradient of a sum is expanded: a backward has to take it without any further claim."""
    choosy = candidate(_Backward.apply, "vjp", dtypes=("float32",))
    found = failing(choosy, "standard", ("accuracy-vjp",), only="gradient=")
    assert "gradient must be contiguous" in found["accuracy-vjp"]


def contracted_when_conjugate(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """fp64, rounded once, on one path only."""
    return _wide(x, cos, -sin) if conjugate else right(x, cos, sin)


def _wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x0, x1 = x[..., 0::2].double(), x[..., 1::2].double()
    c, s = cos.unsqueeze(-2).double(), sin.unsqueeze(-2).double()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).float()


def test_strict_on_every_path(failing: Failing) -> None:
    """The conjugate path is held to the claim too."""
    guilty = candidate(contracted_when_conjugate, "strict", "conjugate", dtypes=("float32",))
    assert list(failing(guilty, "standard", ("strict-bytes",), only="conjugate")) == ["strict-bytes"]


class _Subclass(Tensor):
    pass


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def _raising(error: BaseException) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        raise error

    return run


def _setting(change: Callable[[], object]) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = right(x, cos, sin)
        change()
        return y

    return run


CASE = Case("accuracy-forward", "qwen-image", "cpu", "float32", Inputs())


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_raising(GeneratorExit()), "run raised GeneratorExit"),
        (_raising(SystemExit(0)), "run raised SystemExit"),
        (_raising(_UnspeakableError()), "its message cannot be shown"),
        (_raising(ValueError("\x1b[31m \udce9")), r"\x1b[31m \udce9"),
        (lambda x, cos, sin: right(x, cos, sin).to_sparse(), "layout torch.sparse_coo"),
        (lambda x, cos, sin: right(x, cos, sin).as_subclass(_Subclass), "a subclass of torch.Tensor"),
        (lambda x, cos, sin: right(x, cos, sin).to("meta"), "returned device meta"),
        (_setting(lambda: torch.set_default_dtype(torch.float64)), "leaves torch's default dtype changed"),
        (_setting(lambda: torch.set_default_device("meta")), "leaves torch's default device changed"),
        (_setting(lambda: torch.set_flush_denormal(True)), "treatment of subnormal numbers changed"),
        (_setting(lambda: torch.set_grad_enabled(True)), "leaves torch's gradient mode changed"),
    ],
)
def test_the_fault_is_the_candidates(run: Callable[..., Tensor], says: str) -> None:
    """Whatever a candidate raises, returns or changes is its own failure, in plain text, and is put back."""
    verdict = judge(candidate(run), CASE, 0)
    assert verdict.verdict == "fail", verdict.reason
    assert says in verdict.reason
    assert verdict.reason.isprintable()
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert not flushes_subnormals()


def test_interrupt_in_a_worker_is_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker ignores the terminal's interrupt; outside a worker it ends the session."""
    interrupting = candidate(_raising(KeyboardInterrupt()))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert judge(interrupting, CASE, 0).verdict == "fail"
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    with pytest.raises(KeyboardInterrupt):
        judge(interrupting, CASE, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "é/x"), ("unavailable", True), ("in_place", 1), ("configs", ["a"]), ("kernels", "k"), ("sources", "s")],
)
def test_wrong_types_are_refused(field: str, value: object) -> None:
    """Each with one sentence that names the field."""
    fields = {"name": "c", "contract": "neox", "run": right, "devices": ("cpu",), field: value}
    with pytest.raises(CandidateError, match=field):
        Candidate(**fields)  # type: ignore[arg-type]


def test_description_is_one_line() -> None:
    """A long message with newlines in it stays one line, with the place of the error."""
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError as error:
        text = described(error)
    assert text.startswith("RuntimeError: first second (")
    assert "\n" not in text


def test_package_in_the_working_directory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """``package.module:attribute`` finds a package beside the person who types it."""
    from pathlib import Path

    from ropecheck.suites.candidates import load_candidates

    package = Path(str(tmp_path)) / "beside_me"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "from ropecheck.suites import Candidate\nONE = Candidate('m/one', 'neox', print, devices=('cpu',))\n"
    (package / "rope.py").write_text(text)
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert [c.name for c in load_candidates("beside_me.rope:ONE")] == ["m/one"]
