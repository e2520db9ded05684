"""Hashes of what was judged and of what judges: which changes they follow, and which they do not."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ropecheck.ci import sources
from ropecheck.ci.sources import candidate_packages, candidate_sources, judging_hash, sensitivity_hash
from ropecheck.ci.tracing import Tree, fingerprint
from ropecheck.ci.verify import Run, expected
from ropecheck.suites.judgements import JUDGEMENTS
from ropecheck.suites.judging import Selection

PACKAGES = ("oracle", "suites", "ci", "kernels")

Change = Callable[[Path], object]


def edited(name: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def appended(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


# A stranger's project: a candidate file beside a helper, a package with CUDA sources above it, all not installed.
PROJECT = {
    "pyproject.toml": "",
    "gate/candidate.py": (
        '"""What is judged."""\n'
        "import torch\nimport mylib_of_tests.rope\n"
        "def run(x, cos, sin):\n    from helper import turned\n    return turned(x, cos, sin)\n"
    ),
    "gate/helper.py": "def turned(x, c, s):\n    return x * c  # of the lane\n",
    "gate/unrelated.py": "X = 1\n",
    "gate/flags.cuh": "#define N 4\n",
    "gate/deeper/declared.cl": "kernel\n",
    "mylib_of_tests/__init__.py": "",
    "mylib_of_tests/rope.py": '"""Ours."""\nfrom .build import FLAGS\nWORKER = "mylib_of_tests.worker"\n',
    "mylib_of_tests/build.py": 'FLAGS = ("-O3", "--fmad=false")\n',
    "mylib_of_tests/worker.py": "import rich\n",
    "mylib_of_tests/other.py": "Y = 1\n",
    "mylib_of_tests/csrc/rope.cu": "__global__ void rope() {}\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def entry_of(project: Path) -> dict[str, Any]:
    gate = project / "gate"
    declared = {"deeper/declared.cl": str(gate / "deeper" / "declared.cl")}
    file = str(gate / "candidate.py")
    return {"files": {"entry": file, "module": "", "run": {"ropecheck_candidate_candidate": file}, "sources": declared}}


def test_a_candidate_is_made_of_all_that_it_imports(project: Path) -> None:
    """Also what is imported within a function or named as a string, and sources that are no Python."""
    found = candidate_sources(entry_of(project))["files"]
    assert set(found) == {
        "candidate.py", "helper.py", "flags.cuh", "deeper/declared.cl", "mylib_of_tests/__init__.py",
        "mylib_of_tests/rope.py", "mylib_of_tests/build.py", "mylib_of_tests/worker.py", "mylib_of_tests/csrc/rope.cu",
    }  # fmt: skip
    assert set(candidate_packages(entry_of(project))) == {"torch", "rich"}


SAME: dict[str, Change] = {
    "a comment": edited("gate/helper.py", "# of the lane", "# of its lane"),
    "a docstring": edited("gate/candidate.py", "What is judged.", "What is judged here."),
    "a line break": edited("gate/helper.py", "(x, c, s)", "(\n    x, c, s\n)"),
    "a file that is not imported": appended("gate/unrelated.py", "Z = 1\n"),
    "a module that is not imported": appended("mylib_of_tests/other.py", "Z = 1\n"),
    "a new file": lambda f: (f / "gate" / "notes.py").write_text(""),
}
OTHER: dict[str, Change] = {
    "the candidate's file": edited("gate/candidate.py", "turned(x, cos, sin)", "turned(x, sin, cos)"),
    "a helper that a function imports": edited("gate/helper.py", "x * c", "x * s"),
    "a CUDA source": edited("mylib_of_tests/csrc/rope.cu", "{}", "{ ; }"),
    "a comment in a CUDA source": appended("mylib_of_tests/csrc/rope.cu", "// x\n"),
    "a header beside the file": edited("gate/flags.cuh", "4", "8"),
    "a build flag": edited("mylib_of_tests/build.py", "--fmad=false", "--fmad=true"),
    "a module that is run by its name": appended("mylib_of_tests/worker.py", "Z = 1\n"),
    "a declared source": appended("gate/deeper/declared.cl", "x"),
    "a declared source that is gone": lambda f: (f / "gate" / "deeper" / "declared.cl").unlink(),
    "a new CUDA source": lambda f: (f / "mylib_of_tests" / "csrc" / "more.cuh").write_text(""),
    "a constant's type": edited("gate/helper.py", "x * c", "x * c + 0"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_is_no_code_of_the_candidate_keeps_its_hash(project: Path, change: Change) -> None:
    """Evidence does not go stale for a comment."""
    before = candidate_sources(entry_of(project))
    change(project)
    assert candidate_sources(entry_of(project)) == before


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_is_code_of_the_candidate_changes_its_hash(project: Path, change: Change) -> None:
    """Every file that takes part counts, and names itself."""
    before = candidate_sources(entry_of(project))
    change(project)
    after = candidate_sources(entry_of(project))
    assert after["sha256"] != before["sha256"]
    names = {*before["files"], *after["files"]}
    assert len([n for n in names if before["files"].get(n) != after["files"].get(n)]) == 1


def test_hashes_do_not_depend_on_the_place(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same files in another folder, as on another machine, have the same names and hashes."""
    elsewhere = shutil.copytree(project, tmp_path_factory.mktemp("elsewhere") / "copy")
    assert candidate_sources(entry_of(elsewhere)) == candidate_sources(entry_of(project))


