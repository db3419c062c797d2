# SPDX-License-Identifier: Apache-2.0
"""Backup workers: the first N of n count, all ranks end the step with the same bits, and none waits for late ones."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.engine import Mixed, attach, batch, batches, momentum, net, steps, threads
from tests.methods.strategies.backup_runs import MakeOptimizer, Run, adam, check_runs, loss_of, slow_last, stalls, train
from tests.pool import run_processes, start_processes
from tests.rules import for_each, refusals
from thinwire import AllReduce, Comm, ConfigError, MismatchError, Probe, SlowMo, Strategy, run_threads
from thinwire.asynchronous.backup_workers import BackupWorkers
from thinwire.asynchronous.quorum.log import memberships
from thinwire.asynchronous.quorum.participant import Participant
from thinwire.asynchronous.quorum.rounds import Round
from thinwire.elastic.sampler import ElasticSampler
from thinwire.lab.runs.defaults import resolve
from thinwire.lab.runs.launcher import launch
from thinwire.planning.plan.traffic import DryRun

# -- the method --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_is_always_late_takes_few_steps_and_ends_with_the_others() -> None:
    runs = run_threads(4, lambda comm: train(attach(comm, BackupWorkers()), 60, slow_last), timeout=20)
    assert len(runs[3].digests) < 60
    assert max(runs[3].digests) == 60
    assert sum(each["steps_missed"] for each in runs[3].metrics) == 60 - sum(3 in m for m in runs[3].log)
    assert runs[0].metrics[-1]["share_of_rank_3"] == sum(3 in m for m in runs[3].log) / 60


def test_a_late_coordinator_still_coordinates() -> None:
    strategy = BackupWorkers(coordinator=3)
    runs = run_threads(4, lambda comm: train(attach(comm, strategy), 30, slow_last), timeout=20)
    check_runs(runs, strategy, momentum)
    assert sum(3 in members for members in runs[0].log) < 30


def test_delayed_messages_change_nothing() -> None:
    def body(comm: Comm) -> Run:
        return train(attach(comm, BackupWorkers()), 10, stalls)

    check_runs(run_threads(3, body, timeout=20, delay=lambda *_: 2), BackupWorkers(), momentum)


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize(("backups", "pause"), [(1, stalls), (3, stalls), (1, slow_last)])
def test_all_ranks_hold_what_one_process_computes_from_the_log(
    make_optimizer: MakeOptimizer, backups: int, pause: Callable[[int, int], float]
) -> None:
    strategy = BackupWorkers(backups)
    runs = run_threads(
        4, lambda comm: train(attach(comm, strategy, optimizer=make_optimizer), 25, pause, clip=0.3), timeout=20
    )
    check_runs(runs, strategy, make_optimizer, clip=0.3)


def stalled() -> Run:
    return train(attach(None, BackupWorkers(), optimizer=adam), 25, stalls)


def test_all_ranks_hold_what_one_process_computes_from_the_log_on_processes() -> None:
    check_runs(run_processes(4, stalled), BackupWorkers(), adam)


def test_a_number_of_members_chosen_from_times_is_the_divisor() -> None:
    strategy = BackupWorkers(2, "deadline")

    def body(comm: Comm) -> Run:
        return train(attach(comm, strategy, optimizer=adam), 30, lambda rank, _: 0.04 if rank == 3 else 0.004)

    runs = run_threads(4, body, timeout=20)
    check_runs(runs, strategy, adam)
    assert all(2 <= len(members) <= 4 for members in runs[0].log)


def test_a_run_goes_on_from_its_checkpoint_and_may_go_back(tmp_path: Path) -> None:
    strategy, folder = BackupWorkers(), str(tmp_path)

    def body(comm: Comm) -> Run:
        worker = attach(comm, strategy, optimizer=adam)
        train(worker, 8, stalls, ends=False)
        worker.save(folder)
        train(worker, 9, stalls, ends=False)
        worker.load(folder)
        assert worker.step == 8
        return train(worker, 20, stalls)

    check_runs(run_threads(4, body, timeout=20), strategy, adam)


def test_without_backups_it_is_all_reduce_to_the_bit() -> None:
    for mine, theirs in zip(threads(3, BackupWorkers(0)), threads(3, AllReduce()), strict=True):
        assert torch.equal(mine, theirs)


# -- data --------------------------------------------------------------------------------------------------------------


def test_the_data_of_a_rank_that_is_always_late_are_used() -> None:
    def body(comm: Comm) -> tuple[dict[int, int], list[tuple[int, ...]]]:
        worker = attach(comm, BackupWorkers())
        sampler, assigned = ElasticSampler(12, seed=1), dict[int, int]()
        for number in sampler.until(worker.replicas[0], 12):
            assigned[worker.step] = number
            x, y = batch(0, number)
            worker.optimizer.zero_grad()
            loss = (worker.model(x) - y).square().mean()
            time.sleep(slow_last(comm.rank, 0))
            loss.backward()
            worker.optimizer.step()
        worker.detach()
        return assigned, list(memberships(worker.replicas[0]))

    seen = run_threads(4, body, timeout=20)
    used = [seen[rank][0][step] for step, members in enumerate(seen[0][1]) for rank in members]
    assert sorted(used) == sorted(3 * list(range(12)))


# -- stopped ranks -----------------------------------------------------------------------------------------------------


def stops(folder: str, rank: int, within: bool) -> Run:
    """Rank `rank` stops at step 5, in its computation or as a member; it is continued once others are at step 30."""
    mine, advance = int(os.environ["RANK"]), Participant._advance

    def stop() -> None:
        Path(folder, "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_within(self: Participant, current: Round) -> None:
        if current.step >= 5 and current.reduction is not None and not Path(folder, "stopped").exists():
            stop()
        advance(self, current)

    def pause(rank_now: int, step: int) -> float:
        if mine == rank and not within and step == 5:
            stop()
        if step == 30 and mine != rank:
            Path(folder, "far").touch()
        return 0.002

    if mine == rank and within:
        Participant._advance = stop_within  # type: ignore[method-assign]
    try:
        return train(attach(None, BackupWorkers()), 40, pause)
    finally:
        Participant._advance = advance  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("within", [False, True])
def test_a_stopped_process_holds_up_nobody_and_catches_up(within: bool, tmp_path: Path) -> None:
    workers = start_processes(4, stops, str(tmp_path), 2, within)
    deadline = time.monotonic() + 40
    try:
        while not (tmp_path / "far").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / "stopped").exists()
        assert (tmp_path / "far").exists(), "the others did not go on"
    finally:
        os.kill(workers[2].process.pid or 0, signal.SIGCONT)
        for worker in workers:
            worker.finish(deadline)
    assert not [worker.error for worker in workers if worker.error]
    check_runs([worker.result for worker in workers], BackupWorkers(), momentum)
    assert len(workers[2].result.digests) < 40


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_dry_run_counts_what_a_real_member_sends() -> None:
    def body(comm: Comm) -> float:
        worker = attach(comm, BackupWorkers(retry_seconds=2.0))
        before = comm.meter.payload_bytes
        train(worker, 4, lambda rank, step: 0.3 if rank == 2 else 0.0, ends=False)
        sent = comm.meter.payload_bytes - before
        worker.detach()
        return sent

    sent = run_threads(3, body, timeout=20)
    dry = DryRun(BackupWorkers(), [15, 5, 10, 2], workers=3, rank=1, dtype=torch.float32, bucket_bytes=48)
    # The rest is one state of 4,128 bytes, from one of the members to the late rank.
    assert {sent[1] - 4 * dry.step().sent} <= {0, 4128}
    assert sent[2] < 500


@pytest.mark.parametrize(("size", "backups"), [(4, 1), (8, 2)])
def test_explaining_counts_a_mean_among_members(size: int, backups: int) -> None:
    numel, members = 3_000_000, size - backups
    dry = DryRun(BackupWorkers(backups), [numel], workers=size, rank=1, dtype=torch.float32, bucket_bytes=1 << 20)
    assert dry.step().sent == pytest.approx(2 * (members - 1) / members * 4 * numel, rel=1e-3)


# -- what cannot be ----------------------------------------------------------------------------------------------------


test_recipes_that_cannot_work_are_refused_with_the_rule = refusals(
    [
        (lambda: BackupWorkers(-1), "backups=-1: must be at least 0"),
        (lambda: BackupWorkers(deviations=-1.0), "deviations=-1.0: must be finite and not negative"),
        (lambda: BackupWorkers(retry_seconds=0.0), "retry_seconds=0.0: must be positive"),
        (lambda: BackupWorkers(choice="online"), "choice must be"),  # type: ignore[arg-type]
        (lambda: BackupWorkers(coordinator=-1), "coordinator=-1: must be a rank"),
        (
            lambda: BackupWorkers().check(1),
            "backups=1: must be at most 0: at least 1 of 1 workers must be awaited",
        ),
        (
            lambda: BackupWorkers(5).check(4),
            "backups=5: must be at most 3: at least 1 of 4 workers must be awaited",
        ),
        (lambda: BackupWorkers(coordinator=4).check(4), r"coordinator=4: must be a rank, 0\.\.3"),
    ]
)


def test_parameters_of_two_kinds_are_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="parameters have 2 pairs of dtype and device"):
        run_threads(2, lambda comm: attach(comm, BackupWorkers(), model=Mixed()), timeout=10)


def test_a_second_backward_pass_is_refused_and_accumulation_is_not() -> None:
    def body(comm: Comm) -> None:
        worker = attach(comm, BackupWorkers())
        with worker.no_sync():
            loss_of(worker.model, comm.rank, 0).backward()
        loss_of(worker.model, comm.rank, 1).backward()
        loss_of(worker.model, comm.rank, 2).backward()

    with pytest.raises(ConfigError, match=r"a second backward pass before optimizer.step"):
        run_threads(2, body, timeout=10)


def test_uneven_data_are_refused() -> None:
    def body(comm: Comm) -> None:
        worker = attach(comm, BackupWorkers())
        for _ in worker.join(batches(comm.rank, 1 + comm.rank)):
            steps(worker, [batch(comm.rank, 0)])

    with pytest.raises(ConfigError, match=r"while worker.step < steps"):
        run_threads(2, body, timeout=10)


@for_each([SlowMo(BackupWorkers(), period=5), Probe(BackupWorkers())])
def test_strategies_around_it_are_refused_before_anything_moves(around: Strategy) -> None:
    with pytest.raises(ConfigError, match="Use the base alone, or AllReduce"):
        run_threads(2, lambda comm: attach(comm, around), timeout=10)


def test_a_step_without_a_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"without a backward pass\. Call loss"):
        run_threads(2, lambda comm: attach(comm, BackupWorkers()).optimizer.step(), timeout=10)


def test_schedules_that_count_a_late_worker_s_own_steps_are_detected() -> None:
    def body(comm: Comm) -> None:
        worker = attach(comm, BackupWorkers())
        worker.optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
        steps(worker, batches(comm.rank, 1))

    with pytest.raises(MismatchError, match=r"the optimizers of ranks \d and \d have different settings"):
        run_threads(3, body, timeout=10)


def test_a_worker_that_trains_on_alone_gets_a_timeout_error() -> None:
    def body(comm: Comm) -> None:
        worker = thinwire.attach(model := net(), momentum(model), BackupWorkers(), comm=comm)
        train(worker, 2 if comm.rank else 3, ends=False)

    with pytest.raises(thinwire.CommTimeoutError, match=r"all ranks must train until the same worker.step"):
        run_threads(3, body, timeout=0.8)


# -- other loops, and whole runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"find_unused": True}, "find_unused=True: a late worker leaves out steps"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler: a late worker leaves out steps"),
    ],
)
def test_loops_that_count_on_every_step_are_refused(settings: dict[str, Any], words: str) -> None:
    def body(comm: Comm) -> None:
        attach(comm, BackupWorkers(0), **settings).detach()
        attach(comm, BackupWorkers(), **settings)

    with pytest.raises(ConfigError, match=words):
        run_threads(2, body, timeout=10)


@pytest.mark.slow
def test_a_run_with_a_slow_worker_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    settings = resolve(
        {
            "task": "digits",
            "strategy": "BackupWorkers()",
            "workers": 3,
            "steps": 60,
            "slow": "1:5x",
            "stall": "1:10ms",
            "eval_every": 30,
        }
    )
    summary = launch(settings, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "step_seconds" in row] == list(range(1, 61))
    assert sum(row["metrics"]["steps_missed"] for row in rows if "metrics" in row) > 5
    assert summary["eval_loss"] < 2.5
    spans = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert {"quorum", "mean", "compute"} <= {span["name"] for span in spans}
