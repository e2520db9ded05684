"""The arithmetic of the CUDA kernels, compiled by the host's compiler, bit by bit: no GPU and no toolkit is needed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ropecheck.kernels import multi_axis_rope
from ropecheck.kernels.native_build import SOURCES
from ropecheck.oracle.floats import bits, same
from ropecheck.oracle.pairing import ADJACENT, HALF_SPLIT, Pairing
from ropecheck.oracle.recipes import ONE_ROUNDING
from ropecheck.oracle.rotation import Rotation, changed_elements, rotate_strict
from ropecheck.suites.payloads import Slots, hard_to_round

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NARROW = (torch.float16, torch.bfloat16)
STRICT = ("-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
OPTIMISATIONS = {"unoptimised": ("-O0",), "for this processor": ("-O2", "-march=native"), "vectorised": ("-O3",)}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
narrow_dtypes = pytest.mark.parametrize("dtype", NARROW, ids=str)
pairings = pytest.mark.parametrize("pairing", [ADJACENT, HALF_SPLIT], ids=lambda p: p.name)

Compile = Callable[..., ctypes.CDLL]
Lanes = tuple[Tensor, Tensor, Tensor, Tensor]
"""First and second members, cosines and sines, [N] each."""


@pytest.fixture(scope="module")
def compile_arithmetic(host_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """``compile_arithmetic(*options)``: the header and the functions beside this file, as a library of this process."""

    def compiled(*options: str) -> ctypes.CDLL:
        library = tmp_path_factory.mktemp("host") / "arithmetic.so"
        command = [host_compiler, "-std=c++17", "-shared", "-fPIC", *options, f"-I{SOURCES}"]
        done = subprocess.run(
            [*command, str(Path(__file__).with_name("host_arithmetic.cpp")), "-o", str(library)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))

    return compiled


@pytest.fixture(scope="module", params=OPTIMISATIONS)
def arithmetic(request: pytest.FixtureRequest, compile_arithmetic: Compile) -> ctypes.CDLL:
    """The arithmetic as the compiler must leave it, at several levels of optimisation."""
    return compile_arithmetic(*STRICT, *OPTIMISATIONS[request.param])


def group_lanes(dtype: torch.dtype, pairing: Pairing) -> int:
    """Lanes in the 16 bytes of neighbours, or in the 16 bytes of first and 16 of second members."""
    channels = 16 // dtype.itemsize
    return channels // 2 if pairing is ADJACENT else channels


def in_groups(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, conjugate: bool) -> Rotation:
    """Lanes given one by one, [N] each, as tokens of one head that has the lanes of a group; the last few are lost."""
    lanes = group_lanes(first.dtype, pairing)
    rows = [values[: len(first) // lanes * lanes].reshape(-1, lanes) for values in (first, second, cos, sin)]
    x = pairing.join(rows[0], rows[1])[None, :, None]
    return Rotation(x, rows[2], rows[3], pairing, ONE_ROUNDING, conjugate)


def rotate_on_host(arithmetic: ctypes.CDLL, rotation: Rotation) -> Tensor:
    """Run the header over the tokens of ``rotation``, each of which is one group."""
    y = rotation.x.clone()
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    name = f"rotate_{str(y.dtype)[6:]}_{rotation.pairing.name.replace('-', '_')}"
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (y, cos, sin)]
    getattr(arithmetic, name)(*pointers, ctypes.c_int64(y.shape[1]), ctypes.c_bool(rotation.conjugate))
    return y


def random_lanes(dtype: torch.dtype, count: int = 100_000) -> Lanes:
    """Normal activations and the table of random angles."""
    generator = torch.Generator().manual_seed(1)
    first, second, angle = torch.randn(3, count, generator=generator)
    return first.to(dtype), second.to(dtype), (7 * angle).cos(), (7 * angle).sin()


def any_bits(dtype: torch.dtype, count: int = 200_000) -> Lanes:
    """Every bit pattern is as likely: all magnitudes, subnormals, infinities and NaN, members of like size or not."""
    generator = torch.Generator().manual_seed(2)
    integer = bits(torch.empty(0, dtype=dtype)).dtype
    limits = torch.iinfo(integer)
    patterns = torch.randint(limits.min, limits.max + 1, (2, count), generator=generator).to(integer)
    # Half of the lanes have two members of one exponent.
    patterns[1, ::2] = patterns[0, ::2] ^ (patterns[1, ::2] & 7)
    first, second = patterns.view(dtype)
    table = torch.randint(-(2**31), 2**31, (2, count), generator=generator).to(torch.int32).view(torch.float32)
    ordinary = torch.randn(2, count, generator=generator)
    cos, sin = torch.where(torch.rand(count, generator=generator) < 0.5, ordinary, table)
    return first, second, cos, sin


def special_lanes(dtype: torch.dtype) -> Lanes:
    """Every company of signed zeros, ones, infinities, NaN and the ends of the normal and subnormal range."""

    def values(of: torch.dtype) -> list[float]:
        limits = torch.finfo(of)
        sizes = [0.0, 1.0, limits.max, limits.smallest_normal, limits.smallest_normal * limits.eps, float("inf")]
        return [*sizes, *(-size for size in sizes), float("nan")]

    product = itertools.product(values(dtype), values(dtype), values(torch.float32), values(torch.float32))
    first, second, cos, sin = torch.tensor(list(product), dtype=torch.float64).T
    return first.to(dtype), second.to(dtype), cos.float(), sin.float()


def hard_lanes(dtype: torch.dtype) -> Lanes:
    """Rotated members next to a boundary of the dtype, and lanes where contraction would be seen."""
    angle = 7 * torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    cos, sin = angle.cos(), angle.sin()
    generator = torch.Generator().manual_seed(4)
    x = hard_to_round(Slots((1, 4, 8, 32), dtype, HALF_SPLIT, cos, sin, generator))
    first, second = (half.reshape(-1) for half in HALF_SPLIT.split(x))
    return first, second, *(table[:, None].expand(-1, 8, -1).reshape(-1) for table in (cos, sin))


PAYLOADS: dict[str, Callable[[torch.dtype], Lanes]] = {
    "random": random_lanes,
    "any bits": any_bits,
    "special": special_lanes,
    "hard to round": hard_lanes,
}


@functools.cache
def judged(payload: str, dtype: torch.dtype, pairing: Pairing, conjugate: bool) -> tuple[Rotation, Tensor]:
    """The lanes of a payload in groups, and the contract's bytes, on which oracle and torch reference agree."""
    lanes = _lanes(payload, dtype)
    rotation = in_groups(*lanes, pairing, conjugate)
    wanted = rotate_strict(rotation)
    reference = multi_axis_rope(
        rotation.x, rotation.cos, rotation.sin, pairing=pairing.name, conjugate=conjugate, backend="reference"
    )
    assert changed_elements(wanted, reference) == 0
    return rotation, wanted


