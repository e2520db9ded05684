"""Wrong candidates of an attack on the judge, each of which once passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.reference import rotate_reference
from ropecheck.suites.candidates import Candidate, CandidateError

Failing = Callable[..., dict[str, str]]
Pair = tuple[Tensor, Tensor]


def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def right(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return one(q, cos, sin), one(k, cos, sin)


def transposed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return right(q, k, cos, -sin)


def destroying(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Zeroes what it was given, once it has its outputs."""
    y = right(q, k, cos, sin)
    q.zero_()
    k.zero_()
    return y


def destroying_a_separate_k(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Zeroes a k that has memory of its own."""
    y = right(q, k, cos, sin)
    if k.untyped_storage().data_ptr() != q.untyped_storage().data_ptr():
        k.zero_()
    return y


def writing_before_k(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Writes the element in front of k, where there is one."""
    if k.storage_offset():
        k.as_strided((1,), (1,), k.storage_offset() - 1).zero_()
    return right(q, k, cos, sin)


def looping_over_the_heads_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """k's heads beyond the number of q's stay as they are."""
    z, heads = k.clone(), q.shape[2]
    z[:, :, :heads] = one(k[:, :, :heads], cos, sin)
    return one(q, cos, sin), z


def pair(run: Callable[..., object], *claims: str, **keywords: object) -> Candidate:
    return Candidate("attack", "qwen-image", run, ("cpu",), provides=claims, family="rotate_pair", **keywords)  # type: ignore[arg-type]


def test_a_pair_without_strides_may_not_destroy_its_inputs(failing: Failing) -> None:
    """What was copied for it is watched, guard bands included, forward and in a backward of its own."""
    assert set(failing(pair(destroying), "smoke", ("purity",), ("bfloat16",))) == {"purity"}
    assert set(failing(pair(writing_before_k), "smoke", ("purity",), ("bfloat16",))) == {"purity"}
    backward = pair(right, "vjp", vjp=lambda q, k, c, s: destroying(q, k, c, -s))
    assert set(failing(backward, "smoke", ("purity",), ("bfloat16",))) == {"purity"}


def test_a_k_that_lies_apart_is_watched(failing: Failing) -> None:
    """Strided candidates are given such a k, and must leave it alone."""
    assert "purity" in failing(pair(destroying_a_separate_k, "strided"), "standard", ("purity",), ("bfloat16",))


def test_k_has_more_heads_than_q_in_some_cases(failing: Failing) -> None:
    """Neither head count is always the larger."""
    found = failing(pair(looping_over_the_heads_of_q, "strided"), "standard", ("accuracy-forward",), ("bfloat16",))
    assert "accuracy-forward" in found


@pytest.mark.parametrize("strided", [(), ("strided",)])
def test_a_refusal_that_comes_too_late_is_none(failing: Failing, strided: tuple[str, ...]) -> None:
    """A pair in place that has rotated q before it refuses k has changed an input."""

    def late(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for name, t in (("q", q), ("k", k)):
            if not isinstance(t, Tensor) or t.dim() != 4 or t.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"{name} is no activation")
            t.copy_(one(t, cos, sin))

    impolite = pair(late, "refusals", *strided, in_place=True)
    found = failing(impolite, "standard", ("refusals",), ("bfloat16",), only="k-x-")
    assert "inputs were changed" in found["refusals"]


def test_a_refusal_leaves_the_process_as_it_was(failing: Failing) -> None:
    """The default dtype and the gradient mode are part of what a refused call must not touch."""

    def refusing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        raise ValueError("x, cos and sin are bad")

    rude = Candidate("attack", "qwen-image", refusing, ("cpu",), provides=("refusals",))
    assert "default dtype" in failing(rude, "smoke", ("refusals",), ("float32",))["refusals"]


def test_autocast_left_on_is_the_candidates_fault(failing: Failing) -> None:
    """It fails the one that leaves it on, and is off again afterwards."""

    def leaving(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", True)
        return one(x, cos, sin)

    found = failing(Candidate("attack", "qwen-image", leaving, ("cpu",)), "smoke", ("accuracy-forward",), ("float32",))
    assert "leaves autocast on cpu changed" in found["accuracy-forward"]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "returned", [lambda q, k: (q[..., :2], k), lambda q, k: (q, k.view(torch.uint8)), lambda q, k: (q.mT, k)]
)
def test_in_place_returns_what_it_was_given(failing: Failing, returned: Callable[[Tensor, Tensor], Pair]) -> None:
    """Another view that begins at the same address is something else."""

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
        for t in (q, k):
            t.copy_(one(t, cos, sin))
        return returned(q, k)

    found = failing(pair(run, "strided", in_place=True), "smoke", ("accuracy-forward",), ("float32",))
    assert "returns other memory" in found["accuracy-forward"]


def test_claims_are_no_generator() -> None:
    """Whoever asks first would use it up, and nothing would be claimed."""

    def claims() -> Iterator[str]:
        yield "strict"

    with pytest.raises(CandidateError, match="provides must be a tuple of strings"):
        Candidate("attack", "qwen-image", one, provides=claims())  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("devices", ("cpu", "cpu")), ("dtypes", ("float32", "float32"))])
def test_nothing_is_named_twice(field: str, value: tuple[str, ...]) -> None:
    """Its cases would count twice."""
    with pytest.raises(CandidateError, match=f"{field} holds a value twice"):
        Candidate("attack", "qwen-image", one, **{field: value})  # type: ignore[arg-type]


def test_a_candidate_for_contiguous_tensors_is_spoilt_by_one_thing_alone(failing: Failing) -> None:
    """Without the claim strided no bad call has other strides, too."""

    def strict(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for name, t in (("x", x), ("cos", cos), ("sin", sin)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name} is no tensor")
            if not t.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
        if x.dim() == 4 and cos.dim() in (2, 3) and cos.shape[-2] != x.shape[1]:
            raise ValueError("cos must have a row for each token")
        raise ValueError("x, cos or sin is bad")

    polite = Candidate("right", "qwen-image", strict, ("cpu",), provides=("refusals",))
    assert failing(polite, "standard", ("refusals",), ("bfloat16",), only="tables-longer-than-x") == {}
