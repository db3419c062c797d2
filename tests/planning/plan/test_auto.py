# SPDX-License-Identifier: Apache-2.0
"""`attach(model, optimizer, "auto")`: one strategy on all ranks, of the links that were measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.pool import run_processes
from thinwire import AllReduce, CheckpointError, Comm, ConfigError, MismatchError
from thinwire.planning.doctor.speeds import StepTime
from thinwire.planning.plan import auto
from thinwire.planning.plan import predict as prediction
from thinwire.planning.plan.candidates import measured
from thinwire.planning.plan.search import Job, Option, Planner
from thinwire.planning.simulate import Network


def model_and_optimizer() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def attached(comm: Comm) -> str:
    model, optimizer = model_and_optimizer()
    worker = thinwire.attach(model, optimizer, "auto", comm=comm)
    model(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    return repr(worker.strategy)


def watched(comm: Comm, seconds: float) -> tuple[str, str]:
    """Attaches by "auto", and trains sixty steps of so many seconds; what was chosen, and what goes on."""
    now = [0.0]
    comm.runtime = replace(comm.runtime, clock=lambda: now[0])
    model, optimizer = model_and_optimizer()
    worker = thinwire.attach(model, optimizer, "auto", comm=comm)
    chosen = repr(worker.strategy)
    for _ in range(150):
        now[0] += seconds if repr(worker.strategy) == chosen else 0.9
        optimizer.zero_grad()
        model(torch.ones(2, 300)).mean().backward()
        optimizer.step()
    return chosen, repr(worker.strategy)


def on_a_process() -> str:
    model, optimizer = model_and_optimizer()
    worker = thinwire.attach(model, optimizer, "auto")
    found = repr(worker.strategy)
    worker.detach()
    return found


def step_file(
    path: Path, forward: float, backward: float, shapes: list[list[int]] | None = None, contention: float = 0.0
) -> Path:
    shapes = [[300, 300], [300]] if shapes is None else shapes
    step = StepTime("mine", shapes, "float32", 0, forward, backward, 0.0, [])
    path.write_text(json.dumps({"steps": {"0": asdict(step)}, "contention": contention, "sharing": 2.0}))
    return path


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {4 << 10: 0.01, 1 << 20: 2.0}
    real = auto.time_all_reduces

    def slow(comm: Comm, **settings: Any) -> dict[int, float]:
        real(comm, **settings)
        return times

    monkeypatch.setattr(auto, "time_all_reduces", slow)


def test_all_ranks_get_the_same_strategy() -> None:
    found = thinwire.run_threads(3, attached)
    assert len(set(found)) == 1


def test_processes_over_gloo_get_the_same_strategy() -> None:
    assert len(set(run_processes(2, on_a_process))) == 1


def test_a_slow_link_gets_what_sends_less_and_the_log_says_why(
    slow_link: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02)))
    caplog.set_level("INFO", logger="thinwire")
    (found, *others) = thinwire.run_threads(2, attached)
    assert others == [found] and found != repr(AllReduce())
    row = measured(tuned=False).of(found)
    assert row is not None and row.factor <= auto.MOST_STEPS and not row.missed
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "has chosen" in caplog.text and "from" in caplog.text and "were measured between 2 ranks" in caplog.text


def test_what_the_doctor_found_of_processors_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages beside computation are no longer free, and what strategies compute takes twice as long."""
    jobs: list[Job] = []

    class Watched(Planner):
        def options(self) -> list[Option]:
            jobs.append(self.job)
            return super().options()

    monkeypatch.setattr(auto, "Planner", Watched)
    monkeypatch.setattr(auto, "CANDIDATES", ("AllReduce()", "LocalSGD(period=4)"))
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02, contention=0.25)))
    thinwire.run_threads(2, attached)
    assert [(job.network.contention, job.sharing) for job in jobs] == [(0.25, 2.0)]


