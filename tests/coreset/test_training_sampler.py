# SPDX-License-Identifier: Apache-2.0
"""Policies, selectors and the sampler: training on a coreset, alone and on several ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import thinwire
from tests.coreset.test_training import relative_error
from tests.oracles.coreset import greedy
from tests.pool import run_processes
from tests.rules import refusals
from thinwire.core.storage.tree import pack, unpack
from thinwire.coreset.baselines import Crest, El2n, Grand, KCenter, Random, Stratified, even
from thinwire.coreset.craig import Craig
from thinwire.coreset.policy import Points, Policy
from thinwire.coreset.proxies import last_layer
from thinwire.coreset.sampler import CraigSampler, Point, Weighted, weighted_mean
from thinwire.coreset.schedule import Selector
from thinwire.coreset.selection import select
from thinwire.coreset.subset import Strata, Subset
from thinwire.errors import CheckpointError, ConfigError

N, WIDTH, CLASSES = 120, 6, 3
POLICIES = [
    Craig(fraction=0.2),
    Craig(fraction=0.2, proxy="features", every=None),
    Craig(fraction=0.2, proxy="last_layer", every=2),
    Craig(fraction=0.2, mode="strata"),
    Craig(fraction=0.2, per_class=False),
    Random(fraction=0.2),
    Stratified(fraction=0.2),
    KCenter(fraction=0.2),
    El2n(fraction=0.2),
    Grand(fraction=0.2),
    Crest(fraction=0.2, batch=6, part=40),
]


def data(seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (N,), generator=draw)
    return TensorDataset(2.0 * torch.eye(WIDTH)[y] + torch.randn(N, WIDTH, generator=draw), y)


def net(seed: int = 0) -> nn.Sequential:
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    return model


def points_of(dataset: TensorDataset, model: nn.Module, optimizer: Any = None) -> Points:
    x, y = dataset.tensors
    return Points(lambda rows: (x[rows], y[rows]), y, model, optimizer)


def train(
    source: Subset | Policy, *, epochs: int = 4, rank: int = 0, size: int = 1, comm: thinwire.Comm | None = None
) -> Tensor:
    """The loop of any user; returns the parameters."""
    dataset, model = data(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    worker = None if comm is None else thinwire.attach(model, optimizer, thinwire.AllReduce(), comm=comm)
    chosen = source if isinstance(source, Subset) else Selector(source, points_of(dataset, model), seed=1)
    sampler = CraigSampler(chosen, rank=rank, size=size, seed=2)
    loader = DataLoader(Weighted(dataset), batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y, weight in loader:
            optimizer.zero_grad()
            weighted_mean(F.cross_entropy(model(x), y, reduction="none"), weight).backward()
            optimizer.step()
    if worker is not None:
        worker.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# -- what a coreset promises -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proxy", ["features", "logits", "last_layer"])
@pytest.mark.slow
def test_training_on_all_points_as_a_coreset_is_training_on_all_points(proxy: Any) -> None:
    whole = train(Subset.whole(N))
    assert torch.equal(train(Craig(fraction=1.0, proxy=proxy, every=2)), whole)
    assert torch.equal(train(Craig(fraction=1.0, proxy=proxy, mode="strata")), whole)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_weights_sum_to_the_number_of_points(policy: Policy) -> None:
    subset = Selector(policy, points_of(data(), net())).subset(0)
    assert float(subset.weights.sum()) == pytest.approx(N)
    assert len(subset) == 24
    assert float(subset.scaled.mean()) == pytest.approx(1)


@pytest.mark.parametrize("policy", [p for p in POLICIES if not isinstance(p, Crest)], ids=str)
def test_no_point_is_chosen_twice(policy: Policy) -> None:
    subset = Selector(policy, points_of(data(), net())).subset(0)
    assert len(subset.indices.unique()) == len(subset)


def test_one_weighted_epoch_adds_up_to_the_weighted_gradient() -> None:
    dataset, model = data(), net()
    x, y = dataset.tensors
    selector = Selector(Craig(fraction=0.25), points_of(dataset, model))
    sampler = CraigSampler(selector)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for bx, by, weight in DataLoader(Weighted(dataset), batch_size=6, sampler=sampler):
        losses = F.cross_entropy(model(bx), by, reduction="none")
        for each, g in zip(total, torch.autograd.grad(weighted_mean(losses, weight), model.parameters()), strict=True):
            each += g / 5
    chosen = sampler.subset
    losses = F.cross_entropy(model(x[chosen.indices]), y[chosen.indices], reduction="none")
    expected = torch.autograd.grad((losses * chosen.weights.float()).sum() / N, model.parameters())
    for each, g in zip(total, expected, strict=True):
        assert torch.allclose(each, g, atol=1e-6)


def test_the_gradient_s_error_is_no_more_than_the_bound_wherever_the_model_is() -> None:
    """Linear regression on |w| <= 2: the gradient (w.x - y) x moves between points by no more than these distances."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(80, 4, generator=draw, dtype=torch.float64)
    y = torch.randn(80, generator=draw, dtype=torch.float64)
    outer = x[:, :, None] * x[:, None, :]
    apart = (outer[:, None] - outer[None]).flatten(2).norm(dim=2)
    distances = 2 * apart + (y[:, None] * x)[:, None].sub((y[:, None] * x)[None]).norm(dim=2)

    class Table:
        n = 80

        def between(self, candidates: Tensor) -> Tensor:
            return distances[:, candidates].float()

    found = Subset.of(select(Table(), budget=12))
    bound = float(distances[:, found.indices].min(1).values.sum())
    for _ in range(50):
        w = torch.randn(4, generator=draw, dtype=torch.float64)
        w = 2 * w / w.norm()
        g = (x @ w - y)[:, None] * x
        error = (g.sum(0) - (found.weights[:, None] * g[found.indices]).sum(0)).norm()
        assert float(error) <= bound * (1 + 1e-6)


