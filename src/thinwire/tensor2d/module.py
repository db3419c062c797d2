"""What all layers on a mesh have in common: blocks of parameters, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.tensor2d.exchanges import shared_down
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.placement import Placement


class Module2D(nn.Module):
    """A layer of which this rank holds blocks.

    Parameters have the names of the serial layer's, and `placements` says which part of those they are.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh2D) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements: dict[str, Placement] = {}
        self._aliases: dict[str, Tensor] = {}

    def place_(self, name: str, placement: Placement, whole: Tensor, *, train: bool = True) -> None:
        """Make the parameter `name` from this rank's block of `whole`."""
        with torch.no_grad():
            block = placement.cut(whole.detach(), self.mesh.place)
        self.register_parameter(name, nn.Parameter(block, requires_grad=train and whole.requires_grad))
        self.placements[name] = placement

    def shared(self, name: str) -> Tensor | None:
        """A parameter that all rows hold alike, with gradients that are summed over them; None where there is none."""
        if name in self._aliases:
            return self._aliases[name]
        parameter = getattr(self, name)
        return parameter if parameter is None else shared_down([parameter], self.mesh)[0]


class SharedGradients:
    """One message for the gradients of all parameters that rows hold alike, at the end of each backward pass.

    Installed on a model, it hands its layers aliases of their parameters before each forward pass. Layers that run
    outside of one send a message for each parameter, with the same result.

    Args:
        model: whose forward pass is the whole pass.
        mesh: the ranks.
    """

    def __init__(self, model: nn.Module, mesh: Mesh2D) -> None:
        self._mesh = mesh
        model.register_forward_pre_hook(self._hand_out)
        model.register_forward_hook(self._take_back, always_call=True)

    def _hand_out(self, model: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for dtype in dict.fromkeys(p.dtype for _, _, p in self._found(model)):
            found = [each for each in self._found(model) if each[2].dtype == dtype]
            aliases = shared_down([parameter for _, _, parameter in found], self._mesh)
            for (layer, name, _), alias in zip(found, aliases, strict=True):
                layer._aliases[name] = alias  # pyright: ignore[reportPrivateUsage]

    def _take_back(self, model: nn.Module, *_: Any) -> None:
        for layer in layers_of(model):
            layer._aliases.clear()  # pyright: ignore[reportPrivateUsage]

    def _found(self, model: nn.Module) -> list[tuple[Module2D, str, Tensor]]:
        return [
            (layer, name, parameter)
            for layer in layers_of(model)
            for name, parameter in layer.named_parameters(recurse=False)
            if layer.placements[name].replicated and parameter.requires_grad
        ]


def layers_of(model: nn.Module) -> Iterable[Module2D]:
    """The layers on a mesh, in the model's order."""
    return (module for module in model.modules() if isinstance(module, Module2D))


def placed(model: nn.Module) -> dict[str, tuple[Tensor, Placement]]:
    """Every parameter by its name, with its placement; a shared one once, by its first name.

    Raises:
        KeyError: a parameter that belongs to no layer on a mesh.
    """
    known = {
        f"{prefix}.{name}".lstrip("."): placement
        for prefix, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, Module2D)
        for name, placement in layer.placements.items()
    }
    return {name: (parameter, known[name]) for name, parameter in model.named_parameters()}


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype of an autocast region, and as they are outside of one."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


Make = Callable[[str, nn.Module, Mesh2D], nn.Module]
