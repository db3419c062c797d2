"""The wire of real runs: a torch.distributed process group, Gloo on CPU or NCCL on GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.base import Comm, Work
from laconic.comm.threads import alone
from laconic.errors import CommError, ConfigError, DeadlineError, PeerLostError

T = TypeVar("T")
Group = dist.ProcessGroup | DeviceMesh | None
Handles = Sequence[dist.Work | None]
_ROLL_CALL_SECONDS = 2.0


class GroupComm(Comm):
    """One rank's view of a process group.

    A failed call closes the group at once, so that every other rank fails too instead of waiting for its deadline;
    then the survivors answer a roll call on the rendezvous store, and the error names who did not.

    Args:
        group: a process group; the default one when None.
        deadline_seconds: how long one wait may last (on NCCL the group's own timeout holds).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, deadline_seconds: float = 60.0) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), deadline_seconds=deadline_seconds)
        self.group = group
        self._blocking = dist.get_backend(group) == "gloo"
        self._store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)

    def _sum_(self, x: Tensor) -> Work[Tensor]:
        return self._start("sum", lambda: [dist.all_reduce(x, group=self.group, async_op=True)], lambda: x)

    def _broadcast_(self, x: Tensor, source: int) -> Work[Tensor]:
        def launch() -> Handles:
            return [dist.broadcast(x, group_src=source, group=self.group, async_op=True)]

        return self._start(f"broadcast from rank {source}", launch, lambda: x)

    def _gather(self, x: Tensor) -> Work[list[Tensor]]:
        rows = x.new_empty((self.size, x.numel()))

        def launch() -> Handles:
            flat = x.contiguous().view(-1)
            return [dist.all_gather(list(rows), flat, group=self.group, async_op=True)]

        return self._start("gather", launch, lambda: [row.view(x.shape) for row in rows])

    def _scatter(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        sent, received = torch.cat(list(xs)), xs[0].new_empty(sum(sizes))

        def launch() -> Handles:
            counts = [x.numel() for x in xs]
            return [dist.all_to_all_single(received, sent, list(sizes), counts, group=self.group, async_op=True)]

        return self._start("scatter", launch, lambda: list(received.split(list(sizes))))

    def _exchange(self, x: Tensor, to: Sequence[int], frm: Sequence[int]) -> Work[list[Tensor]]:
        received = [torch.empty_like(x) for _ in frm]

        def launch() -> Handles:
            sends = [dist.P2POp(dist.isend, x, group=self.group, group_peer=j) for j in to]
            receives = [
                dist.P2POp(dist.irecv, y, group=self.group, group_peer=j) for j, y in zip(frm, received, strict=True)
            ]
            return list(dist.batch_isend_irecv(sends + receives))

        peers = ", ".join(str(j) for j in sorted({*to, *frm}))
        return self._start(f"exchange with ranks {peers}", launch, lambda: received)

    def _start(self, operation: str, launch: Callable[[], Handles], result: Callable[[], T]) -> Work[T]:
        step = self.step
        try:
            handles = launch()
        except RuntimeError as error:
            raise self._failed(operation, step, error, 0.0) from error

        def finish() -> T:
            start = time.monotonic()
            try:
                for handle in handles:
                    if handle is not None:
                        self._wait(handle)
            except RuntimeError as error:
                raise self._failed(operation, step, error, time.monotonic() - start) from error
            return result()

        return Work(finish)

    def _wait(self, handle: dist.Work) -> None:
        # A timeout makes NCCL's wait block the host; its own watchdog keeps the deadline instead.
        if self._blocking:
            handle.wait(timedelta(seconds=self.deadline_seconds))
        else:
            handle.wait()

    def _failed(self, operation: str, step: int, error: RuntimeError, waited: float) -> CommError:
        missing = self._roll_call()
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        where = f"rank {self.rank}, step {step}, {operation}"
        if waited >= 0.95 * self.deadline_seconds:
            names = f"; {who} not answering" if missing else ""
            return DeadlineError(f"{where}: no answer within {self.deadline_seconds:g} s{names}")
        names = f"{who} lost" if missing else "a connection was closed"
        return PeerLostError(f"{where}: {names} ({str(error).splitlines()[0][:200]})")

    def _roll_call(self) -> list[int]:
        """Close the group, say "here" on the store, and return the ranks that do not within two seconds."""
        close(self.group)
        keys = {rank: f"laconic/here/{member}" for rank, member in enumerate(self._members)}
        end = time.monotonic() + _ROLL_CALL_SECONDS
        try:
            self._store.set(keys[self.rank], "1")
            missing = [rank for rank in keys if not self._store.check([keys[rank]])]
            while missing and time.monotonic() < end:
                time.sleep(0.05)
                missing = [rank for rank in missing if not self._store.check([keys[rank]])]
        except (RuntimeError, OSError):
            # The store went with the process that hosts it.
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and self._members[0] == 0
            return [0] if hosted else []
        if self._members[self.rank] == 0:
            time.sleep(0.5)  # this process may host the store the others still read
        return missing


def close(group: dist.ProcessGroup | None) -> None:
    """Close a group's connections, whatever state it is in."""
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError):
        return


def comm_for(group: Group = None, *, deadline_seconds: float = 60.0) -> Comm:
    """The comm of a process group, of a one-dimensional `DeviceMesh`, or of a world of one.

    Args:
        group: None is the default group where one exists, and one worker alone where none does.
        deadline_seconds: how long one wait may last.

    Raises:
        ConfigError: several workers were started but no process group exists, or the mesh has several dimensions.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"a mesh of shape {tuple(group.shape)}: name one dimension, as in mesh['replicate']")
        group = group.get_group()
    if group is not None or dist.is_initialized():
        return GroupComm(group, deadline_seconds=deadline_seconds)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1:
        raise ConfigError(
            f"WORLD_SIZE={workers} but no process group: call torch.distributed.init_process_group() before attach"
        )
    return alone()


__all__ = ["Group", "GroupComm", "close", "comm_for"]
