# SPDX-License-Identifier: Apache-2.0
"""Average gradients at every step."""

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.methods.codecs.base import Codec, check_feedback, draw_key, sends_all
from thinwire.methods.optimizers.adaptive import check_signs
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_, mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.registry import registered


@registered
class AllReduce(Strategy):
    r"""Average the gradients of all workers at every step, while the backward pass still runs.

    $$x \leftarrow x - \gamma \, \tfrac1n \sum_i g_i(x)$$

    This is exactly large-batch SGD, the baseline of every other method. Parameters stay equal on all ranks, so
    evaluation sends nothing.

    With a `codec` the result is the mean of the decoded payloads. An all-reduce adds the payloads of a linear codec,
    such as `Bf16()`. Other codecs take two stages: an all-to-all, in which every rank receives all ranks' payloads of
    one piece of the vector, and an all-gather of the encoded means of these pieces. If a gradient is not finite on any
    rank, it becomes NaN on all of them. Codecs of signs, such as `OneBit()`, are refused with optimizers that divide
    each element by its size, such as Adam; use `CompressedMomentum` for one bit per element.

    Traffic: $2\frac{n-1}{n}$ of the gradient, or of its payload, per worker and step. State: none; with
    `ErrorFeedback` the residuals, like the gradient in fp32, and $1/n$ of that for the server's residual.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), AllReduce(), comm=comm)
        ...     model(torch.tensor([[1.0 + comm.rank]])).sum().backward()  # the gradient is 1 on rank 0, 2 on rank 1
        ...     worker.optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)
        [-1.5, -1.5]

    Args:
        codec: compresses each bucket of gradients; None sends them uncompressed.
    """

    codec: Codec | None = None

    paper = "synchronous SGD; ring all-reduce: Patarasuk and Yuan, JPDC 2009"
    waits = "every step, all wait for the slowest worker and for the transfer of the whole gradient"
    limits = "on a slow link the step takes as long as the transfer"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            sends_gradients=True,
            equal_replicas=True,
            lr_factor=1.0 if sends_all(self.codec) else None,
        )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that a biased codec has error feedback, and that a codec of signs fits the optimizer."""
        check_feedback(self.codec)
        if optimizer is not None:
            check_signs(self, self.codec, optimizer)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor]:
        """Launch the mean of one bucket."""
        if self.codec is None:
            return mean_(r.comm, r.g[part], count=r.active)
        key, whole = draw_key(r.seed, r.step, offset=part.start), r.g.numel()
        return compressed_mean_(
            r.comm,
            r.g[part],
            self.codec,
            r.state,
            key=key,
            count=r.active,
            offset=part.start,
            length=whole,
            segments=r.segments,
            pending=r.pending_means,
        )
