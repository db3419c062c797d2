# SPDX-License-Identifier: Apache-2.0
"""The tensors of an array: stacked with the models along the first axis, extracted, inserted and selected."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.structure import check_same_structure, difference, dropout_rates, tensors, within
from thinwire.core.torch_internals import BATCH_NORMS, tensor_dicts
from thinwire.errors import ConfigError

Named = dict[str, Tensor]
Part = TypeVar("Part", bound=nn.Module)
# The `owner` of a parameter that all models share: it has no axis of models.
_ALL = -1


@dataclass(frozen=True)
class Selection:
    """The result of `FusedArray.select`, for `select` of the optimizer, the schedules and the scaler.

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
        owned = iter(sorted((p for p in parameters if _is_of_one(p)), key=lambda p: self.order.get(p, 0)))
        return [next(owned) if _is_of_one(p) else p for p in parameters]

    def rows(self, tensor: Tensor, parameter: nn.Parameter | None = None) -> Tensor:
        """Return a tensor [slots before, ...] as [slots now, ...]; bitwise.

        Args:
            tensor: with one row per slot.
            parameter: the old parameter whose state it is, if it is one.
        """
        return tensor.index_select(0, torch.tensor(self.indices, dtype=torch.int64, device=tensor.device))


class _Placeholder(nn.Parameter):
    """What a module of an array holds in place of a parameter between calls; no operation takes it."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> NoReturn:
        """Refuse the operation."""
        raise ConfigError(
            "the models' code reaches a parameter in another way than by its module, such as an attribute, a closure "
            "or the second pass of a checkpoint: it would compute with the first model's. Use the module's parameter"
        )


class Store:
    """Tensors of all models: stacked [B, ...], [1, ...] of layers that differ in structure, and shared ones [...].

    Args:
        models: of one structure, except for the layers of `separate`.
        separate: paths of layers that differ in structure; each model keeps its own.
        loops: paths of layers that run model after model.
        seeds: of each model's generator.
        states: of each model's generator, to replace those after the seeds.
        share_trained: keep a trainable parameter that is the same object in all models shared.

    Raises:
        ConfigError: models differ elsewhere.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        separate: Sequence[str],
        loops: Sequence[str],
        seeds: Sequence[int] | None,
        states: Sequence[Tensor] | None,
        *,
        share_trained: bool = False,
    ) -> None:
        check_same_structure(models, separate)
        _check_ties(models, separate)
        first, *others = [tensors(model, separate) for model in models]
        common = _common(models, first, others, loops, share_trained=share_trained)
        self.shared: Named = {name: _shared(tensor) for name, tensor in common.items()}
        # The copy holds the array's own object in place of a shared tensor.
        self.template = copy.deepcopy(models[0], {id(tensor): self.shared[name] for name, tensor in common.items()})
        self.separate = {path: [copy.deepcopy(model.get_submodule(path)) for model in models] for path in separate}
        self.tensors: Named = {
            name: _like(torch.stack([tensor.detach(), *(own[name].detach() for own in others)]), tensor)
            for name, tensor in first.items()
            if name not in common
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
        held = (tensor.device for own in (self.tensors, self.shared, *self.separate_tensors) for tensor in own.values())
        device = next(held, torch.device("cpu"))
        self.generators = None if seeds is None else new_generators(seeds, states or [None] * len(seeds), device)

    @property
    def size(self) -> int:
        """The number of models."""
        return len(self.separate_tensors)

    def copy_of(self, module: Part) -> Part:
        """Copy a module, but not the tensors that all models share."""
        return copy.deepcopy(module, {id(tensor): tensor for tensor in self.shared.values()})

    def skeleton(self) -> nn.Module:
        """Return the template with placeholders for its tensors, as every call puts the array's in their place.

        Code that reaches a parameter in another way than by its module, such as the second pass of a checkpoint, is
        refused instead of computing with the first model's values.
        """
        memo: dict[int, Tensor] = {
            id(tensor): _Placeholder(torch.empty(0, dtype=tensor.dtype, device="cpu"), requires_grad=False)
            for tensor in tensors(self.template).values()
            if isinstance(tensor, nn.Parameter)
        }
        return copy.deepcopy(self.template, memo | {id(tensor): tensor for tensor in self.shared.values()})

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in the order of a model's own; those that only one model has are named `name[model]`."""
        seen: set[str] = set()
        for path, module in self.template.named_modules(remove_duplicate=False):
            if path in self.separate:
                for model, own in enumerate(self.separate_tensors):
                    yield from ((f"{name}[{model}]", t) for name, t in own.items() if name.startswith(f"{path}."))
            prefix = f"{path}." if path else ""
            for name in (f"{prefix}{key}" for holder in tensor_dicts(module) for key in holder):
                found = self.tensors.get(name, self.shared.get(name))
                if found is not None and name not in seen:
                    seen.add(name)
                    yield name, found

    def row(self, name: str, index: int) -> Tensor:
        """Return a view of one model's tensor."""
        if name in self.shared:
            return self.shared[name]
        return self.tensors[name][index] if name in self.tensors else self.separate_tensors[index][name][0]

    def tensors_of(self, model: int, separate: bool = False) -> Named:
        """Return views of one model's tensors, or of those of its separate layers."""
        if separate:
            return {name: tensor[0] for name, tensor in self.separate_tensors[model].items()}
        return {**self.shared, **{name: tensor[model] for name, tensor in self.tensors.items()}}

    @torch.no_grad()
    def write_buffers(self, model: int, replaced: Mapping[str, Tensor]) -> None:
        """Write the buffers that one model's forward has replaced."""
        for name, value in replaced.items():
            self.row(name, model).copy_(value)

    @torch.no_grad()
    def write_all_buffers(self, replaced: Mapping[str, Tensor]) -> None:
        """Write the buffers [B, ...] that the forward has replaced; shared ones become each model's own."""
        for name, value in replaced.items():
            if self.shared.pop(name, None) is None:
                self.tensors[name].copy_(value)
            else:
                self.tensors[name] = value.clone()

    def set_rates(self, path: str, name: str, values: list[float]) -> None:
        """Change each model's dropout rate in one layer, which may be inside a separate layer."""
        self.rates[path, name] = values
        for root, bodies in self.separate.items():
            if within(path, [root]):
                for body, value in zip(bodies, values, strict=True):
                    setattr(body.get_submodule(path[len(root) :].lstrip(".")), name, value)

    def to(self, device: torch.device) -> None:
        """Move every tensor; generators cannot move to another type of device, and restart there from their seeds."""
        for holder in (self.tensors, self.shared, *self.separate_tensors):
            for name, tensor in holder.items():
                if isinstance(tensor, nn.Parameter):
                    move_(tensor, device)
                else:
                    holder[name] = _shared(tensor.to(device)) if is_shared(tensor) else tensor.to(device)
        self.generators = moved(self.generators, device)

    @torch.no_grad()
    def extract(self, index: int) -> nn.Module:
        """Return one model as a plain module."""
        check_slot(index, self.size)
        found = self.copy_of(self.template)
        for path, bodies in self.separate.items():
            parent, _, name = path.rpartition(".")
            setattr(found.get_submodule(parent), name, copy.deepcopy(bodies[index]))
        for (path, name), values in self.rates.items():
            setattr(found.get_submodule(path), name, values[index])
        # The array may have moved to another device since the template was copied.
        found = found.to(self.row(next(iter(tensors(found))), index).device) if tensors(found) else found
        for name, tensor in tensors(found).items():
            if tensor is not self.shared.get(name):
                tensor.copy_(self.row(name, index))
        return found

    @torch.no_grad()
    def insert(self, index: int, model: nn.Module, seed: int | None) -> None:
        """Put another model into a slot."""
        check_slot(index, self.size)
        # Training or evaluation mode is the array's in every layer, and not a difference of structure.
        own, given = self.extract(index), copy.deepcopy(model, {id(each): each for each in tensors(model).values()})
        modes = {path: module.training for path, module in own.named_modules()}
        for path, module in given.named_modules():
            module.training = modes.get(path, module.training)
        wrong = difference(own, given)
        if wrong is not None:
            raise ConfigError(
                f"slot {index} cannot hold this model: {wrong}. It must have the structure of the one before"
            )
        given_tensors = tensors(model)
        for name, shared in self.shared.items():
            if not torch.equal(shared, given_tensors[name].to(shared.device)):
                raise ConfigError(
                    f"slot {index} cannot hold this model: its {name} differs from the one tensor that all models of "
                    "this array share. Pass a model with the same values, or fuse copies: copy.deepcopy(model)"
                )
        for name, tensor in given_tensors.items():
            if name not in self.shared:
                self.row(name, index).copy_(tensor)
        for path, name, values in dropout_rates([model]):
            self.rates[path, name][index] = values[0]
            self.set_rates(path, name, self.rates[path, name])
        if seed is not None and self.generators is not None:
            self.generators[index].manual_seed(seed)

    @torch.no_grad()
    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models, in this order, each as often as it is named."""
        check_slots(indices, self.size)
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
        mark_replaced(moved)
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
            raise ConfigError(f"{wrong[0]!r} is in the array or in the state, and not in both. Fuse the same models")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ConfigError(
                    f"{name} is {list(state[name].shape)} in the state, {list(tensor.shape)} here. Fuse as many models"
                )
        for name, tensor in self.named():
            overwrite_(tensor, state[name])
        for model, generator in enumerate(self.generators or ()):
            generator.set_state(state[f"generator[{model}]"].cpu())


def _like(values: Tensor, like: Tensor, owner: int | None = None) -> Tensor:
    """Make a parameter of values if `like` is one, and note its slot if it belongs to one model alone."""
    if not isinstance(like, nn.Parameter):
        return values
    made = nn.Parameter(values, like.requires_grad)
    if owner is not None:
        made.owner = owner  # pyright: ignore[reportAttributeAccessIssue]
    return made


def mark_replaced(parameters: Iterable[nn.Parameter]) -> None:
    """Let optimizers refuse to step parameters that an array no longer has."""
    for parameter in parameters:
        parameter.replaced = True  # pyright: ignore[reportAttributeAccessIssue]


def check_slot(index: int, size: int) -> None:
    """Refuse a slot that an array of this size does not have.

    Raises:
        ConfigError: with the slot and the size.
    """
    if not 0 <= index < size:
        raise ConfigError(f"slot {index}: there are {size}, counted from 0")


def check_slots(indices: Sequence[int], size: int) -> None:
    """Refuse a selection of slots that is empty, or has one that an array of this size does not have.

    Raises:
        ConfigError: with the slot and the size.
    """
    if not indices:
        raise ConfigError("select([]): an array has at least one model. Drop the array itself instead")
    for index in indices:
        check_slot(index, size)


def owner_of(parameter: Tensor) -> int | None:
    """Return the slot that a parameter [1, ...] belongs to; None if all slots have a row, -1 if they share it."""
    found: int | None = getattr(parameter, "owner", None)
    return found


def is_shared(tensor: Tensor) -> bool:
    """Return True if all models share this tensor of an array."""
    return owner_of(tensor) == _ALL


@torch.no_grad()
def overwrite_(tensor: Tensor, values: Tensor) -> None:
    """Set the values of an array's tensor; the models that `fuse` was given keep theirs."""
    if not is_shared(tensor) or tensor.requires_grad:
        tensor.copy_(values)
    elif not torch.equal(tensor, values.to(tensor.device)):
        tensor.data = values.to(tensor.device, copy=True)


def is_of(parameter: Tensor, index: int) -> bool:
    """Return True if a slot's model has this parameter of the array."""
    return owner_of(parameter) in (None, index, _ALL)


def _is_of_one(parameter: Tensor) -> bool:
    return owner_of(parameter) not in (None, _ALL)


def _common(
    models: Sequence[nn.Module],
    first: Named,
    others: Sequence[Named],
    loops: Sequence[str],
    *,
    share_trained: bool,
) -> Named:
    """Return the tensors that all models share: the same objects, which no model's forward changes."""
    found: Named = {}
    if len(models) == 1:
        return found
    # Code that writes to a buffer would write all models' values into one. A copy for each model is safe: where models
    # are the same object, for batch norm, and for layers that run model after model.
    alike = all(model is models[0] for model in models)
    written = {
        f"{path}.{name}".lstrip(".")
        for path, module in models[0].named_modules()
        for name in tensor_dicts(module)[1]
        if alike or isinstance(module, BATCH_NORMS) or within(path, loops)
    }
    for name, tensor in first.items():
        if any(own[name] is not tensor for own in others):
            continue
        if isinstance(tensor, nn.Parameter):
            if not tensor.requires_grad or share_trained:
                found[name] = tensor
        elif name not in written:
            found[name] = tensor
    return found


def _shared(tensor: Tensor) -> Tensor:
    """Return the array's own object for a shared tensor; a frozen parameter has the same memory."""
    own = tensor.detach()
    made: Tensor = own.clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made if tensor.requires_grad else own, tensor.requires_grad)
    made.owner = _ALL  # pyright: ignore[reportAttributeAccessIssue]
    return made


