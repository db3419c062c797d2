# SPDX-License-Identifier: Apache-2.0
"""Arrays on several workers: each message carries all models, and each model trains as in a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.array import FusedArray
from thinwire.arrays.fusion.checkpoints import (
    Followers,
    check,
    outline_of,
    restore_outline,
    select_parts,
    separate_step_counters,
)
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.scaling import GradScaler
from thinwire.arrays.fusion.store import Selection, check_slot, owner_of
from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import Group, comm_for
from thinwire.core.comm.work import completed
from thinwire.core.replica.flat import Segment, copy_each_, flatten, lay_out, views
from thinwire.core.replica.replica import Replica
from thinwire.errors import CheckpointError, ConfigError
from thinwire.methods.strategies.base import Strategy, codecs_of, nested
from thinwire.registry import canonical
from thinwire.worker import checkpoint, replica_state
from thinwire.worker.attach import attach
from thinwire.worker.handshake import agree
from thinwire.worker.parameters import by_kind
from thinwire.worker.state import WorkerState
from thinwire.worker.worker import Worker, internals_of

# State that is one number while all models have the same learning rate, and a vector like `x` otherwise.
_LR_STATE = ("lr_sum",)
Layout = tuple[list[nn.Parameter], tuple[Segment, ...]]


class _StackedModule(nn.Module):
    """An array as a module whose parameters and buffers are the stacked tensors that the array has at the time."""

    def __init__(self, array: FusedArray) -> None:
        super().__init__()
        self.array = array

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the array."""
        return self.array(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the array's parameters, [B, ...]."""
        yield from self.array.named_parameters()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the array's buffers, [B, ...]."""
        yield from self.array.named_buffers()


class ParallelArray:
    """An array that every worker has a copy of, and trains on its own data; made by `attach_array`.

    The training loop is the array's own: `array.losses(...).sum().backward()`, `optimizer.step()`.

    Attributes:
        worker: the array as one worker, as `thinwire.attach` returns it; its meter, consensus and step count are
            those of all models together.
        array: the array.
        optimizer: the array's optimizer.
    """

    def __init__(self, worker: Worker, array: FusedArray, optimizer: FusedOptimizer, **settings: Any) -> None:
        self.worker, self.array, self.optimizer, self._settings = worker, array, optimizer, settings
        self._set_learning_rates()

    @contextmanager
    def consensus(self) -> Generator[FusedArray]:
        """The array with the parameters that all workers agree on, for evaluation and `extract`; a collective call."""
        with self.worker.consensus():
            yield self.array

    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models, as `FusedArray.select` does, with their optimizer and strategy state; a collective call.

        Pass the result to `select` of schedules and scaler. The strategy's step count continues.

        Raises:
            MismatchError: ranks keep different models; nothing was changed.
            ConfigError: there is no such slot.
        """
        self._agree("the models that are kept", list(indices))
        for index in indices:
            check_slot(index, self.array.size)
        # The parameters become new tensors, so the array is attached again and the strategy's state moved over.
        before = self.worker
        before.detach()
        kept = self.array.select(indices)
        self.optimizer.select(kept)
        self.worker = _attach(self.array, self.optimizer, before.strategy, before.comm, "own", **self._settings)
        self._set_learning_rates()
        ours, theirs = internals_of(before).layouts, internals_of(self.worker).layouts
        for old, new, *layouts in zip(before.replicas, self.worker.replicas, ours, theirs, strict=True):
            new.step = old.step
            carry = partial(_select_state, layouts[0], layouts[1], kept)
            # In place, because parts of the replica are views of these mappings.
            new.state.clear()
            new.state.update({name: carry(vector) for name, vector in old.state.items()})
            new.inflight.clear()
            for name, work in old.inflight.items():
                new.inflight[name] = completed([carry(x) for x in work.wait()])
        before.comm.step = self.worker.step
        return kept

    def insert(self, index: int, model: nn.Module, *, seed: int | None = None, **hyperparameters: float) -> None:
        """Put rank 0's model into a slot on all ranks, with a new optimizer state; a collective call.

        The slot's strategy state is reset. The strategy's step count continues, so that all models still communicate at
        the same steps.

        Args:
            index: the slot.
            model: a model with the structure of the one it replaces.
            seed: seed of the slot's random generator on this rank.
            hyperparameters: the slot's optimizer hyperparameters.

        Raises:
            MismatchError: ranks name different slots, models or hyperparameters; nothing was changed.
            ConfigError: there is no such slot, or the model has another structure.
        """
        shapes = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
        self._agree("the slot that is filled", [index, sorted(hyperparameters.items())])
        self._agree("the model that is put in", [repr(model), shapes])
        # Only after both checks: a rank that raised would leave the others waiting in the broadcasts below.
        self.array.insert(index, model, seed=seed)
        self.optimizer.reset(index, **hyperparameters)
        with torch.no_grad():
            tensors = [*self.array.parameters(), *(buffer for _, buffer in self.array.named_buffers())]
            # A tensor that one model has alone (a layer that could not be fused) has a single row.
            rows = [
                tensor[index if owner_of(tensor) is None else 0]
                for tensor in tensors
                if owner_of(tensor) in (None, index)
            ]
            for alike in by_kind(rows).values():
                vector = flatten(alike, layout := lay_out([("", row) for row in alike]))
                self.worker.comm.broadcast_(vector, 0).wait()
                copy_each_(alike, views(vector, layout))
            for replica, layout in zip(self.worker.replicas, internals_of(self.worker).layouts, strict=True):
                _reset_state(self.worker.strategy, replica, layout, index)

    def save(
        self, folder: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int = 3, **parts: Unpack[Followers]
    ) -> Path:
        """Write a checkpoint to `folder`/step-NNNNNNNN: the files of all ranks, or none; a collective call.

        A model that has diverged is saved as it is, so that it does not keep the others from being saved.

        Args:
            folder: holds one checkpoint per saved step; ranks need not share a disk.
            extra: more values to save on each rank: dicts of tensors and JSON values.
            keep: number of checkpoints to keep, the newest ones.
            parts: `schedules` of the optimizer, and the losses' `scaler`.

        Raises:
            CheckpointError: the disk cannot be written to, or a value is neither a tensor nor JSON.
        """
        worker = internals_of(self.worker)
        outline = outline_of(self.array, optimizer=self.optimizer, **parts)
        content = {
            "state": replica_state.pack(worker),
            "extra": {"array": outline, "own": dict(extra or {})},
            "random": outline["random"],
        }
        return checkpoint.write_together(worker, checkpoint.on_disk(worker, folder), content, keep=max(keep, 1))

    def load(self, folder: str | Path, **parts: Unpack[Followers]) -> dict[str, Any]:
        """Load the newest complete checkpoint in `folder`, bit for bit; returns its `extra`. A collective call.

        The array may have another number of models: it is resized to the saved number. The number of workers may differ
        too, as in `Worker.load`; schedules and scaler must be equal on all workers. Random generators are then not
        changed, and `extra` is rank 0's.

        Args:
            folder: the folder that `save` wrote to.
            parts: `schedules`, with a factory for the present model of each slot, and the losses' `scaler`.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it belongs to other models or another recipe. All
                ranks raise it with the first difference, and nothing was changed.
        """
        worker = internals_of(self.worker)
        home, contents = checkpoint.newest(worker, checkpoint.on_disk(worker, folder))
        first, same_size = contents[0], contents[0]["save"]["size"] == worker.comm.size

        def checked() -> dict[str, Any]:
            if "array" not in first["extra"]:
                raise CheckpointError(f"{home}: holds one model and no array. Load it with worker.load")
            identity = first["state"]["identity"]
            for name, value in (
                ("the strategy", canonical(worker.strategy)),
                ("the seed", str(worker.seed)),
            ):
                if identity[name] != value:
                    raise CheckpointError(
                        f"{name} is {identity[name]} in the checkpoint and {value} in this run. Make them equal"
                    )
            check(first["extra"]["array"], self.array, optimizer=self.optimizer, **parts)
            return first["state"] if same_size else _resized(contents, worker)

        # Every rank checks before any rank changes something.
        state = checkpoint.together(worker, home, checked)
        outline: dict[str, Any] = first["extra"]["array"]
        models = outline["models"]
        if models != self.array.size:
            select_parts(self.select([min(slot, self.array.size - 1) for slot in range(models)]), **parts)
        checkpoint.restore(internals_of(self.worker), state, same_size=same_size)  # `select` has replaced the worker
        separate_step_counters(self.optimizer)
        restore_outline(outline, self.array, random=same_size, **parts)
        found: dict[str, Any] = first["extra"]["own"]
        return found

    def detach(self) -> None:
        """Remove all hooks; afterwards the array trains without communication."""
        self.worker.detach()

    def _agree(self, name: str, value: object) -> None:
        agree(self.worker.comm, [(name, repr(value))], self.worker.replicas[0].x.device)

    def _set_learning_rates(self) -> None:
        """Give strategies that read the learning rate the rate of each model."""
        for replica, layout in zip(self.worker.replicas, internals_of(self.worker).layouts, strict=True):
            replica._lr = _learning_rates(self.optimizer, layout, replica.x)  # pyright: ignore[reportPrivateUsage]


def attach_array(
    array: FusedArray,
    optimizer: FusedOptimizer,
    strategy: Strategy,
    *,
    group: Group = None,
    comm: Comm | None = None,
    init: Literal["broadcast", "own"] = "broadcast",
    seed: int = 0,
    scaler: GradScaler | None = None,
    bucket_bytes: int = 8 << 20,
    timeout: float = 60.0,
) -> ParallelArray:
    r"""Train an array with a strategy, as `thinwire.attach` trains a model: every message carries all B models.

    A step sends as many messages as for one model, each B times as long. Each model's numbers are those of a
    data-parallel run of its own, so only strategies that treat all elements alike are allowed. Slots that are not
    `optimizer.active` are still sent; `select` removes them from the messages.

    Args:
        array: the array, on its device already, of the same models on all ranks; its random generators may differ
            between ranks.
        optimizer: the array's optimizer.
        strategy: `AllReduce`, `LocalSGD`, `SlowMo`, `Gossip` or `PushSum`, without a codec or with a cast.
        group: the ranks that train together; default all.
        comm: the ranks as a Comm, instead of `group`.
        init: "broadcast" starts every rank from rank 0's models; "own" keeps each rank's.
        seed: seed of the strategy's random draws; equal on all ranks.
        scaler: the loop's scaler; where gradients differ between workers, a model that overflows on one rank skips its
            step on all ranks.
        bucket_bytes: gradient bytes of one model in one message.
        timeout: the longest that one wait may take, in seconds.

    Raises:
        ConfigError: the strategy would mix models.
        MismatchError: ranks were started with different arrays, recipes or seeds.

    Example:
        Two workers train two models with different learning rates; each step sends one message:

        >>> import torch
        >>> from torch import nn
        >>> import thinwire
        >>> from thinwire.arrays.sweep.parallel import attach_array
        >>> def train(comm):
        ...     models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        ...     for model in models:
        ...         nn.init.zeros_(model.weight)
        ...     array = thinwire.fuse(models)
        ...     optimizer = thinwire.arrays.fusion.SGD(array.parameters(), lr=[0.1, 0.2])
        ...     parallel = attach_array(array, optimizer, thinwire.AllReduce(), comm=comm)
        ...     target = torch.tensor([[1.0 + 2 * comm.rank]])  # 1 on rank 0, 3 on rank 1
        ...     losses = array.losses(nn.functional.mse_loss, array(torch.ones(1, 1)), target)
        ...     losses.sum().backward()
        ...     optimizer.step()
        ...     return [round(float(w), 3) for w in array.state_dict()["weight"].flatten()]
        >>> thinwire.run_threads(2, train)
        [[0.4, 0.8], [0.4, 0.8]]
    """
    _refuse_mixing(strategy)
    if next(array.shared_parameters(), None) is not None:
        raise ConfigError(
            "the array has trainable parameters that all models share. Workers exchange each model's own parameters. "
            "Fuse the models without share_trained"
        )
    comm = comm or comm_for(group, timeout=timeout, device=next(array.parameters()).device)
    settings = {"seed": seed, "bucket_bytes": bucket_bytes}
    worker = _attach(array, optimizer, strategy, comm, init, **settings)
    if scaler is not None and scaler.enabled and comm.size > 1 and not strategy.traits.sends_gradients:
        _share_skips(scaler, comm, worker.replicas[0].x.device)
    return ParallelArray(worker, array, optimizer, **settings)


def _attach(
    array: FusedArray,
    optimizer: FusedOptimizer,
    strategy: Strategy,
    comm: Comm,
    init: Literal["broadcast", "own"],
    *,
    seed: int,
    bucket_bytes: int,
) -> Worker:
    # As many buckets as for one model, so as many messages.
    return attach(
        _StackedModule(array),
        optimizer,
        strategy,
        comm=comm,
        init=init,
        seed=seed,
        bucket_bytes=bucket_bytes * array.size,
        # A model that diverges leaves the others alone.
        nonfinite="ignore",
    )


def _refuse_mixing(strategy: Strategy) -> None:
    for codec in (codec for method in nested(strategy) for codec in codecs_of(method)):
        if not codec.elementwise:
            raise ConfigError(f"codec={codec}: codes many elements together, which mixes models. Use Bf16() or Fp16()")
    if not strategy.traits.elementwise:
        raise ConfigError(
            f"{strategy}: may mix the models of an array. Use one that treats every element by itself, such as "
            "AllReduce, LocalSGD, Gossip, PushSum, or SlowMo(base, period, momentum, lr) over one of them"
        )


def _learning_rates(optimizer: FusedOptimizer, layout: Layout, x: Tensor) -> Callable[[], float | Tensor]:
    """Return a function that reads the learning rates: a number if all models have the same, else a vector like `x`."""
    parameters, segments = layout
    group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    sizes = [segment.size // segment.shape[0] for segment in segments for _ in range(segment.shape[0])]
    repeats = torch.tensor(sizes, dtype=torch.int64, device=x.device)

    def read() -> float | Tensor:
        of_parameters = list[Tensor]()
        for parameter in parameters:
            owner, rates = owner_of(parameter), optimizer.param_groups[group_of[id(parameter)]]["lr"]
            of_parameters.append(rates if owner is None else rates[owner : owner + 1])
        rates = torch.cat(of_parameters)
        if bool((rates == rates[0]).all()):
            return float(rates[0])
        return rates.to(x.device, x.dtype).repeat_interleave(repeats, output_size=x.numel())

    return read


def _share_skips(scaler: GradScaler, comm: Comm, device: torch.device) -> None:
    """Make a model that overflows on one rank skip its step on all ranks; one number per model and step is sent."""
    local_unscale_ = scaler.unscale_

    def unscale_(optimizer: FusedOptimizer) -> Tensor:
        found = local_unscale_(optimizer)
        found.copy_(comm.all_reduce_(found.to(device, torch.float32)).wait().cpu() > 0)
        return found

    scaler.unscale_ = unscale_


# -- strategy state of single models -----------------------------------------------------------------------------------


def _select_state(old: Layout, new: Layout, kept: Selection, before: Tensor) -> Tensor:
    """Return a state tensor of the models that are kept; one that is not a vector like `x` belongs to all models."""
    if before.numel() != old[1][-1].stop:
        return before.clone()
    found = before.new_empty(new[1][-1].stop)
    segments = {id(parameter): segment for parameter, segment in zip(*new, strict=True)}
    for parameter, segment in zip(*old, strict=True):
        rows = segment.of(before)
        for after in kept.moved[parameter]:
            segments[id(after)].of(found).copy_(kept.rows(rows) if owner_of(parameter) is None else rows)
    return found


def _reset_state(strategy: Strategy, replica: Replica, layout: Layout, index: int) -> None:
    """Reset the strategy state of one model; its part of results in flight becomes its part of `x`."""
    state, length = dict(replica.state), replica.x.numel()
    replica.state.clear()
    strategy.start(replica)
    fresh = dict(replica.state)
    replica.state.clear()
    replica.state.update(state)
    for name, before in state.items():
        # The new model's rates were summed over fewer steps than the others', so one number is no longer enough.
        if name.rpartition("/")[2] in _LR_STATE and before.numel() == 1:
            replica.state[name] = before.expand(length).clone()
        if replica.state[name].numel() == length:
            _overwrite(replica.state[name], fresh[name].expand(length).contiguous(), layout, index)
    for work in replica.inflight.values():
        for vector in work.wait():
            if vector.numel() == length:
                _overwrite(vector, replica.x, layout, index)


def _overwrite(vector: Tensor, by: Tensor, layout: Layout, index: int) -> None:
    for parameter, segment in zip(*layout, strict=True):
        if owner_of(parameter) in (None, index):
            row = index if owner_of(parameter) is None else 0
            segment.of(vector)[row].copy_(segment.of(by)[row])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _resized(contents: Sequence[dict[str, Any]], worker: WorkerState) -> dict[str, Any]:
    """Return this rank's state in a world of another size; schedules and scaler must be equal on all ranks."""
    for name in ("rates", "schedules", "scaler"):
        if not all(
            replica_state.same(each["extra"]["array"][name], contents[0]["extra"]["array"][name]) for each in contents
        ):
            raise CheckpointError(
                f"the {name} differ between workers, so the number of workers cannot change. Resume with "
                f"{len(contents)} workers"
            )
    return replica_state.merge([content["state"] for content in contents], worker)
