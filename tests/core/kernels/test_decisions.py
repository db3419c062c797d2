# SPDX-License-Identifier: Apache-2.0
"""Decisions by data have an answer for tensors without data, and for others the data's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.core.kernels.decisions import assume_least, decide, device_for, holds, on_host

META = torch.ones(2, 3, dtype=torch.int64, device="meta")


def decision(x: Tensor) -> str:
    return decide(x, lambda: f"{int(x.sum())}", most="most", least="least")


def test_data_decide_and_without_them_most_is_sent() -> None:
    assert decision(torch.ones(3)) == "3"
    assert decision(META) == "most"


def test_the_least_is_assumed_within_its_block_alone_even_if_that_fails() -> None:
    with pytest.raises(ValueError, match="inside"), assume_least():
        assert decision(META) == "least"
        assert decision(torch.ones(3)) == "3"
        raise ValueError("inside")
    assert decision(META) == "most"


def test_what_is_read_on_the_host_has_the_shape_and_the_dtype() -> None:
    assert torch.equal(on_host(META), torch.zeros(2, 3, dtype=torch.int64))
    assert on_host(torch.tensor([1.5])).tolist() == [1.5]


def test_a_condition_without_data_holds() -> None:
    assert holds(META.bool().all())
    assert not holds(torch.tensor(False))


def test_a_copy_of_a_meta_tensor_stays_where_it_is() -> None:
    assert device_for(META, "cpu").type == "meta"
    assert device_for(torch.ones(1), None).type == device_for(torch.ones(1), "cpu").type == "cpu"
