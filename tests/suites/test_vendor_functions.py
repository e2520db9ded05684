"""Vendors' own functions: each passes its contract and fails the other's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropecheck.suites.adapters import diffusers, transformers
from ropecheck.suites.candidates import Candidate

needs_diffusers = pytest.mark.skipif(not importlib.util.find_spec("diffusers"), reason="diffusers is not installed")
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed"
)

(QWEN_IMAGE,) = diffusers.CANDIDATES
LLAMA, VISION = transformers.CANDIDATES
Failing = Callable[..., dict[str, str]]


def qwen_with_a_narrow_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' function, which takes no 16-bit table, on the widened table of another contract."""
    return diffusers.rotate(x, cos.float(), sin.float())


def llama_with_a_wide_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' function with its table in the activation dtype, as its own model hands it over."""
    return transformers.rotate_llama(x, cos.to(x.dtype), sin.to(x.dtype))


def half_split_with_one_rounding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 arithmetic on the contract's own table, rounded once."""
    c, s = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    x0, x1 = (half.float() for half in x.chunk(2, dim=-1))
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).to(x.dtype)


OTHER_PAIRS = {"accuracy-forward", "accuracy-vjp", "autograd", "table-gradient", "laws"}
"""What fails where other channels are paired: the values, and whatever is held against the same values."""


@needs_diffusers
def test_diffusers_passes_qwen_image(failing: Failing) -> None:
    """apply_rotary_emb_qwen passes every judgement of qwen-image in every dtype."""
    assert failing(QWEN_IMAGE) == {}


@needs_diffusers
def test_diffusers_passes_upstream_gradients(failing: Failing) -> None:
    """Of any strides; an odd storage offset, which its complex view refuses, is for those that claim strided."""
    assert failing(QWEN_IMAGE, "standard", ("accuracy-vjp",), ("float32",), only="gradient=") == {}


@needs_diffusers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_diffusers_fails_hf_llama(dtype: str, failing: Failing) -> None:
    """It pairs other channels, so accuracy fails forward and backward, and what follows from it; nothing else does."""
    other = replace(QWEN_IMAGE, contract="hf-llama", run=qwen_with_a_narrow_table)
    reasons = failing(other, dtypes=(dtype,))
    assert set(reasons) == OTHER_PAIRS
    assert all("not admissible" in reasons[name] for name in ("accuracy-forward", "accuracy-vjp"))


@needs_transformers
@pytest.mark.parametrize("candidate", [LLAMA, VISION], ids=lambda c: c.name)
def test_transformers_passes_its_contracts(candidate: Candidate, failing: Failing) -> None:
    """The functions of Llama and of Qwen2-VL's vision tower pass every judgement in every dtype."""
    assert failing(candidate) == {}


@needs_transformers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_llama_fails_qwen_image(dtype: str, failing: Failing) -> None:
    """It pairs other channels, so accuracy fails forward and backward, and what follows from it; nothing else does."""
    reasons = failing(replace(LLAMA, contract="qwen-image", run=llama_with_a_wide_table), dtypes=(dtype,))
    assert set(reasons) == OTHER_PAIRS
    assert all("not admissible" in reasons[name] for name in ("accuracy-forward", "accuracy-vjp"))


@needs_transformers
def test_llama_returns_another_dtype_for_an_fp32_table(failing: Failing) -> None:
    """Handed the fp32 table of neox it promotes its output to fp32, which is a failure of its own."""
    reasons = failing(replace(LLAMA, contract="neox"), judgements=("accuracy-forward",), dtypes=("bfloat16",))
    assert "run returned dtype torch.float32, where x has dtype torch.bfloat16" in reasons["accuracy-forward"]


@pytest.mark.parametrize(("dtype", "differs"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_one_rounding_fails_hf_llama(dtype: str, differs: bool, failing: Failing) -> None:
    """More accurate than hf-llama's three roundings is wrong in 16 bits; in fp32 the two recipes are one."""
    kernel = Candidate("one-rounding", "hf-llama", half_split_with_one_rounding, ("cpu",), (dtype,), ("vjp",))
    reasons = failing(kernel, judgements=("accuracy-forward", "accuracy-vjp", "invariance-forward"))
    assert list(reasons) == (["accuracy-forward", "accuracy-vjp"] if differs else [])
