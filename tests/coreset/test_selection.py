# SPDX-License-Identifier: Apache-2.0
"""Selection by facility location: exactness, weights, ties, and what it costs in memory."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles.coreset import apart, best_cost, blobs, clusters, cost, greedy, points
from thinwire import Comm, ConfigError
from thinwire.core.kernels import nearest
from thinwire.coreset import Coreset, EuclideanDistances, select
from thinwire.coreset.facility import Facility, Goal, TorchNearest, unit_of
from thinwire.coreset.greedy import lazy
from thinwire.coreset.selection import interleave, proportional_budgets
from thinwire.coreset.similarity import centred, power_above


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled kernel and without it."""
    if request.param == "torch":
        monkeypatch.setenv("THINWIRE_NATIVE", "0")
    elif nearest.compiled(torch.empty(0)) is None:
        pytest.skip("no C compiler")
    return request.param


def same(a: Coreset, b: Coreset) -> bool:
    """The same picks in the same order with the same weights, gains and cost."""
    return a.indices.equal(b.indices) and a.weights.equal(b.weights) and a.gains.equal(b.gains) and a.cost == b.cost


def alike(a: Coreset, b: Coreset) -> bool:
    """The same picks and weights."""
    return a.indices.equal(b.indices) and a.weights.equal(b.weights)


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lazy", "naive"])
@pytest.mark.parametrize(("n", "budget"), [(1, 1), (2, 1), (17, 5), (90, 30), (203, 20)])
def test_greedy_equals_its_definition(backend: str, method: str, n: int, budget: int) -> None:
    x = points(n, seed=n)
    picks, sizes, total = greedy(apart(x), budget)
    found = select(x, budget=budget, method=method)
    assert found.indices.tolist() == picks
    assert found.weights.tolist() == sizes
    assert found.cost == pytest.approx(total, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_keeps_its_guarantee_against_all_subsets(seed: int) -> None:
    x = points(11, d=3, seed=seed)
    distances = apart(x)
    top = distances.max() * len(x)
    found = select(x, budget=3)
    assert top - found.cost >= (1 - 1 / np.e) * (top - best_cost(distances, 3))


@pytest.mark.slow
def test_lazy_naive_blocks_of_any_width_and_bare_distances_agree_to_the_last_bit(backend: str) -> None:
    x = points(240, d=7)
    baseline = select(x, budget=48, method="naive")
    assert same(select(x, budget=48), dataclasses.replace(baseline, method="lazy"))
    rows = centred(x)
    unit = unit_of(rows)
    for block in (1, 3, 64, 240):
        facility = Facility(TorchNearest(rows / unit))
        facility.block = block
        picks = lazy(facility, Goal(48))
        assert picks.indices == baseline.indices.tolist()
    assert alike(select(EuclideanDistances(x), budget=48), baseline)


def test_a_wrong_guess_of_the_first_pick_does_no_harm(backend: str) -> None:
    draw = torch.Generator().manual_seed(2)
    places = torch.repeat_interleave(torch.tensor([0.0, 10.0, 2.86]), torch.tensor([200, 80, 70]))
    x = 0.1 * torch.randn(350, 3, generator=draw) + places[:, None] * torch.tensor([1.0, 0.0, 0.0])
    found = select(x, budget=30)
    assert found.indices[0] < 200
    for each in (x, points(350)):
        assert same(
            select(each, budget=30), dataclasses.replace(select(each, budget=30, method="naive"), method="lazy")
        )


def test_the_compiled_kernel_and_torch_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = points(400, d=13), torch.arange(400) % 3
    ours = select(x, budget=60, labels=labels)
    monkeypatch.setenv("THINWIRE_NATIVE", "0")
    assert alike(ours, select(x, budget=60, labels=labels))


def test_gains_shrink_and_are_what_the_cost_falls_by(backend: str) -> None:
    x = points(150)
    found = select(x, budget=50)
    assert (found.gains.diff() <= 0).all()
    costs = [select(x, budget=k).cost for k in (1, 2, 10, 50)]
    assert costs == sorted(costs, reverse=True)
    for k, total in zip((1, 2, 10, 50), costs, strict=True):
        assert total == pytest.approx(found.cost + float(found.gains[k:].sum()), rel=1e-12)


def test_a_smaller_budget_is_the_beginning_of_a_larger_one(backend: str) -> None:
    x = points(120)
    assert select(x, budget=30).indices[:11].equal(select(x, budget=11).indices)


def test_the_order_of_the_points_does_not_matter(backend: str) -> None:
    x = points(160)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(5))
    moved = select(x[order], budget=25)
    assert order[moved.indices].equal(select(x, budget=25).indices)
    assert moved.weights.equal(select(x, budget=25).weights)


