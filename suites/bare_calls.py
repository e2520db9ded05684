"""A candidate's call with nothing of the judge's around it: for capture in a graph, and for timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .candidates import Candidate
from .invocation import as_function

Outputs = tuple[Tensor, ...]
BareCall = Callable[[Tensor, Tensor, Tensor, Tensor], Outputs]


def bare_call(candidate: Candidate, *, backward: bool, conjugate: bool = False) -> BareCall:
    """``call(x, cos, sin, gradient) -> (y,)``, or ``(y, x's gradient)`` where ``backward`` is asked for.

    The backward is the candidate's own ``vjp``, or autograd's. Nothing is checked, waited for or put back.
    """
    function = as_function(candidate, conjugate=conjugate)

    def forward(x: Tensor, cos: Tensor, sin: Tensor, gradient: Tensor) -> Outputs:
        with torch.no_grad():
            return (function(x, cos, sin),)

    def with_autograd(x: Tensor, cos: Tensor, sin: Tensor, gradient: Tensor) -> Outputs:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = function(leaf, cos, sin)
        return y.detach(), *torch.autograd.grad(y, leaf, gradient)

    if not backward:
        return forward
    if candidate.vjp is None:
        return with_autograd
    back = as_function(replace(candidate, run=candidate.vjp), conjugate=conjugate)

    def with_its_own(x: Tensor, cos: Tensor, sin: Tensor, gradient: Tensor) -> Outputs:
        with torch.no_grad():
            return function(x, cos, sin), back(gradient, cos, sin)

    return with_its_own
