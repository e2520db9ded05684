"""fullgraph: what a compiler cannot take whole, or takes otherwise than it runs, fails it, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.verdicts import Verdict

Failing = Callable[..., dict[str, str]]
Ask = Callable[..., list[Any]]


def refused(cos: Tensor, sin: Tensor) -> None:
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise ValueError("cos, sin: no gradient is computed")


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image in plain torch operations, forward and backward."""
    refused(cos, sin)
    wide, c, s = x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def truncated(y: Tensor) -> Tensor:
    """y with its last significant bit cleared."""
    return (y.view(torch.int16) & -2).view(y.dtype)


def breaking(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What is computed depends on a value, which a graph cannot know."""
    return rotation(x, cos, sin) if bool(x.isfinite().all()) else rotation(x * 1, cos, sin)


def truncating_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = rotation(x, cos, sin)
    return truncated(y) if torch.compiler.is_compiling() else y


class Rotation(torch.autograd.Function):
    """A right backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotation(gradients[0], cos, -sin), None, None


class TruncatingBackward(torch.autograd.Function):
    """A backward that truncates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return truncated(rotation(gradients[0], cos, -sin)), None, None


def by_function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    refused(cos, sin)
    y: Tensor = Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def truncating_backward_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    refused(cos, sin)
    function = TruncatingBackward if torch.compiler.is_compiling() else Rotation
    y: Tensor = function.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


class CountingCalls:
    """A number that changes with every call takes part in the graph."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.calls += 1
        return rotation(x, cos, sin) if self.calls > 0 and self.calls != -self.calls else x


LENGTHS = dict.fromkeys(range(1 << 12), 1.0)


def by_length(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Looks something up by the length: every length is a graph of its own."""
    return rotation(x, cos, sin) * LENGTHS[x.shape[1]] if x.shape[1] < 1 << 12 else rotation(x, cos, sin)


class KeepingTheTable:
    """Compiled, it goes on with the table of the first compiled call."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            cos, sin = self.kept.setdefault((*cos.shape,), (cos, sin))
        return rotation(x, cos, sin)


def of_own_bytes(name: str, finish: Callable[[Tensor], Tensor]) -> Any:
    """An opaque operator that ends in ``finish``."""

    def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return finish(rotate_reference(x, cos, sin, half_split=False, conjugate=False))

    operator = torch.library.custom_op(f"ropecheck_fullgraph_tests::{name}", kernel, mutates_args=())
    operator.register_fake(lambda x, cos, sin: torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return operator


OPAQUE = of_own_bytes("opaque", torch.clone)
OTHER_OPAQUE = of_own_bytes("other_opaque", lambda y: torch.where(y == y.flatten()[0], y.nextafter(y + 1), y))


def another_operator_when_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = (OTHER_OPAQUE if torch.compiler.is_compiling() else OPAQUE)(x, cos, sin)
    return y


@dataclass(frozen=True)
class Wrong:
    run: Callable[..., Tensor]
    reason: str
    claims: tuple[str, ...] = ("vjp", "strided", "compile")


WRONG = {
    "graph-break": Wrong(breaking, "the compiled run raised"),
    "truncating": Wrong(truncating_when_compiled, "are not admissible, whichever", ("strided", "compile")),
    "truncating-backward": Wrong(truncating_backward_when_compiled, "the gradient of compiled call 1:"),
    "compiled-by-call": Wrong(CountingCalls(), "a second call with the same sizes is compiled again"),
    "compiled-by-length": Wrong(by_length, "two calls with other sizes are compiled 2 times", ("compile",)),
    "table-of-the-first-call": Wrong(KeepingTheTable(), "y of compiled call 2:", ("strided", "compile")),
    "another-operator": Wrong(another_operator_when_compiled, "elements are not those of an eager call", ("compile",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_when_compiled_fails_alone(name: str, failing: Failing) -> None:
    """A candidate that is right when it runs eagerly and wrong when compiled fails fullgraph and nothing else."""
    wrong = WRONG[name]
    candidate = Candidate("wrong", "qwen-image", wrong.run, devices=("cpu",), provides=wrong.claims)
    reasons = failing(candidate, dtypes=("bfloat16",))
    assert list(reasons) == ["fullgraph"], reasons
    assert wrong.reason in reasons["fullgraph"]


def ours(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    return multi_axis_rope(x, cos, sin, conjugate=conjugate, backend="reference")


def our_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return multi_axis_rope_pair(q, k, cos, sin, backend="reference")


def our_pair_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    multi_axis_rope_pair(q, k, cos, sin, in_place=True, backend="reference")


def our_pair_in_place_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    multi_axis_rope_pair(q, k, cos, sin, conjugate=True, in_place=True, backend="reference")


CLAIMS = ("vjp", "strided", "any-shape", "compile")
RIGHT: dict[str, tuple[dict[str, Any], str]] = {
    "ours": ({"run": ours}, "opaque"),
    "our-pair": ({"run": our_pair, "family": "rotate_pair"}, "opaque"),
    "our-pair-in-place": (
        {"run": our_pair_in_place, "vjp": our_pair_in_place_back, "in_place": True, "family": "rotate_pair"},
        "opaque",
    ),
    "plain-torch": ({"run": rotation}, "composed"),
    "autograd-function": ({"run": by_function}, "composed"),
    "without-vjp": ({"run": OPAQUE, "provides": ("compile",)}, "opaque"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_when_compiled_passes(name: str, ask: Ask) -> None:
    """Operators and compositions pass with one compilation, and the evidence says which of both they are."""
    fields, graphs = RIGHT[name]
    candidate = Candidate("right", "qwen-image", devices=("cpu",), **{"provides": CLAIMS, **fields})
    verdicts = ask(candidate, "standard", ("fullgraph",), ("bfloat16",))
    assert len(verdicts) >= 3
    for verdict in verdicts:
        assert verdict.verdict == "pass", verdict.reason
        assert (verdict.facts["graphs"], verdict.facts["backend"]) == (graphs, "aot_eager")
        assert set(verdict.facts["compilations by call"]) == {1}
        assert bool(verdict.facts["operators"]) == (graphs == "opaque")


@dataclass(frozen=True)
class Llama:
    """hf-llama; compiled, the first or the second product keeps fp32, and ``last`` makes the output of the sum."""

    first: bool
    second: bool
    last: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to
    when: Callable[[], bool] = torch.compiler.is_compiling

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        refused(cos, sin)
        c, s = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
        if not self.when():
            return x * c + half_turned(x) * s
        wide = x.float()
        one, other = wide * c.float(), half_turned(wide) * s.float()
        one = one if self.first else one.to(x.dtype).float()
        other = other if self.second else other.to(x.dtype).float()
        return self.last(one + other, x.dtype)


def half_turned(x: Tensor) -> Tensor:
    """(-x1, x0) of a half-split x."""
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((-x1, x0), dim=-1)


def cut_off(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to bf16 by dropping 16 bits; the gradient is that of a conversion."""
    kept = (x.view(torch.int32) & -65536).view(torch.float32)
    return (x + (kept - x).detach()).to(dtype)


LLAMA_CLAIMS = ("vjp", "strided", "compile")


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_composed_candidate_may_lose_roundings(first: bool, second: bool, failing: Failing) -> None:
    """Compiled, either product or both may skip the rounding between product and sum, forward and backward."""
    llama = Candidate("llama", "hf-llama", Llama(first, second), devices=("cpu",), provides=LLAMA_CLAIMS)
    assert failing(llama, dtypes=("bfloat16",)) == {}


def test_a_composed_candidate_may_not_truncate(failing: Failing) -> None:
    """The last rounding is none of those that may be left out."""
    llama = Candidate("llama", "hf-llama", Llama(True, True, cut_off), devices=("cpu",), provides=LLAMA_CLAIMS)
    reasons = failing(llama, dtypes=("bfloat16",))
    assert list(reasons) == ["fullgraph"]
    assert "whichever intermediate roundings are left out" in reasons["fullgraph"]


def always() -> bool:
    return True


def never() -> bool:
    return False


def test_eagerly_no_rounding_may_be_lost(failing: Failing) -> None:
    """The same elision in eager mode is another recipe than the contract's."""
    llama = Candidate("llama", "hf-llama", Llama(True, True, when=always), devices=("cpu",), provides=LLAMA_CLAIMS)
    reasons = failing(llama, "smoke", ("accuracy-forward", "accuracy-vjp", "fullgraph"), ("bfloat16",))
    assert list(reasons) == ["accuracy-forward", "accuracy-vjp"]


def test_the_compiler_is_left_as_it_was(ask: Ask) -> None:
    """No compiled code, no configuration and no mode of torch's stays behind."""
    before = torch._dynamo.config.get_config_copy()
    candidate = Candidate("wrong", "qwen-image", breaking, devices=("cpu",), provides=("compile",))
    ask(candidate, judgements=("fullgraph",), dtypes=("bfloat16",))
    assert torch._dynamo.config.get_config_copy() == before
    assert torch.is_grad_enabled()
    assert not torch._dynamo.convert_frame.output_codes.seen


def on_a_gpu(candidate: Candidate) -> list[Verdict]:
    selection = Selection("standard", judgements=("fullgraph",), devices=("cuda",), dtypes=("bfloat16",))
    return [judge(candidate, question, seed=0) for question in questions(candidate, selection)]


@pytest.mark.gpu
def test_inductor_elides_roundings_of_a_composition() -> None:
    """What Inductor makes of plain torch operations in bf16 is not eager's, and passes with roundings left out."""
    llama = Candidate("llama", "hf-llama", Llama(False, False, when=never), provides=LLAMA_CLAIMS)
    verdicts = on_a_gpu(llama)
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts]
    assert {(v.facts["backend"], v.facts["graphs"]) for v in verdicts} == {("inductor", "composed")}
    assert any(len(v.facts["recipes"]) > 1 for v in verdicts)


@pytest.mark.gpu
def test_inductor_does_not_excuse_truncation() -> None:
    """A composition that truncates when it is compiled fails on a GPU as well."""
    llama = Candidate("llama", "hf-llama", Llama(True, True, cut_off), provides=LLAMA_CLAIMS)
    assert {v.verdict for v in on_a_gpu(llama)} == {"fail"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ours", "our-pair", "our-pair-in-place"])
def test_inductor_gives_the_bytes_of_an_opaque_operator(name: str) -> None:
    """Around an operator that is called as it is, Inductor's bytes are eager's, in one compilation."""
    verdicts = on_a_gpu(Candidate("right", "qwen-image", provides=CLAIMS, **RIGHT[name][0]))
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts]
    assert {(v.facts["backend"], v.facts["graphs"]) for v in verdicts} == {("inductor", "opaque")}
