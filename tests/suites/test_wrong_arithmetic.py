"""Candidates that compute something else than their contract: each fails for the right judgement, and only for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.contracts import contract
from ropecheck.suites.candidates import Candidate

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for qwen-image: fp32, one rounding."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2).to(x.dtype)


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Another pairing. Right for neox: fp32, one rounding."""
    c, s = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    x0, x1 = (half.float() for half in x.chunk(2, dim=-1))
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).to(x.dtype)


def half_split_three_roundings(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Right for hf-llama: every operation in the activation dtype."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1)


def axes_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The height's lanes use the width's table, and the reverse."""
    frame, height, width = 8, 28, 28
    frames, rows, columns = (torch.arange(n) for n in (frame, height, width))
    swapped = torch.cat((frames, frame + height + columns, frame + rows))
    return adjacent(x, cos[..., swapped], sin[..., swapped])


def bfloat16_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The table is rounded to bf16."""
    return adjacent(x, cos.bfloat16().float(), sin.bfloat16().float())


def cosine_one_ulp_off(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every fp32 cosine is the next one above."""
    return adjacent(x, torch.nextafter(cos, torch.tensor(torch.inf)), sin)


def sine_one_ulp_off(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every fp32 sine is the next one below."""
    return adjacent(x, cos, torch.nextafter(sin, torch.tensor(-torch.inf)))


def truncated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 is cut to the output dtype instead of rounded."""
    wide = adjacent(x.float(), cos, sin)
    near = wide.to(x.dtype)
    return torch.where(near.float().abs() > wide.abs(), (near.view(torch.int16) - 1).view(x.dtype), near)


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """0.4 % too large."""
    return adjacent(x, 1.004 * cos, 1.004 * sin)


def last_pair_not_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last lane passes through."""
    y = adjacent(x, cos, sin)
    y[..., -2:] = x[..., -2:]
    return y


def slow_lanes_one_position_off(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The slowest quarter of the lanes is turned by one position more."""
    own = contract("qwen-image")
    step_cos, step_sin = (t[0].double() for t in own.tables(torch.ones(1, 3, dtype=torch.int64), torch.float32))
    slow = step_sin <= step_sin.sort().values[15]
    off_cos, off_sin = cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin
    return adjacent(x, torch.where(slow, off_cos, cos).float(), torch.where(slow, off_sin, sin).float())


def sine_of_the_other_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the other way."""
    return adjacent(x, cos, -sin)


def applied_twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation is applied to its own result."""
    return adjacent(adjacent(x.float(), cos, sin), cos, sin).to(x.dtype)


def products_rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every product is rounded to the activation dtype before the sum, which is made in fp32."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    x0c, x1s, x1c, x0s = ((a * b).to(x.dtype).float() for a, b in ((x0, c), (x1, s), (x1, c), (x0, s)))
    return torch.stack((x0c - x1s, x1c + x0s), dim=-1).flatten(-2).to(x.dtype)


def one_product_rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Only the product of the first member and the sine is rounded to the activation dtype."""
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
    y1 = x1 * c + (x0 * s).to(x.dtype).float()
    return torch.stack((x0 * c - x1 * s, y1), dim=-1).flatten(-2).to(x.dtype)


def three_roundings(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Table, products and sum in the activation dtype."""
    return adjacent_in(x, cos.to(x.dtype), sin.to(x.dtype))


def adjacent_in(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    x0, x1 = x[..., 0::2], x[..., 1::2]
    return torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), dim=-1).flatten(-2)


def overflowing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A power of two is multiplied in and divided out: large values become infinite on the way."""
    return (adjacent(x.float() * 2.0**16, cos, sin) / 2.0**16).to(x.dtype)


def flushing_subnormals(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Subnormal results become zero."""
    y = adjacent(x, cos, sin)
    return torch.where(y.abs() < torch.finfo(y.dtype).smallest_normal, torch.zeros_like(y), y)


def clearing_nan(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A NaN becomes zero."""
    return torch.where((y := adjacent(x, cos, sin)).isnan(), torch.zeros_like(y), y)


def losing_the_sign_of_zero(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """-0 becomes +0."""
    return adjacent(x, cos, sin) + 0.0


def transposed(rotate: Rotate) -> Rotate:
    """The gradient of a rotation is the rotation the other way."""
    return lambda gradient, cos, sin: rotate(gradient, cos, -sin)


@dataclass(frozen=True)
class Wrong:
    """A wrong candidate: its forward and backward, and the judgements, besides laws, that fail in ``dtypes``."""

    run: Rotate
    fails: tuple[str, ...] = ("accuracy-forward", "accuracy-vjp")
    vjp: Rotate | None = None
    dtypes: tuple[str, ...] = ("bfloat16",)
    contract: str = "qwen-image"
    plan: str = "smoke"
    only: str = ""
    name: str = ""
    claims: tuple[str, ...] = ("vjp",)

    @property
    def title(self) -> str:
        return "-".join(filter(None, (self.name or self.run.__name__, *self.dtypes, self.only, *self.claims[1:])))


WRONG = (
    Wrong(axes_swapped),
    Wrong(half_split),
    Wrong(bfloat16_table),
    Wrong(bfloat16_table, dtypes=("float16", "float32")),
    Wrong(cosine_one_ulp_off, dtypes=("float32",)),
    Wrong(sine_one_ulp_off, dtypes=("float32",)),
    # Sixteen bits hide an ulp of the table, except next to an output boundary.
    *(
        Wrong(run, dtypes=(dtype,), plan="standard", only="hard-to-round")
        for run in (cosine_one_ulp_off, sine_one_ulp_off)
        for dtype in ("bfloat16", "float16")
    ),
    Wrong(truncated, dtypes=("bfloat16",)),
    Wrong(truncated, dtypes=("float16",)),
    Wrong(scaled),
    Wrong(last_pair_not_rotated),
    Wrong(slow_lanes_one_position_off),
    Wrong(sine_of_the_other_sign),
    Wrong(applied_twice),
    Wrong(products_rounded),
    Wrong(products_rounded, dtypes=("float16",)),
    Wrong(one_product_rounded),
    Wrong(three_roundings),
    Wrong(three_roundings, dtypes=("float16",)),
    Wrong(overflowing),
    Wrong(overflowing, dtypes=("float32",)),
    Wrong(flushing_subnormals, plan="standard", only="magnitudes"),
    Wrong(flushing_subnormals, plan="standard", only="magnitudes", dtypes=("float16", "float32")),
    Wrong(clearing_nan),
    # An accumulator that starts at +0 loses it too: only a claim of strict is held to the sign.
    Wrong(losing_the_sign_of_zero, fails=()),
    Wrong(losing_the_sign_of_zero, ("strict-bytes",), claims=("vjp", "strict"), plan="standard", only="special"),
    Wrong(adjacent, ("accuracy-vjp",), vjp=adjacent, name="gradient-without-conjugate"),
    Wrong(adjacent, ("accuracy-vjp",), vjp=transposed(three_roundings), name="gradient-rounded-three-times"),
    Wrong(
        half_split_three_roundings,
        ("accuracy-vjp",),
        vjp=transposed(half_split),
        contract="hf-llama",
        name="gradient-rounded-once",
    ),
    Wrong(half_split, contract="hf-llama", dtypes=("bfloat16",), name="one-rounding-for-three"),
    Wrong(half_split, contract="hf-llama", dtypes=("float16",), name="one-rounding-for-three"),
    Wrong(half_split_three_roundings, contract="neox", dtypes=("float32",), fails=(), name="fp32-has-one-recipe"),
    Wrong(half_split, contract="hf-llama", dtypes=("float32",), fails=(), name="fp32-has-one-recipe"),
    Wrong(adjacent, contract="neox", name="adjacent-for-half-split"),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.contract}-{w.title}")
def test_wrong_arithmetic_fails_accuracy_and_nothing_else(wrong: Wrong, failing: Callable[..., dict[str, str]]) -> None:
    """A fault that is the same for every layout, call and memory is seen by the accuracy judgements alone, and by the
    laws where the result is no rotation: never by them without accuracy."""
    backward = wrong.vjp or transposed(wrong.run)
    for dtype in wrong.dtypes:
        candidate = Candidate(
            "wrong", wrong.contract, wrong.run, devices=("cpu",), provides=wrong.claims, vjp=backward, dtypes=(dtype,)
        )
        reasons = failing(candidate, wrong.plan, only=wrong.only)
        assert tuple(name for name in reasons if name != "laws") == wrong.fails, (dtype, reasons)
        assert "laws" not in reasons or "accuracy-forward" in wrong.fails, (dtype, reasons)


@pytest.mark.parametrize(
    ("name", "run"), [("qwen-image", adjacent), ("neox", half_split), ("hf-llama", half_split_three_roundings)]
)
def test_right_arithmetic_passes(name: str, run: Rotate, failing: Callable[..., dict[str, str]]) -> None:
    """The rotations that the wrong ones are made from pass every judgement, in bf16 and in fp32."""
    candidate = Candidate("right", name, run, devices=("cpu",), provides=("vjp", "strict"), vjp=transposed(run))
    if name == "hf-llama":
        # Its contract's gradient is added onto zeros, which a claim of strict would be held to.
        candidate = Candidate("right", name, run, devices=("cpu",), provides=("vjp",), vjp=transposed(run))
    assert failing(candidate, dtypes=("bfloat16", "float32")) == {}
