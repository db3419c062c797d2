# SPDX-License-Identifier: Apache-2.0
"""Send the state of a running worker to joining workers, while all wait or while the others train.

Where a strategy sends messages at every step, all wait while the state is sent (`hand_over`).

Where workers train alone for a round, a thread of one running worker, the donor, sends it over connections of its own,
in two parts. The early part is sent on request and may be a few rounds old: the optimizer's state, buffers and frozen
parameters, which are a worker's own. The late part is sent from the end of a round on: the strategy's state, which does
not change until the next round ends. Before the messages of that round all wait until the late part has arrived, and
take the joining workers in. These join the round's mean with zero weight, receive its result like all others, and are
equal to them from then on. The parameters are not sent at all, since they are that result.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import lcm
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.liveness import State
from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.core.storage.tree import from_bytes, to_bytes
from thinwire.core.view import View, is_worker
from thinwire.elastic.elastic_comm import Connector, ElasticComm
from thinwire.elastic.membership import Membership
from thinwire.elastic.ranks import Ranks
from thinwire.errors import CommError, CommTimeoutError, PeerLostError
from thinwire.methods.codecs.feedback import of_server, residual_sizes
from thinwire.methods.strategies.base import codecs_of, nested
from thinwire.worker.replica_state import PARTS, check, optimizer_groups, pack, unpack
from thinwire.worker.state import WorkerState

_LOGGER = logging.getLogger("thinwire")
_PENDING, _COMPLETE, _FAILED = 0, 1, 2
_LOOKS_SECONDS = 0.2
_WAITS = 0.9  # of the timeout, by the one that sends, so that it answers before the others give up

_CHUNK_BYTES = 1 << 22
_AHEAD = 4  # chunks on the way, so that the link is never idle


def hand_over(worker: WorkerState, joined: Sequence[int], source: int) -> None:
    """Copy parameters, buffers, optimizer state and strategy state of an existing worker to joining ones.

    All ranks of the view call it; only these send and receive anything.

    Args:
        worker: this rank's.
        joined: the ranks that join.
        source: a rank that has trained on so far.

    Raises:
        CommError: on a rank that joins, a chunk was damaged.
    """
    comm = worker.comm
    if comm.rank == source:
        # A server's residual is of a piece that one rank alone adds up: a copy would enter the mean a second time.
        packed = _packed(worker, PARTS, lambda _, name: not of_server(name))
        content = to_bytes({**packed, "scaler": _scaler_after_update(worker)})
        for rank in joined:
            send(comm, content, rank)
    elif comm.rank in joined:
        packed = from_bytes(receive(comm, source))
        scaler = packed.pop("scaler")
        _unpack(worker, packed)
        if worker.scaler is not None and scaler:
            worker.scaler.load_state_dict(scaler)


def _scaler_after_update(worker: WorkerState) -> dict[str, Any]:
    """Return the state that a loop's GradScaler will have after this step's `update()`; empty without one.

    Gradients that are averaged must have one scale. Workers join within `scaler.step()`, before the others update, and
    take no part in that.
    """
    if worker.scaler is None or not worker.scaler.is_enabled():
        return {}
    state = worker.scaler.state_dict()
    state["_growth_tracker"] += 1
    if state["_growth_tracker"] == state["growth_interval"]:
        grown = state["scale"] * state["growth_factor"]
        state["scale"] = grown if grown <= torch.finfo(torch.float32).max else state["scale"]
        state["_growth_tracker"] = 0
    return state


def _packed(worker: WorkerState, parts: Collection[str], keeps: Callable[[Replica, str], bool]) -> dict[str, Any]:
    """Return the state without messages in flight, which are not handed over, and may be of a worker that is lost."""
    # In the strategy's hook, the vectors are newer than the shards, which `pack` reads.
    worker.shards.write()
    packed = pack(worker, parts, keeps=keeps, inflight=False)
    if any(r.inflight for r in worker.replicas):
        # The others drop theirs, which `change_view` does where there are any.
        for each in packed["replicas"]:
            each["inflight"] = {"dropped": []}
    return packed


def _unpack(worker: WorkerState, packed: dict[str, Any]) -> None:
    """Take the state of another worker, if it fits, in place of this worker's own."""
    check(packed, worker, ranks=False)
    for r in worker.replicas:
        r.inflight.clear()  # of an earlier view, which has ended before this worker was in step with the others
    unpack(packed, worker)


