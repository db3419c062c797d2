# SPDX-License-Identifier: Apache-2.0
"""The tensors of an array: stacked with the models along the first axis, extracted, inserted and selected."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.structure import check_same_structure, difference, dropout_rates, tensors, within
from thinwire.core.torch_internals import tensor_dicts
from thinwire.errors import ConfigError

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Selection:
    """What `FusedArray.select` did, for `select` of the optimizer, the schedules and the scaler.

    Args:
        indices: for each new slot, the old slot of its model; a model may be there more than once.
        size: the number of slots before.
        moved: for every old parameter, what it has become: nothing if only dropped models had it.
        order: for every new parameter, its place among the array's.
    """

    indices: tuple[int, ...]
    size: int
    moved: Mapping[nn.Parameter, tuple[nn.Parameter, ...]]
    order: Mapping[nn.Parameter, int]

    def in_order(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return new parameters with those of single slots in the array's order, as in an optimizer made now."""
        owned = iter(sorted((p for p in parameters if owner_of(p) is not None), key=lambda p: self.order.get(p, 0)))
        return [p if owner_of(p) is None else next(owned) for p in parameters]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor [slots before, ...] as [slots now, ...]; bitwise."""
        return tensor.index_select(0, torch.tensor(self.indices, dtype=torch.int64, device=tensor.device))


class Store:
    """Stacked tensors [B, ...] of the layers that are alike, and [1, ...] of layers that differ in structure.

    Args:
        models: of one structure, except for the layers of `separate`.
        separate: paths of layers that differ in structure; each model keeps its own.
        seeds: of each model's generator.
        states: of each model's generator, to replace those after the seeds.

    Raises:
        ConfigError: models differ elsewhere.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        separate: Sequence[str],
        seeds: Sequence[int] | None,
        states: Sequence[Tensor] | None,
    ) -> None:
        check_same_structure(models, separate)
        _check_ties(models, separate)
        self.template = copy.deepcopy(models[0])
        self.separate = {path: [copy.deepcopy(model.get_submodule(path)) for model in models] for path in separate}
        first, *others = [tensors(model, separate) for model in models]
        self.tensors: Named = {
            name: _like(torch.stack([tensor.detach(), *(own[name].detach() for own in others)]), tensor)
            for name, tensor in first.items()
        }
        # For each model, the tensors of its separate layers.
        self.separate_tensors: list[Named] = [
            {
                f"{path}.{name}": _like(tensor.detach()[None].clone(), tensor, model)
                for path, bodies in self.separate.items()
                for name, tensor in tensors(bodies[model]).items()
            }
            for model in range(len(models))
        ]
        self.rates = {(path, name): values for path, name, values in dropout_rates(models)}
        held = (tensor.device for own in (self.tensors, *self.separate_tensors) for tensor in own.values())
        device = next(held, torch.device("cpu"))
        self.generators = None if seeds is None else _generators(seeds, states, device)

    @property
    def size(self) -> int:
        """The number of models."""
        return len(self.separate_tensors)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order of a model's own; those that only one model has are named `name[model]`."""
        seen: set[str] = set()
        for path, module in self.template.named_modules(remove_duplicate=False):
            if path in self.separate:
                for model, own in enumerate(self.separate_tensors):
                    yield from ((f"{name}[{model}]", t) for name, t in own.items() if name.startswith(f"{path}."))
            prefix = f"{path}." if path else ""
            for name in (f"{prefix}{key}" for holder in tensor_dicts(module) for key in holder):
                if name in self.tensors and name not in seen:
                    seen.add(name)
                    yield name, self.tensors[name]

    def row(self, name: str, index: int) -> Tensor:
        """Return a view of one model's tensor."""
        return self.tensors[name][index] if name in self.tensors else self.separate_tensors[index][name][0]

    def tensors_of(self, model: int, separate: bool = False) -> Named:
        """Return views of one model's stacked tensors, or of those of its separate layers."""
        if separate:
            return {name: tensor[0] for name, tensor in self.separate_tensors[model].items()}
        return {name: tensor[model] for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def write_buffers(self, model: int, replaced: Mapping[str, Tensor]) -> None:
        """Write the buffers that one model's forward has replaced."""
        for name, value in replaced.items():
            self.row(name, model).copy_(value)

    @torch.no_grad()
    def write_all_buffers(self, replaced: Mapping[str, Tensor]) -> None:
        """Write the buffers [B, ...] that the forward has replaced."""
        for name, value in replaced.items():
            self.tensors[name].copy_(value)

    def set_rates(self, path: str, name: str, values: list[float]) -> None:
        """Change each model's dropout rate in one layer, which may be inside a separate layer."""
        self.rates[path, name] = values
        for root, bodies in self.separate.items():
            if within(path, [root]):
                for body, value in zip(bodies, values, strict=True):
                    setattr(body.get_submodule(path[len(root) :].lstrip(".")), name, value)

    def to(self, device: torch.device) -> None:
        """Move every tensor; generators cannot move to another type of device, and restart there from their seeds."""
        for holder in (self.tensors, *self.separate_tensors):
            for name, tensor in holder.items():
                if isinstance(tensor, nn.Parameter):
                    gradient = tensor.grad
                    tensor.data = tensor.data.to(device)
                    tensor.grad = None if gradient is None else gradient.to(device)
                else:
                    holder[name] = tensor.to(device)
        if self.generators is None:
            return
        before, seeds = self.generators, [own.initial_seed() for own in self.generators]
        if before[0].device.type != device.type:
            self.generators = _generators(seeds, None, device)
        elif device.index not in (None, before[0].device.index):
            # From one GPU to another the states are the same.
            self.generators = _generators(seeds, None, device)
            for own, old in zip(self.generators, before, strict=True):
                own.set_state(old.get_state())

    @torch.no_grad()
    def extract(self, index: int) -> nn.Module:
        """Return one model as a plain module."""
        self.check_index(index)
        found = copy.deepcopy(self.template)
        for path, bodies in self.separate.items():
            parent, _, name = path.rpartition(".")
            setattr(found.get_submodule(parent), name, copy.deepcopy(bodies[index]))
        for (path, name), values in self.rates.items():
            setattr(found.get_submodule(path), name, values[index])
        # The array may have moved to another device since the template was copied.
        found = found.to(self.row(next(iter(tensors(found))), index).device) if tensors(found) else found
        for name, tensor in tensors(found).items():
            tensor.copy_(self.row(name, index))
        return found

    @torch.no_grad()
    def insert(self, index: int, model: nn.Module, seed: int | None) -> None:
        """Put another model into a slot."""
        self.check_index(index)
        # Training or evaluation mode is the array's in every layer, and not a difference of structure.
        own, given = self.extract(index), copy.deepcopy(model)
        modes = {path: module.training for path, module in own.named_modules()}
        for path, module in given.named_modules():
            module.training = modes.get(path, module.training)
        wrong = difference(own, given)
        if wrong is not None:
            raise ConfigError(
                f"slot {index} cannot hold this model: {wrong}; it must have the structure of the one before"
            )
        for name, tensor in tensors(model).items():
            self.row(name, index).copy_(tensor)
        for path, name, values in dropout_rates([model]):
            self.rates[path, name][index] = values[0]
            self.set_rates(path, name, self.rates[path, name])
        if seed is not None and self.generators is not None:
            self.generators[index].manual_seed(seed)

    @torch.no_grad()
    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models, in this order, each as often as it is named."""
        if not indices:
            raise ConfigError("select([]): an array has at least one model; drop the array itself instead")
        for index in indices:
            self.check_index(index)
        moved: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
        order: dict[nn.Parameter, int] = {}
        kept = Selection(tuple(indices), self.size, moved, order)

        def record(before: Tensor, after: Sequence[Tensor]) -> None:
            if isinstance(before, nn.Parameter):
                moved[before] = tuple(tensor for tensor in after if isinstance(tensor, nn.Parameter))

        for name, tensor in self.tensors.items():
            self.tensors[name] = _like(kept.rows(tensor.detach()), tensor)
            record(tensor, [self.tensors[name]])
        before = self.separate_tensors
        self.separate_tensors = [
            {name: _like(tensor.detach().clone(), tensor, slot) for name, tensor in before[index].items()}
            for slot, index in enumerate(kept.indices)
        ]
        for index, own in enumerate(before):
            slots = [slot for slot, source in enumerate(kept.indices) if source == index]
            for name, tensor in own.items():
                record(tensor, [self.separate_tensors[slot][name] for slot in slots])
        for path, bodies in self.separate.items():
            self.separate[path] = [copy.deepcopy(bodies[index]) for index in kept.indices]
        self.rates = {key: [values[index] for index in indices] for key, values in self.rates.items()}
        if self.generators is not None:
            # A copied model must not share its generator with the original.
            self.generators = [self.generators[index].clone_state() for index in indices]
        parameters = (tensor for _, tensor in self.named() if isinstance(tensor, nn.Parameter))
        order.update((parameter, place) for place, parameter in enumerate(parameters))
        return kept

    def state(self) -> Named:
        """Return every tensor by its name, and the states of the generators."""
        found = {name: tensor.detach() for name, tensor in self.named()}
        for model, generator in enumerate(self.generators or ()):
            found[f"generator[{model}]"] = generator.get_state()
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        own = self.state()
        if own.keys() != state.keys():
            wrong = sorted(own.keys() ^ state.keys())
            raise ConfigError(f"{wrong[0]!r} is in the array or in the state, and not in both; fuse the same models")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ConfigError(
                    f"{name} is {list(state[name].shape)} in the state, {list(tensor.shape)} here; fuse as many models"
                )
        for name, tensor in self.named():
            tensor.copy_(state[name])
        for model, generator in enumerate(self.generators or ()):
            generator.set_state(state[f"generator[{model}]"].cpu())

    def check_index(self, index: int) -> None:
        """Refuse a slot that does not exist."""
        if not 0 <= index < self.size:
            raise ConfigError(f"slot {index}: there are {self.size}, counted from 0")


def _like(values: Tensor, like: Tensor, owner: int | None = None) -> Tensor:
    """Make a parameter of values if `like` is one, and note its slot if it belongs to one model alone."""
    if not isinstance(like, nn.Parameter):
        return values
    made = nn.Parameter(values, like.requires_grad)
    if owner is not None:
        made.owner = owner  # pyright: ignore[reportAttributeAccessIssue]
    return made


def owner_of(parameter: Tensor) -> int | None:
    """Return the slot that a parameter [1, ...] belongs to; None if all slots have a row."""
    found: int | None = getattr(parameter, "owner", None)
    return found


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor [models, ...] as a matrix with a row per model, also where one model's part is a number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def _generators(seeds: Sequence[int], states: Sequence[Tensor] | None, device: torch.device) -> list[torch.Generator]:
    made = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    # States were taken on the CPU, where the models were made.
    if states is not None and device.type == "cpu":
        for generator, state in zip(made, states, strict=True):
            generator.set_state(state)
    return made


def _check_ties(models: Sequence[nn.Module], separate: Sequence[str]) -> None:
    """Refuse a weight that is shared between a separate layer and another one: one is stacked, the other is not."""
    for index, model in enumerate(models):
        common = {id(tensor): name for name, tensor in tensors(model, separate).items()}
        for path in separate:
            for name, tensor in tensors(model.get_submodule(path)).items():
                if id(tensor) in common:
                    raise ConfigError(
                        f"model {index} ties {path}.{name} to {common[id(tensor)]}, and {path!r} differs between "
                        "models: loop over both layers"
                    )


def outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not within another of them."""
    every = list(dict.fromkeys(paths))
    return [path for path in every if not within(path, [other for other in every if other != path])]
