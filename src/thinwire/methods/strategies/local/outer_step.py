# SPDX-License-Identifier: Apache-2.0
"""The common part of SlowMo and DiLoCo: rounds of a base strategy, each followed by a step on the average."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.kernels.decisions import device_for
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, sends_all
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.strategies.local.local_sgd import Period, common_start, compressed_delta
from thinwire.methods.strategies.local.means import all_gather_, own_shard, reduce_scatter
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.methods.topology.base import doubly_stochastic


@dataclass(frozen=True)
class Placement:
    """The location of the state of outer steps.

    Attributes:
        sharded: every worker keeps an even part of it, and takes the outer step on that part.
        on_host: it is in the host's memory instead of on the device of the parameters.
    """

    sharded: bool = False
    on_host: bool = False

    def part_of(self, comm: Comm, x: Tensor) -> Tensor:
        """Return the part of a vector for which this worker has state, as a view."""
        return own_shard(comm, x) if self.sharded else x

    def device_for(self, x: Tensor) -> torch.device:
        """Return the device of the state for parameters `x`."""
        return device_for(x, "cpu" if self.on_host else None)

    def lr_of(self, r: Replica) -> Tensor | float:
        """Return the learning rate for this worker's part; a vector if parameter groups differ."""
        lr = r.lr
        return self.part_of(r.comm, lr).to(self.device_for(r.x)) if isinstance(lr, Tensor) else lr


WHOLE = Placement()
"""Every worker has the whole state, on the device of the parameters."""


def factor_of_rounds(base: Strategy, codec: Codec | None) -> float | None:
    """Return the `lr_factor` of the base's rounds between outer steps; None if it is not known."""
    own = base.traits.lr_factor
    # A base with its own rounds restarts them after each outer step; its factor is that of uninterrupted rounds.
    return own if sends_all(codec) and (own == 1 or not base.traits.period) else None


def scaled_by(base: Strategy, codec: Codec | None, lr: float, momentum: float) -> float | None:
    """Return the `lr_factor` of a step with momentum on the base's rounds."""
    factor = factor_of_rounds(base, codec)
    return None if factor is None else factor * lr / (1 - momentum)


def _is_plain(base: Strategy) -> bool:
    """Return True if the base's average is the plain mean of the parameters."""
    if isinstance(base, Wrapper) or base.traits.equal_replicas or base.traits.timing_dependent:
        return False
    # Without an own `restart` the state does not refer to the parameters.
    return type(base).average is Strategy.average or type(base).restart is Strategy.restart


def estimates(base: Strategy, size: int) -> bool:
    """Return True if each of `size` workers' own parameters are its estimate of the average."""
    traits = base.traits
    if traits.equal_replicas or not traits.rounds.estimates or traits.topology is None:
        return traits.equal_replicas or traits.rounds.estimates
    # On other graphs the average also depends on weights.
    return size == 1 or doubly_stochastic(traits.topology, size)


