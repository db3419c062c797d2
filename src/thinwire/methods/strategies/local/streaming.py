# SPDX-License-Identifier: Apache-2.0
"""Send the parameters in fragments, one after another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import At, Strategy, Traits, check_blocks, nested, resized_parts
from thinwire.methods.strategies.local.overlap_local_sgd import OverlapLocalSGD
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import registered


@registered
class Streaming(Wrapper):
    r"""Cut the parameters into fragments, each of which follows the base's schedule at its own steps.

    With $F$ fragments and the base's period $\tau$, fragment $f$ is $\lfloor f\tau/F \rfloor$ steps ahead of the first.
    Workers send the same bytes in $F$ times as many messages, $\tau/F$ steps apart, so the peak traffic is $F$ times
    lower.

    Use it for strategies other than `DiLoCo`, which has its own fragments.

    Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025, arXiv:2501.18512 (where fragments
    are whole layers; here they are even parts of the vector).

    Args:
        base: the strategy of each fragment; it must have a period.
        fragments: $F$, at most the base's period; more makes messages smaller and more frequent.

    Example:
        The same bytes in four times as many messages:

        >>> import torch
        >>> import thinwire
        >>> def traffic(strategy):
        ...     def train(comm):
        ...         model = torch.nn.Linear(16, 1, bias=False)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...         thinwire.attach(model, optimizer, strategy, comm=comm)
        ...         start = comm.meter.messages, comm.meter.payload_bytes
        ...         for _ in range(8):
        ...             optimizer.step()
        ...         return comm.meter.messages - start[0], comm.meter.payload_bytes - start[1]
        ...     return thinwire.run_threads(2, train)[0]
        >>> traffic(thinwire.LocalSGD(period=8))
        (1, 64.0)
        >>> traffic(thinwire.Streaming(thinwire.LocalSGD(period=8), fragments=4))
        (4, 64.0)
    """

    base: Strategy = OverlapLocalSGD()
    fragments: int = 4

    paper = "Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025, arXiv:2501.18512"
    waits = "as its base, for one fragment at a time"
    limits = "each message pays the latency of the link; the whole model is never averaged at one step"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        # Each fragment is averaged at its own steps, with its own weight.
        local = found.rounds.local and found.rounds.ends == (found.period,)
        rounds = replace(found.rounds, ends=(), local=local, weight="", fragments=self.fragments)
        return replace(found, rounds=rounds)

    def __post_init__(self) -> None:
        period = self.base.traits.period
        if period is None:
            raise ConfigError(f"base={self.base}: has no period for fragments to share. Use OverlapLocalSGD or SlowMo")
        if any(hasattr(each, "fragments") and not isinstance(each, Streaming) for each in nested(self.base)):
            raise ConfigError(
                f"base={self.base}: has its own fragments. Use it without Streaming, with fragments={self.fragments}"
            )
        if not 1 <= self.fragments <= period:
            raise ConfigError(f"fragments={self.fragments}: must lie between 1 and the base's period={period}")
        if self.base.traits.sends_gradients:
            raise ConfigError(f"base={self.base}: sends gradients at every step. Use a base that averages parameters")
        if self.base.traits.timing_dependent:
            raise ConfigError(
                f"base={self.base}: its messages have no common schedule, as fragments need. Use it without Streaming, "
                "or a base that averages parameters, such as SlowMo()"
            )
        if self.base.traits.steady_from:
            raise ConfigError(
                f"base={self.base}: fragments start at different steps and would skip parts of the warm-up. Use "
                "warmup_steps=0"
            )
        if self.base.traits.rounds.optimizer_state != "maintain":
            raise ConfigError(f"base={self.base}: the optimizer's state has no fragments. Use buffers='maintain'")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check, and check that it does not need the whole vector."""
        super().check(size, optimizer)
        check_blocks(self.base, f"in {self.fragments} fragments")

    def fragments_in(self, r: Replica) -> list[tuple[Replica, int]]:
        """Return the fragments, the last one first, since it is ahead of the others."""
        period = self.base.traits.period or 1
        ends = [period - f * period // self.fragments for f in range(self.fragments)]
        return list(zip(self.inners(r), ends, strict=True))[::-1]

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the base's averages of all fragments."""
        return torch.cat([self.base.average(fragment, at) for fragment in self.inners(r)])

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute each fragment's state with the base's hook."""
        return resized_parts(self.base, [f"fragment-{f}/" for f in range(self.fragments)], states, size)

    def inners(self, r: Replica) -> Iterator[Replica]:
        """Yield the fragments, for each of which the base's hooks run."""
        # Integer division, so that fragments cover the vector without gap or overlap.
        edges = [f * r.x.numel() // self.fragments for f in range(self.fragments + 1)]
        period = self.base.traits.period or 1
        for f in range(self.fragments):
            yield r.part(f"fragment-{f}", slice(edges[f], edges[f + 1]), ahead=f * period // self.fragments)
