"""Rotations: strict bytes, comparison with a candidate's output, the worst element, the fingerprint."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ropecheck.oracle.rotation as rotation_module
from ropecheck.oracle.floats import bits, fma32, from_key, key
from ropecheck.oracle.pairing import ADJACENT, HALF_SPLIT, Pairing
from ropecheck.oracle.recipes import ACTIVATION_DTYPE, ONE_ROUNDING, ONE_ROUNDING_VJP
from ropecheck.oracle.rotation import Comparison, Rotation, changed_elements, compare, rotate_strict

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pairings = pytest.mark.parametrize("pairing", [ADJACENT, HALF_SPLIT], ids=lambda p: p.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rotation(
    pairing: Pairing = ADJACENT,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, int, int, int] = (2, 7, 3, 20),
    rotary_dim: int = 12,
    per_sample: bool = False,
    conjugate: bool = False,
    seed: int = 0,
) -> Rotation:
    """Random x, and a table of random angles, another for each sample with ``per_sample``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    rows = shape[:2] if per_sample else shape[1:2]
    angle = torch.rand(*rows, rotary_dim // 2, generator=generator) * 6.25
    return Rotation(x, angle.cos(), angle.sin(), pairing, ONE_ROUNDING, conjugate)


def one_by_one(given: Rotation) -> Tensor:
    """The rotation in fp32, channel by channel, with its indices written out."""
    out, lanes = given.x.clone(), given.cos.shape[-1]
    for lane in range(lanes):
        i, j = (2 * lane, 2 * lane + 1) if given.pairing is ADJACENT else (lane, lane + lanes)
        for sample in range(given.x.shape[0]):
            for token in range(given.x.shape[1]):
                row = (sample, token, lane) if given.cos.dim() == 3 else (token, lane)
                c, s = given.cos[row].float(), given.sin[row].float()
                s = -s if given.conjugate else s
                first, second = given.x[sample, token, :, i].float(), given.x[sample, token, :, j].float()
                p, q = first * c, second * s
                out[sample, token, :, i] = (p - q).to(given.x.dtype)
                p, q = second * c, first * s
                out[sample, token, :, j] = (p + q).to(given.x.dtype)
    return out


@pairings
@dtypes
@pytest.mark.parametrize("conjugate", [False, True], ids=["forward", "conjugate"])
@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per-sample"])
@pytest.mark.parametrize("rotary_dim", [2, 12, 20])
def test_strict_bytes(
    pairing: Pairing, dtype: torch.dtype, conjugate: bool, per_sample: bool, rotary_dim: int
) -> None:
    """Strict bytes are the rotation written out channel by channel; they pass and the comparison counts everything."""
    given = rotation(pairing, dtype, rotary_dim=rotary_dim, per_sample=per_sample, conjugate=conjugate)
    got = rotate_strict(given)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(one_by_one(given)))
    found = compare(given, got)
    assert found.passed
    assert found.elements == 2 * 7 * 3 * rotary_dim
    assert (found.outside, found.tail_changed, found.strict_differs, found.worst) == (0, 0, 0, [])
    assert "separate" in found.fingerprint


@pairings
@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, pairing=HALF_SPLIT if r.pairing is ADJACENT else ADJACENT),
        lambda r: replace(r, conjugate=True),
        lambda r: replace(r, cos=r.cos.flip(0)),
        lambda r: replace(r, sin=r.sin.roll(1, -1)),
        lambda r: replace(r, cos=r.cos[:1].expand_as(r.cos), sin=r.sin[:1].expand_as(r.sin)),
        lambda r: replace(r, cos=r.cos[..., :4], sin=r.sin[..., :4]),
    ],
    ids=["pairing", "conjugate", "samples swapped", "lanes shifted", "first sample's table", "fewer lanes"],
)
def test_another_rotation_fails(pairing: Pairing, change: object) -> None:
    """The strict bytes of a rotation that differs in one respect are outside."""
    given = rotation(pairing, per_sample=True)
    assert callable(change)
    found = compare(given, rotate_strict(change(given)))
    assert not found.passed
    assert found.outside
    assert found.worst


