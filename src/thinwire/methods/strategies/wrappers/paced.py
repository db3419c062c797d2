# SPDX-License-Identifier: Apache-2.0
"""Let every worker take as many steps of a round as its speed allows."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.core.comm.pending import PendingMeans
from thinwire.core.kernels.decisions import read_host, to_device
from thinwire.core.replica.replica import Replica
from thinwire.errors import CommTimeoutError, ConfigError, PeerLostError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.strategies.base import Strategy, Traits, nested, pace_rule
from thinwire.methods.strategies.local.local_sgd import LocalSGD
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import registered

_FIRST_STEPS = 4
_TIMED_STEPS = 9
_PAUSE = 4.0
_EXACT_BYTES = 4


@dataclass
class _Clock:
    """The time at which a worker's last step ended; not saved, since a resumed run has another clock."""

    mark: float | None = None
    step: int = -1
    seconds: float | None = None
    count: int = 0
    ends: bool | None = None
    timed: list[Replica] = field(default_factory=list[Replica])


# By the object that all replicas of a worker share, since they must end a round at the same step.
_clocks: WeakKeyDictionary[PendingMeans, _Clock] = WeakKeyDictionary()


@registered
class Paced(Wrapper):
    r"""Let slower workers take fewer steps in a round, so that all end it at about the same time.

    The fastest worker takes the base's period $H$ in a round. Every other worker takes as many steps as it can in that
    time, and at least one. With $s_i$ the samples of worker $i$ in the round, the base averages

    $$\bar x = \frac{\sum_i s_i x_i}{\sum_i s_i} .$$

    `worker.step` counts the group's steps: a worker that ends a round early continues at the first step of the next
    round, so learning rate schedules stay equal. Loop while `worker.step` is below a number, and evaluate, save or
    switch only at multiples of the base's period, which all ranks reach. In the first round all take 4 steps, whose
    times are measured. With `elastic=True` the given `steps` follow the ranks of the view. Outer steps divide by rank
    0's learning rate at the end of the round.
    Traffic: the base's, and 24 bytes to each other worker per round. State: twelve numbers; for `weights="samples"` and
    parameters in 16 bits also `start`, the parameters at the start of the round.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    arXiv:1602.05629, Algorithm 1, for the weights.

    Args:
        base: `LocalSGD`; or `SlowMo` or `DiLoCo` around `Local()`; its period is that of the fastest worker.
        weights: "samples" to weigh workers by the numbers given to `Worker.record_batch` in the round (a step without
            one counts as one sample); or "equal".
        steps: the steps of a round for each rank, repeated for further ranks, instead of measured speeds.

    Example:
        Rank 1 takes one step while rank 0 takes four, and has 20 % of the weight:

        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     strategy = thinwire.Paced(thinwire.LocalSGD(period=4), steps=(4, 1))
        ...     worker, own = thinwire.attach(model, optimizer, strategy, comm=comm), 0
        ...     while worker.step < 4:
        ...         model.weight.grad = torch.full_like(model.weight, -1.0)
        ...         optimizer.step()
        ...         own += 1
        ...     return own, worker.step, round(model.weight.item(), 4)
        >>> thinwire.run_threads(2, train)
        [(4, 4, 3.4), (1, 4, 3.4)]
    """

    base: Strategy = LocalSGD(period=32)
    weights: Literal["samples", "equal"] = "samples"
    steps: tuple[int, ...] = ()

    paper = "weights by samples: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1"
    waits = "at the end of a round, which all reach at about the same time, all wait for each other"
    limits = "data of slow workers have less weight; evaluate and save between rounds only"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            rounds=replace(found.rounds, local=False),
            skips_steps=True,
            timing_dependent=not self.steps,
            inelastic="",
            # It depends on which workers skip steps.
            lr_factor=self.base.traits.lr_factor if set(self.steps) == {self.base.traits.period} else None,
        )

    def __post_init__(self) -> None:
        period = self.base.traits.period
        averages = [] if period is None else [k for k in range(1, period + 1) if self.base.traits.averages_at(k)]
        codec = any(isinstance(value, Codec) for each in nested(self.base) for value in vars(each).values())
        weighted = any(each.traits.rounds.weight for each in nested(self.base))
        if not self.base.traits.rounds.local or weighted or averages != [period] or codec:
            raise ConfigError(
                f"base={self.base}: must have equal rounds of local steps, each with one uncompressed mean of the "
                "parameters. Use LocalSGD(), or SlowMo() or DiLoCo() around Local()"
            )
        if any(count < 1 or count > (period or 0) for count in self.steps):
            raise ConfigError(f"steps={self.steps}: must lie in 1..{period}, the base's period, for every rank")

    def start(self, r: Replica) -> None:
        """Start the base, with unknown speeds."""
        super().start(r)
        for name in ("round_seconds", "elapsed", "samples"):
            r.state[name] = torch.zeros((), dtype=torch.float64, device="cpu")
        # Times of the last steps, zero if unknown. There are several, so that one stall does not change the median.
        r.state["step_seconds"] = torch.zeros(_TIMED_STEPS, dtype=torch.float64, device="cpu")
        if self.weights == "samples" and r.x.element_size() < _EXACT_BYTES:
            r.state["start"] = r.x.clone() if r.equal_start else r.comm.broadcast_(r.x.clone(), 0).wait()

    def restart(self, r: Replica) -> None:
        """Restart the base."""
        _clocks.pop(r.pending_means, None)
        super().restart(r)
        if "start" in r.state:
            r.state["start"].copy_(r.x)

    def ends_round(self, r: Replica) -> bool:
        """Return True if another step would take longer than the fastest worker's round; it counts the step's time."""
        clock, period = _clocks.setdefault(r.pending_means, _Clock()), self.base.traits.period or 1
        if clock.step != r.step:
            now = r.comm.runtime.clock()
            clock.seconds = None if clock.mark is None else now - clock.mark
            clock.mark, clock.step, clock.count = now, r.step, (r.step - 1) % period + 1
            clock.ends, clock.timed = None, []
        if all(each is not r for each in clock.timed):
            clock.timed.append(r)
            if clock.seconds is not None and not self.steps:
                self._time(r, clock.seconds, first=clock.count == 1)
        if clock.ends is None:
            clock.ends = self._ends(r, clock.count, period)
        return clock.ends

    def after_step(self, r: Replica) -> None:
        """Count the step; at the end of this worker's round, share its figures and run the base's hook."""
        state, period, ends = r.state, self.base.traits.period or 1, self.ends_round(r)
        clock = _clocks[r.pending_means]
        state["samples"] += r.samples
        if not ends:
            return
        r.step += -r.step % period
        r.comm.step = clock.step = r.step  # the same on all ranks at the end of a round
        factor = self._share(r, period)
        if factor != 1:
            self._weigh_(r, factor)
        r.metrics["steps_of_round"] = float(clock.count)
        self.base.after_step(self.inner(r))
        if "start" in state:
            state["start"].copy_(r.x)
        for name in ("elapsed", "samples"):
            state[name].zero_()
        # The wait for other workers is not part of a step.
        clock.mark = r.comm.runtime.clock()

    def regroup(self, r: Replica, before: int) -> None:
        """Run the base's hook; reset the times of a worker that has just joined."""
        super().regroup(r, before)
        if not before:
            for name in ("elapsed", "samples", "step_seconds"):
                r.state[name].zero_()

    def _weigh_(self, r: Replica, factor: float) -> None:
        """Scale the parameters, so that their plain mean is the weighted one."""
        start = r.state.get("start")
        if start is None:
            r.x.mul_(factor)
            return
        # In 16 bits the rounding error of the product may exceed a small step. Factors are 1 on average, so it suffices
        # to scale differences from a point that all workers share.
        exact = start.float()
        r.x.copy_((r.x - exact).mul_(factor).add_(exact))

    def _time(self, r: Replica, seconds: float, *, first: bool) -> None:
        """Count the time of a step."""
        state, pace = r.state, _pace(r)
        # Between rounds a loop may evaluate or save, which is not part of a step.
        if first and 0 < _PAUSE * pace < seconds:
            state["elapsed"] += pace
            return
        state["elapsed"] += seconds
        state["step_seconds"] = state["step_seconds"].roll(1)
        state["step_seconds"][0] = seconds

    def _ends(self, r: Replica, count: int, period: int) -> bool:
        """Return True if this worker's round is over."""
        if self.steps or r.comm.size == 1 or r.x.is_meta:
            return count >= (self.steps[r.comm.rank % len(self.steps)] if self.steps else period)
        seconds, elapsed, pace = float(r.state["round_seconds"]), float(r.state["elapsed"]), _pace(r)
        if not seconds:
            return count >= min(_FIRST_STEPS, period)
        # It ends if one more step would end further from the target time than now.
        return count >= period or elapsed + pace / 2 >= seconds

    def _share(self, r: Replica, period: int) -> float:
        """Report this rank's speed and samples; return the factor of its parameters in the plain mean."""
        rate: Any = r.lr
        own = float(rate.double().mean()) if isinstance(rate, Tensor) else rate
        mine = torch.tensor([_pace(r), float(r.state["samples"]), own], dtype=torch.float64, device="cpu")
        try:
            # Ranks whose loop has ended too early are in another call by now.
            r.comm.check_in_step("the end of a round").wait()
            # On the parameters' device, as NCCL needs it.
            found = torch.stack(r.comm.all_gather(to_device(mine, r.x.device)).wait())
        except (PeerLostError, CommTimeoutError) as error:
            raise type(error)(f"{error}; {pace_rule(self)}") from error
        if found.is_meta:
            return 1.0
        rows: list[list[float]] = read_host(found).tolist()
        paces = [row[0] for row in rows if row[0]]
        if paces:
            r.state["round_seconds"].fill_(period * min(paces))
        if any(row[2] != rows[0][2] for row in rows):
            if isinstance(rate, Tensor) and rate.ndim:
                raise ConfigError(
                    f"{self}: parameter groups have different learning rates that change within a round, which workers "
                    "reach at different steps. Use one rate for all, or change rates at multiples of the period"
                )
            # Outer steps may divide by the rate, which must be the same on all workers.
            rate = rows[0][2]
        self.inner(r).override_lr(rate)
        total, contributors = sum(row[1] for row in rows), len(rows) - len(r.comm.silent)
        return 1.0 if self.weights == "equal" or not total else rows[r.comm.rank][1] * contributors / total


def _pace(r: Replica) -> float:
    """Return the median time of the last steps, in seconds; zero if none was measured."""
    times = r.state["step_seconds"]
    return float(times[times > 0].median()) if bool((times > 0).any()) else 0.0
