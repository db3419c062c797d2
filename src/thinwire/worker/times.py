# SPDX-License-Identifier: Apache-2.0
"""Where each worker's time goes, and which worker the others wait for."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import synchronize

Cause = Literal["data", "compute", "link"]
REPORTED_COST = 0.1
"""The fraction of the others' time that a worker must cost to be named."""
_SLOWER_LINK = 2.0  # times the usual time
_LOGGED_SECONDS = 0.5
_LOGGED_ROUNDS = 2
_LOGGER = logging.getLogger("thinwire")
_BITS = 15
_CODES = 2**_BITS - 2
_SHORTEST, _LONGEST = 1e-6, 1e6
_HASH_BITS = 31


@dataclass(frozen=True)
class WorkerTimes:
    """The time of one worker between two exchanges of such figures, which travel with the messages of a round.

    Attributes:
        data_seconds: from the end of a step to the next forward pass: loading data, and other work of the loop. It is
            part of `compute_seconds` where no forward pass is seen, as in a compiled model.
        compute_seconds: forward and backward passes, the optimizer, and local work of the strategy.
        communication_seconds: blocked while messages were transferred, which takes all workers equally long.
        waiting_seconds: blocked because other workers came later.
    """

    data_seconds: float
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float

    @property
    def own_seconds(self) -> float:
        """The time in which this worker was not blocked."""
        return self.data_seconds + self.compute_seconds


@dataclass(frozen=True)
class SlowWorker:
    """A worker that costs the others time.

    Attributes:
        rank: of the worker.
        cause: what takes it longer than the others: "data", "compute" or its "link".
        cost: the fraction of the others' time that they would save if it were as fast as the slowest of them.
    """

    rank: int
    cause: Cause
    cost: float

    def __str__(self) -> str:
        """Return one sentence for logs."""
        words = {"data": "loading its data", "compute": "its computation", "link": "its link"}[self.cause]
        return f"rank {self.rank} costs the other workers {100 * self.cost:.0f} % of their time: {words} takes longer"


@dataclass(frozen=True)
class Report:
    """The report of one worker in a round.

    Attributes:
        data: seconds of `WorkerTimes.data_seconds`.
        compute: seconds of `WorkerTimes.compute_seconds`.
        blocked: seconds blocked in waits.
        sending: seconds in which its busiest connection had data to send.
        address: a hash of this worker's address; 0 if unknown.
        peer: a hash of the address at the other end of that connection.

    Example:
        >>> report = Report(data=0.25, compute=2.0, blocked=0.0, sending=1e-3, address=5, peer=6)
        >>> back = Report.unpack(report.pack())
        >>> round(back.data, 3), round(back.compute, 2), back.blocked, back.peer
        (0.25, 2.0, 0.0, 6)
    """

    data: float
    compute: float
    blocked: float
    sending: float = 0.0
    address: int = 0
    peer: int = 0

    def pack(self) -> tuple[int, int]:
        """Return two 63-bit integers; durations are rounded to 0.1 %."""
        times = 0
        for seconds in (self.data, self.compute, self.blocked, self.sending):
            times = times << _BITS | _code(seconds)
        return times, self.address << _HASH_BITS | self.peer

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Report:
        """Read what `pack` has returned."""
        times, addresses = row
        mask = 2**_BITS - 1
        seconds = [_seconds(times >> shift & mask) for shift in (3 * _BITS, 2 * _BITS, _BITS, 0)]
        return cls(*seconds, address=addresses >> _HASH_BITS, peer=addresses & (2**_HASH_BITS - 1))


def _code(seconds: float) -> int:
    if seconds <= 0:
        return 0
    place = math.log(min(max(seconds, _SHORTEST), _LONGEST) / _SHORTEST) / math.log(_LONGEST / _SHORTEST)
    return 1 + round(place * _CODES)