@functools.cache
def _lanes(payload: str, dtype: torch.dtype) -> Lanes:
    return PAYLOADS[payload](dtype)


@pytest.mark.parametrize("payload", PAYLOADS)
@pairings
@dtypes
def test_the_bytes_are_those_of_the_oracle_and_of_the_reference(
    arithmetic: ctypes.CDLL, dtype: torch.dtype, pairing: Pairing, payload: str
) -> None:
    """Forward and conjugate, every element has the contract's strict bytes, and those of the torch reference."""
    for conjugate in (False, True):
        rotation, wanted = judged(payload, dtype, pairing, conjugate)
        assert changed_elements(rotate_on_host(arithmetic, rotation), wanted) == 0
        assert changed_elements(wanted, rotation.x) > 0


def test_contraction_would_be_seen(compile_arithmetic: Compile) -> None:
    """The same source compiled with contraction gives other bytes on the same lanes."""
    options = ["-O2", "-ffp-contract=fast"]
    if platform.machine() == "x86_64":
        if " fma " not in Path("/proc/cpuinfo").read_text():
            pytest.skip("this processor has no fma: nothing can be contracted on it")
        options.append("-mfma")
    contracting = compile_arithmetic(*options)
    for payload, dtype in (("random", torch.float32), *(("hard to round", dtype) for dtype in NARROW)):
        rotation, wanted = judged(payload, dtype, HALF_SPLIT, False)
        assert changed_elements(rotate_on_host(contracting, rotation), wanted) > 0


def widened(arithmetic: ctypes.CDLL, narrow: Tensor) -> Tensor:
    wide = torch.empty(narrow.shape, dtype=torch.float32)
    _convert(arithmetic, f"widen_{str(narrow.dtype)[6:]}", narrow, wide)
    return wide


def narrowed(arithmetic: ctypes.CDLL, wide: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = torch.empty(wide.shape, dtype=dtype)
    _convert(arithmetic, f"narrow_{str(dtype)[6:]}", wide.contiguous(), narrow)
    return narrow


def _convert(arithmetic: ctypes.CDLL, name: str, source: Tensor, destination: Tensor) -> None:
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, destination)]
    getattr(arithmetic, name)(*pointers, ctypes.c_int64(source.numel()))


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@narrow_dtypes
def test_every_value_widens_exactly_and_comes_back(arithmetic: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Widening keeps the value and the sign of zero; narrowing undoes it; a NaN stays one."""
    values = every_value(dtype)
    wide = widened(arithmetic, values)
    assert bool(same(wide.double(), values.double()).all())
    assert bool(same(narrowed(arithmetic, wide, dtype), values).all())


@narrow_dtypes
def test_narrowing_rounds_to_nearest_even(arithmetic: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Between any two neighbours the midpoint goes to the even one, and the fp32 values beside it to the nearer."""
    # From +0 to the largest finite value and, as its successor, the power of two that stands for infinity.
    integers = torch.arange(int(bits(torch.tensor(float("inf"), dtype=dtype))) + 1).to(torch.int16)
    values = integers.view(dtype).double()
    values[-1] = 2 * values[-2] - values[-3]
    low, high = integers[:-1], integers[1:]
    middle = (values[:-1] + values[1:]) / 2
    midpoint = middle.float()
    assert torch.equal(midpoint.double(), middle)
    even = torch.where(low % 2 == 0, low, high)
    for sign in (1, -1):
        expected = [integer.view(dtype) * sign for integer in (low, even, high)]
        beside = [(bits(midpoint) + step).view(torch.float32) * sign for step in (-1, 0, 1)]
        for wide, wanted in zip(beside, expected, strict=True):
            assert torch.equal(bits(narrowed(arithmetic, wide, dtype)), bits(wanted))


@narrow_dtypes
def test_narrowing_over_the_whole_range(arithmetic: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Both ends of every binade, fp32's subnormals included, and a million bit patterns, as torch rounds them."""
    ends = torch.arange(0, 256).repeat_interleave(4) << 23
    ends += torch.tensor([0, 1, 2**22, 2**23 - 1]).repeat(256)
    generator = torch.Generator().manual_seed(5)
    patterns = torch.cat((ends, ends - 2**31, torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator)))
    wide = patterns.to(torch.int32).view(torch.float32)
    assert changed_elements(narrowed(arithmetic, wide, dtype), wide.to(dtype)) == 0
