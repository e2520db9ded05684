"""Contracts: registry, lanes, tables in the vendor's dtypes and order, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ropecheck.oracle.pins as pins_module
from ropecheck.oracle.contracts import CONTRACTS, contract
from ropecheck.oracle.frequencies import CosineSine, PolarRows
from ropecheck.oracle.pin_cases import interleaved_table
from ropecheck.oracle.pins import bytes_sha256, pin, table_sha256
from ropecheck.oracle.positions import CentredGrid

RECORDED = json.loads((Path(str(pins_module.__file__)).parent / "pins.json").read_text())
EXAMPLES = RECORDED["qwen-image"]["worked_examples"]
MROPE = ["mrope-contiguous", "mrope-ernie", "mrope-interleaved", "mrope-round-robin"]
NAMES = sorted([
    "hf-llama", "hf-vision-2d", "neox", "qwen-image", "qwen3.5-norm-rope-gate",
    "gptj", "gptj-activation-dtype", "gptj-rounded-table",
    *MROPE, *(f"{name}-activation-dtype" for name in MROPE), "mrope-interleaved-rounded-table",
])  # fmt: skip


def test_registry_lists_itself() -> None:
    """Each contract is found under its own name and an unknown name lists the known ones in one sentence."""
    assert sorted(CONTRACTS) == NAMES
    assert all(contract(name).name == name for name in NAMES)
    with pytest.raises(ValueError, match="unknown contract 'qwen'; known contracts are gptj, gptj-activation-dtype, "):
        contract("qwen")


@pytest.mark.parametrize("name", NAMES)
def test_shape_of_a_contract(name: str) -> None:
    """Lanes cover what is rotated, every lane has an axis, and tables have the declared dtype and width.

    Axes share out the frequencies of a head, or each has those of the whole rotary width.
    """
    it = contract(name)
    assert it.rotary_dim == {"mrope-round-robin": 64, "qwen3.5-norm-rope-gate": 64}.get(
        name.removesuffix("-activation-dtype"), it.head_dim
    )
    sectioned = name.startswith(("mrope", "qwen3.5"))
    assert it.lanes.dims == (it.rotary_dim,) * 3 if sectioned else sum(it.lanes.dims) == it.rotary_dim
    assert len(it.positions.axes) == len(it.lanes.dims) == len(set(it.lanes.axis))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cos, sin = it.tables(it.positions.of_length(11), dtype)
        assert cos.shape == sin.shape == (11, it.rotary_dim // 2)
        assert cos.dtype == sin.dtype == (dtype if it.table_dtype == "activation" else torch.float32)
    assert it.tables(it.positions.of_length(0), torch.float32)[0].shape == (0, it.rotary_dim // 2)
    assert (it.norm is not None) == (it.family == "norm_rotate_gate")


@pytest.mark.parametrize("name", NAMES)
def test_table_rows_do_not_depend_on_their_company(name: str) -> None:
    """A position has the same bytes alone, in a long table, permuted and in a batch."""
    it = contract(name)
    positions = it.positions.of_length(257)
    order = torch.randperm(257, generator=torch.Generator().manual_seed(0))
    for part in range(2):
        whole = it.tables(positions, torch.float32)[part].view(torch.int32)
        assert torch.equal(it.tables(positions[order], torch.float32)[part].view(torch.int32), whole[order])
        batched = torch.stack((positions, positions.flip(0)), dim=0)
        both = it.tables(batched, torch.float32)[part].view(torch.int32)
        assert torch.equal(both, torch.stack((whole, whole.flip(0))))
        for row in (0, 1, 100, 256):
            alone = it.tables(positions[row : row + 1], torch.float32)[part].view(torch.int32)
            assert torch.equal(alone[0], whole[row])


def test_qwen_lanes_take_their_axes() -> None:
    """Lanes 0 to 7 turn with the frame, 8 to 35 with the height, 36 to 63 with the width, and with nothing else."""
    it = contract("qwen-image")
    still = it.tables(torch.zeros(1, 3, dtype=torch.int64), torch.float32)[1]
    assert not still.any()
    for axis, lanes in enumerate((range(8), range(8, 36), range(36, 64))):
        position = torch.zeros(1, 3, dtype=torch.int64)
        position[0, axis] = 1
        moved = it.tables(position, torch.float32)[1][0].nonzero().flatten().tolist()
        assert moved == list(lanes)


@pytest.mark.parametrize("name", [*MROPE, "qwen3.5-norm-rope-gate"])
def test_sectioned_lanes_take_their_row(name: str) -> None:
    """A lane turns with the row that its map names and with no other, at the frequency of its own number."""
    it = contract(name)
    whole = CosineSine(it.frequencies.theta).table(torch.tensor(3), it.rotary_dim)  # type: ignore[attr-defined]
    for axis in range(3):
        position = torch.zeros(1, 3, dtype=torch.int64)
        position[0, axis] = 3
        cos, sin = (part[0] for part in it.tables(position, torch.float32))
        mine = torch.tensor(it.lanes.axis) == axis
        assert sin.nonzero().flatten().tolist() == mine.nonzero().flatten().tolist()
        assert torch.equal(sin[mine], whole[1][mine])
        assert torch.equal(cos, torch.where(mine, whole[0], 1.0))


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("mrope-contiguous", (0, 0, 0)),
        ("mrope-interleaved", (0, 1, 2, 0, 1, 2)),
        ("mrope-round-robin", (0, 1, 2, 0, 1, 2)),
        ("mrope-ernie", (1, 2, 1, 2)),
        ("qwen3.5-norm-rope-gate", (0, 1, 2, 0, 1, 2)),
    ],
)
def test_recipes_of_a_map_share_it(name: str, starts: tuple[int, ...]) -> None:
    """The contracts of one map differ in their recipe alone."""
    family = [it for known, it in CONTRACTS.items() if known.startswith(name)]
    assert len({(it.lanes, it.pairing, it.frequencies, it.family) for it in family}) == 1
    assert len({(it.forward, it.table_dtype) for it in family}) == len(family)
    assert family[0].lanes.axis[: len(starts)] == starts


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e["id"])
def test_worked_example_angles(example: dict[str, Any]) -> None:
    """The angles of the worked examples are the vendor's fp32 numbers, digit by hexadecimal digit."""
    it = contract("qwen-image")
    assert isinstance(it.frequencies, PolarRows)
    rule = CentredGrid(condition_last=example["layered"])
    grids = [(f, h, w) for f, h, w in example["grids"]]
    image, text = rule.image(grids), rule.text(grids, example["text_length"])
    for position, recorded in (
        (image[0], example["first_image_angles"]),
        (image[-1], example["last_image_angles"]),
        (text[0], example["first_text_angles"]),
    ):
        angles = [it.frequencies.angles(position[axis], dims) for axis, dims in enumerate(it.lanes.dims)]
        lanes = zip(it.lanes.axis, it.lanes.frequency, strict=True)
        every = [angles[axis][frequency].item().hex() for axis, frequency in lanes]
        assert [float.fromhex(every[lane]) for lane in example["lanes"]] == [float.fromhex(a) for a in recorded]


