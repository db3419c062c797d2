# SPDX-License-Identifier: Apache-2.0
"""The state of a living worker for those that join: in chunks, each with a checksum."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.codecs.feedback import of_server
from thinwire.comm.base import Comm
from thinwire.comm.work import Work, completed
from thinwire.errors import CommError
from thinwire.quorum.state_transfer import pack, unpack_
from thinwire.replica.replica import Replica
from thinwire.worker.snapshot import others_of
from thinwire.worker.state import WorkerState

_CHUNK_BYTES = 1 << 22
_AHEAD = 4  # chunks on the way, so that the link is never idle


def hand_over(worker: WorkerState, joined: Sequence[int], source: int) -> None:
    """Give workers that join the parameters, buffers, optimizer state and strategy state of one that is there.

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
        content = packed(worker, _whole, others=True)
        for rank in joined:
            send(comm, content, rank)
    elif comm.rank in joined:
        unpack(worker, receive(comm, source), anew=True)


def _whole(r: Replica) -> Tensor:
    # A server's residual is of a piece that one rank alone adds up: a copy would enter the mean a second time.
    return pack(r, [name for name in r.state if not of_server(name)])


def packed(worker: WorkerState, each: Callable[[Replica], Tensor], *, others: bool) -> Tensor:
    """All replicas' states, each behind its length; then what is not trained, if that is asked for."""
    rest = [x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in others_of(worker).values() if others]
    parts = [each(r) for r in worker.replicas]
    parts += [torch.cat(rest) if rest else torch.empty(0, dtype=torch.uint8, device="cpu")]
    in_flight = sum(len(r.inflight) for r in worker.replicas)
    lengths = torch.tensor([worker.step, in_flight, *(len(part) for part in parts)], dtype=torch.int64, device="cpu")
    return torch.cat([lengths.view(torch.uint8), *parts])


def unpack(worker: WorkerState, content: Tensor, *, anew: bool) -> None:
    """Take over what was packed.

    Args:
        worker: this rank's.
        content: of `packed`.
        anew: whether the strategy's state so far is dropped.
    """
    head = 8 * (len(worker.replicas) + 3)
    step, in_flight, *lengths = content[:head].clone().view(torch.int64).tolist()
    *states, rest = content[head:].split(lengths)
    with torch.no_grad():
        for r, state in zip(worker.replicas, states, strict=True):
            if anew:
                # Of an earlier view, which has ended before it was in step with the others.
                r.state.clear()
                r.inflight.clear()
            unpack_(r, state)
            r.step = step
            if in_flight:
                # Messages are not handed over. The others drop theirs, which `change_view` sees by there being some.
                r.launch("dropped", completed([]))
        for x in others_of(worker).values() if len(rest) else ():
            own, rest = rest[: x.nbytes], rest[x.nbytes :]
            x.copy_(own.clone().view(x.dtype).view(x.shape))
    worker.comm.step = step


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
    """The bytes that `send` has sent.

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
                f"rank {comm.rank}: what rank {src} sent of its state was damaged on the way; start this worker again"
            )
    return content


def _checksum(chunk: Tensor) -> int:
    return zlib.crc32(cast(Any, chunk.numpy()))
