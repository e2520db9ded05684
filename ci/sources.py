"""Sources: hashes of what was judged and of what judged, found without running any of it.

Evidence that was recorded at another commit counts while these are the same: those of the candidate's own sources, and
those of the judgement that judged it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ropecheck.oracle import contracts
from ropecheck.suites import judgements
from ropecheck.suites.judgements.sanitizer import SANITIZER

from .tracing import Traced, Tree, file_name, fingerprint, first_resolved, total, traced

_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cubin", ".cxx", ".h", ".hh", ".hpp", ".inl", ".ptx")
_TOOLCHAIN = ("torch", "triton", "numpy")
"""What stands in evidence by its version alone, also where it is installed from a folder of sources."""

_JUDGE = ("ropecheck.oracle", "ropecheck.suites", "ropecheck.ci")
_ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


def candidate_sources(entry: Mapping[str, Any]) -> dict[str, Any]:
    """``sha256`` over all, and ``files`` by name: what the candidate of an inventory's ``entry`` is made of.

    That is the file that lists it and the module that defines its function, all that these import but for installed
    packages, the CUDA and C++ sources of the packages among them and beside the candidate's file, and what the
    candidate declares. Python counts by its syntax tree without docstrings, another file by its bytes. A source that
    does not exist is ``absent``.
    """
    found = _candidate(entry)
    files = {file_name(module, path): fingerprint(path) for module, path in found.traced.modules.items()}
    files |= {name: fingerprint(path) for name, path in found.native()}
    files |= {name: fingerprint(Path(path)) for name, path in entry["files"]["sources"].items()}
    return {"sha256": total(files), "files": files}


def candidate_packages(entry: Mapping[str, Any]) -> dict[str, str]:
    """The version of every installed distribution that the candidate's own sources import."""
    owners = _distributions()
    names = {module.partition(".")[0] for module in _candidate(entry).traced.strangers}
    found = {owner for name in names - sys.stdlib_module_names for owner in owners.get(name, ())}
    return {name: importlib.metadata.version(name) for name in sorted(found)}


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


class _Candidate:
    """The trace of one candidate, and the trees that it led to."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        entry, module = Path(files["entry"]), files["module"] or Path(files["entry"]).stem
        self.packages: dict[str, Tree] = {}
        self.folder = None if files["module"] else entry.parent
        self.root = next((p for p in entry.parents if any((p / mark).exists() for mark in _ROOT_MARKS)), entry.parent)
        # The package that the function comes from is the candidate's own, installed or not.
        defining = {name: Path(path) for name, path in files["run"].items() if Path(path) != entry}
        self.own = {name.partition(".")[0] for name in (files["module"], *defining) if name} | {"ropecheck"}
        entries = dict(self.resolve(files["module"]) or ()) if files["module"] else {}
        for name, path in defining.items():
            found = self.resolve(name)
            entries |= dict(found) if found else {name: path} if found is not None else {}
        self.traced: Traced = traced({**entries, module: entry}, self.resolve)

    def resolve(self, module: str) -> list[tuple[str, Path]] | None:
        """The files that importing ``module`` runs; empty where it belongs to the judge, None where to a stranger."""
        if any(module == judge or module.startswith(f"{judge}.") for judge in _JUDGE) or module == "ropecheck":
            return []
        top = module.partition(".")[0]
        if top in _TOOLCHAIN or top in sys.stdlib_module_names:
            return None
        beside = Tree("", self.folder).files(module) if self.folder is not None else []
        if beside:
            return beside
        package = self._package(module)
        if package is None:
            return None
        self.packages[package.prefix] = package
        return package.files(module)

    def _package(self, module: str) -> Tree | None:
        """The tree of an imported package that is the candidate's own, or lies outside what is installed."""
        top, _, rest = module.partition(".")
        located = _located(top)
        if located is None:
            # A file puts its project's folder on the path, or the working directory is on it.
            for base in (self.root, self.root / "src"):
                if (base / top).is_dir():
                    return Tree(top, base / top)
                if (single := base / f"{top}.py").is_file():
                    return Tree(top, base, single)
            return None
        if located.namespace:
            # A namespace has many folders: its packages are told apart.
            second = f"{top}.{rest.partition('.')[0]}" if rest else ""
            inner = _located(second) if second else None
            return self._tree(second, inner, top) if inner is not None and not inner.namespace else None
        return self._tree(top, located, top)

    def _tree(self, name: str, located: _Located, top: str) -> Tree | None:
        installed = _is_installed(located.path) and not _is_built_here(top)
        if located.path.suffix != ".py" or (installed and top not in self.own):
            return None
        return Tree(name, located.path.parent, None if located.path.name == "__init__.py" else located.path)

    def native(self) -> Iterator[tuple[str, Path]]:
        """(name, path) of every source that is no Python, in the packages and beside the candidate's file."""
        for prefix, tree in self.packages.items():
            if tree.single is None:
                inside = prefix.replace(".", "/")
                for path in _native(tree.folder.rglob("*")):
                    yield f"{inside}/{path.relative_to(tree.folder).as_posix()}", path
        if self.folder is not None:
            for path in _native(self.folder.iterdir()):
                yield path.name, path


def _native(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in sorted(paths) if path.suffix in _NATIVE and path.is_file())


@dataclass(frozen=True)
class _Located:
    """Where a module would be imported from; of a namespace, which has no file, that it is one."""

    path: Path
    namespace: bool


