"""Views: the strides that each promises, values unchanged, and guard bands that notice a write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ropecheck.suites.views import STRIDED_TABLE_VIEWS, STRIDED_X_VIEWS, TABLE_VIEWS, X_VIEWS, Placed, behind_a_gap

B, S, H, D, L = 2, 7, 3, 8, 4

X_STRIDES = {
    "contiguous": (S * H * D, H * D, D, 1),
    "packed-qkv": (3 * S * H * D, 3 * H * D, D, 1),
    "heads-first": (S * H * D, D, S * D, 1),
    "sequence-first": (H * D, B * H * D, D, 1),
    "heads-outermost": (S * D, D, B * S * D, 1),
    "heads-stride-2": (2 * S * H * D, 2 * H * D, 2 * D, 1),
    "heads-stride-0": (S * D, D, 0, 1),
    "channels-stride-2": (2 * S * H * D, 2 * H * D, 2 * D, 2),
    "heads-and-channels-stride-2": (4 * S * H * D, 4 * H * D, 4 * D, 2),
    "channels-stride-0": (S * H, H, 1, 0),
    "channels-outermost": (S * H, H, 1, B * S * H),
    "batch-stride-0": (0, H * D, D, 1),
    "all-stride-0": (0, 0, 0, 0),
    "wider-heads": (2 * 3 * S * H * D, 3 * H * D, 3 * D, 1),
    "misaligned": (S * H * D, H * D, D, 1),
    "packed-qkv-misaligned": (3 * S * H * D, 3 * H * D, D, 1),
}
TABLE_STRIDES = {
    "contiguous": (S * L, L, 1),
    "end-of-allocation": (S * L, L, 1),
    "misaligned": (S * L, L, 1),
    "sliced-rows": (2 * S * L, 2 * L, 1),
    "lanes-stride-2": (2 * S * L, 2 * L, 2),
    "transposed": (S * L, 1, S),
    "batch-stride-0": (0, L, 1),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def repeated(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``values`` as a view with a stride of 0 shows them: the first element of that dimension again and again."""
    for d, stride in enumerate(strides):
        if stride == 0:
            values = values.narrow(d, 0, 1).expand(*values.shape[:d], values.shape[d], *values.shape[d + 1 :])
    return values


def check(placed: Placed, values: Tensor, strides: tuple[int, ...]) -> None:
    assert placed.view.stride() == strides
    assert torch.equal(placed.view, repeated(values, strides))
    assert placed.changed_bytes() == 0


@DTYPES
@pytest.mark.parametrize("name", X_VIEWS)
def test_x_has_the_strides_that_its_view_promises(name: str, dtype: torch.dtype) -> None:
    """Shape and values are those given, the strides those of the view."""
    values = torch.randn(B, S, H, D).to(dtype)
    check(X_VIEWS[name](values), values, X_STRIDES[name])


@DTYPES
@pytest.mark.parametrize("name", TABLE_VIEWS)
def test_tables_have_the_strides_that_their_view_promises(name: str, dtype: torch.dtype) -> None:
    """For tables of each sample, and without the first stride for a shared one."""
    for values, strides in (
        (torch.randn(B, S, L).to(dtype), TABLE_STRIDES[name]),
        (torch.randn(S, L).to(dtype), TABLE_STRIDES[name][1:]),
    ):
        check(TABLE_VIEWS[name](values), values, strides)


def test_tables_of_strides_name_every_view() -> None:
    """Each view is stated here, and all but the plain ones need the claim strided."""
    assert list(X_STRIDES) == list(X_VIEWS)
    assert list(TABLE_STRIDES) == list(TABLE_VIEWS)
    assert set(X_VIEWS) - set(STRIDED_X_VIEWS) == {"contiguous"}
    assert set(TABLE_VIEWS) - set(STRIDED_TABLE_VIEWS) == {"contiguous", "end-of-allocation"}


@pytest.mark.parametrize("name", ["misaligned", "packed-qkv-misaligned"])
def test_misaligned_views_start_off_every_vector_boundary(name: str) -> None:
    """The first element lies on an odd number of elements from the start of the storage."""
    assert X_VIEWS[name](torch.randn(B, S, H, D)).view.storage_offset() % 2 == 1
    assert TABLE_VIEWS["misaligned"](torch.randn(S, L)).view.storage_offset() % 2 == 1


def test_the_last_table_element_is_the_last_of_its_allocation() -> None:
    """Behind a table at the end of its allocation there is nothing to read."""
    view = TABLE_VIEWS["end-of-allocation"](torch.randn(S, L)).view
    assert (view.storage_offset() + view.numel()) * view.element_size() == view.untyped_storage().nbytes()


@pytest.mark.parametrize("name", X_VIEWS)
def test_guard_bands_notice_a_write(name: str) -> None:
    """A single element written in front of the view, behind it, or in one of its gaps, shows; so does one inside."""
    values = torch.randn(B, S, H, D).bfloat16()
    reached = storage_elements(X_VIEWS[name](values))
    outside = (~reached).nonzero().flatten().tolist()
    gaps = [e for e in outside if reached[:e].any() and reached[e:].any()]
    inside = int(reached.nonzero()[0])
    assert outside[0] == 0
    assert outside[-1] == len(reached) - 1
    for element in {outside[0], inside - 1, int(reached.nonzero()[-1]) + 1, outside[-1], inside, *gaps[:1]}:
        placed = X_VIEWS[name](values)
        placed.storage.view(torch.int16)[element] ^= 1
        assert placed.changed_bytes() == 1


def storage_elements(placed: Placed) -> Tensor:
    """bool [elements of the storage]: those that the view reaches."""
    marks = torch.zeros(placed.storage.numel() // 2, dtype=torch.bool)
    view = placed.view
    marks.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return marks


@pytest.mark.parametrize("name", X_VIEWS)
@pytest.mark.parametrize("shape", [(0, S, H, D), (B, 0, H, D), (1, 1, 1, 2)], ids=str)
def test_degenerate_shapes(name: str, shape: tuple[int, ...]) -> None:
    """Empty and smallest tensors can be placed in every view."""
    placed = X_VIEWS[name](torch.ones(shape))
    assert placed.view.shape == shape
    assert placed.changed_bytes() == 0


def test_behind_a_gap_q_and_k_are_views_of_one_projection() -> None:
    """Equal strides and one storage; what lies between is neither's, and changes of it are seen in both."""
    x = torch.randn(B, S, 5, D, dtype=torch.bfloat16)
    q, k = behind_a_gap(x[:, :, :3], x[:, :, 3:])
    assert torch.equal(torch.cat((q.view, k.view), dim=2), x)
    assert q.view.stride() == k.view.stride()
    assert k.view.data_ptr() - q.view.data_ptr() == 4 * D * x.element_size()
    q.view.as_strided((1,), (1,), q.view.storage_offset() + 3 * D).zero_()
    assert q.changed_bytes() == k.changed_bytes() == x.element_size()
