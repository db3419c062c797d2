"""Linear layers, in the storage that moves least, and heads that read logits off the stream."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tensor2d.embedding import Embedding2D
from thinwire.tensor2d.exchanges import gathered_across, transposed
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D, under_autocast
from thinwire.tensor2d.panels import Panels
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import multiply_ab, multiply_abt

Layout = Literal["auto", "AB", "ABT"]


class Linear2D(Module2D):
    r"""$y = x W^T + b$ on activations of which rank (i, j) holds [b / r, ..., in / c].

    "AB" stores W as [in / r, out / c] and moves the input; "ABT" stores it as [out / r, in / c] and moves partial
    outputs. Every one of the three products of a step moves T min(in, out) activations in the better of them, where T
    is the number of tokens. The bias is a part for each column, alike in all rows.

    Args:
        weight: the whole weight, [out, in], or [in, out] with `stored="in,out"`.
        bias: the whole bias, [out], or None.
        mesh: the ranks.
        layout: "auto" takes "AB" where in <= out.
        sections: sizes of parts of the output that are cut one by one: queries, keys and values, or gate and value.
        stored: how the serial layer keeps its weight; GPT-2's keep it the other way round.
        padded: outputs after padding, where the serial layer's number of them cannot be cut; 0 is none.
        head_size: features of one head, where every column shall have the heads `kept` of the whole output instead of
            its share of it; 0 is no such thing.
        kept: the heads [first, last) that this column works on.
        panels: how operands travel; the mesh's where None.
        name: of the layer, for messages.

    Raises:
        ConfigError: a size that the mesh cannot cut.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        mesh: Mesh2D,
        *,
        layout: Layout = "auto",
        sections: tuple[int, ...] = (),
        stored: Literal["out,in", "in,out"] = "out,in",
        padded: int = 0,
        head_size: int = 0,
        kept: tuple[int, int] = (0, 0),
        panels: Panels | None = None,
        name: str = "Linear2D",
    ) -> None:
        super().__init__(mesh)
        straight = stored == "out,in"
        self.out_features, self.in_features = weight.shape if straight else weight.shape[::-1]
        self.layout = choose_layout(self.in_features, self.out_features) if layout == "auto" else layout
        self.panels = panels
        self.sections = sections
        self._head_size, self._kept = head_size, kept
        self._check(name, sections, padded)
        outputs = Axis(self.out_features, "columns" if self.layout == "AB" else "rows", sections, padded)
        inputs = Axis(self.in_features, "rows" if self.layout == "AB" else "columns")
        axes = (outputs, inputs) if straight else (inputs, outputs)
        self.place_("weight", Placement(axes, transposed=straight == (self.layout == "AB")), weight)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.place_("bias", Placement((Axis(self.out_features, "columns", sections, padded),)), bias)

    def _check(self, name: str, sections: tuple[int, ...], padded: int) -> None:
        because = f"the mesh is {self.mesh.rows}x{self.mesh.columns}"
        check_divides(self.in_features, self.mesh.slices, f"{name} with {self.in_features} inputs", because)
        outputs = padded or self.out_features
        check_divides(outputs, self.mesh.slices, f"{name} with {outputs} outputs", because)
        for size in sections:
            check_divides(size, self.mesh.columns, f"{name} with sections of {sections} outputs", because)
        if sections and sum(sections) != self.out_features:
            raise ConfigError(f"{name}: sections={sections} must add up to its {self.out_features} outputs")

    def forward(self, x: Tensor) -> Tensor:
        """[b / r, ..., in / c] to [b / r, ..., out / c]."""
        y = self.project(x, self.shared("bias"))
        if not self._head_size:
            return y
        first, last = self._kept
        return gathered_across(y, self.mesh)[..., first * self._head_size : last * self._head_size]

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product and the bias alone."""
        rows, weight = under_autocast(x.flatten(0, -2).contiguous(), self.weight)
        multiply = multiply_ab if self.layout == "AB" else multiply_abt
        y = multiply(rows, weight, self.mesh, self.panels)
        return (y if bias is None else y + bias.to(y.dtype)).unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        """Sizes of the whole and the layout."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, layout={self.layout}"


class TiedHead2D(Module2D):
    """Logits [b / r, s, v / c] from an embedding's own table, whose transpose is made on the way.

    A table [v / r, h / c] would have to move T v activations. Exchanged across the diagonal it is a weight
    [h / r, v / c] that moves T h of them.

    Args:
        embedding: the layer whose `weight` is the table.
        bias: the whole bias, [v], or None.
        mesh: the ranks.
        panels: how operands travel; the mesh's where None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, embedding: Embedding2D, bias: Tensor | None, mesh: Mesh2D, *, panels: Panels | None = None
    ) -> None:
        super().__init__(mesh)
        self.panels = panels
        self.weight = embedding.weight
        self.placements["weight"] = placement = embedding.placements["weight"]
        rows = placement.axes[0]
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.place_("bias", Placement((Axis(rows.size, "columns", padded=rows.padded),)), bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b / r, ..., h / c] to [b / r, ..., v / c]."""
        rows, table = under_autocast(x.flatten(0, -2).contiguous(), self.weight)
        y = multiply_ab(rows, transposed(table, self.mesh), self.mesh, self.panels)
        bias = self.shared("bias")
        return (y if bias is None else y + bias.to(y.dtype)).unflatten(0, x.shape[:-1])


def choose_layout(inputs: int, outputs: int) -> Literal["AB", "ABT"]:
    """The storage in which a linear layer moves fewer activations."""
    return "AB" if inputs <= outputs else "ABT"


def linear_2d(layer: nn.Linear, mesh: Mesh2D, *, layout: Layout = "auto") -> Linear2D:
    """The blocks of a serial linear layer."""
    bias: torch.Tensor | None = layer.bias
    return Linear2D(layer.weight, bias, mesh, layout=layout)