def test_a_shift_of_all_points_does_not_matter(backend: str) -> None:
    x = points(100).double()
    assert select(x + 1e7, budget=20).indices.equal(select(x, budget=20).indices)


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e18])
def test_the_unit_of_the_features_does_not_matter(backend: str, scale: float) -> None:
    x = points(100).double()
    found, scaled = select(x, budget=20), select(x * scale, budget=20)
    assert scaled.indices.equal(found.indices)
    assert scaled.cost == pytest.approx(scale * found.cost, rel=1e-5)


def test_two_threads_choose_what_one_does() -> None:
    x, labels = points(2600, d=24), torch.arange(2600) % 4
    one = select(x, budget=12), select(x, budget=40, labels=labels)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = select(x, budget=12), select(x, budget=40, labels=labels)
    finally:
        torch.set_num_threads(before)
    assert same(*(pair[0] for pair in (one, two))) and same(*(pair[1] for pair in (one, two)))


# -- weights, ties and duplicates --------------------------------------------------------------------------------------


def test_each_far_blob_gets_one_point_that_weighs_as_much_as_it_has(backend: str) -> None:
    x, kinds = blobs([31, 7, 18, 2])
    found = select(x, budget=4)
    weights = dict(zip(kinds[found.indices].tolist(), found.weights.tolist(), strict=True))
    assert weights == {0: 31, 1: 7, 2: 18, 3: 2}


def test_near_duplicates_keep_their_digits(backend: str) -> None:
    # All squared lengths are alike to seven digits; only differences tell the points apart.
    draw = torch.Generator().manual_seed(1)
    x = torch.cat([torch.zeros(40, 4), torch.full((40, 4), 4096.0)])
    x += torch.randint(-8, 9, x.shape, generator=draw)
    picks, sizes, _ = greedy(apart(x), 12)
    found = select(x, budget=12)
    assert found.weights.sum() == 80 and found.indices[:2].tolist() == picks[:2]
    assert found.cost == pytest.approx(cost(apart(x), found.indices.tolist()), rel=1e-3)
    assert sizes[:2] == pytest.approx(clusters(apart(x), picks)[:2])


def test_all_points_represent_themselves_even_where_some_are_equal(backend: str) -> None:
    x = points(9).repeat(3, 1)
    found = select(x, fraction=1.0)
    assert sorted(found.indices.tolist()) == list(range(27))
    assert found.weights.tolist() == [1.0] * 27 and found.cost == 0


def test_a_point_is_never_chosen_twice_nor_its_twin_before_all_others(backend: str) -> None:
    x = torch.cat([points(30), points(30)[:10]])
    found = select(x, budget=30)
    assert len(set(found.indices.tolist())) == 30
    assert len(x[found.indices].unique(dim=0)) == 30


def test_of_equal_points_the_one_with_the_smallest_number_is_chosen(backend: str) -> None:
    x = torch.tensor([[0.0], [5.0], [5.0], [9.0], [5.0]])
    assert select(x, budget=1).indices.tolist() == [1]
    assert select(torch.zeros(6, 2), budget=3).indices.tolist() == [0, 1, 2]


