"""Vendor pins: which upstream source a contract was read from, and whether the installed one still agrees.

A pin is a package, its releases, and for every symbol the sha256 of its source text and of its syntax tree, with
the sha256 of table bytes and the vector instructions that made them. Pins name releases and source hashes and no
repository revision: the diffusers revision 40f63690, which Qwen-Image ports like to quote, cannot be resolved
publicly. The data, ``pins.json``, was taken from the wheels of the releases that it lists.

:func:`check_pins` also executes the installed symbols and compares them with the contract byte for byte. Bytes
decide: source text that nobody has seen before with equal bytes is drift, which is reported and passes; unequal
bytes fail whatever the text says; a package that is not installed is never a pass.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .contract import Contract
from .pin_cases import CASES, PinCase, describe_difference, interleaved_table
from .pin_cases_qwen35 import qwen35_cases

_CASES = {**CASES, "qwen3.5-norm-rope-gate": qwen35_cases}

SymbolState = Literal["known", "drift", "unequal", "missing"]
TableState = Literal["known", "drift", "unrecorded"]


@dataclass(frozen=True)
class SourceText:
    """One text of a symbol and the releases that carry it."""

    source_sha256: str
    syntax_sha256: str
    releases: tuple[str, ...]


@dataclass(frozen=True)
class TablePin:
    """sha256 of the contract's table of positions ``first`` to ``last``, the same on every axis, by the name that
    ``torch.backends.cpu.get_cpu_capability()`` gives the vector instructions; ``torch`` is the version that made it.
    """

    first: int
    last: int
    torch: str
    sha256: Mapping[str, str]


@dataclass(frozen=True)
class Pin:
    """What is recorded of one contract. ``symbols`` maps ``module:qualified.name`` to its known texts."""

    contract: str
    package: str
    symbols: Mapping[str, tuple[SourceText, ...]]
    tables: tuple[TablePin, ...]

    @property
    def releases(self) -> tuple[str, ...]:
        """Every release that some text is recorded for, oldest first."""
        named = {r for texts in self.symbols.values() for text in texts for r in text.releases}
        return tuple(sorted(named, key=_order))

    def expected_symbols(self, release: str) -> tuple[tuple[str, ...], ...]:
        """The sets of symbols that ``release`` may have: those of the recorded releases before and after it.

        One set for a recorded release. Between two, a symbol may have been renamed already or not yet.
        """
        until = [r for r in self.releases if _order(r) <= _order(release)]
        after = [r for r in self.releases if _order(r) > _order(release)]
        near = until[-1:] if release in self.releases else [*until[-1:], *after[:1]]
        sets = (tuple(n for n, texts in self.symbols.items() if any(r in t.releases for t in texts)) for r in near)
        return tuple(dict.fromkeys(sets))


@dataclass(frozen=True)
class SymbolReport:
    """One installed symbol. ``releases`` are those known to carry its text; ``same_syntax`` says, of an unknown
    text, that only comments, docstrings, layout or signature annotations differ from a known one. ``reason`` says
    why a symbol is missing."""

    name: str
    state: SymbolState
    source_sha256: str | None
    syntax_sha256: str | None
    releases: tuple[str, ...]
    same_syntax: bool
    reason: str | None = None


@dataclass(frozen=True)
class PinReport:
    """The outcome of :func:`check_pins`.

    ``release`` is None where the package is not installed. ``tables`` compares this machine's table bytes with the
    recorded ones: ``unrecorded`` where nobody has recorded these vector instructions, ``drift`` where the bytes
    are others though vendor and contract agree on them. ``within`` of the ``cases`` are held against an interval.
    """

    contract: str
    package: str
    release: str | None
    symbols: tuple[SymbolReport, ...]
    tables: TableState
    cases: int
    within: int
    first_unequal: str | None
    state: Literal["known", "drift", "unequal", "missing", "not-installed"]

    @property
    def passed(self) -> bool:
        """Known text or drift, with equal bytes. A package that is not installed is not a pass."""
        return self.state in ("known", "drift")


def pinned() -> tuple[str, ...]:
    """The names of the contracts that have a pin, sorted. A convention, which no vendor function defines, has none."""
    return tuple(sorted(_recorded()))


def pin(contract: str) -> Pin:
    """The pin of the contract of that name. Raises ValueError where it has none (:func:`pinned`)."""
    if contract not in pinned():
        raise ValueError(f"contract {contract!r} has no vendor pin; pinned are {', '.join(pinned())}")
    data = _recorded()[contract]
    symbols = {
        name: tuple(SourceText(t["source_sha256"], t["syntax_sha256"], tuple(t["releases"])) for t in texts)
        for name, texts in data["symbols"].items()
    }
    tables = tuple(TablePin(t["first"], t["last"], t["torch"], t["sha256"]) for t in data["tables"])
    return Pin(contract, data["package"], symbols, tables)


def check_pins(contract: Contract) -> PinReport:
    """Compare the installed vendor symbols of ``contract`` with its pin, by text and by execution.

    Nothing is downloaded; the vendor's log messages and warnings are kept back. Raises ValueError where
    the contract has no pin (:func:`pinned`).
    """
    recorded = pin(contract.name)
    tables = _table_state(contract, recorded)
    try:
        release = metadata.version(recorded.package)
    except metadata.PackageNotFoundError:
        return PinReport(contract.name, recorded.package, None, (), tables, 0, 0, None, "not-installed")
    with _quiet(), _one_thread():
        found = _found(recorded.expected_symbols(release))
        symbols = {name: _text_report(name, symbol, recorded.symbols[name]) for name, symbol in found.items()}
        by_name = {n.partition(":")[2]: s for n, s in found.items() if not isinstance(s, _Missing)}
        cases, within, first_unequal = 0, 0, None
        for case in _CASES[contract.name](contract, by_name):
            cases, within = cases + 1, within + case.within
            difference = _run(case)
            if difference is None:
                continue
            first_unequal = first_unequal or f"{case.name}: {difference}"
            for name, report in symbols.items():
                owner = name.partition(":")[2].partition(".")[0]
                if owner in case.symbols and report.state != "missing":
                    symbols[name] = replace(report, state="unequal")
    states = {report.state for report in symbols.values()} | ({"drift"} if tables == "drift" else set())
    worst = next(s for s in ("unequal", "missing", "drift", "known") if s in states or s == "known")
    return PinReport(
        contract.name, recorded.package, release, tuple(symbols.values()), tables, cases, within,
        first_unequal, worst,
    )  # fmt: skip


def source_sha256(text: str) -> str:
    """sha256 of a symbol's text as ``inspect.getsource`` gives it: with decorators and the last newline."""
    return hashlib.sha256(text.encode()).hexdigest()


