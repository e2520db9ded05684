"""What the native operators refuse when they are called without the public functions, on a machine without a GPU.

The dispatcher can be told to hand CPU tensors to a CUDA kernel. Ours asks for a CUDA tensor last and touches no
memory before, so that every other refusal can be seen.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels.operands import check_operands, check_pair_operands

X = torch.zeros(2, 7, 3, 8)
K = torch.zeros(2, 7, 1, 8)
TABLE = torch.zeros(7, 4)

TABLES_REFUSED: dict[str, dict[str, Tensor]] = {
    "cos rank": {"cos": TABLE[0]},
    "sin rank": {"sin": X},
    "cos dtype": {"cos": TABLE.half()},
    "sin dtype": {"sin": TABLE.double()},
    "cos and sin": {"sin": TABLE[:, :2]},
    "cos and sin, samples": {"sin": TABLE.expand(2, 7, 4)},
    "positions": {"cos": TABLE[:6], "sin": TABLE[:6]},
    "samples": {"cos": TABLE.expand(3, 7, 4), "sin": TABLE.expand(3, 7, 4)},
    "R above D": {"cos": torch.zeros(7, 5), "sin": torch.zeros(7, 5)},
    "no lanes": {"cos": TABLE[:, :0], "sin": TABLE[:, :0]},
}
SINGLE_REFUSED: dict[str, dict[str, Tensor]] = {
    "x rank": {"x": X[0]},
    "x dtype": {"x": X.double()},
    "R above an odd D": {"x": X[..., :7]},
    "D above 256": {"x": torch.zeros(2, 7, 3, 258)},
}
PAIRS_REFUSED: dict[str, dict[str, Tensor]] = {
    "q rank": {"q": X[0]},
    "q dtype": {"q": X.double()},
    "k rank": {"k": K[0]},
    "k dtype": {"k": K.half()},
    "k samples": {"k": K[:1]},
    "k tokens": {"k": K[:, :6]},
    "k channels": {"k": K[..., :6]},
    "k head dimension": {"k": torch.zeros(2, 7, 1, 258)},
}
PAIR_OPERATORS = ("multi_axis_rope_pair_cuda", "multi_axis_rope_pair_cuda_")

pytestmark = pytest.mark.usefixtures("native_library")


def native(operator: str, *operands: Tensor) -> Any:
    """Call the native kernel of ``operator``, whatever the device of the operands."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.ropecheck, operator).default.redispatch(keys, *operands, False, False)


@pytest.mark.parametrize("case", TABLES_REFUSED | SINGLE_REFUSED)
def test_one_tensor_is_refused_in_the_words_of_python(case: str) -> None:
    """The sentence is the one that the public function has for the same operands."""
    changed = (TABLES_REFUSED | SINGLE_REFUSED)[case]
    operands = ({"x": X, "cos": TABLE, "sin": TABLE} | changed).values()
    with pytest.raises((TypeError, ValueError)) as wanted:
        check_operands(*operands)
    with pytest.raises(ValueError, match=f"^{re.escape(str(wanted.value))}$"):
        native("multi_axis_rope_cuda", *operands)


@pytest.mark.parametrize("operator", PAIR_OPERATORS)
@pytest.mark.parametrize("case", TABLES_REFUSED | PAIRS_REFUSED)
def test_a_pair_is_refused_in_the_words_of_python(case: str, operator: str) -> None:
    """Out of place and in place, the sentence names q or k where the public function does."""
    operands = ({"q": X, "k": K, "cos": TABLE, "sin": TABLE} | (TABLES_REFUSED | PAIRS_REFUSED)[case]).values()
    with pytest.raises((TypeError, ValueError)) as wanted:
        check_pair_operands(*operands)
    with pytest.raises(ValueError, match=f"^{re.escape(str(wanted.value))}$"):
        native(operator, *operands)


@pytest.mark.parametrize("name", ["q", "k"])
def test_shared_memory_is_not_rotated_in_place(name: str) -> None:
    """A tensor whose heads are one memory is refused in place alone."""
    operands = {"q": X, "k": K, name: torch.zeros(2, 7, 1, 8).expand(2, 7, 3, 8), "cos": TABLE, "sin": TABLE}
    refusal = f"^{name}: elements that share memory are not rotated in place, got stride 0 in dimension 2$"
    with pytest.raises(ValueError, match=refusal):
        native("multi_axis_rope_pair_cuda_", *operands.values())
    with pytest.raises(ValueError, match="expected a cuda tensor"):
        native("multi_axis_rope_pair_cuda", *operands.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("samples", [0, 2])
def test_a_cpu_tensor_is_refused_last(dtype: torch.dtype, samples: int) -> None:
    """Where nothing else is wrong the device is, an empty tensor's too; no operand is written."""
    x = torch.ones(samples, 7, 3, 8, dtype=dtype)
    with pytest.raises(ValueError, match=r"^x: expected a cuda tensor, got one on cpu$"):
        native("multi_axis_rope_cuda", x, TABLE, TABLE)
    for operator in PAIR_OPERATORS:
        with pytest.raises(ValueError, match=r"^q: expected a cuda tensor, got one on cpu$"):
            native(operator, x, x.clone(), TABLE, TABLE)
    assert bool((x == 1).all())
