"""Offsets past 2**31 elements: the memory is there, though on a CPU nobody ever touches most of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.reference import rotate_reference
from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.candidates import Candidate, load_candidates
from ropecheck.suites.cases import Case, Inputs, cases_of
from ropecheck.suites.families import heads_of_q
from ropecheck.suites.judgements.accuracy import ACCURACY_FORWARD, judge_forward
from ropecheck.suites.judgements.far_offsets import VARIANT, far_inputs
from ropecheck.suites.judging import judge
from ropecheck.suites.verdicts import Finding
from ropecheck.suites.views import FAR, FAR_X_VIEWS, FarApart, far_apart


def right(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_reference(x, cos, sin, half_split=False, conjugate=False)


def pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return right(q, cos, sin), right(k, cos, sin)


def in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.copy_(right(x, cos, sin))


def with_offsets(wrapped: Callable[[int], int]) -> Callable[..., Tensor]:
    """A kernel that finds samples, and tokens, at offsets that went through ``wrapped``."""

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        offsets = [wrapped(b * x.stride(0) + s * x.stride(1)) for b in range(x.shape[0]) for s in range(x.shape[1])]
        shape = (1, 1, *x.shape[2:])
        rows = [x.as_strided(shape, x.stride(), x.storage_offset() + offset) for offset in offsets]
        return right(torch.cat(rows, dim=1).view(x.shape), cos, sin)

    return run


signed_elements = with_offsets(lambda offset: (offset + 2**31) % 2**32 - 2**31)
unsigned_bytes = with_offsets(lambda offset: 2 * offset % 2**32 // 2)
signed_bytes = with_offsets(lambda offset: ((2 * offset + 2**31) % 2**32 - 2**31) // 2)
wide = with_offsets(lambda offset: offset)


def candidate(run: Callable[..., Any], *claims: str, **fields: Any) -> Candidate:
    return Candidate("c", "qwen-image", run, ("cpu",), ("bfloat16",), claims, **fields)


def strided_case(view: str, **fields: Any) -> Case:
    given = Inputs(length=2, x_view=view) if view.startswith("tokens") else Inputs(batch=2, length=5, x_view=view)
    return Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", given, VARIANT, **fields)


def judged(judged_candidate: Candidate, case: Case) -> Finding:
    try:
        return judge_forward(judged_candidate, case, 0)
    except MemoryError:
        # 8 GiB of addresses, of which a few pages are touched.
        pytest.skip("this machine does not give out 8 GiB of addresses")


@pytest.mark.parametrize("view", FAR_X_VIEWS)
@pytest.mark.parametrize("run", [right, wide], ids=["reference", "wide-offsets"])
def test_right_offsets_pass(run: Callable[..., Tensor], view: str) -> None:
    """64 bits reach the last row, and both rows are held against the oracle."""
    finding = judged(candidate(run, "strided"), strided_case(view))
    assert (finding.verdict, finding.reason) == ("pass", "")
    assert finding.facts[f"{view.partition('-')[0]} judged"] == [0, 1]
    assert finding.facts["certified points"] > 0


@pytest.mark.parametrize("view", FAR_X_VIEWS)
@pytest.mark.parametrize("run", [signed_elements, unsigned_bytes, signed_bytes], ids=["elements", "bytes", "signed"])
def test_offsets_of_32_bits_fail(run: Callable[..., Tensor], view: str) -> None:
    """However an offset wraps, it ends at NaN inside of the allocation: half of the elements are wrong."""
    finding = judged(candidate(run, "strided"), strided_case(view))
    assert finding.verdict == "fail"
    assert finding.facts["outside"] == finding.facts["elements"] // 2
    assert finding.worst is not None
    assert finding.worst[view.partition("-")[0].removesuffix("s")] == 1


def test_a_pair_and_its_parts_lie_far_apart() -> None:
    """q and k are the first and the last heads of the same far rows."""
    seen: list[tuple[int, ...]] = []

    def watched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        seen.extend((q.stride(), k.stride()))
        return pair(q, k, cos, sin)

    both = candidate(watched, "strided", family="rotate_pair")
    assert judged(both, strided_case("samples-far-apart", family="rotate_pair")).verdict == "pass"
    assert len(seen) == 2
    assert all(stride[0] > FAR for stride in seen)


LARGE = Case("accuracy-forward", "qwen-image", "cpu", "bfloat16", Inputs(batch=6, length=5), VARIANT)


@pytest.mark.parametrize(
    "right_candidate",
    [
        candidate(right),
        candidate(in_place, in_place=True),
        candidate(pair, family="rotate_pair"),
    ],
    ids=["out-of-place", "in-place", "pair"],
)
def test_a_large_output_passes(right_candidate: Candidate) -> None:
    """The same judgement at a small size: all samples are compared, the first and the last are held to the oracle."""
    finding = judge_forward(right_candidate, replace(LARGE, family=right_candidate.family), 0)
    assert (finding.verdict, finding.reason) == ("pass", "")
    assert (finding.facts["samples judged"], finding.facts["samples compared"]) == ([0, 5], 6)


def spoiled(sample: int) -> Callable[..., Tensor]:
    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = right(x, cos, sin)
        y[sample, 2, 1, 7] += 1
        return y

    return run


def unwritten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many samples as fit: the others' memory is not written."""
    y = torch.empty_like(x)
    y[:4] = right(x[:4], cos, sin)
    return y


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (spoiled(0), "not admissible"),
        (spoiled(5), "not admissible"),
        (spoiled(3), "1 of 6 samples are not the first one's bytes"),
        (unwritten, "not admissible"),
    ],
    ids=["first", "last", "middle", "unwritten"],
)
def test_a_wrong_sample_of_a_large_output(run: Callable[..., Tensor], says: str) -> None:
    """A single element shows, be it in a sample that the oracle sees or in one that is only compared."""
    finding = judge_forward(candidate(run), LARGE, 0)
    assert finding.verdict == "fail"
    assert says in finding.reason


