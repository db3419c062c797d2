"""Average gradients at every step."""

from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs.base import Codec, check_feedback, draw_key
from thinwire.comm.work import Work
from thinwire.reduce.compressed_all_reduce import coded_mean_, mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""Average the gradients of all workers at every step, while the backward pass still runs.

    $$x \leftarrow x - \gamma \, \tfrac1n \sum_i g_i(x)$$

    The yardstick of every other method: large-batch SGD, exactly. Parameters stay equal on all ranks, so nothing
    is sent for evaluation.
    With a `codec` the mean is of what payloads say. Those of a linear codec, such as `Bf16()`, are added up by the
    wire; others go through two stages: every worker sends each the codes of one piece, who sends all the codes of its
    mean. A gradient that is not finite on any rank is then NaN on all of them.
    Traffic: $2\frac{n-1}{n}$ of the gradient, or of its payload, per worker and step. State: none, or with
    `ErrorFeedback` what is left unsaid, like the gradient in fp32 and an $n$-th of that.

    Args:
        codec: for the gradients, bucket by bucket; None sends them as they are.
    """

    codec: Codec | None = None

    paper = "synchronous SGD; ring all-reduce: Patarasuk and Yuan, JPDC 2009"
    waits = "every step, all wait for the slowest worker and for the whole gradient to travel"
    limits = "on a slow link the step is as long as the transfer"

    def __post_init__(self) -> None:
        """Check the kind."""
        check_kinds(self)

    def check(self, size: int) -> None:
        """Refuse a codec that leaves something unsaid for ever."""
        check_feedback(self.codec)

    @property
    def sends_gradients(self) -> bool:
        """Yes, bucket by bucket."""
        return True

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """Launch the mean of one bucket."""
        if self.codec is None:
            return mean_(r.comm, r.g[part], count=r.active)
        key, whole = draw_key(r.seed, r.step, offset=part.start), r.g.numel()
        return coded_mean_(r.comm, r.g[part], self.codec, r.state, key=key, count=r.active, at=part.start, whole=whole)

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x
