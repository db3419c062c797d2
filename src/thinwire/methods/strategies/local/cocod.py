# SPDX-License-Identifier: Apache-2.0
"""Average the parameters at the start of a round while the round computes, then add each worker's own steps."""

from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec, check_differences, sends_all
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Rounds, Strategy, Traits
from thinwire.methods.strategies.local.coded_means import mean_from
from thinwire.registry import registered


@registered
class CoCoD(Strategy):
    r"""Average the parameters at the start of a round while it computes; each worker then adds its own steps.

    With $x_i^t$ worker $i$'s parameters at the start of round $t$ and $x_i^{t,\tau}$ those after its $\tau$ steps,

    $$x_i^{t+1} = \tfrac1n \sum_j x_j^t + \bigl(x_i^{t,\tau} - x_i^t\bigr) .$$

    The mean of the workers moves by the mean of their steps, so the effective learning rate is unchanged, in contrast
    to `OverlapLocalSGD`. Each worker keeps its own last round, so workers with different data stay further apart.

    With a `codec` $C$ workers send the steps of their rounds. The mean that arrives at the end of round $t$ is then
    $m^t$, with $m^{t+1} = m^t + \tfrac1n \sum_j C(x_j^{t+1} - m^t)$ and $m^0$ the common start.

    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and period, hidden behind the round. If
    the codec's mean takes two stages, the second starts in the middle of the round. State: `start`, like the
    parameters; with a codec `anchor` ($m^t$), like the parameters in fp32, and the codec's state.

    Shen et al., Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient
    Descent, IJCAI 2019, arXiv:1906.12043.

    Args:
        period: $\tau$, optimizer steps of a round; more sends less, hides longer transfers, and lets workers drift
            further apart.
        codec: compresses the differences from the last mean; None sends them uncompressed.

    Example:
        Each worker's parameters are the mean of all earlier rounds plus its own last round:

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

    period: Annotated[int, Range("1..", "8 is usual")] = 8
    codec: Codec | None = None

    paper = "Shen et al., Computation and Communication Decoupled SGD, IJCAI 2019, arXiv:1906.12043"
    waits = (
        "every `period` steps all workers wait for the rest of the all-reduce that was launched `period` steps before"
    )
    limits = "differences between workers are not damped; if their data differ, use OverlapLocalSGD"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period,
            rounds=Rounds(delay=self.period, postpones=True),
            lr_factor=1.0 if sends_all(self.codec) else None,
        )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the codec can compress differences; a biased one needs error feedback."""
        check_differences(self.codec)

    def start(self, r: Replica) -> None:
        """Save the start of the first round, and launch its mean unless all workers start equal."""
        r.state["start"] = r.x.clone()
        if self.codec is not None:
            r.state["anchor"] = r.x.to(torch.promote_types(r.x.dtype, torch.float32), copy=True)
        if not r.equal_start:
            # Uncompressed even with a codec, since it becomes the first point that all workers have in common.
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
        """Add the steps of this round to the mean of its start."""
        if (mean := r.collect("mean")) is None:
            return
        if self.codec is not None:
            r.state["anchor"].copy_(mean[0])
        # x + (mean - start) is mean + (x - start), without a vector for the steps of the round.
        r.x.add_(mean[0].sub_(r.state["start"]))

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the mean of all workers' parameters, at the end of a round with the compressed mean in flight."""
        # The mean in flight moves the workers, but not their mean: the differences to it sum to zero. A compressed one
        # also moves their mean, by the change of the residuals.
        x, mean = r.x.clone(), r.inflight.get("mean")
        if at in ("end", "outer") and self.codec is not None and mean is not None:
            x.add_(mean.wait()[0] - r.state["start"])
        return mean_(r.comm, x).wait()
