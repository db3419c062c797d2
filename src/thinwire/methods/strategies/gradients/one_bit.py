# SPDX-License-Identifier: Apache-2.0
"""Average gradients during a warm-up, then momenta in one bit per entry."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.kernels import is_finite, read_flags
from thinwire.core.kernels.decisions import decide, holds
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_payloads, check_sizes, draw_key
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.freezing import FreezingOptimizer
from thinwire.methods.optimizers.replica_view import momentum_vector, replica_view
from thinwire.methods.reduce.compressed_all_reduce import mean_, two_stage_mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.registry import registered

_PREFIX = "momentum/"
# Entries of a gradient that are compared to detect changes, in runs of 16 so that reads stay contiguous.
_SAMPLE_ENTRIES, _RUN = 65_536, 16
# Entries of one message with `overlap`: 64 kB to each of four workers. Smaller messages cost more than they hide.
_MESSAGE_ENTRIES = 1 << 21


@registered
class CompressedMomentum(Strategy):
    r"""Average gradients until the optimizer's variance is stable, then average compressed momenta.

    Needs an optimizer that can freeze its variance, `OneBitLamb` or `OneBitAdam`. For `warmup_steps` this is
    `AllReduce()`. After that every worker updates the last common momentum with its own gradient, and the results are
    averaged in two stages, each with its own residual ($e_i$, $\bar e_j$):

    $$m_i = \beta_1 m + (1-\beta_1) g_i, \qquad y_i = C(m_i + e_i), \quad e_i \leftarrow m_i + e_i - y_i,$$

    $$m = C\Big(\tfrac1n \sum_i y_i + \bar e\Big), \quad
      \bar e \leftarrow \tfrac1n \sum_i y_i + \bar e - m .$$

    Every rank decodes the same bytes, so parameters stay equal on all ranks. If a gradient is not finite on any rank,
    all ranks skip the step and keep their residuals.

    Traffic per worker and step: $2\frac{n-1}{n}$ of the gradient during the warm-up, of its payload (one bit per entry,
    and a scale per block) afterwards. State: the residuals, like the parameters, and $1/n$ of that for the server's
    residual; with `overlap`, or with parameters in 16 bits, `message`, like the parameters in fp32.

    Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888, Algorithm 1; Li et al., 1-bit LAMB, HiPC 2022,
    arXiv:2104.06069, Algorithm 1.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(4096, 1, bias=False)
        ...     optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-3)
        ...     worker = thinwire.attach(model, optimizer, CompressedMomentum(warmup_steps=2), comm=comm)
        ...     nbytes = []
        ...     for step in range(4):
        ...         before = comm.meter.payload_bytes
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 4096) * (comm.rank + 1)).sum().backward()
        ...         optimizer.step()
        ...         nbytes.append(comm.meter.payload_bytes - before)
        ...     return nbytes
        >>> thinwire.run_threads(2, train)[0]  # two steps in fp32, then one bit per entry and a scale per block
        [16384.0, 16384.0, 552.0, 552.0]

    Args:
        codec: compresses the momenta; `OneBit(norm="l2")` has a scale for every block, with `whole=True` one scale for
            the whole vector, as in the papers.
        warmup_steps: steps before momenta are compressed; more freezes a better variance, and sends more. None ends the
            warm-up when the variance is stable.
        settled: with `warmup_steps=None`, the relative change of the variance in $1/(1-\beta_2)$ steps at which it
            counts as stable.
        max_norm: clips gradients with one factor on all ranks: by the norm of their mean during the warm-up, by the
            root of their mean square norm afterwards, which takes an all-reduce of 8 bytes before momenta are sent.
            If parameters have several dtypes, each dtype's vector is clipped separately.
        rescale: scale the momenta of all tensors to one size before compression, for a codec with one scale.
        overlap: send parts while the backward pass still runs; the training loop must not change gradients then.
        feedback: False drops the residuals, to measure what error feedback contributes.
    """

    codec: Codec = OneBit(norm="l2")
    warmup_steps: Annotated[int | None, Range("1..", "The variance needs a step. A sixth of the run is usual")] = 1000
    settled: Annotated[float, Range("(0, 1)", "0.04 is usual")] = 0.04
    max_norm: Annotated[float | None, Range("(0, inf)", "1 is usual. None disables clipping")] = None
    rescale: bool = False
    overlap: bool = False
    feedback: bool = True

    paper = "Li et al., 1-bit LAMB, HiPC 2022, arXiv:2104.06069"
    waits = (
        "every step, all wait for the slowest worker and for the transfer of the momenta (of gradients in the warm-up)"
    )
    limits = "needs OneBitLamb or OneBitAdam, and a warm-up long enough for a stable variance"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            sends_gradients=True,
            reads_gradient=True,
            data_dependent_bytes=self.warmup_steps is None,
            steady_from=self.warmup_steps or 0,
            equal_replicas=True,
            lr_factor=1.0 if self.feedback else None,
            feeds_back=self.feedback,
            growing=(_PREFIX,),
            needs_whole=(
                "a rank knows the norm of its own block only. Set warmup_steps to a number, and clip with "
                "clip_gradient_norm_(model, max_norm, mesh) before optimizer.step()"
                if self.max_norm is not None or self.warmup_steps is None
                else ""
            ),
        )

    def __post_init__(self) -> None:
        check_payloads(self.codec)
        check_sizes(self.codec)
        if self.overlap and self.max_norm is not None:
            raise ConfigError(
                f"overlap=True, max_norm={self.max_norm}: the norm is only known after the backward pass, when the "
                "first payloads have been sent. Keep one of the two"
            )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the optimizer can freeze its variance."""
        if optimizer is not None and not isinstance(optimizer, FreezingOptimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} under CompressedMomentum: its variance cannot be frozen. Use "
                "OneBitLamb or OneBitAdam, or AllReduce(codec=...) to compress gradients"
            )

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Launch the mean of one bucket's gradient, or with `overlap` of the momenta that are ready."""
        if _warm(r):
            return mean_(r.comm, r.g[part], count=r.active)
        if self.overlap and (ready := _next_message(r, part)) is not None:
            self._send(r, ready)
        return None

    def before_step(self, r: Replica) -> None:
        """Clip the gradient, then average the momenta of this step."""
        warm = _warm(r)
        if self.max_norm is not None:
            # In fp32 at least: squares of 16-bit gradients overflow fp16.
            norm = torch.linalg.vector_norm(r.g, dtype=torch.promote_types(r.g.dtype, torch.float32))
            square = norm.double().square().reshape(1)
            if not warm:
                # Workers have different gradients now, and different factors would bias the mean. The norms in the
                # headers of payloads arrive too late: the encoded values depend on the factor.
                square = mean_(r.comm, square, count=r.active).wait()
            r.g.mul_((self.max_norm / square.sqrt()).clamp(max=1.0).to(r.g.dtype))
        if warm:
            return
        if not _in_flight(r):
            self._send(r, slice(0, r.x.numel()))
        self._receive(r)

    def after_step(self, r: Replica) -> None:
        """Freeze the variance at the end of the warm-up."""
        view = replica_view(r)
        if view.optimizer.frozen:
            return
        # In a dry run it is due at every step.
        due = decide(r.x, lambda: r.step % view.variance_steps == 0, most=True, least=True)
        if self.warmup_steps is not None:
            settled = r.step >= self.warmup_steps
        elif view.has_first_parameter and due:
            # All ranks must freeze at the same step, so the mean decides: it is the same number on every rank.
            change = mean_(r.comm, view.optimizer.variance_change().reshape(1)).wait()
            settled = decide(change, lambda: bool(change < self.settled), most=False, least=True)
        else:
            settled = False
        if settled:
            view.optimizer.freeze()

    def _target(self, r: Replica) -> Tensor:
        return momentum_vector(r, overwrites=not self.overlap)  # with it, the backward pass still adds to the gradient

    def _send(self, r: Replica, part: slice) -> None:
        """Send this part's next momentum, and drop that of an earlier backward pass without a step."""
        target, name = self._target(r), f"{_PREFIX}{part.start}"
        r.collect(name)
        samples = [_sample(r, part)] if self.overlap else []
        # Ranks without data have zero gradients; `share` corrects the mean for them.
        replica_view(r).next_momenta_(part, target, r.g, share=r.comm.size / r.active, rescale=self.rescale)
        # The codec itself adds its residual, so it is cleared before every message.
        if not self.feedback:
            for state_name, residual in r.state.items():
                if state_name == "error" or state_name.startswith("server_error/"):
                    residual.zero_()
        work = two_stage_mean_(
            r.comm,
            target[part],
            self.codec,
            r.state,
            key=draw_key(r.seed, r.step, offset=part.start),
            offset=part.start,
            length=r.x.numel(),
            pending=r.pending_means,
        )
        r.launch(name, work.then(lambda mean: [mean, *samples]))

    def _receive(self, r: Replica) -> None:
        """Pass the mean momentum to the optimizer, or skip the step if it is not finite."""
        received = {start: r.collect(f"{_PREFIX}{start}") for start in _in_flight(r)}
        means = {start: found for start, found in received.items() if found}
        for start, (mean, *samples) in means.items():
            _refuse_changes(r, slice(start, start + mean.numel()), samples)
        view = replica_view(r)
        # All entries of a mean that is not finite are NaN, so the first one suffices.
        if not all(read_flags([is_finite(torch.cat([mean[:1] for mean, *_ in means.values()]))])):
            view.optimizer.skip_next_step()
            r.count("skipped_steps")
            return
        parameters, momenta = view.within(slice(0, r.x.numel()), self._target(r))
        view.optimizer.set_next_momenta(momenta, parameters, rescale=self.rescale)


