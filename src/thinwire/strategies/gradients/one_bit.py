"""Average gradients at first, then momenta in a bit an entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import Codec, State, draw_key
from thinwire.codecs.feedback import resize_errors
from thinwire.codecs.one_bit import OneBit
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.optimizers.freezing import FreezingOptimizer
from thinwire.optimizers.replica_view import replica_view
from thinwire.reduce.compressed_all_reduce import mean_, two_stage_mean_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds

_PREFIX = "momentum/"
_LOOKED_AT, _RUN = 65_536, 16
# Entries whose codes, 64 kB a worker of four, are worth the trouble of a message.
_MESSAGE = 1 << 21


@dataclass(frozen=True)
class CompressedMomentum(Strategy):
    r"""Average gradients at every step until the optimizer's variance has settled; then say momenta, coded.

    With an optimizer that can freeze its variance, `OneBitLamb` or `OneBitAdam`: for `warmup_steps` this is
    `AllReduce()`. Then every worker lets the momentum that all agreed on last follow its own gradient, and all agree
    on the mean of that, in two stages, each of which remembers what it left unsaid ($e_i$, $\bar e_j$):

    $$m_i = \beta_1 m + (1-\beta_1) g_i, \qquad y_i = C(m_i + e_i), \quad e_i \leftarrow m_i + e_i - y_i,$$

    $$m = C\Big(\tfrac1n \sum_i y_i + \bar e\Big), \quad
      \bar e \leftarrow \tfrac1n \sum_i y_i + \bar e - m .$$

    Every rank decodes the same bytes, so parameters stay equal on all ranks. A gradient that is not finite on any rank
    lets all of them skip the step, and what was left unsaid stays as it is.
    Traffic: $2\frac{n-1}{n}$ of the gradient per worker and step at first, of its codes (a bit an entry, and a scale a
    block) later. State: what the codec left unsaid, like the parameters and an $n$-th of them; with `overlap`, or with
    parameters in 16 bits, `said`, like the parameters in fp32.

    Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888, Algorithm 1; Li et al., 1-bit LAMB, HiPC 2022,
    arXiv:2104.06069, Algorithm 1.

    Args:
        codec: how momenta are said; `OneBit(norm="l2")` has a scale for every block, with `whole=True` one for all of
            them, as in the papers.
        warmup_steps: steps before momenta are coded; more freezes a better variance, and says more. None ends them
            when the variance has settled.
        settled: with `warmup_steps=None`, the share of the variance that may still change in $1/(1-\beta_2)$ steps.
        max_norm: gradients are scaled down to this norm: their mean's at first, the root of their mean square norm
            later, with the same factor on all ranks; of every vector by itself, where parameters have several dtypes.
        rescale: brings all tensors' momenta to one size before they are coded; for scales over the whole vector.
        overlap: send codes part by part while the backward pass still runs; gradients must stay as it left them.
        feedback: False forgets what was left unsaid, to see what remembering it is good for.
    """

    codec: Codec = OneBit(norm="l2")
    warmup_steps: int | None = 1000
    settled: float = 0.04
    max_norm: float | None = None
    rescale: bool = False
    overlap: bool = False
    feedback: bool = True

    paper = "Li et al., 1-bit LAMB, HiPC 2022, arXiv:2104.06069"
    waits = "every step, all wait for the slowest worker and for its codes to travel (for the gradient, at first)"
    limits = "needs OneBitLamb or OneBitAdam, and a warm-up long enough for the variance to settle"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.warmup_steps is not None and self.warmup_steps < 1:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps}: the variance needs at least 1 step; a sixth of the run is usual"
            )
        if not 0 < self.settled < 1:
            raise ConfigError(f"settled={self.settled}: must lie between 0 and 1; 0.04 is usual")
        if self.max_norm is not None and not 0 < self.max_norm < inf:
            raise ConfigError(f"max_norm={self.max_norm}: must be positive and finite; 1 is usual, None clips nothing")
        if self.overlap and self.max_norm is not None:
            raise ConfigError(
                f"overlap=True, max_norm={self.max_norm}: the norm is known when the backward pass is over, and the "
                "first codes are on their way by then; keep one of them"
            )

    @property
    def sends_gradients(self) -> bool:
        """Yes, bucket by bucket, until the variance is frozen."""
        return True

    @property
    def reads_gradient(self) -> bool:
        """Yes, to make momenta of it."""
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse one whose variance cannot be frozen."""
        if not isinstance(optimizer, FreezingOptimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} under CompressedMomentum: its momentum cannot be said for it; use "
                "OneBitLamb or OneBitAdam, or AllReduce(codec=...) to code gradients"
            )

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Launch the mean of one bucket, or of what the momentum of this and earlier ones would be."""
        if _warm(r):
            return mean_(r.comm, r.g[part], count=r.active)
        if self.overlap and (gathered := _next_message(r, part)) is not None:
            self._send(r, gathered)
        return None

    def before_step(self, r: Replica) -> None:
        """Agree on the momentum of this step."""
        self._clip_(r)
        if _warm(r):
            return
        if not _in_flight(r):
            self._send(r, slice(0, r.x.numel()))
        self._receive(r)

    def after_step(self, r: Replica) -> None:
        """Freeze the variance, when its time has come."""
        view = replica_view(r.moments)
        if view is None or view.optimizer.frozen:
            return
        if self.warmup_steps is not None:
            settled = r.step >= self.warmup_steps
        elif view.has_first_parameter and r.step % view.variance_steps == 0:
            # All must freeze at the same step, so the mean decides, which is the same number on every rank.
            change = mean_(r.comm, view.optimizer.variance_change().reshape(1)).wait()
            settled = bool(change < self.settled)
        else:
            settled = False
        if settled:
            view.optimizer.freeze()

    def average_(self, r: Replica) -> None:
        """Nothing to do: all ranks hold the same vector."""

    def consensus(self, r: Replica) -> Tensor:
        """The parameters themselves."""
        return r.x

    def resized(self, states: Sequence[State], size: int) -> list[dict[str, Tensor]]:
        """The states of another number of workers, which together owe what these do."""
        return resize_errors(states, size)

    def _clip_(self, r: Replica) -> None:
        if self.max_norm is None:
            return
        norm = torch.linalg.vector_norm(r.g, dtype=torch.promote_types(r.g.dtype, torch.float32))
        square = norm.double().square().reshape(1)
        if not _warm(r):
            square = mean_(r.comm, square, count=r.active).wait()
        r.g.mul_((self.max_norm / square.sqrt()).clamp(max=1.0).to(r.g.dtype))

    def _target(self, r: Replica) -> Tensor:
        """Where momenta are sent from: the gradient's own memory, if it is exact and nobody reads it meanwhile."""
        if not self.overlap and r.g.dtype in (torch.float32, torch.float64):
            return r.g
        if "said" not in r.state:
            r.state["said"] = torch.zeros_like(r.g, dtype=torch.promote_types(r.g.dtype, torch.float32))
        return r.state["said"]

    def _send(self, r: Replica, part: slice) -> None:
        """Send what this part's momentum would be; the result of an earlier backward pass without a step is dropped."""
        target, name = self._target(r), f"{_PREFIX}{part.start}"
        r.collect(name)
        view, seen = replica_view(r.moments), [_sample(r, part)] if self.overlap else []
        if view is not None:
            view.next_momenta_(part, target, r.g, share=r.comm.size / r.active, rescale=self.rescale)
        if not self.feedback:
            for kept, residual in r.state.items():
                if kept == "error" or kept.startswith("server_error/"):
                    residual.zero_()
        key = draw_key(r.seed, r.step, offset=part.start)
        whole = r.x.numel()
        work = two_stage_mean_(r.comm, target[part], self.codec, r.state, key=key, at=part.start, whole=whole)
        r.launch(name, work.then(lambda mean: [mean, *seen]))

    def _receive(self, r: Replica) -> None:
        """Hand the optimizer the mean momentum, part by part; none of it if any of it is not finite."""
        received = {start: r.collect(f"{_PREFIX}{start}") for start in _in_flight(r)}
        agreed = {start: found for start, found in received.items() if found}
        for start, (mean, *seen) in agreed.items():
            _refuse_changes(r, slice(start, start + mean.numel()), seen)
        view = replica_view(r.moments)
        if view is None:
            return
        if not torch.cat([mean[:1] for mean, *_ in agreed.values()]).isfinite().all():
            view.optimizer.skip()
            return
        parameters, momenta = view.within(slice(0, r.x.numel()), self._target(r))
        view.optimizer.set_next_momenta(momenta, parameters, rescale=self.rescale)


