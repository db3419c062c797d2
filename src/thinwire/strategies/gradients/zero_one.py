"""Average gradients ever more seldom, say momenta in a bit an entry in between, and in the end only now and then."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import Codec, State, draw_key
from thinwire.codecs.feedback import resize_errors
from thinwire.codecs.one_bit import OneBit
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.optimizers.replica_view import replica_view
from thinwire.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.reduce.compressed_all_reduce import mean_, two_stage_mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class ZeroOne(Strategy):
    r"""Average gradients at steps that lie ever farther apart, and agree on coded momenta at others, later at few.

    Needs `ZeroOneAdam`. For `variance_steps`, gradients are averaged at steps $0 = k_0 < k_1 < \dots$ with
    $k_{j+1} - k_j = 2^{\lfloor j/\kappa \rfloor}$, and the variance follows them; at all other steps momenta are agreed
    on in two stages with what each left unsaid, as under `CompressedMomentum`. Then the variance stays, and workers
    take steps of their own between agreements that lie $1, \dots, 1, 2, \dots, 2, 4, \dots$ steps apart, each gap
    `local_doubling` times, up to `most_local`: they agree on

    $$\bar m = C\Big(\frac{\sum_k \gamma_k m_{i,k}}{\sum_k \gamma_k} + e_i\Big) \text{ in two stages}, \qquad
      x \leftarrow x' - \frac{\sum_k \gamma_k}{\sqrt v + \epsilon} \bar m ,$$

    the mean momentum of the steps since the last agreement $x'$. It has the size of a momentum whatever their number,
    so that what was left unsaid before is still worth what it was.

    After every agreement all hold the same parameters, bit for bit. A gradient that is not finite counts as zero where
    a worker is alone; where all agree on momenta they all pass over the step, and what was left unsaid stays as it is.
    Traffic, per worker: $2\frac{n-1}{n}$ of the gradient at the first kind of step, of its codes at the second and at
    agreements, nothing in between. State: what the codec left unsaid, like the parameters and an $n$-th of them; in 16
    bits `said`, like the parameters in fp32.

    Lu et al., 0/1 Adam, ICLR 2023, arXiv:2202.06009, Algorithm 1.

    Args:
        codec: how momenta are said; `OneBit(norm="l2", whole=True)` as in the paper.
        variance_steps: steps at which the variance may still move; more follows the gradient longer, and says more.
        variance_doubling: $\kappa$, so many averages of gradients until the gap between them doubles; more says more.
        local_doubling: so many agreements until the gap between them doubles; fewer says less, sooner.
        most_local: the widest gap, a power of two; 1 agrees at every step.
    """

    codec: Codec = OneBit(norm="l2")
    variance_steps: int = 1000
    variance_doubling: int = 16
    local_doubling: int = 1000
    most_local: int = 16

    paper = "Lu et al., 0/1 Adam, ICLR 2023, arXiv:2202.06009"
    waits = "at every agreement, all wait for the slowest worker and for its codes to travel, twice"
    limits = "needs ZeroOneAdam; gradients must be alike enough for a few steps alone"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        for name in ("variance_steps", "variance_doubling", "local_doubling"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1; 1000, 16 and 1000 are usual")
        if self.most_local < 1 or self.most_local & (self.most_local - 1):
            raise ConfigError(f"most_local={self.most_local}: gaps double, so it must be a power of two; 16 is usual")

    @property
    def sends_gradients(self) -> bool:
        """Yes, bucket by bucket, at steps at which the variance moves."""
        return True

    @property
    def reads_gradient(self) -> bool:
        """Yes, to make momenta of it."""
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse others than the one that knows these kinds of steps."""
        if not isinstance(optimizer, ZeroOneAdam):
            raise ConfigError(
                f"{type(optimizer).__name__} under ZeroOne: it cannot go back to where all agreed last; use ZeroOneAdam"
            )

    def resized(self, states: Sequence[State], size: int) -> list[dict[str, Tensor]]:
        """The states of another number of workers, which together owe what these do."""
        return resize_errors(states, size)

    def averages(self, step: int) -> bool:
        """Whether gradients are averaged at this step, and the variance moves."""
        if step >= self.variance_steps:
            return False
        gap, place = _doubling(step, self.variance_doubling, self.variance_steps)
        return place % gap == 0

    def agrees(self, step: int) -> bool:
        """Whether all hold the same parameters after this step."""
        if step < self.variance_steps:
            return True
        gap, place = _doubling(step - self.variance_steps, self.local_doubling, self.most_local)
        return place % gap == gap - 1

    def start(self, r: Replica) -> None:
        """The first step is one of gradients."""
        self._prepare(r)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Launch the mean of one bucket, at steps at which the variance moves."""
        return mean_(r.comm, r.g[part], count=r.active) if self._kind(r)[0] else None

    def before_step(self, r: Replica) -> None:
        """Agree on the momentum of this step, or go alone."""
        averaged, agreed = self._kind(r)
        if averaged:
            return
        if agreed:
            self._agree(r)
        elif not r.x.is_meta and not bool(r.g.isfinite().all()):
            r.g.zero_()
            r.metrics["skipped_steps"] = 1.0

    def after_step(self, r: Replica) -> None:
        """Tell the optimizer what kind of step comes next."""
        self._prepare(r)

    def _kind(self, r: Replica) -> tuple[bool, bool]:
        """Whether this step averages, and whether it agrees; a dry run, without an optimizer, is at its widest gap."""
        if replica_view(r.moments) is None:
            return False, r.step % self.most_local == self.most_local - 1
        return self.averages(r.step), self.agrees(r.step)

    def _prepare(self, r: Replica) -> None:
        view = replica_view(r.moments)
        if view is None or not isinstance(view.optimizer, ZeroOneAdam):
            return
        view.optimizer.go_alone(not self.agrees(r.step))
        if self.averages(r.step):
            view.optimizer.thaw()
        else:
            view.optimizer.freeze()

    def _agree(self, r: Replica) -> None:
        """Average the momenta since the last agreement; all skip the step if any of it is not finite."""
        view, target = replica_view(r.moments), self._target(r)
        parameters, momenta = view.within(slice(0, r.x.numel()), target) if view else ([], [])
        if view:
            view.next_momenta_(slice(0, r.x.numel()), target, r.g, share=r.comm.size / r.active)
        key = draw_key(r.seed, r.step)
        agreed = two_stage_mean_(r.comm, target, self.codec, r.state, key=key).wait()
        if view is None:
            return
        if not bool(agreed[:1].isfinite().all()):
            view.optimizer.skip()
            r.metrics["skipped_steps"] = 1.0
            return
        view.optimizer.set_next_momenta(momenta, parameters, rescale=False)

    def _target(self, r: Replica) -> Tensor:
        """Where momenta are sent from: the gradient's own memory, where that is exact."""
        if r.g.dtype in (torch.float32, torch.float64):
            return r.g
        if "said" not in r.state:
            r.state["said"] = torch.zeros_like(r.g, dtype=torch.promote_types(r.g.dtype, torch.float32))
        return r.state["said"]


def _doubling(step: int, times: int, most: int) -> tuple[int, int]:
    """Where gaps double after so many of each, but not beyond the most: the gap at a step, and the place among them."""
    gap, begin = 1, 0
    while 2 * gap <= most and step >= begin + times * gap:
        begin += times * gap
        gap *= 2
    return gap, step - begin
