"""Leader SGD whose rounds are a number of steps of all workers together, however unevenly they take them.

Rank 0 counts the steps of the round in the thread in which its messages arrive, while it trains. A worker asks it for
the count after each step; once the round has its steps, every worker goes to the election after the step that it is in.

A worker that waits for all others (for `consensus`, `save` or at the end) is at the barrier. It sends its round to rank
0, and waits for an answer: ELECTION if the round is over, since an election needs all ranks and others still train;
then it asks again. RELEASE if every rank is at the barrier.
"""

from typing import Literal
from weakref import proxy

import torch
from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.registry import registered
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.leader.election import (
    ScoreSource,
    broadcast_leader,
    elect_or_warn,
    init_scores,
    leader_or_mean,
    local_score,
    record_loss,
)

_STEP, _BARRIER = 1, 2  # topics of the mailbox
_ELECTION, _RELEASE = 1, 2  # answers to a worker at the barrier
# In rank 0's `waiting`, in place of the round in which a rank waits at the barrier: it trains. Or, of rank 0 alone:
# the barrier has ended, and rank 0 has taken no step since.
_TRAINING, _RELEASED = -1, -2


@registered
class AsyncLeaderSGD(Strategy):
    r"""Leader SGD whose rounds are $n\tau$ steps of all workers together: fast ones take more of them.

    After each step a worker asks rank 0, which counts while it trains, how many steps the round has had. At the end of
    a round all workers elect the one whose recent losses are lowest, and with $z$ its parameters

    $$x_i \leftarrow (1-\lambda) x_i + \lambda z .$$

    Steps that have begun are finished, so that a round has between $n\tau$ and $n\tau + n - 1$ of them. `consensus`,
    `save` and the end of training are barriers: a worker that waits there takes part in the elections of those that
    still train, until all are there. Between two barriers each worker takes at least one step, and as many more as it
    likes; before `save`, which names a checkpoint by the step, all must have taken the same number. Report each loss:
    `worker.record_batch(loss=loss)` before the optimizer's step.

    Which steps belong to a round depends on timing. At equal speeds it is `LeaderSGD(period, pull)`.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and round, and two messages of 8 bytes per step of ranks
    other than 0. State: `losses` and counters.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        period: $\tau$, a worker's fair share of a round's steps; more communicates less.
        pull: $\lambda$, in [0, 1]; more keeps workers closer to the leader.
        metric: "window" compares the mean loss of the last `period` steps, "ema" its exponential mean,
            `ScoreFunction` any score. A worker with fewer steps is compared by those it has taken.
        result: what is evaluated and saved: the "leader" of the moment, or the "mean" of all workers.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 4.0 * comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     worker = thinwire.attach(model, optimizer, AsyncLeaderSGD(period=2, pull=0.5), comm=comm, init="own")
        ...     for _ in range(3 if comm.rank else 1):  # 4 steps together are one round
        ...         loss = model(torch.ones(1)).sum()
        ...         loss.backward()
        ...         worker.record_batch(loss=loss)
        ...         optimizer.step()
        ...     worker.detach()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)  # rank 1 was pulled half of the way to rank 0
        [0.0, 2.0]
    """

    period: int = 16
    pull: float = 0.1
    metric: ScoreSource = "window"
    result: Literal["leader", "mean"] = "leader"

    paper = "Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019, arXiv:1905.10395"
    waits = "once a round, all wait for the steps that have begun and for the leader's parameters"
    limits = "results depend on timing; every worker takes a step between evaluations; all as many before checkpoints"

    timing_dependent = True
    has_period = True

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 16 is usual")
        if not 0 <= self.pull <= 1:
            raise ConfigError(f"pull={self.pull}: must lie in [0, 1]; 0.1 is usual")

    def start(self, r: Replica) -> None:
        """Open the mailbox; rank 0 begins to count."""
        init_scores(r, self.metric, self.period)
        r.state["round"] = torch.zeros((), dtype=torch.int64)
        r.state["own_steps"] = torch.zeros((), dtype=torch.int64)
        if r.comm.size == 1:
            return
        box = open_mailbox(r, _number(0))
        if r.comm.rank:
            return
        # By the parity of the round: a fast worker may end a step of the next round before rank 0 is in it.
        r.state["round_steps"] = torch.zeros(2, dtype=torch.int64)
        r.state["waiting"] = torch.full((r.comm.size,), _TRAINING)
        # As after a barrier: rank 0 may be about to load a checkpoint, so it counts nothing before its first step.
        r.state["waiting"][0] = _RELEASED
        replica, mailbox, others = proxy(r), proxy(box), range(1, r.comm.size)

        def on_step(message: Message) -> bool:
            if replica.state["waiting"][0] == _RELEASED:
                return False
            mailbox.send(message.src, _number(self._add_step(replica, mailbox, int(message.content))))
            return True

        def on_barrier(message: Message) -> bool:
            if replica.state["waiting"][0] == _RELEASED:
                return False
            replica.state["waiting"][message.src] = message.content[0]
            self._answer_waiting(replica, mailbox, int(message.content))
            return True

        box.on_message(_STEP, on_step, like=_number(0), src=others)
        box.on_message(_BARRIER, on_barrier, like=_number(0), src=others)

    def after_step(self, r: Replica) -> None:
        """Count the step, and follow the leader if the round is over."""
        record_loss(r, self.metric, self.period)
        if r.comm.size == 1:
            return
        r.inflight.pop("barrier", None)
        r.state["own_steps"] += 1
        if self._count_step(r) >= self.period * r.comm.size:
            self._follow_(r)
        # Waited for only by consensus(), save() and detach().
        r.launch("barrier", Work(lambda: self._barrier(r)))

    def average_(self, r: Replica) -> None:
        """Wait until all workers are at the barrier, then average."""
        r.wait_pending()
        Strategy.average_(self, r)

    def consensus(self, r: Replica) -> Tensor:
        """The leader of the moment, or the mean."""
        r.wait_pending()
        if self.result == "mean" or r.comm.size == 1:
            return Strategy.consensus(self, r)
        return leader_or_mean(r, local_score(r, self.metric))

    def _follow_(self, r: Replica) -> None:
        """End the round: elect the leader, and pull towards it."""
        if "round_steps" in r.state:
            # No worker is in the next round before this election has ended, so its count may be cleared until then.
            with r.comm.mailbox(r).changed:
                r.state["round_steps"][(int(r.state["round"]) + 1) % 2] = 0
        leader = elect_or_warn(r, local_score(r, self.metric))
        r.state["round"] += 1
        r.state["own_steps"].zero_()
        if leader is not None and self.pull and (z := broadcast_leader(r, leader)) is not r.x:
            r.x.lerp_(z, self.pull)

    def _count_step(self, r: Replica) -> int:
        """The steps of this round by all workers, with the one that has just ended."""
        box, round_ = r.comm.mailbox(r), int(r.state["round"])
        # What a comm that only counts answers: as many steps as if all workers were equally fast.
        expected = r.comm.size * int(r.state["own_steps"])
        if r.comm.rank:
            box.send(0, _number(round_), topic=_STEP)
            return int(box.expect(0, _number(expected)).wait().content)
        if r.x.is_meta:
            return expected
        with box.changed:
            r.state["waiting"][0] = _TRAINING
            done = self._add_step(r, box, round_)
        box.process_deferred()  # messages that were put aside until rank 0's first step after a barrier
        return done

    def _barrier(self, r: Replica) -> list[Tensor]:
        """Take part in the elections of workers that still train, until all are at the barrier."""
        while self._wait_at_barrier(r) == _ELECTION:
            self._follow_(r)
        return []

    def _wait_at_barrier(self, r: Replica) -> int:
        """Wait for the end of the round or of the barrier: ELECTION or RELEASE."""
        box, round_ = r.comm.mailbox(r), int(r.state["round"])
        if r.comm.rank:
            box.send(0, _number(round_), topic=_BARRIER)
            return int(box.expect(0, _number(_RELEASE)).wait().content)
        with box.changed:
            waiting = r.state["waiting"]
            waiting[0] = round_
            self._answer_waiting(r, box, round_)
            box.wait_until(
                lambda: _training(waiting) if waiting[0] >= 0 else [],
                f"all workers to reach the barrier at step {r.step}",
            )
            return _RELEASE if waiting[0] == _RELEASED else _ELECTION

    # -- on rank 0, in any thread, under the mailbox's lock ------------------------------------------------------

    def _add_step(self, r: Replica, box: Mailbox, round_: int) -> int:
        """Count one step of a round; returns how many there are."""
        counts = r.state["round_steps"]
        counts[round_ % 2] += 1
        self._answer_waiting(r, box, round_)
        return int(counts[round_ % 2])

    def _answer_waiting(self, r: Replica, box: Mailbox, round_: int) -> None:
        """Answer the ranks at the barrier if the round is over, or if no rank trains any more."""
        waiting = r.state["waiting"]
        if r.state["round_steps"][round_ % 2] >= self.period * r.comm.size:
            answer, rank_zero = _ELECTION, _TRAINING
        elif not _training(waiting):
            answer, rank_zero = _RELEASE, _RELEASED
        else:
            return
        for rank in range(1, r.comm.size):
            if waiting[rank] >= 0:
                waiting[rank] = _TRAINING
                box.send(rank, _number(answer))
        if waiting[0] >= 0:
            waiting[0] = rank_zero


def _training(waiting: Tensor) -> list[int]:
    """The ranks that are not at the barrier."""
    return [rank for rank, round_ in enumerate(waiting.tolist()) if round_ < 0]


def _number(value: int) -> Tensor:
    return torch.tensor([value])
