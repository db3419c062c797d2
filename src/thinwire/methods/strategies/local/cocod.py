# SPDX-License-Identifier: Apache-2.0
"""Average the models that a round started from while the round computes, then add the round's own steps."""

from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, sends_all
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy
from thinwire.methods.strategies.local.coded_means import mean_from
from thinwire.methods.strategies.traits import Rounds, Traits
from thinwire.registry import registered


@registered
class CoCoD(Strategy):
    r"""Average the models that a round started from while the round computes; each worker then adds its own steps.

    With $x_i^t$ worker $i$'s parameters at the start of round $t$ and $x_i^{t,\tau}$ those after its $\tau$ steps,

    $$x_i^{t+1} = \tfrac1n \sum_j x_j^t + \bigl(x_i^{t,\tau} - x_i^t\bigr) .$$

    The mean of the workers moves by the mean of their steps: no learning rate is lost, in contrast to
    `OverlapLocalSGD`. Nothing is damped either: each worker keeps its own last round, so workers stay further apart
    where their data differ.

    With a `codec` $C$ and $m^t$ the mean that arrives at the end of round $t$, in place of the one above, workers send
    the steps of their rounds: $m^{t+1} = m^t + \tfrac1n \sum_j C(x_j^{t+1} - m^t)$, where $m^0$ is the common start.

    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and period, hidden behind the round; of
    a codec whose mean takes two stages the second starts in its middle. State: `start`, the size of the parameters;
    with a codec `anchor` ($m^t$), like the parameters in fp32, and the codec's state.

    Shen et al., Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient
    Descent, IJCAI 2019, arXiv:1906.12043.

    Args:
        period: $\tau$, optimizer steps of a round; more sends less, hides longer transfers, and drifts further.
        codec: compresses the differences from the last mean; None sends them uncompressed.

    Example:
        Each worker holds its own last round on top of the mean of all earlier ones; consensus is the mean.

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.CoCoD(period=2), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         consensus = model.weight.item()
        ...     return model.weight.item(), consensus
        >>> thinwire.run_threads(2, train)
        [(-1.0, -2.0), (-3.0, -2.0)]
    """

    period: int = 8
    codec: Codec | None = None

    paper = "Shen et al., Computation and Communication Decoupled SGD, IJCAI 2019, arXiv:1906.12043"
    waits = (
        "every `period` steps all workers wait for the rest of the all-reduce that was launched `period` steps before"
    )
    limits = "nothing damps the differences between workers: where their data differ use OverlapLocalSGD"

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period, rounds=Rounds(postpones=True), lr_factor=1.0 if sends_all(self.codec) else None
        )

    def __post_init__(self) -> None:
        """Check the types and the period."""
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 8 is usual")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the codec can compress differences; a biased one needs error feedback."""
        check_differences(self.codec)

    def start(self, r: Replica) -> None:
        """Save the start of the first round, and launch its mean; none is needed where all workers start alike."""
        r.state["start"] = r.x.clone()
        if self.codec is not None:
            r.state["anchor"] = r.x.to(torch.promote_types(r.x.dtype, torch.float32), copy=True)
        if not r.equal_start:
            # As it is, also with a codec: it becomes the first point that all workers have in common.
            r.launch("mean", mean_(r.comm, r.x.clone()).then(lambda mean: [mean]))

    def after_step(self, r: Replica) -> None:
        """At the end of a round, add its steps to the mean of where it started, and launch the next mean."""
        if r.step % self.period:
            if r.step % self.period == self.period - self.period // 2:
                r.advance("mean")
            return
        self._merge_(r)
        r.state["start"].copy_(r.x)
        if r.postponed:
            return
        # A copy is sent, because steps change the parameters while it is in flight.
        x, codec = r.x, self.codec
        mean = mean_(r.comm, x.clone()) if codec is None else mean_from(r, x, r.state["anchor"], codec)
        r.launch("mean", mean.then(lambda mean: [mean]))

    def restart(self, r: Replica) -> None:
        """Start a round at the parameters; they are equal, so their mean needs no message, as at the first round."""
        # The residual of the codec stays: it is the part of earlier steps that has not been sent yet.
        r.collect("mean")
        for name in r.state.keys() & {"start", "anchor"}:
            r.state[name].copy_(r.x)

    def _merge_(self, r: Replica) -> None:
        """Put the steps of this round onto the mean of where it started."""
        if (mean := r.collect("mean")) is None:
            return
        if self.codec is not None:
            r.state["anchor"].copy_(mean[0])
        # x + (mean - start) is mean + (x - start), without a vector for the steps of the round.
        r.x.add_(mean[0].sub_(r.state["start"]))

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """The mean of all workers' parameters; at the end of a round, with the compressed mean that is in flight."""
        # The mean in flight would move the workers, but not their mean: the differences to it add up to zero. A
        # compressed one moves their mean too, by the change of the residuals, which belong to it from then on.
        x, mean = r.x.clone(), r.inflight.get("mean")
        if at in ("end", "outer") and self.codec is not None and mean is not None:
            x.add_(mean.wait()[0] - r.state["start"])
        return mean_(r.comm, x).wait()
