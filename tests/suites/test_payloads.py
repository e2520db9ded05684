"""Payloads: what each puts into x, and that it sees what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropecheck.oracle.admissible import AdmissibleSet, admissible
from ropecheck.oracle.floats import bits
from ropecheck.oracle.rotation import Rotation, rotate_strict
from ropecheck.suites.cases import Case, Inputs, Operands, build
from ropecheck.suites.payloads import PAYLOADS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def operands(payload: str, dtype: str, contract: str = "qwen-image", **dimensions: int) -> Operands:
    given = Inputs(payload=payload, positions="ramp", **dimensions)  # type: ignore[arg-type]
    return build(Case("accuracy-forward", contract, "cpu", dtype, given), seed=0)


@dtypes
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("contract", ["qwen-image", "hf-llama"])
def test_payloads_are_functions_of_their_arguments(payload: str, dtype: str, contract: str) -> None:
    """Shape and dtype are the case's, the same seed gives the same bytes, and only special holds what is not finite."""
    first, again = (operands(payload, dtype, contract, batch=2, length=1, heads=8) for _ in range(2))
    x = first.x.view
    assert x.shape == first.gradient.view.shape == (2, 1, 8, 128)
    assert x.dtype == DTYPES[dtype]
    assert torch.equal(bits(x), bits(again.x.view))
    assert torch.equal(bits(first.gradient.view), bits(again.gradient.view))
    assert bool(x.isfinite().all()) == (payload != "special")


@dtypes
@pytest.mark.parametrize("payload", PAYLOADS)
def test_payloads_fill_partial_rotary_and_empty_shapes(payload: str, dtype: str) -> None:
    """Channels past the rotary dimension are filled too, and an empty batch or sequence is no obstacle."""
    x = operands(payload, dtype, length=3, heads=8, head_dim=67, rotary_dim=34).x.view
    assert (x[..., 34:] != 0).any()
    for batch, length in ((0, 7), (2, 0)):
        assert operands(payload, dtype, batch=batch, length=length).x.view.numel() == 0


@dtypes
def test_basis_payloads_print_the_table(dtype: str) -> None:
    """The outputs of the two basis payloads are the cosine and sine themselves, rounded once."""
    for payload, of_first, of_second in (("basis-first", "cos", "sin"), ("basis-second", "-sin", "cos")):
        given = operands(payload, dtype, length=255, heads=1)
        y = rotate_strict(given.rotation())
        table = {"cos": given.cos.view, "sin": given.sin.view, "-sin": -given.sin.view}
        assert torch.equal(y[0, :, 0, 0::2], table[of_first].to(y.dtype))
        assert torch.equal(y[0, :, 0, 1::2], table[of_second].to(y.dtype))


@dtypes
def test_index_coded_neighbours_differ(dtype: str) -> None:
    """One step along any dimension, or along two at once, changes the value, and all 251 values are exact."""
    x = operands("index-coded", dtype, batch=3, length=21, heads=5).x.view
    assert len(set(x.flatten().tolist())) == 251
    assert torch.equal(x * 64, (x.double() * 64).round().to(x.dtype))
    for dims in ((0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 3), (1, 3)):
        shifted, kept = x, x
        for d in dims:
            shifted, kept = shifted.narrow(d, 1, x.shape[d] - 1), kept.narrow(d, 0, x.shape[d] - 1)
        assert (shifted != kept).all(), dims


@dtypes
def test_special_values_are_all_there(dtype: str) -> None:
    """Both zeros, infinities, NaN, the extremes of the normal and subnormal numbers, and ones."""
    x = operands("special", dtype, batch=2, length=13).x.view
    limits = torch.finfo(x.dtype)
    least = limits.smallest_normal * limits.eps
    assert x.isnan().any()
    values = [0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, limits.max, limits.min]
    values += [limits.smallest_normal, -limits.smallest_normal, least, -least]
    for value in values:
        wanted = torch.tensor(value, dtype=torch.float64).to(x.dtype)
        assert wanted != 0 or value in (0.0, -0.0), "the least subnormal number is not zero"
        assert (bits(x) == bits(wanted)).any(), value


@dtypes
def test_magnitudes_span_the_range(dtype: str) -> None:
    """Inputs reach subnormal and nearly the largest numbers, and so do results."""
    given = operands("magnitudes", dtype, batch=2, length=16)
    limits = torch.finfo(DTYPES[dtype])
    for values in (given.x.view, rotate_strict(given.rotation())):
        size = values.double().abs()
        assert ((size > 0) & (size < limits.smallest_normal)).any()
        assert (size > limits.max / 1024).any()
        assert values.isfinite().all()


def sets_of(rotation: Rotation) -> tuple[AdmissibleSet, AdmissibleSet]:
    """The admissible sets of both members, each of shape [B, S, H, R / 2]."""
    x0, x1 = (half.contiguous().double() for half in rotation.pairing.split(rotation.x))
    c, s = (t.unsqueeze(-2).expand(x0.shape).double() for t in (rotation.cos, rotation.sin))
    return admissible(rotation.recipe, x0, x1, c, s, rotation.x.dtype)


def lanes_that_notice(rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """bool [S, R / 2]: where the rotation by another table leaves the admissible set in some head."""
    y = rotate_strict(replace(rotation, cos=cos, sin=sin))
    outputs = [half.contiguous() for half in rotation.pairing.split(y)]
    first, second = (held.contains(out) for held, out in zip(sets_of(rotation), outputs, strict=True))
    return ~(first & second)[0].all(dim=1)


@pytest.mark.parametrize("contract", ["qwen-image", "neox"])
@pytest.mark.parametrize("payload", ["random", "hard-to-round"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hard_to_round_points_see_an_ulp_of_the_table(payload: str, dtype: str, contract: str) -> None:
    """A sine or cosine one fp32 ulp off, up or down, shows at 16 bits: in fp16 for nearly every table element and in
    bf16 for most, so that a few tokens cover every lane; random data of the same size sees next to nothing."""
    given = operands(payload, dtype, contract, length=6, heads=8)
    cos, sin = given.cos.view, given.sin.view
    for change in (1, -1):
        for tables in (((bits(cos) + change).view(cos.dtype), sin), (cos, (bits(sin) + change).view(sin.dtype))):
            noticed = lanes_that_notice(given.rotation(), *tables)
            share = float(noticed.double().mean())
            if payload == "random":
                assert share < 0.05
            else:
                assert share > (0.98 if dtype == "float16" else 0.7)
                assert noticed.any(dim=0).all()


@dtypes
def test_hard_to_round_points_tell_the_forms_apart(dtype: str) -> None:
    """For each form of evaluation most lanes of most tokens hold a point that it changes."""
    for held in sets_of(operands("hard-to-round", dtype, length=3, heads=8).rotation()):
        separate = bits(held.strict)
        for name, form in held.forms.items():
            # A sum onto zero differs in the sign of a zero alone.
            if name != "separate" and "onto zero" not in name:
                differs = (bits(form) != separate).any(dim=2)
                assert differs.double().mean() > 0.5, name


@dtypes
def test_the_gradient_has_hard_points_of_its_own(dtype: str) -> None:
    """The transposed rotation of the gradient meets as many points with several admissible values as the forward."""
    given = operands("hard-to-round", dtype, length=3, heads=8)
    counts = []
    for rotation in (given.rotation(), given.vjp()):
        counts.append(sum(int((held.low < held.high).sum()) for held in sets_of(rotation)))
    assert min(counts) > max(counts) / 2 > 64
