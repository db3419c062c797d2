# SPDX-License-Identifier: Apache-2.0
"""Check a split model: one batch must give the outputs, loss and gradients of the serial model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from thinwire.core.modes import evaluation_mode
from thinwire.errors import ConfigError, ThinwireError
from thinwire.tensor2d.collectives import whole_activation
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.module import placed
from thinwire.tensor2d.state import gather_blocks

T = TypeVar("T")
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


class Check:
    """The outputs and gradients of a serial model, to compare with the split model.

    Gradients are those of the loss, if an output is a scalar, and otherwise of a weighted sum of the first output.

    Args:
        model: the serial model; it is run once.
        mesh: the ranks.
        batch: the model's arguments, on all ranks: one argument, a tuple, or a dict by name.
        kept: names of the modules that will not be replaced; one of these causes any difference.

    Raises:
        ConfigError: the batch has no tensor or cannot be split over the rows, parameters are on the meta device, or no
            mistake could change the outputs.
    """

    def __init__(self, model: nn.Module, mesh: Mesh2D, batch: Batch, *, kept: Collection[str]) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError("check: parameters on the meta device have no values to compare. Load the model first")
        whole = _arguments(batch)
        first = next((x for x in whole.values() if isinstance(x, Tensor) and x.dim()), None)
        if first is None:
            raise ConfigError(f"check={batch!r}: must contain tensors. Pass the model's arguments, with all samples")
        self._mesh, self._kept = mesh, kept
        self._share = {key: _share(key, x, mesh, len(first)) for key, x in whole.items()}
        outputs, self._stages = _run(model, whole, kept)
        self._expected = {name: x.detach() for name, x in outputs.items()}
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._gradients = _gradients(_objective(outputs, self._expected), parameters)
        if not any(
            bool(x.numel()) and bool((x != x.flatten()[0]).any() or not x.dim()) for x in self._expected.values()
        ):
            raise ConfigError(
                f"check: the serial model's outputs are {_words(self._expected)}, all equal, so no mistake could be "
                "detected. Use a model with nonzero weights that returns numbers"
            )

    def compare(self, model: nn.Module) -> None:
        """Run the split model and compare; a collective call.

        Raises:
            ConfigError: an output or a gradient differs; raised on all ranks, with both values.
        """
        outputs, stages = _in_words(lambda: _run(model, self._share, self._kept))
        found = {name: x.detach() for name, x in outputs.items()}
        wrong = [words for name, x in self._expected.items() if (words := self._difference(name, found.get(name), x))]
        if here := self._on_any_rank(wrong):
            culprit = self._first_stage(stages)
            kind = f"{culprit} ({type(model.get_submodule(culprit)).__name__})" if culprit else type(model).__name__
            raise ConfigError(
                f"check: {here}. The first module to differ is {kind}. If its forward combines features or samples, "
                "build it from layers that can be split. If it counts heads, add it to the plan with DividedCounts"
            )
        if here := self._on_any_rank(_in_words(lambda: self._wrong_gradients(model, outputs))):
            raise ConfigError(
                f"check: {here}, though all outputs are equal. A forward of {type(model).__name__} that combines "
                "samples, or uses a parameter of one of its layers directly, must be built from layers that can be "
                "split"
            )

    def _on_any_rank(self, wrong: list[str]) -> str:
        """Return this rank's first difference; empty if no rank has one."""
        # The serial models or the batches may differ between ranks, so the results of ranks may differ.
        counts = self._mesh.whole.all_gather(torch.tensor([len(wrong)], dtype=torch.int64, device=self._device)).wait()
        differing = [rank for rank, count in enumerate(counts) if int(count)]
        if not differing or wrong:
            return wrong[0] if wrong else ""
        return f"ranks {differing} find a difference, but this rank does not. Start all with one model"

    def _wrong_gradients(self, model: nn.Module, outputs: Mapping[str, Tensor]) -> list[str]:
        """Return the differences of the gradients as text."""
        layers = {name: each for name, each in placed(model).items() if each[0].requires_grad}
        objective = _objective(outputs, self._expected, self._mesh)
        found = _gradients(objective, {name: parameter for name, (parameter, _) in layers.items()})
        largest = max((float(x.abs().max()) for x in self._gradients.values() if x.numel()), default=0.0)
        wrong: list[str] = []
        for name, gradient in found.items():
            whole, expected = layers[name][1].join(gather_blocks(gradient, self._mesh)), self._gradients[name]
            # Gradients that are zero up to rounding are not compared with each other.
            if words := _apart(f"the gradient of {name}", whole, expected, at_least=0.1 * largest):
                wrong.append(words)
        return wrong

    @property
    def _device(self) -> torch.device:
        return next(iter(self._expected.values())).device

    def _difference(self, name: str, found: Tensor | None, expected: Tensor) -> str:
        """Return the difference of an output as text; empty if there is none."""
        if found is None:
            return f"{name} is missing"
        whole = _whole(found, expected, self._mesh)
        if whole.shape != expected.shape:
            return f"{name} has shape {tuple(whole.shape)}, but {tuple(expected.shape)} in the serial model"
        return _apart(name, whole, expected)

    def _first_stage(self, stages: Mapping[tuple[str, int], Tensor]) -> str:
        """Return the first kept module whose output differs; every rank gathers all, since some may find none."""
        first = ""
        for key, expected in self._stages.items():
            if key in stages and self._difference(key[0], stages[key], expected) and not first:
                first = key[0]
        return first


