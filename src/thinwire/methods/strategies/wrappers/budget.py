# SPDX-License-Identifier: Apache-2.0
"""Keep the traffic within a budget: the size of each message follows from the remaining bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from thinwire.core.comm.counting import CountingComm
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.comm.work import Work
from thinwire.core.kernels.decisions import decide
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.feedback import ErrorFeedback, residual_of
from thinwire.methods.codecs.levels import Levels, levels_of
from thinwire.methods.codecs.nearest import Nearest
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy, Traits, codecs_of, gradient_buffer, nested
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.methods.strategies.local.local_sgd import Local, LocalSGD
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import registered

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|M|G)?B\s*/\s*(s|step)\s*")
_SCALE = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_SECONDS_BYTES = 8


@dataclass
class _Now:
    """The data of one replica that checkpoints do not contain.

    Attributes:
        clock: the time at which seconds were last shared; the time between two runs does not count.
        level: the level of the current backward pass, 0 if nothing is sent.
        buckets: the first index of each bucket of that pass.
        last: the step of the last message.
        shown: figures that are written to `metrics` after every step.
        costs: bytes, by level, part or step, and number of workers.
    """

    clock: float
    level: int = 0
    buckets: list[int] = field(default_factory=list[int])
    last: int = 0
    shown: dict[str, float] = field(default_factory=dict[str, float])
    costs: dict[tuple[Any, ...], float] = field(default_factory=dict[tuple[Any, ...], float])


_now: WeakKeyDictionary[Replica, _Now] = WeakKeyDictionary()
_together: WeakKeyDictionary[PendingMeans, WeakSet[Replica]] = WeakKeyDictionary()
"""The replicas that share a budget, by the object that all replicas of a worker share."""


@registered
class Budget(Wrapper):
    r"""Send at most a given number of bytes per second or step: each message is as large as the balance allows.

    Each worker may send $B$ bytes per second. Before a message, $t$ seconds after the last one,

    $$\beta \leftarrow \beta + B\,t, \qquad l = \max \{ l : c(l) \le \beta \}, \qquad \beta \leftarrow \beta - c(l),$$

    with $\beta$ the balance and $c(l)$ the bytes that the base sends at level $l$, which are computed in advance.
    Levels are all valid values of the codec's field that controls how much it sends: the rank of `PowerSGD`, the
    fraction of `TopK`, the elements that `ChunkedTopK` keeps, or the bits of `Nearest` or `Quantize`.

    If the balance is too small for the lowest level, nothing is sent: a round of local steps continues until it could
    end next, and a gradient is added to the next one, while the optimizer's step has a zero gradient. Without a codec
    the budget therefore determines the period. After a message of the highest level, the rest of the balance expires,
    so unused bytes do not accumulate.

    The seconds are means over workers up to the previous step, from an all-reduce of 8 bytes for which workers do not
    wait, so all workers choose the same level. With a budget per step no time is measured.

    Traffic: $B$, or that of the highest level if it is less; the 8 bytes are paid from the balance. State: `balance`,
    `earned`, `spent`, and the base's; for gradients the first indices of `buckets`, and as `error` the sum of unsent
    gradients.
    `metrics` has the chosen value under its name, such as `bits`, 0 if nothing was sent; `period`, the steps between
    the last two messages; and `budget_used`, the used share of the whole budget so far.

    Args:
        base: `AllReduce` with such a codec; or `LocalSGD`, `SlowMo`, `DiLoCo`, `OverlapLocalSGD` or `CoCoD`, with any
            codec or none. The base of that strategy may be `Local`, or one of these.
        budget: the bytes per worker, such as "2MB/s" or "500kB/step"; k, M and G are powers of 1000.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(4096, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     base = LocalSGD(period=2, codec=ErrorFeedback(Nearest()))
        ...     worker = thinwire.attach(model, optimizer, Budget(base, "1kB/step"), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.randn(1, 4096)
        ...         optimizer.step()
        ...     return worker.replicas[0].metrics["bits"]
        >>> thinwire.run_threads(2, train)
        [4.0, 4.0]
    """

    base: Strategy = LocalSGD(period=8, codec=ErrorFeedback(Nearest()))
    budget: str = "1MB/s"

    paper = "a token bucket over the levels of a codec, and over rounds; no paper"
    waits = "as its base"
    limits = "bytes are only spent when the base sends; shorter periods spend them more evenly"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            timing_dependent=self.base.traits.timing_dependent or not self.per_step,
            data_dependent_bytes=self.base.traits.data_dependent_bytes or not self.per_step,
            # The end of a round depends on the balance, which is the same on all workers.
            rounds=replace(found.rounds, ends=(), local=False),
            inelastic="",
            growing=("buckets",),
            # A delay is a smaller share of a longer round.
            lr_factor=None if self.base.traits.rounds.delay else self.base.traits.lr_factor,
        )

    def __post_init__(self) -> None:
        if _BUDGET.fullmatch(self.budget) is None or not self.rate:
            raise ConfigError(
                f"budget={self.budget!r}: must be a number of bytes per second or step. Use 2MB/s or 500kB/step, for "
                "example"
            )
        if not (self.base.traits.rounds.postpones or (self._exchanges and self._levels is not None)):
            raise ConfigError(
                f"base={self.base}: the size of its messages cannot be changed. Use AllReduce() with a codec that has "
                "bits, a rank or kept elements, such as AllReduce(ErrorFeedback(Nearest())), or LocalSGD(), SlowMo(), "
                "DiLoCo(), OverlapLocalSGD() or CoCoD()"
            )
        inside = [each for each in nested(self.base) if each is not self.base and each != Local()]
        if unpaid := [each for each in inside if not each.traits.rounds.postpones]:
            raise ConfigError(
                f"base={self.base}: {unpaid[0]} sends on its own schedule, whatever the balance is. Use Local() in its "
                "place, or a strategy that can postpone means, such as LocalSGD()"
            )
        if self.base.traits.rounds.optimizer_state == "average":
            raise ConfigError(
                f"base={self.base}: averages of the optimizer's moments are not part of the budget. Use "
                "buffers='maintain' or 'reset'"
            )

    @property
    def rate(self) -> float:
        """The bytes per second or per step."""
        found = _BUDGET.fullmatch(self.budget)
        return float(found[1]) * _SCALE[found[2]] if found else 0.0

    @property
    def per_step(self) -> bool:
        """True for a budget per step."""
        return self.budget.strip().endswith("step")

    def start(self, r: Replica) -> None:
        """Start the base, with an empty balance."""
        super().start(r)
        _now.pop(r, None)
        _of(r)
        for name in ("balance", "earned", "spent"):
            r.state[name] = torch.zeros((), dtype=torch.float64, device="cpu")
        if self._exchanges:
            r.state["buckets"] = torch.zeros(0, dtype=torch.int64, device="cpu")

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Run the base's hook at the level of this pass; unsent gradients are added to the next ones."""
        if not self._exchanges:
            return super().on_gradient(r, part)
        now = _of(r)
        if part.stop == r.g.numel():
            # With a budget per step, each step earns the bytes of the next.
            if not self.per_step or not r.state["earned"]:
                self._earn(r)
            now.level, now.buckets = self._affordable(r, lambda level: self._cost_of_gradient(r, level)), []
            self._record(r, now.level)
        now.buckets.append(part.start)
        # Stored after a whole pass, since the next pass starts with these sizes.
        if part.start == 0:
            r.state["buckets"] = torch.tensor(now.buckets, dtype=torch.int64, device="cpu")
        if not now.level:
            residual_of(r.state, r.g[part], part.start, r.g.numel()).add_(r.g[part])
            r.g[part].zero_()
            return None
        if "error" in r.state:
            r.g[part].add_(residual_of(r.state, r.g[part], part.start))
            if part.start == 0:
                del r.state["error"]
        self._pay(r, self._cost(r, now.level, part))
        if part.start == 0:
            self._forget_excess(r, now.level, lambda level: self._cost_of_gradient(r, level))
        return self._at(now.level).on_gradient(self.inner(r), part)

    def after_step(self, r: Replica) -> None:
        """Run the base's hook; means that start at this step use the affordable level, or are postponed."""
        if self._exchanges:
            super().after_step(r)
            self._earn(r) if self.per_step else self._share_seconds(r)
            r.metrics.update(_of(r).shown)
            return
        self._earn(r)
        level = 0
        if self._sends(r, r.step):
            level = self._affordable(r, lambda level: self._cost(r, level, r.step))
            self._record(r, level)
        inner = self.inner(r)
        inner.postponed = not level
        self._at(level).after_step(inner)
        inner.postponed = False
        self._pay(r, self._cost(r, level, r.step))
        if level:
            self._forget_excess(r, level, lambda level: self._cost(r, level, r.step))
        if not self.per_step and self._sends(r, r.step + 1):
            self._share_seconds(r)
        r.metrics.update(_of(r).shown)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the base's average, at any step of a round; it is not paid from the balance."""
        inner = self.inner(r)
        # The base's period does not determine whether its round has ended at this step.
        inner.postponed = True
        average = self.base.average(inner, at)
        inner.postponed = False
        return average

    def regroup(self, r: Replica, before: int) -> None:
        """Run the base's hook, and give all workers the same balance, so that they choose the same levels.

        If a worker was lost during a pass, which is then repeated, only some workers have paid for it. Workers that are
        a step behind have not earned that step's bytes yet.
        """
        super().regroup(r, before)
        balance, earned = float(r.state["balance"]), float(r.state["earned"])
        own = torch.tensor([balance - earned if self.per_step else balance, earned], dtype=torch.float64, device="cpu")
        rows = [row.tolist() for row in r.comm.all_gather(own.to(r.x.device)).wait()]
        most = max(row[0] for row in rows)
        if not self.per_step:
            # Some workers may have received the last seconds, but others dropped that message.
            earned = max(row[1] for row in rows)
            r.state["earned"].fill_(earned)
        r.state["balance"].fill_(most + earned if self.per_step else most)

    # -- levels and what they cost ---------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> bool:
        return isinstance(self.base, AllReduce)

    @property
    def _levels(self) -> Levels | None:
        codec = next(codecs_of(self.base), None)
        levels = None if codec is None else levels_of(codec)
        if levels is None or not self._exchanges or codec is None or codec.traits.sign_only:
            return levels
        # Signs of gradients do not fit every optimizer, unlike signs of differences of parameters.
        first = sum(each.traits.sign_only for each in levels.codecs)
        return Levels(levels.name, levels.values[first:], levels.codecs[first:])

    @property
    def _most(self) -> int:
        """The highest level."""
        return 1 if self._levels is None else len(self._levels.codecs)

    def _at(self, level: int) -> Strategy:
        """Return the base with the codec of a level."""
        base: Any = self.base
        return base if not level or self._levels is None else replace(base, codec=self._levels.codecs[level - 1])

    def _sends(self, r: Replica, step: int) -> bool:
        """Return True if the base would start a mean at a step, with two or more workers."""
        several = max(r.comm.size, 2)
        return self._cost(r, self._most, step, several) > self._cost(r, 0, step, several)

    def _cost_of_gradient(self, r: Replica, level: int) -> float:
        """Return the bytes of a whole gradient, in the buckets of the last pass."""
        starts = r.state["buckets"].tolist() or [0]
        parts = zip(starts, [r.g.numel(), *starts], strict=False)
        return sum(self._cost(r, level, slice(start, stop)) for start, stop in parts)

    def _cost(self, r: Replica, level: int, where: slice | int, size: int | None = None) -> float:
        """Return the most bytes that any worker sends at a level, for a part of a gradient or after a step."""
        size = size or r.comm.size
        if isinstance(where, slice):
            place: tuple[int, ...] = where.start, where.stop
        else:
            periods = (each.traits.period or 1 for each in nested(self.base))
            place = int(where <= self.base.traits.steady_from), where % lcm(*periods)
        costs, key = _of(r).costs, (level, *place, size)
        if key not in costs:
            costs[key] = self._dry_run(r, level, where, size)
        return costs[key]

    def _dry_run(self, r: Replica, level: int, where: slice | int, size: int) -> float:
        """Count the bytes that the base would send, on meta tensors."""
        strategy, x = self._at(level), torch.empty_like(r.x, device="meta")
        # The last rank, which keeps the shortest piece of each mean, sends the most.
        comm = CountingComm(size - 1, size)
        dry = Replica(x, gradient_buffer(strategy, x), comm, lr=lambda: 1.0, seed=r.seed, segments=r.segments)
        strategy.start(dry)
        before = comm.meter.payload_bytes
        if not isinstance(where, slice):
            dry.step, dry.postponed = where, not level
            strategy.after_step(dry)
            dry.wait_pending()
        elif level and (work := strategy.on_gradient(dry, where)) is not None:
            work.wait()
        return comm.meter.payload_bytes - before

    def _affordable(self, r: Replica, cost: Any) -> int:
        """Return the highest level within the balance; 0 if nothing can be sent."""
        balance = float(r.state["balance"])

        def search() -> int:
            low, high = 0, self._most
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if cost(middle) <= balance else (low, middle - 1)
            return low

        return search() if self.per_step else decide(r.x, search, most=self._most, least=0)

    # -- the ledger ------------------------------------------------------------------------------------------------

    def _earn(self, r: Replica) -> None:
        """Add the bytes of a step, or of the shared seconds, to the balance."""
        amount = 1.0 if self.per_step else 0.0
        if not self.per_step and (arrived := r.collect("seconds")) is not None and not arrived[0].is_meta:
            amount = float(arrived[0])
        # In a model with several dtypes, each vector gets its share of the budget.
        _of(r)
        sizes = [each.x.numel() * each.x.element_size() for each in _together[r.pending_means]]
        earned = amount * self.rate * (r.x.numel() * r.x.element_size() / max(sum(sizes), 1))
        r.state["balance"] += earned
        r.state["earned"] += earned

    def _share_seconds(self, r: Replica) -> None:
        """Launch the mean over workers of the seconds since the last call."""
        clock, now = _of(r), r.comm.runtime.clock()
        seconds = torch.tensor([now - clock.clock], dtype=torch.float64, device=r.x.device)
        clock.clock = now
        r.launch("seconds", mean_(r.comm, seconds).then(lambda mean: [mean]))
        self._pay(r, 2 * (r.comm.size - 1) / r.comm.size * _SECONDS_BYTES)

    def _pay(self, r: Replica, amount: float) -> None:
        r.state["balance"] -= amount
        r.state["spent"] += amount

    def _forget_excess(self, r: Replica, level: int, cost: Any) -> None:
        """After a message of the highest level, keep at most the difference to the next lower level."""
        if level == self._most:
            r.state["balance"].clamp_(max=cost(level) - cost(level - 1))

    def _record(self, r: Replica, level: int) -> None:
        """Record the chosen level for `metrics`."""
        now, levels = _of(r), self._levels
        if levels is not None:
            now.shown[levels.name] = float(levels.values[level - 1]) if level else 0.0
        if level and not self._exchanges:
            now.shown["period"] = float(r.step - now.last)
            now.last = r.step
        if earned := float(r.state["earned"]):
            now.shown["budget_used"] = float(r.state["spent"]) / earned


def _of(r: Replica) -> _Now:
    """Return a replica's data that checkpoints do not contain, new for a joining worker."""
    if r not in _now:
        _now[r] = _Now(r.comm.runtime.clock())
        _together.setdefault(r.pending_means, WeakSet()).add(r)
    return _now[r]
