# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is resumed with another number of workers, and no residual is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import attach, batches, drawn, endings, steps
from tests.grids import fast_where
from tests.methods.optimizers.one_bit_runs import begun, parameters_of, taken
from tests.pool import run_processes
from tests.problems import Regression
from thinwire import (
    ADPSGD,
    AllReduce,
    AsyncLeaderSGD,
    BackupWorkers,
    Comm,
    EagerPushSum,
    LocalSGD,
    ParameterServer,
    Strategy,
    Worker,
)
from thinwire.asynchronous.quorum.log import memberships
from thinwire.core.storage.rank_file import RankFile
from thinwire.errors import CheckpointError
from thinwire.lab.runs import Settings, resolve, work
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.worker.checkpoint import facts_of, load, saved_step
from thinwire.worker.replica_state import same
from thinwire.worker.worker import internals_of

SGD = torch.optim.SGD


def saved_size(folder: Path) -> int:
    """How many workers have written the newest checkpoint."""
    return facts_of(RankFile(folder / f"step-{saved_step(folder):08d}", 0).outline())["size"]


def memory(worker: Worker) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A rank's strategy state, parameters and optimizer state."""
    moments = [x.reshape(-1).float() for s in worker.optimizer.state.values() for x in s.values() if x is not None]
    state = {name: x.clone() for name, x in worker.replicas[0].state.items()}
    return state, parameters_of(worker).clone(), torch.cat([torch.zeros(1), *moments])


@pytest.mark.parametrize(("before", "after"), fast_where(lambda each: each != (7, 9), [(2, 3), (3, 2), (7, 9)]))
def test_backup_workers_keep_their_log(before: int, after: int, tmp_path: Path) -> None:
    def body(comm: Comm, resume: bool) -> list[tuple[int, ...]]:
        problem = Regression(9, 40, torch.float32)
        worker = begun(comm, BackupWorkers(backups=1), problem.model(), SGD, lr=0.02)
        if resume:
            load(internals_of(worker), tmp_path)
        # A late worker leaves out steps.
        while worker.step < (6 if resume else 3):
            taken(worker, problem, worker.step, worker.step + 1)
        worker.save(tmp_path)
        found = list(memberships(worker.replicas[0]))
        worker.detach()
        return found

    first = thinwire.run_threads(before, lambda comm: body(comm, False), timeout=20)[0]
    for log in thinwire.run_threads(after, lambda comm: body(comm, True), timeout=20):
        assert log[: len(first)] == [tuple(rank for rank in members if rank < after) for members in first]
        assert len(log) > len(first)


@pytest.mark.parametrize("kind", ["table", "setting"])
def test_what_has_no_mean_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    def body(comm: Comm, resume: bool) -> None:
        model = Regression(4, 40, torch.float32).model()
        worker = begun(comm, LocalSGD(100), model, SGD, lr=0.02, momentum=0.9)
        taken(worker, Regression(4, 40, torch.float32), 0, 2)
        state = next(iter(worker.optimizer.state.values()))
        state["table"] = torch.full((77, 3), float(comm.rank if kind == "table" else 0))
        worker.optimizer.param_groups[0]["lr"] = 0.02 + (0.01 * comm.rank if kind == "setting" else 0)
        if not resume:
            worker.save(tmp_path)
            return
        before = memory(worker)
        words = "'table' of .* has no mean" if kind == "table" else "lr of group 0 differs between workers"
        with pytest.raises(CheckpointError, match=words):
            worker.load(tmp_path)
        assert same(before, memory(worker))

    thinwire.run_threads(2, lambda comm: body(comm, False), timeout=20)
    thinwire.run_threads(3, lambda comm: body(comm, True), timeout=20)


