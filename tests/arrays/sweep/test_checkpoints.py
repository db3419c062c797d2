# SPDX-License-Identifier: Apache-2.0
"""An array on several workers resumes from disk as if it had never been interrupted."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import thinwire
from tests.arrays.fusion.test_life import same, whole, wide
from tests.arrays.fusion.test_parallel import FRESH, data, trained
from tests.arrays.fusion.test_training import Net
from tests.grids import fast_where, one_of_each
from tests.oracles.fusion import copies, make
from tests.pool import run_processes
from thinwire import AllReduce, Bf16, Comm, Gossip, LocalSGD, PushSum, SlowMo, Strategy
from thinwire.arrays import fusion
from thinwire.arrays.fusion import autotune
from thinwire.arrays.sweep.parallel import ParallelArray, attach_array
from thinwire.core.storage.rank_file import RankFile
from thinwire.errors import CheckpointError

SAVED, STEPS = 4, 9
RATES = [0.05, 0.01, 0.1, 0.02]
STRATEGIES: list[Strategy] = [
    AllReduce(),
    AllReduce(Bf16()),
    LocalSGD(3),
    SlowMo(period=3, momentum=0.6, lr=0.8),
    SlowMo(AllReduce(), period=2, momentum=0.5),
    Gossip(),
    PushSum(),
]
# Threads share torch's own generator, so all models are made before the threads start.
DROPPING = make(partial(Net, 0.3), 6, torch.float64)
FACTORIES: list[Any] = [
    partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    partial(lr_scheduler.MultiStepLR, milestones=[3, 6], gamma=0.7),
    partial(lr_scheduler.StepLR, step_size=3, gamma=0.9),
]
WIDE = wide()


@pytest.fixture(autouse=True)
def no_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


class Run:
    """One rank's array under a strategy, with everything else that trains it."""

    def __init__(self, comm: Comm | None, strategy: Strategy, factories: list[Any] | None = None, **more: Any) -> None:
        factories = factories or FACTORIES
        count = len(factories)
        rank = 0 if comm is None else comm.rank
        array = fusion.fuse(copies(DROPPING[:count]), seeds=[100 * rank + index for index in range(count)])
        optimizer = fusion.SGD(array.parameters(), lr=RATES[:count], momentum=[0.9, 0.0, 0.5, 0.3][:count])
        self.schedules = fusion.Schedules(optimizer, factories)
        self.scaler = fusion.GradScaler(count, 8.0, growth_interval=3)
        self.parallel = attach_array(array, optimizer, strategy, comm=comm, scaler=self.scaler, **more)
        self.rank = self.parallel.worker.comm.rank

    @property
    def parts(self) -> dict[str, Any]:
        return {"schedules": self.schedules, "scaler": self.scaler}

    def train(self, steps: range) -> None:
        for step in steps:
            trained(self.parallel, self.rank, range(step, step + 1), self.scaler)
            self.schedules.step()

    def replace_models(self) -> None:
        """Fewer models than at first, and one of them new."""
        kept = self.parallel.select([2, 0])
        for follower in (self.schedules, self.scaler):
            follower.select(kept)
        self.parallel.insert(1, FRESH[0].train(), seed=7, lr=0.02)
        self.schedules.insert(1, FACTORIES[0])
        self.scaler.insert(1)

    def everything(self) -> list[Any]:
        array, optimizer, worker = self.parallel.array, self.parallel.optimizer, self.parallel.worker
        slots = [whole(array, optimizer, index) for index in range(array.size)]
        kept = [{"x": r.x, **r.state} for r in worker.replicas]
        rest = repr([self.schedules.state_dict(), self.scaler.state_dict(), worker.step, worker.comm.step])
        return [*slots, *kept, rest]


