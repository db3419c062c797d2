# SPDX-License-Identifier: Apache-2.0
"""Average parameters every few steps, or never."""

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.moments import average_due_, check_periods
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, draw_key, sends_all
from thinwire.methods.reduce.compressed_all_reduce import at_once, compressed_mean_, mean_, mean_from_residual
from thinwire.methods.strategies.base import At, Rounds, Strategy, Traits
from thinwire.methods.strategies.local.means import weighted_mean_
from thinwire.registry import registered

Period = Annotated[int, Range("1..", "Use AllReduce() to communicate at every step")]
"""The optimizer steps between averages of the parameters."""


def common_start(r: Replica) -> Tensor:
    """Broadcast rank 0's parameters, in fp32 at least.

    Differences are taken from this point, so it must be equal on all ranks, even if their initial parameters differ.
    """
    exact = torch.promote_types(r.x.dtype, torch.float32)
    return r.comm.broadcast_(r.x.to(exact, copy=True), 0).wait()


def compressed_delta(r: Replica, anchor: Tensor, codec: Codec, into: Tensor | None = None) -> Tensor:
    """Return the mean over workers of their compressed differences from `anchor`, equal on all ranks.

    Args:
        r: the replica.
        anchor: a vector that is equal on all ranks.
        codec: compresses the differences.
        into: a vector like the anchor, or the anchor itself, to which the mean is added, and which is the result.
    """
    # A new key for each step, equal on all ranks, so that random codecs draw the same numbers.
    key = draw_key(r.seed, r.step)
    if at_once(codec):
        return mean_from_residual(r.comm, r.x, codec, r.state, key=key, minus=anchor, into=into).wait()
    delta = r.x.to(anchor.dtype) - anchor.to(r.x.device)
    mean = compressed_mean_(r.comm, delta, codec, r.state, key=key, segments=r.segments, like=r.x).wait()
    return mean if into is None else into.add_(mean)


@registered
class Local(Strategy):
    """Train every worker alone, without communication; the base of wrappers that communicate.

    Example:
        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.Local(), comm=comm)
        ...     model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...     optimizer.step()
        ...     with worker.consensus():
        ...         consensus = model.weight.item()
        ...     return model.weight.item(), consensus
        >>> thinwire.run_threads(3, train)
        [(0.0, -1.0), (-1.0, -1.0), (-2.0, -1.0)]
    """

    paper = "one-shot averaging: Zinkevich et al., NeurIPS 2010"
    limits = "workers diverge, because they are never averaged"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(rounds=Rounds(local=True, estimates=True))


