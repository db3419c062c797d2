# SPDX-License-Identifier: Apache-2.0
"""Elastic workers that are groups of processes: a lost rank ends its group, the others continue, a new group joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from tests.core.replica.test_shards import data, expected, momentum, net, sharded, two_by_two, whole
from tests.elastic.groups import Groups, Kill, Rank
from tests.engine import batch, flat
from tests.grids import fast_where
from tests.pool import run_processes
from thinwire import ConfigError
from thinwire.core.comm.rendezvous import host_store
from thinwire.elastic.late import LateMerging
from thinwire.elastic.ranks import Ranks
from thinwire.methods.strategies.recipe import parse

RECIPES = ("LocalSGD(period=2)", "SlowMo(period=3)", "DiLoCo(period=3)")
CODED = "LocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4)))"
# Fragments of a shard: other elements than those of the whole model.
IN_FRAGMENTS = "DiLoCo(period=4, fragments=2)"
# Messages in flight while the groups take their steps; the models of the groups are equal in no step.
OVERLAPPED = (
    "OverlapLocalSGD(period=3)",
    "OverlapLocalSGD(period=2, delay=1, codec=ErrorFeedback(Nearest(bits=4)))",
    "CoCoD(period=3)",
    "DiLoCo(period=4, fragments=2, delay=1, mixing=0.4)",
)


def alive(ended: list[Rank | str]) -> list[Rank]:
    """The ranks of a group, all of which must have reached the end."""
    for rank in ended:
        assert isinstance(rank, Rank), rank
    return [rank for rank in ended if isinstance(rank, Rank)]


def fixed(recipe: str) -> list[list[float]]:
    """A fixed run of the same groups."""
    mesh = two_by_two()
    worker = sharded(mesh, parse(recipe), momentum)  # type: ignore[arg-type]
    found: list[list[float]] = []
    for x, y in data(mesh.get_local_rank("replicate"), 7):
        worker.optimizer.zero_grad()
        (worker.model(x) - y).square().mean().backward()
        worker.optimizer.step()
        found.append(whole(worker.model).tolist())
    worker.detach()
    return found


@pytest.mark.parametrize(
    "recipe",
    fast_where(lambda recipe: recipe in (RECIPES[1], OVERLAPPED[0]), (*RECIPES, IN_FRAGMENTS, *OVERLAPPED)),
)
def test_groups_without_faults_train_as_fixed_ranks_and_as_unsharded_workers(recipe: str) -> None:
    ends = Groups(recipe, 2, steps=7).finish()
    steps = run_processes(4, fixed, recipe)
    cut = "fragments" in recipe or "codec" in recipe  # a shard has other fragments and blocks than the whole model
    unsharded = None if cut else expected(parse(recipe), momentum)
    for number, group in enumerate(ends):
        for rank in alive(group):
            assert [rank.trace[step] for step in range(1, 8)] == steps[2 * number]
            if unsharded is None:
                assert rank.agreed == alive(ends[0])[0].agreed
                continue
            assert rank.trace[7] == pytest.approx(unsharded[number][0].tolist(), rel=0, abs=1e-6)
            assert rank.agreed == pytest.approx(unsharded[number][1].tolist(), rel=0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["LocalSGD(period=2)", "DiLoCo(period=4, delay=1)", OVERLAPPED[1]])
def test_a_rank_may_hold_no_part_of_the_model(recipe: str) -> None:
    ends = [alive(group) for group in Groups(recipe, 2, steps=9, small=True).finish()]
    assert all(rank.trace == group[0].trace and rank.agreed == ends[0][0].agreed for group in ends for rank in group)
    assert len(set(map(tuple, ends[0][0].trace.values()))) == 9


@pytest.mark.parametrize("rank", fast_where(lambda rank: rank == 0, range(2)))
def test_a_lost_rank_ends_its_group_and_the_other_group_continues(rank: int) -> None:
    groups = Groups("SlowMo(period=3)", 2, steps=12, last_view=1, pause=0.01)
    groups.until(1, 4)
    groups.kill(0, rank)
    lost, left = groups.finish()
    assert lost[rank] == "ended without an answer"
    told = lost[1 - rank]
    assert isinstance(told, str)
    assert f"a group of 2 ranks, has lost rank {rank} (" in told
    assert "Start all ranks of this group again to let it join" in told
    for each in alive(left):
        assert [size for _, size in each.views] == [2, 1]
        assert each.agreed is not None and each.agreed == alive(left)[0].agreed


def local_sgd(
    period: int, leaves: int, left_at: int, steps: int, overflows: Collection[tuple[int, int]] = ()
) -> dict[int, dict[int, Tensor]]:
    """Three unsharded workers, one of which leaves after a step: then the others take the mean with it.

    Where a (worker, step) overflows, that worker makes no update.
    """
    models, traces = [net() for _ in range(3)], dict[int, dict[int, Tensor]]()
    optimizers = [momentum(model) for model in models]

    def average(numbers: Sequence[int]) -> None:
        mean = torch.stack([flat(models[each]) for each in numbers]).mean(0)
        for each in numbers:
            torch.nn.utils.vector_to_parameters(mean.clone(), models[each].parameters())

    stay = [each for each in range(3) if each != leaves]
    for step in range(1, steps + 1):
        there = range(3) if step <= left_at else stay
        for each in there:
            x, y = batch(each, step - 1, classes=1)
            optimizers[each].zero_grad()
            (models[each](x) - y).square().mean().backward()
            if (each, step - 1) not in overflows:
                optimizers[each].step()
        if step % period == 0:
            average(there)
        for each in there:
            traces.setdefault(each, {})[step] = flat(models[each])
        if step == left_at:
            average(there)
    return traces


@pytest.mark.parametrize("rank", fast_where(lambda rank: rank == 1, range(2)))
def test_a_signal_to_one_rank_lets_its_whole_group_leave(rank: int) -> None:
    """In the middle of a round, without a wait: the others take the mean with the parameters of that group."""
    groups = Groups("LocalSGD(period=7)", 3, steps=9, last_view=1, pause=0.02, notice=4, timeout=20.0)
    groups.until(1, 1)
    groups.signal(1, rank)
    first, leaver, last = (alive(ends) for ends in groups.finish())
    assert all(list(each.reasons.values()) == ["SIGTERM"] for each in leaver)
    left_at = max(leaver[0].trace)
    assert left_at % 4 == 0 and left_at % 7
    expected = local_sgd(7, 1, left_at, left_at + 9)
    for number, group in ((0, first), (2, last)):
        for each in group:
            assert each.left == leaver[0].reasons and [size for _, size in each.views] == [3, 2]
            assert max(each.seconds) < 2, "the others do not wait for a timeout"
            for step, model in expected[number].items():
                assert each.trace[step] == pytest.approx(model.tolist(), rel=0, abs=1e-6), step


def test_an_overflow_in_one_shard_leaves_the_step_out_in_the_whole_group() -> None:
    overflows = {(0, 0, 1), (2, 1, 3), (0, 1, 6)}
    ends = Groups("LocalSGD(period=3)", 3, steps=9, overflows=overflows).finish()
    expected = local_sgd(3, 3, 9, 9, [(number, step) for number, _, step in overflows])
    for number, group in enumerate(ends):
        for rank in alive(group):
            fell = [step for step in range(2, 10) if rank.scales[step] < rank.scales[step - 1]]
            assert fell == sorted(step + 1 for each, _, step in overflows if each == number)
            for step, model in expected[number].items():
                assert rank.trace[step] == pytest.approx(model.tolist(), rel=0, abs=1e-6), (number, step)


@pytest.mark.slow
def test_where_all_groups_have_notice_all_save_and_new_ones_continue(tmp_path: Path) -> None:
    groups = Groups("SlowMo(period=3)", 2, steps=1000, pause=0.02, notice=3, folder=tmp_path, timeout=20.0)
    groups.until(1, 1)
    for number, rank in ((0, 1), (1, 0)):
        groups.signal(number, rank)
    ends = [alive(group) for group in groups.finish()]
    (left_at,) = {max(rank.trace) for group in ends for rank in group}
    again = [alive(group) for group in Groups("SlowMo(period=3)", 2, steps=left_at + 6, folder=tmp_path).finish()]
    whole = [alive(group) for group in Groups("SlowMo(period=3)", 2, steps=left_at + 6).finish()]
    for group, unbroken in zip(again, whole, strict=True):
        for rank in group:
            assert rank.begins == left_at and rank.trace[left_at + 6] == unbroken[0].trace[left_at + 6]


def local(number: int, steps: int) -> Tensor:
    """The parameters of a worker after steps that it takes alone."""
    model = net()
    optimizer = momentum(model)
    for x, y in data(number, steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return flat(model)


def keeps_its_own_shard() -> None:
    """Let each rank of a group decide by itself whether it has the result of a round."""
    gather = Ranks.gather

    def own(self: Ranks, *numbers: int) -> list[list[int]]:
        return [[row[0], numbers[1], *row[2:]] if len(row) > 2 else row for row in gather(self, *numbers)]

    Ranks.gather = own  # type: ignore[method-assign]


def after_a_loss_between_shards(wrong: Any) -> list[list[float]]:
    """The first average of two groups; the third has lost a rank, which has averaged one shard and not the other."""
    kill = Kill(group=1, rank=1, step=2, late=1.0)
    ends = Groups("LocalSGD(period=2)", 3, steps=2, kills=(kill,), wrong=wrong).finish()
    assert isinstance(ends[1][0], str)
    return [rank.trace[2] for rank in (*alive(ends[0]), *alive(ends[2]))]


def test_no_shard_of_a_round_is_kept_where_another_shard_was_not_averaged() -> None:
    survivors = ((local(0, 2) + local(2, 2)) / 2).tolist()
    for found in after_a_loss_between_shards(None):
        assert found == pytest.approx(survivors, rel=0, abs=1e-6)


def test_a_mean_in_flight_that_reached_one_shard_only_is_dropped_on_both() -> None:
    """A rank is lost in the launch after step 4, where the first period ends with a pull to the common start."""
    kill = Kill(group=1, rank=1, step=4, late=1.0)
    ends = Groups("OverlapLocalSGD(period=4)", 3, steps=4, kills=(kill,), timeout=20.0).finish()
    assert isinstance(ends[1][0], str)
    start = flat(net())
    survivors = torch.stack([local(number, 4).lerp(start, 0.6) for number in (0, 2)]).mean(0).tolist()
    for rank in (*alive(ends[0]), *alive(ends[2])):
        assert rank.trace[4] == pytest.approx(survivors, rel=0, abs=1e-6)


@pytest.mark.slow
def test_ranks_that_decide_alone_would_keep_one_shard_of_a_round() -> None:
    survivors = ((local(0, 2) + local(2, 2)) / 2).tolist()
    all_three = ((local(0, 2) + local(1, 2) + local(2, 2)) / 3).tolist()
    for found in after_a_loss_between_shards(keeps_its_own_shard):
        assert found != pytest.approx(survivors, rel=0, abs=1e-6)
        assert found != pytest.approx(all_three, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    "recipe",
    fast_where(lambda recipe: recipe in (RECIPES[2], OVERLAPPED[1]), (*RECIPES, CODED, IN_FRAGMENTS, *OVERLAPPED)),
)
def test_a_new_group_joins_in_place_of_a_lost_one(recipe: str) -> None:
    # At the usual rate, outer steps of one group alone diverge in about 30 steps, while the new one starts.
    groups = Groups(recipe, 2, steps=12, last_view=2, pause=0.02, rate=0.1)
    groups.until(1, 4)
    groups.kill(0, 1)
    groups.start()
    _, *ends = groups.finish()
    old, new = (alive(group) for group in ends)
    for each in (*old, *new):
        assert each.views[-1][1] == 2 and each.agreed is not None and each.agreed == old[0].agreed
    assert [each.trace for each in new] == [new[0].trace] * 2
    averages = [step for step in new[0].trace if step % parse(recipe).traits.period == 0]  # type: ignore[operator]
    assert new[0].begins > 0 and len(averages) >= 3
    if recipe in (IN_FRAGMENTS, *OVERLAPPED):
        return  # the groups are equal in no step
    assert [new[0].trace[step] for step in averages] == [old[0].trace[step] for step in averages]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("LocalSGD(period=2)", {"group": None}, "Give the ranks that hold the shards of one model as group"),
    ("LocalSGD(period=2)", {"shards": False}, "no parameter is sharded"),
    ("LocalSGD(period=2)", {"elastic": LateMerging()}, "end each round together.* Use elastic=True"),
    ("LocalSGD(period=2)", {"make": lambda model: thinwire.Lamb(model.parameters())}, "Use Adam or SGD"),
    *(
        (recipe, {}, f"{recipe.partition('(')[0]} with elastic=True and a group: .* Use LocalSGD")
        for recipe in (
            "Gossip()",
            "NoLoCo()",
            "Paced(LocalSGD(period=2))",
            "Budget(LocalSGD(period=2), '1MB/s')",
            "AllReduce()",
            "LeaderSGD(period=2)",
            "EASGD(period=2)",
        )
    ),
    ("SlowMo(AllReduce(), period=2)", {}, "AllReduce with elastic=True and a group"),
    ("LocalSGD(period=2)", {}, "THINWIRE_STORE is not set.* Start `thinwire store`"),
    ("LocalSGD(period=2)", {"rendezvous": "file:///nowhere"}, "THINWIRE_KEY"),
    (
        "LocalSGD(period=2)",
        {"rendezvous": "file:///nowhere", "group": None},
        "Give the ranks that hold the shards of one model as group",
    ),
    ("LocalSGD(period=2)", {"rendezvous": "file:///nowhere", "shards": False}, "no parameter is sharded"),
    ("LocalSGD(period=2)", {"run": True}, "THINWIRE_RUN is run-0 on rank 0 and run-1 on rank 1"),
]


def refused(store: str) -> list[str]:
    """What a group of two ranks is told."""
    os.environ["THINWIRE_WORKERS"] = "1"
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found: list[str] = []
    for recipe, settings, _ in REFUSED:
        how = {"elastic": True, "group": mesh, "make": momentum, **settings}
        model = fully_shard(net(), mesh=mesh) if how.pop("shards", True) else net()
        if how.pop("run", False):
            os.environ.update(THINWIRE_STORE=store, THINWIRE_RUN=f"run-{mesh.get_local_rank()}")
        with pytest.raises(ConfigError) as error:
            thinwire.attach(model, how.pop("make")(model), recipe, timeout=5, **how)
        found.append(str(error.value))
    return found


def test_what_a_group_cannot_do_is_refused_on_all_its_ranks() -> None:
    store = host_store("127.0.0.1", 0)
    for told in run_processes(2, refused, f"127.0.0.1:{store.port}"):
        for text, (recipe, settings, words) in zip(told, REFUSED, strict=True):
            assert re.search(words, text), (recipe, settings, text)


# -- over a shared folder ----------------------------------------------------------------------------------------------


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A rendezvous in a folder, for two groups."""
    pytest.importorskip("obstore")
    bucket = pytest.importorskip("thinwire.core.storage.bucket")
    return {"rendezvous": f"file://{tmp_path}", "workers": 2, "key": bucket.new_key()}


