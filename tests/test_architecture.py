"""The house's rules, read off the source: who may import whom, how long a module is, which words it does without."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = ("oracle", "kernels", "suites", "ci")
MAY_IMPORT = {"oracle": set[str](), "kernels": set[str](), "suites": {"oracle"}, "ci": {"suites", "oracle"}}
# The one module that meets our kernels, as a stranger would.
BRIDGE = ("ropecheck.suites.adapters.shipped", "kernels")
KERNELS_NEED = {"torch", "triton"}
LONGEST_MODULE = 350

# Verdicts rest on exact sets: a comparison with a tolerance has no place.
TOLERANCES = {"allclose", "isclose", "assert_close", "assert_allclose", "approx", "rtol", "atol"}
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
# A path of somebody's own machine means nothing to a reader.
PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w")


@dataclass(frozen=True)
class Module:
    """One source file of a package: its dotted name and its syntax tree."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name.split(".")[1]

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path.name)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The dotted name that ``from . import`` and its like stand for."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.name != "__init__.py":
            parts.pop()
        base = parts[: len(parts) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])])

    def imports(self, *, at_import: bool = False) -> Iterator[str]:
        """Dotted names of what is imported, members included; ``at_import``: only what importing the module imports."""
        for node in _executed(self.tree) if at_import else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{self.absolute(node)}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and node.args:
                function, argument = node.func, node.args[0]
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                    yield str(argument.value)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _executed(child)


def modules(root: Path) -> dict[str, Module]:
    """Every module of the four packages under ``root``, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(("ropecheck", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found[name] = Module(name, path)
    return found


def wrong_directions(root: Path) -> list[str]:
    """Imports that go against ``ci -> suites -> oracle``, or of the kernels by another than the bridge."""
    wrong = []
    for module in modules(root).values():
        allowed = MAY_IMPORT[module.package] | {module.package}
        for imported in module.imports():
            top, _, rest = imported.partition(".")
            target = rest.partition(".")[0]
            if top in PACKAGES and module.package != top:
                wrong.append(f"{module.name} imports {imported}, which is no package of that name")
            elif top == "ropecheck" and target not in allowed and (module.name, target) != BRIDGE:
                wrong.append(f"{module.name} imports {imported}")
            elif module.package == "kernels" and top not in sys.stdlib_module_names | KERNELS_NEED | {"ropecheck"}:
                wrong.append(f"{module.name} imports {imported}, and kernels need torch and triton only")
    return wrong


def cycle(root: Path) -> list[str]:
    """Modules that import one another as they are imported, the first again at the end; empty where none do."""
    known = modules(root)

    def targets(module: Module) -> list[str]:
        named = (name if name in known else name.rpartition(".")[0] for name in module.imports(at_import=True))
        return [name for name in named if name in known and name != module.name]

    graph = {name: targets(module) for name, module in known.items()}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in graph[name]:
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


def too_long(root: Path) -> list[str]:
    lengths = {m.name: len(m.text.splitlines()) for m in modules(root).values()}
    return [f"{name} has {lines} lines" for name, lines in lengths.items() if lines > LONGEST_MODULE]


def unwanted_words(root: Path) -> list[str]:
    """Tolerances among the names that the packages use, and remarks that do not belong into any file."""
    found = []
    for module in modules(root).values():
        for node in ast.walk(module.tree):
            names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
            found += [f"{module.name}:{getattr(node, 'lineno', 0)} uses {name}" for name in TOLERANCES & names]
    texts = [p for pattern in ("*.md", "*.toml", "*.yml", "Makefile", ".ci/run") for p in root.glob(pattern)]
    for folder in (*PACKAGES, "tests", "docs", "constraints"):
        texts += [p for p in (root / folder).rglob("*") if p.suffix in (".py", ".md", ".txt", ".toml")]
    for path in texts:
        if path.resolve() == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if UNFINISHED.search(line) or PRIVATE_PATH.search(line):
                found.append(f"{path.relative_to(root)}:{number} says {line.strip()!r}")
    return found


RULES = (wrong_directions, cycle, too_long, unwanted_words)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: object) -> None:
    """No module of the project breaks the rule, and there are modules to look at."""
    assert len(modules(ROOT)) > 40
    assert callable(rule)
    assert rule(ROOT) == []


PLANTED = [
    (wrong_directions, "oracle/a.py", "from ropecheck.suites import Candidate\n"),
    (wrong_directions, "oracle/a.py", "def f():\n    import ropecheck.ci.cli\n"),
    (wrong_directions, "suites/a.py", "from ropecheck.kernels import multi_axis_rope\n"),
    (wrong_directions, "suites/adapters/a.py", "from ...kernels import multi_axis_rope\n"),
    (wrong_directions, "suites/a.py", "import importlib\nimportlib.import_module('ropecheck.ci.cli')\n"),
    (wrong_directions, "ci/a.py", "from ropecheck import kernels\n"),
    (wrong_directions, "kernels/a.py", "if TYPE_CHECKING:\n    from ropecheck.oracle import floats\n"),
    (wrong_directions, "kernels/a.py", "import numpy as np\n"),
    (wrong_directions, "suites/a.py", "import kernels\n"),
    (cycle, "oracle/a.py", "from .b import x\n"),
    (too_long, "oracle/a.py", "\n" * (LONGEST_MODULE + 1)),
    (unwanted_words, "suites/a.py", "torch.allclose(a, b)\n"),
    (unwanted_words, "suites/a.py", "check(a, b, rtol=1e-3)\n"),
    (unwanted_words, "tests/a.py", "# TO" + "DO later\n"),
    (unwanted_words, "docs/a.md", "See /home/" + "somebody/notes.\n"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_a_planted_violation_is_found(rule: object, path: str, text: str, tmp_path: Path) -> None:
    """Each rule sees what breaks it in a small tree, and sees nothing in that tree before."""
    _small_tree(tmp_path)
    assert callable(rule)
    assert rule(tmp_path) == []
    (tmp_path / path).write_text(text)
    assert len(rule(tmp_path)) >= 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("suites/adapters/shipped.py", "from ropecheck.kernels import multi_axis_rope\n"),
        ("suites/a.py", "from ropecheck.oracle.floats import key\nfrom .adapters import shipped\n"),
        ("ci/a.py", "from ropecheck.suites import Candidate\nfrom ropecheck.oracle import floats\n"),
        ("kernels/a.py", "import torch\nimport triton.language as tl\nimport math\nfrom . import b\n"),
        ("oracle/a.py", "def f():\n    from .b import x\n"),
        ("oracle/a.py", "if TYPE_CHECKING:\n    from .b import x\n"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, text: str, tmp_path: Path) -> None:
    """The bridge, the one direction, and imports that do not run at import time break no rule."""
    _small_tree(tmp_path)
    (tmp_path / path).write_text(text)
    assert [rule(tmp_path) for rule in RULES] == [[], [], [], []]


def test_every_folder_with_modules_is_an_installed_package() -> None:
    """A folder that is not listed in pyproject.toml would be missing from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {m.name if m.path.name == "__init__.py" else m.name.rpartition(".")[0] for m in modules(ROOT).values()}
    assert sorted(listed) == sorted(folders)


def _small_tree(root: Path) -> None:
    for folder in (*PACKAGES, "suites/adapters", "tests", "docs"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").write_text("")
    (root / "oracle" / "b.py").write_text("from .a import y\n")
    (root / "oracle" / "a.py").write_text("")