def send(comm: Comm, content: Tensor, dst: int) -> None:
    """Send bytes to one rank, in chunks."""
    device = comm.check_device
    comm.send_recv(torch.tensor([len(content)], dtype=torch.int64, device=device), [dst], []).wait()
    sent: deque[Work[list[Tensor]]] = deque()
    for chunk in content.split(_CHUNK_BYTES):
        checksum = torch.tensor([_checksum(chunk)], dtype=torch.int64, device="cpu")
        sent.append(comm.send_recv(torch.cat([chunk, checksum.view(torch.uint8)]).to(device), [dst], []))
        if len(sent) > _AHEAD:
            sent.popleft().wait()
    for work in sent:
        work.wait()


def receive(comm: Comm, src: int) -> Tensor:
    """Return the bytes that `send` has sent.

    Raises:
        CommError: a chunk was damaged.
    """
    device = comm.check_device
    length = int(comm.send_recv(torch.zeros(1, dtype=torch.int64, device=device), [], [src]).wait()[0])
    content = torch.empty(length, dtype=torch.uint8, device="cpu")
    for part in content.split(_CHUNK_BYTES):
        like = torch.empty(len(part) + 8, dtype=torch.uint8, device=device)
        received = comm.send_recv(like, [], [src]).wait()[0].cpu()
        part.copy_(received[:-8])
        if _checksum(part) != int(received[-8:].clone().view(torch.int64)):
            raise CommError(
                f"rank {comm.rank}: what rank {src} sent of its state was damaged on the way. Start this worker again"
            )
    return content


def _checksum(chunk: Tensor) -> int:
    return zlib.crc32(cast(Any, chunk.numpy()))


# -- while the others train --------------------------------------------------------------------------------------------


def can_copy(worker: WorkerState) -> bool:
    """Return True if a strategy's state lasts for a round whose mean makes a joining worker equal to the others.

    Others send a part of their state at every step; a joining worker gets all of it while they wait.
    """
    strategy = worker.strategy
    rounds = strategy.traits.rounds
    coded = any(True for each in nested(strategy) for _ in codecs_of(each))
    period = lcm(*(each.traits.period or 1 for each in nested(strategy)))
    return rounds.local and strategy.traits.averages_at(period) and not (rounds.weight and coded)


class Arrivals:
    """Those that have asked to join, as one that trains sees them; the same on all that do.

    On the donor a thread sends them the state.

    Args:
        worker: this one.
        membership: of the run.
        connector: opens connections.
        upto: the number of the last request to be served; the same on all workers.

    Attributes:
        upto: the number of that request.
        donor: the id of the worker whose state they get.
        complete: whether they have all of it.
        failed: whether it could not be sent; then they get it while the others wait.
    """

    def __init__(self, worker: WorkerState, membership: Membership, connector: Connector, upto: int) -> None:
        self.upto = upto
        self.donor = membership.current.members[upto % membership.current.size]
        self.complete = self.failed = False
        self._worker, self._membership, self._connector = worker, membership, connector
        self._epoch = membership.current.epoch
        self._sends = self.donor == membership.worker
        self._late: Tensor | None = None
        self._wants_late, self._given, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._arrived = self._closed = False
        self._open: list[Comm] = []
        self._versions: dict[tuple[int, str], tuple[Tensor, int]] = {}  # of what the late part has
        if self._sends:
            worker.shards.write()  # as in `_packed`
            early = to_bytes(pack(worker, ("others", "optimizer"), inflight=False))
            worker.comm.runtime.start_thread(lambda: self._send_both(early))

    def end_round(self, ranks: Ranks | None) -> None:
        """Start to send the late part after a round, if the early part has arrived.

        Args:
            ranks: of this worker, if it is a group: all of them send the state after the same round.
        """
        if not self._sends or self._late is not None:
            return
        wants_late = self._wants_late.is_set()
        if wants_late if ranks is None else all(wants for (wants,) in ranks.gather(wants_late)):
            self._versions = {
                (id(r), name): (x, x._version)
                for r in self._worker.replicas
                for name, x in r.state.items()
                if _lasts(r, name)
            }
            self._late = to_bytes(_packed(self._worker, ("identity", "replicas"), _lasts))
            self._given.set()

    def agree(self, comm: ElasticComm) -> None:
        """Let all know how far it is; waits for the late part, if it is on its way.

        Raises:
            CommError: a worker was lost.
        """
        mine = _PENDING
        if self._ended.wait(_WAITS * comm.timeout if self._given.is_set() else 0.0) or self._given.is_set():
            mine = _COMPLETE if self._arrived else _FAILED
        outcome = max(each for (each,) in comm.confirm(mine))
        self.complete, self.failed = outcome == _COMPLETE, outcome == _FAILED

    def finish(self, ranks: list[int]) -> None:
        """Send later changes, such as sums of learning rates, to the workers that are now in the view."""
        if not self._sends:
            return

        def changed(r: Replica, name: str) -> bool:
            x = r.state[name]
            sent, version = self._versions.get((id(r), name), (None, -1))
            return _lasts(r, name) and (sent is not x or version != x._version)

        changes = _packed(self._worker, ("step", "replicas"), changed)
        content = to_bytes({**changes, "groups": optimizer_groups(self._worker)})
        for rank in ranks:
            send(self._worker.comm, content, rank)

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
        for comm in self._open:
            self._connector.disconnect(comm)
        self._given.set()

    def _send_both(self, early: Tensor) -> None:
        """Send both parts to all that ask."""
        own = self._membership
        try:
            asked = own.asked(self.upto)
            for number, (worker, row) in asked.items():
                self._send(number, worker, row, "early", early)
            self._wants_late.set()
            while not self._given.wait(_LOOKS_SECONDS) and not own.has_left:
                pass
            if self._late is None:
                return
            for number, (worker, row) in asked.items():
                self._send(number, worker, row, "late", self._late)
            self._arrived = True
        except (PeerLostError, CommTimeoutError) as error:
            if not self._closed:
                _LOGGER.warning(
                    "a worker that asks to join could not be sent its state while the others train: %s", error
                )
        finally:
            self._ended.set()

    def _send(self, number: int, worker: str, row: str, kind: str, content: Tensor) -> None:
        own = self._membership
        name = f"{self._epoch}/{own.worker}/{number}/{kind}"
        own.offer(number, {"name": name, "kind": kind, "donor": own.worker, "row": own.row, "epoch": self._epoch})
        comm = self._connector.pair(name, 0, own.timeout, lambda: own.state_of(worker, row) is State.ENDED)
        self._open.append(comm)
        try:
            if self._closed:
                raise PeerLostError("this view has ended")
            send(comm, content, 1)
            comm.send_recv(
                torch.zeros(1, dtype=torch.float32, device=comm.check_device), [], [1]
            ).wait()  # that it has all arrived
        finally:
            self._connector.disconnect(comm)


