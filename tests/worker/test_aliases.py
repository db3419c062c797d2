# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model in the same memory: refused where attach would untie them, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batches, drawn, flat, net, steps
from tests.rules import for_each
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, MismatchError, run_threads
from thinwire.worker.parameters import find_alias

Model = Callable[[], nn.Module]


def tied_by_data() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[2].weight.data = model[0].weight.data
    return model


def tied_by_transposing() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    model[2].weight.data = model[0].weight.data.t()
    return model


def tied_to_a_frozen_one() -> nn.Module:
    model = tied_by_data()
    model[2].weight.requires_grad_(False)
    return model


def tied_in_one_column() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(3, 4)))
    matrix = torch.ones(4, 5)
    model[0].weight.data, model[2].weight.data = matrix[:, :3], matrix[:, 2:]
    return model


@for_each([tied_by_data, tied_by_transposing, tied_to_a_frozen_one, tied_in_one_column])
def test_two_parameters_in_the_same_memory_are_refused_on_all_ranks_before_anything_changes(model: Model) -> None:
    def work(comm: Comm) -> None:
        made = model()
        before = [(x.data_ptr(), x.clone()) for x in made.parameters()]
        with pytest.raises(ConfigError, match=r"0\.weight and 2\.weight are two objects .* Share the Parameter object"):
            attach(comm, AllReduce(), model=made)
        for (place, x), after in zip(before, made.parameters(), strict=True):
            assert after.data_ptr() == place
            assert torch.equal(after, x)
        made[2].weight = made[0].weight  # the fix, for weights that fit
        attach(comm, LocalSGD(2), model=made)

    run_threads(2, work, timeout=10)


def with_a_buffer(make: Callable[[Tensor], Tensor]) -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 2)))
    model[0].register_buffer("row", make(model[0].weight))
    return model


@for_each([lambda x: x.data[1], lambda x: x.detach(), lambda x: x.data[:, 0].view(torch.int32)])
def test_a_buffer_that_is_a_view_of_a_parameter_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    def work(comm: Comm) -> None:
        with pytest.raises(ConfigError, match=r"buffer 0\.row lies in the memory of parameter 0\.weight"):
            attach(comm, AllReduce(), model=with_a_buffer(make))

    run_threads(2, work, timeout=10)


def test_one_rank_s_alone_is_a_difference_that_all_ranks_name() -> None:
    def work(comm: Comm) -> None:
        model = tied_by_data()
        if comm.rank == 0:
            model[2].weight.data = model[2].weight.data.clone()
        words = r"the memory that parameters share is none on rank 0 and 0\.weight and 2\.weight on rank 1"
        with pytest.raises(MismatchError, match=words):
            attach(comm, AllReduce(), model=model)

    run_threads(2, work, timeout=10)


def tied() -> nn.Module:
    model = drawn(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[2].weight = model[0].weight
    return model


def slices_of_one_vector() -> nn.Module:
    """As cuDNN lays out the weights of an LSTM."""
    model = nn.LSTM(3, 4, 2)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return model


def columns_of_one_matrix() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False))
    matrix = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    model[0].weight.data, model[1].weight.data = matrix[:, :3], matrix[:, 3:]
    return model


def buffers_in_one_memory() -> nn.Module:
    model, table = net(), torch.zeros(1, 3)
    model.register_buffer("one", table)
    model.register_buffer("same", table[0])
    model.register_buffer("none", model[0].weight.data[:0])
    model.register_buffer("itself", model[0].weight)
    return model


def frozen_in_one_memory() -> nn.Module:
    model = tied_by_data()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


@for_each(
    [
        tied,
        lambda: nn.LSTM(3, 4, 2),
        lambda: nn.GRU(3, 4, bidirectional=True),
        slices_of_one_vector,
        columns_of_one_matrix,
        buffers_in_one_memory,
        frozen_in_one_memory,
    ]
)
def test_tied_parameters_and_disjoint_parts_of_one_memory_attach(model: Model) -> None:
    run_threads(2, lambda comm: attach(comm, AllReduce(), model=model()), timeout=10)


def test_an_expanded_tensor_is_its_elements_and_not_all_that_lies_between() -> None:
    model, memory = nn.Module(), torch.zeros(4, 6)
    model.weight = nn.Parameter(memory[:, :2])
    model.register_buffer("wide", memory[:, 2:3].expand(4, 3))
    assert find_alias(model, {"weight": model.weight}) is None
    model.register_buffer("wide", memory[:, 1:2].expand(4, 3))
    assert find_alias(model, {"weight": model.weight}) == ("weight", "wide")
    assert find_alias(model, {}) is None


def test_what_an_earlier_worker_has_laid_out_attaches_again() -> None:
    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, AllReduce()), batches(comm.rank, 2))
        worker.detach()
        again = steps(attach(comm, LocalSGD(2), model=worker.model), batches(comm.rank, 2))
        again.detach()
        trained = flat(again.model)
        worker.model.register_buffer("view", worker.model[0].weight.data[0])
        with pytest.raises(ConfigError, match=r"buffer view lies in the memory of parameter 0\.weight"):
            attach(comm, AllReduce(), model=worker.model)
        return trained

    x, y = run_threads(2, work, timeout=10)
    assert torch.equal(x, y)