@pytest.mark.parametrize("origin", ["an index", "a folder"])
def test_an_installed_package_counts_by_its_version_unless_it_was_built_here(
    project: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    """What came from a folder or a repository keeps its version while it changes: its files count."""
    installed = project / "lib" / "site-packages"
    shutil.move(project / "mylib_of_tests", installed / "mylib_of_tests")
    metadata = installed / "mylib_of_tests-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib_of_tests\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("mylib_of_tests\n")
    if origin == "a folder":
        (metadata / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {}}')
    monkeypatch.syspath_prepend(str(installed))
    for cached in (sources._located, sources._distributions):
        cached.cache_clear()
        monkeypatch.setattr(sources, cached.__name__, cached.__wrapped__)
    counted = "mylib_of_tests/build.py" in candidate_sources(entry_of(project))["files"]
    version = candidate_packages(entry_of(project)).get("mylib_of_tests")
    assert (counted, version) == ((True, None) if origin == "a folder" else (False, "1.0"))


def test_the_package_of_the_function_counts_where_it_is_installed(project: Path) -> None:
    """A function that is a package's own is judged by the package's files, wherever they lie."""
    import rich.markup

    entry = entry_of(project)
    entry["files"]["run"]["rich.markup"] = rich.markup.__file__
    found = candidate_sources(entry)["files"]
    assert {"rich/__init__.py", "rich/markup.py", "rich/errors.py"} <= set(found)


def test_the_judge_is_no_source_of_a_candidate(project: Path) -> None:
    """What judges has a hash of its own."""
    appended("gate/helper.py", "from ropecheck.suites import Candidate\nimport ropecheck.oracle.floats\n")(project)
    assert not any("ropecheck" in name for name in candidate_sources(entry_of(project))["files"])


def test_our_kernels_are_made_of_their_package() -> None:
    """Modules, CUDA sources and build flags of the kernels; of the suites the one file that lists the candidates."""
    shipped = "ropecheck.suites.adapters.shipped:CANDIDATES"
    listed = expected(Run((shipped,), Selection("smoke", judgements=("purity",))))
    found = candidate_sources(listed[0])["files"]
    root = Path(sources._tree("ropecheck.kernels").folder)
    modules = {f"ropecheck/kernels/{p.relative_to(root).as_posix()}" for p in root.rglob("*.py")}
    native = {f"ropecheck/kernels/cuda/{p.name}" for p in (root / "cuda").iterdir()}
    assert modules | native <= set(found)
    assert set(found) - modules - native == {"ropecheck/suites/adapters/shipped.py"}


def test_a_partial_application_leads_to_its_function(tmp_path: Path) -> None:
    """``functools`` does not define the candidate, and neither does a decorator."""
    (tmp_path / "inner.py").write_text("def turn(x, cos, sin, how):\n    return x\n")
    (tmp_path / "mine.py").write_text(
        "from functools import partial\nfrom inner import turn\nfrom ropecheck.suites import Candidate\n"
        "run = partial(partial(turn), how=1)\n"
        'CANDIDATES = [Candidate(name="mine/x", contract="neox", run=run, devices=("cpu",))]\n'
    )
    (entry,) = expected(Run((str(tmp_path / "mine.py"),), Selection("smoke", judgements=("purity",))))
    assert entry["files"]["run"] == {"inner": str(tmp_path / "inner.py")}
    assert set(candidate_sources(entry)["files"]) == {"mine.py", "inner.py"}


# Of every statement and expression that 3.10 has; what follows has no meaning.
SAMPLE = '''"""Documented."""
from __future__ import annotations
import a.b as c, d
from . import e
from ..f import g as h, i
X: int = 0x10 + 1_000 - 1.5e3 * 2j // True @ None % ... ** -1
@decorated(1, *two, three=3, **four)
async def function(a, /, b: int = 1, *c, d: str = "x" 'y', e, **f) -> None:
    """Documented."""
    global g, h
    async with open(a) as (b, c), d: await e
    async for x, in y: yield x
    else: return
def other(*, a=1):
    nonlocal_ = lambda x, *y, z=1, **w: (yield from x)
    def inner(): nonlocal nonlocal_
class Class(Base, metaclass=Meta):
    "Documented."
    pass
try: raise Error(x) from y
except (A, B) as error: assert x, f"{x!r:>{width}.{precision}} and {{}} {y=} {z:%Y-%m}" rf"\\d{a['b']}" "tail"
except C: del a[1:2, ::3], b.c, d
else: pass
finally: x += 1; y: list[int]
while (n := f(a, *b, c=d)) and not x or y is not z: continue
for i in [j for j in {k: v for k, v in {**m, "n": o}.items()} if j if k]: break
match command.split():
    case [1, "two", *rest] | (None, -3): pass
    case {"x": X.y, **others} if others: pass
    case Point(x=0, y=z) as p: pass
    case _: pass
print({1, 2}, (yield_ for yield_ in x), a if b else c, a < b <= c not in d, x[...], 1 << 2 | 3 & ~4 ^ 5)
print(b"\\xff", u"u", "\\ud800", -x, +x, a // b, a >> b, a == b, a != b, a > b, a >= b, a is b, a in b)
'''
ONE_FOR_ALL = "f6c7d2fd46fb3f13edb6425a7ff26aa522312cccd90773ca067f8046487ea2b0"


def test_every_python_reads_the_same_code(tmp_path: Path) -> None:
    """Evidence of one release of Python is read by another: the fingerprint is this one in all that are supported."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    assert fingerprint(tmp_path / "sample.py") == ONE_FOR_ALL
    (tmp_path / "sample.py").write_text(SAMPLE.replace("Documented", "Explained").replace("yield x", "yield  x"))
    assert fingerprint(tmp_path / "sample.py") == ONE_FOR_ALL


STRINGS = ['f"a{x}b"', 'f"a" f"{x}" "b"', '"a" f"{x}b"', 'f"a{x}" f"" "b"']


def test_a_formatted_string_is_one_however_it_is_divided(tmp_path: Path) -> None:
    """Releases of Python divide the text of a formatted string differently; its text still counts."""
    for number, text in enumerate([*STRINGS, 'f"a{x}c"']):
        (tmp_path / f"{number}.py").write_text(f"y = {text}\n")
    *same, other = [fingerprint(tmp_path / f"{number}.py") for number in range(len(STRINGS) + 1)]
    assert len(set(same)) == 1
    assert other not in same


@pytest.mark.parametrize("one", ["1", "1.0", "True", "'1'", "b'1'", "None", "...", "-1", "1j", "[]", "{**{}}"])
def test_constants_of_other_types_are_other_code(tmp_path: Path, one: str) -> None:
    """What compares equal is not the same."""
    others = [v for v in ("1", "1.0", "True", "'1'", "None") if v != one]
    for number, text in enumerate((one, *others)):
        (tmp_path / f"{number}.py").write_text(f"x = {text}\n")
    first, *rest = [fingerprint(tmp_path / f"{number}.py") for number in range(len(others) + 1)]
    assert first not in rest


def test_a_file_that_is_no_python_of_ours_counts_by_its_bytes(tmp_path: Path) -> None:
    """Syntax of another release cannot be read, and the file is still told from another."""
    path = tmp_path / "x.py"
    path.write_text("def f(:\n")
    before = fingerprint(path)
    path.write_text("def f(:\n# \n")
    assert len({before, fingerprint(path), fingerprint(tmp_path / "absent.py")}) == 3


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the packages; hashes are of the copy."""
    copy = tmp_path_factory.mktemp("judge")
    for name in PACKAGES:
        _restore(name, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_tree", lambda package: Tree(package, copy / package.partition(".")[2]))
        yield copy
    _forget()


@pytest.fixture
def judge(copied: Path) -> Iterator[Path]:
    """The copy, which a test may change."""
    yield copied
    for name in PACKAGES:
        _restore(name, copied)


def _restore(name: str, copy: Path) -> None:
    origin = Path(next(iter(importlib.util.find_spec(f"ropecheck.{name}").submodule_search_locations)))  # type: ignore
    for path in (copy / name).rglob("*.py"):
        if not (origin / path.relative_to(copy / name)).exists():
            path.unlink()
    for path in origin.rglob("*.py"):
        target = copy / name / path.relative_to(origin)
        if not target.exists() or target.stat().st_mtime_ns != path.stat().st_mtime_ns:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def _forget() -> None:
    for cached in (sources._frame, sources._asking, sources._described):
        cached.cache_clear()


ASKED = ("accuracy-forward", "laws", "autograd", "higher-vjp", "codegen", "device-guard", "sanitizer")
CONTRACTS = ("neox", "gptj", "mrope-interleaved", "qwen3.5-norm-rope-gate")


def hashes() -> dict[tuple[str, str], str]:
    _forget()
    return {(judgement, contract): judging_hash(judgement, contract) for judgement in ASKED for contract in CONTRACTS}


def differing(judge: Path, change: Change) -> set[tuple[str, str]]:
    before = hashes()
    change(judge)
    after = hashes()
    return {key for key in before if before[key] != after[key]}


EVERY = {(judgement, contract) for judgement in ASKED for contract in CONTRACTS}
CODE = "\n\ndef added() -> int:\n    return 1\n"
REACH: dict[str, tuple[Change, set[tuple[str, str]]]] = {
    "a comment": (appended("suites/judging.py", "# x\n"), set()),
    "one judgement": (appended("suites/judgements/laws.py", CODE), {("laws", c) for c in CONTRACTS}),
    "a judgement that another uses": (
        appended("suites/judgements/autograd.py", CODE),
        {(j, c) for j in ("autograd", "higher-vjp", "accuracy-forward") for c in CONTRACTS}),
    "one contract": (appended("oracle/contracts/gptj.py", CODE), {(j, "gptj") for j in ASKED}),
    "a contract that another is made of": (
        appended("oracle/contracts/mrope.py", CODE),
        {(j, c) for j in ASKED for c in ("mrope-interleaved", "qwen3.5-norm-rope-gate")}),
    "a new contract": (
        lambda f: [(f / "oracle/contracts/new.py").write_text("from ..contract import Contract\n"),
                   edited("oracle/contracts/__init__.py", "from ..contract import Contract\n",
                          "from ..contract import Contract\nfrom .new import Contract as New\n")(f)], set()),
    "a new judgement": (
        lambda f: [(f / "suites/judgements/new.py").write_text("X = 1\n"),
                   appended("suites/judgements/__init__.py", "from .new import X\n")(f)], set()),
    "the frame": (appended("suites/judging.py", CODE), EVERY),
    "the plugin": (appended("suites/plugin.py", CODE), EVERY),
    "the arithmetic": (appended("oracle/floats.py", CODE), EVERY),
    "the cases": (appended("suites/cases.py", CODE), EVERY),
    "the sanitizer's process": (appended("suites/sanitized.py", CODE), {("sanitizer", c) for c in CONTRACTS}),
    "the sanitizer's reader": (appended("ci/sanitizer_output.py", CODE), {("sanitizer", c) for c in CONTRACTS}),
    "a fault": (appended("suites/faults/arithmetic.py", CODE), set()),
    "a candidate": (appended("suites/adapters/shipped.py", CODE), set()),
    "a kernel": (appended("kernels/operators.py", CODE), set()),
    "the command line": (appended("ci/cli.py", CODE), set()),
}  # fmt: skip


@pytest.mark.parametrize(("change", "changed"), REACH.values(), ids=REACH)
def test_a_change_of_the_judge_reaches_what_it_judges(
    judge: Path, change: Change, changed: set[tuple[str, str]]
) -> None:
    """Evidence goes stale where another answer is possible, and nowhere else."""
    assert differing(judge, change) == changed


def test_every_judgement_has_a_hash() -> None:
    """None is without a module of its own, and judgements of different modules differ."""
    found = {name: judging_hash(name, "neox") for name in JUDGEMENTS}
    assert len(set(found.values())) == len({j.judge.__module__ for j in JUDGEMENTS.values()})
    with pytest.raises(KeyError):
        judging_hash("no-such", "neox")


def test_sensitivity_depends_on_every_module_of_the_judge(judge: Path) -> None:
    """Faults and unused modules included, kernels and documentation not."""
    seen = [sensitivity_hash()]
    for name in ("suites/faults/arithmetic.py", "oracle/contracts/mrope.py", "suites/adapters/shipped.py"):
        appended(name, CODE)(judge)
        seen.append(sensitivity_hash())
    assert len(set(seen)) == 4
    appended("kernels/operators.py", CODE)(judge)
    appended("suites/judging.py", "# x\n")(judge)
    assert sensitivity_hash() == seen[-1]