def equal(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(same(clean(a), clean(b)) if isinstance(a, dict) else a == b for a, b in pairs)


def clean(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).detach().clone() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("strategy", one_of_each(STRATEGIES), ids=repr)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.slow
def test_training_resumes_bit_for_bit_from_the_middle_of_a_period(
    strategy: Strategy, size: int, tmp_path: Path
) -> None:
    def work(comm: Comm) -> tuple[list[Any], list[Any]]:
        run = Run(comm, strategy)
        run.train(range(SAVED))
        home = run.parallel.save(tmp_path, **run.parts, extra={"rank": comm.rank})
        assert home == tmp_path / "step-00000004"
        run.train(range(SAVED, STEPS))
        again = Run(comm, strategy, seed=0)
        assert again.parallel.load(tmp_path, **again.parts) == {"rank": comm.rank}
        assert again.parallel.worker.step == SAVED
        again.train(range(SAVED, STEPS))
        return run.everything(), again.everything()

    for ours, theirs in thinwire.run_threads(size, work):
        assert equal(ours, theirs)


@pytest.mark.parametrize("strategy", [AllReduce(), SlowMo(period=3, momentum=0.6), PushSum()], ids=repr)
@pytest.mark.slow
def test_an_array_of_another_size_is_resized_to_the_saved_one(strategy: Strategy, tmp_path: Path) -> None:
    now = [FACTORIES[2], FACTORIES[0]]

    def work(comm: Comm) -> None:
        run = Run(comm, strategy)
        run.train(range(2))
        run.replace_models()
        run.train(range(2, SAVED))
        run.parallel.save(tmp_path, **run.parts)
        run.train(range(SAVED, STEPS))
        for factories in ([*now, FACTORIES[0], FACTORIES[0]], now, now[:1]):
            again = Run(comm, strategy, factories if len(factories) > 1 else [FACTORIES[0]])
            if len(factories) == 1:
                again.schedules.insert(0, FACTORIES[2])
            again.parallel.load(tmp_path, **again.parts)
            assert again.parallel.array.size == 2
            again.train(range(SAVED, STEPS))
            assert equal(run.everything(), again.everything())

    thinwire.run_threads(2, work)


def on_a_rank(strategy: Strategy, folder: str, resume: bool) -> Any:
    """One process of a run: no kernel is measured there either, and tensors are returned as NumPy arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(autotune.DETERMINISTIC, "1")
        torch.manual_seed(3)
        run = Run(None, strategy)
        torch.manual_seed(4 + resume)
        if resume:
            run.parallel.load(folder, **run.parts)
        else:
            run.train(range(SAVED))
            run.parallel.save(folder, **run.parts)
        noise = torch.rand(3)
        run.train(range(SAVED, STEPS))
        found = [*(clean(each) if isinstance(each, dict) else each for each in run.everything()), {"noise": noise}]
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.numpy(), found)


def test_processes_resume_bit_for_bit_with_their_own_random_generators() -> None:
    strategy = SlowMo(period=3, momentum=0.6)
    with tempfile.TemporaryDirectory() as folder:
        through = run_processes(2, on_a_rank, strategy, folder, False)
        resumed = run_processes(2, on_a_rank, strategy, folder, True)
    for ours, theirs in zip(through, resumed, strict=True):
        assert equal(ours, theirs)
    assert not same(clean(through[0][0]), clean(through[1][0]))


# -- another number of workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [AllReduce(), SlowMo(AllReduce(), period=3, momentum=0.6)], ids=repr)
@pytest.mark.parametrize(
    ("before", "now"), fast_where(lambda each: each in ((2, 3), (2, 1)), [(2, 3), (3, 2), (1, 2), (2, 1)])
)
def test_another_number_of_workers_resumes_if_all_agreed(
    strategy: Strategy, before: int, now: int, tmp_path: Path
) -> None:
    def held(run: Run) -> tuple[Tensor, dict[str, Tensor]]:
        buffers = {name: buffer.clone() for name, buffer in run.parallel.array.named_buffers()}
        return run.parallel.worker.replicas[0].x.clone(), buffers

    def saved(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        run = Run(comm, strategy)
        run.train(range(SAVED))
        run.parallel.save(tmp_path, **run.parts, extra={"rank": comm.rank})
        return held(run)

    def loaded(comm: Comm) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        run = Run(comm, strategy)
        generators = run.parallel.array.generators or ()
        states = [each.get_state() for each in generators]
        assert run.parallel.load(tmp_path, **run.parts) == {"rank": 0}
        assert run.parallel.worker.step == SAVED and run.parallel.worker.comm.size == now
        assert all(torch.equal(state, each.get_state()) for state, each in zip(states, generators, strict=True))
        found = held(run)
        run.train(range(SAVED, SAVED + 4))
        return *found, run.parallel.worker.replicas[0].x.clone()

    wrote = thinwire.run_threads(before, saved)
    resumed = thinwire.run_threads(now, loaded)
    for x, buffers, after in resumed:
        assert torch.equal(x, wrote[0][0]) and torch.equal(after, resumed[0][2])
        for name, buffer in buffers.items():
            mean = torch.stack([each[1][name].double() for each in wrote]).mean(0)
            torch.testing.assert_close(buffer.double(), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [LocalSGD(3), Gossip(), LocalSGD(2)], ids=repr)
def test_another_number_of_workers_goes_on_from_the_mean_where_workers_differed(
    strategy: Strategy, tmp_path: Path
) -> None:
    def saved(comm: Comm) -> Tensor:
        run = Run(comm, strategy)
        run.train(range(SAVED))
        run.parallel.save(tmp_path, **run.parts)
        return run.parallel.worker.replicas[0].x.clone()

    def loaded(comm: Comm) -> tuple[Tensor, Tensor]:
        run = Run(comm, strategy)
        run.parallel.load(tmp_path, **run.parts)
        found = run.parallel.worker.replicas[0].x.clone()
        run.train(range(SAVED, SAVED + 4))
        return found, run.parallel.worker.replicas[0].x.clone()

    mean = torch.stack(thinwire.run_threads(2, saved)).mean(0)
    for x, after in thinwire.run_threads(3, loaded):
        torch.testing.assert_close(x, mean)
        assert after.isfinite().all() and not torch.equal(x, after)


# -- what may go wrong -------------------------------------------------------------------------------------------------


def test_a_model_that_diverged_is_saved_and_the_others_continue(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        run = Run(comm, AllReduce())
        with torch.no_grad():
            next(iter(run.parallel.array.parameters()))[1] = torch.nan
        run.train(range(SAVED))
        run.parallel.save(tmp_path, **run.parts)
        again = Run(comm, AllReduce())
        again.parallel.load(tmp_path, **again.parts)
        for each in (run, again):
            each.train(range(SAVED, STEPS))
        ours, theirs = run.everything(), again.everything()
        assert ours[1]["first.weight"].isnan().all() and theirs[1]["first.weight"].isnan().all()
        assert equal([ours[0], ours[2], ours[-1]], [theirs[0], theirs[2], theirs[-1]])

    thinwire.run_threads(2, work)


def test_a_checkpoint_needs_the_files_of_all_ranks_and_old_ones_are_removed(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        run = Run(comm, AllReduce())
        for step in range(5):
            run.train(range(step, step + 1))
            run.parallel.save(tmp_path, **run.parts, extra={"step": step + 1}, keep=2)
        comm.broadcast_(torch.zeros(1), 0).wait()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
        comm.broadcast_(torch.zeros(1), 0).wait()
        if comm.rank == 1:
            RankFile(tmp_path / "step-00000005", 1).path.unlink()
        comm.broadcast_(torch.zeros(1), 1).wait()
        assert Run(comm, AllReduce()).parallel.load(tmp_path, **run.parts) == {"step": 4}

    thinwire.run_threads(2, work)


def test_a_file_that_is_damaged_or_cannot_be_written_is_an_error_on_all_ranks_and_changes_nothing(
    tmp_path: Path,
) -> None:
    def work(comm: Comm) -> None:
        run = Run(comm, AllReduce())
        run.train(range(2))
        run.parallel.save(tmp_path, **run.parts)
        with pytest.raises(CheckpointError, match=r"rank 1.*only tensors and JSON"):
            run.parallel.save(tmp_path, **run.parts, extra={"what": object() if comm.rank else 0})
        (tensors,) = (tmp_path / "step-00000002").glob("rank-0001-*.safetensors")
        comm.broadcast_(torch.zeros(1), 0).wait()
        if comm.rank == 0:
            content = bytearray(tensors.read_bytes())
            content[len(content) // 2] ^= 1
            tensors.write_bytes(content)
        comm.broadcast_(torch.zeros(1), 0).wait()
        before = run.everything()
        with pytest.raises(CheckpointError, match=r"rank 1: .*rank-0001-.*is damaged"):
            run.parallel.load(tmp_path, **run.parts)
        assert equal(before, run.everything())

    thinwire.run_threads(2, work)


def test_other_checkpoints_are_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    def work(comm: Comm) -> None:
        run = Run(comm, AllReduce())
        run.train(range(2))
        run.parallel.save(tmp_path / "one", **run.parts)
        run.parallel.worker.save(tmp_path / "plain")
        for words, other, parts in (
            (r"the strategy is AllReduce\(\) in the checkpoint and LocalSGD", Run(comm, LocalSGD(2)), None),
            ("the strategy is .* Make them equal", Run(comm, LocalSGD(2), FACTORIES[:2]), None),
            ("the seed is 0 in the checkpoint and 5 in this run", Run(comm, AllReduce(), seed=5), None),
            ("the schedules: one for each model in the checkpoint and none", run, {}),
            ("slot 1 has a MultiStepLR .* and a StepLR", Run(comm, AllReduce(), [FACTORIES[0]] * 3), None),
        ):
            before = other.everything()
            with pytest.raises(CheckpointError, match=words):
                other.parallel.load(tmp_path / "one", **(other.parts if parts is None else parts))
            assert equal(before, other.everything())
        for folder, words in (("plain", "holds one model and no array"), ("nothing", "holds no complete checkpoint")):
            with pytest.raises(CheckpointError, match=words):
                run.parallel.load(tmp_path / folder, **run.parts)

    thinwire.run_threads(2, work)


def test_layers_that_differ_between_models_resume_too_and_their_number_cannot_change(tmp_path: Path) -> None:
    def begun(comm: Comm) -> ParallelArray:
        array = fusion.fuse(WIDE, loop=["body"])
        return attach_array(array, fusion.Adam(array.parameters(), lr=RATES[:3]), SlowMo(period=2), comm=comm)

    def work(comm: Comm) -> None:
        run, other = begun(comm), begun(comm)
        trained(run, comm.rank, range(3))
        run.save(tmp_path)
        other.load(tmp_path)
        for each in (run, other):
            trained(each, comm.rank, range(3, 6))
        pairs = [[whole(each.array, each.optimizer, index) for index in range(3)] for each in (run, other)]
        assert all(same(ours, theirs) for ours, theirs in zip(*pairs, strict=True))
        run.select([2, 0])
        with pytest.raises(CheckpointError, match="Fuse the models that are left"):
            run.load(tmp_path)

    thinwire.run_threads(2, work)


def test_the_loop_of_the_page_saves_and_resumes(tmp_path: Path) -> None:
    array = fusion.fuse([nn.Linear(6, 3) for _ in range(2)])
    optimizer = fusion.SGD(array.parameters(), lr=0.1)
    parallel = attach_array(array, optimizer, AllReduce(), comm=thinwire.run_threads(1, lambda comm: comm)[0])
    x, y = data(0, 0, torch.float32)
    array.losses(F.cross_entropy, array(x), y).sum().backward()
    optimizer.step()
    parallel.save(tmp_path, extra={"step": 1})
    kept = array.state_dict()["weight"].clone()
    optimizer.step()
    assert parallel.load(tmp_path) == {"step": 1} and torch.equal(array.state_dict()["weight"], kept)
