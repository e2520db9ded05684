"""What is executed of Qwen3.5 in transformers: positions, axis map, table, norm and rotation, beside the contract.

The fused contract differs from transformers in one choice, the rotation's recipe. So the rotation is compared in fp32
by the contract's own recipe, and in every dtype by transformers' recipe, "activation dtype, three roundings"; the norm,
whose order of summation is transformers' own, must be inside the admissible interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .contract import Contract, Grid
from .floats import from_key, key
from .norm import Norm, norm_interval, reciprocal_root_interval
from .pin_cases import DTYPES, Pairs, PinCase, later, payload
from .positions import TextAndImages
from .recipes import ACTIVATION_DTYPE
from .rotation import Rotation, rotate_strict

SEQUENCES: tuple[tuple[int | Grid, ...], ...] = (
    (9,), ((1, 3, 4),), (5, (1, 4, 4), 3), (1, (1, 2, 7), 2, (1, 5, 3), 4), (2, (1, 1, 1), 1, (1, 1, 9), 6),
)  # fmt: skip
"""Text lengths and image grids, in merged tokens, as they follow one another."""

MERGE = 2


def qwen35_cases(contract: Contract, symbols: Mapping[str, Any]) -> Iterator[PinCase]:
    """Axis map, tables of scattered positions, positions of sequences, norm and rotation of many tokens."""
    if "Qwen3_5TextRotaryEmbedding" in symbols:
        build = cache(partial(_embedding, contract, symbols["Qwen3_5TextRotaryEmbedding"]))
        owner = ("Qwen3_5TextRotaryEmbedding",)
        yield PinCase("axis map", owner, later(_axis_map, contract, build))
        for dtype in DTYPES:
            yield PinCase(f"table in {dtype}", owner, later(_tables, contract, build, dtype))
    if {"Qwen3_5Model.get_rope_index", "Qwen3_5Model.get_vision_position_ids"} <= symbols.keys():
        methods = [symbols[f"Qwen3_5Model.{name}"] for name in ("get_rope_index", "get_vision_position_ids")]
        for segments in SEQUENCES:
            yield PinCase(f"positions of {segments}", ("Qwen3_5Model",), later(_positions, contract, methods, segments))
    if "Qwen3_5RMSNorm" in symbols:
        for dtype, scale in product(DTYPES, (1.0, 2.0**-9, 2.0**6)):
            norms = later(_norms, contract, symbols["Qwen3_5RMSNorm"], dtype, scale)
            yield PinCase(f"norm of {scale:g} in {dtype}", ("Qwen3_5RMSNorm",), norms, within=True)
    if "apply_rotary_pos_emb" in symbols:
        for dtype in DTYPES:
            rotations = later(_rotations, contract, symbols["apply_rotary_pos_emb"], dtype)
            yield PinCase(f"rotation in {dtype}", ("apply_rotary_pos_emb", "rotate_half"), rotations)


def _embedding(contract: Contract, embedding_class: Any) -> Any:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    parameters = {
        "rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10],
        "partial_rotary_factor": contract.rotary_dim / contract.head_dim,
    }  # fmt: skip
    heads = 2
    return embedding_class(
        Qwen3_5TextConfig(
            hidden_size=heads * contract.head_dim, num_attention_heads=heads, head_dim=contract.head_dim,
            rope_parameters=parameters,
        )
    )  # fmt: skip


def _axis_map(contract: Contract, build: Callable[[], Any]) -> Pairs:
    rows = torch.full((contract.lanes.lanes,), -1)
    for axis in range(3):
        position = torch.zeros(3, 1, 1, dtype=torch.int64)
        position[axis] = 1
        sine = build()(torch.zeros(1), position)[1][0, 0, : contract.lanes.lanes]
        rows[sine != 0] = axis
    yield "axis map", rows, torch.tensor(contract.lanes.axis)


def _tables(contract: Contract, build: Callable[[], Any], dtype: torch.dtype) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    limits = torch.tensor([17, 4096, 262_144]).repeat_interleave(40)
    positions = torch.stack([torch.randint(int(limit), (3,), generator=generator) for limit in limits])
    vendor = build()(torch.zeros(1, dtype=dtype), positions.T[:, None])
    for name, theirs, ours in zip(("cosine", "sine"), vendor, contract.tables(positions, torch.float32), strict=True):
        yield name, theirs[0], torch.cat((ours, ours), dim=-1).to(dtype)


def _positions(contract: Contract, methods: list[Any], segments: tuple[int | Grid, ...]) -> Pairs:
    if not isinstance(contract.positions, TextAndImages):
        raise TypeError(f"contract {contract.name!r} has no rule for text and images")
    # Of the model only its merge of patches is asked for.
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = partial(methods[1], model)
    kinds, grids = [], []
    for segment in segments:
        if isinstance(segment, int):
            kinds += [0] * segment
        else:
            frames, height, width = segment
            kinds += [1] * (frames * height * width)
            grids.append((frames, height * MERGE, width * MERGE))
    kind = torch.tensor([kinds])
    grid = torch.tensor(grids) if grids else None
    vendor, _ = methods[0](model, torch.zeros_like(kind), kind, image_grid_thw=grid)
    yield "positions", vendor[:, 0].T, contract.positions.sequence(segments)


def _norms(contract: Contract, norm_class: Any, dtype: torch.dtype, scale: float) -> Pairs:
    norm = contract.norm or Norm()
    vendor = norm_class(contract.head_dim, eps=norm.eps).to(dtype)
    weight = payload((contract.head_dim,), dtype, 2)
    vendor.weight.data.copy_(weight)
    x = payload((40, 3, contract.head_dim), dtype, 0) * scale
    theirs: Tensor = vendor(x)
    low, high = norm_interval(x, weight, norm, reciprocal_root_interval(x, norm.eps))
    ends = [key(end.to(dtype)) for end in (low, high)]
    yield "norm, beside the nearest admissible value", theirs, from_key(key(theirs.detach()).clamp(*ends), dtype)


def _rotations(contract: Contract, apply: Any, dtype: torch.dtype) -> Pairs:
    positions = contract.positions.of_length(97)
    x = payload((1, len(positions), 3, contract.head_dim), dtype, 0)
    cos, sin = (table.to(dtype) for table in contract.tables(positions, torch.float32))
    wide = [torch.cat((table, table), dim=-1)[None] for table in (cos, sin)]
    theirs = apply(x.transpose(1, 2), x.transpose(1, 2), *wide)[0].transpose(1, 2)
    recipes = (ACTIVATION_DTYPE, contract.forward) if dtype == torch.float32 else (ACTIVATION_DTYPE,)
    for recipe in recipes:
        yield f"forward by '{recipe.name}'", theirs, rotate_strict(Rotation(x, cos, sin, contract.pairing, recipe))