def _warm(r: Replica) -> bool:
    """Return True while gradients are still averaged."""
    return not replica_view(r).optimizer.frozen


def _in_flight(r: Replica) -> list[int]:
    """Return the first indices of the parts that are in flight."""
    return [int(name.removeprefix(_PREFIX)) for name in r.inflight if name.startswith(_PREFIX)]


def _next_message(r: Replica, part: slice) -> slice | None:
    """Return this part and those since the last message, once they are large enough for a message; else None.

    Parts arrive from the end of the vector to its beginning. Messages that are in flight when the end of the vector
    arrives belong to a backward pass without a step.
    """
    whole = r.x.numel()
    if part.stop == whole:
        for start in _in_flight(r):
            r.collect(f"{_PREFIX}{start}")
    ready = slice(part.start, min(_in_flight(r), default=whole))
    enough = min(whole // 4, _MESSAGE_ENTRIES)
    return ready if part.start == 0 or ready.stop - ready.start >= enough else None


def _sample(r: Replica, part: slice) -> Tensor:
    """Return a sample of a part's gradient, in evenly spaced runs; all of it for a short vector."""
    g, gap = r.g[part], _RUN * -(-r.g.numel() // _SAMPLE_ENTRIES)
    whole = g.numel() // gap * gap
    return torch.cat([g[:whole].view(-1, gap)[:, :_RUN].reshape(-1), g[whole:][:_RUN]])


def _refuse_changes(r: Replica, part: slice, samples: Sequence[Tensor]) -> None:
    """Check that the loop has not changed gradients after they were sent."""
    for before in samples:
        now = _sample(r, part)
        if not holds(((before == now) | (before.isnan() & now.isnan())).all()):
            raise ConfigError(
                f"step {r.step}: gradients were changed after backward() had sent them (clipped, or unscaled by a "
                "GradScaler). Use CompressedMomentum(overlap=False), and its max_norm to clip"
            )
