"""Models that are alike, trained as one: each keeps its own mathematics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Their rules are registered by being imported.
import thinwire.fusion.attention  # pyright: ignore[reportUnusedImport]
import thinwire.fusion.axes  # pyright: ignore[reportUnusedImport]
import thinwire.fusion.convolution  # pyright: ignore[reportUnusedImport]
import thinwire.fusion.dense  # pyright: ignore[reportUnusedImport]
import thinwire.fusion.losses  # noqa: F401  # pyright: ignore[reportUnusedImport]
from thinwire.errors import ConfigError
from thinwire.fusion.batch import Batch, Each, Together, is_batch, leave, wrap
from thinwire.fusion.looping import Filled, Loop, assigned
from thinwire.fusion.normalisation import cumulative_batch_norm
from thinwire.fusion.refusals import refusal
from thinwire.fusion.rng import Rates
from thinwire.fusion.routing import Context, Router
from thinwire.fusion.store import Selection, Store, outermost
from thinwire.fusion.structure import Place, build, difference, places, within


def fuse(
    models: Sequence[nn.Module] | Callable[..., nn.Module],
    hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    loop: Sequence[str] | bool = (),
) -> FusedArray:
    """Make one array of models that are alike but for their weights, buffers and dropout rates.

    Args:
        models: the models, which are copied; or what makes one, to be called with each of `hyperparameters`.
        hyperparameters: one mapping of arguments per model, where `models` is called.
        seeds: one per model, for dropout and noise as in a run of its own after `torch.manual_seed`: models that are
            made here are made after it, and draw on from there. None draws from torch's own generator for all.
        loop: names of layers that are run model after model, because they differ in structure or do what cannot be
            done for all at once; True runs whole models so. Recurrent layers always are.

    Raises:
        ConfigError: models differ in structure (it names the layer and the difference), or lists differ in length.
    """
    states: list[Tensor] | None = None
    if isinstance(models, Sequence):
        if hyperparameters is not None:
            raise ConfigError("fuse(models, hyperparameters): the models are made already; pass what makes one instead")
        made = list(models)
    else:
        if hyperparameters is None:
            raise ConfigError("fuse(factory): says not how many; pass one mapping of arguments per model")
        _check_count("seeds", seeds, len(hyperparameters))
        made, states = build(models, hyperparameters, seeds)
    if not made:
        raise ConfigError("fuse([]): an array has at least one model")
    _check_count("seeds", seeds, len(made))
    paths = ([""] if loop else []) if isinstance(loop, bool) else list(loop)
    _check_paths(made, paths)
    return FusedArray(made, seeds=seeds, loop=paths, states=states)


def _check_count(what: str, values: Any, size: int) -> None:
    if values is not None and len(values) != size:
        raise ConfigError(f"{what} of length {len(values)}: there are {size} models, and each has one")


def _check_paths(models: Sequence[nn.Module], paths: Sequence[str]) -> None:
    for path in paths:
        for index, model in enumerate(models):
            known = dict(model.named_modules())
            if path not in known:
                raise ConfigError(
                    f"loop={path!r}: model {index} has no such layer; it has {', '.join(filter(None, known))}"
                )


class FusedArray:
    """B models of one structure as one: parameters, buffers and generators with the models along the first axis.

    Made by `thinwire.fuse`. Calling it runs the models' own forward code, unchanged, under `torch.vmap`; calls of torch
    that have a rule (linear, convolution, normalisation, embedding, attention, pooling, dropout, cross-entropy) are
    computed for all models at once in the way that was measured to be fastest. Arguments are shared by all models
    unless marked `Each`; results have the models first: [B, ...].

    Each model's gradient is its own: back-propagate `array.losses(...).sum()`.

    Args:
        models: alike in structure; they are copied.
        seeds: one per model, or None.
        loop: paths of layers that run model after model; the empty path is the whole model.
        states: of the generators, after their seeds.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        seeds: Sequence[int] | None = None,
        loop: Sequence[str] = (),
        states: Sequence[Tensor] | None = None,
    ) -> None:
        recurrent = [path for path, module in models[0].named_modules() if isinstance(module, nn.RNNBase)]
        self._loops = outermost([*loop, *recurrent])
        apart = [path for path in self._loops if path and _differ(models, path)]
        self._store = Store(models, apart, seeds, states)
        self._skeleton = copy.deepcopy(models[0])
        self._router = Router(Context(self.size))
        self._install()

    def _install(self) -> None:
        """Give the skeleton what replaces a layer's own forward."""
        store = self._store
        self._router.context = Context(store.size, store.generators)
        self._places = places(self._skeleton, list(store.apart))
        self._parameters = list(self.parameters())
        for (path, name), values in store.rates.items():
            if not within(path, list(store.apart)):
                rate = values[0] if len(set(values)) == 1 else Rates(values)
                setattr(self._skeleton.get_submodule(path), name, rate)
        for path, module in self._skeleton.named_modules():
            if _averages_over_its_life(module) and not within(path, self._loops):
                module.forward = partial(cumulative_batch_norm, module)
        self._root: Loop | None = None
        for path in self._loops:
            if path:
                self._skeleton.get_submodule(path).forward = self._looped(path)
            else:
                self._root = self._looped(path)

    def _looped(self, path: str) -> Loop:
        store = self._store
        if path in store.apart:
            bodies = store.apart[path]
            every = [_renamed(places(body), path) for body in bodies]
            return Loop(bodies, every, partial(store.values, alone=True), self._router, store.keep)
        body = self._skeleton.get_submodule(path)
        holders = {id(place.holder) for place in places(body)}
        own = [place for place in self._places if id(place.holder) in holders]
        return Loop([body] * self.size, [own] * self.size, store.values, self._router, store.keep)

    # -- what it is made of --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """B, the number of models."""
        return self._store.size

    @property
    def training(self) -> bool:
        """Whether the models are in training mode."""
        return self._skeleton.training

    @property
    def generators(self) -> Sequence[torch.Generator] | None:
        """Each model's own, where seeds were given."""
        return self._store.generators

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        kind = type(self._store.plain).__name__
        return f"FusedArray({self.size} x {kind}, {len(list(self.parameters()))} parameters)"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, [B, ...]; one that only model b has is [1, ...], and named `name[b]`."""
        yield from ((name, tensor) for name, tensor in self._store.named() if isinstance(tensor, nn.Parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter once, in the order of a model's own."""
        yield from (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, [B, ...]."""
        yield from ((name, tensor) for name, tensor in self._store.named() if not isinstance(tensor, nn.Parameter))

    def dropout_rates(self) -> dict[str, tuple[float, ...]]:
        """Each model's rate of every layer that drops, by the rate's full name."""
        return {f"{path}.{name}".lstrip("."): tuple(values) for (path, name), values in self._store.rates.items()}

    def set_dropout_rates(self, name: str, values: Sequence[float]) -> None:
        """Change each model's rate of one layer.

        Args:
            name: as in `dropout_rates`.
            values: one per model.

        Raises:
            ConfigError: no such rate, not one per model, or no probability.
        """
        path, _, attribute = name.rpartition(".")
        if (path, attribute) not in self._store.rates:
            raise ConfigError(f"no dropout rate is named {name!r}; there are {sorted(self.dropout_rates())}")
        _check_count(name, values, self.size)
        if not all(0 <= value <= 1 for value in values):
            raise ConfigError(f"{name}={list(values)}: a probability is in [0, 1]")
        self._store.set_rates(path, attribute, list(map(float, values)))
        self._install()

    def train(self, mode: bool = True) -> FusedArray:
        """Put all models into training mode."""
        bodies = (body for bodies in self._store.apart.values() for body in bodies)
        for module in (self._skeleton, self._store.plain, *bodies):
            module.train(mode)
        return self

    def eval(self) -> FusedArray:
        """Put all models into evaluation mode."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def to(self, device: torch.device | str) -> FusedArray:
        """Move every tensor; generators begin anew on another kind of device, from the seeds they had."""
        self._store.to(torch.device(device))
        self._install()
        return self

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Every model's output, [B, ...]: tensors among the arguments are shared, unless marked `Each`.

        Raises:
            ConfigError: the forward code does what cannot be done for all models at once; it names the layer.
        """
        if self._root is not None:
            return _in_order(self._root.run(_as_batches((args, kwargs), self.size)))
        return self._together(self._skeleton, args, kwargs)

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Every model's result of a function of tensors, [B, ...]; arguments as when the array is called."""
        if self._root is None:
            return self._together(function, args, kwargs)
        return _in_order(self._root.run(_as_batches((args, kwargs), self.size), function))

    def losses(self, function: Callable[..., Tensor], outputs: Any, *targets: Any) -> Tensor:
        """Every model's loss, [B]; back-propagate its sum, and each model has its own gradient.

        Args:
            function: one model's loss, a scalar, of its outputs and targets, such as `F.cross_entropy`.
            outputs: what the array returned.
            targets: shared by all models, unless marked `Each`.

        Raises:
            ConfigError: the loss is not a scalar per model.
        """
        own = Each(outputs) if isinstance(outputs, Tensor) else pytree.tree_map(_each, outputs)
        found = self.map(function, own, *targets)
        if not isinstance(found, Tensor) or found.shape != (self.size,):
            looks = list(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"each model's loss is {looks}: it must be a scalar; reduce it by its mean or its sum")
        return found

    def _together(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _as_batches((args, kwargs), self.size)
        # A function of tensors sees no model.
        places = self._places if function is self._skeleton else []
        tensors = self._store.tensors if places else {}
        try:
            with Together(self.size) as level, self._router.at(level):
                named = {name: wrap(Batch(tensor, 0), level) for name, tensor in tensors.items()}
                args, kwargs = _wrapped(given, level)
                with Filled(places, named):
                    found, form = _leaves(function(*args, **kwargs))
                    replaced = assigned(places, named)
                results = [leave(leaf, level, self.size) if isinstance(leaf, Tensor) else leaf for leaf in found]
                kept = {name: leave(tensor.detach(), level, self.size) for name, tensor in replaced.items()}
        except (RuntimeError, ValueError, TypeError) as error:
            raise refusal(error, self._skeleton) or error from None
        if kept:
            self._store.keep_all(kept)
        return form(results)

    # -- the array's life ----------------------------------------------------------------------------------------------

    def extract(self, index: int) -> nn.Module:
        """Model `index` as a plain module of its own; its state dict fits a module made by the user's code.

        Raises:
            ConfigError: no such slot.
        """
        return self._store.extract(index)

    def insert(self, index: int, model: nn.Module, *, seed: int | None = None) -> None:
        """Put another model into a slot: its weights, buffers and dropout rates; all others stay as they are, bitwise.

        Args:
            index: the slot.
            model: alike in structure to the one it replaces.
            seed: of the slot's generator from now on, where models have generators; None lets it go on.

        Raises:
            ConfigError: no such slot, or the model differs in structure.
        """
        self._store.insert(index, model, seed)
        self._install()

    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models, in this order, a model as often as it is named: compaction and copies, bitwise.

        Parameters become new objects without gradients: give what is returned to `select` of the optimizer, the
        schedulers and the scaler before the next step.

        Raises:
            ConfigError: no index, or no such slot.
        """
        kept = self._store.select(indices)
        self._install()
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor by its name, and the states of the generators as `generator[b]`."""
        return self._store.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` of an array of the same models returned.

        Raises:
            ConfigError: a tensor is missing, is one too many, or has another shape.
        """
        self._store.load(state)


def _differ(models: Sequence[nn.Module], path: str) -> bool:
    first, *others = (model.get_submodule(path) for model in models)
    return any(difference(first, other) is not None for other in others)


def _averages_over_its_life(module: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    return isinstance(module, kind) and module.momentum is None and module.track_running_stats


def _renamed(every: Sequence[Place], path: str) -> list[Place]:
    return [Place(place.holder, place.key, f"{path}.{place.name}", place.trained) for place in every]


def _is_each(value: object) -> bool:
    return isinstance(value, Each)


def _each(leaf: Any) -> Any:
    return Each(leaf) if isinstance(leaf, Tensor) else leaf


def _as_batches(given: Any, size: int) -> Any:
    if _is_plain(given):
        return tuple(_as_batch(leaf, size) for leaf in given[0]), {}
    leaves, shape = pytree.tree_flatten(given, is_leaf=_is_each)
    return pytree.tree_unflatten([_as_batch(leaf, size) for leaf in leaves], shape)


def _as_batch(leaf: Any, size: int) -> Any:
    if not isinstance(leaf, Each):
        return leaf
    _check_count("Each", leaf.tensor, size)
    return Batch(leaf.tensor, 0)


def _wrapped(given: Any, level: int) -> Any:
    if _is_plain(given):
        return tuple(wrap(leaf, level) for leaf in given[0]), {}
    return pytree.tree_map(partial(wrap, level=level), given, is_leaf=is_batch)


def _is_plain(given: Any) -> bool:
    """Whether arguments are tensors and nothing else, as they mostly are: no tree has to be walked."""
    args, kwargs = given
    return not kwargs and all(isinstance(leaf, Tensor | Each | Batch) for leaf in args)


def _leaves(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """A tree's leaves, and how to make the tree again; a tensor by itself without the tree."""
    if isinstance(value, Tensor):
        return [value], itemgetter(0)
    leaves, shape = pytree.tree_flatten(value)
    return leaves, partial(_grown, shape)


def _grown(shape: pytree.TreeSpec, leaves: list[Any]) -> Any:
    return pytree.tree_unflatten(leaves, shape)


def _in_order(found: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.at(0) if isinstance(leaf, Batch) else leaf, found, is_leaf=is_batch)
