"""What the oracle costs: processor time for a pair, and memory for the largest real shape."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from ropecheck.oracle.admissible import admissible
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.recipes import ONE_ROUNDING, ONE_ROUNDING_VJP_ONTO_ZEROS, Recipe

MICROSECONDS_PER_PAIR = 0.1
"""The most that both outputs of a pair may cost on one core, by the project's own requirement."""


@pytest.mark.parametrize("recipe", [ONE_ROUNDING, ONE_ROUNDING_VJP_ONTO_ZEROS], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_time_of_a_pair(capsys: pytest.CaptureFixture[str], recipe: Recipe, dtype: torch.dtype) -> None:
    """Both admissible sets of a pair cost at most 0.1 us of one core, on random data and the Qwen-Image table.

    Processor time, and the best of many repetitions, so that whatever else the machine runs does not decide.
    """
    it = contract("qwen-image")
    heads, tokens, lanes = 16, 128, it.lanes.lanes
    cos, sin = it.tables(it.positions.of_length(tokens), dtype)
    c, s = (t.double().unsqueeze(1).expand(tokens, heads, lanes).reshape(-1) for t in (cos, sin))
    generator = torch.Generator().manual_seed(0)
    x0, x1 = (torch.randn(c.numel(), generator=generator).to(dtype).double() for _ in range(2))
    assert c.numel() == 1 << 17
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = float("inf")
    try:
        for _ in range(25):
            started = time.process_time()
            admissible(recipe, x0, x1, c, s, dtype)
            best = min(best, (time.process_time() - started) / c.numel() * 1e6)
    finally:
        torch.set_num_threads(threads)
    with capsys.disabled():
        print(f"\n{recipe.name} in {dtype}: {best:.3f} us of one core for a pair")
    assert best <= MICROSECONDS_PER_PAIR


STREAMED = """
import resource, torch
from ropecheck.oracle.contracts import contract
from ropecheck.oracle.rotation import Rotation, compare
torch.set_num_threads(1)
it = contract("qwen-image")
x = torch.randn(2, 6889, 24, 128, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
cos, sin = it.tables(it.positions.of_length(6889), x.dtype)
got = x.clone()
small = slice(0, 64)
compare(Rotation(x[:, small], cos[small], sin[small], it.pairing, it.forward), got[:, small])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = compare(Rotation(x, cos, sin, it.pairing, it.forward), got)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(found.elements, found.outside, len(found.worst), before, after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_of_the_largest_grid(capsys: pytest.CaptureFixture[str]) -> None:
    """Comparing [2, 6889, 24, 128] streams: beside input and output it takes less than 2 GiB, failing elements too.

    The output is x itself, so that nearly every element is outside and the bookkeeping of failures is on.
    """
    run = subprocess.run([sys.executable, "-c", STREAMED], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    elements, outside, worst, before, after = map(int, run.stdout.split())
    with capsys.disabled():
        more, in_all = (after - before) >> 10, after >> 10
        print(f"\n[2, 6889, 24, 128] in bfloat16: {more} MiB more, {in_all} MiB in all")
    assert elements == 2 * 6889 * 24 * 128
    assert outside > elements // 2
    assert worst == 8
    assert (after - before) * 1024 < 2 * 2**30
