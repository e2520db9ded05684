"""Each bad input of the normalised rotation gets one sentence that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ropecheck.kernels import qk_norm_rope_gate

T, D, R, N = 5, 8, 4, 16
Q_GATE, K, WEIGHT = torch.zeros(T, 3 * 2 * D), torch.zeros(T, 2 * D), torch.zeros(D)
CACHE, POSITIONS = torch.zeros(N, R), torch.zeros(T, dtype=torch.int64)
THREE_ROWS, AXIS_MAP = torch.zeros(3, T, dtype=torch.int64), torch.tensor([0, 2])
NO_TENSOR = r"expected a torch\.Tensor"
ACTIVATIONS = "expected float32, float16 or bfloat16"

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q_gate no tensor": ({"q_gate": [1.0]}, TypeError, rf"q_gate: {NO_TENSOR}, got list"),
    "positions no tensor": ({"positions": 3}, TypeError, rf"positions: {NO_TENSOR}, got int"),
    "axis_map no tensor": ({"axis_map": [0, 1]}, TypeError, rf"axis_map: {NO_TENSOR} or None, got list"),
    "slots no tensor": ({"slots": (0,)}, TypeError, rf"slots: {NO_TENSOR} or None, got tuple"),
    "q_gate rank": ({"q_gate": Q_GATE[None]}, ValueError, r"q_gate: expected two dimensions .* got shape \[1, 5, 48\]"),
    "q_gate dtype": ({"q_gate": Q_GATE.double()}, TypeError, rf"q_gate: {ACTIVATIONS}, got torch\.float64"),
    "q_gate width": ({"q_gate": Q_GATE[:, :-D]}, ValueError, r"q_gate: expected a multiple of 16 channels .* got 40"),
    "q width": ({"q_gate": Q_GATE[:, 1:], "gate": False}, ValueError, r"q_gate: expected a multiple of 8 .* got 47"),
    "q_gate channels": ({"q_gate": torch.zeros(48, T).T}, ValueError, r"q_gate: .* got channel stride 5"),
    "k rank": ({"k": K[0]}, ValueError, r"k: expected two dimensions .* got shape \[16\]"),
    "k dtype": ({"k": K.half()}, TypeError, r"k: expected the dtype of q_gate, torch\.float32, got torch\.float16"),
    "k width": ({"k": K[:, 1:]}, ValueError, r"k: expected a multiple of 8 channels of a head, got 15"),
    "k channels": ({"k": torch.zeros(T, 32)[:, ::2]}, ValueError, r"k: .* got channel stride 2"),
    "k tokens": ({"k": K[1:]}, ValueError, r"k: expected 5 tokens, as many as q_gate has, got 4"),
    "k device": ({"k": K.to("meta")}, ValueError, r"k: expected the device of q_gate, cpu, got meta"),
    "weight rank": ({"q_weight": WEIGHT[None]}, ValueError, r"q_weight: expected one dimension .* \[1, 8\]"),
    "weight dtype": ({"k_weight": WEIGHT.half()}, TypeError, r"k_weight: .* or float32, got torch\.float16"),
    "weight stride": ({"q_weight": torch.zeros(16)[::2]}, ValueError, r"q_weight: .* got stride 2"),
    "weights of two dtypes": (
        {"q_gate": Q_GATE.half(), "k": K.half(), "q_weight": WEIGHT.half()},
        TypeError,
        r"k_weight: expected the dtype of q_weight, torch\.float16, got torch\.float32",
    ),
    "weights of two sizes": ({"k_weight": WEIGHT[1:]}, ValueError, r"k_weight: expected 8 channels, .* got 7"),
    "D of one": ({"q_weight": WEIGHT[:1]}, ValueError, r"q_weight: expected a head dimension from 2 to 256, got 1"),
    "D above 256": ({"q_weight": torch.zeros(258)}, ValueError, r"q_weight: .* from 2 to 256, got 258"),
    "cache rank": ({"cos_sin_cache": CACHE[0]}, ValueError, r"cos_sin_cache: .* \[N, R\], got shape \[4\]"),
    "cache dtype": ({"cos_sin_cache": CACHE.double()}, TypeError, rf"cos_sin_cache: {ACTIVATIONS}, got torch.float64"),
    "odd R": ({"cos_sin_cache": CACHE[:, :3]}, ValueError, r"cos_sin_cache: expected an even number .* got 3"),
    "no R": ({"cos_sin_cache": CACHE[:, :0]}, ValueError, r"cos_sin_cache: expected an even number .* got 0"),
    "R above D": ({"cos_sin_cache": torch.zeros(N, 10)}, ValueError, r"cos_sin_cache: expected at most 8 .* got 10"),
    "cache columns": ({"cos_sin_cache": torch.zeros(R, N).T}, ValueError, r"cos_sin_cache: .* got column stride 16"),
    "cache gradient": (
        {"cos_sin_cache": CACHE.clone().requires_grad_()},
        ValueError,
        r"cos_sin_cache: gradients .* not computed",
    ),
    "positions dtype": ({"positions": POSITIONS.float()}, TypeError, r"positions: expected int32 or int64, got"),
    "positions rank": ({"positions": THREE_ROWS[None]}, ValueError, r"positions: expected \[T\] or \[3, T\], got"),
    "two rows": (
        {"positions": THREE_ROWS[:2], "axis_map": AXIS_MAP},
        ValueError,
        r"positions: expected \[T\] or \[3, T\], got shape \[2, 5\]",
    ),
    "positions per token": ({"positions": POSITIONS[1:]}, ValueError, r"positions: expected 5, .* got 4"),
    "rows not transposed": (
        {"positions": THREE_ROWS.T, "axis_map": AXIS_MAP},
        ValueError,
        r"positions: expected \[T\] or \[3, T\], got shape \[5, 3\]",
    ),
    "three rows, no map": ({"positions": THREE_ROWS}, ValueError, r"axis_map: expected one, .* got None"),
    "map, one row": ({"axis_map": AXIS_MAP}, ValueError, r"axis_map: expected None, .* got a tensor"),
    "map length": (
        {"positions": THREE_ROWS, "axis_map": torch.zeros(4, dtype=torch.int64)},
        ValueError,
        r"axis_map: expected \[2\], one for each lane, got shape \[4\]",
    ),
    "map dtype": (
        {"positions": THREE_ROWS, "axis_map": torch.zeros(2)},
        TypeError,
        r"axis_map: expected int32 or int64, got torch\.float32",
    ),
    "map above 2": (
        {"positions": THREE_ROWS, "axis_map": torch.tensor([0, 3])},
        ValueError,
        r"axis_map: expected values 0, 1 or 2, got values from 0 to 3",
    ),
    "map below 0": (
        {"positions": THREE_ROWS, "axis_map": torch.tensor([-1, 0])},
        ValueError,
        r"axis_map: expected values 0, 1 or 2, got values from -1 to 0",
    ),
    "slots dtype": ({"slots": POSITIONS.short()}, TypeError, r"slots: expected int32 or int64, got torch\.int16"),
    "slots length": ({"slots": POSITIONS[1:]}, ValueError, r"slots: expected \[5\], one for each token, got shape"),
    "eps no number": ({"eps": "1e-6"}, TypeError, r"eps: expected an int or a float, got str"),
    "eps negative": ({"eps": -1e-6}, ValueError, r"eps: expected a number that is not negative, got -1e-06"),
    "eps NaN": ({"eps": float("nan")}, ValueError, r"eps: expected a number that fp32 holds, got nan"),
    "offset infinite": ({"weight_offset": float("inf")}, ValueError, r"weight_offset: expected a number that fp32 "),
    "offset beyond fp32": ({"weight_offset": 1e39}, ValueError, r"weight_offset: expected a number that fp32 holds"),
    "eps a bool": ({"eps": True}, TypeError, r"eps: expected an int or a float, got bool"),
    "gate no bool": ({"gate": 1}, TypeError, r"gate: expected True or False, got 1"),
    "round_norm no bool": ({"round_norm": "no"}, TypeError, r"round_norm: expected True or False, got 'no'"),
    "backend": ({"backend": "eager"}, ValueError, r"backend: expected 'auto', 'cuda', 'triton' .* got 'eager'"),
}


def call(**changed: Any) -> Any:
    arguments: dict[str, Any] = {
        "q_gate": Q_GATE,
        "k": K,
        "q_weight": WEIGHT,
        "k_weight": WEIGHT,
        "cos_sin_cache": CACHE,
        "positions": POSITIONS,
        "eps": 1e-6,
    }
    return qk_norm_rope_gate(**arguments | changed)


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused(case: str) -> None:
    """The refusal is one line, of the documented type, and begins with the argument's name."""
    changed, error, message = REFUSALS[case]
    with pytest.raises(error, match="^" + message) as caught:
        call(**changed)
    assert "\n" not in str(caught.value)


