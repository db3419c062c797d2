# SPDX-License-Identifier: Apache-2.0
"""Average parameters with one neighbor at a time, while both compute at their own pace."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.comm.work import Work
from thinwire.core.replica.point_to_point import on_message, open_mailbox
from thinwire.core.replica.replica import Replica
from thinwire.core.replica.rounds import Barrier
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy, Traits
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.bipartition import check_bipartite, is_active, neighbours, partner
from thinwire.methods.topology.exponential import BipartiteExponential
from thinwire.registry import registered

_REQUEST = 1  # topic of the mailbox; answers are of topic 0, which `Mailbox.expect` receives
_FLUSH = Barrier("flushed", topic=2, until="to finish this step's exchanges")


@registered
class ADPSGD(Strategy):
    r"""Asynchronous decentralized parallel SGD: average with one neighbor while computing, each at its own pace.

    Each worker, with no common clock, computes $g_i(\hat x_i)$ at the parameters $\hat x_i$ that it read at the start
    of its step. Meanwhile pairs $(i, j)$ average, and each then applies its own update to its current parameters:

    $$x_i, x_j \leftarrow \tfrac12 (x_i + x_j) \quad\text{atomically}, \qquad
      x_i \leftarrow x_i - \gamma\, g_i(\hat x_i).$$

    The graph is bipartite. Workers on one side are *active*: after a step such a worker sends $a = x_i$ and continues.
    Its neighbor on the other side is *passive* and answers, also in the middle of its own step: $h = (x_j - a)/2$,
    $x_j \leftarrow x_j - h$, and $h$ goes back, to be added to $x_i$ at the end of the first step after it arrived.
    What is added on one side is subtracted on the other, so the sum of all $x_i$ changes by updates alone, in whatever
    order messages and steps happen. An active worker sends no second request before the answer, and a passive one
    sends none at all, so that no cycle of workers can wait for each other.

    Results depend on timing. Only the edges of the topology count, in either direction; its weights do not.
    Traffic: at most one vector per active worker and step in either direction; fewer where a message takes longer than
    a step. State: none on active workers; on passive ones `published` ($x_j$) and `snapshot` ($\hat x_j$), each like
    the parameters, and `flushed`, the step up to which each neighbor's exchanges were complete at the last average of
    all.

    Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018, arXiv:1710.06952,
    Algorithm 1, with neighbors in a fixed order instead of at random.

    Args:
        topology: any connected bipartite graph, so for an even number of workers; with more edges updates spread
            faster, at the same traffic.

    Example:
        Whatever the order of messages, the mean of the workers moves by the mean of their updates:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, thinwire.ADPSGD(), comm=comm)
        ...     for _ in range(8):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return model.weight.item()
        >>> thinwire.run_threads(2, train)
        [-4.0, -4.0]
    """

    topology: Topology = BipartiteExponential()

    paper = "Lian et al., Asynchronous Decentralized Parallel SGD, ICML 2018, arXiv:1710.06952"
    waits = "no worker waits for another between averages of all"
    limits = (
        "results depend on timing; workers hold different parameters between averages of all; end training on all "
        "ranks together"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(topology=self.topology, timing_dependent=True, on_resize="start")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse graphs that do not exist, are not connected, or are not bipartite."""
        check_bipartite(self.topology, size)

    def start(self, r: Replica) -> None:
        """Open the mailbox; a passive worker also publishes its parameters and begins to answer."""
        if r.comm.size == 1:
            return
        # A worker that has not finished a step answers no request: it may be about to load a checkpoint.
        open_mailbox(r, r.x)
        if self._active(r):
            return
        r.state["published"], r.state["snapshot"] = r.x.clone(), r.x.clone()
        _FLUSH.open(r, self._neighbours(r))
        on_message(r, _REQUEST, _answer, like=r.x, src=self._neighbours(r))

    def after_step(self, r: Replica) -> None:
        """Active workers use the last answer and send the next request; passive ones publish their update."""
        if r.comm.size == 1:
            return
        r.inflight.pop("flush", None)
        box = r.comm.mailbox(r)
        if self._active(r):
            self._request(r, box)
        else:
            with box.changed:
                r.state["published"].copy_(_current(r))
                r.x.copy_(r.state["published"])
                r.state["snapshot"].copy_(r.x)
            # Requests that were held back during a flush can be answered now.
            box.process_deferred()
        # Runs only when something waits for everything in flight: an average of all, or a checkpoint.
        r.launch("flush", Work(lambda: self._flush(r)))

    def restart(self, r: Replica) -> None:
        """Complete all exchanges without using them, and publish the parameters."""
        r.wait_pending()
        r.inflight.pop("answer", None)
        if "published" in r.state:
            # Requests that arrive before this worker's next step are answered after it, and so from these parameters.
            with r.comm.mailbox(r).changed:
                for name in ("published", "snapshot"):
                    r.state[name].copy_(r.x)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the mean of all workers' current parameters, answers in flight included."""
        r.wait_pending()
        x = _current(r)
        if "answer" in r.inflight:
            x.add_(r.inflight["answer"].wait()[0])
        return mean_(r.comm, x).wait()

    def _request(self, r: Replica, box: Mailbox) -> None:
        """Use the answer to the last request and send the next one; nothing while that answer is on its way."""
        if "answer" in r.inflight:
            if not r.inflight["answer"].ready:
                return
            half = r.inflight.pop("answer").wait()[0]
            # The answer is half of the difference between the two workers, so no message is needed to measure it.
            r.record_distance(torch.zeros_like(half), [2 * half])
            r.x.add_(half)
        dst = partner(self.topology, r.comm.rank, r.comm.size, r.step - 1)
        box.send(dst, r.x, topic=_REQUEST)
        r.launch("answer", box.expect(dst, r.x).then(lambda message: [message.content]))

    def _flush(self, r: Replica) -> list[Tensor]:
        """Complete this step's exchanges: active workers report their step to all neighbors, passive ones wait."""
        if self._active(r):
            _FLUSH.reach(r, r.step, dst=self._neighbours(r))
        else:
            _FLUSH.wait(r, r.step, src=self._neighbours(r))
        return []

    def _active(self, r: Replica) -> bool:
        return is_active(self.topology, r.comm.rank, r.comm.size)

    def _neighbours(self, r: Replica) -> tuple[int, ...]:
        return neighbours(self.topology, r.comm.rank, r.comm.size)


def _answer(r: Replica, box: Mailbox, message: Message) -> bool:
    """Average with a neighbor, in whatever thread; changes the published vector only, never what autograd reads.

    Where the neighbor has flushed this step and this worker has not started the next one, the request is put aside:
    it belongs to the time after the average of all.
    """
    if _FLUSH.reached(r, message.src, r.step):
        return False
    published = r.state["published"]
    half = (published - message.content).div_(2)
    published.sub_(half)
    box.send(message.src, half)
    return True


def _current(r: Replica) -> Tensor:
    """Return the parameters with all averages since the last step in them; a new vector."""
    if "published" not in r.state:
        return r.x.clone()
    return r.state["published"] + (r.x - r.state["snapshot"])