@pytest.mark.parametrize(("seconds", "kept"), [(0.8, True), (1.0, False)])
@pytest.mark.slow
def test_what_is_slower_than_all_reduce_gives_way_on_all_ranks(
    slow_link: None, seconds: float, kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An all-reduce of the gradients takes 0.7 s there: what needs less is kept, and all else measured beside it."""
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02)))
    (first, second) = thinwire.run_threads(2, lambda comm: watched(comm, seconds), timeout=30)
    assert first == second
    chosen, goes_on = first
    assert chosen != repr(AllReduce())
    assert goes_on == (chosen if kept else repr(AllReduce()))


def test_of_many_ranks_one_is_simulated_while_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[bool] = []
    real = prediction.simulate

    def watched(workers: int, work: object, **settings: object) -> object:
        simulated.append(bool(settings["alike"]))
        return real(workers, work, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(prediction, "simulate", watched)
    monkeypatch.setattr(auto, "CANDIDATES", ("AllReduce()", "LocalSGD(period=4)"))
    model, optimizer = model_and_optimizer()
    network = Network(bits_per_second=1e6, latency=1e-3)
    found = auto._decide(optimizer, dict(model.named_parameters()), network, 64)
    assert found["recipe"] == "LocalSGD(period=4)"
    assert simulated == [True, True]


def test_a_long_step_gets_all_reduce_on_the_same_link(
    slow_link: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 20.0, 40.0)))
    assert set(thinwire.run_threads(2, attached)) == {repr(AllReduce())}


def test_an_assumed_step_is_said_to_be_assumed(slow_link: None, caplog: pytest.LogCaptureFixture) -> None:
    thinwire.run_threads(2, attached)
    assert "which is assumed" in caplog.text and caplog.records[0].levelname == "WARNING"


def test_one_rank_alone_has_nothing_to_choose() -> None:
    assert thinwire.run_threads(1, attached) == [repr(AllReduce())]


def test_a_file_of_another_model_is_refused_on_all_ranks(
    slow_link: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 1.0, 2.0, [[7]])))
    with pytest.raises(ConfigError, match="of a model with 7 trained parameters"):
        thinwire.run_threads(2, attached)


def test_a_rank_that_does_not_ask_for_it_is_named() -> None:
    def differs(comm: Comm) -> None:
        model, optimizer = model_and_optimizer()
        thinwire.attach(model, optimizer, "auto" if comm.rank == 0 else "AllReduce()", comm=comm)

    with pytest.raises(MismatchError, match="the strategy"):
        thinwire.run_threads(2, differs)


def test_the_network_is_of_the_two_sizes() -> None:
    found = auto.network_of_all_reduces({4 << 10: 0.02, 1 << 20: 0.1}, 2)
    assert isinstance(found, Network) and found.latency == pytest.approx(0.01, rel=0.05)


@pytest.mark.slow
def test_a_run_that_chooses_anew_goes_on_with_the_strategy_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The links of the second run look fast, so that "auto" takes something else there."""
    times = {"first": {4 << 10: 0.01, 1 << 20: 2.0}, "second": {4 << 10: 1e-6, 1 << 20: 2e-6}}
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02)))

    def run(comm: Comm, which: str, steps: range, *, load: bool) -> tuple[str, str, torch.Tensor]:
        model, optimizer = model_and_optimizer()
        worker = thinwire.attach(model, optimizer, "auto", comm=comm)
        chosen = repr(worker.strategy)
        if load:
            assert worker.load(tmp_path / "saved") == {"which": "first"}
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 300), float(step + comm.rank))).square().mean().backward()
            optimizer.step()
            if step == 2 and not load:
                worker.save(tmp_path / "saved", extra={"which": which})
        return chosen, repr(worker.strategy), torch.cat([p.detach().flatten() for p in model.parameters()])

    def links(which: str) -> None:
        monkeypatch.setattr(auto, "time_all_reduces", lambda comm, **settings: times[which])  # pyright: ignore

    links("first")
    whole = thinwire.run_threads(2, lambda comm: run(comm, "first", range(6), load=False))
    links("second")
    resumed = thinwire.run_threads(2, lambda comm: run(comm, "second", range(3, 6), load=True))
    for (first, _, ends), (second, goes_on, same) in zip(whole, resumed, strict=True):
        assert first != second and goes_on == first
        assert torch.equal(ends, same)


def test_what_does_not_fit_leaves_what_was_chosen(
    slow_link: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02)))

    def save(comm: Comm) -> None:
        model, optimizer = model_and_optimizer()
        thinwire.attach(model, optimizer, "AllReduce()", comm=comm, seed=1).save(tmp_path / "saved")

    def load(comm: Comm) -> None:
        model, optimizer = model_and_optimizer()
        worker = thinwire.attach(model, optimizer, "auto", comm=comm)
        chosen = repr(worker.strategy)
        with pytest.raises(CheckpointError, match="the seed is 1 in the checkpoint and 0 in this run"):
            worker.load(tmp_path / "saved")
        assert repr(worker.strategy) == chosen != repr(AllReduce())

    thinwire.run_threads(2, save)
    thinwire.run_threads(2, load)


def test_a_guard_ends_where_somebody_else_switches(
    slow_link: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(auto.FILE, str(step_file(tmp_path / "doctor.json", 0.01, 0.02)))

    def train(comm: Comm) -> str:
        now = [0.0]
        comm.runtime = replace(comm.runtime, clock=lambda: now[0])
        model, optimizer = model_and_optimizer()
        worker = thinwire.attach(model, optimizer, "auto", comm=comm)
        for step in range(150):
            now[0] += 5.0
            optimizer.zero_grad()
            model(torch.ones(2, 300)).mean().backward()
            optimizer.step()
            if step == 4:
                worker.switch("LocalSGD(period=3)")
        return repr(worker.strategy)

    assert set(thinwire.run_threads(2, train, timeout=30)) == {repr(thinwire.LocalSGD(period=3))}