class OuterStep(Wrapper):
    """Rounds of a base strategy; at the end of each, `step_` moves its start, and all continue from there.

    The state is `anchor`, the start of the round in fp32 at least, and that of `step_`. The hooks take the placement of
    this state, which `Placed` wrappers choose.

    Attributes:
        base: the strategy between the averages.
        period: steps in a round.
        codec: compresses the differences from the anchor that are averaged; None averages them uncompressed.
        exact: whether the round ends with an average; otherwise each worker continues with its own parameters.
    """

    base: Strategy
    period: Period
    codec: Codec | None
    exact: bool = True

    waits = (
        "every `period` steps all wait for the slowest and for the all-reduce of the parameters; otherwise as its base"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found, own = super().make_traits(), (self.period,) if self.exact else ()
        rounds = replace(found.rounds, ends=(*own, *found.rounds.ends), postpones=True)
        return replace(found, period=self.period, rounds=rounds)

    def __post_init__(self) -> None:
        if isinstance(self.base, OuterStep | Placed):
            raise ConfigError(f"base={self.base}: outer steps cannot be nested. Use its base, {self.base.base}")
        if self.codec is not None and not (self.exact and _is_plain(self.base)):
            raise ConfigError(
                f"codec={self.codec} with base={self.base}, exact={self.exact}: a codec needs a plain mean of the "
                "parameters. Use base=Local(), exact=True"
            )

    @abstractmethod
    def step_(self, state: MutableMapping[str, Tensor], start: Tensor, average: Tensor) -> None:
        """Move `state["anchor"]`, in place.

        Args:
            state: this strategy's state.
            start: the start of the round: the anchor, rounded to the parameters' dtype.
            average: the workers' average at its end, on the anchor's device.
        """

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the check of the base, and check that the codec can compress differences."""
        check_differences(self.codec)
        super().check(size, optimizer)
        if not self.exact and not estimates(self.base, size):
            raise ConfigError(
                f"exact=False with base={self.base} and {size} workers: a worker's own parameters do not estimate the "
                "average, because a part of it is in flight, or the base refers to a point that all workers share. "
                "Use exact=True"
            )

    def check_sharded(self) -> None:
        """Check that outer steps can be taken on a part of the vector.

        Raises:
            ConfigError: they cannot.
        """
        if self.codec is not None:
            raise ConfigError(f"Sharded({self}): a codec needs the whole anchor on every worker. Use codec=None")
        if not self.exact:
            raise ConfigError(f"Sharded({self}): without averages all workers need their own state. Use exact=True")

    def start(self, r: Replica, where: Placement = WHOLE) -> None:
        """Start the base and the first round."""
        self.base.start(self.inner(r))
        # Outer steps start at the anchor, which must be equal on all ranks even if their initial parameters differ.
        start = r.x if self.codec is None else common_start(r)
        if self.codec is None and self.exact and not r.equal_start:
            start = mean_(r.comm, r.x.clone()).wait()
        exact = torch.promote_types(r.x.dtype, torch.float32)
        r.state["anchor"] = where.part_of(r.comm, start).to(where.device_for(r.x), exact, copy=True)
        self.begin_round(r)

    def fragments_in(self, r: Replica) -> list[tuple[Replica, int]]:
        """Return the whole vector, whose round ends with the period."""
        return [(r, self.period)]

    def begin_round(self, r: Replica) -> None:
        """Run when a round begins at the anchor."""

    def after_step(self, r: Replica, where: Placement = WHOLE) -> None:
        """Run the base's hook; at the end of a period, take the outer step and start the next round."""
        self.base.after_step(self.inner(r))
        if r.step % self.period or r.postponed:
            return

        anchor = r.state["anchor"]
        average = self._average(r, where)
        # The round started at the anchor rounded to the parameters' dtype. Only compressed differences are taken from
        # the anchor itself.
        self.step_(r.state, anchor if self.codec is not None else anchor.to(r.x.dtype), average)
        if where.sharded:
            all_gather_(r.comm, anchor.to(r.x), r.x)
        else:
            r.x.copy_(anchor)
        self.base.restart(self.inner(r))
        self.begin_round(r)

    def restart(self, r: Replica, where: Placement = WHOLE) -> None:
        """Restart the base, and the round at the parameters."""
        self.base.restart(self.inner(r))
        r.state["anchor"].copy_(where.part_of(r.comm, r.x))
        self.begin_round(r)

    def _average(self, r: Replica, where: Placement) -> Tensor:
        """Return the workers' average, or this worker's part of it, on the device of the anchor."""
        anchor = r.state["anchor"]
        # Messages in flight may still read the parameters, which the outer step changes.
        r.wait_pending()
        if self.codec is not None:
            return anchor + compressed_delta(r, anchor, self.codec).to(anchor.device)
        if where.sharded and _is_plain(self.base):
            # The first half of an all-reduce; the second half follows after the outer step.
            return reduce_scatter(r.comm, r.x).wait().to(anchor)
        average = self.base.average(self.inner(r), "outer") if self.exact else r.x
        return where.part_of(r.comm, average).to(anchor)


class Placed(Wrapper):
    """A wrapper that changes only where the state of its base's outer steps is stored.

    Attributes:
        base: `SlowMo`, `DiLoCo`, or another such wrapper around one of them.
    """

    base: Strategy

    waits = "as its base"

    def __post_init__(self) -> None:
        if not isinstance(self.base, OuterStep | Placed):
            raise ConfigError(f"base={self.base}: has no outer steps. Use SlowMo() or DiLoCo()")

    @abstractmethod
    def placed(self, where: Placement) -> Placement:
        """Return the placement as this wrapper changes it."""

    @property
    def outer(self) -> OuterStep | Placed:
        """The base, whose hooks take a placement."""
        assert isinstance(self.base, OuterStep | Placed)
        return self.base

    def check_sharded(self) -> None:
        """Run the base's check."""
        self.outer.check_sharded()

    def start(self, r: Replica, where: Placement = WHOLE) -> None:
        """Start the base, with its state in this wrapper's placement."""
        self.outer.start(self.inner(r), self.placed(where))

    def after_step(self, r: Replica, where: Placement = WHOLE) -> None:
        """Run the base's hook, with its state in this wrapper's placement."""
        self.outer.after_step(self.inner(r), self.placed(where))

    def restart(self, r: Replica, where: Placement = WHOLE) -> None:
        """Restart the base, with its state in this wrapper's placement."""
        self.outer.restart(self.inner(r), self.placed(where))
