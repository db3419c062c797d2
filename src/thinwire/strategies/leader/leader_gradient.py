"""Descend, and be pulled towards the best worker in the same step."""

from dataclasses import dataclass
from math import inf

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.replica.displacement import descend_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.leader.election import (
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


@dataclass(frozen=True)
class LeaderGradientDescent(Strategy):
    r"""Leader gradient descent: at every step, add to each worker's gradient a pull towards the best of them.

    With $z = x_j$ of the worker $j$ whose loss at this step is lowest,

    $$x_i \leftarrow x_i - \gamma \left( g_i(x_i) + \lambda (x_i - z) \right) .$$

    $z$ counts as a constant: the leader's own step is plain. The pull is the learning rate's part of the way, and does
    not go through the optimizer: momentum knows nothing of it. The loop tells the losses:
    `worker.record_batch(loss=loss)` before the optimizer's step. Where all workers stand at one stationary point,
    they stay; wherever they come to rest, the leader's gradient is zero.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and step, and 8 bytes. State: the last loss.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        pull: $\lambda$, at least 0; times the learning rate it is the share of the way to the leader.
    """

    pull: float = 0.1

    paper = "Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019, arXiv:1905.10395"
    waits = "every step, all wait for the slowest worker and for the leader's parameters"
    limits = "speaks at every step; LSGD pulls now and then"

    def __post_init__(self) -> None:
        """Check the kind and the range."""
        check_kinds(self)
        if not 0 <= self.pull < inf:
            raise ConfigError(f"pull={self.pull}: must be finite and not negative; 0.1 is usual")

    def start(self, r: Replica) -> None:
        """Make room for a loss."""
        start_scores(r, "window", 1)
        start_warning(r)

    def before_step(self, r: Replica) -> None:
        """Elect by the losses at these parameters, and pull."""
        note_loss(r, "window", 1)
        if r.comm.size == 1 or self.pull == 0:
            return
        leader = elect(r, score_of(r, "window"))
        if leader is None:
            warn_once(r)
            return
        r.metrics["leader"] = float(leader)
        z = leader_s(r, leader)
        if z is not r.x:
            descend_(r.x, r.x - z, r.lr, self.pull)

    def consensus(self, r: Replica) -> Tensor:
        """The leader of the last step."""
        return Strategy.consensus(self, r) if r.comm.size == 1 else leader_or_mean(r, score_of(r, "window"))
