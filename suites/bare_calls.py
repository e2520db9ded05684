"""A candidate's call with nothing of the judge's around it: for capture in a graph, and for timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .candidates import Candidate
from .families import Family
from .invocation import as_function, put_together

Outputs = tuple[Tensor, ...]
BareCall = Callable[..., Outputs]


def bare_call(candidate: Candidate, family: Family, *, backward: bool) -> BareCall:
    """``call(x, *tables, gradient) -> (y,)``, or ``(y, x's gradient)`` where ``backward`` is asked for.

    The backward is the candidate's own ``vjp``, or autograd's. Nothing is checked, waited for or put back.
    """
    function = _whole(candidate, family)

    def forward(x: Tensor, *tables_and_gradient: Tensor) -> Outputs:
        with torch.no_grad():
            return (function(x, *tables_and_gradient[:-1]),)

    def with_autograd(x: Tensor, *tables_and_gradient: Tensor) -> Outputs:
        *tables, gradient = tables_and_gradient
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = function(leaf, *tables)
        return y.detach(), *torch.autograd.grad(y, leaf, gradient)

    if not backward:
        return forward
    if candidate.vjp is None:
        return with_autograd
    back = _whole(replace(candidate, run=candidate.vjp), family)

    def with_its_own(x: Tensor, *tables_and_gradient: Tensor) -> Outputs:
        *tables, gradient = tables_and_gradient
        with torch.no_grad():
            return function(x, *tables), back(gradient, *tables)

    return with_its_own


def _whole(candidate: Candidate, family: Family) -> Callable[..., Tensor]:
    """``function(x, *tables) -> y``, all of whose operations around the candidate move values."""
    function = as_function(candidate, family)

    def whole(x: Tensor, *tables: Tensor) -> Tensor:
        y: Tensor = put_together(family, function(x, *tables))
        return y

    return whole
