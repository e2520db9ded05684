"""What the native operators of the normalised rotation refuse, on a machine without a GPU.

As in the tests of the rotation's refusals, the dispatcher hands CPU tensors to the CUDA kernels, which ask for a CUDA
tensor last and touch no memory before.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.norm_operands import check_norm_gradients, check_norm_operands

Operands = dict[str, Tensor | None]

OPERANDS: Operands = {
    "q_gate": torch.zeros(7, 2 * 3 * 8),
    "k": torch.zeros(7, 8),
    "q_weight": torch.zeros(8),
    "k_weight": torch.zeros(8),
    "cos_sin_cache": torch.zeros(9, 4),
    "positions": torch.zeros(7, dtype=torch.int64),
    "axis_map": None,
    "slots": None,
}
THREE_ROWS: Operands = {
    "positions": torch.zeros(3, 7, dtype=torch.int32),
    "axis_map": torch.zeros(2, dtype=torch.int32),
}
GRADIENTS = torch.zeros(7, 24), torch.zeros(7, 8), torch.zeros(7, 24)

REFUSED: dict[str, Operands] = {
    "q_gate rank": {"q_gate": torch.zeros(7, 3, 16)},
    "q_gate dtype": {"q_gate": torch.zeros(7, 48, dtype=torch.float64)},
    "q_gate channels": {"q_gate": torch.zeros(7, 40)},
    "q_gate channel stride": {"q_gate": torch.zeros(7, 96)[:, ::2]},
    "k rank": {"k": torch.zeros(7)},
    "k dtype": {"k": torch.zeros(7, 8, dtype=torch.float16)},
    "k channels": {"k": torch.zeros(7, 12)},
    "k channel stride": {"k": torch.zeros(8, 7).T},
    "k tokens": {"k": torch.zeros(6, 8)},
    "weight rank": {"q_weight": torch.zeros(1, 8)},
    "weight dtype": {"k_weight": torch.zeros(8, dtype=torch.bfloat16)},
    "weight stride": {"q_weight": torch.zeros(16)[::2]},
    "weights unlike": {"k_weight": torch.zeros(7)},
    "D of one": {"q_weight": torch.zeros(1), "k_weight": torch.zeros(1)},
    "D above 256": {"q_weight": torch.zeros(257), "k_weight": torch.zeros(257)},
    "table rank": {"cos_sin_cache": torch.zeros(9)},
    "table dtype": {"cos_sin_cache": torch.zeros(9, 4, dtype=torch.float64)},
    "odd R": {"cos_sin_cache": torch.zeros(9, 3)},
    "no R": {"cos_sin_cache": torch.zeros(9, 0)},
    "R above D": {"cos_sin_cache": torch.zeros(9, 10)},
    "table stride": {"cos_sin_cache": torch.zeros(4, 9).T},
    "positions dtype": {"positions": torch.zeros(7)},
    "positions rank": {"positions": torch.zeros(2, 7, dtype=torch.int64)},
    "positions count": {"positions": torch.zeros(6, dtype=torch.int64)},
    "three rows, no map": {"positions": torch.zeros(3, 7, dtype=torch.int64)},
    "map, one row": {"axis_map": torch.zeros(2, dtype=torch.int64)},
    "map dtype": THREE_ROWS | {"axis_map": torch.zeros(2)},
    "map length": THREE_ROWS | {"axis_map": torch.zeros(3, dtype=torch.int64)},
    "slots dtype": {"slots": torch.zeros(7)},
    "slots count": {"slots": torch.zeros(6, dtype=torch.int64)},
}
GRADIENTS_REFUSED: dict[str, tuple[Tensor, Tensor, Tensor]] = {
    "q_gradient width": (torch.zeros(7, 48), *GRADIENTS[1:]),
    "k_gradient tokens": (GRADIENTS[0], torch.zeros(6, 8), GRADIENTS[2]),
    "gate_gradient dtype": (*GRADIENTS[:2], torch.zeros(7, 24, dtype=torch.float16)),
}

pytestmark = pytest.mark.usefixtures("native_library")


def native(operator: str, *arguments: Any) -> Any:
    """Call the native kernel of ``operator``, whatever the device of the operands."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.ropecheck, operator).default.redispatch(keys, *arguments)


@pytest.mark.parametrize("case", REFUSED)
def test_operands_are_refused_in_the_words_of_python(case: str) -> None:
    """Forward and backward, the sentence is the one that the public function has for the same operands."""
    operands: Any = tuple((OPERANDS | REFUSED[case]).values())
    with pytest.raises((TypeError, ValueError)) as wanted:
        check_norm_operands(*operands, True)
    refusal = f"^{re.escape(str(wanted.value))}$"
    with pytest.raises(ValueError, match=refusal):
        native("qk_norm_rope_gate_cuda", *operands, 1e-6, 1.0, True, True, False)
    with pytest.raises(ValueError, match=refusal):
        native("qk_norm_rope_gate_backward_cuda", *GRADIENTS, *operands, 1e-6, 1.0, True, False, True)


@pytest.mark.parametrize("case", GRADIENTS_REFUSED)
def test_gradients_are_refused_in_the_words_of_python(case: str) -> None:
    """The sentence names the incoming gradient that is unlike the output it belongs to."""
    operands: Any = tuple(OPERANDS.values())
    sizes = check_norm_operands(*operands, True)
    given = GRADIENTS_REFUSED[case]
    with pytest.raises((TypeError, ValueError)) as wanted:
        check_norm_gradients(*given, operands[0], sizes, True)
    with pytest.raises(ValueError, match=f"^{re.escape(str(wanted.value))}$"):
        native("qk_norm_rope_gate_backward_cuda", *given, *operands, 1e-6, 1.0, True, False, True)


@pytest.mark.parametrize("changed", [{}, THREE_ROWS, {"slots": torch.zeros(14, dtype=torch.int32)[::2]}], ids=str)
def test_a_cpu_tensor_is_refused_last(changed: Operands) -> None:
    """Where nothing else is wrong the device is; no operand is written."""
    operands: Any = tuple((OPERANDS | changed).values())
    for tokens in (7, 0):
        some = tuple(x if x is None or i in (2, 3, 4, 6) else x[..., :tokens] for i, x in enumerate(operands))
        q_gate, k = (torch.ones(tokens, width) for width in (48, 8))
        given = tuple(gradient[:tokens] for gradient in GRADIENTS)
        with pytest.raises(ValueError, match=r"^q_gate: expected a cuda tensor, got one on cpu$"):
            native("qk_norm_rope_gate_cuda", q_gate, k, *some[2:], 1e-6, 1.0, True, True, False)
        with pytest.raises(ValueError, match=r"^q_gate: expected a cuda tensor, got one on cpu$"):
            native("qk_norm_rope_gate_backward_cuda", *given, q_gate, k, *some[2:], 1e-6, 1.0, True, False, True)
        assert bool((q_gate == 1).all() and (k == 1).all())