def test_which_cases_there_are() -> None:
    """In bfloat16, beyond the smoke plan: two with the claim strided, and on a GPU one for everybody."""
    for device, dtype, plan, expected in (
        ("cuda", "bfloat16", "standard", 3), ("cuda", "bfloat16", "full", 3), ("cuda", "bfloat16", "smoke", 0),
        ("cuda", "float32", "standard", 0), ("cpu", "bfloat16", "full", 2), ("cpu", "bfloat16", "smoke", 0),
    ):  # fmt: skip
        for claims, fewer in ((("strided",), 0), ((), 2)):
            found = [c for c in ACCURACY_FORWARD.cases(candidate(right, *claims), device, dtype, plan) if c.variant]
            assert len(found) == max(0, expected - fewer)
            assert all(case.id.endswith("/far-offsets") for case in found)


@pytest.mark.parametrize("contract", [name for name, own in CONTRACTS.items() if own.norm is None])
@pytest.mark.parametrize("family", ["rotate", "rotate_pair"])
def test_the_last_sample_lies_beyond(contract: str, family: str) -> None:
    """All of the output's last sample has offsets past 2**31 elements; of a pair all of q's."""
    judged_candidate = Candidate("c", contract, right, family=family)
    asked = far_inputs(judged_candidate, "cuda", "bfloat16", "full")
    (large,) = cases_of("accuracy-forward", judged_candidate, "cuda", "bfloat16", asked)
    given, head_dim = large.inputs, CONTRACTS[contract].head_dim
    heads = heads_of_q(given.heads) if family == "rotate_pair" else given.heads
    sample = given.length * heads * head_dim
    assert FAR <= (given.batch - 1) * sample < FAR + sample
    assert 2 * given.batch * given.length * given.heads * head_dim < 8 * 2**30
    # What lies 2**31 elements, or 2**32 bytes, before an element is not the same element of another sample.
    assert FAR % sample


def test_a_far_view_watches_its_values() -> None:
    """The memory between is not kept: a change of a value is counted, and the values are given as they were."""
    values = torch.randn(2, 3, 2, 4).bfloat16()
    placed = far_apart(values, 0, far=256)
    assert isinstance(placed, FarApart)
    assert placed.view.stride() == (256 + 2 * 48, 8, 4, 1)
    assert torch.equal(placed.view, values)
    assert placed.changed_bytes() == 0
    placed.view[1, 2, 1, 3] += 1
    assert placed.changed_bytes() in (1, 2)
    assert torch.equal(placed.as_given(), values)
    assert int(placed.storage.view(torch.bfloat16).isnan().sum()) >= 2 * 24


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["right/composed", "right/launched", "right/without-copies"])
def test_right_candidates_on_a_gpu(name: str) -> None:
    """A composition, a kernel with 64-bit offsets, and ours reach the ends, or say that the memory is not there."""
    known = {c.name: c for c in load_candidates(str(Path(__file__).with_name("gpu_candidates.py")))}
    asked = [c for c in ACCURACY_FORWARD.cases(known[name], "cuda", "bfloat16", "standard") if c.variant == VARIANT]
    verdicts = [judge(known[name], case, 0) for case in asked]
    assert len(verdicts) == (3 if "strided" in known[name].provides else 1)
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts]
