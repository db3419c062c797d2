"""Train locally, and pull every worker towards the best one once in a period."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.registry import registered
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy, trait
from thinwire.strategies.leader.election import (
    ScoreSource,
    best_rank,
    broadcast_leader,
    chain_broadcast_,
    chain_from,
    differs_significantly,
    elect_or_warn,
    gather_keys,
    init_scores,
    key_of,
    leader_or_mean,
    local_score,
    record_loss,
    two_level_broadcast_,
    warn_without_leader,
)


@registered
class LeaderSGD(Strategy):
    r"""Leader SGD: train locally, and every `period` steps move all workers a part of the way to the best one.

    With $z = x_j$ of the worker $j$ whose recent losses are lowest,

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i); \qquad
      \text{every } \tau \text{ steps: } x_i \leftarrow (1-\lambda) x_i + \lambda z .$$

    With `node_size` $m$, the best of each node of $m$ consecutive ranks leads its node every $\tau$ steps, and the best
    of all pulls every worker as well, by $\lambda_G$, every `global_period` steps; both elections use the same losses.
    With `proximal` $p$, every step is followed by $x_i \leftarrow x_i + \frac{p}{\tau} (z - x_i)$ towards the last
    leader, after the first election. Report each loss: `worker.record_batch(loss=loss)` before the optimizer's step.

    Without any pull workers train by themselves and send nothing; `pull=1, period=1` makes all of them the best one
    after each step. The optimizer's state stays local, and no pull touches it.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and period (half of an average's), and 8 bytes. With nodes,
    each pull within a node is $\frac{m-1}{m}$ of them, and of all nodes together $G-1$ times the parameters go between
    the $G$ nodes. State: `losses`, as many numbers as the period has steps; with `proximal`, `leader` (and with nodes
    `node_leader`), like the parameters; with `overlap`, one such vector in flight.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        period: $\tau$, optimizer steps between elections; more communicates less.
        pull: $\lambda$, in [0, 1]; more keeps workers closer to the leader, and lets them explore less.
        node_size: $m$, ranks with a leader of their own; 1 is one leader for all.
        global_period: steps between elections of all, where nodes elect in between; a multiple of `period`.
        global_pull: $\lambda_G$, in [0, 1]; None is as `pull`.
        metric: "window" compares the mean loss of the last `period` steps, "ema" its exponential mean,
            `ScoreFunction` any score, such as the loss of a batch that is the same on all ranks.
        proximal: $p$, in [0, 1]; more holds workers near the last leader between elections too.
        certainty: with "window", the leader is sent only if some worker is worse than the best by so many standard
            errors of their difference; more sends less often, 0 sends always.
        overlap: send the leader during the next round, one rank a step, and pull one round later.
        result: what is evaluated and saved: the "leader" of the moment, or the "mean" of all workers.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 4.0 * comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     worker = thinwire.attach(model, optimizer, LeaderSGD(period=2, pull=0.25), comm=comm, init="own")
        ...     for _ in range(2):
        ...         loss = model(torch.ones(1)).sum()
        ...         loss.backward()
        ...         worker.record_batch(loss=loss)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(3, train)  # rank 0 has the lowest loss; the others go a quarter of the way to it
        [0.0, 3.0, 6.0]
    """

    period: int = 16
    pull: float = 0.1
    node_size: int = 1
    global_period: int | None = None
    global_pull: float | None = None
    metric: ScoreSource = "window"
    proximal: float = 0.0
    certainty: float = 0.0
    overlap: bool = False
    result: Literal["leader", "mean"] = "leader"

    paper = "Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019, arXiv:1905.10395"
    waits = "every period steps, all (with nodes: those of a node) wait for the slowest and for the leader's parameters"
    limits = "made for workers with similar data: the one with the easiest data would always lead"

    has_period = True
    # A leader that is passed on along a chain of ranks is sent by all but the last of them.
    data_dependent_bytes = trait(lambda self: self.certainty > 0 or self.node_size > 1 or self.overlap)

    def __post_init__(self) -> None:
        """Check the kinds and the ranges, and which options go together."""
        for name, share in (("pull", self.pull), ("global_pull", self._global_pull), ("proximal", self.proximal)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name}={share}: must lie in [0, 1]; 0.1 is usual")
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 16 is usual")
        if not 0 <= self.certainty < float("inf"):
            raise ConfigError(
                f"certainty={self.certainty}: must be finite and not negative; 2 is usual, 0 sends always"
            )
        self._check_nodes()
        if self.certainty and (self.metric != "window" or self.period < 2 or self.node_size > 1):
            raise ConfigError(
                f"certainty={self.certainty}: needs metric='window' over at least 2 steps, and one leader for all"
            )
        if self.overlap and (self.proximal or self.certainty or self.node_size > 1):
            raise ConfigError("overlap=True: excludes proximal, certainty and node_size; leave them at their defaults")

    def _check_nodes(self) -> None:
        if self.node_size < 1:
            raise ConfigError(f"node_size={self.node_size}: must be at least 1 rank; 1 is one leader for all")
        if (self.node_size > 1) != (self.global_period is not None):
            raise ConfigError(
                f"node_size={self.node_size}, global_period={self.global_period}: nodes need both, as in "
                "LeaderSGD(period=16, node_size=4, global_period=64)"
            )
        if self.global_pull is not None and self.node_size == 1:
            raise ConfigError(f"global_pull={self.global_pull}: without nodes there is one pull; use pull")
        if self.global_period is not None and (self.global_period < 1 or self.global_period % self.period):
            raise ConfigError(
                f"global_period={self.global_period}: must be a multiple of period={self.period}, such as "
                f"{4 * self.period}"
            )

    @property
    def _global_pull(self) -> float:
        return self.pull if self.global_pull is None else self.global_pull

    def check(self, size: int) -> None:
        """Refuse a number of ranks that is no multiple of the node size, and periods too short for `overlap`."""
        if size % self.node_size:
            raise ConfigError(
                f"node_size={self.node_size} with {size} workers: nodes must be equally large; use a divisor of {size}"
            )
        if self.overlap and size - 1 > self.period:
            raise ConfigError(
                f"overlap=True, period={self.period} with {size} workers: the leader takes {size - 1} steps to reach "
                f"all; use period={size - 1} or more"
            )

    def start(self, r: Replica) -> None:
        """Allocate the losses."""
        init_scores(r, self.metric, self.period)

    def after_step(self, r: Replica) -> None:
        """Record the loss, stay near the last leader, and follow a new one at the end of the period."""
        record_loss(r, self.metric, self.period)
        if r.comm.size == 1 or self.pull == self._global_pull == self.proximal == 0:
            return
        for name, period in (("leader", self.global_period or self.period), ("node_leader", self.period)):
            if self.proximal and name in r.state:
                r.x.lerp_(r.state[name], self.proximal / period)
        if self.overlap:
            self._follow_later_(r)
        elif r.step % self.period == 0:
            (self._follow_ if self.node_size == 1 else self._follow_nodes_)(r)

    def restart(self, r: Replica) -> None:
        """There is no leader until the next election; drops one that is in flight."""
        # The losses stay: they are all that `consensus` can elect by before the next step. All workers are at one point
        # now, so whoever is elected, the pull towards it starts from there.
        r.wait_pending()
        r.inflight.clear()
        for name in ("leader", "node_leader", "current_leader"):
            r.state.pop(name, None)

    def average_(self, r: Replica) -> None:
        """The mean of all workers; there is no leader until the next election."""
        Strategy.average_(self, r)
        self.restart(r)

    def consensus(self, r: Replica) -> Tensor:
        """The leader of the moment, or the mean."""
        if self.result == "mean" or r.comm.size == 1:
            return Strategy.consensus(self, r)
        return leader_or_mean(r, local_score(r, self.metric))

    def _follow_(self, r: Replica) -> None:
        """Elect one leader for all, and pull towards it."""
        leader = elect_or_warn(r, local_score(r, self.metric))
        if leader is None or (self.certainty and not differs_significantly(r, self.certainty)):
            return
        self._pull_(r, "leader", broadcast_leader(r, leader), self.pull)

    def _pull_(self, r: Replica, name: str, leader: Tensor, pull: float) -> None:
        if leader is not r.x:
            r.x.lerp_(leader, pull)
        if self.proximal:
            r.state[name] = leader.clone() if leader is r.x else leader

    # -- leaders of nodes ----------------------------------------------------------------------------------------

    def _follow_nodes_(self, r: Replica) -> None:
        """Elect a leader for each node, and one for all where that is due, from the same keys."""
        first = r.comm.rank - r.comm.rank % self.node_size
        node, all_ranks = range(first, first + self.node_size), range(r.comm.size)
        both = self.global_period is not None and r.step % self.global_period == 0
        gathered = gather_keys(r, local_score(r, self.metric), all_ranks if both else node)
        keys = {rank: key_of(r, key, node) for rank, key in gathered.items()}
        node_leader = best_rank([keys[rank] for rank in node])
        leader = best_rank(list(keys.values())) if both else None
        if node_leader is None or (both and leader is None):
            warn_without_leader(r)
        # The best of all is the best of its node, so the first pull leaves it where it is.
        self._follow_node_leader_(r, "node_leader", node_leader, self.pull, node)
        self._follow_node_leader_(r, "leader", leader, self._global_pull, all_ranks)
        if leader is not None:
            r.metrics["leader"] = float(leader)

    def _follow_node_leader_(
        self, r: Replica, name: str, leader: int | None, pull: float, members: Sequence[int]
    ) -> None:
        if leader is None:
            return
        x = r.x if r.comm.rank == leader else torch.empty_like(r.x)
        if len(members) == r.comm.size:
            two_level_broadcast_(r.comm, x, leader, self.node_size)
        else:
            chain_broadcast_(r.comm, x, chain_from(leader, members))
        self._pull_(r, name, x, pull)

    # -- a leader that is one round old --------------------------------------------------------------------------

    def _follow_later_(self, r: Replica) -> None:
        """At the end of a period pull towards the last leader and elect the next; else pass it on by one rank."""
        rank, size, hop = r.comm.rank, r.comm.size, r.step % self.period
        if hop == 0:
            r.collect("passed")
            for late in r.collect("leader") or []:
                r.x.lerp_(late, self.pull)
            leader = elect_or_warn(r, local_score(r, self.metric))
            r.state["current_leader"] = torch.tensor(-1 if leader is None else leader)
        if "current_leader" not in r.state or int(r.state["current_leader"]) < 0 or hop >= size - 1:
            return
        distance = (rank - int(r.state["current_leader"])) % size  # in the chain that begins at the leader
        if distance == hop:
            x = r.x.clone() if distance == 0 else r.inflight["leader"].wait()[0]
            r.launch("passed", r.comm.send_recv(x, [(rank + 1) % size], []))
        if distance == hop + 1:
            r.launch("leader", r.comm.send_recv(r.x, [], [(rank - 1) % size]))
