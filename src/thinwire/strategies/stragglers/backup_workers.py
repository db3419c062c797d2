"""Average the gradients of those who come first; the late ones' are dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.quorum.log import LOG, USED, begin_log, write_log
from thinwire.quorum.meeting import open_party, party_of
from thinwire.quorum.reduction_selector import Plane
from thinwire.quorum.rules import Choice
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds

_SHOWN = 16


@dataclass(frozen=True)
class BackupWorkers(Strategy):
    r"""Synchronous SGD that waits for the first N of N + b workers.

    With $S_t$ the workers whose gradients of step $t$ arrive first, $|S_t| = N$,

    $$x_{t+1} \leftarrow x_t - \gamma\, \tfrac{1}{|S_t|} \sum_{i \in S_t} g_i(x_t) .$$

    Every gradient that counts was taken at $x_t$; the others are dropped, and never applied late. Any optimizer may
    move $x$, and all workers end the step with the same bits: who was late takes the parameters and the optimizer's
    state of one who was not. A worker that is far behind goes on at the step where the others are, so loops run
    `while worker.step < steps`. Who was a member of which step is decided once, by one rank for all, and kept.

    There is no server: members add up parts of the gradient for each other, or all workers do in an all-reduce, to
    which late ones add zeros beside their computation; and one of the workers counts arrivals while it computes.
    `backups=0` is `AllReduce()`. With n workers, a loss of independent delays and $T_{(N:n)}$ the time of the N-th, a
    step takes $E[T_{(N:n)}]$ and its gradient has the noise of N workers; `choice="online"` looks for the N that makes
    the most of it.
    Traffic: among members $2\frac{N-1}{N}$ of the gradient per member and step, and notes of some bytes; a late worker
    sends none of it, and receives its state once. In an all-reduce $2\frac{n-1}{n}$ for everyone. State: who was a
    member of each step, and how often each worker was.

    Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981,
    Algorithms 3 and 4, without their parameter servers. The choice from measured times is our own.

    Args:
        backups: b, the most workers that a step goes without; more waits less and averages fewer gradients.
        choice: "fixed" goes without exactly b; "deadline" takes all who come within the usual time, and "online" the
            number that was best so far, from N on.
        deviations: of a deadline: median absolute deviations beyond the median of all measured times.
        keeper: the rank that counts arrivals. It may be slow; it may not be stopped.
        patience_seconds: the least time after which a member that hears nothing says so, so that the step is tried
            without who is silent.
        plane: how members add up. "ring" is by messages among them; "zeros" is an all-reduce among all, which carries
            more and computes less; "auto" tries both and stays with the faster.
    """

    backups: int = 1
    choice: Choice = "fixed"
    deviations: float = 3.0
    keeper: int = 0
    patience_seconds: float = 0.01
    plane: Plane = "ring"

    paper = "Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981"
    waits = "every step, all wait until the first N workers have come and their gradients have travelled"
    limits = "data of a worker that is always late are not seen unless they are dealt out anew; N gradients of n count"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.backups < 0:
            raise ConfigError(f"backups={self.backups}: must be at least 0, which waits for all")
        if self.deviations < 0:
            raise ConfigError(f"deviations={self.deviations}: must not be negative; 3 is usual")
        if self.keeper < 0:
            raise ConfigError(f"keeper={self.keeper}: must be a rank, from 0")
        if self.patience_seconds <= 0:
            raise ConfigError(f"patience_seconds={self.patience_seconds}: must be positive; 0.01 is usual")

    @property
    def sends_gradients(self) -> bool:
        """Yes; all of it when the backward pass is over."""
        return True

    @property
    def leaves_out_steps(self) -> bool:
        """Yes, where somebody may be late."""
        return self.backups > 0

    def check(self, size: int) -> None:
        """Refuse more backups than leave a worker to wait for, and keepers that are none of the workers."""
        if self.backups >= size and self.backups:
            raise ConfigError(
                f"backups={self.backups}: of {size} workers at least one must be waited for; must be at most {size - 1}"
            )
        if self.keeper >= size:
            raise ConfigError(f"keeper={self.keeper}: there are ranks 0..{size - 1}")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse parameters of several kinds: their steps could have different members."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        kinds = {(str(p.dtype), str(p.device)) for p in trained}
        if self.backups and len(kinds) > 1:
            raise ConfigError(
                f"{self}: parameters are of {len(kinds)} kinds, {sorted(kinds)}; a step has the same members for all "
                "of them only where there is one. Convert the model to one dtype and device, or use AllReduce()"
            )

    def start(self, r: Replica) -> None:
        """Open the mailbox; nobody has been late yet."""
        if self.backups:
            begin_log(r)
            open_party(r, self, names=(LOG, USED))

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """One bucket: it counts only where all of the gradient does."""
        if not self.backups:
            return mean_(r.comm, r.g[part], count=r.active)
        self._check_alone(r)
        party = party_of(r)
        if party.outcome is not None:
            raise ConfigError(
                f"step {r.step}: a second backward pass before optimizer.step(); accumulate gradients within "
                "worker.no_sync() in all but the last pass, and use bfloat16, which needs no GradScaler"
            )

        def arrive() -> Tensor:
            if party.outcome is None:
                party.come(r.g)
            return r.g[part]

        return Work(arrive)

    def after_step(self, r: Replica) -> None:
        """Keep who was a member; whoever was not becomes what members are."""
        if not self.backups:
            return
        party, ended = party_of(r), r.step
        if party.outcome is None:
            raise ConfigError(f"step {r.step - 1}: optimizer.step() without a backward pass before it")
        on_time = party.is_member(party.outcome)
        if party.holds:
            write_log(r, party.outcome.members)
        else:
            party.catch_up(party.outcome)
        r.metrics["on_time"] = float(on_time)
        r.metrics["all_reduced"] = float(party.outcome.sum > 0)
        r.metrics["steps_missed"] = float(r.step - ended + (not on_time))
        for rank, used in enumerate(r.state[USED][:_SHOWN].tolist()):
            r.metrics[f"share_of_rank_{rank}"] = used / r.step
        party.rest()
        r.launch("still", Work(lambda: _stand_still(r)))

    def _check_alone(self, r: Replica) -> None:
        """Refuse what counts every step of every worker."""
        if r.active != r.comm.size:
            raise ConfigError(f"{self}: join() cannot tell who is late; loop `while worker.step < steps` instead")
        if others := r.state.keys() - {LOG, USED}:
            raise ConfigError(
                f"{self}: a late worker leaves out steps, which a strategy around this one would miss (it keeps "
                f"{', '.join(sorted(others))}); use it alone, or AllReduce() as the base"
            )

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector, once nobody is behind."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x


def _stand_still(r: Replica) -> list[Tensor]:
    party_of(r).stand_still()
    return list[torch.Tensor]()
