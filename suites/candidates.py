"""Candidates: an implementation under judgement, what it claims, and how one is loaded from a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ropecheck.oracle.contracts import contract

from .families import FAMILIES
from .surroundings import Surroundings

CLAIMS = {
    "vjp": "a backward: the gradient with respect to x",
    "strict": "the contract's own order without contraction, byte for byte",
    "strided": "inputs and tables that are views with any strides and storage offsets",
    "any-shape": "sizes that the contract's model has not: partial rotary, no power of two, empty batch or sequence",
    "any-dtype": "a cache of 16 bits, and fp32 weights beside 16-bit activations, where the family has them",
    "any-position": "NaN for a token whose position is outside the cache, where the family has positions",
    "no-copy": "no hidden materialisation of an input",
    "conjugate": "the keyword conjugate",
    "refusals": "an error that names the argument for each bad input",
    "higher-vjp": "derivatives of the second and third order",
    "opcheck": "operators registered with torch.library, whose schema, fake and autograd hold",
    "compile": "torch.compile in one graph, forward and backward",
    "export": "torch.export, and running what was exported",
    "autocast": "calls under autocast, with the bytes of a call outside it",
    "graph": "capture in a CUDA graph, and replay with other data",
    "multi-device": "tensors on another GPU than the current one",
}
"""What a candidate may claim with ``provides``. Each claim is judged; what is not claimed is not applicable."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEVICES = ("cpu", "cuda")


class CandidateError(ValueError):
    """A candidate, or the file that should define one, cannot be used. The message is one sentence."""


@dataclass(frozen=True)
class Candidate:
    """An implementation under judgement.

    ``run`` is called as ``family`` says: ``run(x, cos, sin) -> y`` for ``rotate``, ``run(q, k, cos, sin) -> (q, k)``
    for ``rotate_pair``, with ``conjugate=True`` added only where ``conjugate`` is claimed, and for ``rotate_qk``
    ``run(q, k, cos_sin_cache, positions) -> (q, k)``; :class:`~ropecheck.suites.families.NormRotateGate` says what
    ``norm_rotate_gate`` is called with. With ``in_place`` it writes into its inputs and may return None.
    ``vjp(gradient, cos, sin) -> x's gradient`` (of q and k: ``vjp(q_gradient, k_gradient, ..)``, a pair) replaces
    autograd where the backward is separate.
    ``configs`` maps names to context manager factories that force one launch configuration alone. ``kernels``
    names the device kernels that must be seen to run; ``trace`` opens a recorder of launches whose ``backend``
    must equal ``backend``. ``sources`` are hashed into the evidence, relative to the candidate's file, and so are
    ``binaries``, shared libraries that the process of a call must have loaded and whose machine code is judged.
    ``unavailable`` says why the candidate cannot run on this machine; its cells are then blocked. ``origin`` is how
    the candidate was loaded, set by :func:`load_candidates`.

    Raises :class:`CandidateError` for a value that cannot be used.
    """

    name: str
    contract: str
    run: Callable[..., Any]
    devices: Sequence[str] = ("cuda",)
    dtypes: Sequence[str] = tuple(DTYPES)
    provides: Sequence[str] = ()
    sources: Sequence[str] = ()
    family: str = "rotate"
    in_place: bool = False
    vjp: Callable[..., Any] | None = None
    level: str = "L1"
    configs: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    kernels: Sequence[str] = ()
    binaries: Sequence[str] = ()
    backend: str | None = None
    trace: Callable[[], AbstractContextManager[Sequence[Any]]] | None = None
    unavailable: str = ""
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.+/-]+", self.name, re.ASCII):
            raise CandidateError(f"name must be made of letters, digits and . _ + - / only, not {self.name!r}")
        if not callable(self.run):
            raise CandidateError(f"candidate {self.name}: run must be callable, not {type(self.run).__name__}")
        if self.vjp is not None and not callable(self.vjp):
            raise CandidateError(f"candidate {self.name}: vjp must be callable, not {type(self.vjp).__name__}")
        if self.family not in FAMILIES:
            raise CandidateError(
                f"candidate {self.name}: family must be one of {', '.join(FAMILIES)}, not {self.family!r}"
            )
        if self.level != "L1":
            raise CandidateError(
                f"candidate {self.name}: level must be 'L1' for family {self.family}, not {self.level!r}"
            )
        try:
            own = contract(self.contract)
        except ValueError as unknown:
            raise CandidateError(f"candidate {self.name}: {unknown}") from None
        if not FAMILIES[self.family].takes(own):
            fitting = ", ".join(name for name, family in FAMILIES.items() if family.takes(own))
            raise CandidateError(
                f"candidate {self.name}: family must be one of {fitting} for contract {self.contract}, "
                f"not {self.family!r}"
            )
        for argument in ("devices", "dtypes", "provides", "sources", "kernels", "binaries"):
            given = getattr(self, argument)
            # A generator would be used up by the first who asks.
            if not isinstance(given, (tuple, list)) or not all(isinstance(v, str) for v in given):
                raise CandidateError(f"candidate {self.name}: {argument} must be a tuple of strings, not {given!r}")
            if len(set(given)) < len(given):
                raise CandidateError(f"candidate {self.name}: {argument} holds a value twice: {', '.join(given)}")
        for argument, known in (("devices", DEVICES), ("dtypes", tuple(DTYPES)), ("provides", tuple(CLAIMS))):
            given = getattr(self, argument)
            for value in given:
                if value not in known:
                    raise CandidateError(
                        f"candidate {self.name}: {argument} holds {value!r}, which is none of {', '.join(known)}"
                    )
            if not given and argument != "provides":
                raise CandidateError(f"candidate {self.name}: {argument} must not be empty")
        family = FAMILIES[self.family]
        for argument, room in (("vjp", family.separate), ("in_place", family.in_place)):
            if getattr(self, argument) and not room:
                raise CandidateError(f"candidate {self.name}: {argument} is not for family {self.family}")
        for claim, reason in family.unclaimable.items():
            if claim in self.provides:
                raise CandidateError(
                    f"candidate {self.name}: provides must not hold {claim!r} for family {self.family}: {reason}"
                )
        for argument, kind in (("in_place", bool), ("unavailable", str), ("configs", Mapping)):
            if not isinstance(getattr(self, argument), kind):
                raise CandidateError(
                    f"candidate {self.name}: {argument} must be a {kind.__name__}, not {getattr(self, argument)!r}"
                )
        if self.in_place and "vjp" in self.provides and self.vjp is None:
            raise CandidateError(f"candidate {self.name}: an in_place candidate that claims vjp must give vjp")
        if (self.trace is None) != (self.backend is None):
            raise CandidateError(f"candidate {self.name}: trace and backend go together")

    @property
    def module(self) -> ModuleType | None:
        """The module that defines ``run``, where it can be told."""
        return sys.modules.get(getattr(self.run, "__module__", "") or "")