@pairings
@dtypes
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 6, 2, 11), (1, 3, 1, 5), (0, 5, 0, 8)], ids=str)
@pytest.mark.parametrize("at_once", [1, 40, 1 << 16])
def test_a_planted_element_is_the_one_reported(
    monkeypatch: pytest.MonkeyPatch,
    pairing: Pairing,
    dtype: torch.dtype,
    place: tuple[int, int, int, int],
    at_once: int,
) -> None:
    """One wrong element is the worst, with its index, lane, inputs, admissible values and distance."""
    monkeypatch.setattr(rotation_module, "PAIRS_AT_ONCE", {"cpu": at_once})
    given = rotation(pairing, dtype)
    got = rotate_strict(given)
    got[place] = from_key(key(got[place].reshape(1)).long() + 1000, dtype)[0]
    found = compare(given, got)
    assert (found.outside, len(found.worst)) == (1, 1)
    assert not found.passed
    worst = found.worst[0]
    sample, token, head, channel = place
    lane, second = (channel // 2, channel % 2) if pairing is ADJACENT else (channel % 6, channel // 6)
    i, j = (2 * lane, 2 * lane + 1) if pairing is ADJACENT else (lane, lane + 6)
    x = given.x[sample, token, head]
    assert worst.index == place
    assert (worst.lane, worst.output) == (lane, "y1" if second else "y0")
    assert (worst.x0, worst.x1) == (x[i].item(), x[j].item())
    assert (worst.c, worst.s) == (given.cos[token, lane].item(), given.sin[token, lane].item())
    assert worst.got == got[place].item()
    assert worst.strict == rotate_strict(given)[place].item()
    assert worst.low <= worst.strict <= worst.high
    high = torch.tensor([worst.high], dtype=dtype)
    assert worst.outside_by == int(key(got[place].reshape(1)).long() - key(high).long()) > 990


def test_worst_elements_are_the_furthest_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many wrong elements in many blocks the furthest outside are kept, the furthest first."""
    monkeypatch.setattr(rotation_module, "PAIRS_AT_ONCE", {"cpu": 40})
    given = rotation()
    got = rotate_strict(given)
    wrong = [(s, t, h, c) for s in range(2) for t in range(7) for h in range(3) for c in (0, 3, 11)]
    order = torch.randperm(len(wrong), generator=torch.Generator().manual_seed(1)).tolist()
    for place, rank in zip(wrong, order, strict=True):
        got[place] = from_key(key(got[place].reshape(1)).long() + 20 * (rank + 1), given.x.dtype)[0]
    found = compare(given, got, worst=5)
    assert found.outside == len(wrong)
    by_rank = {rank: place for place, rank in zip(wrong, order, strict=True)}
    assert [p.index for p in found.worst] == [by_rank[len(wrong) - 1 - k] for k in range(5)]


@dtypes
def test_a_nan_output_is_outside(dtype: torch.dtype) -> None:
    """A NaN or an infinity where none is admissible is counted and reported, and so is a finite value for a NaN."""
    given = rotation(dtype=dtype)
    for value in (math.nan, math.inf, -math.inf):
        got = rotate_strict(given)
        got[1, 2, 1, 4] = value
        found = compare(given, got)
        assert found.outside == 1
        assert [p.index for p in found.worst] == [(1, 2, 1, 4)]
    given.x[1, 2, 1, 4] = math.nan
    got = rotate_strict(given)
    assert compare(given, got).passed
    got[1, 2, 1, 4] = 1.0
    found = compare(given, got)
    assert found.outside == 1
    assert [p.index for p in found.worst] == [(1, 2, 1, 4)]
    assert math.isnan(found.worst[0].low)


def test_the_tail_must_come_through_bit_for_bit() -> None:
    """Each changed channel past the rotary dimension is counted, a zero's sign and a NaN's payload included."""
    given = rotation()
    given.x[0, 0, 0, 12:15] = torch.tensor([0.0, math.nan, 1.0])
    got = rotate_strict(given)
    assert compare(given, got).tail_changed == 0
    got[0, 0, 0, 12] = -0.0
    got.view(torch.int16)[0, 0, 0, 13] ^= 1
    assert bool(got[0, 0, 0, 13].isnan())
    got[1, 6, 2, 19] = 77.0
    found = compare(given, got)
    assert (found.tail_changed, found.outside, found.passed) == (3, 0, False)


def contracted(given: Rotation, form: str) -> Tensor:
    """The rotation with one product of each sum fused into it, by exact fma, for adjacent pairs."""
    x0, x1 = given.pairing.split(given.x[..., : given.rotary_dim].float())
    c, s = (t.unsqueeze(-2).expand(x0.shape).contiguous() for t in (given.cos, given.sin))
    x0, x1 = x0.contiguous(), x1.contiguous()
    if form == "cosine":
        y0, y1 = fma32(x0, c, -(x1 * s)), fma32(x1, c, x0 * s)
    elif form == "sine":
        y0, y1 = fma32(-x1, s, x0 * c), fma32(x0, s, x1 * c)
    else:
        x0, x1, c, s = (v.double() for v in (x0, x1, c, s))
        y0, y1 = (x0 * c - x1 * s).float(), (x1 * c + x0 * s).float()
    out = given.x.clone()
    out[..., : given.rotary_dim] = given.pairing.join(y0, y1).to(given.x.dtype)
    return out


@pairings
@pytest.mark.parametrize(
    ("form", "names"),
    [
        ("cosine", {"fused x0c", "fused x1c"}),
        ("sine", {"fused x1s", "fused x0s"}),
        ("fp64", {"fp64 via fp32"}),
    ],
)
def test_fingerprint_names_the_form(pairing: Pairing, form: str, names: set[str]) -> None:
    """In fp32 the comparison passes a contracted or fp64 evaluation, says that it is not strict, and names it."""
    given = rotation(pairing, torch.float32, (2, 64, 4, 64), 64)
    found = compare(given, contracted(given, form))
    assert found.passed
    assert found.strict_differs > 0
    assert set(found.fingerprint) - {"exact via fp32"} == names
    assert found.several > 0


def test_sample_of_certification_points() -> None:
    """At least two points are drawn for each of ``samples`` pairs, the same for one seed and others for another."""
    given = rotation(shape=(2, 16, 4, 64), rotary_dim=64)
    got = rotate_strict(given)
    first, again, other = (compare(given, got, samples=128, seed=s).sample for s in (0, 0, 1))
    assert len(first) >= 256
    assert first == again
    assert first != other
    for point in first:
        sample, token, head, channel = point.index
        assert point.got == got[sample, token, head, channel].item()
        assert point.strict == point.got
        assert given.pairing.channels(point.lane, 32)[point.output == "y1"] == channel


def as_facts(found: Comparison) -> tuple[object, ...]:
    worst = [(p.index, p.outside_by, p.low, p.high, p.got) for p in found.worst]
    return found.elements, found.outside, found.several, found.tail_changed, found.unlike, sorted(worst)


@pairings
@dtypes
@pytest.mark.parametrize("at_once", [1, 19, 500])
def test_small_blocks_agree_with_large(
    monkeypatch: pytest.MonkeyPatch, pairing: Pairing, dtype: torch.dtype, at_once: int
) -> None:
    """Bytes, counts, fingerprint and worst elements do not depend on how many tokens a block holds."""
    given = rotation(pairing, dtype, (2, 13, 3, 20), 12, per_sample=True)
    given.x[1, 4, 0, :3] = torch.tensor([math.nan, math.inf, -0.0]).to(dtype)
    wrong = rotate_strict(given)
    wrong[0, 12, 2, 7] += 1
    wrong[1, 0, 0, 0] += 3
    whole_bytes, whole = rotate_strict(given), compare(given, wrong)
    monkeypatch.setattr(rotation_module, "PAIRS_AT_ONCE", {"cpu": at_once})
    assert torch.equal(bits(rotate_strict(given)).long(), bits(whole_bytes).long())
    in_blocks = compare(given, wrong)
    assert as_facts(in_blocks) == as_facts(whole)
    assert whole.outside == 2


@pytest.mark.parametrize("shape", [(0, 7, 3, 20), (2, 0, 3, 20), (2, 7, 0, 20)], ids=str)
def test_empty(shape: tuple[int, int, int, int]) -> None:
    """Without samples, tokens or heads there is nothing to compare and nothing to fail."""
    given = rotation(shape=shape)
    found = compare(given, rotate_strict(given))
    assert found.passed
    assert (found.elements, found.sample, found.worst) == (0, [], [])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 7, 3, 19), torch.bfloat16), ((2, 7, 3, 20), torch.float32), ((42, 20), torch.bfloat16)],
    ids=["shape", "dtype", "rank"],
)
def test_other_shape_or_dtype_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """An output of another shape or dtype is refused with both named, and never compared by broadcasting."""
    with pytest.raises(ValueError, match=r"got must be torch.bfloat16 \(2, 7, 3, 20\) like x, not torch"):
        compare(rotation(), torch.zeros(shape, dtype=dtype))


def test_strided_inputs() -> None:
    """A transposed x, a sliced table and a non-contiguous output are read through their strides."""
    given = rotation(HALF_SPLIT, shape=(2, 7, 3, 20))
    strided = replace(
        given,
        x=given.x.transpose(1, 3).contiguous().transpose(1, 3),
        cos=torch.cat((given.cos, given.cos), -1)[..., :6],
        sin=given.sin.t().contiguous().t(),
    )
    want = rotate_strict(given)
    assert torch.equal(bits(rotate_strict(strided)), bits(want))
    assert compare(strided, want.transpose(1, 2).contiguous().transpose(1, 2)).passed


def test_vjp_undoes_the_rotation_and_other_recipes_are_told_apart() -> None:
    """The transposed recipe's bytes are those of the conjugate, and three roundings are outside one rounding's set."""
    given = rotation(dtype=torch.float32, shape=(2, 16, 2, 64), rotary_dim=64)
    back = replace(given, recipe=ONE_ROUNDING_VJP)
    assert changed_elements(rotate_strict(back), rotate_strict(replace(given, conjugate=True))) == 0
    narrow = replace(given, x=given.x.bfloat16(), cos=given.cos.bfloat16(), sin=given.sin.bfloat16())
    thrice = rotate_strict(replace(narrow, recipe=ACTIVATION_DTYPE))
    assert compare(narrow, thrice).outside > 0
    assert compare(replace(narrow, recipe=ACTIVATION_DTYPE), thrice).passed
    assert changed_elements(thrice, rotate_strict(narrow)) == compare(narrow, thrice).strict_differs