class Offered:
    """The received parts of the others' state on a joining worker.

    Args:
        membership: of the run.
        connector: opens connections.
    """

    def __init__(self, membership: Membership, connector: Connector) -> None:
        self._membership, self._connector = membership, connector
        self._parts: dict[str, Tensor] = {}
        self._donor = ""

    def take(self, told: Any) -> None:
        """Receive a part that is offered; one whose sender is lost meanwhile is none."""
        fields = ("name", "kind", "donor", "row")
        if not isinstance(told, dict) or not is_worker([told.get(name) for name in fields[2:]]):
            return
        if not isinstance(told.get("epoch"), int):
            return
        if told["kind"] == "early":
            self._parts.clear()
        self._donor = told["donor"]
        own = self._membership

        def is_withdrawn() -> bool:
            # A donor closes its offers at the end of its view, and an object store has no connection that shows it.
            return own.has_view(told["epoch"] + 1) or own.state_of(told["donor"], told["row"]) is State.ENDED

        try:
            comm = self._connector.pair(told["name"], 1, own.timeout, is_withdrawn)
            try:
                self._parts[told["kind"]] = receive(comm, 0)
                comm.send_recv(torch.zeros(1, dtype=torch.float32, device=comm.check_device), [0], []).wait()
            finally:
                self._connector.disconnect(comm)
        except (PeerLostError, CommTimeoutError) as error:
            self._parts.clear()
            _LOGGER.warning("worker %s has to wait for a state: %s", own.worker, error)

    def unpack(self, worker: WorkerState, view: View) -> None:
        """Restore the others' state at the start of the round, to which this worker does not contribute.

        Raises:
            PeerLostError: not all of it has arrived.
        """
        if self._parts.keys() != {"early", "late"} or self._donor != view.donor or view.donor not in view.ready:
            raise PeerLostError(f"worker {self._membership.worker}: its sender was lost")
        changes = from_bytes(receive(worker.comm, view.members.index(view.donor)))
        packed = {**from_bytes(self._parts["early"]), **from_bytes(self._parts["late"])}
        self._parts.clear()
        replicas = [
            {**before, "state": {**before["state"], **after["state"]}, "inflight": after["inflight"]}
            for before, after in zip(packed["replicas"], changes["replicas"], strict=True)
        ]
        optimizer = {**packed["optimizer"], "param_groups": changes["groups"]}
        # The parameters will be the others' mean at the end of the round, so that these are kept until then.
        own = pack(worker, ("parameters",), inflight=False)
        _unpack(worker, {**packed, **own, "step": changes["step"], "replicas": replicas, "optimizer": optimizer})


def _lasts(_: Replica, name: str) -> bool:
    """Return True if state is handed over; residuals are not, since their worker will send them."""
    return residual_sizes(name, [0]) is None