def _seconds(code: int) -> float:
    return _SHORTEST * (_LONGEST / _SHORTEST) ** ((code - 1) / _CODES) if code else 0.0


def split(reports: Sequence[Report]) -> tuple[WorkerTimes, ...]:
    """Divide each worker's blocked time: the worker that comes last only waits for the transfer itself."""
    transfer = min(each.blocked for each in reports)
    return tuple(WorkerTimes(each.data, each.compute, transfer, each.blocked - transfer) for each in reports)


def find_slow_worker(reports: Sequence[Report], *, may_be_late: bool = False) -> SlowWorker | None:
    """Return the worker that costs the others most; None if no worker costs them more than 10 % of their time.

    Args:
        reports: of all workers, by rank.
        may_be_late: reports are of rounds that close without late workers, so they cover different times, and a slow
            worker costs the others at most the time in which they were blocked.

    Example:
        >>> usual, slow = Report(data=0.1, compute=1.0, blocked=2.0), Report(data=2.1, compute=1.0, blocked=0.0)
        >>> print(find_slow_worker([usual, slow, usual]))
        rank 1 costs the other workers 65 % of their time: loading its data takes longer
    """
    totals = [each.data + each.compute + each.blocked for each in reports]
    wall = (min if may_be_late else max)(totals, default=0.0)
    if len(reports) < 2 or wall <= 0:
        return None
    own_work = _by_own_work(reports, wall)
    if may_be_late:
        blocked = min(each.blocked for rank, each in enumerate(reports) if rank != own_work.rank)
        own_work = replace(own_work, cost=min(own_work.cost, blocked / wall))
    found = max((own_work, _by_link(reports, wall)), key=lambda each: each.cost)
    return found if found.cost > REPORTED_COST else None


def _by_own_work(reports: Sequence[Report], wall: float) -> SlowWorker:
    own = [each.data + each.compute for each in reports]
    rank = own.index(max(own))
    others = [each for other, each in enumerate(reports) if other != rank]
    more_data = reports[rank].data - median(each.data for each in others)
    more_compute = reports[rank].compute - median(each.compute for each in others)
    cost = (own[rank] - max(each.data + each.compute for each in others)) / wall
    return SlowWorker(rank, "data" if more_data > more_compute else "compute", cost)


def _by_link(reports: Sequence[Report], wall: float) -> SlowWorker:
    """Find the worker at which the busy connections meet: its own, and those of others to it."""
    ranks = range(len(reports))
    senders: dict[int, list[int]] = {}  # the workers whose busiest connection leads to an address
    if len({each.address for each in reports}) == len(reports) > 2:
        for rank, each in enumerate(reports):
            senders.setdefault(each.peer, []).append(rank)

    def involved(rank: int) -> set[int]:
        return {rank, *senders.get(reports[rank].address, ())}

    rank = max(ranks, key=lambda rank: (sum(reports[r].sending for r in involved(rank)), reports[rank].sending))
    found = involved(rank)
    rest = [reports[r].sending for r in ranks if r not in found]
    # Of few workers all may send to this one.
    usual = max(rest) if rest else min(reports[r].sending for r in ranks if r != rank)
    longest = max(reports[r].sending for r in found)
    # Equal links differ by chance. Messages that are sent while workers compute cost nobody anything.
    excess = longest - usual if longest > _SLOWER_LINK * usual else 0.0
    return SlowWorker(rank, "link", min(excess, *(each.blocked for each in reports)) / wall)


