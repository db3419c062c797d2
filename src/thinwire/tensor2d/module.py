# SPDX-License-Identifier: Apache-2.0
"""The base class of layers on a mesh: blocks of parameters and their placements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.tensor2d.collectives import sum_gradients_over_rows
from thinwire.tensor2d.gradient import mark_gradients_
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.placement import Placement


class Module2D(nn.Module):
    """A layer on a mesh; this rank holds blocks of its parameters.

    Parameters have the same names as in the serial layer; `placements` maps each name to the block
    that this rank holds.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh2D) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements: dict[str, Placement] = {}
        self._aliases: dict[str, Tensor] = {}

    def place_(self, name: str, placement: Placement, whole: Tensor | None) -> None:
        """Register this rank's block of `whole` as the parameter `name`; None if the layer has none."""
        if whole is None:
            self.register_parameter(name, None)
            return
        with torch.no_grad():
            block = placement.cut(whole.detach(), self.mesh.place)
        parameter = nn.Parameter(block, requires_grad=whole.requires_grad)
        self.register_parameter(name, parameter)
        self.placements[name] = placement
        mark_gradients_(parameter, placement, self.mesh)

    def shared(self, name: str) -> Tensor | None:
        """Return a parameter replicated over the rows, with a summed gradient; None if the layer has none."""
        if name in self._aliases:
            return self._aliases[name]
        parameter = getattr(self, name)
        return parameter if parameter is None else sum_gradients_over_rows([parameter], self.mesh)[0]


class SharedGradients:
    """Sum the gradients of all parameters replicated over the rows, in one message per backward pass.

    Hooks on the model give its layers aliases of these parameters for each forward pass; the aliases share one backward
    node. A layer that runs outside the model's forward sends a message for each parameter, with the same result.

    Args:
        model: the whole model, whose `forward` is called.
        mesh: the ranks.
    """

    def __init__(self, model: nn.Module, mesh: Mesh2D) -> None:
        self._mesh = mesh
        # Also after an exception: old aliases would belong to a graph that no longer exists.
        after = model.register_forward_hook(self._clear_aliases, always_call=True)
        self._handles = (model.register_forward_pre_hook(self._set_aliases), after)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _set_aliases(self, model: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        replicated = [
            (layer, name, parameter)
            for layer in layers_of(model)
            for name, parameter in layer.named_parameters(recurse=False)
            if layer.placements[name].replicated and parameter.requires_grad
        ]
        # A message has one dtype; a bf16 model may keep norms in fp32.
        for dtype in dict.fromkeys(parameter.dtype for _, _, parameter in replicated):
            alike = [each for each in replicated if each[2].dtype == dtype]
            aliases = sum_gradients_over_rows([parameter for _, _, parameter in alike], self._mesh)
            for (layer, name, _), alias in zip(alike, aliases, strict=True):
                layer._aliases[name] = alias  # pyright: ignore[reportPrivateUsage]

    def _clear_aliases(self, model: nn.Module, *_: Any) -> None:
        for layer in layers_of(model):
            layer._aliases.clear()  # pyright: ignore[reportPrivateUsage]


def layers_of(model: nn.Module) -> Iterable[Module2D]:
    """Return the layers on a mesh, in the model's order."""
    return (module for module in model.modules() if isinstance(module, Module2D))


def placed(model: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    """Return all parameters by name, with placements; a tied parameter once, under its first name.

    Raises:
        KeyError: a parameter does not belong to a `Module2D`.
    """
    # With duplicates: the first name of a tied parameter may belong to either of its modules.
    known = {
        f"{prefix}.{name}".lstrip("."): placement
        for prefix, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, Module2D)
        for name, placement in layer.placements.items()
    }
    return {name: (parameter, known[name]) for name, parameter in model.named_parameters()}


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype of the active autocast region; unchanged outside one."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)
