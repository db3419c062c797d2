"""An array under a strategy: every message carries all models, and each trains as it would with those workers alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.codecs.cast import Bf16, Fp16
from thinwire.comm.base import Comm
from thinwire.comm.group import Group, comm_for
from thinwire.comm.work import completed
from thinwire.errors import ConfigError
from thinwire.fusion.array import FusedArray
from thinwire.fusion.optimizers.base import FusedOptimizer
from thinwire.fusion.scaling import GradScaler
from thinwire.fusion.schedules import Schedules
from thinwire.fusion.store import Selection, owner_of
from thinwire.replica.flat import Segment, copy_each_, flatten, lay_out, views
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.gossip.gossip import Gossip
from thinwire.strategies.gradients.all_reduce import AllReduce
from thinwire.strategies.local.local_sgd import Local, LocalSGD
from thinwire.strategies.local.slow_momentum import SlowMo
from thinwire.strategies.push_sum.push_sum import PushSum
from thinwire.sweep import saving
from thinwire.worker.handshake import agree
from thinwire.worker.parameters import by_kind
from thinwire.worker.worker import Worker, attach

# They do to every element of the vector what they do to every other, so that models do not mix.
_APART = (AllReduce, Local, LocalSGD, SlowMo, Gossip, PushSum)
_CASTS = (Bf16, Fp16)
# One number for as long as all models have the same learning rate.
_RATES = ("lr_sum",)
Layout = tuple[list[nn.Parameter], tuple[Segment, ...]]


class Stacked(nn.Module):
    """An array's stacked tensors as one module's, whatever the array holds at the time."""

    def __init__(self, array: FusedArray) -> None:
        super().__init__()
        self.array = array

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the array."""
        return self.array(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The array's, [B, ...]."""
        yield from self.array.named_parameters()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The array's, [B, ...]."""
        yield from self.array.named_buffers()


class ParallelArray:
    """An array of which every worker has a copy and its own data; made by `attach_array`.

    The loop stays as it was: `array.losses(...).sum().backward()`, `optimizer.step()`.

    Attributes:
        attached: what `thinwire.attach` returned: its meter, consensus and clock are those of all models together.
    """

    def __init__(self, worker: Worker, array: FusedArray, optimizer: FusedOptimizer, **settings: Any) -> None:
        self.worker, self.array, self.optimizer, self._settings = worker, array, optimizer, settings
        self._take_rates()

    @contextmanager
    def consensus(self) -> Generator[FusedArray]:
        """The array all workers agree on, to evaluate and to `extract` from; every rank must enter."""
        with self.worker.consensus():
            yield self.array

    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models, as `FusedArray.select` does: on all ranks, with the optimizer and what the strategy keeps.

        Schedules and scaler follow what is returned. The clock of the strategy goes on.

        Raises:
            MismatchError: ranks keep different models; nothing was done.
            ConfigError: no such slot.
        """
        self._agree("the models that are kept", list(indices))
        for index in indices:
            if not 0 <= index < self.array.size:
                raise ConfigError(f"slot {index}: there are {self.array.size}, counted from 0")
        before = self.worker
        before.detach()
        kept = self.array.select(indices)
        self.optimizer.select(kept)
        self.worker = _attach(self.array, self.optimizer, before.strategy, before.comm, "own", **self._settings)
        self._take_rates()
        for old, new, *layouts in zip(
            before.replicas, self.worker.replicas, before.layouts, self.worker.layouts, strict=True
        ):
            new.step = old.step
            carry = partial(_carried, layouts[0], layouts[1], kept)
            new.state = {name: carry(vector) for name, vector in old.state.items()}
            new.inflight = {name: completed([carry(x) for x in work.wait()]) for name, work in old.inflight.items()}
        before.comm.step = self.worker.step
        return kept

    def insert(self, index: int, model: nn.Module, *, seed: int | None = None, **hyperparameters: float) -> None:
        """Put another model into a slot, on all ranks, as rank 0 has it; it begins with a new optimizer's state.

        The strategy's memory of the slot begins anew, and its clock goes on: all models speak at the same steps.

        Args:
            index: the slot.
            model: alike in structure to the one it replaces.
            seed: of the slot's generator on this rank.
            hyperparameters: of the optimizer, for this slot.

        Raises:
            MismatchError: ranks fill different slots, or with models or hyperparameters that differ; nothing was done.
            ConfigError: no such slot, or another structure.
        """
        looks = [(name, list(tensor.shape)) for name, tensor in model.state_dict().items()]
        self._agree("the slot that is filled", [index, sorted(hyperparameters.items())])
        self._agree("the model that is put in", [repr(model), looks])
        self.array.insert(index, model, seed=seed)
        self.optimizer.reset(index, **hyperparameters)
        with torch.no_grad():
            tensors = [*self.array.parameters(), *(buffer for _, buffer in self.array.named_buffers())]
            rows = [_row(tensor, index) for tensor in tensors if owner_of(tensor) in (None, index)]
            for alike in by_kind(rows).values():
                vector = flatten(alike, layout := lay_out([("", row) for row in alike]))
                self.worker.comm.broadcast_(vector, 0).wait()
                copy_each_(alike, views(vector, layout))
            for replica, layout in zip(self.worker.replicas, self.worker.layouts, strict=True):
                _begin_anew(self.worker.strategy, replica, layout, index)

    def save(
        self,
        folder: str | Path,
        *,
        schedules: Schedules | None = None,
        scaler: GradScaler | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int = 3,
    ) -> Path:
        """Write a checkpoint of all ranks to `folder`/step-NNNNNNNN, whole or not at all; every rank must call.

        A model that has diverged is saved as it is: it does not hold up the others.

        Args:
            folder: holds one checkpoint per saved step; ranks need not share a disk.
            schedules: of the optimizer.
            scaler: of the losses.
            extra: more to keep: dicts of tensors and JSON values, each rank its own.
            keep: of so many checkpoints, the newest.

        Raises:
            CheckpointError: the disk refused, or there is something that is neither a tensor nor JSON.
        """
        return saving.save(
            self, Path(folder), schedules=schedules, scaler=scaler, extra=dict(extra or {}), keep=max(keep, 1)
        )

    def load(
        self, folder: str | Path, *, schedules: Schedules | None = None, scaler: GradScaler | None = None
    ) -> dict[str, Any]:
        """Go on from the newest whole checkpoint in `folder`, bit for bit; returns the `extra` kept with it.

        The array may have been fused with another number of models: it is made as large as the one that was saved. With
        another number of workers it goes on where all held the same parameters, as they do after an agreement: what
        all held alike is every new rank's, buffers become the mean over ranks, generators are left as they are here,
        and `extra` is rank 0's. Every rank must then see the parts of all.

        Args:
            folder: as for `save`.
            schedules: of the optimizer, with a factory for what is in each slot now.
            scaler: of the losses.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to other models or another recipe: all ranks
                are told the first difference, and nothing was touched.
        """
        return saving.load(self, Path(folder), schedules=schedules, scaler=scaler)

    def detach(self) -> None:
        """Remove every hook; the array trains alone from here on."""
        self.worker.detach()

    def _agree(self, name: str, value: object) -> None:
        agree(self.worker.comm, [(name, repr(value))], self.worker.replicas[0].x.device)

    def _take_rates(self) -> None:
        """Strategies that ask for the learning rate get each model's own."""
        for replica, layout in zip(self.worker.replicas, self.worker.layouts, strict=True):
            replica._lr = rates_of(self.optimizer, layout, replica.x)  # pyright: ignore[reportPrivateUsage]


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
    r"""Train an array with a strategy, as `thinwire.attach` does a model: every message carries all B models.

    Per step as many messages are sent as for one model, each B times as long. Each model's numbers are those of a
    data-parallel run of its own: strategies are those that treat all elements alike. Slots that are not
    `optimizer.active` are carried along; `select` drops them from the messages.

    Args:
        array: on its device already, of the same models on all ranks; its generators may differ between ranks.
        optimizer: of the array.
        strategy: `AllReduce`, `LocalSGD`, `SlowMo`, `Gossip` or `PushSum`, without a codec or with a cast.
        group: the ranks that train together; default all.
        comm: the ranks as a Comm, instead of `group`.
        init: "broadcast" starts every rank from rank 0's models; "own" keeps each rank's.
        seed: the key of the strategy's random draws; equal on all ranks.
        scaler: the loop's; where gradients differ between workers, which models skip a step is decided by all ranks.
        bucket_bytes: how much gradient of one model travels in one message.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the strategy would mix models, or cannot serve them.
        MismatchError: ranks were started with different arrays, recipes or seeds.
    """
    _refuse_mixing(strategy)
    wire = comm or comm_for(group, timeout=timeout)
    settings = {"seed": seed, "bucket_bytes": bucket_bytes}
    worker = _attach(array, optimizer, strategy, wire, init, **settings)
    if scaler is not None and scaler.enabled and wire.size > 1 and not strategy.sends_gradients:
        _share_skips(scaler, wire, worker.replicas[0].x.device)
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
    # The same buckets as one model's, each as many times as long as there are models.
    return attach(
        Stacked(array), optimizer, strategy, comm=comm, init=init, seed=seed, bucket_bytes=bucket_bytes * array.size
    )


def _refuse_mixing(strategy: Strategy) -> None:
    if not isinstance(strategy, _APART):
        known = ", ".join(kind.__name__ for kind in _APART)
        raise ConfigError(f"{strategy}: may mix the models of an array, or judge them together; there are {known}")
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        if isinstance(value, Strategy):
            _refuse_mixing(value)
        if field.name == "codec" and value is not None and not isinstance(value, _CASTS):
            raise ConfigError(
                f"codec={value}: looks at many elements at once, and so mixes models; use Bf16() or Fp16()"
            )
    if isinstance(strategy, SlowMo) and (strategy.shard or strategy.outer or strategy.buffers != "maintain"):
        raise ConfigError(
            f"{strategy}: of an array's slow state every rank keeps all, by momentum; use SlowMo(base, period, "
            "momentum, lr) with nothing else"
        )


def rates_of(optimizer: FusedOptimizer, layout: Layout, x: Tensor) -> Callable[[], float | Tensor]:
    """Reads the learning rates: a number where all models have the same, else a vector like `x`."""
    parameters, segments = layout
    group_of = {id(p): place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    sizes = [segment.size // segment.shape[0] for segment in segments for _ in range(segment.shape[0])]
    repeats = torch.tensor(sizes, device=x.device)

    def read() -> float | Tensor:
        rates = torch.cat([_rates(optimizer, group_of[id(p)], p) for p in parameters])
        if bool((rates == rates[0]).all()):
            return float(rates[0])
        return rates.to(x.device, x.dtype).repeat_interleave(repeats)

    return read


def _rates(optimizer: FusedOptimizer, group: int, parameter: nn.Parameter) -> Tensor:
    owner, every = owner_of(parameter), optimizer.param_groups[group]["lr"]
    return every if owner is None else every[owner : owner + 1]


def _share_skips(scaler: GradScaler, comm: Comm, device: torch.device) -> None:
    """A model that overflows on one rank skips its step on all, at one number per model and step."""
    alone = scaler.unscale_

    def together(optimizer: FusedOptimizer) -> Tensor:
        found = alone(optimizer)
        found.copy_(comm.all_reduce_(found.to(device, torch.float32)).wait().cpu() > 0)
        return found

    scaler.unscale_ = together


# -- what a strategy keeps, model by model -----------------------------------------------------------------------------


def _row(tensor: Tensor, index: int) -> Tensor:
    """One model's part of a tensor [B, ...], or of one that it has alone: a view."""
    return tensor[index if owner_of(tensor) is None else 0]


def _carried(old: Layout, new: Layout, kept: Selection, before: Tensor) -> Tensor:
    """What was kept of all models, as it is of those that are left; what is no vector like `x` is common to all."""
    if before.numel() != old[1][-1].stop:
        return before.clone()
    found = before.new_empty(new[1][-1].stop)
    places = {id(parameter): segment for parameter, segment in zip(*new, strict=True)}
    for parameter, segment in zip(*old, strict=True):
        rows = segment.of(before)
        for after in kept.moved[parameter]:
            places[id(after)].of(found).copy_(kept.rows(rows) if owner_of(parameter) is None else rows)
    return found


def _begin_anew(strategy: Strategy, replica: Replica, layout: Layout, index: int) -> None:
    """Let a strategy forget one model: its part of every vector is as at the start, and in flight it is as in `x`."""
    held, length = replica.state, replica.x.numel()
    replica.state = {}
    strategy.start(replica)
    fresh, replica.state = replica.state, held
    for name, kept in held.items():
        if name in _RATES and kept.numel() == 1:
            held[name] = kept.expand(length).clone()
        if held[name].numel() == length:
            _overwrite(held[name], fresh[name].expand(length).contiguous(), layout, index)
    for work in replica.inflight.values():
        for vector in work.wait():
            if vector.numel() == length:
                _overwrite(vector, replica.x, layout, index)


def _overwrite(vector: Tensor, by: Tensor, layout: Layout, index: int) -> None:
    for parameter, segment in zip(*layout, strict=True):
        if owner_of(parameter) in (None, index):
            row = index if owner_of(parameter) is None else 0
            segment.of(vector)[row].copy_(segment.of(by)[row])
