"""Average parameters with one neighbour at a time, without waiting for anybody."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import proxy

import torch
from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.topology.base import Topology
from thinwire.topology.bipartition import asks, check_sides, neighbours, partner
from thinwire.topology.exponential import BipartiteExponential
from thinwire.validation import check_kinds

_REQUEST, _FLUSH = 1, 2


@dataclass(frozen=True)
class ADPSGD(Strategy):
    r"""Asynchronous decentralised parallel SGD: average with one neighbour while computing, at everyone's own pace.

    Each worker, with no common clock, computes $g_i(\hat x_i)$ at the parameters $\hat x_i$ that it read when it began.
    Meanwhile pairs $(i, j)$ average, and each then adds its own update to what has become of its parameters:

    $$x_i, x_j \leftarrow \tfrac12 (x_i + x_j) \quad\text{atomically}, \qquad
      x_i \leftarrow x_i - \gamma\, g_i(\hat x_i).$$

    The graph has two sides. A worker on the one *asks*: after a step it sends $a = x_i$ and goes on. Its neighbour
    *answers*, also in the middle of its own step: $h = (x_j - a)/2$, $x_j \leftarrow x_j - h$, and $h$ goes back, to be
    added to $x_i$ at the end of the first step by which it has come. What is added on one side is what is taken from
    the other, so the sum of all $x_i$ changes by updates alone, however messages and steps interleave. Nobody asks
    again before the answer, and nobody who answers ever asks, so that no circle of workers can wait for each other.

    Results depend on timing. Of the topology the edges count, in either direction; its weights do not.
    Traffic: at most one vector per asking worker and step in either direction; fewer where a link takes longer than
    a step. State: none on the side that asks; on the other `published` ($x_j$), `snapshot` ($\hat x_j$), each like the
    parameters, and `flushed`, how far each neighbour's exchanges were finished when all last stood still.

    Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018, arXiv:1710.06952,
    Algorithm 1, with neighbours in turn instead of at random.

    Args:
        topology: any connected graph with two sides, so for an even number of workers; more edges spread what is
            learned faster, at the same traffic.
    """

    topology: Topology = BipartiteExponential()

    paper = "Lian et al., Asynchronous Decentralized Parallel SGD, ICML 2018, arXiv:1710.06952"
    waits = "nobody waits for anybody between averages of all"
    limits = "results depend on timing; workers differ by what has not yet spread; end training on all ranks together"

    def __post_init__(self) -> None:
        """Check the kinds."""
        check_kinds(self)

    def check(self, size: int) -> None:
        """Refuse graphs that do not exist, do not connect, or have no two sides."""
        check_sides(self.topology, size)

    def start(self, r: Replica) -> None:
        """Open the mailbox; on the side that answers, publish the parameters."""
        if r.comm.size == 1:
            return
        # A worker that has not finished a step answers nobody: it may be about to read a checkpoint.
        box = open_mailbox(r, r.x)
        if self._asks(r):
            return
        r.state["published"], r.state["snapshot"] = r.x.clone(), r.x.clone()
        r.state["flushed"] = torch.zeros(r.comm.size, dtype=torch.int64)
        me, near = proxy(r), self._neighbours(r)
        box.answer(_REQUEST, partial(_average, me, box), like=r.x, src=near)
        box.answer(_FLUSH, partial(_note, me), like=torch.zeros(1, dtype=torch.int64), src=near)

    def after_step(self, r: Replica) -> None:
        """Take in what has come of averages, and ask for another or show what is new."""
        if r.comm.size == 1:
            return
        r.inflight.pop("flush", None)
        (self._ask if self._asks(r) else _show)(r, r.comm.mailbox(r))
        r.launch("flush", Work(lambda: self._flush(r)))

    def average_(self, r: Replica) -> None:
        """Finish what is under way, then average."""
        r.wait_pending()
        if "answer" in r.inflight:
            r.x.add_(r.inflight.pop("answer").wait()[0])
        r.x.copy_(mean_(r.comm, _current(r)).wait())
        for name in r.state.keys() & {"published", "snapshot"}:
            r.state[name].copy_(r.x)

    def consensus(self, r: Replica) -> Tensor:
        """The mean of what all workers' parameters have become, answers under way included."""
        r.wait_pending()
        x = _current(r)
        if "answer" in r.inflight:
            x.add_(r.inflight["answer"].wait()[0])
        return mean_(r.comm, x).wait()

    def _ask(self, r: Replica, box: Mailbox) -> None:
        """Unless a neighbour has yet to answer."""
        if "answer" in r.inflight:
            if not r.inflight["answer"].ready:
                return
            half = r.inflight.pop("answer").wait()[0]
            # Half of what lies between two workers, which came anyway.
            r.notice_distance(torch.zeros_like(half), [2 * half])
            r.x.add_(half)
        dst = partner(self.topology, r.comm.rank, r.comm.size, r.step - 1)
        box.send(dst, r.x, topic=_REQUEST)
        r.launch("answer", box.expect(dst, r.x).then(lambda message: [message.content]))

    def _flush(self, r: Replica) -> list[Tensor]:
        """Make sure that nothing is under way: what was asked has been answered, and all who ask have said so."""
        box, near = r.comm.mailbox(r), self._neighbours(r)
        if self._asks(r):
            for rank in near:
                box.send(rank, torch.tensor([r.step]), topic=_FLUSH)
            return []
        with box.changed:
            box.until(lambda: _unfinished(r, near), f"all neighbours to finish step {r.step}")
        return []

    def _asks(self, r: Replica) -> bool:
        return asks(self.topology, r.comm.rank, r.comm.size)

    def _neighbours(self, r: Replica) -> tuple[int, ...]:
        return neighbours(self.topology, r.comm.rank, r.comm.size)


def _average(r: Replica, box: Mailbox, message: Message) -> bool:
    """Meet a neighbour half-way, in whatever thread; touches the published vector alone.

    Where the neighbour has finished a step for all to stand still, and this worker has not gone beyond it, the answer
    must wait: it belongs to what comes after.
    """
    if r.state["flushed"][message.src] >= r.step:
        return False
    published = r.state["published"]
    half = (published - message.content).div_(2)
    published.sub_(half)
    box.send(message.src, half)
    return True


def _note(r: Replica, message: Message) -> bool:
    """A neighbour has finished its exchanges up to a step."""
    r.state["flushed"][message.src] = message.content[0]
    return True


def _show(r: Replica, box: Mailbox) -> None:
    """Add the update to what has become of the parameters, go on from there, and answer who had to wait."""
    with box.changed:
        r.state["published"].copy_(_current(r))
        r.x.copy_(r.state["published"])
        r.state["snapshot"].copy_(r.x)
    box.retry()


def _current(r: Replica) -> Tensor:
    """The parameters, and on the side that answers what averages have made of them; a new vector."""
    if "published" not in r.state:
        return r.x.clone()
    return r.state["published"] + (r.x - r.state["snapshot"])


def _unfinished(r: Replica, near: Sequence[int]) -> list[int]:
    return [rank for rank in near if r.state["flushed"][rank] < r.step]
