"""Codecs for those who keep torch's own wrappers: a hook for DistributedDataParallel and one for FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.codecs.base import Codec, check_feedback, draw_key
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.comm.base import Comm
from thinwire.comm.group import Group, comm_for
from thinwire.comm.work import Work
from thinwire.errors import CheckpointError
from thinwire.reduce.compressed_all_reduce import coded_mean_

Key = tuple[int, ...]
_OWED = "error/"


class Bucket(Protocol):
    """What DistributedDataParallel hands to a hook: gradients that travel together."""

    def buffer(self) -> Tensor:
        """All of them, end to end."""
        ...

    def parameters(self) -> list[Tensor]:
        """Whose they are."""
        ...

    def is_last(self) -> bool:
        """Whether no other bucket of this backward pass will come."""
        ...


class DdpHook:
    """Coded means of DistributedDataParallel's gradients; made by `ddp_hook`.

    Codes travel while the backward pass goes on, but for the last bucket's second stage. What is owed is kept by
    parameter, as DistributedDataParallel cuts its buckets anew after the first pass.

    Args:
        codec: for the gradients.
        comm: the ranks.
        seed: of the random draws, equal on all ranks.
    """

    def __init__(self, codec: Codec, comm: Comm, seed: int) -> None:
        check_feedback(codec)
        self.codec = codec
        self.comm = comm
        self.seed = seed
        self.__name__ = self.__qualname__ = "thinwire.ddp_hook"  # torch asks a hook for both
        self._buckets: dict[Key, dict[str, Tensor]] = {}
        self._members: dict[Key, list[Tensor]] = {}
        self._under_way: list[tuple[Future[Tensor], Work[Tensor]]] = []
        self._offset = 0

    def __call__(self, state, bucket):  # pyright: ignore  # torch refuses annotations that are not its own classes
        """Launch one bucket's mean; the last one of a pass waits for all of them.

        Args:
            state: what was given to `register_comm_hook`; not used.
            bucket: the gradients.

        Returns:
            A future of the mean, to be waited for at the end of the pass.
        """
        return self._launch(bucket)

    def errors(self) -> dict[Tensor, Tensor]:
        """What is owed to each parameter, as the views it is kept in; empty before the first pass.

        Ask between passes: what this rank owes as a server it owes as a worker from then on.
        """
        return {
            parameter: piece.view_as(parameter)
            for key in self._buckets
            for parameter, piece in _pieces(self._members[key], self._settled(key))
        }

    def state_dict(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank owes, by name of parameter, and the step.

        Args:
            names: the model's parameters, as `dict(model.named_parameters())`.
        """
        residual = self.errors()
        kept = {_OWED + name: residual[parameter].clone() for name, parameter in names.items() if parameter in residual}
        return {**kept, "step": torch.tensor(self.comm.step)}

    def load_state_dict(self, state: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict` of the same rank: what is owed is kept, in buckets as they will come.

        Args:
            state: from `state_dict`.
            names: the model's parameters, as `dict(model.named_parameters())`.

        Raises:
            CheckpointError: an error is owed to no parameter, or to one of another size.
        """
        self._buckets.clear()
        self._members.clear()
        for name in [name.removeprefix(_OWED) for name in state if name.startswith(_OWED)]:
            residual = state[_OWED + name]
            if name not in names or names[name].shape != residual.shape:
                raise CheckpointError(f"{name}: what is owed to it does not fit the model; load what belongs to it")
            self._members[key := (id(names[name]),)] = [names[name]]
            self._buckets[key] = {"error": residual.reshape(-1).to(names[name].device, torch.float32, copy=True)}
        self.comm.step = int(state["step"])

    def _launch(self, bucket: Bucket) -> Future[Tensor]:
        x, state = bucket.buffer(), self._state(bucket)
        key = draw_key(self.seed, self.comm.step, offset=self._offset)
        self._offset += x.numel()
        future: Future[Tensor] = Future()
        self._under_way.append((future, coded_mean_(self.comm, x, self.codec, state, key=key)))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        under_way, self._under_way, self._offset = self._under_way, [], 0
        for future, work in under_way:
            future.set_result(work.wait())
        self.comm.step += 1

    def _state(self, bucket: Bucket) -> dict[str, Tensor]:
        """The state of a bucket; of one that was cut otherwise before, put together from what its members were owed."""
        if not isinstance(self.codec, ErrorFeedback):
            return {}
        members = bucket.parameters()
        key = tuple(id(parameter) for parameter in members)
        if key not in self._buckets:
            self._part(members)
            singles = [self._buckets.pop((id(p),), None) for p in members]
            self._members = {single: kept for single, kept in self._members.items() if single in self._buckets}
            residual = [
                torch.zeros(p.numel(), device=p.device) if single is None else single["error"]
                for p, single in zip(members, singles, strict=True)
            ]
            self._members[key], self._buckets[key] = members, {"error": torch.cat(residual)}
        return self._buckets[key]

    def _part(self, parameters: list[Tensor]) -> None:
        """Keep what is owed to the members of these parameters' buckets one by one.

        Those buckets are of an earlier pass, for of every pass a parameter is in one bucket: none is under way.
        """
        wanted = {id(parameter) for parameter in parameters}
        for key in [key for key in self._buckets if not wanted.isdisjoint(key)]:
            error = self._settled(key)
            del self._buckets[key]
            for parameter, piece in _pieces(self._members.pop(key), error):
                self._members[single := (id(parameter),)] = [parameter]
                self._buckets[single] = {"error": piece.clone()}

    def _settled(self, key: Key) -> Tensor:
        """What is owed to a bucket by this rank as a worker, once it owes nothing as a server.

        The mean of all owes the same: a server's debt is one to the mean, and each worker's counts for its share.
        """
        state = self._buckets[key]
        for name in [name for name in state if name.startswith("server_error/")]:
            start, _, stop = name.removeprefix("server_error/").partition("-")
            state["error"][int(start) : int(stop)].add_(state.pop(name), alpha=self.comm.size)
        return state["error"]


def ddp_hook(codec: Codec, *, group: Group = None, seed: int = 0, timeout: float = 60.0) -> DdpHook:
    """A communication hook that averages the gradients of DistributedDataParallel in a codec's payloads.

    `network.register_comm_hook(None, ddp_hook(codec))` before the first pass. What is owed is in
    `hook.state_dict(names)`, to be saved by every rank.

    Args:
        codec: for the gradients; a biased one in `ErrorFeedback`.
        group: the ranks, those of the wrapper; default all.
        seed: of the random draws, equal on all ranks.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the codec leaves something unsaid for ever.
    """
    return DdpHook(codec, comm_for(group, timeout=timeout), seed)


def fsdp_hook(
    codec: Codec,
    group: Group | Comm,
    *,
    state: MutableMapping[str, Tensor] | None = None,
    seed: int = 0,
    timeout: float = 60.0,
) -> Callable[[Tensor], None]:
    """A hook that averages the gradients of FSDP2 between replicas in a codec's payloads.

    Shard each replica by itself, `fully_shard(module, mesh=mesh["shard"])`, and give every module that was sharded a
    hook of its own: `module.set_all_reduce_hook(fsdp_hook(codec, mesh["replicate"]), ...)`. It is called with this
    rank's shard of the gradient, averaged within the replica, and waits for the mean over replicas.

    Args:
        codec: for the shards; a biased one in `ErrorFeedback`.
        group: the ranks that hold the same shard, one in each replica; as a Comm, one for all modules, it opens no
            connections for each.
        state: where what is owed is kept, for those who save it; one for each module.
        seed: of the random draws, equal on all ranks.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the codec leaves something unsaid for ever.
    """
    check_feedback(codec)
    comm = group if isinstance(group, Comm) else comm_for(group, timeout=timeout)
    residual = dict[str, Tensor]() if state is None else state

    def hook(shard: Tensor) -> None:
        coded_mean_(comm, shard, codec, residual, key=draw_key(seed, comm.step)).wait()
        comm.step += 1

    return hook


def _pieces(members: list[Tensor], vector: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(members, vector.split([member.numel() for member in members]), strict=True))
