# SPDX-License-Identifier: Apache-2.0
"""Codecs for PyTorch's own wrappers: a communication hook for DistributedDataParallel and one for FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import Group, comm_for
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.comm.work import Work
from thinwire.errors import CheckpointError
from thinwire.methods.codecs.base import Codec, check_feedback, check_vectors, draw_key
from thinwire.methods.codecs.feedback import residual_dtype
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_

Key = tuple[int, ...]
_RESIDUAL = "error/"


class DdpHook:
    """Averages DistributedDataParallel's gradients, compressed by a codec; returned by `ddp_hook`.

    Messages travel during the backward pass, except the second stage of the all-reduce, which starts with the last
    bucket. The residual is kept by parameter, because DistributedDataParallel rebuilds its buckets after the first
    pass.

    Args:
        codec: for the gradients.
        comm: makes the comm of the ranks; called in the first pass, when trainers have made their process group.
        seed: of the random draws, equal on all ranks.
    """

    def __init__(self, codec: Codec, comm: Callable[[], Comm], seed: int) -> None:
        check_feedback(codec)
        check_vectors(codec)
        self.codec = codec
        self.seed = seed
        self._make_comm = comm
        self._comm: Comm | None = None
        self._loaded_step = 0
        self.__name__ = self.__qualname__ = "thinwire.ddp_hook"  # torch reads both
        self._buckets: dict[Key, dict[str, Tensor]] = {}
        self._members: dict[Key, list[Tensor]] = {}
        self._in_flight: list[tuple[Future[Tensor], Work[Tensor]]] = []
        self._pending_means = PendingMeans()
        self._offset = 0

    @property
    def comm(self) -> Comm:
        """The ranks; connects at the first use, which must be on all ranks."""
        if self._comm is None:
            self._comm = self._make_comm()
            self._comm.step = self._loaded_step
        return self._comm

    @property
    def step(self) -> int:
        """Passes done."""
        return self._loaded_step if self._comm is None else self._comm.step

    def __call__(self, state, bucket):  # pyright: ignore  # torch refuses annotations that are not its own classes
        """Start one bucket's mean; the last bucket of a pass waits for all of them.

        Args:
            state: what was given to `register_comm_hook`; not used.
            bucket: gradients that travel together, a `torch.distributed.GradBucket`.

        Returns:
            A future of the mean, which is done at the end of the pass.
        """
        return self._launch(bucket)

    def _launch(self, bucket: Any) -> Future[Tensor]:
        x, state = bucket.buffer(), self._state_of(bucket.parameters())
        key = draw_key(self.seed, self.comm.step, offset=self._offset)
        self._offset += x.numel()
        future: Future[Tensor] = Future()
        mean = compressed_mean_(self.comm, x, self.codec, state, key=key, pending=self._pending_means)
        self._in_flight.append((future, mean))
        if bucket.is_last():
            # Waiting earlier would block the backward pass: its thread is the one that calls this hook.
            in_flight, self._in_flight, self._offset = self._in_flight, [], 0
            for each, work in in_flight:
                each.set_result(work.wait())
            self.comm.step += 1
        return future

    def residuals(self) -> dict[Tensor, Tensor]:
        """Return the residual of each parameter, as views of where it is kept; empty before the first pass.

        Call it between passes. The residual that this rank has for its piece of the sum becomes part of its own.
        """
        return {
            parameter: piece.view_as(parameter)
            for key in self._buckets
            for parameter, piece in _pieces(self._members[key], self._merged_residual(key))
        }

    def state_dict(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's residuals, by name of parameter, and the step.

        Args:
            names: the model's parameters, as `dict(model.named_parameters())`.
        """
        residuals = self.residuals()
        kept = {_RESIDUAL + name: residuals[p].clone() for name, p in names.items() if p in residuals}
        return {**kept, "step": torch.tensor(self.step, dtype=torch.int64, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict` of the same rank; buckets may be divided differently.

        Args:
            state: from `state_dict`.
            names: the model's parameters, as `dict(model.named_parameters())`.

        Raises:
            CheckpointError: a residual belongs to no parameter, or to one of another shape.
        """
        self._buckets.clear()
        self._members.clear()
        for name in [name.removeprefix(_RESIDUAL) for name in state if name.startswith(_RESIDUAL)]:
            residual = state[_RESIDUAL + name]
            if name not in names or names[name].shape != residual.shape:
                raise CheckpointError(
                    f"{name}: a residual of shape {tuple(residual.shape)} does not fit the model. Load the state of "
                    "the same model"
                )
            dtype = residual_dtype(self.codec, names[name])
            self._members[key := (id(names[name]),)] = [names[name]]
            self._buckets[key] = {"error": residual.reshape(-1).to(names[name].device, dtype, copy=True)}
        self._loaded_step = int(state["step"])
        if self._comm is not None:
            self._comm.step = self._loaded_step

    def _state_of(self, parameters: list[Tensor]) -> dict[str, Tensor]:
        """The codec's state for a bucket; for a new bucket, its residual is put together from its parameters'."""
        if not self.codec.traits.keeps_residual:
            return {}
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._buckets:
            self._split_buckets_of(parameters)
            singles = [self._buckets.pop((id(p),), None) for p in parameters]
            self._members = {single: kept for single, kept in self._members.items() if single in self._buckets}
            residuals = [
                torch.zeros(p.numel(), dtype=residual_dtype(self.codec, p), device=p.device)
                if single is None
                else single["error"]
                for p, single in zip(parameters, singles, strict=True)
            ]
            self._members[key], self._buckets[key] = parameters, {"error": torch.cat(residuals)}
        return self._buckets[key]

    def _split_buckets_of(self, parameters: list[Tensor]) -> None:
        """Replace the buckets that hold any of these parameters by one bucket per parameter."""
        # They are of an earlier pass, so none of them is in flight: within a pass a parameter is in one bucket only.
        wanted = {id(parameter) for parameter in parameters}
        for key in [key for key in self._buckets if not wanted.isdisjoint(key)]:
            residual = self._merged_residual(key)
            del self._buckets[key]
            for parameter, piece in _pieces(self._members.pop(key), residual):
                self._members[single := (id(parameter),)] = [parameter]
                self._buckets[single] = {"error": piece.clone()}

    def _merged_residual(self, key: Key) -> Tensor:
        """Return a bucket's residual on this rank, with that of its piece of the sum added to it."""
        state = self._buckets[key]
        for name in [name for name in state if name.startswith("server_error/")]:
            start, _, stop = name.removeprefix("server_error/").partition("-")
            # The piece's residual is one of the mean. A worker's residual counts 1/n in the mean, so the factor is n.
            state["error"][int(start) : int(stop)].add_(state.pop(name), alpha=self.comm.size)
        return state["error"]


def ddp_hook(codec: Codec, *, group: Group = None, seed: int = 0, timeout: float = 60.0) -> DdpHook:
    """Return a communication hook that averages the gradients of DistributedDataParallel, compressed by a codec.

    Call `network.register_comm_hook(None, ddp_hook(codec))` before the first pass. The residual is in
    `hook.state_dict(names)`, which every rank should save. The ranks connect in the first pass, so a hook can be made
    before the process group, as `DDPStrategy(ddp_comm_hook=ddp_hook(codec))` in Lightning needs it.

    Args:
        codec: for the gradients; a biased one in `ErrorFeedback`.
        group: the ranks, those of the wrapper; default all.
        seed: of the random draws, equal on all ranks.
        timeout: how long one wait may last, in seconds.

    Raises:
        ConfigError: the codec is biased and not in `ErrorFeedback`.

    Example:
        Of two entries one is sent; the other is kept as the residual, and added to the next gradient.

        >>> import torch, thinwire
        >>> from torch import distributed as dist, nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> network = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        >>> hook = thinwire.ddp_hook(thinwire.ErrorFeedback(thinwire.TopK(0.5)))
        >>> network.register_comm_hook(None, hook)
        >>> network(torch.tensor([[1.0, 0.25]])).sum().backward()
        >>> network.module.weight.grad
        tensor([[1., 0.]])
        >>> hook.state_dict(dict(network.module.named_parameters()))["error/weight"]
        tensor([[0.0000, 0.2500]])
        >>> dist.destroy_process_group()
    """
    return DdpHook(codec, lambda: comm_for(group, timeout=timeout), seed)


def fsdp_hook(
    codec: Codec,
    group: Group | Comm,
    *,
    state: MutableMapping[str, Tensor] | None = None,
    seed: int = 0,
    timeout: float = 60.0,
) -> Callable[[Tensor], None]:
    """Return a hook that averages the gradients of FSDP2 between replicas, compressed by a codec.

    Shard each replica by itself, `fully_shard(module, mesh=mesh["shard"])`, and give every sharded module a hook of
    its own: `module.set_all_reduce_hook(fsdp_hook(codec, mesh["replicate"]), ...)`. FSDP2 calls it with this rank's
    shard of the gradient, averaged within the replica; the hook waits for the mean over replicas.

    Args:
        codec: for the shards; a biased one in `ErrorFeedback`.
        group: the ranks that hold the same shard, one in each replica. Pass one Comm for all modules, and they share
            its connections.
        state: where the residual is kept, to be saved by the caller; one for each module.
        seed: of the random draws, equal on all ranks.
        timeout: how long one wait may last, in seconds.

    Raises:
        ConfigError: the codec is biased and not in `ErrorFeedback`.

    Example:
        Two replicas as threads; FSDP2 would call the hook at the end of each module's backward pass.

        >>> import torch, thinwire
        >>> def average(comm):
        ...     shard = torch.tensor([1.0 + comm.rank, 0.25])
        ...     thinwire.fsdp_hook(thinwire.Bf16(), comm)(shard)
        ...     return shard.tolist()
        >>> thinwire.run_threads(2, average)
        [[1.5, 0.25], [1.5, 0.25]]
    """
    check_feedback(codec)
    check_vectors(codec)
    comm = group if isinstance(group, Comm) else comm_for(group, timeout=timeout)
    residual = dict[str, Tensor]() if state is None else state

    def hook(shard: Tensor) -> None:
        compressed_mean_(comm, shard, codec, residual, key=draw_key(seed, comm.step)).wait()
        comm.step += 1

    return hook


def _pieces(members: list[Tensor], vector: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(members, vector.split([member.numel() for member in members]), strict=True))
