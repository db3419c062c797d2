# SPDX-License-Identifier: Apache-2.0
"""torchft's scenario of a failure and a recovery (`test_diloco_mocked_failure_recovery`), with its numbers.

Two replicas, two fragments of one number each that start at 1; every gradient is 2, the inner rate 1, the outer rate 2
without momentum, a fragment every three steps. One replica fails in its first round and is started again. The one that
is left goes on with these values, and the other takes them over at the step where it comes back.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import thinwire
from thinwire import DiLoCo, OuterOptimizer
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork

STEPS = 22
# The values before each step in torchft's test_diloco_mocked_failure_recovery_0.json.
FIRST = (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67, -69, -83)
SECOND = (1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73, -75, -77)
RECIPE = DiLoCo(period=6, outer=OuterOptimizer("SGD", lr=2.0), fragments=2)


class Two(nn.Module):
    """A fragment for each of two numbers, which are sent in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, 1))
        self.second = nn.Parameter(torch.ones(1, 1))


def test_the_survivor_and_the_recovered_replica_have_the_published_values() -> None:
    network, failed = ThreadNetwork(), threading.Event()

    def replica(name: str) -> dict[int, tuple[float, float]]:
        fleet = network.fleet(name, int(name == "b"), 2)
        assert isinstance(fleet.connector, ThreadConnector)
        history: dict[int, tuple[float, float]] = {}
        try:
            if name == "again":
                assert failed.wait(20)
            model = Two()
            worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), RECIPE, elastic=fleet)
            while worker.step < STEPS:
                history[worker.step] = (model.first.item(), model.second.item())
                if name == "b" and worker.step == 2:
                    return history
                if name == "a" and worker.step == 9:
                    # The other is back before the run is over, as in the published scenario.
                    end = time.monotonic() + 20
                    while fleet.membership.requests() == 0 and time.monotonic() < end:
                        time.sleep(0.01)
                model.first.grad, model.second.grad = torch.full((1, 1), 2.0), torch.full((1, 1), 2.0)
                worker.optimizer.step()
        finally:
            fleet.connector.end()
            fleet.membership.close()
            if name == "b":
                failed.set()
        return history

    with ThreadPoolExecutor(3) as pool:
        a, b, again = pool.map(replica, ("a", "b", "again"))
    expected = dict(enumerate(zip(FIRST, SECOND, strict=True)))
    assert a == expected
    assert b == {step: expected[step] for step in range(3)}
    assert 0 < len(again) < STEPS
    assert again == {step: expected[step] for step in again}
