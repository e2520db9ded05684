"""codegen: right and wrong machine code of interpreted Triton kernels, compiled ahead of time in another process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropecheck.suites.candidates import load_candidates
from ropecheck.suites.cases import Case, Inputs
from ropecheck.suites.judgements.codegen import CODEGEN, _held
from ropecheck.suites.machine_code import KernelCode
from ropecheck.suites.verdicts import Verdict

Judged = Callable[..., list[Verdict]]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: no machine code was made"
)

# Half-split rotation of whole heads. Every candidate launches a kernel of its own.
_SOURCE = """
import torch, triton
import triton.language as tl
from ropecheck.suites import Candidate

@triton.jit
def rotated(x, cos, sin, y, rows, tables, heads, row, lane, HALF: tl.constexpr):
    valid = row < rows
    token = row // heads % tables
    a = tl.load(x + row * 2 * HALF + lane, mask=valid).to(tl.float32)
    b = tl.load(x + row * 2 * HALF + HALF + lane, mask=valid).to(tl.float32)
    c, s = tl.load(cos + token * HALF + lane, mask=valid), tl.load(sin + token * HALF + lane, mask=valid)
    tl.store(y + row * 2 * HALF + lane, (a * c - b * s).to(y.dtype.element_ty), mask=valid)
    tl.store(y + row * 2 * HALF + HALF + lane, (b * c + a * s).to(y.dtype.element_ty), mask=valid)

