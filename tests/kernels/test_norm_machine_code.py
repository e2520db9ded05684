"""Facts of the compiled kernels of the normalised rotation, read from PTX and SASS made ahead of time.

A child process without ``TRITON_INTERPRET`` (this file run as a script) compiles every variant for sm_90 with the
specialisation that a launch with aligned operands has; no GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

VARIANTS: dict[str, dict[str, Any]] = {
    "1-D": {},
    "M-RoPE": {"mrope": True},
    "no gate": {"gate": False},
    "padding": {"slots": True},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "bf16 table": {"cache_dtype": "bf16"},
    "plain weight": {"add_offset": False},
    "no rounding": {"round_norm": False},
    "fma": {"fma": True},
    "M-RoPE, fma": {"mrope": True, "fma": True},
    "R = D = 128": {"head_dim": 128, "lanes": 64, "block": (8, 4, 4)},
    "R = 20 of D = 80": {"head_dim": 80, "lanes": 10, "block": (8, 4, 4)},
    "R = D = 72": {"head_dim": 72, "lanes": 36, "block": (8, 4, 4)},
    "R = D = 256": {"lanes": 128},
    "one token": {"block": (1, 16, 4)},
    "one token, M-RoPE": {"block": (1, 16, 4), "mrope": True},
    "backward": {"backward": True},
    "backward, M-RoPE": {"backward": True, "mrope": True},
    "backward, no gate": {"backward": True, "gate": False},
    "backward, fp32": {"backward": True, "dtype": "fp32"},
    "backward, fma": {"backward": True, "fma": True},
    "backward, R = D = 128": {"backward": True, "head_dim": 128, "lanes": 64, "block": (16, 1, 4)},
}
ROTATED_IN_EIGHTS = [name for name in VARIANTS if "72" not in name and "80" not in name]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """Facts by variant, from the child process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: no machine code was inspected")
    child = subprocess.run(
        [sys.executable, __file__],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    facts: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("variant", VARIANTS)
def test_fma_is_there_where_it_is_asked_for(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """The PTX has an fma with the option, and without it none: nothing is contracted."""
    assert (compiled[variant]["ptx_fma"] > 0) == VARIANTS[variant].get("fma", False)
    assert compiled[variant]["ptx_mul"] > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_division_and_root_are_rounded_to_nearest(compiled: dict[str, dict[str, Any]], variant: str) -> None:
    """Division and root are those that round, no approximation is left, and nothing flushes subnormals."""
    facts = compiled[variant]
    assert facts["ptx_div"] == {"div.rn.f32"}.__len__() * facts["ptx_div_rn"]
    assert facts["ptx_div_rn"] > 0
    assert facts["ptx_sqrt_rn"] > 0
    assert facts["ptx_approximate"] == 0
    assert facts["ptx_ftz"] == 0
