# SPDX-License-Identifier: Apache-2.0
"""Store the state of SlowMo's and DiLoCo's outer steps in parts on each worker, or in the host's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.methods.strategies.base import Strategy, Traits, nested
from thinwire.methods.strategies.local.outer_step import Placed, Placement
from thinwire.methods.strategies.local.slow_momentum import SlowMo
from thinwire.registry import registered


@registered
class Sharded(Placed):
    """Shard the state of outer steps: each of n workers has 1/n of it, and takes the outer step on that part.

    Results are the base's. A reduce-scatter sums the parameters, each worker steps on its part, and an all-gather
    collects the parts. If the base's average is the plain mean, as with `Local()`, the bytes are those of one
    all-reduce; otherwise the all-gather follows the base's own average. The learning rates of parameter groups are
    sharded too.

    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, arXiv:1910.02054.

    Args:
        base: `SlowMo` or `DiLoCo`, without a codec.

    Example:
        >>> import torch, thinwire
        >>> def state(strategy):
        ...     def train(comm):
        ...         model = torch.nn.Linear(8, 1, bias=False)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...         worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        ...         return {name: x.numel() for name, x in worker.replicas[0].state.items() if x.dim()}
        ...     return thinwire.run_threads(2, train)[0]
        >>> state(thinwire.SlowMo())
        {'anchor': 8, 'slow': 8}
        >>> state(thinwire.Sharded(thinwire.SlowMo()))
        {'base/anchor': 4, 'base/slow': 4}
    """

    base: Strategy = SlowMo()

    paper = "Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return replace(
            super().make_traits(),
            inelastic="a lost worker's part of the outer state is lost. Use its base, or Offloaded()",
        )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check, and check that its outer step works on parts of the vector."""
        self.check_sharded()
        super().check(size, optimizer)

    def placed(self, where: Placement) -> Placement:
        """Keep a part of the state on each worker."""
        return replace(where, sharded=True)

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute the whole state as the base does, and cut it into new parts."""
        found = super().resized([{**state, **self._joined(states)} for state in states], size)
        if found is None:
            return None
        parts = {name: x.tensor_split(size) for name, x in found[0].items() if self._is_cut(name, x)}
        return [
            {name: parts[name][rank].clone() if name in parts else x for name, x in state.items()}
            for rank, state in enumerate(found)
        ]

    def _joined(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join the vectors of which each worker has a part."""
        return {
            name: torch.cat([state[name] for state in states]) for name, x in states[0].items() if self._is_cut(name, x)
        }

    def _is_cut(self, name: str, x: Tensor) -> bool:
        """Return True for a vector of the outer steps' own state, which is sharded."""
        placements = [each for each in nested(self) if isinstance(each, Placed)]
        prefix = "base/" * len(placements)
        return x.dim() == 1 and name.startswith(prefix) and not name.startswith(f"{prefix}base/")


@registered
class Offloaded(Placed):
    """Keep the state of outer steps in the host's memory, and take outer steps there; for models on a GPU.

    The average is copied to the host and the new parameters back, once per period.

    Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021, arXiv:2101.06840.

    Args:
        base: `SlowMo` or `DiLoCo`.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> strategy = thinwire.Offloaded(thinwire.DiLoCo(period=100))
        >>> worker = thinwire.attach(model, optimizer, strategy, comm=thinwire.CountingComm(0, 2))
        >>> worker.replicas[0].state["base/anchor"].device
        device(type='cpu')
    """

    base: Strategy = SlowMo()

    paper = "Ren et al., ZeRO-Offload, USENIX ATC 2021, arXiv:2101.06840"
    limits = "the host's memory is slower than the GPU's"

    def placed(self, where: Placement) -> Placement:
        """Keep the state in the host's memory."""
        return replace(where, on_host=True)