@registered
class LocalSGD(Strategy):
    r"""Average the parameters of all workers every `period` steps.

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i); \qquad
      \text{every } \tau \text{ steps: } x_i \leftarrow \tfrac1n \sum_j x_j$$

    With `weights="samples"` and $s_i$ the samples that worker $i$ has used since the last average, means are
    $\sum_i s_i x_i / \sum_i s_i$. During `warmup_steps` workers average at every step (post-local SGD). With a `codec`
    $C$ and $x_0$ the last average, $x_i \leftarrow x_0 + \tfrac1n \sum_j C(x_j - x_0)$. `NodeAverage` around it is
    hierarchical Local SGD.

    `period=1` with plain SGD equals `AllReduce`. Optimizer state (momentum, Adam's moments) stays local, unless
    `moments` gives periods at which its moments are averaged too (DES-LOC).
    Traffic per worker: $2\frac{n-1}{n}$ of the parameters for an average over all $n$ workers; with
    `weights="samples"` one more element; with a codec its payload in place of the parameters.
    State: with `weights="samples"` the number `samples` ($s_i$); with a codec `anchor` ($x_0$), like the parameters in
    fp32, and the codec's state; otherwise none.

    Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767. Warm-up: Lin et al., Don't
    Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217. Weights: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data, AISTATS 2017, arXiv:1602.05629, Algorithm 1. Moments: DES-LOC,
    Desynced Low Communication Adaptive Optimizers for Training Foundation Models, ICLR 2026, arXiv:2505.22549.

    Args:
        period: $\tau$, steps between averages; more sends less, and lets workers drift further apart.
        warmup_steps: the first steps, each of which ends with an average; more keeps workers together while parameters
            move fastest, and sends as much as AllReduce meanwhile.
        weights: "equal", or "samples" to weigh workers by the numbers given to `Worker.record_batch`; a step without
            such a number counts as one sample, a step without gradient as zero.
        codec: compresses the differences from the last average; None sends them uncompressed.
        moments: for each moment of the optimizer, such as Adam's first and second, the steps between its averages, each
            a multiple of the period; empty keeps them local. An average sends as much as one of the parameters.

    Example:
        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.LocalSGD(period=2), comm=comm)
        ...     weights = []
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...         weights.append(model.weight.item())
        ...     return weights
        >>> thinwire.run_threads(2, train)
        [[0.0, -1.0, -1.0, -2.0], [-1.0, -1.0, -2.0, -2.0]]
    """

    period: Period = 8
    warmup_steps: Annotated[int, Range("0..", "0 is no warm-up")] = 0
    weights: Literal["equal", "samples"] = "equal"
    codec: Codec | None = None
    moments: tuple[int, ...] = ()

    paper = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767"
    waits = (
        "every `period` steps all workers wait for the slowest one and for the all-reduce of the parameters; in "
        "between no worker waits"
    )
    limits = "workers drift further apart the longer the period is and the more their data differ"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period,
            steady_from=self.warmup_steps,
            rounds=Rounds(
                ends=(self.period,),
                warmup=self.warmup_steps,
                local=True,
                weight="samples" if self.weights == "samples" else "",
                # A codec encodes differences from a point that all workers share.
                estimates=self.codec is None,
                optimizer_state="average" if self.moments else "maintain",
                postpones=True,
            ),
            lr_factor=1.0 if sends_all(self.codec) else None,
        )

    def __post_init__(self) -> None:
        check_periods(self.moments, self.period, None)
        if self.codec is not None and self.weights == "samples":
            raise ConfigError(
                f"codec={self.codec} with weights='samples': codecs need equal weights. Use only one of the two"
            )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the codec can compress differences, a biased one with error feedback, and the moments."""
        check_differences(self.codec)
        check_periods(self.moments, self.period, optimizer)

    def start(self, r: Replica) -> None:
        """Allocate the number of samples for weighted means, and the anchor of a codec."""
        if self.weights == "samples":
            r.state["samples"] = torch.zeros((), dtype=torch.float64, device="cpu")
        if self.codec is not None:
            r.state["anchor"] = common_start(r)

    def after_step(self, r: Replica) -> None:
        """Average at the end of a period."""
        if self.weights == "samples":
            r.state["samples"] += r.samples
        if not r.postponed and self.traits.averages_at(r.step):
            self._average_all_(r)
            if self.moments:
                average_due_(r.moments, r.comm, self.moments, r.step)

    def restart(self, r: Replica) -> None:
        """With a codec, set the anchor of the differences to the new parameters, which are equal on all ranks."""
        # The residual stays: it is the unsent part of earlier messages, whatever the anchor is.
        if self.codec is not None:
            r.state["anchor"].copy_(r.x)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the mean of all workers' parameters, with the weights of the strategy's own averages."""
        if at != "outer":
            # Uncompressed even with a codec, because its residual must not change here.
            return self._mean_(r, r.x.clone())
        # If the parameters are equal already, a second average is not needed.
        if r.postponed or not self.traits.averages_at(r.step):
            self._average_all_(r)
        return r.x

    def _average_all_(self, r: Replica) -> None:
        if self.codec is None:
            self._mean_(r, r.x)
        else:
            # The mean is added to the anchor, because parameters in half precision would lose small deltas.
            r.x.copy_(compressed_delta(r, r.state["anchor"], self.codec, into=r.state["anchor"]))
        if self.weights == "samples":
            r.state["samples"].zero_()

    def _mean_(self, r: Replica, x: Tensor) -> Tensor:
        if self.weights == "equal":
            return mean_(r.comm, x).wait()
        return weighted_mean_(x, r.state["samples"], lambda vector: r.comm.all_reduce_(vector).wait())
