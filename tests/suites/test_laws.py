"""Laws: what obeys them, what breaks each of them, and what nothing else sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract
from ropecheck.suites.candidates import Candidate

Rotate = Callable[..., Tensor]
LAWS = ("identity", "inverse", "composition", "pair-norm", "relative-dot", "scaling")


def right(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """Right for neox."""
    c, s = cos.unsqueeze(-2), (-sin if conjugate else sin).unsqueeze(-2)
    x0, x1 = (half.float() for half in x.chunk(2, dim=-1))
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).to(x.dtype)


@cache
def own_rows() -> tuple[Tensor, Tensor]:
    positions = torch.cat((torch.arange(600), torch.arange(131_072 - 200, 131_072)))
    return contract("neox").tables(positions[:, None], torch.float32)


def snapping_to_its_own_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Finds out which of its own rows it was given, and turns by that one: right for every row of its contract."""
    rows_cos, rows_sin = own_rows()
    given, own = torch.cat((cos, sin), dim=-1), torch.cat((rows_cos, rows_sin), dim=-1)
    nearest = torch.cdist(given.reshape(-1, given.shape[-1]).double(), own.double()).argmin(-1).reshape(cos.shape[:-1])
    return right(x, rows_cos[nearest], rows_sin[nearest])


def too_long(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every result is 2 % too large."""
    return right(x, 1.02 * cos, 1.02 * sin)


def shifted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A constant is added."""
    return (right(x, cos, sin).float() + 0.125).to(x.dtype)


def shear(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second member is turned by the new first one, as an update in place does."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = (half.float() for half in x.chunk(2, dim=-1))
    y0 = x0 * c - x1 * s
    return torch.cat((y0, x1 * c + y0 * s), dim=-1).to(x.dtype)


def saturating(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Values are cut off at 8."""
    return right(x.clamp(-8, 8), cos, sin)


def never_zero(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The sine is kept away from zero."""
    return right(x, cos, torch.where(sin == 0, 2.0**-12, sin))


def absolute_sine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns one way only."""
    return right(x, cos, sin.abs())


def the_flag_ignored(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """Never turns back."""
    return right(x, cos, sin)


BREAKS: list[tuple[Rotate, tuple[str, ...], str]] = [
    (too_long, (), "identity inverse composition pair-norm"),
    (shifted, (), "identity inverse composition pair-norm relative-dot scaling"),
    (shear, (), "inverse composition pair-norm relative-dot"),
    (saturating, (), "scaling"),
    (never_zero, (), "identity"),
    (absolute_sine, (), "inverse composition relative-dot"),
    (the_flag_ignored, ("conjugate",), "inverse"),
    (snapping_to_its_own_table, (), "inverse composition relative-dot"),
]


@pytest.mark.parametrize(("run", "claims", "expected"), BREAKS, ids=[b[0].__name__ for b in BREAKS])
def test_broken_laws(run: Rotate, claims: tuple[str, ...], expected: str, ask: Callable[..., list[Any]]) -> None:
    """Each wrong rotation breaks the laws that it should in fp32, and obeys the others."""
    candidate = Candidate("wrong", "neox", run, ("cpu",), dtypes=("float32",), provides=claims)
    broken = {v.case.rpartition("/")[2] for v in ask(candidate, "standard", ("laws",)) if v.verdict == "fail"}
    assert [law for law in LAWS if law in broken] == expected.split()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["neox", "hf-llama"])
def test_right_rotations_obey(name: str, dtype: str, ask: Callable[..., list[Any]]) -> None:
    """A rotation by the contract's recipe obeys all laws, and comes within a factor of eight of every bound."""

    def run(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
        if name == "neox":
            return right(x, cos, sin, conjugate=conjugate)
        c, s = cos.unsqueeze(-2), (-sin if conjugate else sin).unsqueeze(-2)
        x0, x1 = x.chunk(2, dim=-1)
        return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)

    candidate = Candidate("right", name, run, ("cpu",), dtypes=(dtype,), provides=("conjugate",))
    verdicts = ask(candidate, "standard", ("laws",))
    assert {v.verdict for v in verdicts} == {"pass"}, [v.reason for v in verdicts if v.verdict != "pass"]
    shares = [v.facts["largest share of the bound"] for v in verdicts if "largest share of the bound" in v.facts]
    assert len(shares) == 8
    assert min(shares) > 0.125


def test_what_only_laws_see(failing: Callable[..., dict[str, str]]) -> None:
    """A candidate that is right for every row of its contract's table, and for no other, fails laws alone."""
    candidate = Candidate("snapping", "neox", snapping_to_its_own_table, ("cpu",), dtypes=("bfloat16",))
    assert list(failing(candidate)) == ["laws"]


def doing_nothing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.clone()


def turning_the_other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return right(x, cos, -sin)


@pytest.mark.parametrize("run", [doing_nothing, turning_the_other_way])
def test_what_laws_do_not_see(run: Rotate, ask: Callable[..., list[Any]]) -> None:
    """A candidate that does not turn, or turns the other way, obeys every law, but for zeros at position 0: their sign
    is not that of the recipe. It is accuracy that sees it."""
    candidate = Candidate("wrong", "neox", run, ("cpu",), dtypes=("bfloat16",))
    broken = [v for v in ask(candidate, "standard", ("laws",)) if v.verdict == "fail"]
    assert {v.case.rpartition("/")[2] for v in broken} == {"identity"}
    assert all("are not admissible" in v.reason and not v.facts["outside the bound"] for v in broken)
    assert ask(candidate, "standard", ("accuracy-forward",), only="b1-s7")[0].verdict == "fail"
