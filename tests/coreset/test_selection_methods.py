# SPDX-License-Identifier: Apache-2.0
"""Selection by neighbours; on processes; and the compiled kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.coreset.test_selection import alike, same
from tests.oracles.coreset import apart, blobs, clusters, cost, points
from tests.pool import run_processes
from thinwire import GroupComm
from thinwire.core.kernels import nearest
from thinwire.coreset import select
from thinwire.coreset.facility import FusedNearest, TorchNearest, unit_of
from thinwire.coreset.similarity import centred
from thinwire.coreset.sparse import Neighbours, find_neighbours


def random_cost(x: Tensor, budget: int, draws: int = 5) -> float:
    """The mean cost of random picks."""
    distances = apart(x)
    orders = [torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)) for seed in range(draws)]
    return float(np.mean([cost(distances, order[:budget].tolist()) for order in orders]))


def recall(x: Tensor, found: Neighbours) -> float:
    """The share of the true nearest neighbors that were found."""
    count = found.numbers.shape[1] - 1
    true = apart(x).argsort(1)[:, 1 : count + 1].tolist()
    pairs = zip(true, found.numbers[:, 1:].tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / count for a, b in pairs]))


# -- near neighbours ---------------------------------------------------------------------------------------------------


def test_near_neighbours_gives_distinct_points_true_weights_and_the_true_cost() -> None:
    x = points(260)
    found = select(x, budget=26, method="sparse", seed=1)
    picks = found.indices.tolist()
    assert len(set(picks)) == 26 and found.n == 260
    assert found.weights.tolist() == clusters(apart(x), picks)
    assert found.cost == pytest.approx(cost(apart(x), picks), rel=1e-5)


def test_near_neighbours_is_nearer_to_greedy_than_random_points() -> None:
    x = points(400, d=4)
    exact, found, random = select(x, budget=40).cost, select(x, budget=40, method="sparse").cost, random_cost(x, 40)
    closed = (random - found) / (random - exact)
    assert 0.8 < closed < 1.05


def test_what_is_drawn_is_drawn_from_the_seed() -> None:
    x = points(200)
    state = torch.random.get_rng_state()
    found = [select(x, budget=15, method="sparse", seed=seed) for seed in (3, 3, 4)]
    assert same(found[0], found[1])
    assert torch.random.get_rng_state().equal(state)


def test_near_neighbours_finds_blobs() -> None:
    x, kinds = blobs([30, 40, 30, 50])
    found = select(x, budget=8, method="sparse")
    assert set(kinds[found.indices].tolist()) == {0, 1, 2, 3}
    for kind, size in enumerate((30, 40, 30, 50)):
        assert found.weights[kinds[found.indices] == kind].sum() == size


def test_near_neighbours_can_take_everything_and_equal_points() -> None:
    x = points(8).repeat(2, 1)
    found = select(x, fraction=1.0, method="sparse")
    assert sorted(found.indices.tolist()) == list(range(16)) and found.weights.tolist() == [1.0] * 16


def test_near_neighbours_selects_per_class_and_to_a_cover() -> None:
    x, labels = points(150), torch.arange(150) % 3
    found = select(x, budget=30, labels=labels, method="sparse")
    assert torch.bincount(labels[found.indices]).tolist() == [10, 10, 10]
    assert torch.zeros(3).double().index_add_(0, labels[found.indices], found.weights).tolist() == [50, 50, 50]
    bound = select(x, budget=20).cost
    assert select(x, cover=bound, method="sparse").cost <= bound * (1 + 1e-9)


@pytest.mark.parametrize("method", ["lazy", "sparse"])
def test_progress_is_reported_and_never_goes_back(method: str) -> None:
    shares: list[float] = []
    select(points(100), budget=20, labels=torch.arange(100) % 2, method=method, on_progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)


# -- sparse ------------------------------------------------------------------------------------------------------------


def test_with_all_neighbours_sparse_is_exact() -> None:
    x = points(150)
    for budget in (1, 20, 90):
        found, exact = select(x, budget=budget, method="sparse", neighbours=149), select(x, budget=budget)
        assert alike(found, exact)
        assert found.gains.tolist() == pytest.approx(exact.gains.tolist(), abs=1e-3)


def test_more_neighbours_are_nearer_to_exact() -> None:
    x = points(500, d=8)
    costs = [select(x, budget=50, method="sparse", neighbours=m).cost for m in (4, 16, 128)]
    assert costs[0] > costs[1] > costs[2] * 0.999 and costs[2] < 1.005 * select(x, budget=50).cost


def test_points_without_a_chosen_neighbour_go_to_the_nearest_of_all() -> None:
    x, _ = blobs([40, 40, 40])
    found = select(x, budget=2, method="sparse", neighbours=5)
    assert found.weights.sum() == 120
    assert found.cost == pytest.approx(cost(apart(x), found.indices.tolist()), rel=1e-4)


def test_exact_neighbours_are_those_of_a_sorted_row() -> None:
    x = points(120)
    found = find_neighbours(x, 7, torch.Generator().manual_seed(0))
    order = apart(x).argsort(1)
    assert found.numbers[:, 0].tolist() == list(range(120))
    for i in range(120):
        assert set(found.numbers[i].tolist()) == set(order[i, :8].tolist())
    assert recall(x, found) == 1


def test_inverted_lists_find_most_neighbours_and_true_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    import thinwire.coreset.sparse as module

    monkeypatch.setattr(module, "_CELL", 60)
    monkeypatch.setattr(module, "_PROBES", 6)
    x = points(1500, d=6)
    found = find_neighbours(x, 10, torch.Generator().manual_seed(0), exact=False)
    assert 0.7 < recall(x, found) <= 1
    far = apart(x)
    rows = torch.arange(1500)[:, None]
    assert np.allclose(found.distances.numpy(), far[rows, found.numbers.long()], atol=1e-4)
    assert all(len(set(row)) == 11 for row in found.numbers.tolist())


def test_cells_with_too_few_points_are_joined_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import thinwire.coreset.sparse as module

    monkeypatch.setattr(module, "_CELL", 5)
    monkeypatch.setattr(module, "_PROBES", 1)
    found = find_neighbours(points(90), 30, torch.Generator(), exact=False)
    assert all(len(set(row)) == 31 for row in found.numbers.tolist())


# -- processes ---------------------------------------------------------------------------------------------------------


def on_rank() -> list[tuple[list[int], list[float], list[float], float]]:
    comm = GroupComm(timeout=20)
    x, labels = points(90), torch.arange(90) % 3
    own = slice(0, 25) if comm.rank == 0 else slice(25, 90)
    found = [
        select(x[own], budget=9, comm=comm),
        select(x[own], budget=9, labels=labels[own], comm=comm),
    ]
    return [(f.indices.tolist(), f.weights.tolist(), f.gains.tolist(), f.cost) for f in found]


def test_processes_give_what_one_machine_with_all_points_gives() -> None:
    x, labels = points(90), torch.arange(90) % 3
    first, second = run_processes(2, on_rank)
    assert first == second
    for mine, whole in zip(first, (select(x, budget=9), select(x, budget=9, labels=labels)), strict=False):
        assert mine == (whole.indices.tolist(), whole.weights.tolist(), whole.gains.tolist(), whole.cost)


# -- the compiled kernel -----------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.delenv("THINWIRE_NATIVE", raising=False)
    found = nearest.compiled(torch.empty(0))
    if found is None:
        pytest.skip("no C compiler")
    return found


def test_the_kernel_s_gains_do_not_depend_on_the_other_candidates_of_a_call(library: ctypes.CDLL) -> None:
    for n, d in ((1, 1), (15, 3), (33, 64), (500, 70)):
        rows = centred(points(n, d, seed=n))
        rows = rows / unit_of(rows)
        ours, theirs = FusedNearest(rows, library), TorchNearest(rows)
        for position in range(min(3, n)):
            together = ours.gains(rows)
            assert together.tolist() == [float(ours.gains(row[None])[0]) for row in rows]
            assert together == pytest.approx(theirs.gains(rows), abs=n * 2**-21)
            ours.take(rows[position], position, position)
            theirs.take(rows[position], position, position)
        assert ours.representatives().equal(theirs.representatives())
        assert ours.of(torch.arange(n)).equal(rows)


def test_the_kernel_s_threads_change_nothing(library: ctypes.CDLL) -> None:
    rows = centred(points(70_001, 33))
    rows = rows / unit_of(rows)
    one, three = FusedNearest(rows, library), FusedNearest(rows, library, threads=3)
    for position, own in enumerate((5, 70_000, 33_333)):
        one.take(rows[own], position, own)
        three.take(rows[own], position, own)
        assert one.representatives().equal(three.representatives())
        assert one.gains(rows[:9]).tolist() == three.gains(rows[:9]).tolist()