def test_the_first_point_is_chosen_no_more_often_than_others(backend: str) -> None:
    firsts = [select(points(40, seed=seed), budget=3).indices.tolist().count(0) for seed in range(12)]
    assert sum(firsts) <= 4


def test_on_a_grid_equal_gains_go_to_the_smallest_number(backend: str) -> None:
    x = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0))
    picks, sizes, total = greedy(apart(x), 9)
    found = select(x, budget=9)
    assert found.indices[0] == picks[0] == 12
    assert alike(found, select(x, budget=9, method="naive"))
    assert found.cost == pytest.approx(total, rel=0.05) and sum(sizes) == 25


# -- classes -----------------------------------------------------------------------------------------------------------


def test_each_class_is_selected_separately(backend: str) -> None:
    x, labels = points(130), torch.arange(130) % 13 // 6
    found = select(x, budget=26, labels=labels)
    for label, share in zip((0, 1, 2), (12, 12, 2), strict=True):
        members = (labels == label).nonzero().flatten()
        inside = labels[found.indices] == label
        alone = select(x[members], budget=share)
        assert found.indices[inside].equal(members[alone.indices])
        assert found.weights[inside].equal(alone.weights)
        assert found.weights[inside].sum() == len(members)


def test_budgets_of_classes_sum_to_the_budget_and_none_is_empty_or_too_large() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        sizes = draw.integers(1, 40, size=draw.integers(1, 9)).tolist()
        budget = int(draw.integers(len(sizes), sum(sizes) + 1))
        given = proportional_budgets(sizes, budget)
        assert sum(given) == budget
        assert all(1 <= share <= size for share, size in zip(given, sizes, strict=True))


def test_budgets_of_classes_are_those_of_the_largest_remainders() -> None:
    assert proportional_budgets([50, 30, 20], 10) == [5, 3, 2]
    assert proportional_budgets([45, 35, 20], 10) == [5, 3, 2]
    assert proportional_budgets([7, 7, 7], 4) == [2, 1, 1]
    assert proportional_budgets([97, 1, 1, 1], 10) == [7, 1, 1, 1]


def test_every_beginning_holds_the_classes_in_their_ratio() -> None:
    order = [kind for kind, _ in interleave([6, 3, 1])]
    assert len(order) == 10
    for end in range(1, 11):
        counts = [order[:end].count(kind) for kind in range(3)]
        assert all(abs(count - end * share / 10) <= 1 for count, share in zip(counts, (6, 3, 1), strict=True))


def test_numbers_of_classes_may_have_gaps(backend: str) -> None:
    x, labels = points(50), torch.tensor([7, -3]).repeat(25)
    found = select(x, budget=10, labels=labels)
    assert (labels[found.indices] == 7).sum() == 5


def test_bare_distances_can_be_selected_by_class() -> None:
    x, labels = points(60), torch.arange(60) % 2

    class Bare:
        n = 60

        def between(self, candidates: Tensor) -> Tensor:
            return torch.cdist(x.double(), x[candidates].double(), compute_mode="donot_use_mm_for_euclid_dist")

    assert alike(select(Bare(), budget=12, labels=labels), select(x, budget=12, labels=labels))


# -- cover -------------------------------------------------------------------------------------------------------------


def test_cover_takes_as_few_picks_as_greedy_needs(backend: str) -> None:
    x = points(90)
    costs = [select(x, budget=k).cost for k in range(1, 31)]
    for bound in (costs[0], costs[7], 0.5 * (costs[11] + costs[12])):
        found = select(x, cover=bound)
        assert found.cost <= bound and len(found) == 1 + next(i for i, each in enumerate(costs) if each <= bound)


