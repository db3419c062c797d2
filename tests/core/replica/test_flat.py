# SPDX-License-Identifier: Apache-2.0
"""Many tensors in one flat vector."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.rules import for_each
from thinwire.core.replica.flat import copy_each_, dense_strides, flatten, lay_out, views

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), min_size=1, max_size=6)


def tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in shapes]


@given(SHAPES)
def test_views_of_a_flattened_vector_are_the_tensors(shapes: list[tuple[int, ...]]) -> None:
    xs = tensors(shapes)
    segments = lay_out([(str(i), x) for i, x in enumerate(xs)])
    vector = flatten(xs, segments)
    assert vector.numel() == sum(x.numel() for x in xs)
    assert all(torch.equal(x, y) for x, y in zip(xs, views(vector, segments), strict=True))
    assert [s.name for s in segments] == [str(i) for i in range(len(xs))]
    assert [s.start for s in segments] == [sum(x.numel() for x in xs[:i]) for i in range(len(xs))]


def test_views_share_the_vector_s_memory_also_if_it_is_a_slice() -> None:
    xs = tensors([(2, 3), (4,)])
    segments = lay_out([("a", xs[0]), ("b", xs[1])])
    whole = torch.zeros(30)
    part = whole[7:17]
    copy_each_(views(part, segments), xs)
    assert torch.equal(whole[7:13], xs[0].reshape(-1))
    assert torch.equal(whole[13:17], xs[1])
    assert not whole[:7].any() and not whole[17:].any()


@for_each([torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t()])
def test_a_dense_tensor_keeps_its_strides(x: Tensor) -> None:
    segments = lay_out([("x", x)])
    (view,) = views(flatten([x], segments), segments)
    assert view.stride() == x.stride()
    assert torch.equal(view, x)


def test_a_tensor_with_gaps_or_overlaps_is_laid_out_densely() -> None:
    assert dense_strides(torch.zeros(4, 6)[:, ::2]) == (3, 1)
    expanded = torch.arange(3.0).expand(2, 3)
    segments = lay_out([("x", expanded)])
    (view,) = views(flatten([expanded], segments), segments)
    assert torch.equal(view, expanded)
    assert view.numel() == segments[0].stop == 6