def _warm(r: Replica) -> bool:
    """Whether gradients are still averaged; a dry run, which has no optimizer, is past that."""
    view = replica_view(r.moments)
    return view is not None and not view.optimizer.frozen


def _in_flight(r: Replica) -> list[int]:
    """Where the parts begin that are in flight."""
    return [int(name.removeprefix(_PREFIX)) for name in r.inflight if name.startswith(_PREFIX)]


def _next_message(r: Replica, part: slice) -> slice | None:
    """This part and what has come since the last message, once that is worth one; parts come from the end.

    The last part of the vector comes first; what is still in flight then is of a backward pass that no step followed.
    """
    whole = r.x.numel()
    if part.stop == whole:
        for start in _in_flight(r):
            r.collect(f"{_PREFIX}{start}")
    gathered = slice(part.start, min(_in_flight(r), default=whole))
    enough = min(whole // 4, _MESSAGE)
    return gathered if part.start == 0 or gathered.stop - gathered.start >= enough else None


def _sample(r: Replica, part: slice) -> Tensor:
    """Some of a part's gradient, in runs that are spread evenly over it; all of it where the vector is short."""
    g, gap = r.g[part], _RUN * -(-r.g.numel() // _LOOKED_AT)
    whole = g.numel() // gap * gap
    return torch.cat([g[:whole].view(-1, gap)[:, :_RUN].reshape(-1), g[whole:][:_RUN]])


def _refuse_changes(r: Replica, part: slice, seen: Sequence[Tensor]) -> None:
    """Refuse a loop that has changed gradients after they were sent."""
    for before in seen:
        if not before.is_meta and not torch.allclose(before, _sample(r, part), rtol=0.0, atol=0.0, equal_nan=True):
            raise ConfigError(
                f"step {r.step}: gradients were changed after backward() had sent them (clipped, or unscaled by a "
                "GradScaler); use CompressedMomentum(overlap=False), and its max_norm to clip"
            )
