# SPDX-License-Identifier: Apache-2.0
"""Runs whose rounds close without late workers are stopped, and continue from checkpoints as if they had not been."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import Process
from tests.elastic.test_late import LONG, PERIOD, RATE, START, Model, arrivals, gradient, name_of, nesterov, samples
from tests.oracles.late import train
from thinwire import (
    CheckpointError,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LateMerging,
    LocalSGD,
    Nearest,
    RandomK,
    Strategy,
    attach,
    run_threads,
)
from thinwire.cli import main
from thinwire.core.storage.bucket import KEY, new_key
from thinwire.elastic.closing import Closing
from thinwire.elastic.late_rounds import LateRounds
from thinwire.lab.runs.exporting import export_checkpoint


@dataclass
class End:
    """What a worker has in the end: its name, the round, the parameters, and the closings that it has applied."""

    name: int
    round: int
    x: Tensor
    closings: list[Closing]
    extra: dict[str, Any]
    sizes: dict[str, int]


def work_all(
    size: int,
    strategy: Strategy,
    late: LateMerging,
    until: Callable[[int, int, int], bool],
    *,
    folder: Path | None = None,
    saves: Callable[[int, int], bool] = lambda name, own: False,
    load: bool = False,
    pause: Callable[[int, int], float] = lambda name, own: 0.0,
    leaves: Mapping[int, int] | None = None,
    url: str = "",
) -> list[End]:
    """Train threads over a bucket; each ends when `until(name, its steps, worker.step)` is true, and saves then.

    Args:
        size: the workers.
        strategy: the recipe.
        late: the rule.
        until: when a worker ends.
        folder: where all workers save, and load.
        saves: whether a worker also saves after this many steps of its own.
        load: whether to load first.
        pause: seconds before a step.
        leaves: after how many own steps a worker leaves the run.
        url: of the run.
    """
    url, left = url or f"memory://{secrets.token_hex(8)}", threading.Event()

    def work(_: int) -> End:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with attach(model, optimizer, strategy, timeout=30, rendezvous=url, workers=size, elastic=late) as worker:
            assert isinstance(worker.elastic, LateRounds)
            name, extra = int(name_of(worker)), dict[str, Any]()
            if load:
                assert folder is not None
                extra = worker.load(folder)
            own = int(extra.get("own", {}).get(str(name), 0))
            while not until(name, own, worker.step):
                model.x.grad = gradient(name, own, model.x.detach())
                worker.record_batch(samples(name))
                time.sleep(pause(name, own))
                if leaves and name not in leaves and own in leaves.values():
                    assert left.wait(30)
                    while worker.elastic._look():  # both of its contributions have arrived
                        pass
                optimizer.step()
                own += 1
                if leaves and leaves.get(name) == own:
                    worker.elastic.release({worker.elastic.worker_id: "SIGTERM"})
                    left.set()
                    return End(name, -1, model.x.detach().clone(), worker.elastic.closings, extra, {})
                if folder is not None and saves(name, own):
                    worker.save(folder, extra={"own": {str(name): own}})
            if folder is not None:
                worker.save(folder, extra={"own": {str(name): own}})
            with worker.consensus():
                x = model.x.detach().clone()
            return End(name, worker.elastic.view.epoch, x, worker.elastic.closings, extra, {"worker": worker.size})

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def log_of(*ends: list[End]) -> tuple[Closing, ...]:
    """The log of a run, of which each worker knows a part."""
    found: dict[int, Closing] = {}
    for each in (each for part in ends for each in part):
        for closing in each.closings:
            assert found.setdefault(closing.round, closing) == closing  # one closing of each round
    assert sorted(found) == list(range(len(found)))
    return tuple(found[number] for number in range(len(found)))


def stopped_by(slow: int, period: int) -> Callable[[int, int, int], bool]:
    """All end as soon as one is at least a round ahead of a slow worker that is in the middle of its own."""
    stop, at = threading.Event(), dict[int, tuple[int, int]]()

    def until(name: int, own: int, step: int) -> bool:
        at[name] = own, step
        behind, late_step = at.get(slow, (0, 0))
        if step > 4 * period and step // period > late_step // period and behind % period == 1:
            stop.set()
        return stop.is_set()

    return until


CASES = [
    (2, 1, None, 0, "off"),
    (3, 1, ErrorFeedback(Nearest(bits=8)), 0, "off"),
    (3, 1, RandomK(fraction=0.25), 1, "full"),
    (2, 3, ErrorFeedback(Nearest(bits=8)), 1, "adaptive"),
    (3, 2, ErrorFeedback(Nearest(bits=8)), 0, "off"),
]


@pytest.mark.parametrize(("size", "fragments", "codec", "delay", "carry"), CASES)
def test_a_loaded_run_equals_one_that_was_not_stopped(
    size: int, fragments: int, codec: Any, delay: int, carry: Any, tmp_path: Path
) -> None:
    period = PERIOD if fragments == 1 else LONG
    strategy = DiLoCo(period=period, fragments=fragments)
    late = LateMerging(quorum=0.5, deviations=0.0, codec=codec, delay=delay, carry=carry)
    # The last worker is slow, so that it is in the middle of an earlier round when the others stop.
    pause = lambda name, own: 0.03 if name == size - 1 else 0.003  # noqa: E731
    before = work_all(size, strategy, late, stopped_by(size - 1, period), folder=tmp_path, pause=pause)
    stop = max(each.round for each in before)
    # Far enough for the slow worker to end its round.
    ends = lambda name, own, step: step >= (stop // fragments + 8) * period  # noqa: E731
    pause = lambda name, own: 0.03 if name == size - 1 else 0.01  # noqa: E731
    after = work_all(size, strategy, late, ends, folder=tmp_path, load=True, pause=pause)
    log = log_of(before, after)
    across = [each for closing in log[stop:] for each in closing.contributions if each.started < stop]
    assert across  # work that was started before the stop counts after it
    taken = [(each.worker, each.started) for closing in log for each in closing.contributions]
    assert len(set(taken)) == len(taken)
    whole = replace(late, replay=log)
    again = work_all(size, strategy, whole, ends)
    by_round = {each.round: each.x for each in again}
    assert any(each.round in by_round for each in after)
    for each in after:
        if each.round in by_round:
            assert torch.equal(each.x, by_round[each.round])


def test_a_loaded_run_equals_the_oracle(tmp_path: Path) -> None:
    strategy, late = DiLoCo(period=PERIOD), LateMerging(quorum=0.5, deviations=0.0)
    pause = lambda name, own: 0.03 if name == 2 else 0.003  # noqa: E731
    before = work_all(3, strategy, late, stopped_by(2, PERIOD), folder=tmp_path, pause=pause)
    stop = max(each.round for each in before)
    ends = lambda name, own, step: step >= (stop + 3) * PERIOD  # noqa: E731
    after = work_all(3, strategy, late, ends, folder=tmp_path, load=True, pause=pause)
    log = log_of(before, after)
    for each in after:
        expected = train(
            gradient,
            START,
            arrivals(log[: each.round]),
            samples=samples,
            rate=RATE,
            outer=nesterov(),
            exponent=0.5,
        )
        assert torch.allclose(each.x, expected, atol=1e-10)


def test_more_workers_start_at_the_newest_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy, late = DiLoCo(period=PERIOD), LateMerging(quorum=1.0)
    before = work_all(2, strategy, late, lambda name, own, step: step >= PERIOD + 2, folder=tmp_path)
    after = work_all(3, strategy, late, lambda name, own, step: step >= 3 * PERIOD, folder=tmp_path, load=True)
    log = log_of(before, after)
    assert [each.worker for each in log[1].contributions] == ["0", "1", "2"]
    expected = train(gradient, START, arrivals(log), samples=samples, rate=RATE, outer=nesterov(), exponent=0.5)
    for each in after:
        assert torch.allclose(each.x, expected, atol=1e-10)
    assert sum("worker 2 starts at the parameters of round 1" in each.message for each in caplog.records) == 1


def test_fewer_workers_drop_an_unfinished_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy, late = DiLoCo(period=PERIOD), LateMerging(quorum=1.0)
    before = work_all(3, strategy, late, lambda name, own, step: step >= PERIOD + 2, folder=tmp_path)
    after = work_all(2, strategy, late, lambda name, own, step: step >= 3 * PERIOD, folder=tmp_path, load=True)
    log = log_of(before, after)
    assert [each.worker for each in log[1].contributions] == ["0", "1"]
    expected = train(gradient, START, arrivals(log), samples=samples, rate=RATE, outer=nesterov(), exponent=0.5)
    for each in after:
        assert torch.allclose(each.x, expected, atol=1e-10)
    assert any("the checkpoint of worker 2 is not continued" in x.message for x in caplog.records)


def test_work_of_a_worker_that_has_left_counts_after_the_stop(tmp_path: Path) -> None:
    # Worker 2 hands over both fragments in the round of the first; that of the second waits for its own round.
    strategy, late = DiLoCo(period=4, fragments=2), LateMerging(quorum=1.0, codec=RandomK(fraction=0.5))
    ends = lambda name, own, step: step >= 12  # noqa: E731
    whole = work_all(3, strategy, late, ends, leaves={2: 5})
    before = work_all(3, strategy, late, lambda name, own, step: step >= 6, folder=tmp_path, leaves={2: 5})
    after = work_all(2, strategy, late, ends, folder=tmp_path, load=True)
    taken = [[(each.started, each.worker[0]) for each in closing.contributions] for closing in log_of(before, after)]
    assert taken == [[(each.started, each.worker) for each in closing.contributions] for closing in log_of(whole)]
    assert (3, "2") in taken[3] and not any((3, "2") in each for each in taken[:3])
    found = next(each.x for each in whole if each.round == 6)
    for each in after:
        assert each.round == 6 and torch.equal(each.x, found)


def test_a_checkpoint_that_is_older_than_taken_work_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, late = DiLoCo(period=PERIOD), LateMerging(quorum=1.0)
    whole = work_all(2, strategy, late, lambda name, own, step: step >= 5 * PERIOD)
    work_all(
        2,
        strategy,
        late,
        lambda name, own, step: step >= 3 * PERIOD,
        folder=tmp_path,
        saves=lambda name, own: name == 1 and own == PERIOD + 1,
    )
    shutil.rmtree(tmp_path / "worker-0001" / f"step-{3 * PERIOD:08d}")  # as if it had been killed before
    after = work_all(2, strategy, late, lambda name, own, step: step >= 3 * PERIOD, folder=tmp_path, load=True)
    # Worker 1 has the round of worker 0, and none of its contributions is sent a second time.
    assert {each.round for each in after} == {3} and after[0].closings == after[1].closings == []
    assert sum("the checkpoint of worker 1 is older" in each.message for each in caplog.records) == 1
    states = [
        json.loads((tmp_path / f"worker-000{n}" / "step-00000012" / "rank-0000.json").read_text()) for n in (0, 1)
    ]
    assert [state["tree"]["late"]["round"] for state in states] == [3, 3]
    done = work_all(2, strategy, late, lambda name, own, step: step >= 5 * PERIOD, folder=tmp_path, load=True)
    taken = [(each.worker, each.started) for closing in done[0].closings for each in closing.contributions]
    assert taken == [("0", 3), ("1", 3), ("0", 4), ("1", 4)]
    assert whole[0].round == done[0].round


def test_a_worker_that_joins_keeps_the_state_of_the_run_and_gets_the_extra(tmp_path: Path) -> None:
    strategy, late = LocalSGD(period=PERIOD), LateMerging(quorum=0.5)
    work_all(2, strategy, late, lambda name, own, step: step >= PERIOD, folder=tmp_path)
    url, joined = f"memory://{secrets.token_hex(8)}", threading.Event()

    def join() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        settings = {"rendezvous": url, "workers": 2, "elastic": late}
        with attach(model, optimizer, strategy, timeout=30, **settings) as worker:
            step = worker.step
            assert "own" in worker.load(tmp_path) and worker.step == step > PERIOD
        joined.set()

    thread = threading.Thread(target=join)

    def until(name: int, own: int, step: int) -> bool:
        if name == 0 and step == 2 * PERIOD and not thread.is_alive() and not joined.is_set():
            thread.start()
        return joined.is_set()

    work_all(2, strategy, late, until, folder=tmp_path, load=True, url=url, pause=lambda name, own: 0.005)
    thread.join()
    assert joined.is_set()


def train_process(outbox: Any, settings: dict[str, Any], folder: Path, stop: Path, steps: int) -> None:
    """Load, train until a file exists or to a step, and save; reports the round, the parameters and the closings."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    worker = attach(model, optimizer, DiLoCo(period=PERIOD), timeout=40, **settings)
    assert isinstance(worker.elastic, LateRounds)
    own = int(worker.load(folder, missing_ok=True).get("own", 0))
    name = int(name_of(worker))
    outbox.send((name, worker.step))
    while worker.step < steps and not stop.exists():
        model.x.grad = gradient(name, own, model.x.detach())
        worker.record_batch(samples(name))
        time.sleep(0.05 if name == 1 else 0.005)
        optimizer.step()
        own += 1
    worker.save(folder, extra={"own": own})
    with worker.consensus():
        outbox.send((worker.elastic.view.epoch, model.x.tolist(), [x.content() for x in worker.elastic.closings]))
    worker.detach()