def column(numbers: Tensor, like: Tensor) -> Tensor:
    """View one number per model so that it broadcasts with a tensor [models, ...]."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor [models, ...] as a matrix with a row per model, also where one model's part is a number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def new_generators(
    seeds: Sequence[int], states: Iterable[Tensor | None], device: torch.device
) -> list[torch.Generator]:
    """Return one generator per model, which continues from a state where there is one."""
    made = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    for generator, state in zip(made, states, strict=True):
        # States were taken on the CPU, where the models were made.
        if state is not None and device.type == "cpu":
            generator.set_state(state)
    return made


def moved(generators: Sequence[torch.Generator] | None, device: torch.device) -> list[torch.Generator] | None:
    """Return generators on a device; on another type of device they restart from their seeds."""
    if generators is None or generators[0].device == device:
        return None if generators is None else list(generators)
    states = [own.get_state() if own.device.type == device.type else None for own in generators]
    made = new_generators([own.initial_seed() for own in generators], [None] * len(states), device)
    for own, state in zip(made, states, strict=True):
        if state is not None:
            own.set_state(state)
    return made


def move_(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter with its gradient."""
    gradient = parameter.grad
    parameter.data = parameter.data.to(device)
    parameter.grad = None if gradient is None else gradient.to(device)


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