def test_map_that_was_written_to_is_read_again() -> None:
    """A map once accepted is refused after a bad value was written into it."""
    axis_map = AXIS_MAP.clone()
    call(positions=THREE_ROWS, axis_map=axis_map)
    axis_map[1] = 7
    with pytest.raises(ValueError, match=r"^axis_map: expected values 0, 1 or 2, got values from 0 to 7"):
        call(positions=THREE_ROWS, axis_map=axis_map)


def test_map_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map is not read again by later calls, which on a GPU would wait for it; one made for inference not either."""
    with torch.inference_mode():
        inference_map = AXIS_MAP.clone()
    maps = AXIS_MAP.clone(), inference_map
    for axis_map in maps:
        call(positions=THREE_ROWS, axis_map=axis_map)
    monkeypatch.setattr(torch, "aminmax", None)
    for axis_map in maps:
        call(positions=THREE_ROWS, axis_map=axis_map)


@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
def test_raw_operators_check_their_operands(backend: str) -> None:
    """The fake implementations of every backend refuse too, forward and backward."""
    meta = [x.to("meta") for x in (Q_GATE, K, WEIGHT, WEIGHT, CACHE, POSITIONS[1:])]
    forward = getattr(torch.ops.ropecheck, f"qk_norm_rope_gate_{backend}")
    with pytest.raises(ValueError, match=r"^positions: expected 5"):
        forward(*meta, None, None, 1e-6, 1.0, True, True, False)
    meta[5] = POSITIONS.to("meta")
    backward = getattr(torch.ops.ropecheck, f"qk_norm_rope_gate_backward_{backend}")
    gradients = [torch.zeros(shape, device="meta") for shape in ((T, 3 * D), (T, 2 * D), (T, 2 * D))]
    with pytest.raises(ValueError, match=r"^gate_gradient: expected \[5, 24\], got shape \[5, 16\]"):
        backward(*gradients, *meta, None, None, 1e-6, 1.0, True, False, True)


def test_raw_operator_refuses_a_table_that_requires_grad() -> None:
    """The operator itself raises too, so that a table's gradient is never silently None or zero."""
    table = CACHE.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"^cos_sin_cache: gradients with respect to the table are not computed"):
        torch.ops.ropecheck.qk_norm_rope_gate_reference(
            Q_GATE, K, WEIGHT, WEIGHT, table, POSITIONS, None, None, 1e-6, 1.0, True, True, False
        )


def test_second_derivative_is_refused() -> None:
    """Differentiating a gradient raises one sentence."""
    k = torch.randn(T, 2 * D, requires_grad=True)
    _, k_rotated, _ = call(k=k)
    (gradient,) = torch.autograd.grad(k_rotated.square().sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^qk_norm_rope_gate: a second derivative is not computed") as caught:
        gradient.sum().backward()
    assert "\n" not in str(caught.value)