def syntax_sha256(text: str) -> str:
    """sha256 of the syntax tree of a function or class, without docstrings and signature annotations.

    The tree is written as Python 3.11's ``ast.dump(node, annotate_fields=False)`` writes it, on every Python.
    """
    node = ast.parse(textwrap.dedent(text)).body[0]
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(inner, clean=False) is not None:
                inner.body = inner.body[1:]
            if not isinstance(inner, ast.ClassDef):
                inner.returns = None
        elif isinstance(inner, ast.arg):
            inner.annotation = None
    return hashlib.sha256(_dump(node).encode()).hexdigest()


def table_sha256(contract: Contract, first: int, last: int) -> str:
    """sha256 of the fp32 table of positions ``first`` to ``last`` on every axis: cosine then sine of each lane."""
    positions = torch.arange(first, last + 1)[:, None].expand(-1, len(contract.lanes.dims))
    return bytes_sha256(interleaved_table(contract, positions))


def bytes_sha256(values: Tensor) -> str:
    """sha256 of the bytes of ``values``, in row-major order."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@cache
def _recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((Path(__file__).parent / "pins.json").read_text())
    return data


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


@dataclass(frozen=True)
class _Missing:
    """Stands for a symbol that could not be had."""

    reason: str


def _found(alternatives: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
    """The symbols of the first set that is there in full, else of the first set with what is missing."""
    resolved = [{name: _resolve(name) for name in names} for names in alternatives]
    return next((f for f in resolved if not any(isinstance(s, _Missing) for s in f.values())), resolved[0])


def _resolve(name: str) -> Any:
    module, _, qualified = name.partition(":")
    try:
        symbol: Any = import_module(module)
        for part in qualified.split("."):
            symbol = getattr(symbol, part)
    except Exception as error:  # an installed package may fail to import in any way
        return _Missing(f"{type(error).__name__}: {error}".partition("\n")[0])
    return symbol


def _text_report(name: str, symbol: Any, known: tuple[SourceText, ...]) -> SymbolReport:
    if isinstance(symbol, _Missing):
        return SymbolReport(name, "missing", None, None, (), same_syntax=False, reason=symbol.reason)
    try:
        text = inspect.getsource(symbol)
    except (OSError, TypeError):
        return SymbolReport(name, "drift", None, None, (), same_syntax=False)
    source, syntax = source_sha256(text), syntax_sha256(text)
    releases = tuple(r for t in known if t.source_sha256 == source for r in t.releases)
    same_syntax = any(t.syntax_sha256 == syntax for t in known)
    return SymbolReport(name, "known" if releases else "drift", source, syntax, releases, same_syntax)


def _run(case: PinCase) -> str | None:
    """What differs first, or None."""
    try:
        for label, vendor, ours in case.pairs():
            difference = describe_difference(vendor, ours)
            if difference is not None:
                return f"{label}: {difference}"
    except Exception as error:  # a vendor symbol may fail in any way, and that is the finding
        return f"raised {type(error).__name__}: {error}"
    return None


def _table_state(contract: Contract, recorded: Pin) -> TableState:
    instructions = torch.backends.cpu.get_cpu_capability()
    if any(instructions not in table.sha256 for table in recorded.tables):
        return "unrecorded"
    equal = all(table_sha256(contract, t.first, t.last) == t.sha256[instructions] for t in recorded.tables)
    return "known" if equal else "drift"


def _dump(node: Any) -> str:
    """``ast.dump(node, annotate_fields=False)`` of Python 3.11: later ones add and omit fields."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    written, named = [], False
    for field in node._fields:
        if field == "type_params":
            continue
        value = getattr(node, field, None)
        if value is None and getattr(type(node), field, ...) is None:
            named = True  # an omitted optional field: those after it carry their names
            continue
        written.append(f"{field}={_dump(value)}" if named else _dump(value))
    return f"{type(node).__name__}({', '.join(written)})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back warnings and log messages without redirecting streams, which vendors' log handlers would keep."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The cases are small: on a busy machine threads that wait for one another make them ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