@pytest.mark.slow
def test_processes_save_into_one_folder_and_continue_from_it(tmp_path: Path) -> None:
    late, extra = LateMerging(quorum=0.5, deviations=0.0), {KEY: new_key()}
    closed, points = dict[int, Any](), dict[int, Any]()
    for run, steps in ((0, 1_000_000), (1, 12 * PERIOD)):
        settings = {"rendezvous": f"file://{tmp_path}/run{run}", "workers": 2, "elastic": late}
        stop = tmp_path / f"stop{run}"
        workers = [Process(train_process, settings, tmp_path / "saved", stop, steps, extra=extra) for _ in range(2)]
        try:
            starts = [worker.receive(60) for worker in workers]
            assert sorted(name for name, _ in starts) == [0, 1] and all(step > 0 for _, step in starts) == bool(run)
            if not run:
                time.sleep(0.4)
                stop.touch()
            for worker in workers:
                end, x, log = worker.receive(60)
                first = end - len(log)
                assert points.setdefault(end, x) == x
                for number, closing in enumerate(log, first):
                    assert closed.setdefault(number, closing) == closing
        finally:
            for worker in workers:
                worker.process.kill()
                worker.end()
        assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == [f"worker-000{n}" for n in range(2)]
    log = tuple(Closing.read(number, closed[number]) for number in range(len(closed)))
    assert len(log) >= 12 and any(each.age(closing.round) for closing in log for each in closing.contributions)
    for end, x in points.items():
        expected = train(
            gradient, START, arrivals(log[:end]), samples=samples, rate=RATE, outer=nesterov(), exponent=0.5
        )
        assert torch.allclose(torch.tensor(x, dtype=torch.float64), expected, atol=1e-10)


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_common_parameters_of_the_newest_round_are_exported(fragments: int, tmp_path: Path) -> None:
    period = PERIOD if fragments == 1 else LONG
    late, folder = LateMerging(quorum=0.5, deviations=0.0), tmp_path / "run" / "checkpoints"
    pause = lambda name, own: 0.03 if name == 1 else 0.003  # noqa: E731
    strategy = DiLoCo(period=period, fragments=fragments)
    ends = work_all(2, strategy, late, stopped_by(1, period), folder=folder, pause=pause)
    newest = max(ends, key=lambda each: each.round)
    for source in (tmp_path / "run", folder):
        assert main(["export", str(source), str(tmp_path / "model.safetensors")]) == 0
        assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], newest.x)
    for number, each in enumerate(ends):  # in the order of the threads, which is not that of the names
        (file,) = (folder / f"worker-{each.name:04d}").iterdir()
        export_checkpoint(file, tmp_path / f"{number}.safetensors")
        assert torch.equal(load_file(tmp_path / f"{number}.safetensors")["x"], each.x)


