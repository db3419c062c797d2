# SPDX-License-Identifier: Apache-2.0
"""One simulated worker that stands for all takes the time of all, and refuses what it cannot stand for."""

from __future__ import annotations

import pytest
import torch

from tests.grids import one_of_each
from tests.rules import for_each
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan.candidates import CANDIDATES
from thinwire.planning.plan.predict import ModelTime, Prediction, predict
from thinwire.planning.simulate import Network, Pair, Racks, SimulatedComm, Special, UnlikeError, simulate

SHAPES = [(500, 1000)] * 2
TIME = ModelTime(forward=0.02, backward=0.03, update=0.01)
MORE = (
    "DiLoCo(period=8, delay=3, mixing=0.5)",
    "DQSGD()",
    "PushSum(staleness=2)",
    "NoLoCo()",
    "SketchedSGD()",
    "AllReduce(codec=PowerSGD(2))",
)
# A worker of these sends to several at once, whose order matters.
UNLIKE = ("Gossip(topology=Ring())",)
ALIKE = [recipe for recipe in (*CANDIDATES, *MORE) if recipe not in UNLIKE]


def predicted(recipe: str, workers: int, *, most_workers: int, network: Network | None = None) -> Prediction:
    return predict(
        parse(recipe),
        parameters=SHAPES,
        workers=workers,
        network=network or Network(bits_per_second=1e8, latency=1e-3),
        model_time=TIME,
        most_workers=most_workers,
    )


@pytest.mark.parametrize("recipe", one_of_each(ALIKE, lambda each: each.partition("(")[0]))
@pytest.mark.slow
def test_one_for_all_takes_the_time_that_all_take_and_sends_their_bytes(recipe: str) -> None:
    one, each = predicted(recipe, 4, most_workers=1), predicted(recipe, 4, most_workers=4)
    assert one.seconds == pytest.approx(each.seconds, rel=1e-3)
    assert one.payload_bytes == pytest.approx(each.payload_bytes, rel=3e-3)


@pytest.mark.parametrize("recipe", UNLIKE)
def test_where_ranks_differ_all_are_simulated(recipe: str) -> None:
    one, each = predicted(recipe, 4, most_workers=1), predicted(recipe, 4, most_workers=4)
    assert one == each


@for_each(
    [
        Network(specials=(Special(ranks=(1,), slowdown=2.0),)),
        Network(pairs=(Pair(between=(0, 1), bits_per_second=1e6),)),
        Network(racks=Racks(size=3, bits_per_second=1e8)),
        Network(delayed=0.5),
    ]
)
def test_a_network_that_treats_ranks_differently_is_refused(network: Network) -> None:
    with pytest.raises(UnlikeError, match="simulate all of its workers"):
        simulate(4, lambda comm: comm.now, network=network, alike=True)


@pytest.mark.parametrize("recipe", ["AllReduce()", "LocalSGD(period=4)", "AllReduce(codec=Quantize(8))"])
def test_one_worker_of_even_racks_takes_as_long_as_all_of_them(recipe: str) -> None:
    racks = Network(bits_per_second=1e9, latency=1e-4, racks=Racks(size=4, bits_per_second=2e8, latency=1e-3))
    all_of_them, one = (predicted(recipe, 8, most_workers=most, network=racks).seconds for most in (8, 1))
    assert one == pytest.approx(all_of_them, rel=0.03)


def test_messages_of_workers_in_racks_are_refused() -> None:
    def work(comm: SimulatedComm) -> None:
        comm.send_recv(torch.ones(4), [1], [3]).wait()

    failure = simulate(4, work, network=Network(racks=Racks(size=2)), alike=True).failures[0]
    assert isinstance(failure, UnlikeError) and "leave a rack" in str(failure)


def test_a_slow_worker_is_not_lost_from_a_prediction() -> None:
    slow = Network(bits_per_second=1e9, specials=(Special(ranks=(3,), slowdown=3.0),))
    assert predicted("AllReduce()", 4, most_workers=1, network=slow).alone == pytest.approx(3 * TIME.seconds)


@for_each(["mailbox", "several", "broadcast"])
def test_calls_that_ranks_make_differently_are_refused(call: str) -> None:
    def work(comm: SimulatedComm) -> None:
        comm.compute(0.1)
        x = torch.ones(4)
        if call == "mailbox":
            comm.open_mailbox(comm, x)
        elif call == "several":
            comm.send_recv(x, [1, 2], [1, 2]).wait()
        else:
            comm.broadcast_(x, 0).wait()

    failure = simulate(4, work, alike=True).failures[0]
    assert isinstance(failure, UnlikeError) and "rank 0" in str(failure)


def test_values_are_those_of_workers_that_hold_the_same() -> None:
    def work(comm: SimulatedComm) -> list[float]:
        total = comm.all_reduce_(torch.tensor([2.0])).wait()
        rows = comm.all_gather(torch.tensor([3.0])).wait()
        pieces = comm.all_to_all([torch.tensor([4.0])] * comm.size, [1] * comm.size).wait()
        (message,) = comm.send_recv(torch.tensor([5.0]), [1], [3]).wait()
        return [total.item(), torch.cat(rows).sum().item(), torch.cat(pieces).sum().item(), message.item()]

    assert simulate(4, work, alike=True).results == [[8.0, 12.0, 16.0, 5.0]]


def test_four_thousand_workers_are_predicted_like_one() -> None:
    # 2 (n-1)/n times the vector, at the rate of one interface.
    few, many = (predicted("AllReduce()", n, most_workers=8).seconds for n in (64, 4096))
    latencies = 2 * (4096 - 64) * 1e-3
    assert many == pytest.approx(few * (4095 / 4096) / (63 / 64) + latencies, rel=0.02)
