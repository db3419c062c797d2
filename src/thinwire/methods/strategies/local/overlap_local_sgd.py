# SPDX-License-Identifier: Apache-2.0
"""Average parameters while the next round computes, and pull the workers towards a common anchor."""

from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work, completed
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, draw_key
from thinwire.methods.codecs.cast import Fp32
from thinwire.methods.codecs.feedback import of_server, server_piece_of
from thinwire.methods.reduce.compressed_all_reduce import at_once, mean_from_residual, server_pieces
from thinwire.methods.strategies.base import Rounds, Strategy, Traits
from thinwire.methods.strategies.local.coded_means import (
    check_tracked,
    common_point,
    restart_mean,
    tracked_mean,
    tracks,
)
from thinwire.registry import registered


@registered
class OverlapLocalSGD(Strategy):
    r"""Launch an all-reduce of the parameters every `period` steps, and use the mean `delay` steps later.

    With $\bar x$ the mean that has arrived, $z$ the anchor, equal on all workers, and $v$ its momentum,

    $$v \leftarrow \beta v + (\bar x - z), \qquad z \leftarrow z + \eta v, \qquad
      x_i \leftarrow (1-\alpha) x_i + \alpha z ,$$

    and at the end of the period the all-reduce of the new $x_i$ is launched. The last update is the pull. The first
    $\bar x$ is the initial parameters. The mean is always used at that step, even if it arrives earlier, so results do
    not depend on timing. While gradients are zero, this combination of mean, anchor and momentum is constant:

    $$y = a \bar x + (1-a) z + a \alpha \beta v, \qquad a = \frac{\eta}{\alpha(1-\beta) + \eta(1-\alpha)} .$$

    Local steps between a launch and the next pull enter $y$ with a factor of only $1-\alpha$. With a period $\tau$ and
    a delay $d$, the effective learning rate is $a (1 - \alpha d/\tau)$ times the optimizer's (`progress`). Use
    `compensate` or a larger learning rate to correct for it.

    With an unbiased `codec` $C$ the mean is $\bar x = z + \tfrac1n \sum_j C(x_j - z)$. With `ErrorFeedback` workers
    send their changes since the last message, and with $x_j'$ the parameters at that time the mean is
    $\bar x \leftarrow \bar x + \tfrac1n \sum_j C(x_j - x_j')$. The residual makes the mean older, and `progress`
    smaller. If this mean takes two stages, each rank moves its piece of the anchor, $z$, and sends $C(z - z')$ in the
    second stage; the workers add it to $z'$, to which they are pulled. So only servers need $\bar x$, $z$ and $v$.

    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and period, with at most one message in
    flight. If the codec's mean takes two stages, the second starts in the middle of the delay. State: `anchor` ($z$),
    `velocity` ($v$) and, with `compensate`, `start` (the parameters at the last launch), each like the parameters. With
    a codec anchor and velocity are in fp32, and the codec's state is added; with `ErrorFeedback` also `mean`
    ($\bar x$), like the anchor, and `sent` ($x_i'$). With `ErrorFeedback` in two stages: `known_anchor` ($z'$), `error`
    (the residual minus $x_i'$), and for this rank's $1/n$ of the parameters `server_mean`, `server_anchor` and
    `server_velocity`, unless parameters are in fp64.

    Wang, Liang and Joshi, Overlap Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD,
    ICASSP 2020, arXiv:2002.09539. Shorter delays, `lr` and `nesterov`: Douillard et al., Streaming DiLoCo, 2025,
    arXiv:2501.18512.

    Args:
        period: $\tau$, optimizer steps between launches; more sends less and hides longer transfers.
        pull: $\alpha$, the weight of the anchor in the pull, in [0, 1); more keeps workers closer together and undoes
            more of their steps.
        momentum: $\beta$ of the anchor, in [0, 1); more smooths the anchor and raises `progress`.
        lr: $\eta$, of the anchor's step towards the mean; 1 is usual.
        nesterov: whether the anchor's momentum is Nesterov momentum.
        delay: $d$, steps from a launch to its pull, 1 to `period`; None is the whole period. More hides longer
            transfers; less uses fresher means.
        compensate: multiply the local update of each period by 1/`progress`, as a larger learning rate would; needs a
            delay of the whole period.
        codec: compresses the differences; None sends them uncompressed.

    Example:
        The effective learning rate, as a multiple of the optimizer's:

        >>> import thinwire
        >>> round(thinwire.OverlapLocalSGD().progress, 2)
        0.69
        >>> round(thinwire.OverlapLocalSGD(period=8, delay=2).progress, 2)
        1.47
    """

    period: Annotated[int, Range("1..", "8 is usual")] = 8
    pull: Annotated[float, Range("[0, 1)", "At 1 every step would be undone. 0.6 is usual")] = 0.6
    momentum: Annotated[float, Range("[0, 1)", "0.7 is usual")] = 0.7
    lr: Annotated[float, Range("(0, inf)", "1 is usual")] = 1.0
    nesterov: bool = False
    delay: Annotated[int | None, Range("1..{period}", "None is the period")] = None
    compensate: bool = False
    codec: Codec | None = None

    paper = "Wang et al., Overlap Local-SGD, ICASSP 2020, arXiv:2002.09539"
    waits = "`delay` steps after each all-reduce was launched, all workers wait until it has ended"
    limits = "averages are `delay` steps old, so each step is partly undone: raise the learning rate"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period,
            rounds=Rounds(delay=self._delay, postpones=True),
            on_resize="restart" if tracks(self.codec) else "keep",
            lr_factor=1.0 if self.compensate else self.progress,
        )

    def __post_init__(self) -> None:
        if self.compensate and self._delay < self.period:
            raise ConfigError(
                f"compensate=True with delay={self.delay}: needs a delay of the whole period. Use delay=None, or raise "
                "the optimizer's lr instead"
            )

    @property
    def _delay(self) -> int:
        return self.period if self.delay is None else self.delay

    @property
    def progress(self) -> float:
        r"""Effective learning rate of $y$ in steady state, divided by the optimizer's: $a (1 - \alpha d/\tau)$."""
        drag = self.pull * (1 - self.momentum)
        return self.lr * (1 - self.pull * self._delay / self.period) / (drag + self.lr * (1 - self.pull))

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the codec can compress differences; a biased one needs error feedback."""
        check_tracked(self.codec)

    def start(self, r: Replica) -> None:
        """Allocate the anchor and its momentum; the initial parameters are also the first mean."""
        if self._served(r):
            r.state["known_anchor"] = common_point(r, Fp32())
            r.state["error"] = r.x.to(torch.float32, copy=True).neg_()
        else:
            # The first mean is also the first anchor, which must be equal on all workers.
            r.state["anchor"] = common_point(r, self.codec)
            r.state["velocity"] = torch.zeros_like(r.state["anchor"])
        self._launch_first(r)
        if self.compensate:
            r.state["start"] = r.x.clone()

    def _launch_first(self, r: Replica) -> None:
        # The initial parameters count as a mean that has arrived, so the first round is like every other one.
        anchor = r.state[self._anchor(r)]
        r.launch("mean", completed([anchor.new_zeros(()) if self._served(r) else anchor.clone()]))

    def _served(self, r: Replica) -> bool:
        """Return True if servers move the anchor; `error` has too few digits for parameters in fp64."""
        return self.codec is not None and at_once(self.codec) and r.x.dtype != torch.float64

    def _anchor(self, r: Replica) -> str:
        return "known_anchor" if self._served(r) else "anchor"

    def after_step(self, r: Replica) -> None:
        """Use the mean, if it was launched `delay` steps ago; at the end of a period, launch the next one."""
        # Merge first: with a delay of a whole period both happen at this step, and the message must include the pull.
        left = (self._delay - r.step) % self.period
        if left == 0:
            self._merge_(r)
        elif left == self._delay // 2:
            r.advance("mean")
        if r.step % self.period == 0 and not r.postponed:
            if self.codec is not None and self._served(r):
                r.launch("mean", self._moved_anchor(r, self.codec))
            else:
                mean = tracked_mean(r, r.x, r.state["anchor"], self.codec)
                r.launch("mean", mean.then(lambda mean: [mean]))
            if self.compensate:
                r.state["start"].copy_(r.x)

    def _moved_anchor(self, r: Replica, codec: Codec) -> Work[list[Tensor]]:
        """Launch the message after which servers move their pieces of the anchor, and workers follow at the wait."""
        z, state = r.state["known_anchor"], r.state
        own = server_pieces(r.comm, r.x, codec)[r.comm.rank]

        def serve(change: Tensor, part: slice) -> Tensor:
            inside = slice(part.start - own.start, part.stop - own.start)
            mean, anchor = (server_piece_of(state, name, own, z[own].clone)[inside] for name in ("mean", "anchor"))
            velocity = server_piece_of(state, "velocity", own, lambda: torch.zeros_like(z[own]))[inside]
            self._move_(anchor, velocity, mean.add_(change))
            return anchor - z[part]

        key = draw_key(r.seed, r.step)
        moved = mean_from_residual(r.comm, r.x, codec, r.state, key=key, into=z, serve=serve)
        state["error"].sub_(r.x)
        # The anchor itself is in the state; what has arrived is not saved twice.
        return moved.then(lambda anchor: [anchor.new_zeros(())])

    def _merge_(self, r: Replica) -> None:
        mean = r.collect("mean")
        if mean is None:
            return
        if self.compensate:
            # Only the steps of the round are lengthened, so this comes before the pull.
            r.x.sub_(r.state["start"]).div_(self.progress).add_(r.state["start"])
        if not self._served(r):
            self._move_(r.state["anchor"], r.state["velocity"], mean[0])
        r.x.lerp_(r.state[self._anchor(r)].to(r.x.dtype), self.pull)

    def _move_(self, anchor: Tensor, velocity: Tensor, mean: Tensor) -> None:
        gap = mean - anchor
        velocity.mul_(self.momentum).add_(gap)
        anchor.add_(gap.add_(velocity, alpha=self.momentum) if self.nesterov else velocity, alpha=self.lr)

    def restart(self, r: Replica) -> None:
        """Restart at the parameters, which become the anchor and the received mean, as in the first round."""
        # The mean in flight would pull the workers back to their old parameters. The velocity is a sum of distances to
        # the old anchor, so it is dropped too.
        r.collect("mean")
        for name in (self._anchor(r), *(["start"] if self.compensate else [])):
            r.state[name].copy_(r.x)
        if self._served(r):
            # A server's pieces begin again at the anchor.
            for name in [name for name in r.state if of_server(name)]:
                del r.state[name]
            r.state["error"].copy_(r.x).neg_()
        else:
            r.state["velocity"].zero_()
            restart_mean(r, self.codec)
        self._launch_first(r)
