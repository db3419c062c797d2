"""Pull every worker towards the best one after a number of steps that they share out as they can."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from weakref import proxy

import torch
from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.leader.election import (
    Measure,
    elect,
    leader_or_mean,
    leader_s,
    note_loss,
    score_of,
    start_scores,
    start_warning,
    warn_once,
)
from thinwire.validation import check_kinds

_STEP, _REST = 1, 2
_MEET, _PART = 1, 2
_AWAKE, _PARTED = -1, -2  # of a rank that does not stand still; of rank 0 before its first step after all have


@dataclass(frozen=True)
class AsyncLeaderSGD(Strategy):
    r"""Leader SGD whose rounds are $n\tau$ steps of all workers together: fast ones take more of them.

    After each step a worker asks how many steps the round has had; rank 0 counts, on the side. Who finds the round
    over elects with all others the worker whose recent losses are lowest, and with $z$ its parameters

    $$x_i \leftarrow (1-\lambda) x_i + \lambda z .$$

    Steps that have begun are finished, so that a round has between $n\tau$ and $n\tau + n - 1$ of them. A worker that
    has to stand still (for `consensus`, `save`, at the end) takes part in the elections of those that do not yet, and
    goes on when all do. Between such moments each worker takes a step at least, and as many more as it likes; before
    `save`, which names a checkpoint by the step, all take as many. The loop tells the losses:
    `worker.record_batch(loss=loss)` before the optimizer's step.

    Which steps belong to a round depends on timing. At equal speeds it is `LeaderSGD(period, pull)`.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and round, and two messages of 8 bytes per step of ranks
    other than 0. State: `losses` and numbers.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        period: $\tau$, a worker's fair share of a round's steps; more says less.
        pull: $\lambda$, in [0, 1]; more keeps workers closer to the leader.
        metric: "window" compares the mean loss of the last `period` steps, "ema" its exponential mean,
            `ScoreFunction` what you like. A worker with fewer steps is compared by those it has taken.
        result: what is evaluated and shipped: the "leader" of the moment, or the "mean" of all workers.
    """

    period: int = 16
    pull: float = 0.1
    metric: Measure = "window"
    result: Literal["leader", "mean"] = "leader"

    paper = "Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019, arXiv:1905.10395"
    waits = "once a round, all wait for the steps that have begun and for the leader's parameters"
    limits = "results depend on timing; each worker takes a step between evaluations; all as many before checkpoints"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 16 is usual")
        if not 0 <= self.pull <= 1:
            raise ConfigError(f"pull={self.pull}: must lie in [0, 1]; 0.1 is usual")

    def start(self, r: Replica) -> None:
        """Open the mailbox; rank 0 begins to count."""
        start_scores(r, self.metric, self.period)
        start_warning(r)
        r.state["round"] = torch.zeros((), dtype=torch.int64)
        r.state["own"] = torch.zeros((), dtype=torch.int64)
        if r.comm.size == 1:
            return
        box = open_mailbox(r, _number(0))
        if r.comm.rank == 0:
            r.state["counts"] = torch.zeros(2, dtype=torch.int64)
            r.state["resting"] = torch.full((r.comm.size,), _AWAKE)
            r.state["resting"][0] = _PARTED
            me, everyone = proxy(r), range(1, r.comm.size)
            box.answer(_STEP, partial(self._count, me, box), like=_number(0), src=everyone)
            box.answer(_REST, partial(self._let_rest, me, box), like=_number(0), src=everyone)

    def after_step(self, r: Replica) -> None:
        """Count the step, and follow the leader where the round is over."""
        note_loss(r, self.metric, self.period)
        if r.comm.size == 1:
            return
        r.inflight.pop("rest", None)
        r.state["own"] += 1
        if self._steps_done(r, r.comm.mailbox(r)) >= self.period * r.comm.size:
            self._follow_(r)
        r.launch("rest", Work(lambda: self._rest(r)))

    def average_(self, r: Replica) -> None:
        """Wait until all stand still, then average."""
        r.wait_pending()
        Strategy.average_(self, r)

    def consensus(self, r: Replica) -> Tensor:
        """The leader of the moment, or the mean."""
        r.wait_pending()
        if self.result == "mean" or r.comm.size == 1:
            return Strategy.consensus(self, r)
        return leader_or_mean(r, score_of(r, self.metric))

    def _follow_(self, r: Replica) -> None:
        if "counts" in r.state:
            with r.comm.mailbox(r).changed:  # nobody counts for the next round before this election
                r.state["counts"][(int(r.state["round"]) + 1) % 2] = 0
        leader = elect(r, score_of(r, self.metric))
        r.state["round"] += 1
        r.state["own"].zero_()
        if leader is None:
            warn_once(r)
            return
        r.metrics["leader"] = float(leader)
        if self.pull and (z := leader_s(r, leader)) is not r.x:
            r.x.lerp_(z, self.pull)

    # -- who has taken how many steps ----------------------------------------------------------------------------

    def _steps_done(self, r: Replica, box: Mailbox) -> int:
        """Steps of this round by all workers, with the one that has just ended."""
        number, round_ = r.comm.size * int(r.state["own"]), int(r.state["round"])
        if r.comm.rank:
            box.send(0, _number(round_), topic=_STEP)
            return int(box.expect(0, _number(number)).wait().content)
        if r.x.is_meta:  # nobody writes
            return number
        with box.changed:
            r.state["resting"][0] = _AWAKE
            done = self._counted(r, box, round_)
        box.retry()
        return done

    def _counted(self, r: Replica, box: Mailbox, round_: int) -> int:
        counts = r.state["counts"]
        counts[round_ % 2] += 1
        self._wake(r, box, round_)
        return int(counts[round_ % 2])

    def _count(self, r: Replica, box: Mailbox, message: Message) -> bool:
        """Answer with the number of steps; not before rank 0 has taken one: it may be about to read a checkpoint."""
        if r.state["resting"][0] == _PARTED:
            return False
        box.send(message.src, _number(self._counted(r, box, int(message.content))))
        return True

    # -- standing still ------------------------------------------------------------------------------------------

    def _rest(self, r: Replica) -> list[Tensor]:
        """Take part in the elections of those that still train, until all stand still."""
        while self._stand(r, r.comm.mailbox(r)) == _MEET:
            self._follow_(r)
        return []

    def _stand(self, r: Replica, box: Mailbox) -> int:
        """Wait for an election, or for all to stand still."""
        round_ = int(r.state["round"])
        if r.comm.rank:
            box.send(0, _number(round_), topic=_REST)
            return int(box.expect(0, _number(_PART)).wait().content)
        with box.changed:
            resting = r.state["resting"]
            resting[0] = round_
            self._wake(r, box, round_)
            box.until(lambda: _moving(resting) if resting[0] >= 0 else [], f"all to stand still at step {r.step}")
            return _PART if resting[0] == _PARTED else _MEET

    def _let_rest(self, r: Replica, box: Mailbox, message: Message) -> bool:
        """Answer when there is an election, or when all stand still."""
        if r.state["resting"][0] == _PARTED:
            return False
        r.state["resting"][message.src] = message.content[0]
        self._wake(r, box, int(message.content))
        return True

    def _wake(self, r: Replica, box: Mailbox, round_: int) -> None:
        """Tell those who stand still what comes, if anything does."""
        resting = r.state["resting"]
        if r.state["counts"][round_ % 2] >= self.period * r.comm.size:
            word, own = _MEET, _AWAKE
        elif not _moving(resting):
            word, own = _PART, _PARTED
        else:
            return
        for rank in range(1, r.comm.size):
            if resting[rank] >= 0:
                resting[rank] = _AWAKE
                box.send(rank, _number(word))
        if resting[0] >= 0:
            resting[0] = own


def _moving(resting: Tensor) -> Sequence[int]:
    return [rank for rank, round_ in enumerate(resting.tolist()) if round_ < 0]


def _number(value: int) -> Tensor:
    return torch.tensor([value])