# -- what is refused ---------------------------------------------------------------------------------------------------


def errors_of(size: int, folder: Path, late: LateMerging, strategy: Strategy) -> list[str]:
    """Load on all workers; return the errors, and check that nothing has changed."""
    url = f"memory://{secrets.token_hex(8)}"

    def work(_: int) -> str:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with attach(model, optimizer, strategy, timeout=30, rendezvous=url, workers=size, elastic=late) as worker:
            with pytest.raises(CheckpointError) as refused:
                worker.load(folder)
            assert torch.equal(model.x.detach(), START) and worker.step == 0
            return str(refused.value)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def test_damaged_and_other_checkpoints_are_refused_on_all_workers(tmp_path: Path) -> None:
    late = LateMerging(quorum=1.0, codec=ErrorFeedback(Nearest(bits=8)))
    assert all("no worker finds a checkpoint" in each for each in errors_of(2, tmp_path, late, DiLoCo(period=PERIOD)))
    work_all(2, DiLoCo(period=PERIOD), late, lambda name, own, step: step >= PERIOD + 1, folder=tmp_path)
    for other, strategy, words in (
        (replace(late, codec=None), DiLoCo(period=PERIOD), "Use the same options of LateMerging"),
        (late, DiLoCo(period=PERIOD + 1), "the strategy is DiLoCo"),
    ):
        found = errors_of(2, tmp_path, other, strategy)
        assert len(set(found)) == 1 and words in found[0]
    (file,) = (tmp_path / "worker-0001" / f"step-{PERIOD + 1:08d}").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    found = errors_of(2, tmp_path, late, DiLoCo(period=PERIOD))
    assert len(set(found)) == 1 and found[0].startswith("worker 1: ") and "is damaged" in found[0]


