"""Average parameters now and then, or never."""

from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.kinds import check_kinds
from laconic.reduce import mean_
from laconic.replica import Replica
from laconic.strategies.base import Strategy


def check_period(period: int) -> None:
    """Refuse a period that never comes.

    Raises:
        ConfigError: below 1.
    """
    if period < 1:
        raise ConfigError(f"period={period}: must be at least 1 step; use AllReduce() to speak at every step")


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

    `period=1` with plain SGD is AllReduce. Optimizer state (momentum, Adam's moments) stays local.
    Traffic: $2\frac{n-1}{n}$ of the parameters per worker and period. State: none.

    Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767.

    Args:
        period: steps between averages; more says less, and lets workers drift further apart.
    """

    period: int = 8

    paper = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767"
    waits = "every period steps, all wait for the slowest worker and for the parameters to travel"
    limits = "the longer the period and the more the workers' data differ, the further they drift apart"

    def __post_init__(self) -> None:
        """Check the kinds and the period."""
        check_kinds(self)
        check_period(self.period)

    def after_step(self, r: Replica) -> None:
        """Average, when the period is over."""
        if r.step % self.period == 0:
            mean_(r.comm, r.x).wait()
