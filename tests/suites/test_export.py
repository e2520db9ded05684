"""export: what cannot be exported, or is exported with a length or a table of its own, fails it, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope, multi_axis_rope_pair
from ropecheck.suites.candidates import Candidate

Failing = Callable[..., dict[str, str]]
Ask = Callable[..., list[Any]]


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image in plain torch operations."""
    wide, c, s = x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def depending_on_a_value(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What is computed depends on a value, which a program cannot know."""
    return rotation(x, cos, sin) if bool(x.isfinite().all()) else rotation(x * 1, cos, sin)


LENGTHS = {n: n for n in range(1 << 12)}


def baking_the_length(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Looks its length up: a program for every length."""
    return rotation(x, cos, sin)[:, : LENGTHS[x.shape[1]]] if x.shape[1] < 1 << 12 else rotation(x, cos, sin)


def branching_on_the_length(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right on both sides of its bound: the program holds on the side of its example only."""
    return rotation(x.contiguous(), cos, sin) if x.shape[1] > 64 else rotation(x, cos, sin)


def truncating_when_exported(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = rotation(x, cos, sin)
    return (y.view(torch.int16) & -2).view(y.dtype) if torch.compiler.is_exporting() else y


class BakingTheTable:
    """The exported program holds the table of the eager call before as a constant."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            rows = cos.shape[-2]
            cos, sin = (torch.cat((kept, kept, kept), dim=-2)[..., :rows, :] for kept in self.kept)
        else:
            # At other positions than the exported program is run on.
            self.kept = [cos.flip(-2), sin.flip(-2)]
        return rotation(x, cos, sin)


def returning_a_list(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Another type than a tensor, but only in the program."""
    y = rotation(x, cos, sin)
    return [y] if torch.compiler.is_exporting() else y


@dataclass(frozen=True)
class Wrong:
    run: Callable[..., Any]
    reason: str
    fails: tuple[str, ...] = ("static", "dynamic")


WRONG = {
    "depending-on-a-value": Wrong(depending_on_a_value, "torch.export.export raised"),
    "baking-the-length": Wrong(baking_the_length, "torch.export.export raised", ("dynamic",)),
    "branching-on-the-length": Wrong(branching_on_the_length, "the exported program raised", ("dynamic",)),
    "baking-the-table": Wrong(BakingTheTable(), "of the exported program are not those of an eager call"),
    "truncating": Wrong(truncating_when_exported, "of the exported program are not those of an eager call"),
    "returning-a-list": Wrong(returning_a_list, "the exported program returns other shapes or dtypes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_when_exported_fails_alone(name: str, failing: Failing, ask: Ask) -> None:
    """A candidate that is right when called and wrong when exported fails export, where it shows, and nothing else."""
    wrong = WRONG[name]
    candidate = Candidate("wrong", "qwen-image", wrong.run, devices=("cpu",), provides=("strided", "export"))
    reasons = failing(candidate, dtypes=("bfloat16",))
    assert list(reasons) == ["export"], reasons
    assert wrong.reason in reasons["export"]
    verdicts = ask(candidate, judgements=("export",), dtypes=("bfloat16",))
    failed = {v.case.rpartition("/")[2] for v in verdicts if v.verdict == "fail"}
    assert failed == set(wrong.fails)


class Rotation(torch.autograd.Function):
    """A right backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotation(gradients[0], cos, -sin), None, None


def by_function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def ours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return multi_axis_rope(x, cos, sin, backend="reference")


def our_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return multi_axis_rope_pair(q, k, cos, sin, backend="reference")


def our_pair_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    multi_axis_rope_pair(q, k, cos, sin, in_place=True, backend="reference")


RIGHT: dict[str, dict[str, Any]] = {
    "ours": {"run": ours},
    "our-pair": {"run": our_pair, "family": "rotate_pair"},
    "our-pair-in-place": {"run": our_pair_in_place, "in_place": True, "family": "rotate_pair"},
    "plain-torch": {"run": rotation},
    "autograd-function": {"run": by_function},
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_when_exported_passes(name: str, ask: Ask) -> None:
    """Exported once, operators and compositions give an eager call's bytes for every table and length."""
    candidate = Candidate("right", "qwen-image", devices=("cpu",), provides=("strided", "export"), **RIGHT[name])
    verdicts = ask(candidate, "standard", ("export",), ("bfloat16",))
    assert [v.verdict for v in verdicts] == ["pass"] * 4, [v.reason for v in verdicts]
    assert {len(set(v.facts["lengths run"])) for v in verdicts} == {1, 4}
    assert sum("the program saved and loaded" in v.facts["programs"] for v in verdicts) == 3
