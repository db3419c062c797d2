# SPDX-License-Identifier: Apache-2.0
"""Run a function on simulated workers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from thinwire.errors import ConfigError, PeerLostError
from thinwire.planning.simulate.alike import AlikeComm, check_alike
from thinwire.planning.simulate.comm import SimulatedComm, SimulatedGroup
from thinwire.planning.simulate.durations import Duration
from thinwire.planning.simulate.faults import Draws
from thinwire.planning.simulate.network import Network
from thinwire.planning.simulate.record import Record
from thinwire.planning.simulate.schedule import Stopped
from thinwire.planning.simulate.world import Loss, World

T = TypeVar("T")
MOST_WORKERS = 8192
_OBJECTS_PER_COLLECTION = 100_000


@dataclass
class Simulation(Generic[T]):
    """How a simulation has ended.

    Attributes:
        results: what the work returned on each rank; None where the worker has died or failed.
        failures: what the work raised, by rank, in the order in which they happened.
        died: the ranks that the network's faults have ended, and when.
        seconds: virtual time at the end.
        record: which worker has waited for which, and the steps.
        comms: each worker's, with its meter.
    """

    results: list[T | None]
    failures: dict[int, BaseException]
    died: dict[int, float]
    seconds: float
    record: Record
    comms: list[SimulatedComm]


def check_call(workers: int, network: Network, timeout: float) -> None:
    """Refuse what `simulate` cannot do, before anything is written.

    Raises:
        ConfigError: the number of workers or the timeout is out of range, or the network names a rank that there is
            not.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise ConfigError(f"workers={workers}: must be 1 to {MOST_WORKERS}")
    if not timeout > 0:
        raise ConfigError(f"timeout={timeout}: must be positive. 60 is usual")
    network.check(workers)


def simulate(
    workers: int,
    work: Callable[[SimulatedComm], T],
    *,
    network: Network | None = None,
    seed: int = 0,
    compute_time: Duration | None = None,
    timeout: float = 60.0,
    tracing: bool = False,
    alike: bool = False,
    progress: Callable[[float, int], None] | None = None,
) -> Simulation[T]:
    """Run `work(comm)` on simulated workers, and tell how it ended; failures are in what it returns.

    Args:
        workers: how many.
        work: the function that each worker runs.
        network: rates, latencies and faults; a switch with 1 Gbit/s and 0.1 ms unless given.
        seed: of all random draws of the network and of the workers; the same seed gives the same run, bit for bit.
        compute_time: how long `comm.compute()` takes, instead of the network's.
        timeout: how long one wait may last, in virtual seconds.
        tracing: whether to record intervals, in `comm.meter.intervals` and `record.computing`.
        alike: all workers do the same at the same time, so that one, rank 0, stands for all, and thousands take as long
            as one. What is returned has one result and one comm. See `AlikeComm` for what is refused.
        progress: called at each event with the virtual time, and with how many steps of single workers have ended.

    Raises:
        ConfigError: the number of workers is out of range, or the network names a rank that there is not.
        UnlikeError: one worker cannot stand for all on this network; what it finds later is among the failures.
        DeadlockError: no worker can continue.

    Example:
        A worker that dies; the others learn who it was.

        >>> import torch
        >>> from thinwire.planning.simulate import Death, Network, simulate
        >>> def work(comm):
        ...     for _ in range(10):
        ...         comm.compute(1.0)
        ...         comm.all_reduce_(torch.ones(2)).wait()
        >>> ended = simulate(3, work, network=Network(deaths=(Death(rank=1, at=2.5),)))
        >>> print(ended.failures[0])
        rank 0, step 0, all_reduce of 2 x float32: rank 1 is lost (died at 2.5 s)
    """
    network = network or Network()
    check_call(workers, network, timeout)
    if alike:
        check_alike(network, workers)
    world = World(workers, network, Draws(network, workers, seed, compute_time))
    world.record.tracing = tracing
    if progress is not None:
        steps = world.record.steps
        world.times.before_event = lambda now: progress(now, len(steps))
    group = SimulatedGroup(wires=world.wires)
    world.groups.append(group)
    kind, run_here = (AlikeComm, 1) if alike else (SimulatedComm, workers)
    comms: list[SimulatedComm] = [kind(world, group, rank, timeout=timeout) for rank in range(run_here)]
    results: list[T | None] = [None] * run_here
    failures: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        comms[rank].meter.tracing = tracing
        try:
            results[rank] = work(comms[rank])
            world.ended.add(rank)
            comms[rank].end_step()
        except Stopped:
            raise
        except BaseException as error:
            # Others must learn of any exception, or their waits would only end with the timeout.
            failures[rank] = error
            world.lose(Loss(rank, world.times.now, f"{type(error).__name__}: {error}"))

    for rank in range(run_here):
        world.times.start(rank, lambda rank=rank: body(rank))
    # A thread that computes has helpers of its own; thousands of them would not fit, and sums would depend on them.
    threads, collected = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    # A collection looks at the objects of all workers, so it runs more rarely than for those of one.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        world.times.run()
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*collected)
    died = {rank: loss.at for rank, loss in world.lost.items() if rank not in failures}
    return Simulation(results, failures, died, world.times.now, world.record, comms)


def run(
    workers: int,
    work: Callable[[SimulatedComm], T],
    *,
    network: Network | None = None,
    seed: int = 0,
    compute_time: Duration | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run `work(comm)` on simulated workers and return the results in the order of ranks, as `run_threads` does.

    Args:
        workers: how many.
        work: the function that each worker runs; its `comm` is a `SimulatedComm`.
        network: rates, latencies and faults; a switch with 1 Gbit/s and 0.1 ms unless given.
        seed: of all random draws of the network and of the workers; the same seed gives the same run, bit for bit.
        compute_time: how long `comm.compute()` takes, instead of the network's.
        timeout: how long one wait may last, in virtual seconds.

    Raises:
        Exception: the first failure of any worker; waits of the others then fail too.
        PeerLostError: a worker has died, and the others have ended without it.
        DeadlockError: no worker can continue.
        ConfigError: as `simulate`.

    Example:
        >>> import torch
        >>> from thinwire.planning import simulate
        >>> simulate.run(2, lambda comm: comm.all_reduce_(torch.tensor([comm.rank + 1])).wait().item())
        [3, 3]
    """
    ended = simulate(workers, work, network=network, seed=seed, compute_time=compute_time, timeout=timeout)
    for failure in ended.failures.values():
        raise failure
    for rank, at in ended.died.items():
        raise PeerLostError(f"rank {rank} died at {at:g} s and has no result. simulate() returns those of the others")
    return list(ended.results)  # pyright: ignore[reportReturnType]
