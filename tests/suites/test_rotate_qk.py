"""Candidates of family rotate_qk: right ones pass, and each fault that the family can express fails for what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.axis_maps import STYLES
from ropecheck.oracle.contracts import CONTRACTS
from ropecheck.suites.adapters.rotate_qk import CANDIDATES, composition, gathered, in_place, rotated
from ropecheck.suites.cache_packing import axis_map_of
from ropecheck.suites.candidates import Candidate, CandidateError
from ropecheck.suites.cases import Case, Inputs
from ropecheck.suites.judgements.accuracy import judge_forward
from ropecheck.suites.judgements.far_offsets import VARIANT
from ropecheck.suites.judging import Selection, judge, questions
from ropecheck.suites.verdicts import Verdict

Failing = Callable[..., dict[str, str]]
Ask = Callable[..., list[Verdict]]
Pair = tuple[Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor, Tensor], "Pair | None"]

NEOX, MROPE, ERNIE = "neox", "mrope-interleaved", "mrope-ernie"
RIGHT = {name: composition(name) for name in CONTRACTS if CONTRACTS[name].family == "rotate_qk" or name == NEOX}
CORE = ("accuracy-forward", "accuracy-vjp", "strict-bytes", "purity", "repeatability", "invariance-forward")


def candidate(run: Run, contract: str = MROPE, *claims: str, **keywords: object) -> Candidate:
    wanted = {"devices": ("cpu",), "provides": claims or ("strided", "any-shape"), "family": "rotate_qk", **keywords}
    return Candidate(name="qk", contract=contract, run=run, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["neox", "gptj", "mrope-contiguous", "mrope-round-robin", "mrope-ernie"])
@pytest.mark.parametrize("writes", [False, True], ids=["out-of-place", "in-place"])
def test_right_compositions_pass(failing: Failing, name: str, writes: bool) -> None:
    """Every map and pairing, in fp32 with one rounding, passes what is asked of all, in the smoke plan."""
    wanted = f"composed/{name}{'-in-place' if writes else ''}"
    (right,) = (c for c in CANDIDATES if c.name == wanted)
    assert failing(replace(right, devices=("cpu",)), "smoke", CORE, ("bfloat16",)) == {}


@pytest.mark.parametrize("judgement", ["accuracy-forward", "accuracy-vjp", "invariance-forward", "invariance-vjp"])
def test_a_right_composition_passes_the_core_matrix(failing: Failing, judgement: str) -> None:
    """Head counts, pitches, offsets, samples end to end and every storage of positions: nothing that is right fails."""
    (right,) = (c for c in CANDIDATES if c.name == f"composed/{MROPE}")
    assert failing(right, "standard", (judgement,), ("float16",), only="s5") == {}
    assert failing(right, "standard", (judgement,), ("bfloat16",), only="positions/") == {}


@pytest.mark.parametrize("name", ["gptj-rounded-table", "gptj-activation-dtype", "mrope-ernie-activation-dtype"])
def test_other_recipes_pass(failing: Failing, name: str) -> None:
    """A cache in the activation dtype, and a rotation in it, are recipes with contracts of their own."""
    (right,) = (c for c in CANDIDATES if c.name == f"composed/{name}")
    assert failing(right, "smoke", ("accuracy-forward", "accuracy-vjp", "strict-bytes"), ("bfloat16", "float32")) == {}


@pytest.mark.parametrize("judgement", ["table-gradient", "autograd", "refusals", "laws", "export"])
def test_other_judgements_pass(failing: Failing, judgement: str) -> None:
    """Those that call with tables, gradients or arguments of their own do so in the family's signature."""
    (right,) = (c for c in CANDIDATES if c.name == f"composed/{MROPE}")
    assert failing(right, "standard", (judgement,), ("bfloat16",)) == {}


def test_writing_in_place_passes_under_autocast(failing: Failing) -> None:
    """Where a composition keeps out of autocast's regions its bytes are those outside."""
    (right,) = (c for c in CANDIDATES if c.name == f"composed/{MROPE}-in-place")
    assert failing(right, "standard", ("autocast",), ("float16",)) == {}


def reading(read: Callable[[Tensor, Tensor], Tensor]) -> Callable[[str], Run]:
    """A candidate of a contract that reads the positions ``read(positions, cache)`` in place of the given ones."""

    def of_contract(contract: str) -> Run:
        return lambda q, k, cache, positions: RIGHT[contract](q, k, cache, read(positions, cache))

    return of_contract


