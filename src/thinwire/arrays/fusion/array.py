# SPDX-License-Identifier: Apache-2.0
"""Train many models of one structure as one array, with the results of separate runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

# These modules register their rules when they are imported.
import thinwire.arrays.fusion.attention  # pyright: ignore[reportUnusedImport]
import thinwire.arrays.fusion.convolution  # pyright: ignore[reportUnusedImport]
import thinwire.arrays.fusion.dense  # pyright: ignore[reportUnusedImport]
import thinwire.arrays.fusion.losses  # noqa: F401  # pyright: ignore[reportUnusedImport]
from thinwire.arrays.fusion.batch import (
    Batch,
    Each,
    Vmap,
    WithoutVmap,
    is_batch,
    output_of,
    split_models,
    stack_models,
    unwrap,
    wrap,
)
from thinwire.arrays.fusion.capture import CapturedStep
from thinwire.arrays.fusion.model_array import ModelArray
from thinwire.arrays.fusion.normalisation import cumulative_batch_norm
from thinwire.arrays.fusion.rng import DropoutRates
from thinwire.arrays.fusion.routing import Context, Router, vmap_error
from thinwire.arrays.fusion.store import Selection, Store, is_shared, outermost
from thinwire.arrays.fusion.structure import TensorRef, build, difference, tensor_refs, within
from thinwire.core.torch_internals import BATCH_NORMS, is_checkpointing, pytree, refresh_rnn_weights
from thinwire.errors import ConfigError

_DETACH = "Call detach() of the worker first, and attach again afterwards"


def fuse(
    models: Sequence[nn.Module] | Callable[..., nn.Module],
    hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    loop: Sequence[str] | bool = (),
    share_trained: bool = False,
) -> FusedArray:
    """Make one array of models that differ only in weights, buffers and dropout rates.

    A frozen parameter or a buffer that is the same object in all models is one tensor in the array, and is not copied.

    Args:
        models: the models, which are copied; or a factory, called with each of `hyperparameters`.
        hyperparameters: one mapping of arguments per model; only with a factory.
        seeds: one per model, for dropout and noise as in a separate run after `torch.manual_seed`: a factory is called
            after the seed, and the forward draws from where it stopped. None draws from torch's own generator.
        loop: names of layers that run model after model, because they differ in structure or do what vmap cannot;
            True loops over whole models. Recurrent layers are always looped over.
        share_trained: keep trainable parameters that are the same object in all models shared; their gradient is the
            sum over models. `array.shared_parameters()` returns them, for an optimizer of torch.

    Raises:
        ConfigError: models differ in structure (it names the layer and the difference), lists differ in length, or
            different models share a trainable parameter without `share_trained`.

    Example:
        >>> import torch
        >>> from thinwire import fuse
        >>> array = fuse(torch.nn.Linear, [{"in_features": 3, "out_features": 2}] * 4, seeds=range(4))
        >>> array.size, tuple(array(torch.ones(5, 3)).shape)  # every model gets the same input
        (4, (4, 5, 2))
    """
    states: list[Tensor] | None = None
    if isinstance(models, Sequence):
        if hyperparameters is not None:
            raise ConfigError("fuse(models, hyperparameters): the models are made already. Pass a factory instead")
        made = list(models)
    else:
        if hyperparameters is None:
            raise ConfigError("fuse(factory): the number of models is missing. Pass one mapping of arguments per model")
        _check_count("seeds", seeds, len(hyperparameters))
        made, states = build(models, hyperparameters, seeds)
    if not made:
        raise ConfigError("fuse([]): an array has at least one model")
    _check_count("seeds", seeds, len(made))
    paths = ([""] if loop else []) if isinstance(loop, bool) else list(loop)
    for path in paths:
        for index, model in enumerate(made):
            known = dict(model.named_modules())
            if path not in known:
                raise ConfigError(
                    f"loop={path!r}: model {index} has no such layer. It has {', '.join(filter(None, known))}"
                )
    _check_shared(made, share_trained=share_trained)
    return FusedArray(made, seeds=seeds, loop=paths, states=states, share_trained=share_trained)


def _check_shared(models: Sequence[nn.Module], *, share_trained: bool) -> None:
    """Refuse a trainable parameter that belongs to several models that are different objects.

    Raises:
        ConfigError: with the parameter. Each model would get a copy of its own, which its loss alone trains.
    """
    owners: dict[int, nn.Module] = {}
    named = [dict(model.named_parameters()) for model in models]
    for model, own in zip(models, named, strict=True):
        for name, parameter in own.items():
            if not parameter.requires_grad or owners.setdefault(id(parameter), model) is model:
                continue
            if not share_trained:
                raise ConfigError(
                    f"models share the trainable parameter {name}: in an array each model would train a copy of its "
                    "own. Pass copy.deepcopy(model) for each if that is what you want, share_trained=True to train one "
                    "with the sum of the gradients, or freeze it with requires_grad_(False)"
                )
            if any(each.get(name) is not parameter for each in named):
                raise ConfigError(
                    f"some models share the trainable parameter {name}, and others do not. share_trained=True needs it "
                    "in all models under one name. Share it in all of them, or in none"
                )


def _check_count(what: str, values: Any, size: int) -> None:
    if values is not None and len(values) != size:
        raise ConfigError(f"{what} of length {len(values)}: there are {size} models. Pass one per model")


class FusedArray(ModelArray):
    """B models of one structure as one: parameters and buffers have the models along the first axis.

    Made by `thinwire.fuse`. A call runs the models' own forward code, unchanged, under `torch.vmap`. Calls of torch
    that have a rule (linear, convolution, normalisation, embedding, attention, pooling, dropout, cross-entropy) are
    computed for all models at once, by the implementation that was measured to be fastest. Arguments are shared by all
    models unless marked `Each`; results are [B, ...].

    Back-propagate `array.losses(...).sum()`: each model's gradient is that of its own loss.

    Args:
        models: of one structure; they are copied.
        seeds: one per model, or None.
        loop: paths of layers that run model after model; the empty path is the whole model.
        states: of the generators, to replace those after the seeds.
        share_trained: as `fuse`'s.

    Example:
        >>> import torch
        >>> from thinwire import fuse
        >>> array = fuse([torch.nn.Linear(3, 2) for _ in range(4)])
        >>> array
        FusedArray(4 x Linear, 2 parameters)
        >>> losses = array.losses(torch.nn.functional.mse_loss, array(torch.ones(5, 3)), torch.zeros(5, 2))
        >>> losses.sum().backward()
        >>> tuple(losses.shape), [tuple(parameter.grad.shape) for parameter in array.parameters()]
        ((4,), [(4, 2, 3), (4, 2)])
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        seeds: Sequence[int] | None = None,
        loop: Sequence[str] = (),
        states: Sequence[Tensor] | None = None,
        share_trained: bool = False,
    ) -> None:
        recurrent = [path for path, module in models[0].named_modules() if isinstance(module, nn.RNNBase)]
        self._loops = outermost([*loop, *recurrent])
        separate = [path for path in self._loops if path and _differs(models, path)]
        self._store = Store(models, separate, self._loops, seeds, states, share_trained=share_trained)
        self._skeleton = self._store.skeleton()
        self._router = Router(Context(self.size))
        self._install()

    def _install(self) -> None:
        """Replace what the skeleton cannot run as it is: differing dropout rates, cumulative batch norm, and loops."""
        store = self._store
        self.changes += 1
        self._router.context = Context(store.size, store.generators)
        self._refs = tensor_refs(self._skeleton, list(store.separate))
        # Kept as a list, because zero_grad needs it at every step.
        self._parameters = [parameter for _, parameter in self.named_parameters()]
        for (path, name), values in store.rates.items():
            if not within(path, list(store.separate)):
                rate = values[0] if len(set(values)) == 1 else DropoutRates(values)
                setattr(self._skeleton.get_submodule(path), name, rate)
        for path, module in self._skeleton.named_modules():
            cumulative = isinstance(module, BATCH_NORMS) and module.momentum is None and module.track_running_stats
            if cumulative and not within(path, self._loops):
                module.forward = partial(cumulative_batch_norm, module)
        self._root: Loop | None = None
        for path in self._loops:
            if path:
                self._skeleton.get_submodule(path).forward = self._loop_of(path)
            else:
                self._root = self._loop_of(path)

    def _loop_of(self, path: str) -> Loop:
        store = self._store
        if path in store.separate:
            bodies = store.separate[path]
            refs = [
                [TensorRef(ref.holder, ref.key, f"{path}.{ref.name}", ref.trained) for ref in tensor_refs(body)]
                for body in bodies
            ]
            values, calls = partial(store.tensors_of, separate=True), [body.forward for body in bodies]
            return Loop(bodies, refs, values, self._router, store.write_buffers, calls)
        body = self._skeleton.get_submodule(path)
        holders = {id(ref.holder) for ref in tensor_refs(body)}
        own = [ref for ref in self._refs if id(ref.holder) in holders]
        # The hooks of a layer run around its loop, and those of the whole model in it.
        call = (body.forward.calls[0] if isinstance(body.forward, Loop) else body.forward) if path else body
        calls = [call] * self.size
        return Loop([body] * self.size, [own] * self.size, store.tensors_of, self._router, store.write_buffers, calls)

    # -- contents ------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """B, the number of models."""
        return self._store.size

    @property
    def generators(self) -> Sequence[torch.Generator] | None:
        """One random generator per model, if seeds were given."""
        return self._store.generators

    def __repr__(self) -> str:
        kind = type(self._store.template).__name__
        return f"FusedArray({self.size} x {kind}, {len(self._parameters)} parameters)"

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, [B, ...]; one of model b alone is [1, ...] and named `name[b]`, a shared one [...]."""
        yield from ((name, tensor) for name, tensor in self._store.named() if isinstance(tensor, nn.Parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every parameter once, in the order of a model's `parameters()`."""
        return iter(self._parameters)

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable parameters that all models share; train them with a torch optimizer."""
        yield from (parameter for parameter in self.parameters() if is_shared(parameter) and parameter.requires_grad)

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that models do not share, for an optimizer of the array."""
        yield from (parameter for parameter in self.parameters() if not is_shared(parameter))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every buffer once, [B, ...], or [...] if all models share it."""
        yield from ((name, tensor) for name, tensor in self._store.named() if not isinstance(tensor, nn.Parameter))

    def own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each model's buffers as views, named `name[b]`, and those that all models share."""
        for name, buffer in self.named_buffers():
            if is_shared(buffer):
                yield name, buffer
            else:
                yield from ((f"{name}[{model}]", row) for model, row in enumerate(buffer))

    def dropout_rates(self) -> dict[str, tuple[float, ...]]:
        """Return each model's rate in every dropout layer, by the rate's full name."""
        return {f"{path}.{name}".lstrip("."): tuple(values) for (path, name), values in self._store.rates.items()}

    def _set_rates(self, name: str, values: Sequence[float]) -> None:
        path, _, attribute = name.rpartition(".")
        self._store.set_rates(path, attribute, list(map(float, values)))
        self._install()

    def _roots(self) -> list[nn.Module]:
        bodies = (body for bodies in self._store.separate.values() for body in bodies)
        return [self._skeleton, self._store.template, *bodies]

    def to(self, device: torch.device | str) -> FusedArray:
        """Move every tensor; on another type of device the generators restart from their seeds."""
        self._store.to(torch.device(device))
        self._install()
        return self

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return every model's output, [B, ...]; tensors among the arguments are shared unless marked `Each`.

        Raises:
            ConfigError: the forward code does what cannot be done for all models at once; it names the layer.
        """
        if self.attached is None:
            return self.forward(*args, **kwargs)
        self.attached.training = self.training
        return self.attached(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a call of the array returns, without the hooks of `thinwire.attach`."""
        if self.generators is not None and self.training and is_checkpointing():
            raise ConfigError(
                "checkpoint(array, ...) of an array with seeds: its second pass would draw other numbers, because "
                "checkpoints restore torch's own generator only. Leave it out, or fuse without seeds"
            )
        if self._root is not None:
            return _models_first(self._root.run(_as_batches((args, kwargs), self.size)))
        return self._run(self._skeleton, args, kwargs)

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return every model's result of a function of tensors, [B, ...]; arguments as when the array is called."""
        if self._root is None:
            return self._run(function, args, kwargs)
        return _models_first(self._root.run(_as_batches((args, kwargs), self.size), function))

    def losses(self, function: Callable[..., Tensor], outputs: Any, *targets: Any) -> Tensor:
        """Return every model's loss, [B]; back-propagate its sum, and each model gets its own gradient.

        Args:
            function: the loss of one model's outputs and targets, a scalar, such as `F.cross_entropy`.
            outputs: as returned by the array.
            targets: shared by all models, unless marked `Each`.

        Raises:
            ConfigError: the loss is not a scalar per model.
        """
        if isinstance(outputs, Tensor):
            own: Any = Each(outputs)
        else:
            own = pytree.tree_map(lambda leaf: Each(leaf) if isinstance(leaf, Tensor) else leaf, outputs)
        found = self.map(function, own, *targets)
        if not isinstance(found, Tensor) or found.shape != (self.size,):
            looks = list(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"each model's loss is {looks}: it must be a scalar. Reduce it by its mean or its sum")
        return found

    def capture(self, step: Callable[..., Any], *inputs: Any) -> CapturedStep:
        """Make one CUDA graph of a training step: forward, backward and update, without launches from Python.

        Capturing runs the step a few times and then undoes it: parameters, buffers, optimizer states and random
        streams are as before. Replays draw from each model's own generator, and use the hyperparameters, `active`
        slots and loss scales of the moment. A step is captured again when layers' modes, dropout rates or tensors
        were replaced (`select`, `load_state_dict`, `train`).

        The step must clear the gradients first, return tensors, and not wait for the GPU. Its Python code does not run
        in a replay. It uses this package's optimizers and scaler; schedules step between replays.

        On a CPU the step is called as it is.

        Args:
            step: called with inputs; returns tensors, usually the losses.
            inputs: examples, in the shapes of all later inputs; tensors, `Each`, or trees of them. Later inputs are
                copied to the GPU; those in pinned memory asynchronously, so do not overwrite them.

        Returns:
            A callable that takes inputs and returns copies of the step's results.

        Raises:
            ConfigError: the step cannot be captured; it names the reason.

        Example:
            >>> import torch
            >>> from thinwire.arrays import fusion
            >>> array = fusion.fuse([torch.nn.Linear(2, 1) for _ in range(3)])
            >>> optimizer = fusion.Adam(array.parameters(), lr=[1e-3, 1e-2, 1e-1])
            >>> def step(x, y):
            ...     array.zero_grad()
            ...     losses = array.losses(torch.nn.functional.mse_loss, array(x), y)
            ...     losses.sum().backward()
            ...     optimizer.step()
            ...     return losses
            >>> replay = array.capture(step, torch.ones(4, 2), torch.zeros(4, 1))
            >>> tuple(replay(torch.ones(4, 2), torch.zeros(4, 1)).shape)
            (3,)
        """
        return CapturedStep(self, step, inputs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _as_batches((args, kwargs), self.size)
        # Only the skeleton reads the models' tensors; a function of `map` does not.
        refs = self._refs if function is self._skeleton else []
        tensors, shared = (self._store.tensors, self._store.shared) if refs else ({}, {})
        try:
            with Vmap(self.size) as level, self._router.at(level):
                named = {name: wrap(Batch(tensor, 0), level) for name, tensor in tensors.items()} | shared
                args, kwargs = _wrapped(given, level)
                with _Swapped(refs, named):
                    found, rebuild = _leaves(function(*args, **kwargs))
                    replaced = _replaced_buffers(refs, named)
                results = [output_of(leaf, level, self.size) if isinstance(leaf, Tensor) else leaf for leaf in found]
                buffers = {name: output_of(tensor.detach(), level, self.size) for name, tensor in replaced.items()}
        except (RuntimeError, ValueError, TypeError) as error:
            raise vmap_error(error, self._skeleton) or error from None
        if buffers:
            self._store.write_all_buffers(buffers)
        return rebuild(results)

    # -- models enter and leave ----------------------------------------------------------------------------------------

    def extract(self, index: int) -> nn.Module:
        """Return model `index` as a plain module; its state dict fits a module made by the user's code.

        Raises:
            ConfigError: no such slot.
        """
        if self.attached is not None:
            self.attached.state_dict()  # warns between two averages, as for a model
        return self._store.extract(index)

    def insert(self, index: int, model: nn.Module, *, seed: int | None = None) -> None:
        """Put another model into a slot: its weights, buffers and dropout rates; other slots keep theirs, bitwise.

        Args:
            index: the slot.
            model: of the same structure as the model it replaces.
            seed: for the slot's generator, if models have generators; None leaves the generator as it is.

        Raises:
            ConfigError: no such slot, or the model differs in structure.
        """
        self.refuse_attached("insert()", _DETACH)
        self._store.insert(index, model, seed)
        self._install()

    def select(self, indices: Sequence[int]) -> Selection:
        """Keep some models in a new order, a model as often as it is named: compaction and copies, bitwise.

        Parameters become new objects without gradients: pass the result to `select` of the optimizer, the schedules
        and the scaler before the next step.

        Raises:
            ConfigError: no index, or no such slot.
        """
        self.refuse_attached("select()", _DETACH)
        kept = self._store.select(indices)
        self._install()
        return kept

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor by its name, and the states of the generators as `generator[b]`."""
        if self.attached is not None:
            self.attached.state_dict()
        return self._store.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state_dict` of an array of the same models.

        Raises:
            ConfigError: a tensor is missing, is one too many, or has another shape.
        """
        if self.attached is not None:
            self.attached.load_state_dict({})  # the next step checks the new weights, as those of a model
        self._store.load(state)


def _differs(models: Sequence[nn.Module], path: str) -> bool:
    first, *others = ((model.get_submodule(path), model) for model in models)
    return any(difference(first[0], part, whole=(first[1], model)) is not None for part, model in others)


# -- arguments and results ---------------------------------------------------------------------------------------------


def _as_batches(given: Any, size: int) -> Any:
    def as_batch(leaf: Any) -> Any:
        if not isinstance(leaf, Each):
            return leaf
        _check_count("Each", leaf.tensor, size)
        return Batch(leaf.tensor, 0)

    if _is_flat(given):
        return tuple(map(as_batch, given[0])), {}
    leaves, shape = pytree.tree_flatten(given, is_leaf=lambda value: isinstance(value, Each))
    return pytree.tree_unflatten(list(map(as_batch, leaves)), shape)


def _wrapped(given: Any, level: int) -> Any:
    if _is_flat(given):
        return tuple(wrap(leaf, level) for leaf in given[0]), {}
    return pytree.tree_map(partial(wrap, level=level), given, is_leaf=is_batch)


def _is_flat(given: Any) -> bool:
    """Whether the arguments are only tensors, the usual case: walking a tree would cost more than small layers do."""
    args, kwargs = given
    return not kwargs and all(isinstance(leaf, Tensor | Each | Batch) for leaf in args)


def _leaves(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return a tree's leaves, and a function that makes the tree from new leaves."""
    if isinstance(value, Tensor):
        return [value], itemgetter(0)
    leaves, shape = pytree.tree_flatten(value)
    return leaves, lambda new: pytree.tree_unflatten(new, shape)


def _models_first(found: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.at(0) if isinstance(leaf, Batch) else leaf, found, is_leaf=is_batch)


# -- the forward of one module with other tensors ----------------------------------------------------------------------


class _Swapped:
    """Context manager: inside, the modules hold other tensors; afterwards their own again.

    Args:
        refs: the tensors to swap.
        values: what to hold instead, by the refs' names.
    """

    __slots__ = ("_held", "_refs", "_values")

    def __init__(self, refs: Sequence[TensorRef], values: Mapping[str, Any]) -> None:
        self._refs, self._values = refs, values

    def __enter__(self) -> None:
        """Put the values in."""
        new = [self._values[ref.name] for ref in self._refs]  # raises before anything is swapped
        self._held = [ref.holder[ref.key] for ref in self._refs]
        for ref, value in zip(self._refs, new, strict=True):
            ref.holder[ref.key] = value

    def __exit__(self, *_: object) -> None:
        """Put the modules' own tensors back."""
        for ref, tensor in zip(self._refs, self._held, strict=True):
            ref.holder[ref.key] = tensor


def _replaced_buffers(refs: Sequence[TensorRef], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that the forward has replaced instead of written to; call it inside `_Swapped`."""
    held = ((ref.name, ref.holder[ref.key]) for ref in refs if not ref.trained)
    return {name: tensor for name, tensor in held if tensor is not None and tensor is not values[name]}


class Loop:
    """The forward of a submodule that runs model after model.

    Args:
        bodies: the module of each model; the same object where models differ only in tensors.
        refs: each body's tensors.
        values: returns model b's tensors by name.
        router: of the array.
        write: called with the buffers that model b has replaced.
        calls: each body's own forward, or the body.
    """

    def __init__(
        self,
        bodies: Sequence[nn.Module],
        refs: Sequence[Sequence[TensorRef]],
        values: Callable[[int], Mapping[str, Tensor]],
        router: Router,
        write: Callable[[int, Mapping[str, Tensor]], None],
        calls: Sequence[Callable[..., Any]],
    ) -> None:
        self.bodies, self.refs, self.values, self.router, self.write = bodies, refs, values, router, write
        self.calls = calls
        # Rates that differ between models, where all have the same body.
        self.rates = [
            (module, name, value)
            for module in bodies[0].modules()
            for name, value in vars(module).items()
            if isinstance(value, DropoutRates)
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run from inside the array's vmap: take each model's part of the arguments, and return all results."""
        level = self.router.level
        given = pytree.tree_map(lambda leaf: unwrap(leaf, level), (args, kwargs))
        with WithoutVmap():
            found = self.run(given, routed=True)
        return pytree.tree_map(lambda leaf: wrap(leaf, level), found, is_leaf=is_batch)

    def run(self, given: tuple[Any, Any], function: Callable[..., Any] | None = None, *, routed: bool = False) -> Any:
        """Run all bodies, or a function once per model, on trees of batches; returns a tree of batches.

        Args:
            given: positional and named arguments.
            function: called instead of the bodies.
            routed: whether the router is active; entered twice, it would dispatch a draw to its rule twice, and the
                model's generator would not move on.
        """
        context, results = self.router.context, list[Any]()
        if not routed:
            self.router.begin()
        try:
            for model, (args, kwargs) in enumerate(split_models(given, len(self.bodies))):
                context.model = model
                with nullcontext() if routed else self.router:
                    results.append(self._run_model(model, function, args, kwargs))
        finally:
            context.model = None
            for module, name, rates in self.rates:
                setattr(module, name, rates)
        return stack_models(results)

    def _run_model(self, model: int, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        body, refs, values = self.bodies[model], self.refs[model], self.values(model)
        for module, name, rates in self.rates:
            setattr(module, name, rates.values[model])
        with _Swapped(refs, values):
            for module in body.modules():
                # Recurrent layers keep a second list of their weights, which the swap has not changed.
                if isinstance(module, nn.RNNBase):
                    refresh_rnn_weights(module)
            found = (function or self.calls[model])(*args, **kwargs)
            replaced = _replaced_buffers(refs, values)
        if replaced:
            self.write(model, replaced)
        return found