def test_a_cover_of_nothing_takes_every_distinct_point() -> None:
    x = points(20).repeat(2, 1)
    found = select(x, cover=0.0)
    assert found.cost == 0 and len(found) == 20


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of gains computed from now on."""
    computed, gains = [0], Facility.gains

    def counting(facility: Facility, candidates: np.ndarray) -> np.ndarray:
        computed[0] += len(candidates)
        return gains(facility, candidates)

    monkeypatch.setattr(Facility, "gains", counting)
    return computed


# -- cost --------------------------------------------------------------------------------------------------------------


def test_lazy_computes_a_few_per_cent_of_naive_s_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_NATIVE", "0")
    x = points(1000, d=10)
    computed = counted(monkeypatch)
    select(x, budget=100)
    assert computed[0] < 0.12 * sum(1000 - k for k in range(100))


def test_no_matrix_of_all_distances_is_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_NATIVE", "0")
    largest = [0]
    make = torch.Tensor.new_empty

    def watched(own: Tensor, *shape: object, **how: object) -> Tensor:
        made = make(own, *shape, **how)
        largest[0] = max(largest[0], made.numel())
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", watched)
    n = 5000
    select(points(n, d=4), budget=3)
    assert 0 < largest[0] <= 1 << 22 < n * n


def test_beside_the_points_the_kernel_holds_a_few_numbers_for_each(backend: str) -> None:
    if backend == "torch":
        pytest.skip("measured by tensors, above")
    x = points(4000, d=8)
    select(x[:50], budget=2)
    tracemalloc.start()
    select(x, budget=40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # What is traced are the bounds of lazy greedy; what torch holds is counted by its tensors above.
    assert peak < 4000 * 400


# -- several ranks -----------------------------------------------------------------------------------------------------

CUTS = [0, 30, 31, 110, 150]


def shard(x: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part; very uneven."""
    cuts = [*CUTS[:size], len(x)]
    return x[cuts[rank] : cuts[rank + 1]]


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_give_what_one_machine_with_all_points_gives(backend: str, size: int, labelled: bool) -> None:
    x, labels = points(180), (torch.arange(180) > 40).long() * 2
    whole = select(x, budget=36, labels=labels if labelled else None)

    def work(comm: Comm) -> Coreset:
        kinds = shard(labels, comm.rank, size) if labelled else None
        return select(shard(x, comm.rank, size), budget=36, labels=kinds, comm=comm)

    assert all(same(found, whole) for found in thinwire.run_threads(size, work, timeout=30))


def test_naive_gives_the_same_on_shards() -> None:
    x = points(120)
    whole = select(x, budget=12, method="naive")

    def work(comm: Comm) -> Coreset:
        return select(shard(x, comm.rank, 3), budget=12, method="naive", comm=comm)

    assert all(same(found, whole) for found in thinwire.run_threads(3, work, timeout=30))


def test_a_block_of_candidates_costs_one_number_each() -> None:
    x = points(160, d=20)

    def work(comm: Comm) -> tuple[int, float]:
        select(shard(x, comm.rank, 2), budget=16, comm=comm)
        return len(x), comm.meter.by_operation["all_reduce"]

    (n, first), (_, second) = thinwire.run_threads(2, work, timeout=30)
    # On two ranks a sum sends its own size: a double for each gain, a double a feature, 8 bytes a weight.
    assert first == second
    assert (first - 8 * 20 - 8 * 16) % 8 == 0 and first < 8 * (8 * n) + 8 * 20 + 8 * 16


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    x = points(40)

    def work(comm: Comm) -> str:
        own = shard(x, comm.rank, 2).clone()
        if comm.rank == 1:
            own[2, 1] = torch.nan
        with pytest.raises(ConfigError) as refused:
            select(own, budget=4, comm=comm)
        return str(refused.value)

    first, second = thinwire.run_threads(2, work, timeout=30)
    assert "rank 1" in first and "row 2" in second


def test_powers_of_two_are_the_units() -> None:
    assert [power_above(bound) for bound in (0.0, 0.3, 0.5, 1.0, 1.5, 4.0, 5.0)] == [1, 0.5, 0.5, 1, 2, 4, 8]
