# SPDX-License-Identifier: Apache-2.0
"""Take a step of an outer optimizer along the workers' mean displacement, once per period."""

from collections.abc import MutableMapping
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.work import Work, completed
from thinwire.core.replica.flat import Segment
from thinwire.core.replica.moments import average_due_, check_periods
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy, Traits
from thinwire.methods.strategies.local.coded_means import (
    check_tracked,
    forget_residuals,
    mean_from,
    pull_mean_,
    restart_mean,
    track,
    tracked_mean,
    tracks,
)
from thinwire.methods.strategies.local.local_sgd import Local, Period
from thinwire.methods.strategies.local.means import all_gather_, reduce_scatter, weight_share, weighted_mean
from thinwire.methods.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.methods.strategies.local.outer_step import WHOLE, OuterStep, Placement, factor_of_rounds
from thinwire.methods.strategies.local.outliers import ROUNDS, Outliers, guard, report_outliers
from thinwire.registry import registered

Carry = Literal["off", "full", "adaptive"]


@registered
class DiLoCo(OuterStep):
    r"""Take a step of an outer optimizer from the start of the round along the mean displacement, every `period` steps.

    With $\theta$ the outer parameters, equal on all workers, and $x_i$ the parameters of worker $i$, every $H$ steps

    $$\Delta = \tfrac1n \sum_i (\theta - x_i'), \qquad \theta \leftarrow \text{OuterOpt}(\theta, \Delta), \qquad
      x_i \leftarrow \alpha x_i + (1-\alpha) \theta ,$$

    where $x_i'$ are the parameters that worker $i$ sent `delay` steps before; training continues meanwhile. The steps
    of the delay are in $x_i$ only, so $\alpha = 0$ drops them.

    With $F$ `fragments`, each part of the parameters has its own rounds: fragment $f = 0, \ldots, F-1$ ends them at the
    steps $\lfloor (f+1) H/F \rfloor + kH$. If a fragment would have to be sent before the first step, its first round
    is skipped.

    With `weights="samples"` and $s_i$ the samples that worker $i$ has used since its last message, $\Delta$ is
    $\sum_i s_i (\theta - x_i') / \sum_i s_i$. With a `codec` $\Delta$ is the mean of the compressed differences. Error
    feedback with $\alpha > 0$ needs equal weights; see `thinwire.methods.strategies.local.coded_means.tracked_mean`.

    `carry` keeps the steps of the delay in another way than $\alpha$: $x_i \leftarrow \theta + c_i (x_i - x_i')$, with
    $c_i = 1$, or with the cosine between these steps and the outer step, at least 0.

    `outliers` limits the effect of single workers on $\Delta$. Let $m$ be the larger of the workers' median of
    $\|\theta - x_i'\|$ in this round and the median of these medians over eight rounds. Worker $i$ is an outlier if its
    norm is more than $4m$, or is not finite. "clip" scales its displacement to that length, "down-weight" also divides
    by the sum of the factors, and "leave-out" uses the mean of the others. `Worker.metrics` has the number of
    `outliers`, and rank 0 logs their ranks.

    $\Delta$ is not divided by the workers' learning rate, unlike in `SlowMo`. The paper's workers use AdamW; the state
    of their optimizers stays local, unless `moments` has periods at which its moments are averaged. With SGD of `lr=1`
    as outer optimizer the method is Local SGD, with momentum BMUF (Chen and Huo, ICASSP 2016), with Adam FedAdam (Reddi
    et al., ICLR 2021), and with SGD on one worker Lookahead.

    Traffic per worker and period: $2\frac{n-1}{n}$ of the parameters or of their payload, one number more with
    `weights="samples"`, and the base's. If the codec's mean takes two stages, the second starts in the middle of the
    delay. State of each fragment: `anchor` ($\theta$) in fp32 at least, and the outer optimizer's state (`Sharded` and
    `Offloaded` store both elsewhere); with a codec its state, and with error feedback and $\alpha > 0$ `mean` and
    `sent`, like the parameters; with `weights="samples"` the number `samples`; with `carry` the vector `launched`, like
    the parameters; with `outliers` eight numbers.

    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, arXiv:2311.08105,
    Algorithm 1. Fragments, delay and mixing: Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025,
    arXiv:2501.18512, Algorithm 2. Outliers by norm, weights and clipping: Cheng et al., EDiT: A Local-SGD-Based
    Efficient Distributed Training Method for Large Language Models, ICLR 2025, arXiv:2412.07210; the median as the
    measure is our own, and so is the cosine as the weight of carried steps. Moments: DES-LOC, Desynced Low
    Communication Adaptive Optimizers for Training Foundation Models, ICLR 2026, arXiv:2505.22549.

    Args:
        base: the strategy between outer steps; with `Local()`, as in the paper, workers send nothing there.
        period: $H$, optimizer steps between outer steps; more sends less.
        outer: $\text{OuterOpt}$; the paper's is SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
        codec: compresses the differences that are averaged; None sends them uncompressed.
        fragments: $F$, at most the period; more makes messages smaller and more frequent.
        cut: "evenly", or "layers" for fragments of whole modules, nearly even, in the order of the parameters.
        delay: steps from sending a fragment to its outer step, from 0 to `period` - 1; more hides longer transfers,
            and makes $\Delta$ older.
        mixing: $\alpha$ in [0, 1], the weight of the worker's own parameters; more keeps more of the steps of the
            delay, and lets workers drift further apart. At 1 workers are never pulled together.
        weights: "equal", or "samples" to weigh workers by the numbers given to `Worker.record_batch`, such as samples
            or tokens; a step without such a number counts as one, a step without gradient as zero.
        carry: how the steps of the delay are kept: "off" drops them, except for the part $\alpha$; "full" adds them to
            the new point; "adaptive" adds them as far as they agree with the outer step.
        moments: for each moment of the optimizer, such as Adam's first and second, the steps between its averages, each
            a multiple of the period; empty keeps them local. An average sends as much as one of the parameters.
        outliers: "keep"; or "clip", "down-weight" or "leave-out" the displacement of a worker that has moved much
            further than usual, for 16 bytes more to each worker and fragment.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     outer = thinwire.OuterOptimizer("SGD", lr=0.5)
        ...     thinwire.attach(model, optimizer, thinwire.DiLoCo(period=2, outer=outer), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)  # each round's mean displacement is 1
        [-1.0, -1.0]
    """

    base: Strategy = Local()
    period: Period = 500
    outer: OuterOptimizer = OuterOptimizer("SGD", lr=0.7, momentum=0.9, nesterov=True)
    codec: Codec | None = None
    fragments: Annotated[int, Range("1..{period}", "1 averages all parameters at once")] = 1
    cut: Literal["evenly", "layers"] = "evenly"
    delay: Annotated[int, Range("[0, {period})", "0 waits for the all-reduce")] = 0
    mixing: Annotated[float, Range("[0, 1]", "0 takes the outer parameters, 0.5 is usual with a delay")] = 0.0
    weights: Literal["equal", "samples"] = "equal"
    carry: Carry = "off"
    outliers: Outliers = "keep"
    moments: tuple[int, ...] = ()

    paper = "Douillard et al., DiLoCo, 2023, arXiv:2311.08105; Streaming DiLoCo, 2025, arXiv:2501.18512"
    waits = (
        "every `period` steps all wait for the rest of the all-reduce that was launched `delay` steps before, for each "
        "fragment, and without a delay for the slowest; otherwise as its base"
    )
    limits = (
        "the outer learning rate and momentum are tuned together with the period: with SGD the effective learning rate "
        "is the optimizer's times lr / (1 - momentum); without mixing the steps of the delay are lost"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            rounds=replace(
                found.rounds,
                ends=found.rounds.ends if self.ends_together else (),
                # Weights of single fragments have no name in common.
                local=self.base.traits.rounds.local
                and (self.ends_together or (self.delay == 0 and self.mixing == 0 and self.weights == "equal")),
                weight="samples" if self.weights == "samples" and self.fragments == 1 else "",
                fragments=self.fragments,
                delay=self.delay or self.base.traits.rounds.delay,
                guarded=self.outliers != "keep",
                optimizer_state="average" if self.moments else found.rounds.optimizer_state,
            ),
            # A tracked mean sums the changes that all workers have sent.
            on_resize="restart" if self._tracks_mean else "keep",
            lr_factor=self._lr_factor(),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_periods(self.moments, self.period, None)
        if self.base != Local() and (not self.ends_together or self.weights == "samples"):
            raise ConfigError(
                f"base={self.base} with fragments={self.fragments}, delay={self.delay}, mixing={self.mixing}, "
                f"weights={self.weights!r}: the base averages all parameters at once and in its own way. Use "
                "base=Local(), or fragments=1, delay=0, mixing=0.0, weights='equal'"
            )
        if self._tracks_mean and self.weights == "samples":
            raise ConfigError(
                f"codec={self.codec} with mixing={self.mixing}, weights='samples': with error feedback workers send "
                "their changes since the last message, whose sums give the mean only for constant weights. Use "
                "weights='equal', mixing=0.0, or a codec without feedback, such as Quantize(8)"
            )

        if self.carry != "off" and (self.delay == 0 or self.mixing > 0):
            raise ConfigError(
                f"carry={self.carry!r} with delay={self.delay}, mixing={self.mixing}: it replaces the mixing of steps "
                "taken during a delay. Use delay of at least 1 and mixing=0.0, or carry='off'"
            )
        if self.outliers != "keep" and (self._tracks_mean or self.base != Local()):
            raise ConfigError(
                f"outliers={self.outliers!r} with base={self.base}, codec={self.codec}, mixing={self.mixing}: a "
                "guarded mean needs whole displacements from a common point. Use base=Local(), and mixing=0.0 with "
                "error feedback"
            )

    @property
    def ends_together(self) -> bool:
        """Return True if a round ends for all parameters at one step, with equal parameters."""
        return self.fragments == 1 and self.delay == 0 and self.mixing == 0

    @property
    def _tracks_mean(self) -> bool:
        """True if workers do not return to the mean, so that it is the sum of the changes that they have sent."""
        return tracks(self.codec) and self.mixing > 0

    def _lr_factor(self) -> float | None:
        """Return the factor in steady state; steps of the delay count by the share that workers keep."""
        factor = factor_of_rounds(self.base, self.codec)
        if self.outer.momentum is None or factor is None:
            return None
        scale, own = self.outer.lr / (1 - self.outer.momentum), self.mixing
        if self.carry == "adaptive" or self.outliers != "keep":
            return None
        lost = 0.0 if self.carry == "full" else (1 - own) * self.delay / self.period
        return factor * scale * (1 - lost) / (1 - own + own * scale)

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check; if workers are never pulled together, the codec must not lose anything."""
        super().check(size, optimizer)
        check_periods(self.moments, self.period, optimizer)
        # With less mixing, every round also removes a part of the loss from the workers.
        if self.mixing == 1:
            check_tracked(self.codec)

    def check_sharded(self) -> None:
        """Check that the outer optimizer can take its step on a part of the vector."""
        super().check_sharded()
        if not self.outer.is_elementwise():
            raise ConfigError(
                f"Sharded({self}): {self.outer.optimizer} needs the whole vector, such as for a norm. Use SGD or Adam"
            )
        if self.weights == "samples" or self.outliers != "keep" or self.carry != "off":
            raise ConfigError(
                f"Sharded({self}): sharded means have equal weights. Use weights='equal', outliers='keep' and "
                "carry='off'"
            )

    def start(self, r: Replica, where: Placement = WHOLE) -> None:
        """Start the base, and the first round of every fragment."""
        for fragment, _ in self.fragments_in(r):
            super().start(fragment, where)
            if self.weights == "samples":
                fragment.state["samples"] = torch.zeros((), dtype=torch.float64, device="cpu")
            if self.carry != "off":
                fragment.state["launched"] = fragment.x.clone()
            if self.outliers != "keep":
                fragment.state["usual_norms"] = torch.zeros(ROUNDS, dtype=torch.float64, device="cpu")
            if self.codec is not None and self._tracks_mean:
                track(fragment, self.codec, fragment.state["anchor"], pulled=True)

    def after_step(self, r: Replica, where: Placement = WHOLE) -> None:
        """Send the fragment whose round ends in `delay` steps, and end the round of the fragment that is due."""
        self.base.after_step(self.inner(r))
        for fragment, end in self.fragments_in(r):
            if self.weights == "samples":
                fragment.state["samples"] += r.samples
            left = (end - r.step) % self.period
            if left == self.delay:
                self._send(fragment, where)
            elif left == self.delay // 2:
                fragment.advance("average")
            if left == 0:
                self._end_round(fragment, where)
        if self.moments and not r.postponed:
            average_due_(r.moments, r.comm, self.moments, r.step)

    def step_(self, state: MutableMapping[str, Tensor], start: Tensor, average: Tensor) -> None:
        """Take a step of the outer optimizer with the displacement of the average as gradient."""
        self.outer.step_(state["anchor"], start - average, state)

    def restart(self, r: Replica, where: Placement = WHOLE) -> None:
        """Restart the base, and every fragment's round at the parameters; messages in flight are dropped."""
        for fragment, _ in self.fragments_in(r):
            fragment.collect("average")
            super().restart(fragment, where)
            if self._tracks_mean:
                restart_mean(fragment, self.codec, pulled=True)
            if self.weights == "samples":
                fragment.state["samples"].zero_()

    def regroup(self, r: Replica, before: int) -> None:
        """Run the base's hook, and drop the residuals of a tracked mean, which has lost some of them."""
        super().regroup(r, before)
        if self._tracks_mean:
            for fragment, _ in self.fragments_in(r):
                forget_residuals(fragment)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the workers' mean; for messages with error feedback and without mixing see the comment below."""
        if self.weights == "equal":
            point = super().average(r, at)
        else:
            parts = [weighted_mean(r.comm, part.x, part.state["samples"]) for part, _ in self.fragments_in(r)]
            point = torch.cat([part.wait() for part in parts])
        if at in ("end", "outer") and tracks(self.codec) and not self._tracks_mean:
            start = 0
            for part, _ in self.fragments_in(r):
                stop, sent = start + part.x.numel(), part.inflight.get("average")
                # The residuals are this message's error, so its mean must count. It replaces the steps after it, as the
                # outer step without mixing would have done.
                if sent is not None:
                    point[start:stop].copy_(sent.wait()[0])
                start = stop
        return point

    @property
    def _averages_in_place(self) -> bool:
        """True if the base's own average may overwrite the parameters."""
        plain = self.weights == "equal" and self.outliers == "keep" and self.codec is None
        return self.delay == 0 and self.mixing == 0 and plain

    def fragments_in(self, r: Replica) -> list[tuple[Replica, int]]:
        """Return the fragments, each with the step of a period at which its round ends."""
        if self.fragments == 1:
            return [(r, self.period)]
        names = [f"fragment-{f}" for f in range(self.fragments)]
        if names[0] not in r.parts:
            for name, (start, stop) in zip(names, pairwise(self._edges(r.segments)), strict=True):
                r.part(name, slice(start, stop))
        return [(r.parts[name], (f + 1) * self.period // self.fragments) for f, name in enumerate(names)]

    def _edges(self, segments: tuple[Segment, ...]) -> list[int]:
        """Return the first index of every fragment in the vector, and the end."""
        n = segments[-1].stop
        even = [f * n // self.fragments for f in range(self.fragments + 1)]
        if self.cut == "evenly":
            return even
        # A layer is a module with own parameters: consecutive tensors whose names differ in their last part only.
        names = [each.name.rpartition(".")[0] or each.name for each in segments]
        layers = [segment.start for segment, (a, b) in zip(segments[1:], pairwise(names), strict=True) if a != b]
        return [min([0, *layers, n], key=lambda edge: abs(edge - place)) for place in even]

    def _send(self, r: Replica, where: Placement) -> None:
        """Launch the average of the workers' current parameters."""
        if not self._averages_in_place and not r.postponed:
            if self.carry != "off":
                r.state["launched"].copy_(r.x)
            # Ranks with an empty shard wait at the same steps as those with the other shards.
            mean = self._mean(r, where) if r.x.numel() else completed(r.x.clone())
            r.launch("average", mean.then(lambda mean: [mean]))

    def _mean(self, r: Replica, where: Placement) -> Work[Tensor]:
        if self.outliers != "keep":
            return self._guarded_mean(r)
        if self.weights == "samples":
            samples = r.state["samples"].clone()
            r.state["samples"].zero_()
            if self.codec is None:
                return weighted_mean(r.comm, r.x, samples)
            share = weight_share(r.comm, samples, r.x.device)
        else:
            share = 1.0
        if self.codec is not None:
            anchor = r.state["anchor"].to(r.x.device)
            if self._tracks_mean:
                return tracked_mean(r, r.x, anchor, self.codec)
            return mean_from(r, r.x, anchor, self.codec, share)
        return reduce_scatter(r.comm, r.x.clone()) if where.sharded else mean_(r.comm, r.x.clone())

    def _guarded_mean(self, r: Replica) -> Work[Tensor]:
        """Launch the mean of displacements, weighted by their norms."""
        anchor, samples = r.state["anchor"].to(r.x.device), 1.0
        if self.weights == "samples":
            samples = float(r.state["samples"])
            r.state["samples"].zero_()
        delta = r.x.to(anchor.dtype) - anchor
        silent = r.comm.rank in r.comm.silent
        found = torch.stack([delta.norm().double(), delta.new_tensor(0.0 if silent else samples, dtype=torch.float64)])
        rows = torch.stack(r.comm.all_gather(found).wait())
        if not rows.is_meta:
            norms, shares = rows.cpu().unbind(1)
            factors, excess, r.state["usual_norms"] = guard(norms, shares, r.state["usual_norms"], self.outliers)
            report_outliers(r, excess)
            factor = float(factors[r.comm.rank]) * (r.comm.size - len(r.comm.silent))
            # Zero times a number that is not finite is not zero.
            delta = delta.mul_(factor) if factor else torch.zeros_like(delta)
        if self.codec is not None:
            return mean_from(r, anchor + delta, anchor, self.codec)
        return mean_(r.comm, delta).then(lambda mean: (anchor + mean).to(r.x.dtype))

    def _end_round(self, r: Replica, where: Placement) -> None:
        """Take the outer step with the average that has arrived, and pull the worker to the outer parameters."""
        if (arrived := r.collect("average")) is not None:
            average = arrived[0].to(r.state["anchor"])
        elif self._averages_in_place and r.x.numel() and not r.postponed:
            average = self._average(r, where)
        else:
            return
        anchor = r.state["anchor"]
        before = anchor.clone() if self.carry == "adaptive" else anchor
        # The round started at the anchor rounded to the parameters' dtype. Only compressed differences are taken from
        # the anchor itself.
        self.step_(r.state, anchor if self.codec is not None else anchor.to(r.x.dtype), average)
        if self.carry != "off":
            late = r.x.to(anchor) - r.state["launched"].to(anchor)
            if self.carry == "adaptive":
                late.mul_(nn.functional.cosine_similarity(late, anchor - before, dim=0).clamp_(min=0))
            r.x.copy_(late.add_(anchor))
        elif self.mixing == 0:
            self._take_(r, r.x, where)
        elif self.mixing < 1:
            point = self._take_(r, torch.empty_like(r.x), where) if where.sharded else anchor.to(r.x)
            r.x.lerp_(point, 1 - self.mixing)
        if self._tracks_mean:
            pull_mean_(r, self.codec, anchor, 1 - self.mixing)
        if self.ends_together:
            self.base.restart(self.inner(r))

    def _take_(self, r: Replica, x: Tensor, where: Placement) -> Tensor:
        """Write the outer parameters into `x`; if they are sharded, gather the parts."""
        anchor = r.state["anchor"]
        return all_gather_(r.comm, anchor.to(x), x) if where.sharded else x.copy_(anchor)
