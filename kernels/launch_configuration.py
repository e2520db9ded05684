"""Launch configurations of the rotary kernels: a small explicit table of each and the rule that picks from it.

There is no autotuning: a tuner keeps state, so that the first call and the hundredth need not run the same
binary. Every entry computes the same bytes; entries differ in speed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class LaunchConfiguration:
    """The block of one Triton program: ``tokens`` x ``heads`` x all channels, run by ``warps`` warps.

    ``tokens`` and ``heads`` are powers of two.
    """

    tokens: int
    heads: int
    warps: int

    def fitted(self, sequence: int, heads: int) -> LaunchConfiguration:
        """This configuration with a block no larger than ``sequence`` tokens and ``heads`` heads need.

        Heads take the place of tokens that are not there, and tokens that of heads: of a smaller block each thread
        would move less than 16 bytes.
        """
        rows = self.tokens * self.heads
        most_tokens, most_heads = _next_power_of_two(sequence), _next_power_of_two(heads)
        fitted_heads = min(rows // min(self.tokens, most_tokens), most_heads)
        return LaunchConfiguration(min(rows // fitted_heads, most_tokens), fitted_heads, self.warps)


ONE_TOKEN = LaunchConfiguration(tokens=1, heads=32, warps=4)
FEW_HEADS = LaunchConfiguration(tokens=16, heads=2, warps=4)
MANY_HEADS = LaunchConfiguration(tokens=4, heads=8, warps=4)
WIDE_HEADS = LaunchConfiguration(tokens=4, heads=8, warps=8)

LAUNCH_CONFIGURATIONS = (ONE_TOKEN, FEW_HEADS, MANY_HEADS, WIDE_HEADS)
"""Every configuration of a compiled launch, each of which :func:`forced_configuration` takes."""

NORM_ONE_TOKEN = LaunchConfiguration(tokens=1, heads=16, warps=4)
NORM_FEW_TOKENS = LaunchConfiguration(tokens=4, heads=4, warps=4)
NORM_NARROW_HEADS = LaunchConfiguration(tokens=8, heads=4, warps=4)

NORM_LAUNCH_CONFIGURATIONS = (NORM_ONE_TOKEN, NORM_FEW_TOKENS, NORM_NARROW_HEADS)
"""Those of a compiled launch of the normalised rotation, which holds every row twice; forced in the same way."""

INTERPRETED = LaunchConfiguration(tokens=64, heads=32, warps=4)
"""The interpreter's own: a program costs it about a millisecond before its first element."""

_lock = Lock()
_forced: list[LaunchConfiguration] = []


@contextmanager
def forced_configuration(configuration: LaunchConfiguration) -> Iterator[None]:
    """Within the block every Triton launch of the process uses ``configuration``, fitted to its input.

    The choice is the process's and not the thread's, because autograd runs a backward in a thread of its own.

    Raises:
        ValueError: ``configuration`` is in neither table.
    """
    if configuration not in (*LAUNCH_CONFIGURATIONS, *NORM_LAUNCH_CONFIGURATIONS):
        raise ValueError(
            "configuration: expected an entry of LAUNCH_CONFIGURATIONS or NORM_LAUNCH_CONFIGURATIONS, "
            f"got {configuration}"
        )
    with _lock:
        _forced.append(configuration)
    try:
        yield
    finally:
        with _lock:
            _forced.pop()


def configuration_for(sequence: int, heads: int, head_dim: int, *, interpreted: bool) -> LaunchConfiguration:
    """The configuration of a launch: the forced one, else the table's, fitted to the input."""
    if _forced:
        chosen = _forced[-1]
    elif interpreted:
        chosen = INTERPRETED
    elif sequence == 1:
        chosen = ONE_TOKEN
    elif heads < MANY_HEADS.heads:
        chosen = FEW_HEADS
    elif head_dim <= 128:
        chosen = MANY_HEADS
    else:
        chosen = WIDE_HEADS
    return chosen.fitted(sequence, heads)


def norm_configuration_for(tokens: int, heads: int, block: int, *, interpreted: bool) -> LaunchConfiguration:
    """The same for the normalised rotation; ``block`` is the head dimension, padded to a power of two."""
    if _forced:
        chosen = _forced[-1]
    elif interpreted:
        chosen = INTERPRETED
    elif tokens == 1:
        chosen = NORM_ONE_TOKEN
    elif block > 128:
        chosen = NORM_FEW_TOKENS
    else:
        chosen = NORM_NARROW_HEADS
    return chosen.fitted(tokens, heads)


def norm_row_block(rows: int, block: int, *, interpreted: bool) -> tuple[int, int]:
    """Rows of one program of the normalised rotation's derivative, a power of two, and its warps.

    No more rows than the tree over all of them has: an addition of nothing more would lose the sign of a zero.
    """
    chosen = 512 if interpreted else max(1, 2048 // block)
    return min(chosen, _next_power_of_two(max(rows, 1))), 4


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