class TimeSplit:
    """Measure where one worker's time goes, and exchange the figures with the checks at the end of rounds.

    Args:
        comm: of the worker.
        device: of the parameters.

    Attributes:
        workers: the times of all workers in the last round whose figures have arrived, by rank.
        slow_worker: the worker that cost the others most in it; None if none did.
        data_seconds: of this worker since `attach`.
        compute_seconds: of this worker since `attach`.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self.workers: tuple[WorkerTimes, ...] = ()
        self.slow_worker: SlowWorker | None = None
        self._logged: tuple[int, Cause] | None = None
        self._found = 0, 0.0  # rounds in a row, and their seconds, in which the same worker was found
        self._paused = False
        self.begin()

    def begin(self) -> None:
        """Measure from here on."""
        self.data_seconds = self.compute_seconds = 0.0
        self._apart_seconds = 0.0
        self._working = self._interrupted = False
        self._mark, self._blocked_mark = self._comm.runtime.clock(), self._comm.meter.exposed_seconds
        self._sent = 0.0, 0.0, self._blocked_mark
        self._comm.slowest_send()

    def before_forward(self, module: nn.Module, _: object) -> None:
        """The model's forward pre-hook: the first one of a step ends the time for data."""
        if torch.compiler.is_compiling() or self._working:
            return
        if not (module.training and torch.is_grad_enabled()):
            self.interrupt()
            return
        seconds = self._pass()
        if not self._interrupted:
            self.data_seconds += seconds
        self._working = True

    def interrupt(self) -> None:
        """Leave out the time up to the next forward pass: the loop evaluates or saves."""
        self._interrupted = not self._working

    @contextmanager
    def apart(self) -> Generator[None]:
        """Leave out waits of an evaluation; its checks do not end a round."""
        before, paused, self._paused = self._comm.meter.exposed_seconds, self._paused, True
        try:
            yield
        finally:
            self._paused = paused
            if not paused:
                self._apart_seconds += self._comm.meter.exposed_seconds - before
            self.interrupt()

    def end_step(self) -> None:
        """End a step, after its last message."""
        seconds = self._pass()
        if self._working or not self._interrupted:
            self.compute_seconds += seconds
        self._working = self._interrupted = False

    def _pass(self) -> float:
        """Return the seconds since the last call in which this worker was not blocked."""
        now, blocked = self._comm.runtime.clock(), self._comm.meter.exposed_seconds
        seconds = now - self._mark - (blocked - self._blocked_mark)
        self._mark, self._blocked_mark = now, blocked
        return max(0.0, seconds)

    # -- with the checks of rounds ---------------------------------------------------------------------------------

    def row(self, sends: tuple[float, int, int]) -> tuple[int, int]:
        """Return this worker's report since the last one, with the slowest of its sends."""
        if self._paused:
            return 0, 0
        if self._working:
            if self._device.type != "cpu":
                synchronize(self._device)  # what the GPU still computes is no wait; a blocking message follows
            self.compute_seconds += self._pass()
        blocked = self._comm.meter.exposed_seconds - self._apart_seconds
        now = self.data_seconds, self.compute_seconds, blocked
        data, compute, waited = (new - old for new, old in zip(now, self._sent, strict=True))
        self._sent = now
        return Report(data, compute, max(0.0, waited), *sends).pack()

    def take(self, rows: Sequence[Sequence[int]], *, late_rank: int | None = None) -> None:
        """Use the reports of all workers.

        Args:
            rows: by rank.
            late_rank: of rounds that close without late workers, the rank of this one; None for other rounds.
        """
        if self._paused:
            return
        rank = self._comm.rank if late_rank is None else late_rank
        reports = [Report.unpack(row) for row in rows]
        self.workers = split(reports)
        found = find_slow_worker(reports, may_be_late=late_rank is not None)
        before, self.slow_worker = self.slow_worker, found
        slow = self.slow_worker
        if slow is None:
            self._found = 0, 0.0
            return
        # A single round, or a short one, may be slow by chance.
        same = before is not None and (slow.rank, slow.cause) == (before.rank, before.cause)
        rounds, seconds = self._found if same else (0, 0.0)
        self._found = rounds, seconds = rounds + 1, seconds + max(each.data + each.compute for each in reports)
        lasting = rounds >= _LOGGED_ROUNDS and seconds >= _LOGGED_SECONDS
        if lasting and rank == 0 and self._logged != (slow.rank, slow.cause):
            self._logged = slow.rank, slow.cause
            _LOGGER.warning("step %d: %s", self._comm.step, slow)