@cache
def _located(module: str) -> _Located | None:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    if found is None:
        return None
    if found.origin is None and found.submodule_search_locations is not None:
        return _Located(Path(next(iter(found.submodule_search_locations), ".")), True)
    return _Located(Path(found.origin), False) if found.has_location and found.origin else None


def _is_installed(path: Path) -> bool:
    """Whether a module is of the standard library or of an installed distribution, and not of a folder of sources."""
    inside = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    folders = path.resolve().parents
    named = any(folder.name in ("site-packages", "dist-packages") for folder in folders)
    return named or not inside.isdisjoint(folders)


def _is_built_here(top: str) -> bool:
    """Whether a package was installed from a folder, an archive or a repository: its version says little then."""
    owners = _distributions().get(top, ())
    return any(importlib.metadata.distribution(owner).read_text("direct_url.json") for owner in owners)


def _candidate(entry: Mapping[str, Any]) -> _Candidate:
    return _Candidate(entry["files"])


_FRAME = ("judging", "plugin", "test_questions", "inventory")
"""The modules of the suites that every judgement runs in."""

_REGISTRIES = ("ropecheck.suites.judgements", "ropecheck.oracle.contracts")
# The dictionary's diagnosis is text beside a verdict, and adapters are what is judged.
_NO_JUDGES = ("ropecheck.suites.faults", "ropecheck.suites.adapters", "ropecheck.kernels", "ropecheck.ci")


def judging_hash(judgement: str, contract: str) -> str:
    """SHA-256 of the code that answers ``judgement`` about ``contract``: its import closure and the contract's.

    What only lists judgements and contracts does not count, and neither does another contract's module: a new one
    leaves the hashes of all others. Read once for each process, which has its own code loaded. Raises KeyError for a
    judgement or a contract that there is not.
    """
    return total({**_frame(), **_asking(judgement), **_described(contract)})


@cache
def _frame() -> dict[str, str]:
    folder = _tree("ropecheck.suites").folder
    return _hashes({f"ropecheck.suites.{name}": folder / f"{name}.py" for name in _FRAME}, ())


@cache
def _asking(judgement: str) -> dict[str, str]:
    if judgement != SANITIZER:
        entries = dict(_listed(judgements, judgements.JUDGEMENTS[judgement]))
        return _hashes(entries, ("ropecheck.suites.judgements",))
    suites, ci = _tree("ropecheck.suites"), _tree("ropecheck.ci")
    entries = dict(suites.files(name)[-1] for name in ("ropecheck.suites.judgements.sanitizer",
                                                       "ropecheck.suites.sanitized"))  # fmt: skip
    fixed = dict(ci.files(name)[-1] for name in ("ropecheck.ci.sanitize", "ropecheck.ci.sanitizer_output"))
    own = {file_name(module, path): fingerprint(path) for module, path in fixed.items()}
    return own | _hashes(entries, ("ropecheck.suites.judgements",))


@cache
def _described(contract: str) -> dict[str, str]:
    return _hashes(dict(_listed(contracts, contracts.CONTRACTS[contract])), ("ropecheck.oracle.contracts",))


def _hashes(entries: Mapping[str, Path], within: Sequence[str]) -> dict[str, str]:
    """The fingerprint of every file of the judge that ``entries`` are made of."""
    modules = traced(entries, _of_the_judge(within)).modules
    return {file_name(module, path): fingerprint(path) for module, path in modules.items()}


def sensitivity_hash() -> str:
    """SHA-256 of all that a measurement of sensitivity depends on: every module of the suites and of the oracle."""
    found: dict[str, str] = {}
    for package in ("ropecheck.oracle", "ropecheck.suites"):
        folder = _tree(package).folder
        found |= {f"{package}/{p.relative_to(folder).as_posix()}": fingerprint(p) for p in folder.rglob("*.py")}
    return total(found)


def _tree(package: str) -> Tree:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return Tree(package, Path(next(iter(found.submodule_search_locations))))


def _of_the_judge(within: Sequence[str]) -> Callable[[str], list[tuple[str, Path]] | None]:
    """Follows the oracle and the suites, and of the folders that registries list only those ``within``."""
    trees = [_tree(package) for package in ("ropecheck.oracle", "ropecheck.suites")]

    def resolve(module: str) -> list[tuple[str, Path]] | None:
        if any(module == name or module.startswith(f"{name}.") for name in _NO_JUDGES):
            return []
        files = first_resolved(trees, module)
        closed = [name for name in _REGISTRIES if name not in within]
        return [
            (name, path)
            for name, path in files
            if name not in _REGISTRIES and not any(name.startswith(f"{registry}.") for registry in closed)
        ]

    return resolve


def _listed(registry: ModuleType, value: Any) -> Iterator[tuple[str, Path]]:
    """(name, path) of the module that a registry imports ``value`` from, alone or in a tuple of several."""
    tree = _tree(registry.__name__.rpartition(".")[0])
    listing = tree.files(registry.__name__)[-1][1]
    for node in ast.parse(listing.read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                given = getattr(registry, alias.asname or alias.name, None)
                if given is value or (isinstance(given, tuple) and any(one is value for one in given)):
                    yield tree.files(f"{registry.__name__}.{node.module}")[-1]
                    return
    raise KeyError(f"{registry.__name__} does not import it from a module of its own")
