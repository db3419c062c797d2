# SPDX-License-Identifier: Apache-2.0
"""Real signals to real elastic workers over Gloo: one leaves with exit code 0, and the others finish."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.grids import fast_where
from tests.pool import context

STEPS = 60


def work(outbox: Connection, rank: int, size: int, store: str, recipe: str, stays: Any) -> None:
    """One worker's program."""
    os.environ |= {"THINWIRE_STORE": store, "THINWIRE_WORKERS": str(size), "THINWIRE_RANK": str(rank)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    import torch

    import thinwire
    from tests.engine import batch, momentum, net
    from thinwire.core.view import View
    from thinwire.elastic.notice import Notice
    from thinwire.methods.strategies.push_sum.mass import weight

    torch.set_num_threads(1)
    model = net(rank)
    worker = thinwire.attach(model, momentum(model), recipe, elastic=True, timeout=20)
    notice = Notice(worker, every=3)
    left, held = dict[str, str](), list[float]()

    def seen(view: View) -> None:
        left.update(view.left)
        held.append(float(weight(worker.replicas[0].state["mass"])))

    worker.elastic.on_view.append(seen)
    while worker.step < STEPS:
        x, y = batch(rank, worker.step)
        (model(x) - y).square().mean().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        if worker.step == 6:
            outbox.send("at step 6")
            stays.wait(20)  # until the signal is sent
        if notice.leave():
            raise SystemExit(0)
    notice.close()
    assert worker.elastic is not None
    outbox.send((worker.size, list(left.values()), worker.elastic.costs["lost_weight"], held))


@pytest.mark.parametrize(
    ("number", "leaver"),
    fast_where(lambda each: each[1] == 0, [(signal.SIGUSR1, 0), (signal.SIGTERM, 2)]),
    ids=["SIGUSR1 at rank 0", "SIGTERM at rank 2"],
)
def test_a_worker_that_gets_a_signal_leaves_and_the_rest_finish(number: signal.Signals, leaver: int) -> None:
    from thinwire.core.comm.rendezvous import host_store

    store = host_store("127.0.0.1", 0)
    sent = context.Event()
    pipes, processes = list[Connection](), list[Any]()
    recipe = "PushSum(staleness=1)"
    for rank in range(3):
        inbox, outbox = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(outbox, rank, 3, f"127.0.0.1:{store.port}", recipe, sent)))
        processes[-1].start()
        outbox.close()
        pipes.append(inbox)
    try:
        for pipe in pipes:
            assert pipe.poll(40) and pipe.recv() == "at step 6"
        os.kill(processes[leaver].pid, number)
        sent.set()
        ends = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != leaver and pipe.poll(40)]
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [end[:3] for end in ends] == [(2, [number.name], 0.0)] * 2
    # Right after it has gone the weights of the others add up to their number.
    assert sum(held for *_, (held,) in ends) == pytest.approx(2, rel=1e-12)
