# SPDX-License-Identifier: Apache-2.0
"""Predicted step times: where they can be worked out by hand, and what a slow worker or an early gradient changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.grids import fast_where
from tests.pretend_gpu import GPU, pretend_gpu
from thinwire import (
    AllReduce,
    BackupWorkers,
    Bf16,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LeaderSGD,
    Local,
    LocalSGD,
    OneBit,
    OverlapLocalSGD,
    PushSum,
    Quantize,
    SlowMo,
    Strategy,
)
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan import explain
from thinwire.planning.plan.candidates import CANDIDATES, DENSE
from thinwire.planning.plan.predict import ModelTime, own_work, predict, usable_device
from thinwire.planning.simulate import Network, Special
from thinwire.planning.simulate.wires import PAYLOAD_SHARE

SHAPES = [(250, 1000)] * 4  # 4 MB in fp32
TIME = ModelTime(forward=0.02, backward=0.03, update=0.01)
FAST = Network(bits_per_second=1e15, latency=0.0)


def seconds(strategy: Strategy, network: Network, *, workers: int = 4, time: ModelTime = TIME) -> float:
    return predict(strategy, parameters=SHAPES, workers=workers, network=network, model_time=time).seconds


def transfer(nbytes: float, bits_per_second: float = 1e8) -> float:
    return 8 * nbytes / (bits_per_second * PAYLOAD_SHARE)


@pytest.mark.parametrize(
    "strategy", [Local(), AllReduce(), LocalSGD(4), PushSum(), SlowMo(), DiLoCo(period=8)], ids=str
)
def test_on_a_link_without_limits_a_step_takes_what_it_computes(strategy: Strategy) -> None:
    assert seconds(strategy, FAST) == pytest.approx(TIME.seconds, rel=1e-3)


def test_gradients_that_take_longer_than_the_backward_pass_leave_their_rest_to_be_waited_for() -> None:
    # The first of the tensors to be final is sent while the others are computed; all of them are one bucket's messages.
    found = seconds(AllReduce(), Network(bits_per_second=1e8, latency=0.0))
    whole = transfer(1.5 * 4e6)
    assert TIME.seconds + whole - TIME.backward <= found <= TIME.seconds + whole + 1e-3


def test_half_the_bytes_take_half_the_time() -> None:
    slow = Network(bits_per_second=1e7, latency=0.0)
    whole, half = (seconds(AllReduce(codec), slow) - TIME.seconds for codec in (None, Bf16()))
    assert half == pytest.approx(whole / 2, rel=0.05)


def test_averages_are_shared_among_the_steps_of_a_period() -> None:
    network = Network(bits_per_second=1e8, latency=0.0)
    assert seconds(LocalSGD(8), network) == pytest.approx(TIME.seconds + transfer(1.5 * 4e6) / 8, rel=0.01)


def test_an_average_that_overlaps_is_hidden_as_far_as_the_round_is_long() -> None:
    network = Network(bits_per_second=1e8, latency=0.0)
    assert transfer(1.5 * 4e6) > 8 * TIME.seconds
    assert seconds(OverlapLocalSGD(8), network) == pytest.approx(transfer(1.5 * 4e6) / 8, rel=0.02)
    assert seconds(OverlapLocalSGD(16), network) == pytest.approx(TIME.seconds, rel=0.01)


def test_all_wait_for_a_slow_worker_where_every_step_is_synchronous() -> None:
    network = Network(bits_per_second=1e15, latency=0.0, specials=(Special((2,), slowdown=3.0),))
    found = predict(AllReduce(), parameters=SHAPES, workers=4, network=network, model_time=TIME)
    assert found.seconds == pytest.approx(3 * TIME.seconds, rel=1e-3)
    assert found.efficiency == pytest.approx(1.0, rel=1e-3)


def test_gradients_that_are_final_late_are_sent_late() -> None:
    network = Network(bits_per_second=4e9, latency=0.0)
    early, late = (
        seconds(AllReduce(), network, time=ModelTime(0.02, 0.03, 0.01, ready))
        for ready in ((1.0, 0.1, 0.05, 0.01), (1.0, 1.0, 1.0, 1.0))
    )
    assert early < late <= TIME.seconds + transfer(1.5 * 4e6, 4e9) + 1e-4


def test_what_overlaps_is_not_free_where_messages_need_the_processor_that_computes() -> None:
    """Of what is sent while a worker waits, nothing is taken from it."""

    def slower(strategy: Strategy) -> float:
        free, crowded = (
            seconds(strategy, Network(bits_per_second=1e8, latency=0.0, contention=lost)) for lost in (0.0, 0.25)
        )
        return crowded - free

    # Rounds of a second and more, of which the transfer takes half.
    assert slower(OverlapLocalSGD(16)) == pytest.approx(0.25 * transfer(1.5 * 4e6) / 16, rel=0.1)
    assert slower(LocalSGD(16)) == pytest.approx(0.0, abs=1e-4)


def test_the_bytes_are_those_that_are_sent() -> None:
    found = predict(LocalSGD(4), parameters=SHAPES, workers=4, network=FAST, model_time=TIME)
    assert found.payload_bytes == pytest.approx(1.5 * 4e6 / 4)


@pytest.mark.parametrize("strategy", [LocalSGD(3), LocalSGD(3, codec=Quantize(4)), AllReduce(ErrorFeedback(OneBit()))])
def test_what_a_strategy_computes_itself_is_timed_on_its_own_code(strategy: Strategy) -> None:
    own = own_work(strategy, parameters=[(64, 64)], workers=3, rounds=2)
    assert len(own) == getattr(strategy, "period", 1) and all(0 <= each < 1 for each in own)


def test_of_a_large_model_a_part_is_timed_and_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, torch.device]] = []

    def steps(strategy: Strategy, shapes: list[tuple[int]], *others: Any) -> list[float]:
        timed.append((shapes[0][0], others[-1]))
        return [0.25 if isinstance(strategy, Local) else 0.75] * 8

    monkeypatch.setattr("thinwire.planning.plan.predict._timed_steps", steps)
    given: dict[str, Any] = {"parameters": [(40,), (60,)], "workers": 2, "rounds": 2}
    assert own_work(AllReduce(Bf16()), **given, most_elements=25, device="cpu") == [pytest.approx(4 * 0.5)]
    assert own_work(AllReduce(Bf16()), **given, most_elements=100) == [pytest.approx(0.5)]
    assert timed == [(size, torch.device("cpu")) for size in (25, 25, 40, 40)]


def test_what_a_strategy_computes_itself_is_timed_on_the_device_that_is_named() -> None:
    strategy = AllReduce(ErrorFeedback(OneBit()))
    with pretend_gpu():
        assert usable_device(str(GPU)) == GPU
        own = own_work(strategy, parameters=[(64, 64)], workers=3, rounds=2, device=str(GPU))
    assert len(own) == 1 and 0 <= own[0] < 5
    for wrong in ("cuda:77", "abacus"):
        with pytest.raises(ConfigError, match=f"device='{wrong}': torch cannot use it here"):
            own_work(strategy, parameters=[(64, 64)], workers=3, device=wrong)


def test_what_a_strategy_computes_itself_is_part_of_the_step() -> None:
    with_own = predict(
        LocalSGD(3), parameters=SHAPES, workers=2, network=FAST, model_time=TIME, own_seconds=[0.0, 0.0, 0.3]
    )
    assert with_own.seconds == pytest.approx(TIME.seconds + 0.1, rel=1e-3)
    assert with_own.exposed == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (lambda: ModelTime(-1.0, 0.1), "forward=-1.0"),
        (lambda: ModelTime(0.1, 0.1, ready=(0.5, 2.0)), "shares of the backward pass"),
        (
            lambda: seconds(AllReduce(), FAST, time=ModelTime(0.1, 0.1, ready=(0.5,))),
            "1 shares for 4 parameter tensors",
        ),
    ],
)
def test_times_that_cannot_be_are_refused(time: object, words: str) -> None:
    assert callable(time)
    with pytest.raises(ConfigError, match=words):
        time()


def test_a_model_in_half_precision_sends_half_the_bytes() -> None:
    models = [torch.nn.Linear(64, 64, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16)]
    whole, half = (
        predict(AllReduce(), parameters=model, workers=4, network=FAST, model_time=TIME).payload_bytes
        for model in models
    )
    assert whole == 2 * half > 0
    with pytest.raises(ConfigError, match="of 2 dtypes"):
        predict(AllReduce(), parameters=torch.nn.ModuleList(models), workers=4, network=FAST, model_time=TIME)


def test_a_strategy_that_reads_numbers_is_simulated_on_smaller_tensors_and_links() -> None:
    network = Network(bits_per_second=1e8, latency=0.0)
    assert seconds(LeaderSGD(period=4), network) == pytest.approx(seconds(LocalSGD(4), network), rel=0.25)
    found = predict(BackupWorkers(1), parameters=SHAPES, workers=4, network=FAST, model_time=TIME)
    assert found.payload_bytes == pytest.approx(4 * 1.5e6, rel=0.35)


def test_a_slow_worker_that_nobody_waits_for_costs_no_time() -> None:
    network = Network(bits_per_second=1e15, latency=0.0, specials=(Special((3,), slowdown=4.0),))
    assert seconds(BackupWorkers(1), network) < 1.5 * TIME.seconds < seconds(AllReduce(), network)


def test_memory_is_that_of_the_vectors_that_a_worker_keeps() -> None:
    found = [
        predict(each, parameters=SHAPES, workers=4, network=FAST, model_time=TIME).memory_bytes / 4e6
        for each in (Local(), AllReduce(), DiLoCo(period=8))
    ]
    assert found == [1, 2, 3]


# Beside real runs tests/planning/plan/test_ranks.py asks the same of another model.
@pytest.mark.parametrize(
    "recipe",
    fast_where(
        lambda each: each in (DENSE, "Gossip(topology=Ring())", "OverlapLocalSGD(period=8)", "DiLoCo(period=32)"),
        CANDIDATES,
    ),
)
@pytest.mark.slow
def test_predicted_bytes_are_those_of_explain_which_are_those_of_real_runs(recipe: str) -> None:
    # Pieces of a mean are whole blocks of a codec, and here as many on every worker.
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False))
    for workers in (2, 4):
        found = predict(parse(recipe), parameters=model, workers=workers, network=FAST, model_time=TIME)
        card = explain(parse(recipe), parameters=model, workers=workers)
        assert found.busiest_bytes == pytest.approx(card.sent_bytes_per_step, abs=1e-6)
