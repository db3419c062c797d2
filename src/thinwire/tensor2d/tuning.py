"""The number of panels of every product of a model, from how fast the machine talks and multiplies."""

from __future__ import annotations

from math import inf

from torch import nn

from thinwire.tensor2d.costs import panels_held, product_elements
from thinwire.tensor2d.linear import Linear2D
from thinwire.tensor2d.panels import Pace, Panels, choose_panels


def choose_panels_(
    model: nn.Module, pace: Pace, *, tokens: int, limit_nbytes: float = inf, element_size: int = 4
) -> dict[str, Panels]:
    """Give every linear layer on a mesh the number of panels that is fastest within a limit; returns them by name.

    One panel gathers each operand in one message, which is best where messages are slow to start or arithmetic is
    short beside them; more of them hide the wire behind arithmetic and hold less. Ranks must choose alike: give all of
    them the same pace, such as `measure_pace(mesh.whole)`.

    Args:
        model: that `parallelize_2d` laid out.
        pace: of the machine.
        tokens: of the whole batch.
        limit_nbytes: what the travelling operands of one product may occupy.
        element_size: bytes of an activation and of a weight.

    Raises:
        ConfigError: not even the narrowest panels of a layer fit.
    """
    chosen: dict[str, Panels] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear2D):
            layer.panels = chosen[name] = _fastest(layer, pace, tokens, limit_nbytes, element_size)
    return chosen


def _fastest(layer: Linear2D, pace: Pace, tokens: int, limit_nbytes: float, element_size: int) -> Panels:
    inputs, outputs, mesh = layer.in_features, layer.out_features, layer.mesh
    shape = tokens, inputs, outputs, mesh.rows, mesh.columns
    return choose_panels(
        nbytes=element_size * product_elements(*shape, layout=layer.layout),
        flops=2.0 * tokens * inputs * outputs / (mesh.rows * mesh.columns),
        gathered_nbytes=element_size * panels_held(*shape, count=1, layout=layer.layout),
        limit_nbytes=limit_nbytes,
        width=max(1, (inputs if layer.layout == "AB" else outputs) // mesh.slices),
        pace=pace,
    )