def test_qwen_positions_outside_the_table_are_refused() -> None:
    """Both ends of the table can be had and the first position beyond either is refused by name."""
    rule = PolarRows()
    cos, _ = rule.table(torch.tensor([-4096, -1, 0, 4095]), 16)
    assert cos.shape == (4, 8)
    assert cos[2].tolist() == [1.0] * 8
    for bad in (-4097, 4096):
        with pytest.raises(ValueError, match=f"positions must lie between -4096 and 4095.*; got {bad}"):
            rule.table(torch.tensor([0, bad]), 16)


@pytest.mark.parametrize("rule", [PolarRows(), CosineSine()], ids=["polar", "cosine-sine"])
def test_positions_must_be_integers(rule: PolarRows | CosineSine) -> None:
    """Positions of a float or boolean dtype are refused."""
    for positions in (torch.zeros(3), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="positions must be integers, got dtype"):
            rule.table(positions, 16)


def test_positions_must_have_the_contracts_axes() -> None:
    """Positions with the wrong number of coordinates are refused with the names of the axes."""
    with pytest.raises(ValueError, match=r"positions must be .* one coordinate for each of frame, height, width"):
        contract("qwen-image").tables(torch.zeros(5, 2, dtype=torch.int64), torch.float32)
    with pytest.raises(ValueError, match=r"got \(\)"):
        contract("hf-llama").tables(torch.tensor(3), torch.float32)


