# SPDX-License-Identifier: Apache-2.0
"""Spend a given number of bytes: the bits of each message follow from what is left."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thinwire.codecs.base import Codec
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.codecs.nearest import Nearest
from thinwire.comm.counting import CountingComm
from thinwire.errors import ConfigError
from thinwire.kernels.decisions import decide
from thinwire.reduce.compressed_all_reduce import compressed_mean_, mean_
from thinwire.registry import registered
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy, trait
from thinwire.strategies.local.local_sgd import LocalSGD
from thinwire.strategies.wrapper import Wrapper, period_of

_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|M|G)?B\s*/\s*(s|step)\s*")
_SCALE = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_MOST_BITS = 8
_clocks: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()
"""When each worker last decided. It is no part of a checkpoint: the time between two runs earns nothing."""


@registered
class Budget(Wrapper):
    r"""Send at most so many bytes per second, or per step: each round's codec has the bits that are left for it.

    Each worker may send $B$ bytes per second. At the end of a round of the base, after $t$ seconds, the balance is

    $$\beta \leftarrow \beta + B\,t, \qquad b = \max \{ b \le 8 : c(b) \le \beta \}, \qquad
      \beta \leftarrow \beta - c(b),$$

    with $c(b)$ the bytes of a mean in $b$ bits, known from the codec without sending. Where not even one bit can be
    paid for, the round goes on, and the next one that can be ends it. What is left over is at most a bit's worth, so
    that what was not used is not made up for later. The seconds are the mean over workers, so that all of them decide
    alike; with a budget per step no seconds are read.
    Traffic: $B$, unless eight bits a round are less; the seconds take an all-reduce of 8 bytes a round, which is paid
    from the balance. State: `balance`, and the base's. `metrics` has `bits` of each round, 0 where none was sent.

    Args:
        base: `LocalSGD`, `SlowMo` or `DiLoCo` with a codec that has `bits`; these are where `Budget` chooses.
        budget: per worker, such as "2MB/s" or "500kB/step"; k, M and G are powers of 1000. More is more exact.

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

    paper = "a token bucket over the bits of a codec; no paper"
    waits = "as its base"
    limits = "bytes are spent where the base ends rounds; shorter periods spend them more evenly"

    timing_dependent = trait(lambda self: self.base.timing_dependent or not self.per_step)
    data_dependent_bytes = trait(lambda self: self.base.data_dependent_bytes or not self.per_step)

    def __post_init__(self) -> None:
        """Check the budget, and that the base has bits to choose."""
        if _BUDGET.fullmatch(self.budget) is None or not self.rate:
            raise ConfigError(
                f"budget={self.budget!r}: a number of bytes per second or step; such as 2MB/s, 500kB/step"
            )
        codec = getattr(self.base, "codec", None)
        period = period_of(self.base)
        ends = period is not None and self.base.averages_at(period)
        if not ends or not isinstance(codec, Codec) or with_bits(codec, 1) is None:
            raise ConfigError(
                f"base={self.base}: there are no bits of a round's message to choose; use LocalSGD(), SlowMo(), or "
                "DiLoCo() without fragments, delay and mixing, with a codec that has bits, such as "
                "LocalSGD(8, codec=ErrorFeedback(Nearest()))"
            )

    @property
    def rate(self) -> float:
        """Bytes per second, or per step."""
        found = _BUDGET.fullmatch(self.budget)
        return float(found[1]) * _SCALE[found[2]] if found else 0.0

    @property
    def per_step(self) -> bool:
        """Whether the budget is one per step."""
        return self.budget.strip().endswith("step")

    def start(self, r: Replica) -> None:
        """As the base; with nothing to spend yet."""
        super().start(r)
        r.state["balance"] = torch.zeros((), dtype=torch.float64)
        _clocks[r] = r.comm.runtime.clock()

    def after_step(self, r: Replica) -> None:
        """As the base; a round ends with the bits that can be paid for, or goes on."""
        if not self.base.averages_at(r.step):
            super().after_step(r)
            return
        bits = self._spend(r)
        r.metrics["bits"] = float(bits)
        if bits:
            self._coded_in(bits).after_step(self.inner(r))

    def averages_at(self, step: int) -> bool:
        """False: whether a round ends depends on what is left to spend."""
        return False

    def average_(self, r: Replica) -> None:
        """As the base, wherever the round is; not paid from the balance."""
        # A period of which this step is no end: the base would otherwise take the average as done.
        base: Any = self.base
        replace(base, period=r.step + 1).average_(self.inner(r))

    def _spend(self, r: Replica) -> int:
        """The bits of this round's message, which are taken from the balance; 0 where none can be paid for."""
        period, balance = period_of(self.base) or 1, r.state["balance"]
        costs = [0.0, *(_cost(self._codec(bits), r.x.numel(), r.comm.size) for bits in range(1, _MOST_BITS + 1))]
        if self.per_step:
            balance += self.rate * period
        else:
            now = r.comm.runtime.clock()
            seconds = torch.tensor([now - _clocks.get(r, now)], dtype=torch.float64, device=r.x.device)
            _clocks[r] = now
            balance += self.rate * float(mean_(r.comm, seconds).wait().cpu()) if not seconds.is_meta else 0.0
            balance -= 2 * (r.comm.size - 1) / r.comm.size * 8

        def affordable() -> int:
            return max(bits for bits in range(_MOST_BITS + 1) if costs[bits] <= max(float(balance), 0.0))

        bits = affordable() if self.per_step else decide(r.x, affordable, most=_MOST_BITS, least=0)
        balance -= costs[bits]
        # What even the most bits leave is not kept for later.
        balance.clamp_(max=costs[1] if bits < _MOST_BITS else costs[_MOST_BITS] - costs[_MOST_BITS - 1])
        return bits

    def _codec(self, bits: int) -> Codec:
        codec = with_bits(getattr(self.base, "codec"), bits)  # noqa: B009
        assert codec is not None
        return codec

    def _coded_in(self, bits: int) -> Strategy:
        base: Any = self.base
        return replace(base, codec=self._codec(bits))


def with_bits(codec: Codec, bits: int) -> Codec | None:
    """The codec, or the one inside it, with so many bits; None where it has none."""
    made: Any = codec
    if isinstance(inner := getattr(codec, "codec", None), Codec):
        changed = with_bits(inner, bits)
        return None if changed is None else replace(made, codec=changed)
    return replace(made, bits=bits) if hasattr(codec, "bits") else None


@lru_cache(maxsize=1024)
def _cost(codec: Codec, n: int, size: int) -> float:
    """The most bytes that any worker sends in a mean of n elements."""
    # The last rank, which keeps the shortest piece, sends the most.
    comm = CountingComm(size - 1, size)
    compressed_mean_(comm, torch.empty(n, device="meta"), codec, {}).wait()
    return comm.meter.payload_bytes