def _run(
    model: nn.Module, arguments: Mapping[str | int, Any], kept: Collection[str]
) -> tuple[dict[str, Tensor], dict[tuple[str, int], Tensor]]:
    """Run the model in evaluation mode; return its outputs, and those of kept modules by name and call."""
    stages: dict[tuple[str, int], Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                stages[name, sum(key[0] == name for key in stages)] = output.detach().clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in kept if name]
    try:
        # With gradients enabled: otherwise torch's encoder layers use a path that reads the weights directly.
        with evaluation_mode(model), torch.enable_grad():
            positional = [x for key, x in arguments.items() if isinstance(key, int)]
            named = {key: x for key, x in arguments.items() if isinstance(key, str)}
            return dict(_tensors("the output", model(*positional, **named))), stages
    finally:
        for handle in handles:
            handle.remove()


def _in_words(work: Callable[[], T]) -> T:
    """Run the split model, and turn its errors into ConfigErrors.

    Raises:
        ConfigError: the model raised an error that is not thinwire's.
    """
    try:
        return work()
    except ThinwireError:
        raise
    except Exception as error:
        raise ConfigError(f"check: the split model cannot compute what the serial model can: {error}") from error


def _objective(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], mesh: Mesh2D | None = None) -> Tensor:
    """Sum all scalar outputs; without any, return a weighted sum of (this rank's block of) the first output."""
    trained = {name: x for name, x in outputs.items() if x.requires_grad}
    scalars = [x for x in trained.values() if not x.dim()]
    if scalars or not trained:
        return torch.stack(scalars).sum() if scalars else torch.zeros((), dtype=torch.float32, device="cpu")
    name, x = next(iter(trained.items()))
    # Different weights, so that errors at different positions do not cancel.
    weights = (
        torch.arange(expected[name].numel(), dtype=torch.float32, device=x.device).cos().view(expected[name].shape)
    )
    if mesh is not None:
        weights = mesh.rows_of(weights)
    if mesh is not None and x.dim() > 1:
        # The last columns may contain padding, which has no weight.
        weights = weights[..., mesh.column * x.shape[-1] :][..., : x.shape[-1]]
        x = x[..., : weights.shape[-1]]
    return (x * weights.to(x.dtype)).sum()


def _gradients(objective: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients by name, zeros for unused parameters; `grad` attributes are unchanged."""
    if not objective.requires_grad:
        return {}
    found = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return {name: gradient.detach() for name, gradient in zip(parameters, found, strict=True)}


def _apart(name: str, whole: Tensor, expected: Tensor, *, at_least: float = 0.0) -> str:
    """Return the difference from the serial tensor as text; empty up to the root of the precision.

    Args:
        name: the name of the tensor.
        whole: the tensor of the split model.
        expected: the tensor of the serial model.
        at_least: the reference size for the precision; the largest value if that is larger.
    """
    apart = torch.where(whole == expected, 0, (whole - expected).abs()).double().flatten().nan_to_num(torch.inf)
    tolerance = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-6)
    at, limit = int(apart.argmax()), tolerance * max(float(expected.abs().max()), at_least)
    if float(apart[at]) <= limit:
        return ""
    place = ""
    if expected.dim():
        index = torch.unravel_index(torch.tensor(at, dtype=torch.int64, device="cpu"), expected.shape)
        place = f" at {tuple(map(int, index))}"
    return (
        f"{name}{place} is {float(whole.flatten()[at]):.6g}, but {float(expected.flatten()[at]):.6g} in the serial "
        f"model, a difference above {limit:.2g}"
    )


def _arguments(batch: Batch) -> dict[str | int, Any]:
    if isinstance(batch, Mapping):
        return {**batch}
    return {**dict(enumerate((batch,) if isinstance(batch, Tensor) else batch))}


def _share(key: str | int, x: Any, mesh: Mesh2D, samples: int) -> Any:
    """Return this rank's part of an argument: rows of samples, and columns of features except for labels."""
    if not isinstance(x, Tensor) or not x.dim() or len(x) != samples:
        return x
    own = mesh.rows_of(x)
    return mesh.columns_of(own) if x.is_floating_point() and x.dim() > 1 and key != "labels" else own


def _tensors(name: str, output: Any) -> Generator[tuple[str, Tensor], None, None]:
    """Yield the floating-point tensors of an output, with names."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in cast("Mapping[Any, Any]", output).items():
            yield from _tensors(f"the output {key!r}", value)
    elif isinstance(output, list | tuple):
        for number, value in enumerate(cast("Sequence[Any]", output)):
            yield from _tensors(f"{name}[{number}]", value)


def _whole(x: Tensor, expected: Tensor, mesh: Mesh2D) -> Tensor:
    """Gather an output of the whole batch; a number is equal everywhere, a vector has one number per sample."""
    if not x.dim():
        return x
    if x.dim() == 1:
        return torch.cat(mesh.along_column.all_gather(x.contiguous()).wait())
    return whole_activation(x, mesh, size=expected.shape[-1] if expected.dim() else None)


def _words(outputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{float(x.flatten()[0]):.6g}" for x in outputs.values() if x.numel()) or "no numbers"
