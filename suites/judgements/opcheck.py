"""opcheck: do the registered operators that a call runs keep what they are registered with?

Asked of a candidate that claims ``opcheck``, which must call at least one operator that is registered with torch by
somebody else than torch. Each overload that is seen to run, forward and (with the claim ``vjp``) under autograd, goes
through all of ``torch.library.opcheck`` with the arguments that it was given, once for each shape and order of
strides, requiring a gradient where they did: schema, autograd registration, fake, and ahead-of-time dispatch with
static and with dynamic shapes. Beyond that the fake outputs must have the real ones' shape, dtype, device, strides (of
dimensions longer than one) and storage offset, only arguments that the schema declares may be written or returned, and
on a CPU a candidate for ``cuda`` must have fakes that take fake CUDA tensors. An operator that is registered as a
composition of others (``CompositeImplicitAutograd``) is not seen, for it is replaced by them before any compiler meets
it. What an operator computes is not asked: one that is registered well and computes no rotation satisfies the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ..candidates import Candidate, described
from ..cases import Case, Inputs, Operands, build, cases_of
from ..invocation import derivatives, guarded, outputs, vjp_outputs
from ..operators_seen import OperatorCall, OperatorsSeen
from ..verdicts import Finding, failed, passed
from .judgement import Judgement

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
"""All that ``torch.library.opcheck`` knows; without being asked it leaves out the static dispatch."""

_PLAIN = Inputs(batch=2, length=5)
_STRIDED = Inputs(
    batch=2, length=5, table="per-sample", x_view="packed-qkv", gradient_view="heads-first", table_view="sliced-rows"
)
# Two heads of k, so that the order of its strides shows; q and k lie in unlike orders, where there are both.
_APART = Inputs(batch=2, length=5, heads=6, x_view="heads-first", k_view="packed-qkv")
_SMOKE = ((_STRIDED, "vjp"), (_PLAIN, "forward"))
_MORE = (
    (_APART, "forward"),
    (_APART, "vjp"),
    (_PLAIN, "vjp"),
    (_STRIDED, "forward"),
    (Inputs(batch=2, length=5, conjugate=True), "vjp"),
    (Inputs(batch=2, length=5, x_view="channels-stride-2", gradient_view="all-stride-0"), "vjp"),
    (Inputs(batch=2, length=5, x_view="packed-qkv-misaligned", table_view="transposed"), "forward"),
    (Inputs(batch=2, length=1, table="per-sample"), "vjp"),
    (Inputs(batch=2, length=5, head_dim=80, rotary_dim=48, x_view="heads-first"), "vjp"),
    (Inputs(batch=2, length=0), "forward"),
)


def _variants(candidate: Candidate, device: str, dtype: str, plan: str) -> Iterator[tuple[Inputs, str]]:
    asked: tuple[tuple[Inputs, str], ...] = _SMOKE
    if plan == "full" or (plan == "standard" and device == "cuda"):
        asked += _MORE
    elif plan == "standard" and dtype != "bfloat16":
        # A third of a second of a CPU for each operator: what is registered seldom depends on the dtype.
        asked = ((_STRIDED, "forward"),)
    elif plan == "standard":
        asked += ((_APART, "forward"),)
    for given, variant in asked:
        # What cannot be asked of the candidate is asked in the form that can.
        given = given if candidate.family == "rotate_pair" else replace(given, k_view="")
        plain = replace(given, x_view="contiguous", gradient_view="contiguous", table_view="contiguous", k_view="")
        variant = variant if "vjp" in candidate.provides else "forward"
        yield given if "strided" in candidate.provides else plain, variant


def judge(candidate: Candidate, case: Case, seed: int) -> Finding:
    calls = _seen(candidate, build(case, seed), case)
    facts: dict[str, Any] = {"operators": sorted({call.name for call in calls}), "calls checked": len(calls)}
    if not calls:
        return failed("no registered operator runs, though opcheck is claimed", **facts)
    for call in calls:
        if found := _fault(call, candidate, case.device):
            return failed(f"{call.name}: {found}", **facts)
    return passed(**facts)


def _seen(candidate: Candidate, given: Operands, case: Case) -> list[OperatorCall]:
    with OperatorsSeen() as seen:
        if case.variant == "forward":
            outputs(candidate, given.x.view, given.call)
        elif candidate.vjp is None:
            derivatives(candidate, given.x.view, given.call, given.gradient.view)
        else:
            vjp_outputs(candidate, given.call, given.gradient.view)
    return seen.distinct()


def _fault(call: OperatorCall, candidate: Candidate, device: str) -> str:
    """What is wrong with the operator of ``call``, in words; empty where nothing is."""
    real, found = _executed(call)
    found = found or _difference(real, _faked(call, None))
    if not found and device == "cpu" and "cuda" in candidate.devices:
        found = _difference([value | {"device": "cuda:0"} for value in real], _faked(call, "cuda"))
    if found:
        return found
    arguments, keywords = call.copied_arguments()
    results: dict[str, Any] = guarded(
        f"opcheck of {call.name}",
        lambda: torch.library.opcheck(call.operator, arguments, keywords, test_utils=UTILITIES, raise_exception=False),
    )
    for utility, result in results.items():
        if isinstance(result, (torch.OutOfMemoryError, MemoryError)):
            raise result
        if isinstance(result, BaseException):
            return f"{utility} of torch.library.opcheck: {described(result)}"
    return ""


def _executed(call: OperatorCall) -> tuple[list[dict[str, Any]], str]:
    """(what the outputs of ``call`` are like, which argument it writes or returns without saying so)."""
    arguments, keywords = call.copied_arguments()
    given = dict(_named(call, arguments, keywords))
    before = {name: [_bytes(t).clone() for t in tensors] for name, tensors in given.items()}

    def execute() -> Any:
        with torch.no_grad():
            return call.operator(*arguments, **keywords)

    results = [t for t in tree_leaves(guarded(call.name, execute)) if isinstance(t, Tensor)]
    declared = {argument.name: argument.alias_info for argument in call.operator._schema.arguments}
    found = ""
    for name, tensors in given.items():
        alias = declared[name]
        changed = any(not torch.equal(_bytes(t), old) for t, old in zip(tensors, before[name], strict=True))
        if changed and (alias is None or not alias.is_write):
            found = found or f"argument {name} is written, which the schema does not declare"
        storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        if alias is None and any(t.numel() and t.untyped_storage().data_ptr() in storages for t in results):
            found = found or f"argument {name}'s memory is returned, which the schema does not declare"
    return [_like(t) for t in results], found


def _named(
    call: OperatorCall, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterable[tuple[str, list[Tensor]]]:
    """The tensors of each argument, by its name in the schema."""
    names = [argument.name for argument in call.operator._schema.arguments]
    for name, value in (*zip(names, arguments, strict=False), *keywords.items()):
        yield name, [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _faked(call: OperatorCall, device: str | None) -> list[dict[str, Any]]:
    """What the outputs of ``call`` are like in an explicit fake mode, tensors on ``device`` (None: where they are)."""

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        length = value.untyped_storage().nbytes() // value.element_size()
        storage = torch.empty(length, dtype=value.dtype, device=device or value.device)
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())

    def execute() -> Any:
        with FakeTensorMode(), torch.no_grad():
            arguments, keywords = tree_map(fake, (call.arguments, dict(call.keywords)))
            return call.operator(*arguments, **keywords)

    results = guarded(f"the fake implementation of {call.name} for {device or 'these'} tensors", execute)
    return [_like(t) for t in tree_leaves(results) if isinstance(t, Tensor)]


def _like(tensor: Tensor) -> dict[str, Any]:
    strides = [step if size > 1 else "any" for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "device": str(tensor.device),
        # Nothing is reached by the strides of an empty tensor.
        "strides": strides if tensor.numel() else [],
        "storage offset": tensor.storage_offset(),
    }


def _difference(real: list[dict[str, Any]], fake: list[dict[str, Any]]) -> str:
    if len(real) != len(fake):
        return f"the fake implementation returns {len(fake)} tensors, the operator {len(real)}"
    for number, (one, other) in enumerate(zip(real, fake, strict=True)):
        for what, value in one.items():
            if other[what] != value:
                return f"output {number} has {what} {value}, and the fake implementation says {other[what]}"
    return ""


OPCHECK = Judgement(
    "opcheck",
    "opcheck",
    __doc__,
    lambda candidate, device, dtype, plan: cases_of(
        "opcheck", candidate, device, dtype, _variants(candidate, device, dtype, plan)
    ),
    judge,
)
