# SPDX-License-Identifier: Apache-2.0
"""Average the gradients of the first workers to finish; drop those of late ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.asynchronous.quorum.log import LOG, USED, begin_log, resize_log, write_log
from thinwire.asynchronous.quorum.opening import open_participant, participant_of
from thinwire.asynchronous.quorum.rules import Choice, QuorumRule
from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Rounds, Strategy, Traits
from thinwire.registry import registered

_MAX_RANKS_IN_METRICS = 16


@registered
class BackupWorkers(Strategy):
    r"""Synchronous SGD that waits for the first N of N + b workers.

    With $S_t$ the workers whose gradients of step $t$ are ready first, $|S_t| = N$,

    $$x_{t+1} \leftarrow x_t - \gamma\, \tfrac{1}{|S_t|} \sum_{i \in S_t} g_i(x_t) .$$

    Every gradient that counts was computed at $x_t$; the others are dropped, and never applied late. Any optimizer may
    be used, and all workers end the step with the same bits: a late worker receives the parameters and the optimizer's
    state from one that was in time. A worker that is far behind continues at the step where the others are, so write
    the loop as `while worker.step < steps`. One rank decides the members of each step, once for all, and every rank
    keeps a log of them.

    Up to b workers may be lost: the others continue. If the coordinator is lost, all others raise `PeerLostError`, and
    the run continues from a checkpoint. There is no server: members average the gradient by messages among themselves,
    and one of the workers coordinates while it computes.
    `backups=0` is `AllReduce()`. With n workers, a loss of independent delays and $T_{(N:n)}$ the time of the N-th, a
    step takes $E[T_{(N:n)}]$ and its gradient has the noise of N workers.
    Traffic: $2\frac{N-1}{N}$ of the gradient per member and step, and control messages of some bytes; a late worker
    sends none of the gradient, and receives a state once. State: the members of each step, and how often each worker
    was one.

    Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981,
    Algorithms 3 and 4, without their parameter servers. The choice from measured times is our own.

    Args:
        backups: b, the most workers that a step goes without; more waits less and averages fewer gradients.
        choice: "fixed" goes without exactly b; "deadline" takes all that are ready within the usual time.
        deviations: of the deadline: median absolute deviations beyond the median of all measured times.
        coordinator: the rank that decides. It may be slow; it may not be stopped or lost.
        retry_seconds: the least time that a member waits for the others before it reminds the coordinator, so that the
            step is tried again without members that have stopped.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.ones_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     worker = thinwire.attach(model, optimizer, BackupWorkers(backups=1), comm=comm)
        ...     while worker.step < 3:
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1)).sum().backward()  # the gradient is 1, whichever ranks are in time
        ...         optimizer.step()
        ...     worker.detach()
        ...     return round(model.weight.item(), 4)
        >>> thinwire.run_threads(3, train)
        [0.7, 0.7, 0.7]
    """

    backups: int = 1
    choice: Choice = "fixed"
    deviations: float = 3.0
    coordinator: int = 0
    retry_seconds: float = 0.01

    paper = "Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981"
    waits = "every step, all wait until the first N workers are ready and their gradients are averaged"
    limits = "data of a permanently late worker are only used if they are assigned again; N gradients of n count"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            sends_gradients=True,
            needs_equal_start=True,
            timing_dependent=True,
            inelastic=(
                "it continues by itself without up to `backups` lost workers. Leave elastic=True out"
                if self.backups
                else "backups=0 waits for all workers. Use AllReduce()"
            ),
            equal_replicas=not self.backups,
            skips_steps=self.backups > 0,
            # A late worker takes a member's parameters together with the whole state of its optimizer.
            rounds=Rounds(estimates=True),
            growing=(LOG,),
        )

    def __post_init__(self) -> None:
        if self.backups < 0:
            raise ConfigError(f"backups={self.backups}: must be at least 0, which waits for all")
        check_ranges(self, deviations=("[0, inf)", "3 is usual"))
        if self.coordinator < 0:
            raise ConfigError(f"coordinator={self.coordinator}: must be a rank, from 0")
        if self.retry_seconds <= 0:
            raise ConfigError(f"retry_seconds={self.retry_seconds}: must be positive. 0.01 is usual")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse too many backups, a coordinator that is no worker, and parameters of several dtypes or devices."""
        if self.backups >= size and self.backups:
            raise ConfigError(
                f"backups={self.backups}: must be at most {size - 1}: at least 1 of {size} workers must be awaited"
            )
        if self.coordinator >= size:
            raise ConfigError(f"coordinator={self.coordinator}: must be a rank, 0..{size - 1}")
        if optimizer is not None:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
            kinds = {(str(p.dtype), str(p.device)) for p in trained}
            if self.backups and len(kinds) > 1:
                raise ConfigError(
                    f"{self}: parameters have {len(kinds)} pairs of dtype and device, {sorted(kinds)}. There must be "
                    "one, so that a step has the same members for all. Convert the model to one dtype and device, or "
                    "use AllReduce()"
                )

    def start(self, r: Replica) -> None:
        """Open the quorum, with an empty log."""
        if self.backups:
            begin_log(r)
            open_participant(
                r,
                QuorumRule(r.comm.size, r.comm.size - self.backups, self.choice, self.deviations),
                coordinator=self.coordinator,
                retry_seconds=self.retry_seconds,
                names=(LOG, USED),
            )

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """One bucket; the first that is waited for contributes the whole gradient, which counts whole or not at all."""
        if not self.backups:
            return mean_(r.comm, r.g[part], count=r.active)
        if r.active != r.comm.size:
            raise ConfigError(f"{self}: join() cannot know which workers are late. Loop `while worker.step < steps`")
        participant = participant_of(r)
        if participant.outcome is not None:
            raise ConfigError(
                f"step {r.step}: a second backward pass before optimizer.step(). Accumulate gradients within "
                "worker.no_sync() in all but the last pass, and use bfloat16, which needs no GradScaler"
            )

        def contribute() -> Tensor:
            if participant.outcome is None:
                participant.contribute(r.g)
            return r.g[part]

        return Work(contribute)

    def after_step(self, r: Replica) -> None:
        """Record the members; a late rank replaces its state by a member's."""
        if not self.backups:
            return
        participant, step = participant_of(r), r.step
        outcome = participant.outcome
        if outcome is None:
            raise ConfigError(
                f"step {step - 1}: optimizer.step() without a backward pass. Call loss.backward() before each step"
            )
        if on_time := participant.is_member(outcome):
            write_log(r, outcome.members)
        else:
            participant.recover()  # the log too, and r.step
        r.metrics["on_time"] = float(on_time)
        r.metrics["steps_missed"] = float(r.step - step + (not on_time))
        for rank, used in enumerate(r.state[USED][:_MAX_RANKS_IN_METRICS].tolist()):
            r.metrics[f"share_of_rank_{rank}"] = used / max(1, r.step)
        participant.end_step()

        def barrier() -> list[Tensor]:
            participant_of(r).barrier()
            return list[torch.Tensor]()

        # Waited for only where all ranks are needed: consensus(), save(), detach().
        r.launch("barrier", Work(barrier))

    def lost(self, r: Replica) -> Sequence[int]:
        """Up to `backups` workers."""
        return participant_of(r).lost if self.backups else ()

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the parameters themselves: all ranks hold the same vector after the barrier."""
        return r.x

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Return the log, with a place for each of the new workers; those that are no more are left out."""
        if not self.backups:
            return super().resized(states, size)
        return [resize_log(states[0], size) for _ in range(size)]
