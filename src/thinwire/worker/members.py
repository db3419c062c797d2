# SPDX-License-Identifier: Apache-2.0
"""Arrays of models under `attach`: the strategy runs for each model by itself, as if that model were attached alone.

An array's parameters are stacked, [models, ...]. Each model has a replica of its own, whose vectors are copies of its
rows. They are read before a hook runs, and written back after it. So scales of codecs, norms, learning rates, state
and messages belong to one model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.replica.flat import Segment, copy_each_, lay_out
from thinwire.core.replica.replica import PrefixView, Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import At, Strategy, Traits, codecs_of, nested, resized_parts
from thinwire.worker.parameters import spread_rates


@runtime_checkable
class Array(Protocol):
    """An array of models whose parameters are stacked: a `thinwire.FusedArray`."""

    attached: nn.Module | None

    @property
    def size(self) -> int:
        """The number of models."""
        ...

    @property
    def generators(self) -> Sequence[torch.Generator] | None:
        """One random generator per model, if seeds were given."""
        ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return every model's output."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stacked parameters."""
        ...

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters that all models share."""
        ...

    def own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every model's buffers as views."""
        ...


class StackedModule(nn.Module):
    """An array as a module, with its stacked parameters and every model's buffers.

    Args:
        array: the array; `attach` makes its calls pass through this module, so that the module's hooks run.
    """

    def __init__(self, array: Array) -> None:
        super().__init__()
        self.array = array

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the array."""
        return self.array.forward(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stacked parameters."""
        yield from self.array.named_parameters()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every model's buffers: one that is equal on all ranks must not be averaged because another is not."""
        yield from self.array.own_buffers()

    def problem(self, optimizer: Any, strategy: Strategy) -> str:
        """Return why the next step would not be each model's own; empty if it would."""
        if not bool(optimizer.active.all()):
            return (
                f"optimizer.active={optimizer.active.tolist()}: the strategy would move models whose steps are left "
                "out. Call worker.detach(), select the other models, and attach again"
            )
        traits = strategy.traits
        coded = any(True for each in nested(strategy) for _ in codecs_of(each))
        alike = traits.sends_gradients and not (traits.reads_gradient or traits.moves_parameters)
        if optimizer.skipped is not None and not (alike and not coded):
            return (
                f"a GradScaler of an array under {strategy}: workers would skip different steps of a model. Train in "
                "bfloat16, which needs no scaler, or use AllReduce()"
            )
        return ""


def array_of(model: object) -> Array | None:
    """Return what `attach` was given as the model, if it is an array."""
    return model if isinstance(model, Array) and not isinstance(model, nn.Module) else None


def check_array(array: Array, optimizer: Optimizer, named: Mapping[str, Tensor], refused: Mapping[str, bool]) -> None:
    """Refuse what would train the models of an array differently than alone.

    Args:
        array: the array.
        optimizer: which must be an array's.
        named: the trained parameters, by name.
        refused: settings of `attach` that act on all models together, with whether they were given.

    Raises:
        ConfigError: with the reason and the fix.
    """
    if getattr(optimizer, "models", None) != array.size:
        raise ConfigError(
            f"{type(optimizer).__name__} of an array: it has one learning rate for all {array.size} models. Use an "
            "optimizer of thinwire.arrays.fusion, such as fusion.AdamW(array.parameters())"
        )
    if array.attached is not None:
        raise ConfigError(
            "the array is attached already. Call detach() of its worker first. For several learning rates of one "
            "model, give one optimizer several parameter groups"
        )
    if next(array.shared_parameters(), None) is not None:
        raise ConfigError(
            "all models of the array share trained parameters, so none of them could be trained alone. Fuse the models "
            "without share_trained"
        )
    for name, parameter in named.items():
        if parameter.shape[:1] != (array.size,):
            raise ConfigError(
                f"{name} belongs to one model of the array, whose layers differ. Workers exchange vectors of one "
                "length for all models. Fuse models of equal layers, or attach each model alone"
            )
    for name, given in refused.items():
        if given:
            raise ConfigError(
                f"attach(array, ..., {name}): it would act on all models of the array together. Leave it out, or "
                "attach each model alone"
            )