@pytest.mark.parametrize("elastic", fast_where(bool, (False, True)))
def test_groups_that_meet_in_a_folder_train_as_groups_with_connections(where: dict[str, Any], elastic: bool) -> None:
    over_folder = Groups(RECIPES[1], 2, steps=7, where={**where, "elastic": elastic}).finish()
    connected = Groups(RECIPES[1], 2, steps=7).finish()
    for mine, theirs in zip(over_folder, connected, strict=True):
        for rank, other in zip(alive(mine), alive(theirs), strict=True):
            assert rank.trace == other.trace and rank.agreed == other.agreed


def test_a_group_that_met_the_others_in_a_folder_is_replaced(where: dict[str, Any]) -> None:
    groups = Groups(
        "DiLoCo(period=3)", 2, steps=12, last_view=2, pause=0.02, where={**where, "elastic": True}, timeout=20.0
    )
    groups.until(1, 4)
    groups.kill(0, 1)
    groups.start()
    _, *ends = groups.finish(seconds=90.0)
    old, new = (alive(group) for group in ends)
    assert new[0].begins > 0
    for each in (*old, *new):
        assert each.views[-1][1] == 2 and each.agreed is not None and each.agreed == old[0].agreed


def test_a_lost_rank_ends_all_groups_of_a_fixed_run_in_a_folder(where: dict[str, Any]) -> None:
    groups = Groups("LocalSGD(period=2)", 2, steps=1 << 30, pause=0.02, where=where, timeout=20.0)
    groups.until(1, 4)
    groups.kill(0, 1)
    told = [each for group in groups.finish() for each in group]
    assert all(isinstance(each, str) for each in told)
    assert any("rank 0" in str(each) for each in told), told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [[], ["--notices"]], ids=str)
def test_random_ranks_are_killed_and_the_others_continue_with_one_model(options: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.elastic.group_kills", "--kills", "4", "--groups", "3", "--seed", "3", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "4 kills, 3 groups of 2" in found.stdout and "one consensus at the end" in found.stdout
