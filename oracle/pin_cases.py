"""What :func:`ropecheck.oracle.pins.check_pins` executes: the vendors' symbols beside the contracts.

Each contract has a function that yields :class:`PinCase` objects; a case yields pairs of tensors, the vendor's and
the contract's, that must agree byte for byte. Differences between releases in how a symbol is called are told by
its signature. Data are random normal numbers with zeros of both signs and subnormal numbers among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .contract import Contract, Grid
from .floats import bits
from .positions import CentredGrid, Grid2D
from .rotation import Rotation, rotate_strict

Pairs = Iterator[tuple[str, Tensor, Tensor]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

QWEN_GRIDS: tuple[tuple[tuple[Grid, ...], int], ...] = (
    *((((1, h, w),), h + w) for h, w in product((1, 2, 3, 5, 8, 13), (1, 2, 4, 7, 11, 16))),
    (((1, 64, 64),), 37),
    (((1, 83, 83),), 37),
    (((1, 104, 58),), 37),
    (((1, 58, 104),), 512),
    (((1, 1, 97),), 5),
    (((1, 101, 1),), 5),
    (((2, 3, 2),), 2),
    (((5, 4, 6),), 11),
    (((9, 7, 3),), 0),
    (((33, 2, 2),), 1),
    (((1, 4, 6), (1, 7, 2)), 2),
    (((1, 7, 2), (1, 4, 6)), 3),
    (((1, 5, 5), (1, 5, 5), (1, 5, 5)), 7),
    (((1, 64, 64), (1, 83, 61)), 128),
    (((1, 3, 3), (1, 9, 1), (1, 1, 12), (1, 2, 2)), 4),
    (((2, 3, 5), (3, 5, 3)), 6),
    (((1, 4, 4),), 4094),
    (((1, 2, 128), (4, 1, 1)), 1000),
)
"""(images of one sample, text length): 54 cases of every kind that the centred rule meets."""

QWEN_UNCENTRED_GRIDS: tuple[tuple[tuple[Grid, ...], int], ...] = (
    (((1, 4, 4),), 3),
    (((1, 5, 3),), 3),
    (((1, 1, 1),), 2),
    (((2, 3, 7),), 2),
    (((1, 4, 6), (1, 7, 2)), 2),
    (((1, 83, 61),), 37),
    (((3, 2, 2), (1, 9, 1)), 4000),
)

QWEN_LAYERED_GRIDS: tuple[tuple[tuple[Grid, ...], int], ...] = (
    (((1, 4, 4), (1, 4, 4), (1, 6, 4)), 2),
    (((1, 5, 3),), 4),
    (((1, 2, 2),) * 6 + ((1, 3, 3),), 3),
    (((1, 64, 40), (1, 64, 40), (1, 64, 40), (1, 57, 41)), 77),
)

QWEN_ROTATED_GRIDS: tuple[tuple[Grid, ...], ...] = (
    ((1, 64, 64),),
    ((1, 83, 83),),
    ((1, 104, 58),),
    ((1, 5, 3),),
    ((1, 1, 17),),
    ((1, 4, 6), (1, 7, 2)),
    ((3, 5, 4),),
)


@dataclass(frozen=True)
class PinCase:
    """One comparison: ``symbols`` are the vendor classes and functions whose bytes it judges.

    ``within`` says that an order of summation is the vendor's own: its bytes are compared with the nearest admissible.
    """

    name: str
    symbols: tuple[str, ...]
    pairs: Callable[[], Pairs]
    within: bool = False


def qwen_image_cases(contract: Contract, symbols: Mapping[str, Any]) -> Iterator[PinCase]:
    """Whole tables, image and text tables of all grids, the rotation and its gradient."""
    dims = list(contract.lanes.dims)
    variants = (
        ("QwenEmbedRope", "grid", CentredGrid(), QWEN_GRIDS),
        ("QwenEmbedRope", "uncentred grid", CentredGrid(centred=False), QWEN_UNCENTRED_GRIDS),
        ("QwenEmbedLayer3DRope", "layered grid", CentredGrid(condition_last=True), QWEN_LAYERED_GRIDS),
    )
    for symbol, kind, rule, grids_and_lengths in variants:
        if symbol not in symbols:
            continue
        # Built inside the first case, so that a constructor that raises is that case's finding.
        rope = cache(partial(symbols[symbol], theta=10000, axes_dim=dims, scale_rope=rule.centred))
        yield PinCase(f"{kind}, whole tables", (symbol,), later(_qwen_whole_tables, contract, rope))
        for grids, length in grids_and_lengths:
            tables = later(_qwen_tables, contract, rope, rule, grids, length)
            yield PinCase(f"{kind} {grids} with {length} text tokens", (symbol,), tables)
    if "apply_rotary_emb_qwen" in symbols:
        apply = symbols["apply_rotary_emb_qwen"]
        for grids, dtype in product(QWEN_ROTATED_GRIDS, DTYPES):
            rotations = later(_qwen_rotations, contract, apply, grids, dtype)
            yield PinCase(f"rotation of grid {grids} in {dtype}", ("apply_rotary_emb_qwen",), rotations)


def hf_llama_cases(contract: Contract, symbols: Mapping[str, Any]) -> Iterator[PinCase]:
    """Tables of many lengths and of scattered positions, the rotation and its gradient."""
    lengths = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 64, 97, 128, 255, 1000, 4097)
    if "LlamaRotaryEmbedding" in symbols:
        from transformers import LlamaConfig

        width = contract.head_dim
        config = LlamaConfig(hidden_size=2 * width, num_attention_heads=2, head_dim=width)
        embedding = cache(partial(symbols["LlamaRotaryEmbedding"], config))
        generator = torch.Generator().manual_seed(0)
        scattered = torch.randint(0, 131072, (3, 33), generator=generator)
        for dtype in DTYPES:
            for positions in (*(torch.arange(n)[None] for n in lengths), scattered):
                tables = later(_llama_tables, contract, embedding, positions, dtype)
                shape = f"{positions.shape[0]} x {positions.shape[1]}"
                yield PinCase(f"table of {shape} positions in {dtype}", ("LlamaRotaryEmbedding",), tables)
    if "apply_rotary_pos_emb" in symbols:
        apply = symbols["apply_rotary_pos_emb"]
        for length, dtype in product((1, 7, 64, 333), DTYPES):
            rotations = later(_llama_rotations, contract, apply, length, dtype)
            yield PinCase(f"rotation of {length} tokens in {dtype}", ("apply_rotary_pos_emb", "rotate_half"), rotations)


def hf_vision_2d_cases(contract: Contract, symbols: Mapping[str, Any]) -> Iterator[PinCase]:
    """Positions, tables, the rotation and its gradient, of images and of videos."""
    all_grids: tuple[tuple[Grid, ...], ...] = (
        ((1, 2, 2),), ((1, 4, 6),), ((1, 16, 16),), ((3, 4, 2),), ((1, 2, 46), (2, 6, 4)), ((1, 74, 98),),
    )  # fmt: skip
    for grids in all_grids:
        if "get_vision_position_ids" in symbols:
            places = later(_vision_positions, contract, symbols["get_vision_position_ids"], grids)
            yield PinCase(f"positions of grid {grids}", ("get_vision_position_ids",), places)
        for name in ("Qwen2VLVisionRotaryEmbedding", "VisionRotaryEmbedding"):
            if name in symbols:
                tables = later(_vision_tables, contract, symbols[name], grids)
                yield PinCase(f"table of grid {grids}", (name,), tables)
        if "apply_rotary_pos_emb_vision" in symbols:
            apply = symbols["apply_rotary_pos_emb_vision"]
            for dtype in DTYPES:
                rotations = later(_vision_rotations, contract, apply, grids, dtype)
                judged = ("apply_rotary_pos_emb_vision", "rotate_half")
                yield PinCase(f"rotation of grid {grids} in {dtype}", judged, rotations)


CASES: Mapping[str, Callable[[Contract, Mapping[str, Any]], Iterator[PinCase]]] = {
    "qwen-image": qwen_image_cases,
    "hf-llama": hf_llama_cases,
    "hf-vision-2d": hf_vision_2d_cases,
}


def describe_difference(vendor: Tensor, ours: Tensor) -> str | None:
    """The first element whose bytes differ, or None. Zeros of unlike sign differ."""
    if vendor.shape != ours.shape or vendor.dtype != ours.dtype:
        return f"vendor gives {vendor.dtype} {tuple(vendor.shape)}, the contract {ours.dtype} {tuple(ours.shape)}"
    vendor, ours = vendor.detach().contiguous(), ours.detach().contiguous()
    raw = (bits(vendor), bits(ours)) if vendor.is_floating_point() else (vendor, ours)
    unequal = (raw[0] != raw[1]).nonzero()
    if not len(unequal):
        return None
    where = tuple(unequal[0].tolist())
    theirs, expected = (
        f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)
        for value in (vendor[where].item(), ours[where].item())
    )
    return (
        f"element {where} is {theirs}, the contract gives {expected}; "
        f"{len(unequal)} of {vendor.numel()} elements differ"
    )


def interleaved_table(contract: Contract, positions: Tensor) -> Tensor:
    """fp32 [..., R / 2, 2]: cosine and sine of each lane, as a complex64 table lies in memory."""
    return torch.stack(contract.tables(positions, torch.float32), dim=-1)


def later(function: Callable[..., Pairs], *arguments: Any) -> Callable[[], Pairs]:
    return lambda: function(*arguments)


def _qwen_whole_tables(contract: Contract, build: Callable[[], Any]) -> Pairs:
    rope = build()
    for name, table, first in (("positive", rope.pos_freqs, 0), ("negative", rope.neg_freqs, -len(rope.neg_freqs))):
        positions = torch.arange(first, first + len(table))[:, None].expand(-1, len(contract.lanes.dims))
        yield f"{name} table", torch.view_as_real(table), interleaved_table(contract, positions)


def _qwen_tables(
    contract: Contract, build: Callable[[], Any], rule: CentredGrid, grids: Sequence[Grid], length: int
) -> Pairs:
    rope = build()
    if hasattr(rope, "rope_cache"):
        rope.rope_cache = {}  # 0.35 forgets the number of frames in its cache's key
    takes_length = "max_txt_seq_len" in inspect.signature(rope.forward).parameters
    text = {"max_txt_seq_len": length} if takes_length else {"txt_seq_lens": [length]}
    image_table, text_table = rope([list(grids)], device=torch.device("cpu"), **text)
    yield "image table", torch.view_as_real(image_table), interleaved_table(contract, rule.image(grids))
    yield "text table", torch.view_as_real(text_table), interleaved_table(contract, rule.text(grids, length))


def _qwen_rotations(contract: Contract, apply: Any, grids: Sequence[Grid], dtype: torch.dtype) -> Pairs:
    rule = CentredGrid()
    cos, sin = contract.tables(torch.cat((rule.text(grids, 5), rule.image(grids))), dtype)
    heads = 3 if len(cos) < 1000 else 1
    x, gradient = (payload((1, len(cos), heads, contract.head_dim), dtype, seed) for seed in (0, 1))

    def rotate(leaf: Tensor) -> Tensor:
        rotated: Tensor = apply(leaf, torch.complex(cos, sin), use_real=False)
        return rotated

    return _forward_and_gradient(contract, rotate, x, gradient, cos, sin)


def _llama_tables(contract: Contract, build: Callable[[], Any], positions: Tensor, dtype: torch.dtype) -> Pairs:
    vendor = build()(torch.zeros(1, dtype=dtype), positions)
    for name, theirs, ours in zip(
        ("cosine", "sine"), vendor, contract.tables(positions[..., None], dtype), strict=True
    ):
        yield name, theirs, torch.cat((ours, ours), dim=-1)


def _llama_rotations(contract: Contract, apply: Any, length: int, dtype: torch.dtype) -> Pairs:
    positions = torch.stack((torch.arange(length), torch.arange(length) + 1000))
    cos, sin = contract.tables(positions[..., None], dtype)
    wide = [torch.cat((table, table), dim=-1) for table in (cos, sin)]
    x, gradient = (payload((2, length, 3, contract.head_dim), dtype, seed) for seed in (0, 1))

    def rotate(leaf: Tensor) -> Tensor:
        # Heads before tokens, as a transposed view: so the model calls it.
        rotated: Tensor = apply(leaf.transpose(1, 2), leaf.detach().transpose(1, 2), *wide)[0]
        return rotated.transpose(1, 2)

    return _forward_and_gradient(contract, rotate, x, gradient, cos, sin)


def _vision_positions(contract: Contract, position_ids: Any, grids: Sequence[Grid]) -> Pairs:
    rule = _grid2d(contract)
    yield "positions", position_ids(torch.tensor(grids), rule.merge), rule.image(grids)


def _vision_tables(contract: Contract, embedding_class: Any, grids: Sequence[Grid]) -> Pairs:
    positions = _grid2d(contract).image(grids)
    if "config" in inspect.signature(embedding_class.__init__).parameters:
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

        heads = 2
        config = Qwen2VLVisionConfig(embed_dim=heads * contract.head_dim, num_heads=heads)
        vendor = embedding_class(config)(torch.zeros(1), positions)
    else:
        embedding = embedding_class(contract.head_dim // 2)
        if "seqlen" in inspect.signature(embedding.forward).parameters:
            angles = embedding(int(positions.max()) + 1)[positions].flatten(1)
        else:
            angles = embedding(positions)
        doubled = torch.cat((angles, angles), dim=-1)
        vendor = (doubled.cos(), doubled.sin())
    for name, theirs, ours in zip(("cosine", "sine"), vendor, contract.tables(positions, torch.float32), strict=True):
        yield name, theirs, torch.cat((ours, ours), dim=-1)


def _vision_rotations(contract: Contract, apply: Any, grids: Sequence[Grid], dtype: torch.dtype) -> Pairs:
    cos, sin = contract.tables(_grid2d(contract).image(grids), dtype)
    wide = [torch.cat((table, table), dim=-1) for table in (cos, sin)]
    x, gradient = (payload((1, len(cos), 2, contract.head_dim), dtype, seed) for seed in (0, 1))

    def rotate(leaf: Tensor) -> Tensor:
        rotated: Tensor = apply(leaf[0], leaf.detach()[0], *wide)[0]
        return rotated[None]

    return _forward_and_gradient(contract, rotate, x, gradient, cos, sin)


def _grid2d(contract: Contract) -> Grid2D:
    if not isinstance(contract.positions, Grid2D):
        raise TypeError(f"contract {contract.name!r} has no two-dimensional grid")
    return contract.positions


def _forward_and_gradient(
    contract: Contract, rotate: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, cos: Tensor, sin: Tensor
) -> Pairs:
    """Vendor autograd beside the contract's two recipes, for x and gradient [B, S, H, D]."""
    leaf = x.clone().requires_grad_()
    rotated = rotate(leaf)
    (returned,) = torch.autograd.grad(rotated, leaf, gradient)
    ours = Rotation(x, cos, sin, contract.pairing, contract.forward)
    yield "forward", rotated, rotate_strict(ours)
    yield "gradient", returned, rotate_strict(replace(ours, x=gradient, recipe=contract.backward))


def payload(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    kind = torch.randint(0, 16, shape, generator=generator)
    values = torch.where(kind == 0, 0.0, values)
    values = torch.where(kind == 1, -0.0, values)
    return torch.where(kind == 2, values * torch.finfo(dtype).smallest_normal, values).to(dtype)