def test_a_coreset_s_gradient_is_nearer_than_that_of_random_points() -> None:
    ours, random = [], []
    for seed in range(5):
        points = points_of(data(seed), net(seed))
        gradients = points.gradients(hidden=True)
        ours.append(relative_error(gradients, Selector(Craig(fraction=0.2, proxy="last_layer"), points).subset(0)))
        draws = [Selector(Random(fraction=0.2), points, seed=s).subset(0) for s in range(5)]
        random += [relative_error(gradients, each) for each in draws]
    assert sum(ours) / len(ours) < 0.7 * sum(random) / len(random)


def test_logit_coresets_are_those_of_the_oracle_class_by_class() -> None:
    dataset, model = data(), net()
    subset = Selector(Craig(fraction=0.2), points_of(dataset, model)).subset(0)
    x, y = dataset.tensors
    residuals = (model(x).softmax(1) - F.one_hot(y, CLASSES)).detach().double()
    for c in range(CLASSES):
        rows = (y == c).nonzero()[:, 0]
        mine = y[subset.indices] == c
        order, sizes, _ = greedy(torch.cdist(residuals[rows], residuals[rows]).numpy(), int(mine.sum()))
        assert subset.indices[mine].tolist() == rows[order].tolist()
        assert subset.weights[mine].tolist() == sizes


def test_a_representative_is_of_the_class_it_represents() -> None:
    dataset = data()
    labels = dataset.tensors[1]
    for policy in (Craig(fraction=0.2), Stratified(fraction=0.2), Craig(fraction=0.3, mode="strata")):
        subset = Selector(policy, points_of(dataset, net())).subset(0)
        for c in range(CLASSES):
            assert float(subset.weights[labels[subset.indices] == c].sum()) == pytest.approx(int((labels == c).sum()))


def test_strata_are_drawn_again_each_epoch_and_right_on_average() -> None:
    points = points_of(data(), net())
    selector = Selector(Craig(fraction=0.2, mode="strata", every=None), points)
    gradients = points.gradients(hidden=True)
    sums = [gradients.at(s.indices).total(s.weights).flatten() for s in map(selector.subset, range(800))]
    stacked = torch.stack(sums)
    whole = gradients.total().flatten()
    assert selector.selections == 1
    assert bool(((stacked.mean(0) - whole).abs() < 4.5 * stacked.std(0) / 800**0.5 + 1e-6).all())


