"""Tracing: which files a Python file is made of, told from its imports without running anything.

Every import statement counts, wherever it stands in a file, and so does a string that is the full name of a module of
a traced tree: that is how a module is run in a process of its own.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Tree:
    """A folder of modules: ``prefix`` is the dotted name of the package that it is, empty where its modules are
    imported by their own names. ``single`` is the file of a module that is no package; its folder is not looked into.
    """

    prefix: str
    folder: Path
    single: Path | None = None

    def files(self, module: str) -> list[tuple[str, Path]]:
        """(module, path) of every file that importing ``module`` runs; empty where it is none of this tree's."""
        if self.single is not None:
            return [(module, self.single)] if module == self.prefix else []
        inside = module.split(".")
        if self.prefix:
            own = self.prefix.split(".")
            if inside[: len(own)] != own:
                return []
            inside = inside[len(own) :]
        found, folder, name = [], self.folder, self.prefix
        if self.prefix and (package := folder / "__init__.py").is_file():
            found.append((name, package))
        for number, part in enumerate(inside):
            name = f"{name}.{part}" if name else part
            folder = folder / part
            if (package := folder / "__init__.py").is_file():
                found.append((name, package))
            elif (single := folder.with_suffix(".py")).is_file() and number == len(inside) - 1:
                found.append((name, single))
            elif not folder.is_dir():
                return []
        return found


Resolve = Callable[[str], "list[tuple[str, Path]] | None"]
"""The files that importing a module runs: empty for a module that is not followed, None for a stranger's."""


@dataclass
class Traced:
    """The modules that were followed, and the names of those that are a stranger's."""

    modules: dict[str, Path] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)


def traced(entries: Mapping[str, Path], resolve: Resolve) -> Traced:
    """Everything that the modules ``entries`` import, and they themselves, as far as ``resolve`` follows."""
    found, files_seen = Traced(dict(entries)), set(entries.values())
    remaining = list(entries.items())
    while remaining:
        name, path = remaining.pop()
        for imported, certain in _imports(name, path):
            files = resolve(imported)
            if files is None:
                if certain:
                    found.strangers.add(imported)
                continue
            for module, file in files:
                if module not in found.modules and file not in files_seen:
                    found.modules[module] = file
                    files_seen.add(file)
                    remaining.append((module, file))
    return found


def _imports(name: str, path: Path) -> tuple[tuple[str, bool], ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return _imports_once(name, path, stat.st_mtime_ns, stat.st_size)


@cache
def _imports_once(name: str, path: Path, changed: int, size: int) -> tuple[tuple[str, bool], ...]:
    tree = _parsed(path)
    return tuple(dict.fromkeys(_imported(name, path, tree))) if tree is not None else ()


def _imported(name: str, path: Path, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """(module, certain) of everything that may be imported; a member of a module may be a module, and is uncertain."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module:
                yield module, True
            yield from ((f"{module}.{alias.name}" if module else alias.name, False) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            yield node.value, False
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(argument := node.args[0].value, str):
                yield argument.lstrip("."), True


def fingerprint(path: Path) -> str:
    """SHA-256 of a Python file's syntax tree without docstrings, so that neither a comment nor a line break counts;
    of another file's bytes."""
    try:
        stat = path.stat()
    except OSError:
        return "absent"
    return _fingerprint(path, stat.st_mtime_ns, stat.st_size)


@cache
def _fingerprint(path: Path, changed: int, size: int) -> str:
    tree = _parsed(path) if path.suffix == ".py" else None
    try:
        content = "".join(_written(tree)).encode("utf-8", "surrogatepass") if tree is not None else path.read_bytes()
    except RecursionError:
        content = path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _written(node: ast.AST) -> Iterator[str]:
    """A syntax tree as text that is the same in every release of Python: ``ast.dump`` is not.

    Fields that are empty are left out, for later releases have more of them.
    """
    yield type(node).__name__ + "("
    for name in sorted(node._fields):
        value: Any = getattr(node, name, None)
        constant = name == "value" and isinstance(node, ast.Constant)
        if name in ("type_comment", "kind", "ctx") or value == [] or (value is None and not constant):
            continue
        if name == "body" and isinstance(node, _DOCUMENTED) and _is_documented(node):
            value = value[1:]
        if isinstance(node, ast.JoinedStr):
            value = _joined(value)
        yield f"{name}="
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, ast.AST):
                yield from _written(item)
            else:
                # The type beside the text: 1, 1.0 and True are three things.
                yield f"{type(item).__name__}:{item!r}"
            yield ","
    yield ")"


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """The parts of a formatted string with its text in as few constants as can be: releases divide it differently."""
    joined: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            if joined and isinstance(last := joined[-1], ast.Constant):
                part = ast.Constant(f"{last.value!s}{part.value}")
                joined.pop()
            if not part.value:
                continue
        joined.append(part)
    return joined


def _is_documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def total(hashes: Mapping[str, str]) -> str:
    """One SHA-256 for named hashes, whatever their order."""
    lines = "".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def file_name(module: str, path: Path) -> str:
    """How a module's file is named in evidence, wherever it is installed."""
    inside = module.replace(".", "/")
    return f"{inside}/__init__.py" if path.name == "__init__.py" else f"{inside}{path.suffix}"


def first_resolved(trees: Iterable[Tree], module: str) -> list[tuple[str, Path]]:
    """The files of ``module`` in the first of ``trees`` that has it."""
    return next((files for tree in trees if (files := tree.files(module))), [])
