"""Candidates of family rotate_pair: what goes wrong between q and k is seen, by the judgements that a single x has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.reference import rotate_reference
from ropecheck.oracle.contracts import contract
from ropecheck.suites.candidates import Candidate, CandidateError
from ropecheck.suites.cases import Inputs
from ropecheck.suites.families import RotatePair, heads_of_q
from ropecheck.suites.invocation import parts
from ropecheck.suites.judgements import JUDGEMENTS

Failing = Callable[..., dict[str, str]]
Pair = tuple[Tensor, Tensor]


def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def right(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return one(q, cos, sin), one(k, cos, sin)


def transposed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return right(q, k, cos, -sin)


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for t in (q, k):
        t.copy_(one(t, cos, sin))


def in_place_transposed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    in_place(q, k, cos, -sin)


def leaving_k_unrotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return one(q, cos, sin), k.clone()


def exchanging_the_outputs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Where head counts agree nothing but the values tells."""
    y, z = right(q, k, cos, sin)
    return (z, y) if q.shape == k.shape else (y, z)


def addressing_k_with_the_strides_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    needed = k.storage_offset() + sum((n - 1) * s for n, s in zip(k.shape, q.stride(), strict=True)) + 1
    enough = needed <= k.untyped_storage().nbytes() // k.element_size()
    return right(q, k.as_strided(k.shape, q.stride(), k.storage_offset()) if enough and k.numel() else k, cos, sin)


def using_one_head_count_for_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """The heads of k beyond those of q, or of q beyond those of k, are left alone."""
    heads = min(q.shape[2], k.shape[2])
    y, z = q.clone(), k.clone()
    y[:, :, :heads], z[:, :, :heads] = one(q[:, :, :heads], cos, sin), one(k[:, :, :heads], cos, sin)
    return y, z


def rotating_k_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return one(q, cos, sin), one(k, cos, -sin)


def writing_k_over_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Uses q's memory as scratch space once q is rotated."""
    y, z = right(q, k, cos, sin)
    q.zero_()
    return y, z


def in_place_on_q_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q.copy_(one(q, cos, sin))


def candidate(run: Callable[..., object], **keywords: object) -> Candidate:
    claims = ("vjp", "strict", "strided", "any-shape")
    wanted = {"devices": ("cpu",), "provides": claims, "vjp": transposed, "family": "rotate_pair", **keywords}
    return Candidate(name="pair", contract="qwen-image", run=run, **wanted)  # type: ignore[arg-type]


CORE = ("accuracy-forward", "accuracy-vjp", "invariance-forward", "strict-bytes", "purity", "repeatability")


def test_a_right_pair_passes(failing: Failing) -> None:
    """Two right rotations, each on its own tensor, pass the plan in every dtype."""
    assert failing(candidate(right), "standard", CORE, ("bfloat16", "float32"), only="h3") == {}


def test_a_right_pair_in_place_passes(failing: Failing) -> None:
    """Both tensors may be rotated where they lie, as views of one memory."""
    assert failing(candidate(in_place, in_place=True, vjp=in_place_transposed)) == {}


def test_a_pair_that_takes_contiguous_tensors_only_is_given_these(failing: Failing) -> None:
    """Without the claim strided q and k are no views of one memory."""

    def strict_about_layout(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        assert q.is_contiguous()
        assert k.is_contiguous()
        return right(q, k, cos, sin)

    assert failing(candidate(strict_about_layout, provides=("any-shape",), vjp=None), "standard", only="bfloat16") == {}


@pytest.mark.parametrize(
    ("run", "judgement"),
    [
        (leaving_k_unrotated, "accuracy-forward"),
        (exchanging_the_outputs, "accuracy-forward"),
        (addressing_k_with_the_strides_of_q, "accuracy-forward"),
        (using_one_head_count_for_both, "accuracy-forward"),
        (rotating_k_back, "accuracy-forward"),
        (writing_k_over_q, "purity"),
    ],
)
def test_what_goes_wrong_between_q_and_k_is_seen(failing: Failing, run: Callable[..., object], judgement: str) -> None:
    """Each fails the judgement that asks for it."""
    assert judgement in failing(candidate(run), "standard", (judgement,), ("bfloat16",))


def test_a_pair_in_place_that_forgets_k_is_seen(failing: Failing) -> None:
    """k keeps its values, which are not the rotated ones."""
    forgetful = candidate(in_place_on_q_alone, in_place=True, vjp=in_place_transposed)
    assert "accuracy-forward" in failing(forgetful, "smoke", ("accuracy-forward",))


@pytest.mark.parametrize("wrong", [lambda q, k, c, s: one(q, c, s), lambda q, k, c, s: (one(q, c, s),) * 3])
def test_a_pair_that_returns_no_two_tensors_is_told(failing: Failing, wrong: Callable[..., object]) -> None:
    """One tensor, or three, is a fail that says so."""
    found = failing(candidate(wrong), "smoke", ("accuracy-forward",))
    assert "not the two tensors of q and k" in found["accuracy-forward"]


def test_the_tensor_of_the_worst_element_is_named(ask: Callable[..., list[object]]) -> None:
    """A failure in k's heads says k."""
    verdicts = ask(candidate(leaving_k_unrotated), "smoke", ("accuracy-forward",), ("float32",))
    worst = [v.worst for v in verdicts if v.verdict == "fail" and v.worst]  # type: ignore[attr-defined]
    assert worst
    assert {w["tensor"] for w in worst} == {"k"}


def test_a_family_must_be_known() -> None:
    """Any other name is one sentence."""
    with pytest.raises(CandidateError, match="family must be one of rotate, rotate_pair, rotate_qk"):
        candidate(right, family="pair")


def test_parts_are_undone_by_joining() -> None:
    """q and k are x's heads, in order, and views of its memory."""
    x = torch.randn(2, 3, 8, 4)
    family = RotatePair(contract("qwen-image"), Inputs(heads=8))
    q, k = parts(candidate(right), family, x)
    assert (q.shape[2], k.shape[2]) == (heads_of_q(8), 8 - heads_of_q(8)) == (6, 2)
    assert q.data_ptr() == x.data_ptr()
    assert torch.equal(family.joined((q, k)), x)


def test_no_pair_is_left_without_a_head() -> None:
    """Every case of a pair has a head for q and one for k, or no head at all."""
    given = candidate(right)
    for judgement in JUDGEMENTS.values():
        for case in judgement.cases(given, "cpu", "bfloat16", "standard"):
            assert case.inputs.heads != 1, case.id
