# SPDX-License-Identifier: Apache-2.0
"""Gradient proxies, subsets and strata: what training on a coreset rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import coreset_training as oracle
from tests.rules import for_each, refusals
from thinwire.core.modes import evaluation_mode
from thinwire.coreset.proxies import (
    LastLayer,
    OuterDistances,
    features,
    head_of,
    last_layer,
    reader,
)
from thinwire.coreset.subset import Strata, Subset, allocate, budget_of, stratify
from thinwire.errors import ConfigError, NonFiniteError

N, INPUTS, WIDTH, CLASSES = 60, 5, 7, 4


class Net(nn.Module):
    """Everything that behaves otherwise while training: normalisation by batch, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.body(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def net(seed: int = 0) -> Net:
    draw = torch.Generator().manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        model.norm.running_mean.copy_(torch.randn(WIDTH, generator=draw))  # type: ignore[union-attr]
    return model


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(N, INPUTS, generator=draw), torch.randint(CLASSES, (N,), generator=draw)


def read_of(x: Tensor, y: Tensor) -> Any:
    return lambda rows: (x[rows], y[rows])


def exact(model: Net, x: Tensor, y: Tensor) -> Tensor:
    with evaluation_mode(model), torch.no_grad():
        hidden = model.hidden(x)
    return oracle.last_layer_gradients(model.head.weight, model.head.bias, hidden, y)


def measured(*, hidden: bool, rows: Tensor | None = None, batch_size: int = 16) -> LastLayer:
    wanted = torch.arange(N) if rows is None else rows
    return last_layer(net(), read_of(*data()), wanted, hidden=hidden, batch_size=batch_size)


# -- proxies -----------------------------------------------------------------------------------------------------------


def test_outer_products_never_written_out_are_as_far_apart_as_the_real_gradients() -> None:
    gradients = exact(net(), *data())
    candidates = torch.tensor([3, 0, 59, 17])
    expected = torch.stack([(gradients - gradients[j]).norm(dim=1) for j in candidates], dim=1)
    found = measured(hidden=True).distances().between(candidates)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[candidates, torch.arange(4)], torch.zeros(4))


def test_distances_among_some_points_are_those_among_all() -> None:
    members = torch.tensor([7, 3, 50, 20])
    whole = measured(hidden=True).distances()
    part = whole.at(members)
    assert part.n == 4
    expected = whole.between(members)[members]
    assert torch.allclose(part.between(torch.arange(4)), expected, rtol=1e-3, atol=1e-3)


def test_logit_gradients_are_the_gradients_of_the_bias() -> None:
    gradients = exact(net(), *data()).view(N, CLASSES, WIDTH + 1)
    assert torch.allclose(measured(hidden=False).residuals, gradients[:, :, -1], atol=1e-5)


def test_lengths_and_sums_are_those_of_the_real_gradients() -> None:
    gradients, found = exact(net(), *data()), measured(hidden=True)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.allclose(found.norms(), gradients.norm(dim=1), rtol=1e-4)
    assert torch.allclose(found.total().flatten(), gradients.double().sum(0), atol=1e-4)
    expected = (weights[:, None] * gradients.double()).sum(0)
    assert torch.allclose(found.total(weights).flatten(), expected, atol=1e-4)


def test_near_duplicates_far_from_zero_keep_their_distance() -> None:
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(2, CLASSES, generator=draw).repeat_interleave(2, 0)
    right = (100 + torch.randn(2, WIDTH, generator=draw)).repeat_interleave(2, 0)
    right[1, 0] += 0.01
    full = torch.einsum("nc,nh->nch", left.double(), torch.cat([right, torch.ones(4, 1)], dim=1).double()).flatten(1)
    expected = (full[1] - full[0]).norm().float()
    assert torch.allclose(OuterDistances(left, right).between(torch.tensor([0]))[1, 0], expected, rtol=0.2)
    assert float(OuterDistances(left, right).between(torch.tensor([2]))[3, 0]) < 0.01 * float(expected)


def test_proxies_are_those_of_evaluation_mode_and_leave_the_model_as_it_was() -> None:
    model, (x, y) = net(), data()
    model.train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = last_layer(model, read_of(x, y), torch.arange(N), hidden=True)
    again = last_layer(model, read_of(x, y), torch.arange(N), hidden=True, batch_size=7)
    assert torch.allclose(first.residuals, again.residuals, atol=1e-5), "batches or dropout show"
    assert model.training
    assert model.drop.training
    assert not model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not first.residuals.requires_grad
    assert not model.head._forward_pre_hooks