def test_strata_of_half_as_many_medoids_are_nearer_than_random_points() -> None:
    errors: dict[str, list[float]] = {"strata": [], "random": []}
    for seed in range(4):
        points = points_of(data(seed), net(seed))
        gradients = points.gradients(hidden=True)
        strata = Selector(Craig(fraction=0.3, proxy="last_layer", mode="strata", every=None), points)
        errors["strata"] += [relative_error(gradients, strata.subset(epoch)) for epoch in range(20)]
        random = Selector(Random(fraction=0.3), points)
        errors["random"] += [relative_error(gradients, random.subset(epoch)) for epoch in range(20)]
    assert sum(errors["strata"]) < 0.8 * sum(errors["random"])


# -- when points are chosen --------------------------------------------------------------------------------------------


def epochs_of(policy: Policy, epochs: int, *, moving: bool = True) -> list[tuple[int, ...]]:
    model = net()
    selector = Selector(policy, points_of(data(), model))
    seen = []
    for epoch in range(epochs):
        seen.append(tuple(selector.subset(epoch).indices.tolist()))
        if moving:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.3).add_(0.1 * (epoch + 1))
    return seen


def test_points_are_chosen_again_every_few_epochs() -> None:
    seen = epochs_of(Craig(fraction=0.2, every=3), 7)
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert seen[3] == seen[4] == seen[5] != seen[6]
    assert len(set(epochs_of(Craig(fraction=0.2, every=None), 7))) == 1


def test_points_are_chosen_again_when_the_measured_error_exceeds_the_bound() -> None:
    still = Selector(Craig(fraction=0.5, every=None, bound=5.0, probe=1.0), points_of(data(), net()))
    for epoch in range(5):
        still.subset(epoch)
    assert still.selections == 1
    strict = Selector(Craig(fraction=0.2, every=None, bound=1e-9, probe=1.0), points_of(data(), net()))
    for epoch in range(5):
        strict.subset(epoch)
    assert strict.selections == 5


def test_the_error_on_a_whole_probe_is_the_relative_error() -> None:
    points = points_of(data(), net())
    policy = Craig(fraction=0.2, proxy="last_layer", probe=1.0)
    subset = Selector(policy, points).subset(0)
    expected = relative_error(points.gradients(hidden=True), subset)
    assert policy.error(points, subset, 3) == pytest.approx(expected, rel=1e-4)


def test_the_first_epochs_may_be_whole() -> None:
    seen = epochs_of(Craig(fraction=0.2, full_epochs=2), 3)
    assert [len(each) for each in seen] == [N, N, 24]


def test_a_model_s_mode_does_not_change_what_is_chosen() -> None:
    model = nn.Sequential(net()[:2], nn.Dropout(0.5), nn.BatchNorm1d(8), net()[2])
    chosen = []
    for mode in (True, False):
        model.train(mode)
        chosen.append(Selector(Craig(fraction=0.2), points_of(data(), model)).subset(0).indices.tolist())
        assert model.training is mode
    assert chosen[0] == chosen[1]


def test_adam_s_moments_change_what_is_near() -> None:
    model, dataset = net(), data()
    x, y = dataset.tensors
    optimizer = torch.optim.Adam(model.parameters())
    policy = Craig(fraction=0.2, preconditioned=True)
    unscaled = Selector(Craig(fraction=0.2), points_of(dataset, model)).subset(0)
    assert torch.equal(Selector(policy, points_of(dataset, model, optimizer)).subset(0).indices, unscaled.indices)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    head = model[2]
    moments = optimizer.state[head.bias]["exp_avg_sq"]
    optimizer.state[head.bias]["exp_avg_sq"] = torch.tensor([1e-6, 1.0, 1.0]) * moments.max()
    scaled = Selector(policy, points_of(dataset, model, optimizer)).subset(0)
    assert not torch.equal(scaled.indices, Selector(Craig(0.2), points_of(dataset, model)).subset(0).indices)
    with pytest.raises(ConfigError, match="needs an Adam"):
        Selector(policy, points_of(dataset, model)).subset(0)
    # Before the first step too; without momentum SGD would never have a state.
    for momentum in (0.0, 0.9):
        sgd = torch.optim.SGD(model.parameters(), momentum=momentum)
        for _ in range(2):
            with pytest.raises(ConfigError, match="SGD has no second moments"):
                Selector(policy, points_of(dataset, model, sgd)).subset(0)
            sgd.step()


# -- baselines ---------------------------------------------------------------------------------------------------------


