# SPDX-License-Identifier: Apache-2.0
"""Leader SGD whose rounds are a number of steps of all workers together, however unevenly they take them.

Rank 0 counts the steps of the round in the thread in which its messages arrive, while it trains. A worker asks it for
the count after each step; once the round has its steps, every worker goes to the election after the step that it is in.

A worker that waits for all others (for `consensus`, `save` or at the end) is at the barrier. It sends its round to rank
0, and waits for an answer. If the round is over, it takes part in the election, which needs all ranks, and asks again;
it continues when every rank is at the barrier.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.comm.work import Work
from thinwire.core.kernels.decisions import decide
from thinwire.core.replica.point_to_point import number, on_message, open_mailbox, others
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.rounds import Answers, GoOn, RoundBudget
from thinwire.core.validation import Range
from thinwire.methods.strategies.base import At, Traits
from thinwire.methods.strategies.leader.election import LeaderStrategy, ScoreSource
from thinwire.registry import registered

_STEP, _BARRIER = 1, 2  # topics of the mailbox


@registered
class AsyncLeaderSGD(LeaderStrategy):
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
        result: the parameters to evaluate and save: the "mean" of all workers, or the current "leader".

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

    period: Annotated[int, Range("1..", "16 is usual")] = 16
    pull: Annotated[float, Range("[0, 1]", "0.1 is usual")] = 0.1
    metric: ScoreSource = "window"
    result: Literal["leader", "mean"] = "mean"

    waits = "once a round, all wait for the steps that have begun and for the leader's parameters"
    limits = "results depend on timing; every worker takes a step between evaluations; all as many before checkpoints"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            timing_dependent=True,
            lr_factor=None,  # who leads may be ahead of the others or behind
            period=self.period,
            on_resize="start",
        )

    def start(self, r: Replica) -> None:
        """Open the mailbox; rank 0 begins to count."""
        super().start(r)
        r.state["round"] = torch.zeros((), dtype=torch.int64, device="cpu")
        r.state["own_steps"] = torch.zeros((), dtype=torch.int64, device="cpu")
        if r.comm.size == 1:
            return
        open_mailbox(r, number(0))
        if r.comm.rank == 0:
            rounds = RoundBudget.of(self.period * r.comm.size, r.comm.size)
            r.state["round_steps"], r.state["waiting"] = rounds.spent, rounds.waiting
            on_message(r, _STEP, self._on_step, like=number(0), src=others(r))
            on_message(r, _BARRIER, self._on_barrier, like=number(0), src=others(r))

    def after_step(self, r: Replica) -> None:
        """Count the step, and follow the leader if the round is over."""
        self.record_loss(r)
        if r.comm.size == 1:
            return
        r.inflight.pop("barrier", None)
        r.state["own_steps"] += 1
        if self._count_step(r) >= self.period * r.comm.size:
            self._end_round(r)
        # Waited for only by consensus(), save() and detach().
        r.launch("barrier", Work(lambda: self._barrier(r)))

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the current leader's parameters or the mean of all workers, depending on `result`."""
        r.wait_pending()
        return super().average(r, at)

    def _end_round(self, r: Replica) -> None:
        """End the round: elect the leader, and pull towards it."""
        if "round_steps" in r.state:
            # No worker is in the next round before this election has ended, so its count may be cleared until then.
            with r.comm.mailbox(r).changed:
                self._rounds(r).begin_next(int(r.state["round"]))
        self.follow_(r)
        r.state["round"] += 1
        r.state["own_steps"].zero_()

    def _count_step(self, r: Replica) -> int:
        """Return the steps of this round by all workers, with the one that has just ended."""
        box, round_ = r.comm.mailbox(r), int(r.state["round"])
        # On a comm that only counts bytes: as many steps as if all workers were equally fast.
        expected = r.comm.size * int(r.state["own_steps"])
        if r.comm.rank:
            box.send(0, number(round_), topic=_STEP)
            return int(box.expect(0, number(expected)).wait().content)
        with box.changed:
            rounds = self._rounds(r)
            rounds.resume()
            _answer(box, rounds.add_step(round_))
            steps = rounds.steps(round_)
        # Messages that were put aside until rank 0's first step after a barrier; a comm that only counts delivers one
        # for each call.
        for _ in range(r.comm.size - 1):
            box.process_deferred()
        return decide(r.x, lambda: steps, most=expected, least=expected)

    def _barrier(self, r: Replica) -> list[Tensor]:
        """Take part in the elections of workers that still train, until all are at the barrier."""
        while self._wait_at_barrier(r) == GoOn.ROUND_OVER:
            self._end_round(r)
        return []

    def _wait_at_barrier(self, r: Replica) -> int:
        """Wait until the round is over or all workers are at the barrier."""
        box, round_ = r.comm.mailbox(r), int(r.state["round"])
        if r.comm.rank:
            box.send(0, number(round_), topic=_BARRIER)
            return int(box.expect(0, number(GoOn.ALL_HERE)).wait().content)
        with box.changed:
            rounds = self._rounds(r)
            _answer(box, rounds.arrive(0, round_))
            box.wait_until(rounds.missing, "{ranks} to reach the barrier")
            return GoOn.ALL_HERE if rounds.paused else GoOn.ROUND_OVER

    # -- on rank 0, in any thread, under the mailbox's lock ------------------------------------------------------

    def _rounds(self, r: Replica) -> RoundBudget:
        return RoundBudget(self.period * r.comm.size, r.state["round_steps"], r.state["waiting"])

    def _on_step(self, r: Replica, box: Mailbox, message: Message) -> bool:
        rounds, round_ = self._rounds(r), int(message.content)
        if rounds.paused:
            return False
        _answer(box, rounds.add_step(round_))
        box.send(message.src, number(rounds.steps(round_)))
        return True

    def _on_barrier(self, r: Replica, box: Mailbox, message: Message) -> bool:
        rounds = self._rounds(r)
        if rounds.paused:
            return False
        _answer(box, rounds.arrive(message.src, int(message.content)))
        return True


def _answer(box: Mailbox, answers: Answers) -> None:
    """Report to the ranks at the barrier why they continue; rank 0 knows it from its counters."""
    for rank, reason in answers:
        if rank:
            box.send(rank, number(reason))