def test_a_state_dict_without_the_rounds_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    url = f"memory://{secrets.token_hex(8)}"
    with attach(model, optimizer, DiLoCo(period=4), rendezvous=url, elastic=LateMerging()) as worker:
        with pytest.raises(ConfigError, match=r"state_dict\(\) with elastic=LateMerging\(\): .* Use save\(\) and load"):
            worker.state_dict(model=True, optimizer=True)
        with pytest.raises(ConfigError, match=r"load_state_dict\(\) with elastic=LateMerging\(\)"):
            worker.load_state_dict({})


def test_checkpoints_of_another_kind_of_run_are_refused_on_all_workers(tmp_path: Path) -> None:
    strategy, late = DiLoCo(period=PERIOD), LateMerging(quorum=1.0)
    work_all(2, strategy, late, lambda name, own, step: step >= PERIOD, folder=tmp_path / "late")

    def plain(comm: Comm) -> list[str]:
        model, told = Model(), list[str]()
        worker = attach(model, torch.optim.SGD(model.parameters(), lr=RATE), strategy, comm=comm)
        calls = [lambda: worker.load(tmp_path / "late", missing_ok=True), lambda: worker.save(tmp_path / "late")]
        if comm.size == 1:
            calls.append(lambda: worker.load(tmp_path / "late" / "worker-0001"))
        for call in calls:
            with pytest.raises(CheckpointError) as refused:
                call()
            told.append(str(refused.value))
        assert torch.equal(model.x.detach(), START)
        worker.save(tmp_path / f"plain{comm.size}")
        return told

    first, second = run_threads(2, plain)
    assert first == second and all("late holds worker-0000, which a run with LateMerging" in each for each in first)
    assert "is of one worker with LateMerging" in run_threads(1, plain)[0][2]
    found = errors_of(2, tmp_path / "plain2", late, strategy)
    assert len(set(found)) == 1 and "plain2 holds step-00000000, which a run without LateMerging" in found[0]
    found = errors_of(2, tmp_path / "late" / "worker-0001", late, strategy)
    assert len(set(found)) == 1 and "is the folder of one worker" in found[0]
    with pytest.raises(CheckpointError, match="plain2 holds step-00000000, which a run without LateMerging"):
        work_all(1, strategy, late, lambda name, own, step: step >= 1, folder=tmp_path / "plain2")
    shutil.copytree(tmp_path / "plain2" / "step-00000000", tmp_path / "late" / "step-00000000")
    assert main(["export", str(tmp_path / "late"), str(tmp_path / "model.safetensors")]) == 1


def test_loading_after_a_step_is_refused(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    url = f"memory://{secrets.token_hex(8)}"
    with attach(model, optimizer, DiLoCo(period=4), rendezvous=url, elastic=LateMerging()) as worker:
        assert worker.load(tmp_path, missing_ok=True) == {}
        model.x.grad = torch.ones_like(START)
        optimizer.step()
        with pytest.raises(ConfigError, match="Call load directly after attach"):
            worker.load(tmp_path)
