"""Average gradients at every step."""

from dataclasses import dataclass

from torch import Tensor

from laconic.codecs.base import Codec
from laconic.comm.base import Work
from laconic.errors import ConfigError
from laconic.kinds import check_kinds
from laconic.reduce import coded_mean_, mean_
from laconic.replica import Replica
from laconic.strategies.base import Strategy


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""Average the gradients of all workers at every step, while the backward pass still runs.

    $$x \leftarrow x - \gamma \, \tfrac1n \sum_i g_i(x)$$

    The yardstick of every other method: large-batch SGD, exactly. Parameters stay equal on all ranks, so nothing
    is sent for evaluation.
    Traffic: $2\frac{n-1}{n}$ of the gradient per worker and step. State: none.

    Args:
        codec: a linear codec for the gradients, such as `Bf16()`; None sends them as they are.
    """

    codec: Codec | None = None

    paper = "synchronous SGD; ring all-reduce: Patarasuk and Yuan, JPDC 2009"
    waits = "every step, all wait for the slowest worker and for the whole gradient to travel"
    limits = "on a slow link the step is as long as the transfer"

    def __post_init__(self) -> None:
        """Refuse codecs whose payloads cannot be added up."""
        check_kinds(self)
        if self.codec is not None and not self.codec.linear:
            raise ConfigError(f"codec={self.codec}: an all-reduce needs a linear codec; use Bf16() or Fp16()")

    @property
    def sends_gradients(self) -> bool:
        """Yes, bucket by bucket."""
        return True

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """Launch the mean of one bucket."""
        if self.codec is None:
            return mean_(r.comm, r.g[part], count=r.active)
        return coded_mean_(r.comm, r.g[part], self.codec, r.state, count=r.active)

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x