def load_candidates(specification: str) -> list[Candidate]:
    """The candidates of ``FILE.py`` or of ``package.module:attribute``.

    A file defines ``CANDIDATES``, a list. The attribute may be a list or one candidate. Raises
    :class:`CandidateError`, with one sentence and no traceback, where the file does not exist, does not import,
    defines nothing, or defines something else.
    """
    if specification.endswith(".py") or "/" in specification:
        source, found = specification, _attribute(_import_file(Path(specification)), "CANDIDATES", specification)
        origin = str(Path(specification).resolve())
    elif ":" in specification:
        module, _, attribute = specification.partition(":")
        source, found = specification, _attribute(_import_module(module), attribute, specification)
        origin = specification
    else:
        raise CandidateError(f"candidate must be FILE.py or package.module:attribute, not {specification!r}")
    found = [found] if isinstance(found, Candidate) else found
    if not isinstance(found, (list, tuple)) or not all(isinstance(c, Candidate) for c in found):
        raise CandidateError(f"{source} must define a list of ropecheck.suites.Candidate, not {found!r:.80}")
    if not found:
        raise CandidateError(f"{source} defines no candidate")
    names = [c.name for c in found]
    for name in names:
        if names.count(name) > 1:
            raise CandidateError(f"{source} defines two candidates named {name!r}")
    return [replace(candidate, origin=origin) for candidate in found]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CandidateError(f"candidate file {path} does not exist")
    path = path.resolve()
    name = f"ropecheck_candidate_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise CandidateError(f"candidate file {path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    # A candidate imports its neighbours, as a script run from its own folder does.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    before = Surroundings.now()
    try:
        specification.loader.exec_module(module)
    except CandidateError as error:
        del sys.modules[name]
        raise CandidateError(f"candidate file {path.name}: {error}") from None
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CandidateError(f"candidate file {path.name} does not import: {described(error)}") from None
    finally:
        # Libraries switch defaults as they load; the judge computes with its own.
        before.restore()
    return module


def _import_module(name: str) -> ModuleType:
    before = Surroundings.now()
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            # As ``python -m`` would find it, but behind everything that is installed.
            sys.path.append(os.getcwd())
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CandidateError(f"candidate module {name} does not import: {described(error)}") from None
    finally:
        before.restore()


def _attribute(module: ModuleType, attribute: str, specification: str) -> Any:
    if not hasattr(module, attribute):
        raise CandidateError(f"{specification} does not define {attribute}")
    return getattr(module, attribute)


def described(error: BaseException) -> str:
    """``Type: message (file.py:line)`` on one line, the place being the innermost one."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith("<frozen"):
            place = f" ({Path(code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({Path(error.filename).name}:{error.lineno})"
    try:
        message = " ".join(str(error).split())
    except BaseException:
        message = "its message cannot be shown"
    return printable(f"{type(error).__name__}{': ' + message[:300] if message else ''}{place}")


def printable(text: str) -> str:
    """``text`` with everything escaped that a terminal or a UTF-8 file would not take as plain text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