@dataclass(frozen=True)
class Members(Strategy):
    """A strategy that runs for each model of an array by itself.

    Attributes:
        base: the strategy of each model.
        models: the number of models.
    """

    base: Strategy
    models: int

    def __str__(self) -> str:
        return f"{self.base} for each of {self.models} models"

    @cached_property
    def traits(self) -> Traits:
        """The base's."""
        return self.base.traits

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check; each model's results must be determined, and the optimizer's state be left alone."""
        for each in nested(self.base):
            if each.traits.timing_dependent or each.traits.skips_steps:
                raise ConfigError(
                    f"{each} for an array: its results depend on timing, so a model would not train as alone. Use "
                    "AllReduce(), LocalSGD(), SlowMo() or DiLoCo(), or attach each model alone"
                )
        if self.base.traits.rounds.optimizer_state != "maintain":
            raise ConfigError(
                f"{self.base} for an array: it resets or averages the optimizer's state, which is stacked for all "
                "models. Use buffers='maintain' or moments=(), or attach each model alone"
            )
        own: Any = optimizer
        for model in range(self.models):
            self.base.check(size, None if own is None else own.alone(model))

    def start(self, r: Replica) -> None:
        """Start the base for each model."""
        self._each(r, self.base.start)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Send the part of each model's gradient."""
        parts = self._parts(r)
        rows = _matrix([each.g for each in parts])
        _copy(r, r.g, rows, where=part)
        own = slice(part.start // self.models, part.stop // self.models)
        works = [self.base.on_gradient(each, own) for each in parts]
        if not any(works):
            return None

        def finish() -> Tensor:
            for work in works:
                if work is not None:
                    work.wait()
            _copy(r, r.g, rows, where=part, back=True)
            return r.g[part]

        return Work(finish)

    def before_step(self, r: Replica) -> None:
        """Run the base's hook for each model."""
        if type(self.base).before_step is not Strategy.before_step:
            self._each(r, self.base.before_step)

    def after_step(self, r: Replica) -> None:
        """Run the base's hook for each model."""
        if type(self.base).after_step is not Strategy.after_step:
            self._each(r, self.base.after_step)

    def restart(self, r: Replica) -> None:
        """Restart the base for each model."""
        self._each(r, self.base.restart)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the base's averages of all models."""
        parts, found = self._parts(r), torch.empty_like(r.x)
        _copy(r, r.x, _matrix([part.x for part in parts]))
        _copy(r, found, torch.stack([self.base.average(part, at) for part in parts]), back=True)
        return found

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute each model's state with the base's hook."""
        return resized_parts(self.base, map(_prefix, range(self.models)), states, size)

    def _each(self, r: Replica, hook: Callable[[Replica], object]) -> None:
        parts, names = self._parts(r), ("x", "g") if self.traits.reads_gradient else ("x",)
        vectors = [(getattr(r, name), _matrix([getattr(part, name) for part in parts])) for name in names]
        for whole, rows in vectors:
            _copy(r, whole, rows)
        for part in parts:
            hook(part)
        for whole, rows in vectors:
            _copy(r, whole, rows, back=True)

    def _parts(self, r: Replica) -> list[Replica]:
        """Return the replica of each model, at the step of `r`."""
        if not r.parts:
            x, g = (whole.new_empty(self.models, whole.numel() // self.models) for whole in (r.x, r.g))
            segments = lay_out(
                [(each.name, torch.empty(each.shape[1:], dtype=r.x.dtype, device="meta")) for each in r.segments]
            )
            for model in range(self.models):
                name, lr = _prefix(model), partial(_rate, r, segments, model)
                part = Replica(x[model], g[model], r.comm, lr=lr, seed=r.seed, segments=segments)
                part.state, part.inflight = PrefixView(r.state, name), PrefixView(r.inflight, name)
                part.progress.metrics = PrefixView(r.metrics, name)
                r.parts[name] = part
        for part in r.parts.values():
            # In place: the part's own parts hold this object.
            vars(part.progress).update({**vars(r.progress), "metrics": part.metrics})
        return list(r.parts.values())


def _prefix(model: int) -> str:
    return f"model-{model}/"


def _rate(r: Replica, segments: tuple[Segment, ...], model: int) -> float | Tensor:
    """Return one model's learning rate: a number, or a vector if its parameter groups differ."""
    rates = r.lr  # [parameters, models], or a number where no optimizer is known
    return spread_rates(rates[:, model].tolist(), segments, r.x) if isinstance(rates, Tensor) else rates


def _matrix(rows: Sequence[Tensor]) -> Tensor:
    """Return the matrix of which these are the rows."""
    return rows[0].as_strided((len(rows), rows[0].numel()), (rows[0].numel(), 1))


def _copy(r: Replica, whole: Tensor, rows: Tensor, *, where: slice | None = None, back: bool = False) -> None:
    """Copy the stacked tensors of a vector into the models' rows, or back.

    Args:
        r: with the segments of the vector.
        whole: the vector.
        rows: a matrix with a row per model.
        where: the tensors that are copied; all of them by default.
        back: whether to copy the rows into the vector.
    """
    models, start, stop = len(rows), 0, whole.numel()
    if where is not None:
        start, stop = where.start, where.stop
    segments = [each for each in r.segments if start <= each.start < stop]
    stacked = [each.of(whole) for each in segments]
    own = [rows[:, each.start // models : each.stop // models].view(each.shape) for each in segments]
    if back:
        copy_each_(stacked, own)
    else:
        copy_each_(own, stacked)
