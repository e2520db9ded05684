"""Family norm_rotate_gate: right candidates pass, of another order too, and each fault of the field's kernels fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.qk_norm_rope_gate import qk_norm_rope_gate
from ropecheck.suites.candidates import Candidate, CandidateError
from ropecheck.suites.judging import Selection, Unasked, judge, questions
from ropecheck.suites.verdicts import Verdict

CONTRACT = "qwen3.5-norm-rope-gate"
Ask = Callable[..., list[Verdict]]
Failing = Callable[..., dict[str, str]]
Outputs = tuple[Tensor, Tensor, Tensor | None]


class Rounded(torch.autograd.Function):
    """Rounded to a dtype and widened again, its derivative straight through."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y.to(dtype).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Composed:
    """Right, of torch operations: the norm is torch's own, whose sum has an order of its own. No keyword ``fma``."""

    def __call__(
        self,
        q_gate: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        *,
        eps: float,
        axis_map: Tensor | None = None,
        gate: bool = True,
        weight_offset: float = 1.0,
        round_norm: bool = True,
        slots: Tensor | None = None,
    ) -> Outputs:
        tokens, width = k.shape[0], q_weight.shape[0]
        kept = self.kept(slots, tokens)
        rows = self.rows(positions, axis_map, cos_sin_cache.shape[1] // 2)[kept]
        cos, sin, inside = self.read(cos_sin_cache, rows)
        parts = q_gate.view(tokens, q_gate.shape[1] // (width * (1 + gate)), (1 + gate) * width)
        q, gates = parts[..., :width], parts[..., width:]
        k_heads = k.view(tokens, k.shape[1] // width, width)
        outputs = []
        for x, weight in ((q, q_weight), (k_heads, self.weight_of_k(q_weight, k_weight))):
            normalised = self.normalised(x[kept].float(), weight, eps, weight_offset, cos.shape[-1])
            if round_norm:
                normalised = self.rounded(normalised, x.dtype)
            y = self.rotated(normalised, x[kept], cos[:, None], sin[:, None]) * inside[:, None]
            outputs.append(self.written(y.to(x.dtype), kept, tokens).flatten(1))
        gate_values = self.written(self.copied(gates)[kept], kept, tokens).flatten(1) if gate else None
        return outputs[0], outputs[1], gate_values

    def kept(self, slots: Tensor | None, tokens: int) -> Tensor:
        """The tokens that are read and written."""
        return torch.arange(tokens) if slots is None else (slots != -1).nonzero().flatten()

    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        """int64 [T, R / 2]: the row of the cache that each lane reads."""
        if axis_map is None:
            return positions.long()[:, None].expand(-1, lanes)
        return positions.long()[axis_map.long()].T

    def read(self, cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = ((rows >= 0) & (rows < cache.shape[0])).all(-1, keepdim=True)
        at, lane = torch.where(inside, rows, 0), torch.arange(rows.shape[1])
        cos, sin = (cache[at, lane + start].float() for start in (0, rows.shape[1]))
        return cos, sin, torch.where(inside, 1.0, float("nan"))

    def weight_of_k(self, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        return k_weight

    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float() + offset, eps)

    def rounded(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return Rounded.apply(y, dtype)  # type: ignore[no-any-return, no-untyped-call]

    def rotated(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        a, b, tail = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, tail), dim=-1)

    def copied(self, gates: Tensor) -> Tensor:
        return gates

    def written(self, y: Tensor, kept: Tensor, tokens: int) -> Tensor:
        if len(kept) == tokens:
            return y.contiguous()
        return torch.empty((tokens, *y.shape[1:]), dtype=y.dtype).index_put((kept,), y)


class TimeRowForEveryLane(Composed):
    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        return super().rows(positions if axis_map is None else positions[0], None, lanes)


class HeightAndWidthSwapped(Composed):
    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        return super().rows(positions if axis_map is None else positions[[0, 2, 1]], axis_map, lanes)


class WidthOffByOne(Composed):
    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        if axis_map is None:
            return super().rows(positions, axis_map, lanes)
        return super().rows(positions + torch.tensor([[0], [0], [1]]), axis_map, lanes)


class PitchOfPositionsIgnored(Composed):
    """Row r is read T r elements behind the first, wherever it lies."""

    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        if axis_map is not None:
            tokens = positions.shape[1]
            positions = positions.as_strided((3, tokens), (tokens, 1), positions.storage_offset())
        return super().rows(positions, axis_map, lanes)


class PositionsReadAs32Bits(Composed):
    def rows(self, positions: Tensor, axis_map: Tensor | None, lanes: int) -> Tensor:
        if positions.dtype == torch.int64 and axis_map is None:
            positions = positions.contiguous().view(torch.int32)[: positions.shape[0]]
        return super().rows(positions, axis_map, lanes)


class OutOfRangeClamped(Composed):
    def read(self, cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().read(cache, rows.clamp(0, cache.shape[0] - 1))


class LastRowRefused(Composed):
    """One row of the cache too few."""

    def read(self, cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().read(cache[:-1], rows)


class CacheInBfloat16(Composed):
    def read(self, cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().read(cache.bfloat16(), rows)


class PitchOfCacheIgnored(Composed):
    def read(self, cache: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dense = cache.as_strided(cache.shape, (cache.shape[1], 1), cache.storage_offset())
        return super().read(dense, rows)


class IntermediateRoundingSkipped(Composed):
    def rounded(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y


class RotationInActivationDtype(Composed):
    """Three roundings, as transformers has it."""

    def rotated(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotated(y.to(x.dtype), x, cos.to(x.dtype), sin.to(x.dtype)).float()


class OffsetForgotten(Composed):
    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        return super().normalised(x, weight, eps, 0.0, lanes)


class EpsOutsideTheRoot(Composed):
    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True).sqrt() + eps) * (weight.float() + offset)


class MeanOfTheRotatedChannels(Composed):
    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        square = (x[..., : 2 * lanes] ** 2).mean(-1, keepdim=True)
        return x * (square + eps).rsqrt() * (weight.float() + offset)


class KeysByTheWeightOfQueries(Composed):
    def weight_of_k(self, q_weight: Tensor, k_weight: Tensor) -> Tensor:
        return q_weight + 0 * k_weight


class TailNotNormalised(Composed):
    def rotated(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        return torch.cat((super().rotated(y, x, cos, sin)[..., : 2 * half], x[..., 2 * half :].float()), dim=-1)


class TailRotated(Composed):
    """Pairs are half a head apart, and the lanes past the table are turned by its last."""

    def rotated(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        missing = y.shape[-1] // 2 - cos.shape[-1]
        wider = (torch.cat((t, t[..., -1:].expand(*t.shape[:-1], missing)), dim=-1) for t in (cos, sin))
        return super().rotated(y, x, *wider)


class GateOfTheWrongHead(Composed):
    def copied(self, gates: Tensor) -> Tensor:
        return gates.roll(1, dims=1)


class GateThroughFloat(Composed):
    """A sum with zero: -0 becomes +0, and payloads of NaN are lost."""

    def copied(self, gates: Tensor) -> Tensor:
        return (gates.float() + 0.0).to(gates.dtype)


class PaddingIsWritten(Composed):
    """Rows of padding are filled with zeros."""

    def written(self, y: Tensor, kept: Tensor, tokens: int) -> Tensor:
        return torch.zeros((tokens, *y.shape[1:]), dtype=y.dtype).index_put((kept,), y)


class GateGradientDropped(Composed):
    def copied(self, gates: Tensor) -> Tensor:
        return gates.detach() + 0 * gates


class MeanTermDropped(Composed):
    """The reciprocal root is taken for a constant."""

    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        root = ((x.detach() ** 2).mean(-1, keepdim=True) + eps).rsqrt()
        return x * root * (weight.float() + offset)


class LastTokenMissingFromTheWeights(Composed):
    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        last = (torch.arange(x.shape[0]) == x.shape[0] - 1)[:, None, None]
        factor = torch.where(last, weight.detach().float(), weight.float()) + offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * factor


class WeightGradientInBfloat16(Composed):
    """The products are rounded before they are added up."""

    def normalised(self, x: Tensor, weight: Tensor, eps: float, offset: float, lanes: int) -> Tensor:
        spread = weight.expand(x.shape).bfloat16().float()
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps) * (spread + offset)


class KeysWithThePitchOfQueries(Composed):
    def __call__(self, q_gate: Tensor, k: Tensor, *others: Tensor, **keywords: Any) -> Outputs:
        reach = k.storage_offset() + (k.shape[0] - 1) * q_gate.stride(0) + k.shape[1]
        if k.numel() and reach <= k.untyped_storage().nbytes() // k.element_size():
            k = k.as_strided(k.shape, (q_gate.stride(0), 1), k.storage_offset())
        return super().__call__(q_gate, k, *others, **keywords)


class PitchOfQueriesIgnored(Composed):
    def __call__(self, q_gate: Tensor, k: Tensor, *others: Tensor, **keywords: Any) -> Outputs:
        dense = q_gate.as_strided(q_gate.shape, (q_gate.shape[1], 1), q_gate.storage_offset())
        return super().__call__(dense, k, *others, **keywords)


class PaddingIsRead(Composed):
    """Rows of padding are computed as all others are, and only not written."""

    def kept(self, slots: Tensor | None, tokens: int) -> Tensor:
        return torch.arange(tokens)

    def __call__(self, q_gate: Tensor, k: Tensor, *others: Tensor, **keywords: Any) -> Outputs:
        outputs = super().__call__(q_gate, k, *others, **keywords)
        if keywords.get("slots") is None:
            return outputs
        kept = super().kept(keywords["slots"], k.shape[0])
        q, k, gate = (None if y is None else super(PaddingIsRead, self).written(y[kept], kept, len(y)) for y in outputs)
        assert q is not None
        assert k is not None
        return q, k, gate


@dataclass(frozen=True)
class Wrong:
    """A fault, the judgement that must see it, and the end of the id of the case of the standard plan that must do."""

    run: type[Composed]
    case: str
    judgement: str = "accuracy-forward"
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


PLAIN = "b1-s7-h3-d256-r64/random/shared-table/sample-positions"
FIVE = PLAIN.replace("s7", "s5")
SEVEN, ELEVEN = (f"b1-s{size}-h8-d256-r64/random/shared-table/sample-positions" for size in (7, 11))
ROW_ENDS = "b1-s9-h3-d256-r64/random/shared-table/row-ends-positions/model-cache"
CONTIGUOUS = "b1-s7-h3-d128-r64/random/shared-table/sample-positions/contiguous-11-11-10"
SMALL = "b1-s255-h3-d256-r64/basis-first/shared-table/ramp-positions/model-cache"
EXACT = "b1-s40-h5-d256-r64/exact-sum/shared-table/sample-positions"

WRONG = (
    # Where each token has rows of its own a wrong one reads NaN. The model's own cache has numbers everywhere.
    *(
        Wrong(run, case)
        for run in (TimeRowForEveryLane, HeightAndWidthSwapped)
        for case in (PLAIN, CONTIGUOUS, ROW_ENDS)
    ),
    Wrong(WidthOffByOne, "b2-s9-h3-d256-r64/random/shared-table/sample-positions/model-cache"),
    Wrong(WidthOffByOne, SMALL),
    Wrong(WidthOffByOne, CONTIGUOUS),
    Wrong(PitchOfPositionsIgnored, f"{SEVEN}/sliced-positions"),
    Wrong(PitchOfPositionsIgnored, f"{SEVEN}/transposed-positions"),
    Wrong(PositionsReadAs32Bits, f"{SEVEN}/one-row"),
    Wrong(OutOfRangeClamped, f"{ELEVEN}/out-of-range"),
    Wrong(LastRowRefused, PLAIN),
    Wrong(LastRowRefused, ROW_ENDS),
    Wrong(CacheInBfloat16, PLAIN),
    Wrong(PitchOfCacheIgnored, f"{FIVE}/x=packed-qkv/table=sliced-rows/sliced-positions"),
    Wrong(IntermediateRoundingSkipped, PLAIN, dtypes=("bfloat16", "float16")),
    Wrong(RotationInActivationDtype, PLAIN, dtypes=("bfloat16", "float16")),
    Wrong(OffsetForgotten, PLAIN),
    Wrong(EpsOutsideTheRoot, f"{SEVEN}/large-eps"),
    Wrong(EpsOutsideTheRoot, "b2-s16-h3-d256-r64/magnitudes/shared-table/sample-positions"),
    Wrong(MeanOfTheRotatedChannels, PLAIN),
    Wrong(KeysByTheWeightOfQueries, PLAIN),
    Wrong(TailNotNormalised, PLAIN),
    Wrong(TailRotated, PLAIN),
    Wrong(GateOfTheWrongHead, f"{FIVE.replace('h3', 'h8')}/k=contiguous"),
    Wrong(GateThroughFloat, "b1-s16-h3-d256-r64/special/shared-table/sample-positions/slots"),
    Wrong(PitchOfQueriesIgnored, f"{FIVE}/x=packed-qkv/table=sliced-rows/sliced-positions"),
    Wrong(KeysWithThePitchOfQueries, f"{FIVE.replace('h3', 'h8')}/k=packed-qkv"),
    Wrong(PaddingIsWritten, "b1-s9-h8-d256-r64/random/shared-table/sample-positions/slots/padding", "purity"),
    Wrong(PaddingIsRead, f"{ELEVEN}/slots", "accuracy-vjp"),
    Wrong(PaddingIsRead, f"{ELEVEN.replace('h8', 'h3')}/slots/weights", "accuracy-vjp"),
    Wrong(GateGradientDropped, PLAIN, "accuracy-vjp"),
    Wrong(MeanTermDropped, PLAIN, "accuracy-vjp"),
    Wrong(LastTokenMissingFromTheWeights, f"{FIVE}/weights", "accuracy-vjp"),
    Wrong(LastTokenMissingFromTheWeights, f"{EXACT}/weights", "accuracy-vjp"),
    Wrong(LastTokenMissingFromTheWeights, f"{EXACT}/slots/weights", "accuracy-vjp"),
    Wrong(WeightGradientInBfloat16, f"{FIVE}/weights", "accuracy-vjp", ("float32",)),
)


WIDE = ("vjp", "strided", "any-shape", "any-dtype", "any-position")
"""What widens the cases of every judgement."""


def candidate(run: Callable[..., Any], *claims: str, **keywords: Any) -> Candidate:
    wanted: dict[str, Any] = {"devices": ("cpu",), "provides": (*WIDE, *claims), **keywords}
    return Candidate("norm", CONTRACT, run, family="norm_rotate_gate", **wanted)


def reference(*operands: Tensor, eps: float, **options: Any) -> Outputs:
    return qk_norm_rope_gate(*operands, eps=eps, backend="reference", **options)


def verdict_on(wanted: Candidate, judgement: str, case: str, dtype: str, plan: str = "standard") -> Verdict:
    """The verdict on the one case whose id ends like that."""
    selection = Selection(plan, judgements=(judgement,), devices=("cpu",), dtypes=(dtype,))
    (question,) = (q for q in questions(wanted, selection) if q.id.endswith(f"/{case}"))
    return judge(wanted, question, seed=0)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.run.__name__}-{w.case}")
def test_each_fault_of_the_field_fails(wrong: Wrong) -> None:
    """The case fails in each dtype that can show it, and the right kernel passes it."""
    for dtype in wrong.dtypes:
        found = verdict_on(candidate(wrong.run()), wrong.judgement, wrong.case, dtype)
        assert found.verdict == "fail", (dtype, found)
        assert "judge failed" not in found.facts
        right = verdict_on(candidate(Composed()), wrong.judgement, wrong.case, dtype)
        assert right.verdict == "pass", (dtype, right.reason)


CORE = ("accuracy-forward", "accuracy-vjp", "invariance-forward", "invariance-vjp", "purity", "autograd", "refusals")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_order_passes_without_strict(dtype: str, failing: Failing) -> None:
    """torch's own norm adds in another order, and its gradients are autograd's: both are admitted."""
    found = failing(candidate(Composed()), "smoke", (*CORE, "repeatability", "table-gradient"), (dtype,))
    assert found == {}


def test_another_order_is_not_strict() -> None:
    """With the claim it fails strict-bytes in fp32, where the order of a sum shows in most elements."""
    for variant in ("forward", "vjp"):
        case = f"b1-s64-h3-d256-r64/random/shared-table/sample-positions/{variant}"
        found = verdict_on(candidate(Composed(), "strict"), "strict-bytes", case, "float32")
        assert found.verdict == "fail", found
        assert found.facts["unlike"] > 0.1 * found.facts["elements"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_reference_passes(dtype: str, failing: Failing) -> None:
    """Ours keeps the contract's own order, with every option, forward and backward."""
    ours = candidate(reference, "strict", "refusals", "opcheck", "export", "autocast")
    assert failing(ours, "smoke", dtypes=(dtype,)) == {}
    judged = ("strict-bytes",) if dtype != "bfloat16" else ("strict-bytes", "refusals")
    assert failing(ours, "standard", judged, (dtype,)) == {}


def test_outputs_may_have_a_dimension_for_the_heads(failing: Failing) -> None:
    """[T, H, D] is as good as [T, H * D]; any other shape is told."""

    def by_heads(*operands: Tensor, **options: Any) -> Outputs:
        width = operands[2].shape[0]
        q, k, gate = (None if y is None else y.view(y.shape[0], -1, width) for y in reference(*operands, **options))
        assert q is not None
        assert k is not None
        return q, k, gate

    def by_channels(*operands: Tensor, **options: Any) -> Outputs:
        q, k, gate = reference(*operands, **options)
        return q.T, k, gate

    named = ("accuracy-forward", "accuracy-vjp", "autograd")
    assert failing(candidate(by_heads), "smoke", named, ("float32",)) == {}
    found = failing(candidate(by_channels), "smoke", named[:1], ("float32",))
    assert "where q has shape (7, 256) or (7, 1, 256)" in found["accuracy-forward"]


def test_fewer_keywords_are_judged_on_the_defaults(ask: Ask) -> None:
    """A kernel with no keyword but eps is asked neither for other weights nor for another rounding; one that takes all
    is asked for both."""

    def plain(q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cache: Tensor, positions: Tensor, *,
              eps: float, axis_map: Tensor | None = None) -> Outputs:  # fmt: skip
        return reference(q_gate, k, q_weight, k_weight, cache, positions, eps=eps, axis_map=axis_map)

    asked = {}
    for run in (plain, reference):
        selection = Selection("standard", judgements=("accuracy-forward",), devices=("cpu",), dtypes=("bfloat16",))
        asked[run] = " ".join(q.id for q in questions(candidate(run), selection))
    for option in ("plain-weights", "unrounded-norm", "fma", "slots", "no-gate"):
        assert option not in asked[plain]
        assert option in asked[reference]
    assert "large-eps" in asked[plain]
    verdicts = ask(candidate(plain), "smoke", ("accuracy-forward", "accuracy-vjp"), ("bfloat16",))
    assert {v.verdict for v in verdicts} == {"pass"}


def test_the_tensor_of_the_worst_element_is_named() -> None:
    """A failure says whether it is in the queries or in the keys, and where."""
    found = verdict_on(candidate(KeysByTheWeightOfQueries()), "accuracy-forward", PLAIN, "float32")
    assert found.worst is not None
    assert found.worst["tensor"] == "k"
    assert (found.worst["head of the tensor"], found.worst["head"]) == (0, 2)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"vjp": reference}, "vjp is not for family norm_rotate_gate"),
        ({"in_place": True, "provides": ()}, "in_place is not for family norm_rotate_gate"),
        ({"provides": ("conjugate",)}, "provides must not hold 'conjugate' for family norm_rotate_gate"),
        ({"provides": ("higher-vjp",)}, "provides must not hold 'higher-vjp' for family norm_rotate_gate"),
    ],
)
def test_what_the_call_has_no_room_for_is_refused(wanted: dict[str, Any], said: str) -> None:
    """A backward of its own would need x, writing in place a place for the gates."""
    with pytest.raises(CandidateError, match=said):
        candidate(reference, **wanted)


def test_a_family_keeps_contracts_of_its_own() -> None:
    """Neither does a bare rotation keep a contract with a norm, nor this family one without."""
    with pytest.raises(CandidateError, match="family must be one of norm_rotate_gate for contract"):
        Candidate("norm", CONTRACT, reference, devices=("cpu",))
    with pytest.raises(CandidateError, match=r"must be one of .* for contract qwen-image, not 'norm_rotate_gate'"):
        Candidate("norm", "qwen-image", reference, devices=("cpu",), family="norm_rotate_gate")


def test_laws_are_not_asked() -> None:
    """What is normalised is no rotation of what was given: not applicable, with that reason."""
    selection = Selection("smoke", judgements=("laws",), devices=("cpu",))
    (unasked,) = questions(candidate(reference), selection)
    assert isinstance(unasked, Unasked)
    assert (unasked.verdict, unasked.reason) == ("not-applicable", "what is normalised first obeys no law of rotations")


SHIPPED = """
from ropecheck.suites.adapters import shipped

CANDIDATES = [c for c in shipped.CANDIDATES if c.name == "ropecheck/triton-norm-rope-gate"]
"""


def test_our_triton_kernel_passes_interpreted(verdicts_of_a_run: Callable[..., list[Verdict]]) -> None:
    """The smoke plan in bf16, in a process that interprets; and the machine code of both directions."""
    asked = "accuracy-forward", "accuracy-vjp", "strict-bytes", "purity", "autograd", "provenance", "codegen"
    options = (word for judgement in asked for word in ("--judgement", judgement))
    verdicts = verdicts_of_a_run(SHIPPED, "--plan", "smoke", "--dtype", "bfloat16", "-n", "0", *options)
    assert {v.verdict for v in verdicts} == {"pass"}, [v for v in verdicts if v.verdict != "pass"]
    assert {v.judgement for v in verdicts} == set(asked)
    kernels = {name for v in verdicts if v.judgement == "provenance" for name in v.facts["kernels"]}
    assert kernels == {"norm_rope_gate_kernel", "norm_rope_backward_kernel"}
