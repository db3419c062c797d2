# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam: average gradients and compressed momenta at fewer and fewer steps, with local steps in between."""

from typing import Annotated

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.kernels import all_finite
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_payloads, check_sizes, draw_key
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.replica_view import momentum_vector, replica_view
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.methods.reduce.compressed_all_reduce import mean_, two_stage_mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.registry import registered


@registered
class ZeroOne(Strategy):
    r"""0/1 Adam: average gradients at fewer and fewer steps, and compressed momenta at the others, with local steps.

    It needs `ZeroOneAdam`. During the first `variance_steps`, gradients are averaged at steps $0 = k_0 < k_1 < \dots$
    with $k_{j+1} - k_j = 2^{\lfloor j/\kappa \rfloor}$, and update the variance. The other steps of this phase average
    compressed momenta, with error feedback in two stages, as `CompressedMomentum` does. Then the variance is frozen,
    and workers take local steps between synchronizations. The gaps between synchronizations are
    $1, \dots, 1, 2, \dots, 2, 4, \dots$ steps, each gap `local_doubling` times, up to `most_local`. With $C$ the codec,
    $e_i$ the residual of worker $i$, $\gamma_k$ and $m_{i,k}$ the learning rate and momentum of step $k$, and sums over
    the steps since the last synchronization, a synchronization computes

    $$\bar m = C\Big(\frac{\sum_k \gamma_k m_{i,k}}{\sum_k \gamma_k} + e_i\Big) \text{ in two stages}, \qquad
      x \leftarrow x' - \frac{\sum_k \gamma_k}{\sqrt v + \epsilon} \bar m ,$$

    where $x'$ are the parameters of the last synchronization, and $\bar m$ the mean momentum of the steps since then.
    As a mean, $\bar m$ has the magnitude of one momentum for any gap, so residuals keep their scale when gaps grow.

    After every synchronization all workers hold the same parameters, bit for bit. A gradient that is not finite counts
    as zero in a local step; at a synchronization all workers skip the step and keep their residuals.

    Traffic per worker: $2\frac{n-1}{n}$ of the gradient at steps that average gradients, $2\frac{n-1}{n}$ of the
    compressed momentum at steps that average momenta, nothing at local steps. State: the residual of the worker, like
    the parameters, and that of its piece, $1/n$ of them; for parameters in 16 bits also `message`, the momenta to be
    sent, like the parameters in fp32.

    Lu et al., 0/1 Adam, ICLR 2023, arXiv:2202.06009, Algorithm 1.

    Example:
        >>> strategy = ZeroOne(variance_steps=8, variance_doubling=2, local_doubling=2, most_local=4)
        >>> [step for step in range(8) if strategy.averages_gradients(step)]  # gradients, uncompressed
        [0, 1, 2, 4, 6]
        >>> [step for step in range(8, 24) if strategy.synchronises(step)]  # compressed momenta; other steps are local
        [8, 9, 11, 13, 17, 21]

    Args:
        codec: compresses the momenta; the paper's is `OneBit(norm="l2", whole=True)`.
        variance_steps: steps during which the variance is updated; more gives a better variance, and sends more.
        variance_doubling: $\kappa$, averages of gradients before the gap between them doubles; more sends more.
        local_doubling: synchronizations before the gap between them doubles; more sends more.
        most_local: the widest gap, a power of two; 1 synchronizes at every step.
    """

    codec: Codec = OneBit(norm="l2")
    variance_steps: Annotated[int, Range("1..", "1000 is usual")] = 1000
    variance_doubling: Annotated[int, Range("1..", "16 is usual")] = 16
    local_doubling: Annotated[int, Range("1..", "1000 is usual")] = 1000
    most_local: int = 16

    paper = "Lu et al., 0/1 Adam, ICLR 2023, arXiv:2202.06009"
    waits = "at every synchronisation, all workers wait for the slowest one and for two transfers of compressed momenta"
    limits = "needs ZeroOneAdam; the workers' gradients must be similar enough for a few local steps"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            sends_gradients=True,
            reads_gradient=True,
            steady_from=self._widest_from,
            needs_equal_start=True,
            feeds_back=True,
        )

    def __post_init__(self) -> None:
        check_payloads(self.codec)
        check_sizes(self.codec)
        if self.most_local < 1 or self.most_local & (self.most_local - 1):
            raise ConfigError(f"most_local={self.most_local}: must be a power of two, since gaps double. 16 is usual")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the optimizer is `ZeroOneAdam`."""
        if optimizer is not None and not isinstance(optimizer, ZeroOneAdam):
            raise ConfigError(
                f"{type(optimizer).__name__} under ZeroOne: it has no local steps to synchronize. Use ZeroOneAdam"
            )

    def averages_gradients(self, step: int) -> bool:
        """Return True if this step averages gradients and updates the variance."""
        if step >= self.variance_steps:
            return False
        gap, place = _doubling(step, self.variance_doubling, self.variance_steps)
        return place % gap == 0

    def synchronises(self, step: int) -> bool:
        """Return True if all workers hold the same parameters after this step."""
        if step < self.variance_steps:
            return True
        gap, place = _doubling(step - self.variance_steps, self.local_doubling, self.most_local)
        return place % gap == gap - 1

    def start(self, r: Replica) -> None:
        """Prepare the optimizer for the first step, which averages gradients."""
        self._prepare(r)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Launch the all-reduce of one bucket's gradient, at steps that update the variance."""
        return mean_(r.comm, r.g[part], count=r.active) if self.averages_gradients(r.step) else None

    def before_step(self, r: Replica) -> None:
        """Average the momenta of this step, or prepare a local step."""
        if self.averages_gradients(r.step):
            return
        if self.synchronises(r.step):
            self._synchronise(r)
        elif not all_finite(r.g):
            # The other workers do not know this, so this worker takes the step too, with a zero gradient.
            r.g.zero_()
            r.count("skipped_steps")

    def after_step(self, r: Replica) -> None:
        """Prepare the optimizer for the next step."""
        self._prepare(r)

    def restart(self, r: Replica) -> None:
        """Start the next local steps at the parameters, as after a synchronization."""
        optimizer = replica_view(r).optimizer
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.forget_local_steps()

    @property
    def _widest_from(self) -> int:
        """The step from which gaps have their full width."""
        widths = self.most_local.bit_length() - 1  # 1, 2, 4, ... below `most_local`
        return self.variance_steps + self.local_doubling * (2**widths - 1)

    def _prepare(self, r: Replica) -> None:
        optimizer = replica_view(r).optimizer
        assert isinstance(optimizer, ZeroOneAdam)  # by `check`
        optimizer.set_local(local=not self.synchronises(r.step))
        # Gradients that are averaged update the variance.
        if self.averages_gradients(r.step):
            optimizer.unfreeze()
        else:
            optimizer.freeze()

    def _synchronise(self, r: Replica) -> None:
        """Average the momenta since the last synchronization; all skip the step if the mean is not finite."""
        view, target = replica_view(r), momentum_vector(r)
        parameters, momenta = view.within(slice(0, r.x.numel()), target)
        # Ranks without data have zero gradients; `share` corrects the mean for them.
        view.next_momenta_(slice(0, r.x.numel()), target, r.g, share=r.comm.size / r.active)
        key = draw_key(r.seed, r.step)
        mean = two_stage_mean_(r.comm, target, self.codec, r.state, key=key).wait()
        # All entries of a mean that is not finite are NaN.
        if not all_finite(mean[:1]):
            view.optimizer.skip_next_step()
            r.count("skipped_steps")
            return
        view.optimizer.set_next_momenta(momenta, parameters, rescale=False)


def _doubling(step: int, times: int, most: int) -> tuple[int, int]:
    """Return the gap at a step, and the steps since the first gap of this width; gaps double after `times` gaps."""
    # A loop over the few widths is faster than one over the steps of a run.
    gap, begin = 1, 0
    while 2 * gap <= most and step >= begin + times * gap:
        begin += times * gap
        gap *= 2
    return gap, step - begin