def test_modes_are_put_back_when_reading_fails() -> None:
    model = net()
    model.train()

    def fails(rows: Tensor) -> tuple[Tensor, ...]:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        last_layer(model, fails, torch.arange(N), hidden=True)
    assert model.training
    assert not model.head._forward_pre_hooks


def test_rows_come_back_in_the_order_asked_for() -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    straight, mixed = measured(hidden=True), measured(hidden=True, rows=order)
    assert torch.allclose(mixed.residuals, straight.residuals[order], atol=1e-5)
    assert torch.allclose(mixed.hidden, straight.hidden[order], atol=1e-5)  # type: ignore[index, arg-type]
    assert torch.equal(mixed.labels, straight.labels[order])


def test_a_data_set_is_read_in_the_order_asked_for() -> None:
    x, y = data()
    dataset = torch.utils.data.TensorDataset(x, y)
    rows = torch.tensor([5, 2, 40])
    found, classes = features(reader(dataset), rows, batch_size=2)
    assert torch.equal(found, x[rows])
    assert torch.equal(classes, y[rows])


def test_ignored_targets_pull_nowhere() -> None:
    x, y = data()
    y[::3] = -100
    found = last_layer(net(), read_of(x, y), torch.arange(N))
    assert not found.residuals[::3].any()
    assert found.residuals[1].any()


def test_moments_of_rank_one_precondition_outer_products_exactly() -> None:
    gradients, found = exact(net(), *data()).view(N, CLASSES, WIDTH + 1), measured(hidden=True)
    draw = torch.Generator().manual_seed(4)
    moments = torch.outer(0.1 + torch.rand(CLASSES, generator=draw), 0.1 + torch.rand(WIDTH + 1, generator=draw))
    scaled = (gradients / moments.sqrt()).flatten(1)
    expected = (scaled - scaled[7]).norm(dim=1)
    distances = found.preconditioned(moments).distances().between(torch.tensor([7]))[:, 0]
    assert torch.allclose(distances, expected, rtol=1e-3, atol=1e-3)


def test_logit_gradients_are_preconditioned_by_the_moments_of_the_bias() -> None:
    found, moments = measured(hidden=False), torch.tensor([0.01, 1.0, 4.0, 9.0])
    assert torch.allclose(found.preconditioned(moments).residuals, found.residuals / moments.sqrt(), rtol=1e-5)
    with pytest.raises(ConfigError, match="this layer has"):
        found.preconditioned(torch.ones(CLASSES, 3))


def test_what_cannot_be_compared_is_refused() -> None:
    x, y = data()
    with pytest.raises(NonFiniteError, match="NaN"):
        last_layer(net(), read_of(x * torch.nan, y), torch.arange(N))
    with pytest.raises(ConfigError, match="one class a point"):
        last_layer(net(), read_of(x, y[:, None].expand(-1, 2)), torch.arange(N))
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        head_of(nn.Sequential(nn.ReLU()))
    with pytest.raises(ConfigError, match="run once for each point"):
        last_layer(
            nn.Sequential(nn.Linear(INPUTS, CLASSES)), read_of(x, y), torch.arange(N), hidden=True, head=nn.ReLU()
        )


# -- subsets -----------------------------------------------------------------------------------------------------------


def relative_error(gradients: LastLayer, chosen: Subset) -> float:
    """The length of the difference of the chosen points' weighted sum from the sum of all, relative to the latter's."""
    whole = gradients.total()
    return float((whole - gradients.at(chosen.indices).total(chosen.weights)).norm() / whole.norm())


def test_the_relative_error_is_that_of_the_weighted_sum_of_real_gradients() -> None:
    gradients = exact(net(), *data()).double()
    chosen = Subset(torch.tensor([4, 9, 33]), torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64), N)
    part = (chosen.weights[:, None] * gradients[chosen.indices]).sum(0)
    expected = float((gradients.sum(0) - part).norm() / gradients.sum(0).norm())
    assert relative_error(measured(hidden=True), chosen) == pytest.approx(expected, rel=1e-4)
    assert relative_error(measured(hidden=True), Subset.whole(N)) < 1e-12


