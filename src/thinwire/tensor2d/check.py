# SPDX-License-Identifier: Apache-2.0
"""The check of a split model: one batch gives what it gave the serial model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tensor2d.collectives import whole_activation
from thinwire.tensor2d.mesh import Mesh2D

Batch = Tensor | Sequence[Any] | Mapping[str, Any]


class Check:
    """The outputs of a serial model, to be compared with those of the same model after it was split.

    Args:
        model: the serial model; it is run once.
        mesh: the ranks.
        batch: what the model is called with, on all ranks: one argument, a tuple of them, or a dict by name.
        kept: names of the modules that will not be replaced; one of these is to blame for a difference.

    Raises:
        ConfigError: a batch without a tensor, one that the rows cannot share, parameters on the meta device, or outputs
            that no mistake could change.
    """

    def __init__(self, model: nn.Module, mesh: Mesh2D, batch: Batch, *, kept: Collection[str]) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError("check: parameters on the meta device have no values to compare; load the model first")
        whole = _arguments(batch)
        first = next((x for x in whole.values() if isinstance(x, Tensor) and x.dim()), None)
        if first is None:
            raise ConfigError(f"check={batch!r}: pass the tensors that the model is called with, with all samples")
        self._mesh, self._kept = mesh, kept
        self._share = {key: _share(x, mesh, len(first)) for key, x in whole.items()}
        self._expected, self._stages = _run(model, whole, kept)
        if not any(
            bool(x.numel()) and bool((x != x.flatten()[0]).any() or not x.dim()) for x in self._expected.values()
        ):
            raise ConfigError(
                f"check: the serial model's outputs are {_words(self._expected)}, all equal, so nothing could be found "
                "wrong; give the model weights that are not zero, and a model that returns numbers"
            )

    def compare(self, model: nn.Module) -> None:
        """Run the split model and compare; a collective call.

        Raises:
            ConfigError: an output differs, on all ranks, with both figures and the first module to differ.
        """
        try:
            found, stages = _run(model, self._share, self._kept)
        except ThinwireError:
            raise
        except Exception as error:
            raise ConfigError(f"check: the split model cannot compute what the serial model can: {error}") from error
        wrong = [words for name, x in self._expected.items() if (words := self._difference(name, found.get(name), x))]
        # The serial models, or the batches, may differ from rank to rank, so each rank may have its own opinion.
        counts = self._mesh.whole.all_gather(torch.tensor([len(wrong)], dtype=torch.int64, device=self._device)).wait()
        differing = [rank for rank, count in enumerate(counts) if int(count)]
        if not differing:
            return
        culprit = self._first_stage(stages)
        here = (
            wrong[0] if wrong else f"ranks {differing} find a difference, this rank does not; start all with one model"
        )
        kind = f"{culprit} ({type(model.get_submodule(culprit)).__name__})" if culprit else type(model).__name__
        raise ConfigError(
            f"check: {here}; the first module to differ is {kind}. If its forward combines features or samples, build "
            "it from layers that can be split; if it counts heads, name it in the plan with DividedCounts"
        )

    @property
    def _device(self) -> torch.device:
        return next(iter(self._expected.values())).device

    def _difference(self, name: str, found: Tensor | None, expected: Tensor) -> str:
        """What is wrong with an output, in words; empty if nothing is."""
        if found is None:
            return f"{name} is missing"
        whole = _whole(found, expected, self._mesh)
        if whole.shape != expected.shape:
            return f"{name} has the shape {tuple(whole.shape)}, in the serial model {tuple(expected.shape)}"
        apart = torch.where(whole == expected, 0, (whole - expected).abs()).double().flatten()
        tolerance = max(torch.finfo(expected.dtype).eps ** 0.5, 1e-6)
        at, limit = int(apart.nan_to_num(torch.inf).argmax()), tolerance * float(expected.abs().max())
        if float(apart[at]) <= limit:
            return ""
        place = ""
        if expected.dim():
            index = torch.unravel_index(torch.tensor(at, dtype=torch.int64, device="cpu"), expected.shape)
            place = f" at {tuple(map(int, index))}"
        return (
            f"{name}{place} is {float(whole.flatten()[at]):.6g}, and {float(expected.flatten()[at]):.6g} in the serial "
            f"model, a difference above {limit:.2g}"
        )

    def _first_stage(self, stages: Mapping[tuple[str, int], Tensor]) -> str:
        """The first kept module whose output differs; every rank gathers all of them, as some may find none."""
        first = ""
        for key, expected in self._stages.items():
            if key in stages and self._difference(key[0], stages[key], expected) and not first:
                first = key[0]
        return first


def _run(
    model: nn.Module, arguments: Mapping[str | int, Any], kept: Collection[str]
) -> tuple[dict[str, Tensor], dict[tuple[str, int], Tensor]]:
    """The model's outputs by name, and those of kept modules by name and number of the call, in evaluation mode."""
    stages: dict[tuple[str, int], Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                stages[name, sum(key[0] == name for key in stages)] = output.detach().clone()

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name)) for name in kept if name]
    try:
        # With gradients: without them torch's encoder layers take another path, which reads the weights themselves.
        with _evaluating(model), torch.enable_grad():
            positional = [x for key, x in arguments.items() if isinstance(key, int)]
            named = {key: x for key, x in arguments.items() if isinstance(key, str)}
            return dict(_tensors("the output", model(*positional, **named))), stages
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None, None, None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _arguments(batch: Batch) -> dict[str | int, Any]:
    if isinstance(batch, Mapping):
        return {**batch}
    return {**dict(enumerate((batch,) if isinstance(batch, Tensor) else batch))}


def _share(x: Any, mesh: Mesh2D, samples: int) -> Any:
    """This rank's part of an argument: rows of samples, and columns of features."""
    if not isinstance(x, Tensor) or not x.dim() or len(x) != samples:
        return x
    own = mesh.rows_of(x)
    return mesh.columns_of(own) if x.is_floating_point() and x.dim() > 1 else own


def _tensors(name: str, output: Any) -> Generator[tuple[str, Tensor], None, None]:
    """The floating-point tensors of an output, with names."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output.detach()
    elif isinstance(output, Mapping):
        for key, value in cast("Mapping[Any, Any]", output).items():
            yield from _tensors(f"the output {key!r}", value)
    elif isinstance(output, list | tuple):
        for number, value in enumerate(cast("Sequence[Any]", output)):
            yield from _tensors(f"{name}[{number}]", value)


def _whole(x: Tensor, expected: Tensor, mesh: Mesh2D) -> Tensor:
    """An output of the whole batch: a number is the same everywhere, a vector is one number per sample."""
    if not x.dim():
        return x
    if x.dim() == 1:
        return torch.cat(mesh.along_column.all_gather(x.contiguous()).wait())
    return whole_activation(x, mesh, size=expected.shape[-1] if expected.dim() else None)


def _words(outputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{float(x.flatten()[0]):.6g}" for x in outputs.values() if x.numel()) or "no numbers"
