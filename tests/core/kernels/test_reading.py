# SPDX-License-Identifier: Apache-2.0
"""Whether tensors are finite, read in as few calls as possible."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import GPU, pretend_gpu
from thinwire.core.kernels import all_finite_each
from thinwire.core.kernels.reading import finite_flags


def healthy(dtype: torch.dtype) -> list[Tensor]:
    """Small and large tensors, some without elements, some whose sum overflows, some not contiguous."""
    xs = [torch.randn(4, 4), torch.randn(()), torch.randn(30_000), torch.randn(0), torch.full((5,), 6e4)]
    return [x.to(dtype) for x in xs] + [torch.randn(4, 6).to(dtype).t()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_single_element_that_is_not_finite_is_found_in_tensors_of_any_size(dtype: torch.dtype) -> None:
    assert all_finite_each(healthy(dtype))
    for bad, shape in itertools.product((torch.nan, torch.inf, -torch.inf), ((3, 4), (), (5,), (200, 200))):
        x = torch.zeros(shape, dtype=dtype)
        x.view(-1)[-1] = bad
        assert not all_finite_each([*healthy(dtype), x])
        assert not all_finite_each([x])


def test_nothing_and_meta_tensors_are_finite() -> None:
    assert all_finite_each([])
    assert all_finite_each([torch.empty(3, device="meta")])


def test_flags_of_tensors_of_a_gpu_some_without_elements() -> None:
    with pretend_gpu():
        xs = [torch.ones(4, 2), torch.empty(0), torch.tensor(torch.inf), torch.tensor([1.0, torch.nan])]
        assert finite_flags([x.to(GPU) for x in xs]).tolist() == [True, True, False, False]
