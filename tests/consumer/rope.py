"""A rotary embedding over half-split pairs, and what ropecheck is told of it."""

from torch import Tensor, cat

from ropecheck.suites import Candidate


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


CANDIDATES = [Candidate(name="consumer/rope", contract="neox", run=rotate, devices=("cpu",), dtypes=("float32",))]
