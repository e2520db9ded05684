"""Family ``rotate_qk`` composed of torch operations, as serving engines' native paths are: a right candidate.

Each product and each sum is rounded by itself, to fp32 or to the activation dtype as the contract says, and the output
once: the bytes that the contracts call strict. The values are divided and put together by operations that only move
them, so that autograd's backward computes nothing but the transposed rotation. Its derivatives of a higher order are
not claimed: what autograd then adds up onto zeros clears signs, where the contracts of one rounding do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ropecheck.oracle.contract import Contract
from ropecheck.oracle.contracts import CONTRACTS, contract
from ropecheck.oracle.pairing import Pairing
from ropecheck.oracle.recipes import ONE_ROUNDING_VJP

from ..cache_packing import axis_map_of
from ..candidates import Candidate

Pair = tuple[Tensor, Tensor]

_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
_CLAIMS: tuple[str, ...] = (
    "vjp", "strict", "strided", "any-shape", "refusals", "compile", "export", "graph", "multi-device",
)  # fmt: skip


def rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing, working: torch.dtype) -> Tensor:
    """x [T, H, D] turned by ``cos`` and ``sin`` [T, R / 2] in dtype ``working``; channels from R on pass through."""
    rotary = 2 * cos.shape[-1]
    turned, tail = torch.split(x, [rotary, x.shape[-1] - rotary], dim=-1)
    turned = turned.to(working)
    if pairing.name == "adjacent":
        x0, x1 = turned.reshape(*turned.shape[:-1], rotary // 2, 2).unbind(-1)
    else:
        x0, x1 = torch.split(turned, rotary // 2, dim=-1)
    c, s = (table.to(working).unsqueeze(-2) for table in (cos, sin))
    y = pairing.join((x0 * c - x1 * s).to(x.dtype), (x1 * c + x0 * s).to(x.dtype))
    return torch.cat((y, tail), dim=-1)


def gathered(cache: Tensor, positions: Tensor, axis_map: tuple[int, ...] | None) -> Pair:
    """(cos, sin), each [T, R / 2]: lane ``l`` reads row ``axis_map[l]`` of three rows of positions."""
    lanes = cache.shape[-1] // 2
    if axis_map is None:
        cos, sin = torch.split(cache[positions.long()], lanes, dim=-1)
        return cos, sin
    where = positions.long()[_row_of_lane(axis_map, cache.device)].T
    lane = torch.arange(lanes, device=cache.device)
    return cache[where, lane], cache[where, lane + lanes]


_rows: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _row_of_lane(axis_map: tuple[int, ...], device: torch.device) -> Tensor:
    """``axis_map`` on a device, where it stays: a graph that is being captured can hold no copy from the host."""
    if torch.compiler.is_compiling():
        return torch.tensor(axis_map, device=device)
    if (axis_map, device) not in _rows:
        _rows[axis_map, device] = torch.tensor(axis_map, device=device)
    return _rows[axis_map, device]


def check(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor, own: Contract) -> None:
    """Raise TypeError or ValueError, naming the argument, for a call that is none of the family and the contract."""
    narrow_cache, axis_map, rows = own.table_dtype == "activation", axis_map_of(own), len(own.positions.axes)
    named = {"q": q, "k": k, "cos_sin_cache": cache, "positions": positions}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, not on {tensor.device}")
    for name, x in (("q", q), ("k", k)):
        if x.dtype not in _ACTIVATIONS:
            raise TypeError(f"{name} must be bf16, fp16 or fp32, not {x.dtype}")
        if x.dim() != 3:
            raise ValueError(f"{name} must be [T, H, D], not {list(x.shape)}")
    if (k.dtype, k.shape[0], k.shape[2]) != (q.dtype, q.shape[0], q.shape[2]):
        raise ValueError(f"k must have the dtype, the tokens and the width of q, not {k.dtype} {list(k.shape)}")
    if cache.dtype != (q.dtype if narrow_cache else torch.float32):
        raise TypeError(f"cos_sin_cache must be {'of the dtype of q' if narrow_cache else 'fp32'}, not {cache.dtype}")
    if cache.dim() != 2 or cache.shape[1] % 2 or not 2 <= cache.shape[1] <= q.shape[2]:
        raise ValueError(f"cos_sin_cache must be [N, R] with R even and at most {q.shape[2]}, not {list(cache.shape)}")
    if axis_map is not None and cache.shape[1] != 2 * len(axis_map):
        raise ValueError(f"cos_sin_cache must have {len(axis_map)} lanes, as the axis map, not {cache.shape[1] // 2}")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, not {positions.dtype}")
    wanted = [q.shape[0]] if rows == 1 else [rows, q.shape[0]]
    if list(positions.shape) != wanted:
        raise ValueError(f"positions must be {wanted}, one for each token of q, not {list(positions.shape)}")


def composition(name: str, *, back: bool = False) -> Callable[[Tensor, Tensor, Tensor, Tensor], Pair]:
    """``run(q, k, cos_sin_cache, positions) -> (q, k)`` of the contract called ``name``; ``back`` turns back."""
    own = contract(name)
    axis_map = axis_map_of(own)
    narrow = any(step.dtype == "activation" for step in own.forward.steps)

    def run(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> Pair:
        check(q, k, cos_sin_cache, positions, own)
        working = q.dtype if narrow else torch.float32
        # Under autocast torch.cat would promote.
        with torch.autocast(q.device.type, enabled=False):
            cos, sin = gathered(cos_sin_cache, positions, axis_map)
            sin = -sin if back else sin
            return rotated(q, cos, sin, own.pairing, working), rotated(k, cos, sin, own.pairing, working)

    return run


def in_place(run: Callable[[Tensor, Tensor, Tensor, Tensor], Pair]) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """As ``run``, written into q and k."""

    def written(q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor) -> None:
        for x, y in zip((q, k), run(q, k, cos_sin_cache, positions), strict=True):
            x.copy_(y)

    return written


def _candidate(name: str, *, writes: bool) -> Candidate:
    run, back = composition(name), composition(name, back=True)
    # Within a region of autocast, autograd's backward of a division is a torch.cat that promotes.
    claims = (*_CLAIMS, "autocast") if writes else _CLAIMS
    if contract(name).backward is not ONE_ROUNDING_VJP:
        claims = tuple(claim for claim in claims if claim != "strict")
    return Candidate(
        name=f"composed/{name}{'-in-place' if writes else ''}",
        contract=name,
        family="rotate_qk",
        run=in_place(run) if writes else run,
        vjp=in_place(back) if writes else None,
        in_place=writes,
        devices=("cpu", "cuda"),
        provides=claims,
    )


_NAMES = ("neox", *(name for name, own in CONTRACTS.items() if own.family == "rotate_qk"))

CANDIDATES = [_candidate(name, writes=writes) for writes in (False, True) for name in _NAMES]