@triton.jit
def separate(x, cos, sin, y, rows, tables, heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rotated(x, cos, sin, y, rows, tables, heads, row[:, None], tl.arange(0, HALF)[None, :], HALF)

@triton.jit
def hopping(x, cos, sin, y, rows, tables, heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    # Neighbouring threads take elements that lie far apart: every access is of one element.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = (tl.arange(0, HALF) * 17) % HALF
    rotated(x, cos, sin, y, rows, tables, heads, row[:, None], lane[None, :], HALF)

@triton.jit
def broken_off(x, cos, sin, y, rows, tables, heads, ROWS: tl.constexpr, HALF: tl.constexpr):
    # The interpreter knows all of Python, the compiler no break.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for _ in range(2):
        rotated(x, cos, sin, y, rows, tables, heads, row[:, None], tl.arange(0, HALF)[None, :], HALF)
        break

def launch(kernel, **options):
    def run(x, cos, sin):
        y = torch.empty_like(x)
        batch, sequence, heads, width = x.shape
        rows, tables = batch * sequence * heads, sequence if cos.dim() == 2 else batch * sequence
        kernel[(triton.cdiv(rows, 8),)](x, cos, sin, y, rows, tables, heads, 8, width // 2, num_warps=1, **options)
        return y
    return run

def composed(x, cos, sin):
    (a, b), c, s = x.float().chunk(2, dim=-1), cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

right = launch(separate, enable_fp_fusion=False)

def looking(x, cos, sin):
    if isinstance(separate, triton.runtime.jit.JITFunction):
        assert x.is_cuda and x.device == cos.device == torch.empty(1, device=x.device).device
        torch.cuda.get_device_properties(x.device)
    return right(x, cos, sin)

def unable(x, cos, sin):
    if isinstance(separate, triton.runtime.jit.JITFunction):
        raise RuntimeError("a GPU is really needed here")
    return right(x, cos, sin)

def made(name, run, **more):
    return Candidate(name=name, contract="neox", run=run, devices=("cpu",), dtypes=("bfloat16",), **more)

CANDIDATES = [
    made("right", right, provides=("strict",), kernels=("separate",)),
    made("contracts", launch(separate, enable_fp_fusion=True), provides=("strict",)),
    made("contracts-unclaimed", launch(separate, enable_fp_fusion=True), kernels=("separate",)),
    made("narrow", launch(hopping, enable_fp_fusion=False), kernels=("hopping",)),
    made("narrow-unnamed", launch(hopping, enable_fp_fusion=False), provides=("strict",)),
    made("interpreted-only", launch(broken_off, enable_fp_fusion=False)),
    made("composed", composed, provides=("strict",)),
    made("looking", looking, provides=("strict",)),
    made("unable", unable, provides=("strict",)),
]
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """The verdict on each candidate, by name, from one session that interprets."""
    folder = tmp_path_factory.mktemp("codegen")
    (folder / "kernels_under_test.py").write_text(_SOURCE)
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "ropecheck.suites", "-p", "no:cacheprovider"]
    command += ["--candidate", "kernels_under_test.py", "--verdicts", "verdicts", "--on", "cpu", "--plan", "smoke"]
    command += ["--judgement", "codegen"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    log = folder / "verdicts" / "verdicts.jsonl"
    assert log.exists(), run.stdout + run.stderr
    found = [Verdict.from_json(json.loads(line)) for line in log.read_text().splitlines()]
    assert len({v.candidate for v in found}) == len(found) > 5
    return {v.candidate: v for v in found}


def only(verdict: Verdict) -> dict[str, Any]:
    (kernel,) = verdict.facts["kernels"]
    return dict(kernel)


def test_right_code_passes(verdicts: dict[str, Verdict]) -> None:
    """Separate products, sixteen-byte accesses, no stack, and the case asked for all of that."""
    verdict = verdicts["right"]
    assert verdict.verdict == "pass", verdict.reason
    assert verdict.facts["wide accesses asked"] is True
    assert only(verdict)["stores"] == [16]


def test_contraction_fails_a_strict_candidate_alone(verdicts: dict[str, Verdict]) -> None:
    """The same code is recorded, and no failure, where strict is not claimed."""
    assert verdicts["contracts"].verdict == "fail"
    assert "contracts" in verdicts["contracts"].reason
    assert verdicts["contracts-unclaimed"].verdict == "pass"
    assert only(verdicts["contracts-unclaimed"])["fused"] > 0


def test_contraction_is_seen_by_no_other_judgement(verdicts_of_a_run: Judged) -> None:
    """The interpreter does not contract: on a CPU machine code is where it shows, and nowhere else."""
    source = _SOURCE + "\nCANDIDATES = [c for c in CANDIDATES if c.name == 'contracts']\n"
    found = verdicts_of_a_run(source, "--plan", "smoke")
    assert {v.judgement for v in found if v.verdict == "fail"} == {"codegen"}
    assert {"accuracy-forward", "strict-bytes"} <= {v.judgement for v in found if v.verdict == "pass"}


def test_narrow_accesses_fail_a_named_kernel_alone(verdicts: dict[str, Verdict]) -> None:
    """A kernel that is slow and right fails only where the candidate holds it out."""
    assert verdicts["narrow"].verdict == "fail"
    assert "stores 2 bytes at a time" in verdicts["narrow"].reason
    assert verdicts["narrow-unnamed"].verdict == "pass"


def test_a_kernel_that_only_interprets_fails(verdicts: dict[str, Verdict]) -> None:
    """What the compiler refuses is the candidate's fault, and the compiler is quoted."""
    assert verdicts["interpreted-only"].verdict == "fail"
    assert "broken_off does not compile" in verdicts["interpreted-only"].reason


def test_a_composition_is_not_applicable(verdicts: dict[str, Verdict]) -> None:
    """Without a kernel of its own there is nothing to read, which is no pass."""
    assert verdicts["composed"].verdict == "not-applicable"
    assert "runs no Triton kernel" in verdicts["composed"].reason


def test_a_wrapper_may_look_at_the_device(verdicts: dict[str, Verdict]) -> None:
    """Where it is compiled a wrapper finds all its tensors, and those that it makes, on one GPU."""
    assert verdicts["looking"].verdict == "pass", verdicts["looking"].reason


def test_a_call_that_cannot_be_followed_is_not_applicable(verdicts: dict[str, Verdict]) -> None:
    """What a wrapper needs a real GPU for is said, and is no pass."""
    assert verdicts["unable"].verdict == "not-applicable"
    assert "a GPU is really needed here" in verdicts["unable"].reason


def code(**facts: Any) -> KernelCode:
    right: dict[str, Any] = {
        "name": "kernel", "ptx_fused": 0, "ptx_flushing": 0, "fused": 0, "flushing": 0, "expands_functions": False,
        "stack": 0, "local": 0, "loads": (8, 16), "stores": (16,),
    }  # fmt: skip
    return KernelCode(**{**right, **facts})


@pytest.mark.parametrize(
    ("facts", "inputs", "says"),
    [
        ({}, Inputs(), ""),
        ({"ptx_fused": 3}, Inputs(), "contracts 3 products"),
        ({"fused": 2}, Inputs(), "contracts 2 products"),
        ({"ptx_flushing": 1}, Inputs(), "flush subnormal"),
        ({"stack": 8}, Inputs(), "stack of 8 bytes"),
        ({"local": 4}, Inputs(), "4 accesses to local memory"),
        ({"stores": (4, 16)}, Inputs(), "stores 4 and 16 bytes"),
        ({"loads": (8,)}, Inputs(), "loads at most 8 bytes"),
        ({"loads": (2, 16)}, Inputs(), "single elements"),
        # Sixteen bytes are not asked of every case.
        ({"loads": (2, 16), "stores": (2,)}, Inputs(x_view="misaligned"), ""),
        ({"loads": (2, 16), "stores": (2,)}, Inputs(x_view="channels-stride-2"), ""),
        ({"loads": (2, 16), "stores": (2,)}, Inputs(table_view="lanes-stride-2"), ""),
        ({"loads": (2, 16), "stores": (2,)}, Inputs(head_dim=80, rotary_dim=48), ""),
        ({"loads": (2, 16), "stores": (2,)}, Inputs(head_dim=6, rotary_dim=2), ""),
        ({"stack": 8}, Inputs(x_view="misaligned"), "stack of 8 bytes"),
    ],
)
def test_each_fact_has_its_rule(facts: dict[str, Any], inputs: Inputs, says: str, tmp_path: Path) -> None:
    """One fact at a time makes a strict candidate with a named kernel fail, where the case asks for it."""
    file = tmp_path / "c.py"
    file.write_text(
        "from ropecheck.suites import Candidate\n"
        "CANDIDATES = [Candidate('c', 'neox', lambda x, cos, sin: x, provides=('strict',), kernels=('kernel',))]\n"
    )
    (candidate,) = load_candidates(str(file))
    finding = _held(candidate, Case("codegen", "neox", "cuda", "bfloat16", inputs), [code(**facts)])
    assert finding.verdict == ("fail" if says else "pass")
    assert says in finding.reason


@pytest.mark.gpu
def test_on_a_gpu_the_launched_code_is_read(tmp_path: Path) -> None:
    """Contraction of a kernel launched on a GPU fails a strict candidate; the right one passes."""
    file = tmp_path / "kernels_under_test.py"
    file.write_text(_SOURCE.replace('devices=("cpu",)', 'devices=("cuda",)'))
    candidates = {c.name: c for c in load_candidates(str(file))}
    expected = {"right": "pass", "contracts": "fail", "contracts-unclaimed": "pass", "narrow": "fail"}
    for name, verdict in {**expected, "composed": "not-applicable"}.items():
        case = next(iter(CODEGEN.cases(candidates[name], "cuda", "bfloat16", "smoke")))
        finding = CODEGEN.judge(candidates[name], case, 0)
        assert finding.verdict == verdict, (name, finding.reason)
