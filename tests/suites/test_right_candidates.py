"""Candidates that are right in another way than ours: contracted, or more accurate. Only strict forbids it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.floats import fma32, round_exact, two_sum
from ropecheck.suites.candidates import Candidate
from ropecheck.suites.judging import Selection, Unasked, questions

Combine = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


def separate(p: Tensor, u: Tensor, q: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Two fp32 products and their fp32 sum, each rounded."""
    return (p.float() * u + q.float() * w).to(dtype)


def fp64_once(p: Tensor, u: Tensor, q: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Products and sum in fp64, then one conversion, which torch makes through fp32."""
    return (p.double() * u.double() + q.double() * w.double()).to(dtype)


def exact_once(p: Tensor, u: Tensor, q: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact sum of the exact products, rounded once to the output dtype."""
    return round_exact(*two_sum(p.double() * u, q.double() * w), dtype)


def first_fused(p: Tensor, u: Tensor, q: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """fma(p, u, RN(q w))."""
    return fma32(p.float(), u, q.float() * w).to(dtype)


def second_fused(p: Tensor, u: Tensor, q: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """fma(q, w, RN(p u))."""
    return fma32(q.float(), w, p.float() * u).to(dtype)


@dataclass(frozen=True)
class Adjacent:
    """The rotation of adjacent pairs, each output made by ``combine``; partial rotary and conjugate included."""

    combine: Combine

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        rotary = 2 * cos.shape[-1]
        x0, x1 = x[..., 0:rotary:2], x[..., 1:rotary:2]
        shape = x0.shape
        c, s = (t.unsqueeze(-2).expand(shape) for t in (cos, -sin if conjugate else sin))
        y0, y1 = self.combine(x0, c, x1, -s, x.dtype), self.combine(x1, c, x0, s, x.dtype)
        return torch.cat((torch.stack((y0, y1), dim=-1).flatten(-2), x[..., rotary:]), dim=-1)

    def vjp(self, gradient: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        return self(gradient, cos, sin, conjugate=not conjugate)

    def in_place(self, x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> None:
        x.copy_(self(x, cos, sin, conjugate=conjugate))

    def vjp_in_place(self, gradient: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> None:
        gradient.copy_(self.vjp(gradient, cos, sin, conjugate=conjugate))


def candidate(rotation: Adjacent, *claims: str, **keywords: Any) -> Candidate:
    claims = ("vjp", "strided", "any-shape", "conjugate", *claims)
    return Candidate("right", "qwen-image", rotation, ("cpu",), provides=claims, vjp=rotation.vjp, **keywords)


ANOTHER_WAY = (fp64_once, exact_once, first_fused, second_fused)


@pytest.mark.parametrize("combine", ANOTHER_WAY, ids=lambda f: f.__name__)
def test_another_right_way_passes_without_strict(combine: Combine, failing: Callable[..., dict[str, str]]) -> None:
    """More accurate arithmetic and either contraction pass everything when strict is not claimed."""
    assert failing(candidate(Adjacent(combine)), dtypes=("bfloat16",)) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("combine", ANOTHER_WAY, ids=lambda f: f.__name__)
def test_another_right_way_is_not_strict(
    combine: Combine, dtype: str, ask: Callable[..., list[Any]], failing: Callable[..., dict[str, str]]
) -> None:
    """With the claim strict it fails strict-bytes, in 16 bits at the hard-to-round points, forward and backward,
    while accuracy at the very same points still passes."""
    strict = candidate(Adjacent(combine), "strict", dtypes=(dtype,))
    verdicts = ask(strict, "standard", ("strict-bytes",), only="hard-to-round")
    assert [v.verdict for v in verdicts] == ["fail", "fail"]
    assert failing(strict, "standard", ("accuracy-forward", "accuracy-vjp"), only="hard-to-round") == {}


def test_fingerprint_names_the_form(ask: Callable[..., list[Any]]) -> None:
    """A strict-bytes failure says which form of evaluation reproduces all elements."""
    for combine, form in ((first_fused, "fused x0c"), (second_fused, "fused x1s"), (exact_once, "exact via fp32")):
        strict = candidate(Adjacent(combine), "strict", dtypes=("float32",))
        verdict, _ = ask(strict, "standard", ("strict-bytes",), only="hard-to-round")
        # The two members of a lane name their products differently.
        assert verdict.verdict == "fail"
        assert form in verdict.facts["elements unlike each form"]


def test_plain_torch_is_strict(failing: Callable[..., dict[str, str]]) -> None:
    """mul, mul and add in fp32 keep the contract's own order, byte for byte, with every claim that they can make."""
    strict = candidate(Adjacent(separate), "strict")
    assert failing(strict, dtypes=("bfloat16",)) == {}
    assert failing(strict, "standard", ("strict-bytes",), only="hard-to-round") == {}


def test_in_place_candidate_passes(failing: Callable[..., dict[str, str]]) -> None:
    """A candidate that overwrites x and the gradient, and returns nothing, passes with the same claims."""
    rotation = Adjacent(separate)
    in_place = Candidate(
        "in-place",
        "qwen-image",
        rotation.in_place,
        ("cpu",),
        provides=("vjp", "strided", "any-shape", "conjugate", "strict"),
        in_place=True,
        vjp=rotation.vjp_in_place,
    )
    assert failing(in_place, dtypes=("bfloat16",)) == {}


def test_autograd_backward_passes(failing: Callable[..., dict[str, str]]) -> None:
    """A candidate without a vjp of its own is judged by autograd's, here that of a complex product."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        table = torch.complex(cos, sin).unsqueeze(-2)
        turned = torch.view_as_complex(x.float().contiguous().reshape(*x.shape[:-1], -1, 2)) * table
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    complex_product = Candidate("complex", "qwen-image", rotate, ("cpu",), provides=("vjp", "strided"))
    assert failing(complex_product, dtypes=("bfloat16", "float32")) == {}


def test_no_gradient_fails_the_vjp_judgements(failing: Callable[..., dict[str, str]]) -> None:
    """A forward that cuts the graph, with the claim vjp, fails every judgement of the backward and no other."""

    def detached(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Adjacent(separate)(x, cos, sin).detach()

    cut = Candidate("detached", "qwen-image", detached, ("cpu",), dtypes=("bfloat16",), provides=("vjp",))
    reasons = failing(cut, judgements=("accuracy-forward", "accuracy-vjp", "invariance-forward", "invariance-vjp"))
    assert list(reasons) == ["accuracy-vjp", "invariance-vjp"]
    assert "without gradient" in reasons["accuracy-vjp"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_a_device_that_is_not_here_blocks() -> None:
    """On a machine without a GPU every CUDA cell of a candidate is blocked, none passes and none is left out."""
    rotation = Adjacent(separate)
    both = Candidate("both", "qwen-image", rotation, devices=("cpu", "cuda"), dtypes=("bfloat16",))
    asked = [q for q in questions(both, Selection("smoke", devices=("cuda",))) if isinstance(q, Unasked)]
    blocked = [q.judgement for q in asked if q.verdict == "blocked"]
    assert {"accuracy-forward", "invariance-forward", "purity", "repeatability", "provenance"} <= set(blocked)
    assert all("no CUDA GPU" in q.reason for q in asked if q.verdict == "blocked")
    assert {q.verdict for q in asked} == {"blocked", "not-applicable"}


INTERPRETED = """
import torch
import triton
import triton.language as tl
from ropecheck.suites import Candidate


@triton.jit
def head_of_a_token(x, cos, sin, y, heads, LANES: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    first = x + row * 2 * LANES + 2 * lane
    x0, x1 = tl.load(first).to(tl.float32), tl.load(first + 1).to(tl.float32)
    c = tl.load(cos + row // heads * LANES + lane)
    s = tl.load(sin + row // heads * LANES + lane)
    out = y + row * 2 * LANES + 2 * lane
    tl.store(out, (x0 * c - x1 * s).to(y.dtype.element_ty))
    tl.store(out + 1, (x1 * c + x0 * s).to(y.dtype.element_ty))


def run(x, cos, sin):
    batch, length, heads, _ = x.shape
    y = torch.empty_like(x)
    cos, sin = (t.expand(batch, length, -1).contiguous() for t in (cos, sin))
    if x.numel():
        head_of_a_token[(batch * length * heads,)](x, cos, sin, y, heads, LANES=cos.shape[-1])
    return y


CANDIDATES = [
    Candidate("simple-triton", "qwen-image", run, devices=("cpu",), provides=("strict",))
]
"""


def test_an_interpreted_triton_kernel_passes(verdicts_of_a_run: Callable[..., list[Any]]) -> None:
    """A plain kernel, one program for a head of a token, is right in bf16 and fp32 under the repaired interpreter."""
    options = ("--plan", "smoke", "--judgement", "accuracy-forward", "--judgement", "provenance", "-n", "0")
    verdicts = verdicts_of_a_run(INTERPRETED, *options, "--dtype", "bfloat16", "--dtype", "float32")
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts if v.verdict != "pass"]
    assert {v.dtype for v in verdicts} == {"bfloat16", "float32"}
    seen = [v.facts for v in verdicts if v.judgement == "provenance"]
    assert all(facts["kernels"] == ["head_of_a_token"] and facts["interpreted"] for facts in seen)
    assert all(facts["interpreter's bf16 repaired"] for facts in seen)