def test_scores_take_the_points_with_the_largest_errors() -> None:
    dataset, model = data(), net()
    x, y = dataset.tensors
    misses = (model(x).softmax(1) - F.one_hot(y, CLASSES)).norm(dim=1)
    subset = Selector(El2n(fraction=0.1), points_of(dataset, model)).subset(0)
    assert set(subset.indices.tolist()) == set(misses.argsort(descending=True)[:12].tolist())
    hidden = model[1](model[0](x))
    grand = Selector(Grand(fraction=0.1), points_of(dataset, model)).subset(0)
    lengths = misses * (1 + hidden.square().sum(1)).sqrt()
    assert set(grand.indices.tolist()) == set(lengths.argsort(descending=True)[:12].tolist())


def test_no_point_is_far_from_all_centres() -> None:
    points = points_of(data(), net())
    subset = Selector(KCenter(fraction=0.1), points).subset(0)
    apart = torch.cdist(points.gradients().residuals, points.gradients().residuals)
    radius = float(apart[:, subset.indices].min(1).values.max())
    draw = torch.Generator().manual_seed(0)
    others = [float(apart[:, torch.randperm(N, generator=draw)[:12]].min(1).values.max()) for _ in range(30)]
    assert radius <= min(others)


def test_k_center_stops_where_all_points_are_covered() -> None:
    x = torch.zeros(N, WIDTH)
    y = torch.arange(N) % 2
    subset = Selector(KCenter(fraction=0.5), points_of(TensorDataset(x, y), net())).subset(0)
    assert len(subset) == 2
    assert sorted(subset.weights.tolist()) == [60, 60]


def test_mini_batch_coresets_stand_each_for_the_whole() -> None:
    points = points_of(data(), net())
    selector = Selector(Crest(fraction=0.2, batch=6, part=40), points)
    subset = selector.subset(0)
    assert float(subset.weights[:6].sum()) == pytest.approx(N / 4)
    places = CraigSampler(selector).places()
    assert places.tolist() == list(range(24)), "batches were shuffled apart"
    gradients = points.gradients()
    whole = gradients.total()
    errors = [float((gradients.at(r).total(4 * w) - whole).norm()) for r, w in batches_of(subset)]
    random = [Random(fraction=0.05).choose(points, seed) for seed in range(20)]
    random_errors = [float((gradients.at(r.indices).total(r.weights) - whole).norm()) for r in random]
    assert sum(errors) / 4 < sum(random_errors) / 20


def batches_of(subset: Subset) -> list[tuple[Tensor, Tensor]]:
    return list(zip(subset.indices.split(6), subset.weights.split(6), strict=True))


def test_random_points_differ_from_selection_to_selection() -> None:
    seen = epochs_of(Random(fraction=0.2), 3)
    assert len(set(seen)) == 3
    assert seen == epochs_of(Random(fraction=0.2), 3)


# -- the sampler -------------------------------------------------------------------------------------------------------


def subset_of(k: int) -> Subset:
    draw = torch.Generator().manual_seed(k)
    return Subset(torch.randperm(N, generator=draw)[:k], 1.0 + torch.rand(k, generator=draw, dtype=torch.float64), N)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("k", [7, 12, 5])
def test_ranks_get_the_parts_that_a_distributed_sampler_would_give(k: int, pad: bool) -> None:
    subset = subset_of(k)
    theirs = [DistributedSampler(range(k), 5, r, shuffle=False, drop_last=not pad) for r in range(5)]
    for rank, expected in enumerate(theirs):
        ours = CraigSampler(subset, rank=rank, size=5, shuffle=False, pad=pad)
        assert list(ours) == [int(subset.indices[i]) for i in expected]
        assert len(ours) == len(expected)


def test_shuffled_parts_are_equally_long_and_together_the_whole() -> None:
    subset = subset_of(12)
    parts = [list(CraigSampler(subset, rank=r, size=4, seed=3)) for r in range(4)]
    assert [len(part) for part in parts] == [3] * 4
    assert sorted(i for part in parts for i in part) == sorted(subset.indices.tolist())


def test_epochs_differ_in_order_and_equal_seeds_agree() -> None:
    subset, orders = subset_of(30), []
    sampler = CraigSampler(subset, seed=3)
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    other = CraigSampler(subset, seed=4)
    assert list(other) != orders[0]