class Small(nn.Module):
    """Parameters of several elements, of one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


def of_single_numbers(size: int, folder: Path, kind: Any, resume: bool) -> list[tuple[Worker, dict[str, Tensor]]]:
    """Workers of their own, and what their optimizers keep; each has counted as many more steps as its rank says."""

    def body(comm: Comm) -> tuple[Worker, dict[str, Tensor]]:
        model = drawn(Small())
        worker = attach(comm, LocalSGD(100), model=model, optimizer=lambda model: kind(model.parameters(), lr=0.02))
        if resume:
            load(internals_of(worker), folder)
        else:
            steps(worker, batches(comm.rank, 2))
            for state in worker.optimizer.state.values():
                if "step" in state:
                    state["step"] += comm.rank
            for group in worker.optimizer.param_groups:
                if "step" in group:
                    group["step"] += comm.rank
            worker.save(folder)
        worker.detach()
        own = {
            f"{name} {key}": x for name, p in model.named_parameters() for key, x in worker.optimizer.state[p].items()
        }
        return worker, own

    return thinwire.run_threads(size, body, timeout=20)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lamb])
def test_moments_of_single_numbers_are_means_and_steps_the_most(kind: Any, tmp_path: Path) -> None:
    two = of_single_numbers(2, tmp_path, kind, resume=False)
    expected = {
        name: torch.stack([own[name] for _, own in two]).amax(0)
        if name.endswith("step")
        else torch.stack([own[name].double() for _, own in two]).mean(0).float()
        for name in two[0][1]
    }
    assert not any(torch.equal(two[0][1][name], two[1][1][name]) for name in expected)
    for worker, own in of_single_numbers(3, tmp_path, kind, resume=True):
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], x) for name, x in expected.items())
        assert worker.optimizer.param_groups[0].get("step", 3) == 3


MAILBOXES: list[Strategy] = [EagerPushSum(), ADPSGD(), ParameterServer(), BackupWorkers(), AsyncLeaderSGD(4)]


def in_turn(folder: str, strategies: list[Strategy], resume: bool) -> list[bool]:
    """One process: train a little under each strategy, after loading what other processes saved."""
    problem = Regression(4, 40, torch.float32)
    found: list[bool] = []
    for i, strategy in enumerate(strategies):
        worker = begun(None, strategy, problem.model(), SGD, lr=0.02)
        if resume:
            load(internals_of(worker), Path(folder) / str(i))
        first = worker.step
        while worker.step < first + 3:
            worker.optimizer.zero_grad()
            loss = problem.loss(worker.model, worker.comm.rank, worker.step)
            loss.backward()
            worker.record_batch(loss=loss)
            worker.optimizer.step()
        with worker.consensus() as model:
            agreed = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        rows = worker.comm.all_gather(agreed).wait()
        found.append(first == 3 * resume and all(torch.equal(row, rows[0]) for row in rows))
        worker.save(Path(folder) / str(i))
        worker.detach()
    return found


@pytest.mark.slow
def test_processes_with_mailboxes_go_on_with_more_of_them(tmp_path: Path) -> None:
    for size, resume in ((2, False), (4, True)):
        assert run_processes(size, in_turn, str(tmp_path), MAILBOXES, resume) == [[True] * len(MAILBOXES)] * size


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    thinwire.run_threads(4, lambda comm: steps(attach(comm, AllReduce()), batches(comm.rank, 2)).save(tmp_path))
    (tmp_path / "step-00000002" / "rank-0003.json").unlink()
    for text in endings(2, lambda comm: attach(comm, AllReduce()).load(tmp_path)):
        assert "holds no complete checkpoint for ranks 0, 1" in text
        assert "or all parts if another number of workers wrote it" in text


def trained(folder: Path, fields: dict[str, Any], resume: bool) -> Any:
    return work(Settings.from_json(fields), folder, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4)])
def test_runs_are_resumed_with_fewer_workers_and_with_more(sizes: tuple[int, ...], tmp_path: Path) -> None:
    asked = {"task": "digits", "model": "mlp", "strategy": "CompressedMomentum(warmup_steps=4)", "batch_size": 4}
    more = {"optimizer": "onebit-lamb", "lr": 0.02, "save_every": 6, "eval_every": 6}
    for i, workers in enumerate(sizes):
        settings = resolve({**asked, **more, "steps": 6 * (i + 1), "workers": workers})
        summary = run_processes(workers, trained, tmp_path, settings.to_json(), i > 0)[0]
        assert summary["steps"] == 6 * (i + 1)
        assert saved_size(tmp_path / "checkpoints") == workers


def diverged(size: int, folder: Path, load_it: bool) -> list[Tensor]:
    """Workers that each have a NaN in their momentum."""

    def body(comm: Comm) -> Tensor:
        worker = begun(comm, AllReduce(), Regression(4, 40, torch.float32).model(), SGD, lr=0.02, momentum=0.9)
        if load_it:
            load(internals_of(worker), folder)
            return memory(worker)[2]
        taken(worker, Regression(4, 40, torch.float32), 0, 2)
        next(iter(worker.optimizer.state.values()))["momentum_buffer"].view(-1)[0] = torch.nan
        worker.save(folder)
        return memory(worker)[2]

    return thinwire.run_threads(size, body, timeout=20)


def test_nan_on_every_worker_counts_as_equal(tmp_path: Path) -> None:
    before, after = diverged(2, tmp_path, False)[0], diverged(3, tmp_path, True)
    assert before.isnan().sum() == 1
    assert all(torch.equal(each.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0)) for each in after)


def test_trees_are_the_same_where_numbers_are_equal_or_both_are_nan() -> None:
    nan = float("nan")
    tree = {"a": torch.tensor([1.0, nan]), "b": [nan, (2, "c")], "d": torch.tensor(3)}
    assert same(tree, {"a": torch.tensor([1.0, nan]), "b": [nan, (2, "c")], "d": torch.tensor(3)})
    for name, other in (("a", torch.tensor([nan, 1.0])), ("a", torch.tensor([1.0, 1.0])), ("b", [1.0, (2, "c")])):
        assert not same(tree, {**tree, name: other})
    assert not same(tree, {**tree, "d": torch.tensor(4)}) and not same(tree, {**tree, "d": torch.tensor(3.0)})
