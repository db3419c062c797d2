"""Average parameters now and then, or never."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, check_feedback, draw_key
from thinwire.errors import ConfigError
from thinwire.reduce.compressed_all_reduce import coded_mean_, mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.local.means import ring_sum_, weighted_mean_
from thinwire.validation import check_kinds


def check_period(period: int) -> None:
    """Refuse a period that never comes.

    Raises:
        ConfigError: below 1.
    """
    if period < 1:
        raise ConfigError(f"period={period}: must be at least 1 step; use AllReduce() to speak at every step")


def common_start(r: Replica) -> Tensor:
    """Rank 0's parameters on all ranks, in fp32 at least: what differences are taken to, wherever workers begin."""
    exact = torch.promote_types(r.x.dtype, torch.float32)
    return r.comm.broadcast_(r.x.to(exact, copy=True), 0).wait()


def compressed_delta(r: Replica, anchor: Tensor, codec: Codec) -> Tensor:
    """The mean of how far workers have come from `anchor`, as their codes tell; the same on all ranks.

    Args:
        r: the worker.
        anchor: a vector that is the same on all ranks.
        codec: what the ways are said in.
    """
    way = r.x.to(anchor.dtype) - anchor.to(r.x.device)
    return coded_mean_(r.comm, way, codec, r.state, key=draw_key(r.seed, r.step)).wait()


@dataclass(frozen=True)
class Local(Strategy):
    """Every worker trains by itself: silence, and the base of methods that speak on top of it."""

    paper = "one-shot averaging: Zinkevich et al., NeurIPS 2010"
    limits = "workers drift apart for as long as nobody averages them"


@dataclass(frozen=True)
class LocalSGD(Strategy):
    r"""Average the parameters of all workers every `period` steps.

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i); \qquad
      \text{every } \tau \text{ steps: } x_i \leftarrow \tfrac1n \sum_j x_j$$

    With `node_size` $m$, every $\tau$ steps each node of $m$ consecutive ranks averages by itself, and all average
    every `global_period` steps. With `weights="samples"` and $s_i$ what worker $i$ has seen since all last averaged,
    means are $\sum_i s_i x_i / \sum_i s_i$. During `warmup_steps` all average at every step. With a `codec` $C$ and
    $x_0$ where all last agreed, $x_i \leftarrow x_0 + \tfrac1n \sum_j C(x_j - x_0)$.

    `period=1` with plain SGD is AllReduce. Optimizer state (momentum, Adam's moments) stays local.
    Traffic: $2\frac{n-1}{n}$ of the parameters per worker and average of all, $2\frac{m-1}{m}$ for one of a node;
    weights are one element more; a codec's payload takes the place of the parameters. State: none, or `samples`
    ($s_i$), a number, or `anchor` ($x_0$), like the parameters in fp32, and what the codec keeps.

    Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767. Nodes: Lin et al., Don't Use
    Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217. Weights: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data, AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    Args:
        period: $\tau$, steps between averages; more says less, and lets workers drift further apart.
        node_size: $m$, ranks that average every `period` steps; 1 is all of them.
        global_period: steps between averages of all, where nodes average in between; a multiple of `period`.
        warmup_steps: steps at the start of which each ends with an average of all; more keeps workers together while
            parameters move fastest, and sends as much as AllReduce meanwhile.
        weights: "equal", or "samples" to weigh workers by what `Worker.record_batch` was told; a step of which it was
            told nothing counts as one, a step without gradient as none.
        codec: for how far parameters have come since all last agreed; None sends them as they are.
    """

    period: int = 8
    node_size: int = 1
    global_period: int | None = None
    warmup_steps: int = 0
    weights: Literal["equal", "samples"] = "equal"
    codec: Codec | None = None

    paper = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767"
    waits = (
        "every period steps, all (with nodes: those of a node) wait for the slowest and for the parameters to travel"
    )
    limits = "the longer the period and the more the workers' data differ, the further they drift apart"

    def __post_init__(self) -> None:
        """Check the kinds and the periods."""
        check_kinds(self)
        check_period(self.period)
        if self.node_size < 1:
            raise ConfigError(f"node_size={self.node_size}: must be at least 1 rank")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps={self.warmup_steps}: must not be negative; 0 is no warm-up")
        if (self.node_size > 1) != (self.global_period is not None):
            raise ConfigError(
                f"node_size={self.node_size}, global_period={self.global_period}: nodes need both, as in "
                "LocalSGD(period=8, node_size=2, global_period=32)"
            )
        if self.global_period is not None and (self.global_period < 1 or self.global_period % self.period):
            raise ConfigError(
                f"global_period={self.global_period}: must be a multiple of period={self.period}, such as "
                f"{4 * self.period}"
            )
        if self.codec is not None and (self.node_size > 1 or self.weights == "samples"):
            raise ConfigError(
                f"codec={self.codec} with node_size={self.node_size}, weights={self.weights!r}: codes are of plain "
                "means of all workers; keep one of them"
            )

    def check(self, size: int) -> None:
        """Refuse nodes that the ranks do not fill, and a codec that leaves something unsaid for ever."""
        check_feedback(self.codec)
        if size % self.node_size:
            raise ConfigError(
                f"node_size={self.node_size} with {size} workers: ranks fill no whole number of nodes; use a divisor"
            )

    def start(self, r: Replica) -> None:
        """Count samples, where they weigh; remember where all agree, where what follows is coded."""
        if self.weights == "samples":
            r.state["samples"] = torch.zeros((), dtype=torch.float64)
        if self.codec is not None:
            r.state["anchor"] = common_start(r)

    def after_step(self, r: Replica) -> None:
        """Average, when the period is over."""
        if self.weights == "samples":
            r.state["samples"] += r.samples
        if self._all_average(r.step):
            self._agree_(r)
        elif r.step % self.period == 0:
            self._node_mean_(r)

    def average_(self, r: Replica) -> None:
        """The mean of all, unless this step has ended with it."""
        if not self._all_average(r.step):
            self._agree_(r)

    def consensus(self, r: Replica) -> Tensor:
        """The mean of all, weighted as averages are."""
        return self._mean_(r, r.x.clone())

    def _all_average(self, step: int) -> bool:
        return 0 < step <= self.warmup_steps or (step > 0 and step % (self.global_period or self.period) == 0)

    def _agree_(self, r: Replica) -> None:
        if self.codec is None:
            self._mean_(r, r.x)
        else:
            r.x.copy_(r.state["anchor"].add_(compressed_delta(r, r.state["anchor"], self.codec)))
        self._count_anew(r)

    def _mean_(self, r: Replica, x: Tensor) -> Tensor:
        if self.weights == "equal":
            return mean_(r.comm, x).wait()
        return weighted_mean_(x, r.state["samples"], lambda vector: r.comm.all_reduce_(vector).wait())

    def _node_mean_(self, r: Replica) -> None:
        first = r.comm.rank - r.comm.rank % self.node_size
        node = range(first, first + self.node_size)
        if self.weights == "equal":
            ring_sum_(r.comm, r.x, node).div_(self.node_size)
            return
        weighted_mean_(r.x, r.state["samples"], lambda vector: ring_sum_(r.comm, vector, node))

    def _count_anew(self, r: Replica) -> None:
        if self.weights == "samples":
            r.state["samples"].zero_()
