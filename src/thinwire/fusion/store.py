"""What an array is made of: every model's tensors with the models along the first axis, and how they come and go."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.fusion.structure import check_alike, difference, holders, rates, tensors, within

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Selection:
    """What `FusedArray.select` did, for the optimizer, the schedulers and the scaler to follow.

    Args:
        indices: the model that each slot now holds, by its slot before; a model may be there more than once.
        size: the number of slots before.
        moved: every parameter before, and what it has become: nothing where only dropped models had it.
    """

    indices: tuple[int, ...]
    size: int
    moved: Mapping[nn.Parameter, tuple[nn.Parameter, ...]]

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor [slots before, ...] as [slots now, ...]; bitwise."""
        return tensor.index_select(0, torch.tensor(self.indices, dtype=torch.int64, device=tensor.device))


class Store:
    """Stacked tensors [B, ...] of what the models have alike, and [1, ...] of what only one of them has.

    Args:
        models: alike but for the layers of `apart`.
        apart: paths of layers that differ in structure.
        seeds: of each model's generator.
        states: of each model's generator, instead of its seed's.

    Raises:
        ConfigError: models differ elsewhere.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        apart: Sequence[str],
        seeds: Sequence[int] | None,
        states: Sequence[Tensor] | None,
    ) -> None:
        check_alike(models, apart)
        _check_ties(models, apart)
        self.plain = copy.deepcopy(models[0])
        self.apart = {path: [copy.deepcopy(model.get_submodule(path)) for model in models] for path in apart}
        self.tensors = _stack([tensors(model, apart) for model in models])
        self.loose = [self._loosen(model) for model in range(len(models))]
        self.rates = {(path, name): values for path, name, values in rates(models)}
        device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
        self.generators = None if seeds is None else _generators(seeds, states, device)

    def _loosen(self, model: int) -> Named:
        found: Named = {}
        for path, bodies in self.apart.items():
            for name, tensor in tensors(bodies[model]).items():
                found[f"{path}.{name}"] = _same_kind(tensor.detach()[None].clone(), tensor, model)
        return found

    @property
    def size(self) -> int:
        """The number of models."""
        return len(self.loose)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order of a model's own; those of one model alone have its number behind their name."""
        seen: set[str] = set()
        for path, module in self.plain.named_modules(remove_duplicate=False):
            if path in self.apart:
                for model, loose in enumerate(self.loose):
                    yield from ((f"{name}[{model}]", t) for name, t in loose.items() if name.startswith(f"{path}."))
            prefix = f"{path}." if path else ""
            for name in (f"{prefix}{key}" for holder in holders(module) for key in holder):
                if name in self.tensors and name not in seen:
                    seen.add(name)
                    yield name, self.tensors[name]

    def row(self, name: str, index: int) -> Tensor:
        """One model's tensor: a view."""
        return self.tensors[name][index] if name in self.tensors else self.loose[index][name][0]

    def values(self, model: int, alone: bool = False) -> Named:
        """One model's tensors, of those that are stacked or of those that it has `alone`: views."""
        if alone:
            return {name: tensor[0] for name, tensor in self.loose[model].items()}
        return {name: tensor[model] for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def keep(self, model: int, replaced: Mapping[str, Tensor]) -> None:
        """Write buffers that one model's forward has replaced."""
        for name, value in replaced.items():
            self.row(name, model).copy_(value)

    @torch.no_grad()
    def keep_all(self, replaced: Mapping[str, Tensor]) -> None:
        """Write buffers [B, ...] that the forward has replaced."""
        for name, value in replaced.items():
            self.tensors[name].copy_(value)

    def set_rates(self, path: str, name: str, values: list[float]) -> None:
        """Change each model's dropout rate of one layer, in its own kind of it too where layers differ."""
        self.rates[path, name] = values
        for root, bodies in self.apart.items():
            if within(path, [root]):
                for body, value in zip(bodies, values, strict=True):
                    setattr(body.get_submodule(path[len(root) :].lstrip(".")), name, value)

    def to(self, device: torch.device) -> None:
        """Move every tensor; generators begin anew, from the seeds they had, where they must be of another kind."""
        for holder in (self.tensors, *self.loose):
            for name, tensor in holder.items():
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.to(device)
                else:
                    holder[name] = tensor.to(device)
        if self.generators is not None and self.generators[0].device.type != device.type:
            self.generators = _generators([own.initial_seed() for own in self.generators], None, device)

    @torch.no_grad()
    def extract(self, index: int) -> nn.Module:
        """One model as a plain module of its own."""
        self.check_index(index)
        found = copy.deepcopy(self.plain)
        for path, bodies in self.apart.items():
            parent, _, name = path.rpartition(".")
            setattr(found.get_submodule(parent), name, copy.deepcopy(bodies[index]))
        for (path, name), values in self.rates.items():
            setattr(found.get_submodule(path), name, values[index])
        for name, tensor in tensors(found).items():
            tensor.copy_(self.row(name, index))
        return found

    @torch.no_grad()
    def insert(self, index: int, model: nn.Module, seed: int | None) -> None:
        """Put another model into a slot."""
        self.check_index(index)
        own = self.extract(index)
        wrong = difference(own, copy.deepcopy(model).train(own.training))
        if wrong is not None:
            raise ConfigError(f"slot {index} cannot hold this model: {wrong}; it must be made like the one before")
        for name, tensor in tensors(model).items():
            self.row(name, index).copy_(tensor)
        for path, name, values in rates([model]):
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
        kept = Selection(tuple(indices), self.size, moved)
        for name, tensor in self.tensors.items():
            self.tensors[name] = _same_kind(kept.rows(tensor.detach()), tensor)
            _follow(moved, tensor, [self.tensors[name]])
        self._select_alone(kept, moved)
        self.rates = {key: [values[index] for index in indices] for key, values in self.rates.items()}
        if self.generators is not None:
            self.generators = [self.generators[index].clone_state() for index in indices]
        return kept

    def _select_alone(self, kept: Selection, moved: dict[nn.Parameter, tuple[nn.Parameter, ...]]) -> None:
        before = self.loose
        self.loose = [
            {name: _same_kind(tensor.detach().clone(), tensor, slot) for name, tensor in before[index].items()}
            for slot, index in enumerate(kept.indices)
        ]
        for path, bodies in self.apart.items():
            self.apart[path] = [copy.deepcopy(bodies[index]) for index in kept.indices]
        for index, loose in enumerate(before):
            slots = [slot for slot, source in enumerate(kept.indices) if source == index]
            for name, tensor in loose.items():
                _follow(moved, tensor, [self.loose[slot][name] for slot in slots])

    def state(self) -> Named:
        """Every tensor by its name, and the states of the generators."""
        found = {name: tensor.detach() for name, tensor in self.named()}
        for model, generator in enumerate(self.generators or ()):
            found[f"generator[{model}]"] = generator.get_state()
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned."""
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
        """Refuse a slot that is not there."""
        if not 0 <= index < self.size:
            raise ConfigError(f"slot {index}: there are {self.size}, counted from 0")


def _stack(every: Sequence[Named]) -> Named:
    return {
        name: _same_kind(torch.stack([own[name].detach() for own in every]), first) for name, first in every[0].items()
    }


def _same_kind(values: Tensor, like: Tensor, owner: int | None = None) -> Tensor:
    """A parameter where `like` is one, with the slot it belongs to where it belongs to one alone."""
    if not isinstance(like, nn.Parameter):
        return values
    made = nn.Parameter(values, like.requires_grad)
    if owner is not None:
        made.owner = owner  # pyright: ignore[reportAttributeAccessIssue]
    return made


def owner_of(parameter: Tensor) -> int | None:
    """The slot that a parameter [1, ...] belongs to; None where all slots have a row."""
    found: int | None = getattr(parameter, "owner", None)
    return found


def _follow(moved: dict[nn.Parameter, tuple[nn.Parameter, ...]], before: Tensor, after: Sequence[Tensor]) -> None:
    if isinstance(before, nn.Parameter):
        moved[before] = tuple(tensor for tensor in after if isinstance(tensor, nn.Parameter))


def _generators(seeds: Sequence[int], states: Sequence[Tensor] | None, device: torch.device) -> list[torch.Generator]:
    made = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    if states is not None and device.type == "cpu":
        for generator, state in zip(made, states, strict=True):
            generator.set_state(state)
    return made


def _check_ties(models: Sequence[nn.Module], apart: Sequence[str]) -> None:
    """Refuse a weight that is shared between layers of which only one is the same in all models."""
    for index, model in enumerate(models):
        common = {id(tensor): name for name, tensor in tensors(model, apart).items()}
        for path in apart:
            for name, tensor in tensors(model.get_submodule(path)).items():
                if id(tensor) in common:
                    raise ConfigError(
                        f"model {index} ties {path}.{name} to {common[id(tensor)]}, and {path!r} is each model's own: "
                        "loop over both layers"
                    )


def outermost(paths: Sequence[str]) -> list[str]:
    """Paths that are within no other of them."""
    every = list(dict.fromkeys(paths))
    return [path for path in every if not within(path, [other for other in every if other != path])]
