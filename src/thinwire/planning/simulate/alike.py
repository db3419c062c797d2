# SPDX-License-Identifier: Apache-2.0
"""One worker of many that all do the same at the same time: what it sends is what it receives.

Thousands of workers that all run the same code on the same network make thousands of times the same step. Of these one
is enough: it runs the strategy's own code, and its messages take the time that they would take among all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox
from thinwire.core.comm.work import Work, completed, describe
from thinwire.errors import ConfigError
from thinwire.planning.simulate.comm import Collective, SimulatedComm
from thinwire.planning.simulate.network import Network
from thinwire.planning.simulate.world import Pending

T = TypeVar("T")
U = TypeVar("U")


class UnlikeError(ConfigError):
    """Workers do different things, or their network treats them differently, so that one cannot stand for all."""


def check_alike(network: Network, workers: int) -> None:
    """Check that a network has nothing that is special to some workers, and nothing that happens by chance.

    Racks of equal size are the same to all workers in collective calls, which end when the slowest has ended.

    Raises:
        UnlikeError: it has; the message names what.
    """
    plain = Network()
    special = ("specials", "pairs", "delayed", "deaths", "pauses", "spread")
    uneven = network.racks is not None and workers % network.racks.size and workers > network.racks.size
    if uneven or any(getattr(network, name) != getattr(plain, name) for name in special):
        raise UnlikeError(
            "this network has uneven racks, slow workers, pairs, faults or delays: simulate all of its workers"
        )


class AlikeComm(SimulatedComm):
    """The comm of a worker that stands for all; `simulate(..., alike=True)` makes it.

    It receives from every rank what it has sent itself, and when the others' messages would arrive if they were sent
    at the same time. What may differ between ranks is refused: mailboxes, messages to several ranks at once (which come
    in some order), and broadcasts once training has begun.

    Example:
        A thousand workers that hand on a megabyte along a ring, once; at 1 Gbit/s that takes 8.4 ms and the latencies.

        >>> import torch
        >>> from thinwire.planning.simulate import Network, simulate
        >>> def work(comm):
        ...     there, here = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        ...     comm.send_recv(torch.ones(250_000), [there], [here]).wait()
        ...     return round(comm.now, 4)
        >>> simulate(1000, work, network=Network(bits_per_second=1e9, latency=1e-4), alike=True).results
        [0.0086]
    """

    def _join(
        self, label: str, own: T, combine: Callable[[list[T]], U], timing: Callable[[Sequence[float]], Sequence[float]]
    ) -> Work[U]:
        result = combine([own] * self.size)
        return self._at(label, max(self._after_last([self.now] * self.size, timing))).then(lambda _: result)

    def _at(self, label: str, *ends: float) -> Work[None]:
        """Return an operation that is over when all that it waits for has happened."""
        pending = Pending(self.rank, len(ends), list)
        for end in ends:
            pending.know(self._world.times, end, self.rank, self.now)
        where = self._where(label)
        return Work(lambda: self._world.wait(self._group, pending, lambda: where, self.timeout))

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        if self._step_began is not None:
            raise UnlikeError(f"{self._where('broadcast')}: one rank sends to all others. Simulate with alike=False")
        collective = Collective("broadcast", src)
        for rank in range(self.size):
            collective.launched[rank] = self.now
            collective.parts[rank] = Pending(rank, 1, list)
        self._solve_broadcast(collective, src, x.nbytes)
        return self._at("broadcast", max(end for _, end, _ in collective.solved.values())).then(lambda _: x)

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        row = np.array([x.nbytes for x in xs], dtype=float)
        rows = np.broadcast_to(row, (self.size, self.size))
        end = max(self._after_last([self.now] * self.size, lambda times: self._wires.all_to_all(times, rows)))
        column = [xs[self.rank].clone()] * len(sizes)
        return self._at("all_to_all", end).then(lambda _: column)

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        label = f"send_recv with ranks {', '.join(map(str, sorted({*dst, *src})))}"
        if len(dst) != len(src) or len(dst) > 1:
            raise UnlikeError(
                f"{self._where(label)}: sends to {len(dst)} ranks and receives from {len(src)}. Only where each sends "
                "one message and receives one they are sure to take the same time on all. Simulate with alike=False"
            )
        if dst and self._world.network.racks is not None:
            raise UnlikeError(
                f"{self._where(label)}: only some messages leave a rack, so workers of racks take different times. "
                "Simulate with alike=False"
            )
        world, content = self._world, x if x.is_meta else x.clone()
        if not dst:
            return completed([])
        pending = Pending(self.rank, 2, list)

        def transfer() -> None:
            # What the other sends leaves it when this worker's own does, and comes in at this one's interface.
            for end in self._wires.send(world.times.now, self.rank, self.rank, content.nbytes):
                pending.know(world.times, end, self.rank, self.now)

        # As with all workers, a transfer begins when the sender knows that it is expected.
        world.times.at(self.now + self._wires.latency(self.rank, self.rank), transfer)
        where = self._where(label)

        def finish() -> list[Tensor]:
            world.wait(self._group, pending, lambda: where, self.timeout)
            return [content] * len(src)

        return Work(finish)

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        raise UnlikeError(
            f"{self._where('opening of a mailbox')} for messages of {describe(like)}: what arrives depends on "
            "each worker's own time. Simulate with alike=False"
        )