def mapped(axis_map: Callable[[str], tuple[int, ...]]) -> Callable[[str], Run]:
    """A candidate of a contract that reads the axes by another map."""

    def of_contract(contract: str) -> Run:
        def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
            tables = gathered(cache, positions, axis_map(contract))
            pairing = CONTRACTS[contract].pairing
            return rotated(q, *tables, pairing, torch.float32), rotated(k, *tables, pairing, torch.float32)

        return run

    return of_contract


def swapping_height_and_width(contract: str) -> tuple[int, ...]:
    return tuple((0, 2, 1)[row] for row in axis_map_of(CONTRACTS[contract]) or ())


def in_sections(contract: str) -> tuple[int, ...]:
    """The section of an interleaved map read as runs of lanes."""
    return STYLES["contiguous"]((24, 20, 20), 128)


def time_before_height(contract: str) -> tuple[int, ...]:
    """Ernie's section taken in the order of the rows."""
    return STYLES["contiguous"]((22, 22, 20), 128)


def as_if_contiguous(positions: Tensor, cache: Tensor) -> Tensor:
    plain = torch.empty(positions.shape, device="meta").stride()
    return positions.as_strided(positions.shape, plain, positions.storage_offset())


def words(positions: Tensor, cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory behind the first row's start read as ``dtype``, as far as it goes; rows that are not there wrap."""
    memory = torch.empty(0, dtype=torch.uint8).set_(positions.untyped_storage())
    start = positions.storage_offset() * positions.element_size()
    memory = memory[start : start + (len(memory) - start) // 8 * 8].view(dtype)
    found = torch.arange(positions.numel()) % len(memory)
    return (memory[found] % max(1, len(cache))).long().reshape(positions.shape)


def sharing_the_pitch(contract: str) -> Run:
    """k is addressed with q's strides."""

    def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair | None:
        needed = k.storage_offset() + sum((n - 1) * s for n, s in zip(k.shape, q.stride(), strict=True)) + 1
        enough = k.numel() and needed <= k.untyped_storage().nbytes() // k.element_size()
        as_q = k.as_strided(k.shape, q.stride(), k.storage_offset()) if enough else k
        return RIGHT[contract](q, as_q, cache, positions)

    return run


def heads_only(of_q: Callable[[int], int], of_k: Callable[[int, int], int]) -> Callable[[str], Run]:
    """A candidate that rotates the first ``of_q(Hq)`` heads of q and ``of_k(Hq, Hk)`` of k, and leaves the rest."""

    def of_contract(contract: str) -> Run:
        def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
            y, z = RIGHT[contract](q, k, cache, positions)  # type: ignore[misc]
            n, m = of_q(q.shape[1]), of_k(q.shape[1], k.shape[1])
            return torch.cat((y[:, :n], q[:, n:]), dim=1), torch.cat((z[:, :m], k[:, m:]), dim=1)

        return run

    return of_contract


def cached(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[str], Run]:
    """A candidate that reads the cache ``change(cache, q)``."""

    def of_contract(contract: str) -> Run:
        return lambda q, k, cache, positions: RIGHT[contract](q, k, change(cache, q), positions)

    return of_contract


def ignoring_the_pitch(cache: Tensor, q: Tensor) -> Tensor:
    return cache.as_strided(cache.shape, (cache.shape[1], 1), cache.storage_offset())


FAULTS: dict[str, tuple[Callable[[str], Run], str]] = {
    "time row for every lane": (reading(lambda p, c: p[:1].expand(3, -1)), MROPE),
    "height row for every lane": (reading(lambda p, c: p[1:2].expand(3, -1)), MROPE),
    "height and width exchanged": (mapped(swapping_height_and_width), MROPE),
    "sections as runs of lanes": (mapped(in_sections), MROPE),
    "time before height": (mapped(time_before_height), ERNIE),
    "pitch of the rows ignored": (reading(as_if_contiguous), MROPE),
    "stride of the column ignored": (reading(as_if_contiguous), NEOX),
    "int32 read as int64": (reading(lambda p, c: words(p, c, torch.int64)), NEOX),
    "int64 read as int32": (reading(lambda p, c: words(p, c, torch.int32)), NEOX),
    "positions in 16 bits": (reading(lambda p, c: p.short().long() % len(c)), NEOX),
    "positions in fp16": (reading(lambda p, c: p.half().long().clamp(max=len(c) - 1)), NEOX),
    "one position too far": (reading(lambda p, c: (p + 1).clamp(max=len(c) - 1)), NEOX),
    "one position short": (reading(lambda p, c: p - 1), NEOX),
    "width one position too far": (reading(lambda p, c: torch.cat((p[:2], (p[2:] + 1).clamp(max=len(c) - 1)))), MROPE),
    "positions counted, not read": (reading(lambda p, c: torch.arange(p.shape[-1]).expand(p.shape)), NEOX),
    "last row of the cache clamped": (reading(lambda p, c: p.clamp(max=len(c) - 2)), MROPE),
    "k with the pitch of q": (sharing_the_pitch, MROPE),
    "as many heads of k as of q, at most two": (heads_only(lambda n: n, lambda n, m: min(m, 2)), NEOX),
    "k as grouped four to one": (heads_only(lambda n: n, lambda n, m: n // 4), NEOX),
    "the first head of q alone": (heads_only(lambda n: 1, lambda n, m: m), NEOX),
    "the first head of k alone": (heads_only(lambda n: n, lambda n, m: 1), NEOX),
    "k left alone": (heads_only(lambda n: n, lambda n, m: 0), MROPE),
    "halves of the cache exchanged": (cached(lambda c, q: c.roll(c.shape[1] // 2, dims=1)), NEOX),
    "cache in the activation dtype": (cached(lambda c, q: c.to(q.dtype).float()), NEOX),
    "pitch of the cache ignored": (cached(ignoring_the_pitch), NEOX),
}


SHOWS_IN = {
    "pitch of the rows ignored": "sliced-positions",
    "stride of the column ignored": "transposed-positions",
    "int32 read as int64": "int32-positions",
    "positions in 16 bits": "model-cache",
    "positions in fp16": "model-cache",
    "k with the pitch of q": "k=",
    "as many heads of k as of q, at most two": "k-heads=4",
    "k as grouped four to one": "k-heads",
    "the first head of k alone": "k-heads=4",
    "pitch of the cache ignored": "table=sliced-rows",
}
"""The dimension of the cases that a fault is seen in, of those that not every case shows."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails(fault: str) -> None:
    """accuracy-forward sees it in bf16, in the first case of the standard plan that has what it takes."""
    make, contract = FAULTS[fault]
    wrong = candidate(make(contract), contract)
    selection = Selection("standard", judgements=("accuracy-forward",), devices=("cpu",), dtypes=("bfloat16",))
    asked = [q for q in questions(wrong, selection) if SHOWS_IN.get(fault, "") in q.id]
    verdicts = (judge(wrong, question, seed=0) for question in asked)
    assert any(verdict.verdict == "fail" for verdict in verdicts)


def test_what_only_text_would_pass_fails_on_one_small_case(ask: Ask) -> None:
    """The dropped axes turn two thirds of a sample's elements into NaN: every case with a token says so."""
    dropped = candidate(FAULTS["time row for every lane"][0](MROPE), MROPE)
    verdicts = ask(dropped, "smoke", ("accuracy-forward",), ("bfloat16",))
    assert {v.verdict for v in verdicts} == {"fail"}


def test_many_tokens_at_one_position_are_compared_with_the_first() -> None:
    """Offsets past 2**31: the ends are held against the oracle, and one token in between that differs is told."""
    given = Inputs(length=40, heads=4, positions="far")
    large = Case("accuracy-forward", MROPE, "cpu", "bfloat16", given, VARIANT, "rotate_qk")
    finding = judge_forward(candidate(RIGHT[MROPE]), large, 0)
    assert (finding.verdict, finding.facts["tokens compared"], finding.facts["tokens judged"]) == ("pass", 40, [0, 39])

    def skipping(token: int) -> Run:
        def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
            y, z = RIGHT[MROPE](q, k, cache, positions)  # type: ignore[misc]
            y[token] = q[token]
            return y, z

        return run

    for token, message in ((17, "1 of 40 tokens are not the first one's bytes"), (39, "are not admissible")):
        assert message in judge_forward(candidate(skipping(token)), large, 0).reason


def test_a_cache_that_was_kept_is_seen(failing: Failing) -> None:
    """A gather that is remembered by the addresses of its operands is stale once their memory is written over."""
    kept: dict[tuple[int, ...], Pair] = {}

    def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
        tables = kept.setdefault((cache.data_ptr(), positions.data_ptr()), gathered(cache, positions, None))
        pairing = CONTRACTS[NEOX].pairing
        return rotated(q, *tables, pairing, torch.float32), rotated(k, *tables, pairing, torch.float32)

    assert "repeatability" in failing(candidate(run, NEOX), "smoke", ("repeatability",), ("float32",))


@pytest.mark.parametrize("spoilt", ["positions", "cache"])
def test_a_changed_input_is_seen(failing: Failing, spoilt: str) -> None:
    """Whoever leaves the positions or the cache changed fails purity, and is told which."""

    def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair | None:
        results = RIGHT[NEOX](q, k, cache, positions)
        (positions if spoilt == "positions" else cache).view(-1)[-1:].neg_()
        return results

    found = failing(candidate(run, NEOX, "any-shape"), "smoke", ("purity",), ("bfloat16",))
    assert f"bytes of {'cos_sin_cache' if spoilt == 'cache' else spoilt}'s storage" in found["purity"]


def test_in_place_that_forgets_k_is_seen(failing: Failing) -> None:
    """k keeps its values, which are not the rotated ones."""

    def run(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> None:
        q.copy_(RIGHT[NEOX](q, k, cache, positions)[0])  # type: ignore[index]

    forgetful = candidate(run, NEOX, in_place=True)
    assert "accuracy-forward" in failing(forgetful, "smoke", ("accuracy-forward",))


def test_a_backward_by_another_axis_is_seen(failing: Failing) -> None:
    """The forward is right, the separate backward reads the time row alone."""

    def back(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> None:
        in_place(composition(MROPE, back=True))(q, k, cache, positions[:1].expand(3, -1))

    wrong = candidate(in_place(composition(MROPE)), MROPE, "vjp", in_place=True, vjp=back)
    found = failing(wrong, "smoke", ("accuracy-forward", "accuracy-vjp"), ("bfloat16",))
    assert list(found) == ["accuracy-vjp"]


def test_a_cache_whose_gradient_is_dropped_is_seen(failing: Failing) -> None:
    """A cache that requires a gradient and gets none fails; one that gets too much does, too."""

    def detached(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair | None:
        return RIGHT[NEOX](q, k, cache.detach(), positions)

    def doubled(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair | None:
        twice = cache.detach() + 2 * (cache - cache.detach())
        return RIGHT[NEOX](q, k, torch.where(twice.isnan(), cache, twice), positions)

    for run in (detached, doubled):
        wrong = candidate(run, NEOX, "vjp")
        assert "table-gradient" in failing(wrong, "standard", ("table-gradient",), ("float32",))


def test_accepting_anything_fails_each_refusal(ask: Ask) -> None:
    """Two rows of positions, or a cache of odd width, are not to be rotated by."""

    def anything(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> Pair:
        return q, k

    verdicts = ask(candidate(anything, MROPE, "refusals"), "standard", ("refusals",), ("bfloat16",))
    assert {v.verdict for v in verdicts} == {"fail"}
    assert len(verdicts) > 15


def test_the_tensor_of_the_worst_element_is_named(ask: Ask) -> None:
    """A failure in k's heads says k."""
    verdicts = ask(candidate(FAULTS["k left alone"][0](MROPE), MROPE), "smoke", ("accuracy-forward",), ("float32",))
    worst = [v.worst for v in verdicts if v.verdict == "fail" and v.worst]
    assert worst
    assert {w["tensor"] for w in worst} == {"k"}


def test_positions_that_lie_elsewhere_need_the_claim_strided() -> None:
    """Without it, positions are contiguous; in int32 they still come, since a width is no stride."""
    plain = candidate(RIGHT[MROPE], MROPE, "any-shape")
    asked = [q.id for q in questions(plain, Selection("full", judgements=("accuracy-forward",), dtypes=("bfloat16",)))]
    assert any("int32-positions" in name for name in asked)
    assert not any("sliced" in name or "transposed" in name for name in asked)


def test_the_map_is_not_asked_of_another_width() -> None:
    """Three rows come with a map of the contract's own lanes: the rotary width stays, and what is left over is tail."""
    for contract, widths in ((MROPE, {128}), (NEOX, {128, 48, 20, 16, 32, 64, 72, 256, 80, 2, 66})):
        asked = questions(
            candidate(RIGHT[contract], contract), Selection("standard", judgements=("accuracy-forward",))
        )
        made = {(q.inputs.rotary_dim or 128, q.inputs.head_dim or 128) for q in asked}  # type: ignore[union-attr]
        assert {rotary for rotary, _ in made} == widths
        assert any(width > rotary for rotary, width in made)


@pytest.mark.parametrize(
    ("contract", "keywords", "message"),
    [
        ("qwen-image", {}, "family must be one of rotate, rotate_pair for contract qwen-image"),
        (MROPE, {"provides": ("conjugate",)}, "provides must not hold 'conjugate' for family rotate_qk"),
        (MROPE, {"level": "L2"}, "level must be 'L1' for family rotate_qk"),
    ],
)
def test_what_the_family_cannot_be_is_refused(contract: str, keywords: dict[str, object], message: str) -> None:
    """One sentence says what the contract, or the signature, has no room for."""
    with pytest.raises(CandidateError, match=message):
        candidate(RIGHT[MROPE], contract, **keywords)