def test_polar_is_not_cosine_and_sine() -> None:
    """The two frequency rules differ in bytes on the same angles, so one cannot stand for the other."""
    positions = torch.arange(-4096, 4096)
    polar, separate = PolarRows().table(positions, 56), CosineSine().table(positions, 56)
    assert torch.equal(PolarRows().angles(positions, 56), CosineSine().angles(positions, 56))
    assert not torch.equal(polar[0], separate[0])
    assert not torch.equal(polar[1], separate[1])


def test_llama_table_is_cast_from_fp32() -> None:
    """The 16-bit Llama table is the fp32 table rounded, not computed in 16 bits."""
    it = contract("hf-llama")
    positions = it.positions.of_length(1000)
    for wide, narrow in zip(it.tables(positions, torch.float32), it.tables(positions, torch.bfloat16), strict=True):
        assert torch.equal(wide.to(torch.bfloat16).view(torch.int16), narrow.view(torch.int16))


PROBE = """
import json, sys, torch
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.pin_cases import interleaved_table
from ropecheck.oracle.pins import bytes_sha256, pin, table_sha256
from ropecheck.oracle.positions import CentredGrid
it = contract("qwen-image")
examples = {}
for example in json.load(sys.stdin):
    rule = CentredGrid(condition_last=example["layered"])
    grids = [tuple(g) for g in example["grids"]]
    tables = rule.image(grids), rule.text(grids, example["text_length"])
    examples[example["id"]] = [bytes_sha256(interleaved_table(it, t)) for t in tables]
whole = [table_sha256(it, t.first, t.last) for t in pin("qwen-image").tables]
print(json.dumps([torch.backends.cpu.get_cpu_capability(), whole, examples]))
"""


@pytest.mark.skipif(
    torch.__version__ != pin("qwen-image").tables[0].torch,
    reason="table bytes are recorded for another torch; check_pins still compares with the installed vendor",
)
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_table_bytes_by_vector_instructions(capability: str) -> None:
    """With each set of vector instructions the Qwen tables and worked examples have the recorded bytes."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(EXAMPLES), text=True, capture_output=True, check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
    )  # fmt: skip
    got, whole, examples = json.loads(probe.stdout)
    assert whole == [t.sha256[got] for t in pin("qwen-image").tables]
    assert examples == {e["id"]: [e["image_sha256"][got], e["text_sha256"][got]] for e in EXAMPLES}


def test_vector_instructions_change_the_bytes() -> None:
    """The recorded AVX2 bytes are not the baseline's, which is why a table pin names them."""
    for table in pin("qwen-image").tables:
        assert table.sha256["AVX2"] != table.sha256["DEFAULT"]


def test_table_hash_is_of_interleaved_fp32() -> None:
    """A table hash is of cosine and sine of each lane side by side, in position order."""
    it = contract("hf-llama")
    table = interleaved_table(it, torch.arange(4)[:, None])
    assert table.shape == (4, 64, 2)
    assert table_sha256(it, 0, 3) == bytes_sha256(table)
    assert table_sha256(it, 0, 3) != table_sha256(it, 1, 4)
