"""Average where a round began while it computes, and add what it has learned."""

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class CoCoD(Strategy):
    r"""Average the models with which a round began while it computes; each worker then adds its own round.

    With $x_i^t$ worker $i$'s parameters at the start of round $t$ and $x_i^{t,\tau}$ those after its $\tau$ steps,

    $$x_i^{t+1} = \tfrac1n \sum_j x_j^t + \bigl(x_i^{t,\tau} - x_i^t\bigr) .$$

    The mean of the workers moves by the mean of their steps: no learning rate is lost, in contrast to
    `OverlapLocalSGD`. Nor is anything damped: each worker carries its own last round into the next, so that on data
    that differ between workers they stay further apart.
    Traffic: $2\frac{n-1}{n}$ of the parameters per worker and period, hidden behind the round. State: `start`, the size
    of the parameters.

    Shen et al., Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient
    Descent, IJCAI 2019, arXiv:1906.12043.

    Args:
        period: $\tau$, optimizer steps of a round; more says less, hides longer transfers, and drifts further.
    """

    period: int = 8

    paper = "Shen et al., Computation and Communication Decoupled SGD, IJCAI 2019, arXiv:1906.12043"
    waits = "every period steps, all wait for what is not there yet of the slowest worker's message of the last round"
    limits = "nothing damps what workers differ by: on unlike data use OverlapLocalSGD"

    def __post_init__(self) -> None:
        """Check the kinds and the period."""
        check_kinds(self)
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 8 is usual")

    def start(self, r: Replica) -> None:
        """Remember where the first round begins; all begin there, so that its mean is known."""
        r.state["start"] = r.x.clone()

    def after_step(self, r: Replica) -> None:
        """At the end of a round, put its steps on top of the mean of where it began, and send where the next begins."""
        if r.step % self.period:
            return
        self._merge_(r)
        r.launch("mean", mean_(r.comm, r.x.clone()).then(lambda mean: [mean]))

    def _merge_(self, r: Replica) -> None:
        start = r.state["start"]
        if (mean := r.collect("mean")) is not None:
            r.x.add_(mean[0].sub_(start))
        start.copy_(r.x)

    def average_(self, r: Replica) -> None:
        """Take in what is in flight, then average exactly."""
        self._merge_(r)
        mean_(r.comm, r.x).wait()
        r.state["start"].copy_(r.x)