@dataclass(frozen=True)
class Stats:
    """The counts of one worker since `attach`; returned by `Worker.stats`.

    Attributes:
        steps: optimizer steps that this worker has taken.
        averages: steps in which the strategy exchanged gradients or parameters: every one under `AllReduce()`, every
            eighth under `LocalSGD(period=8)`.
        payload_bytes: bytes that this worker sent for training, as `Meter.payload_bytes` counts them. The parameters
            and buffers that `attach` sends are not included.
        wait_seconds: time that training was blocked while it waited for messages, in seconds.
        evaluation_bytes: bytes that this worker sent for `consensus()`, `export()`, `save()` and `load()`.
        evaluation_wait_seconds: time blocked in these calls, in seconds.
        check_bytes: bytes of the checks that all workers make the same call at the same step, which no other figure
            includes.
        data_seconds: time from the end of each step to the next forward pass, in seconds: loading data, and other work
            of the loop. Time in which the loop evaluates or saves is not counted.
        compute_seconds: time of passes, of the optimizer and of local work of the strategy, in seconds.
        workers: the times of every worker in the last round, by rank; empty before the first round.
        slow_worker: the worker that cost the others more than 10 % of their time in that round; None if none did.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=2))
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> worker.stats().steps
        4
    """

    steps: int
    averages: int
    payload_bytes: float
    wait_seconds: float
    evaluation_bytes: float
    evaluation_wait_seconds: float
    check_bytes: float
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    workers: tuple[WorkerTimes, ...] = ()
    slow_worker: SlowWorker | None = None


class Account:
    """Counts the steps of one worker, and what its comm has sent apart from them.

    Args:
        comm: of the worker, whose meter counts everything.
        device: of the parameters.

    Attributes:
        times: where this worker's time goes.
        exchanged: whether the strategy has sent anything in the present step.
        keeps_loss: whether the recorded loss of steps with an exchange is kept.
        loss: the last of these; None if there was none, or if it was not finite.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self.times = TimeSplit(comm, device)
        self.exchanged = self.keeps_loss = False
        self.loss: float | None = None
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        meter = self._comm.meter
        self._steps = self._averages = 0
        self._begun = meter.payload_bytes, meter.exposed_seconds, meter.check_bytes
        self._apart_bytes = self._apart_seconds = 0.0
        self.times.begin()

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._averages += self.exchanged
        self.exchanged = False
        self.times.end_step()

    def keep(self, loss: Tensor | None) -> None:
        """Keep the loss of a step with an exchange, which has waited for the GPU already."""
        if self.keeps_loss and self.exchanged and loss is not None:
            found = loss.item()
            self.loss = found if math.isfinite(found) else None

    @contextmanager
    def apart(self) -> Generator[None]:
        """Count bytes and waits inside the block as evaluation."""
        meter = self._comm.meter
        sent, waited = meter.payload_bytes, meter.exposed_seconds
        try:
            with self.times.apart():
                yield
        finally:
            self._apart_bytes += meter.payload_bytes - sent
            self._apart_seconds += meter.exposed_seconds - waited

    def stats(self) -> Stats:
        """Return the figures so far."""
        meter, (sent, waited, checks) = self._comm.meter, self._begun
        return Stats(
            steps=self._steps,
            averages=self._averages,
            payload_bytes=meter.payload_bytes - sent - self._apart_bytes,
            wait_seconds=meter.exposed_seconds - waited - self._apart_seconds,
            evaluation_bytes=self._apart_bytes,
            evaluation_wait_seconds=self._apart_seconds,
            check_bytes=meter.check_bytes - checks,
            data_seconds=self.times.data_seconds,
            compute_seconds=self.times.compute_seconds,
            workers=self.times.workers,
            slow_worker=self.times.slow_worker,
        )
