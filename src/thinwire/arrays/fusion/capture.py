# SPDX-License-Identifier: Apache-2.0
"""Replay a whole training step of an array as one CUDA graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.arrays.fusion.autotune import choosing_for_graphs
from thinwire.arrays.fusion.batch import Each
from thinwire.arrays.fusion.model_array import ModelArray
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.optimizers.parameter_batch import slots_of
from thinwire.arrays.fusion.recording import RECORDER
from thinwire.arrays.fusion.scaling import GradScaler
from thinwire.arrays.fusion.store import is_shared
from thinwire.core.torch_internals import pytree
from thinwire.errors import ConfigError

# The first step creates optimizer states and measures layers; what it chose may lead to other layouts in the second.
_WARM_UP_STEPS = 3
_CALL = "A replay runs no hooks. Call the step without capture"


class CapturedStep:
    """A training step that runs as one CUDA graph; `FusedArray.capture` makes it.

    Args:
        array: the array that the step trains.
        step: the step, called with inputs.
        inputs: example inputs.
    """

    def __init__(self, array: ModelArray, step: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._array, self._step = array, step
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._graph: Any = None
        self._take(inputs)
        if _on_gpu(self._device):
            self._capture()

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; returns copies of what the step returns, without their graph.

        Raises:
            ConfigError: an input differs from the example in shape or dtype.
        """
        if self._graph is None:
            self._checked(inputs)
            return _outputs(self._step(*inputs))
        self._array.refuse_attached("a captured step", _CALL)
        with torch.cuda.device(self._device):
            if self._is_stale():
                self._take(inputs)
                self._capture()
            for static, given in self._checked(inputs):
                static.copy_(given, non_blocking=given.is_pinned())
            for used in self._used:
                if isinstance(used, FusedOptimizer):
                    used.refresh()
            self._graph.replay()
            # Autograd does not see what a graph writes.
            torch.autograd.graph.increment_version(self._written)
            return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self._results)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _take(self, inputs: Sequence[Any]) -> None:
        """Make the buffers from which the graph reads its inputs."""
        leaves, self._shape = pytree.tree_flatten(tuple(inputs))
        self._leaves = [self._buffer(leaf) for leaf in leaves]

    def _buffer(self, leaf: Any) -> Any:
        if isinstance(leaf, Each):
            return Each(self._buffer(leaf.tensor))
        if not isinstance(leaf, Tensor):
            return leaf
        if not _on_gpu(self._device):
            return leaf.detach()
        return torch.empty_like(leaf, device=self._device, requires_grad=False).copy_(leaf.detach())

    def _checked(self, inputs: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of buffers and inputs.

        Raises:
            ConfigError: an input differs from the example.
        """
        leaves, shape = pytree.tree_flatten(tuple(inputs))
        if shape != self._shape:
            raise ConfigError(
                f"the inputs have another structure than the example: {shape}. It must be {self._shape}. Pass inputs "
                "like the example, or capture the step again with these"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, (own, given) in enumerate(zip(self._leaves, leaves, strict=True)):
            looks, wanted = _looks(given), _looks(own)
            if looks != wanted:
                raise ConfigError(
                    f"input {place} is {looks}: the captured step takes {wanted}. Pass inputs like the example "
                    "(drop_last=True keeps a shorter last batch out), or capture the step again with these"
                )
            if isinstance(given, Each):
                pairs.append((own.tensor, given.tensor))
            elif isinstance(given, Tensor):
                pairs.append((own, given))
        return pairs

    # -- capture -------------------------------------------------------------------------------------------------------

    def _run(self) -> Any:
        # Autocast keeps its casts of parameters until its outermost block ends, which may be outside of the step.
        torch.clear_autocast_cache()
        found = _outputs(self._step(*pytree.tree_unflatten(self._leaves, self._shape)))
        torch.clear_autocast_cache()
        return found

    def _capture(self) -> None:
        self._array.refuse_attached("a captured step", _CALL)
        array, gradients = self._array, [(p, p.grad) for p in self._array.parameters()]
        self._graph = self._results = None
        graph: Any = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self._device):
                stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
                stream.wait_stream(current)
                with torch.cuda.stream(stream), _undone(array) as used:
                    with choosing_for_graphs(measure=True):
                        for _ in range(_WARM_UP_STEPS):
                            self._run()
                    # A capture that fails leaves torch's random numbers unusable in the process.
                    with choosing_for_graphs(measure=False), _without_waiting():
                        self._run()
                current.wait_stream(stream)
                try:
                    results = self._recorded(graph, stream)
                finally:
                    torch.cuda.set_stream(current)  # a failed capture leaves its own
        except BaseException:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            raise
        self._graph, self._results, self._used = graph, results, used
        self._written = [tensor for _, tensor in (*array.named_parameters(), *array.named_buffers())]
        self._shared = [tensor for tensor in self._written if is_shared(tensor)]
        self._changes, self._state = self._count_changes(), self._layout()

    def _recorded(self, graph: Any, stream: Any) -> Any:
        """Record one step, which runs nothing; returns the tensors that replays write."""
        gc.collect()
        for generator in self._array.generators or ():
            graph.register_generator_state(generator)
        held = [(p, p.grad) for p in self._array.parameters()]
        try:
            with (
                _recorded_by(lambda _: None),
                choosing_for_graphs(measure=False),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                results = self._run()
        except RuntimeError as error:
            raise ConfigError(
                f"the step cannot be captured: {_cause(error)}. Everything in it must run on the current stream of the "
                "GPU. Call the step without capture in a new process"
            ) from error
        if any(before is not None and p.grad is before for p, before in held):
            raise ConfigError(
                "the captured step does not clear the gradients: each replay would add to those of the last. Call "
                "array.zero_grad() in the step, before backward()"
            )
        return results

    def _is_stale(self) -> bool:
        """Return True if the graph reads or writes tensors that the array or an optimizer has replaced."""
        changes = self._count_changes()
        if changes == self._changes:
            return False
        self._changes, (tensors, settings) = changes, self._layout()
        held, own = self._state
        return settings != own or list(map(id, tensors)) != list(map(id, held))

    def _count_changes(self) -> tuple[Any, ...]:
        """Return what differs if `_layout` may."""
        addresses = (tensor.data_ptr() for tensor in self._shared)
        used = ((id(each.scales) if isinstance(each, GradScaler) else each.changes) for each in self._used)
        return self._array.changes, *used, *addresses

    def _layout(self) -> tuple[list[Any], Any]:
        """Return the tensors that the graph uses, and the settings that it was captured with."""
        array = self._array
        tensors: list[Any] = [tensor for _, tensor in (*array.named_parameters(), *array.named_buffers())]
        settings: list[Any] = [array.size, array.dropout_rates(), array.modes(), [t.data_ptr() for t in tensors]]
        tensors += array.generators or ()
        for used in self._used:
            if isinstance(used, GradScaler):
                tensors += [used.scales, used.growths]
                continue
            for group in used.param_groups:
                settings.append({name: group[name] for name in group if name not in (*used.ranges, "params")})
                tensors += group["params"]
                tensors += [each for p in group["params"] for each in used.state.get(p, {}).values()]
        return tensors, settings


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _looks(leaf: Any) -> str:
    if isinstance(leaf, Each):
        return f"Each of {_looks(leaf.tensor)}"
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def _outputs(found: Any) -> Any:
    wrong = [leaf for leaf in pytree.tree_leaves(found) if not isinstance(leaf, Tensor) and leaf is not None]
    if wrong:
        raise ConfigError(
            f"the captured step returned {wrong[0]!r}: it must return tensors, since a replay runs no Python. Return "
            "the tensor, and read it after the step"
        )
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, found)


def _cause(error: BaseException) -> str:
    """Return the first line of the first error: those of a capture hide what has ended it."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


# -- steps without consequences ----------------------------------------------------------------------------------------


@contextmanager
def _recorded_by(use: Callable[[Any], None]) -> Generator[None]:
    token = RECORDER.set(use)
    try:
        yield
    finally:
        RECORDER.reset(token)


@contextmanager
def _undone(array: ModelArray) -> Generator[list[Any]]:
    """Undo in the end what steps inside have changed; yields the optimizers and scalers that they used.

    Raises:
        ConfigError: a step used an optimizer of torch, or changed hyperparameters.
    """
    used: list[Any] = []
    restore: list[Callable[[], None]] = []

    def use(each: Any) -> None:
        if not any(each is known for known in used):
            used.append(each)
            restore.append(_restored_scaler(each) if isinstance(each, GradScaler) else _restored_optimizer(each))

    restore += [_restored_tensors(array), _restored_random(array)]
    hook = register_optimizer_step_pre_hook(_refuse_other_optimizers)
    try:
        with _recorded_by(use), torch.enable_grad():
            yield used
    finally:
        hook.remove()
        with torch.no_grad():
            for each in restore:
                each()


@contextmanager
def _without_waiting() -> Generator[None]:
    """Inside, an operation that waits for the GPU raises.

    Raises:
        ConfigError: with the operation's place.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not detect everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise ConfigError(
            f"the captured step waits for the GPU: {_cause(error)}. A replay runs no Python. Move .item(), .cpu(), "
            "printing, copies from memory that is not pinned, and tensors made from Python numbers out of the step"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _refuse_other_optimizers(optimizer: Any, *_: Any) -> None:
    if not isinstance(optimizer, FusedOptimizer):
        raise ConfigError(
            f"the captured step uses torch.optim.{type(optimizer).__name__}: a graph would keep its learning rate. "
            "Use the optimizers of thinwire.fusion, or call the step without capture"
        )


def _restored_tensors(array: ModelArray) -> Callable[[], None]:
    saved = {name: tensor.detach().clone() for name, tensor in array.named_buffers()}
    trained = ((name, p) for name, p in array.named_parameters() if not (is_shared(p) and not p.requires_grad))
    saved.update({name: parameter.detach().clone() for name, parameter in trained})

    def restore() -> None:
        for name, tensor in (*array.named_parameters(), *array.named_buffers()):
            if name in saved:
                tensor.copy_(saved[name])  # one that all models shared may have become each model's own

    return restore


def _restored_random(array: ModelArray) -> Callable[[], None]:
    device = next((p.device for p in array.parameters()), torch.device("cpu"))
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    cpu, own = torch.get_rng_state(), [generator.get_state() for generator in array.generators or ()]

    def restore() -> None:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
        for generator, state in zip(array.generators or (), own, strict=True):
            generator.set_state(state)

    return restore


def _restored_scaler(scaler: GradScaler) -> Callable[[], None]:
    scales, growths = scaler.scales.clone(), scaler.growths.clone()

    def restore() -> None:
        scaler.scales.copy_(scales)
        scaler.growths.copy_(growths)
        scaler.forget()

    return restore


def _restored_optimizer(optimizer: FusedOptimizer) -> Callable[[], None]:
    before = {
        parameter: {name: value.clone() for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    values = [{name: group[name].clone() for name in optimizer.ranges} for group in optimizer.param_groups]
    active = optimizer.active.clone()

    def restore() -> None:
        changed = [
            name
            for group, own in zip(optimizer.param_groups, values, strict=True)
            for name in own
            if not torch.equal(group[name], own[name])
        ]
        for group, own in zip(optimizer.param_groups, values, strict=True):
            for name, value in own.items():
                group[name].copy_(value)
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if before.get(parameter):
                        value.copy_(before[parameter][name])
                    else:
                        _reset_(optimizer, parameter, group, name, value)
        optimizer.active.copy_(active)
        if changed:
            raise ConfigError(
                f"the captured step changes {changed[0]}: a replay runs no Python. Step the schedules between replays"
            )

    return restore


def _reset_(optimizer: FusedOptimizer, parameter: nn.Parameter, group: Any, name: str, value: Tensor) -> None:
    """Set a state to what it is before the first step."""
    if name == "step":
        value.zero_()
    else:
        value.copy_(optimizer.initial_state(name, parameter.detach(), group, slots_of(parameter)))