@for_each([0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"must lie in \(0, 1\]"):
        budget_of(fraction, 100)


test_a_subset_that_makes_no_sense_is_refused = refusals(
    [
        ([], [], "at least 1 point"),
        ([0, 10], [1.0, 1.0], r"must lie in 0\.\.9"),
        ([-1], [1.0], r"must lie in 0\.\.9"),
        ([0], [0.0], "positive number"),
        ([0], [float("nan")], "positive number"),
        ([0, 1], [1.0], "as many weights"),
    ],
    lambda indices, weights: Subset(
        torch.tensor(indices, dtype=torch.int64), torch.tensor(weights, dtype=torch.float64), 10
    ),
)


# -- strata ------------------------------------------------------------------------------------------------------------


def blobs() -> tuple[Tensor, Tensor]:
    """Points around three centres of unequal sizes and spreads, and which is whose."""
    draw = torch.Generator().manual_seed(6)
    members = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 25, 30]))
    spread = torch.tensor([0.01, 1.0, 0.1])[members]
    return 20 * torch.eye(3)[members] + spread[:, None] * torch.randn(N, 3, generator=draw), members


@pytest.mark.slow
def test_draws_from_strata_are_right_on_average() -> None:
    points, members = blobs()
    strata = Strata(members, torch.tensor([1, 4, 3]))
    rows = torch.stack([weighted_sum(strata.draw(0, epoch), points) for epoch in range(4000)])
    error = (rows.mean(0) - points.double().sum(0)).abs()
    assert bool((error < 4 * rows.std(0) / 4000**0.5 + 1e-6).all())


def weighted_sum(chosen: Subset, points: Tensor) -> Tensor:
    return (chosen.weights[:, None] * points[chosen.indices].double()).sum(0)


def test_every_point_is_drawn_in_the_end_and_none_twice_at_once() -> None:
    _, members = blobs()
    strata = Strata(members, torch.tensor([2, 5, 5]))
    seen: set[int] = set()
    for epoch in range(200):
        drawn = strata.draw(7, epoch)
        assert len(drawn.indices.unique()) == len(drawn) == len(strata) == 12
        assert float(drawn.weights.sum()) == pytest.approx(N)
        seen |= set(drawn.indices.tolist())
    assert seen == set(range(N))


def test_equal_keys_give_equal_draws() -> None:
    _, members = blobs()
    strata = Strata(members, torch.tensor([2, 5, 5]))
    assert torch.equal(strata.draw(1, 2).indices, strata.draw(1, 2).indices)
    assert not torch.equal(strata.draw(1, 2).indices, strata.draw(1, 3).indices)


def test_allocation_goes_by_size_times_spread_within_what_there_is() -> None:
    given = allocate(torch.tensor([100, 100, 50]), torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), 43)
    assert given.sum() == 43
    assert given[2] == 1
    assert 2.5 < float(given[1] / given[0]) < 3.5
    full = allocate(torch.tensor([3, 4, 50]), torch.tensor([9.0, 9.0, 0.0], dtype=torch.float64), 20)
    assert full.tolist() == [3, 4, 13]
    with pytest.raises(ConfigError, match="one draw each"):
        allocate(torch.tensor([3, 4]), torch.ones(2, dtype=torch.float64), 1)


def test_points_join_the_nearest_medoid_of_their_own_class() -> None:
    points, members = blobs()
    medoids = torch.tensor([0, 10, 40])
    strata = stratify(OuterDistances(points), medoids, 9)
    assert torch.equal(strata.members, members)
    labels = torch.zeros(N, dtype=torch.int64)
    labels[50:] = 1
    apart = stratify(OuterDistances(points), torch.tensor([0, 10, 40, 55]), 9, labels=labels)
    assert bool((apart.members[50:] == 3).all())
    with pytest.raises(ConfigError, match="a class has none"):
        stratify(OuterDistances(points), medoids, 9, labels=labels)


def test_strata_that_give_more_than_they_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs at least 1 draw"):
        Strata(torch.tensor([0, 0, 1]), torch.tensor([1, 2]))


def test_a_medoid_that_equals_another_one_stays_with_itself() -> None:
    points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0], [0.0, 5.1], [1.0, 0.1]])
    strata = stratify(OuterDistances(points), torch.tensor([1, 0, 3]), 4)
    assert strata.members[[1, 0, 3]].tolist() == [0, 1, 2]
    assert torch.bincount(strata.members, minlength=3).min() >= 1
    assert int(strata.draws.sum()) == 4 and bool((strata.draws >= 1).all())
    # A tie between another point's medoids still goes to the first one.
    assert int(strata.members[4]) == 0