class Augmenting(Dataset[Any]):
    """Examples that record which process reads them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index


def test_weights_travel_with_their_points_into_worker_processes() -> None:
    model = net()
    selector = Selector(Craig(fraction=0.2, every=1), points_of(data(), model))
    sampler = CraigSampler(selector)
    loader = DataLoader(
        Weighted(Augmenting()),
        batch_size=5,
        sampler=sampler,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        rows, weights = [], []
        for x, index, weight in loader:
            assert x[:, 0].tolist() == index.tolist()
            rows.append(index)
            weights.append(weight)
        subset = sampler.subset
        expected = dict(zip(subset.indices.tolist(), subset.scaled.tolist(), strict=True))
        found = dict(zip(torch.cat(rows).tolist(), torch.cat(weights).tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert all(found[i] == pytest.approx(expected[i]) for i in found)
        assert torch.allclose(sampler.weight_of(torch.cat(rows)), torch.cat(weights).float())
        seen.append(sorted(found))
        with torch.no_grad():
            model[0].weight.mul_(-3)
    assert seen[0] != seen[1], "persistent workers would not have noticed"
    del loader


def test_a_point_is_a_number_that_keeps_its_weight() -> None:
    point = pickle.loads(pickle.dumps(Point(7, 0.25)))
    assert (point, point.weight) == (7, 0.25)
    assert [10, 20, 30][Point(1, 2.0)] == 20


def kept(state: dict[str, Any]) -> dict[str, Any]:
    tree, tensors = pack(state)
    return unpack(tree, {name: x.clone() for name, x in tensors.items()})


@pytest.mark.slow
def test_weights_that_nobody_reads_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([3.0, 1.0], dtype=torch.float64)
    sampler = CraigSampler(Subset(torch.tensor([1, 2]), weights, 4))
    even_sampler = CraigSampler(even(torch.tensor([1, 2]), 4))

    def epochs(loader: DataLoader[Any]) -> int:
        for _ in range(600):
            list(loader)
        return Point.lost

    monkeypatch.setattr(Point, "lost", 0)
    with pytest.warns(UserWarning, match=r"Wrap the data set, Weighted\(dataset\)"):
        epochs(DataLoader(data(), batch_size=1, sampler=sampler))
    for dataset, own in ((Weighted(data()), sampler), (data(), even_sampler)):
        monkeypatch.setattr(Point, "lost", 0)
        assert epochs(DataLoader(dataset, batch_size=1, sampler=own)) <= 0
    monkeypatch.setattr(Point, "lost", 0)
    sampler.weight_of(torch.tensor([1]))
    assert epochs(DataLoader(data(), batch_size=1, sampler=sampler)) < 0
    # A point that was sent to a worker process may be read there.
    monkeypatch.setattr(Point, "lost", 0)
    point = Point(1, 3.0)
    sent = pickle.loads(pickle.dumps(point))
    del point
    assert Point.lost == 0 and sent._needed
    sent._needed = False


def test_a_sampler_is_no_data_set_of_a_distributed_sampler() -> None:
    sampler = CraigSampler(even(torch.arange(8), 16))
    assert len(sampler) == 8
    with pytest.raises(ConfigError, match=r"CraigSampler\(source, rank=rank, size=world_size\)"):
        DistributedSampler(sampler, num_replicas=2, rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("epoch", [0, 3, 4])
def test_a_resumed_sampler_goes_on_where_the_other_stopped(policy: Policy, epoch: int) -> None:
    def make(model: nn.Module) -> CraigSampler:
        return CraigSampler(Selector(policy, points_of(data(), model), seed=4), rank=1, size=2, seed=5)

    model = net()
    sampler = make(model)
    for each in range(epoch):
        sampler.set_epoch(each)
    sampler.set_epoch(epoch)
    stream = iter(sampler)
    before = [next(stream) for _ in range(4)]
    state = kept(sampler.state_dict())
    with torch.no_grad():
        model[0].weight.mul_(-2)  # a new selection would now choose other points
    rest = [(p, p.weight) for p in stream if isinstance(p, Point)]
    resumed = make(model)
    resumed.load_state_dict(state)
    assert [(p, p.weight) for p in resumed if isinstance(p, Point)] == rest
    assert len(before) + len(rest) == len(sampler)
    for later in (epoch + 1, epoch + 2):
        sampler.set_epoch(later)
        resumed.set_epoch(later)
        assert list(resumed) == list(sampler)


def test_a_loop_with_workers_states_how_far_it_is() -> None:
    sampler = CraigSampler(subset_of(20))
    everything = list(sampler)
    state = sampler.state_dict(consumed=8)
    resumed = CraigSampler(subset_of(20))
    resumed.load_state_dict(state)
    assert list(resumed) == everything[8:]
    assert list(resumed) == everything


def test_a_state_of_something_else_is_refused() -> None:
    selector = Selector(Craig(fraction=0.2), points_of(data(), net()))
    CraigSampler(selector).set_epoch(0)
    state = CraigSampler(selector).state_dict()
    with pytest.raises(CheckpointError, match="saved with"):
        CraigSampler(Selector(Random(), points_of(data(), net()))).load_state_dict(state)
    with pytest.raises(CheckpointError, match="another kind"):
        CraigSampler(subset_of(5)).load_state_dict(state)
    few = TensorDataset(*(t[:50] for t in data().tensors))
    with pytest.raises(CheckpointError, match="among 120 points"):
        CraigSampler(Selector(Craig(fraction=0.2), points_of(few, net()))).load_state_dict(state)


def test_ranks_that_do_not_exist_or_get_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank=3"):
        CraigSampler(subset_of(5), rank=3, size=3)
    with pytest.raises(ConfigError, match="give every rank at least one"):
        list(CraigSampler(subset_of(3), rank=0, size=4))


# -- several ranks -----------------------------------------------------------------------------------------------------


POLICY = Craig(fraction=0.4, every=2)


def train_as_rank() -> list[float]:
    comm = thinwire.GroupComm()
    return train(POLICY, rank=comm.rank, size=comm.size, comm=comm).tolist()


def test_two_processes_choose_alike_and_train_as_two_threads_do() -> None:
    one, other = run_processes(2, train_as_rank)
    assert one == other
    threads = thinwire.run_threads(2, lambda comm: train(POLICY, rank=comm.rank, size=comm.size, comm=comm))
    assert one == pytest.approx(threads[0].tolist(), abs=1e-6)


# -- recipes -----------------------------------------------------------------------------------------------------------


test_a_policy_that_cannot_work_is_refused = refusals(
    [
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"every": 0}, "every=0"),
        ({"full_epochs": -1}, "full_epochs=-1"),
        ({"bound": 0.0}, "bound=0.0"),
        ({"probe": 0.0}, "probe=0.0"),
        ({"proxy": "pixels"}, "proxy"),
        ({"mode": "mean"}, "mode"),
        ({"fraction": "0.1"}, "a number"),
        ({"preconditioned": True, "proxy": "features"}, "features are no gradients"),
        ({"method": "sparse", "proxy": "last_layer"}, "'last_layer': needs coordinates.*Use 'lazy', or proxy='logits'"),
    ],
    lambda wrong: Craig(**wrong),
)


def test_a_mini_batch_is_chosen_among_more_than_itself() -> None:
    with pytest.raises(ConfigError, match="batch=9"):
        Crest(batch=9, part=8)


def test_even_weights_and_whole_strata_are_plain() -> None:
    assert even(torch.tensor([1, 2]), 10).weights.tolist() == [5.0, 5.0]
    everything = Strata(torch.tensor([0, 1, 0]), torch.tensor([2, 1])).draw(0)
    assert sorted(everything.indices.tolist()) == [0, 1, 2]
    assert everything.weights.tolist() == [1.0, 1.0, 1.0]


def test_proxies_are_mapped_back_to_the_points_they_were_measured_on() -> None:
    dataset, model = data(), net()
    x, y = dataset.tensors
    order = torch.randperm(N, generator=torch.Generator().manual_seed(9))
    plain = Selector(Craig(fraction=0.1), points_of(dataset, model)).subset(0)
    mixed = Selector(Craig(fraction=0.1), points_of(TensorDataset(x[order], y[order]), model)).subset(0)
    assert set(order[mixed.indices].tolist()) == set(plain.indices.tolist())
    by_point = dict(zip(plain.indices.tolist(), plain.weights.tolist(), strict=True))
    assert all(by_point[int(order[i])] == w for i, w in zip(mixed.indices, mixed.weights.tolist(), strict=True))
    assert (
        last_layer(model, lambda rows: (x[rows], y[rows]), plain.indices).labels.tolist() == y[plain.indices].tolist()
    )
