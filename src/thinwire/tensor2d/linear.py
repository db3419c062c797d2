# SPDX-License-Identifier: Apache-2.0
"""Linear layers in the layout with the fewest bytes, and output heads."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.tensor2d.collectives import gather_over_columns, transpose_blocks
from thinwire.tensor2d.embedding import Embedding2D
from thinwire.tensor2d.mesh import Mesh2D, check_divides
from thinwire.tensor2d.module import Module2D, under_autocast
from thinwire.tensor2d.panels import Panels
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import multiply_ab, multiply_abt

Layout = Literal["auto", "AB", "ABT"]


class Linear2D(Module2D):
    r"""$y = x W^T + b$ on activations; rank (i, j) holds [b / r, ..., in / c].

    "AB" stores W as [in / r, out / c] and sends inputs; "ABT" stores it as [out / r, in / c] and sends partial outputs.
    In the better layout each of the three products of a step sends T min(in, out) activations, where T is the number
    of tokens. The bias is split over the columns and replicated over the rows.

    Args:
        weight: the whole weight, [out, in], or [in, out] with `stored="in,out"`.
        bias: the whole bias, [out], or None.
        mesh: the ranks.
        layout: "auto" uses "AB" if in <= out.
        sections: sizes of parts of the output that are split separately (queries, keys and values, or gate and value),
            so that each column has its share of every part.
        stored: the dimension order of the serial layer's weight; GPT-2's `Conv1D` has "in,out".
        padded: the number of outputs after padding, if the mesh does not divide it; 0 for no padding.
        head_size: features of one head, to gather the output and keep the heads `heads_kept` in this column; 0 keeps
            this column's share.
        heads_kept: the heads [first, last) of the whole output that this column keeps.
        panels: how operands are sent; None uses the mesh's setting.
        name: name of the layer, for error messages.

    Raises:
        ConfigError: the mesh does not divide a size.
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
        heads_kept: tuple[int, int] = (0, 0),
        panels: Panels | None = None,
        name: str = "Linear2D",
    ) -> None:
        super().__init__(mesh)
        straight = stored == "out,in"
        self.out_features, self.in_features = weight.shape if straight else weight.shape[::-1]
        self.layout = layout if layout != "auto" else "AB" if self.in_features <= self.out_features else "ABT"
        self.panels = panels
        self.sections = sections
        self._head_size, self._heads_kept = head_size, heads_kept
        because = f"the mesh is {mesh.rows}x{mesh.columns}"
        check_divides(self.in_features, mesh.slices, f"{name} with {self.in_features} inputs", because)
        num_outputs = padded or self.out_features
        check_divides(num_outputs, mesh.slices, f"{name} with {num_outputs} outputs", because)
        for size in sections:
            check_divides(size, mesh.columns, f"{name} with sections of {sections} outputs", because)
        if sections and sum(sections) != self.out_features:
            raise ConfigError(f"{name}: sections={sections} must add up to its {self.out_features} outputs")
        outputs = Axis(self.out_features, "columns" if self.layout == "AB" else "rows", sections, padded)
        inputs = Axis(self.in_features, "rows" if self.layout == "AB" else "columns")
        # The products need [in, out] for "AB" and [out, in] for "ABT"; the serial weight may be stored either way.
        axes = (outputs, inputs) if straight else (inputs, outputs)
        self.place_("weight", Placement(axes, transposed=straight == (self.layout == "AB")), weight)
        self.place_("bias", Placement((Axis(self.out_features, "columns", sections, padded),)), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b / r, ..., in / c] to [b / r, ..., out / c]."""
        y = self.project(x, self.shared("bias"))
        if not self._head_size:
            return y
        # Whole heads: this column's share may be less than the heads that its queries need.
        first, last = self._heads_kept
        return gather_over_columns(y, self.mesh)[..., first * self._head_size : last * self._head_size]

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product plus the bias, without gathering heads."""
        rows, weight = under_autocast(x.flatten(0, -2).contiguous(), self.weight)
        multiply = multiply_ab if self.layout == "AB" else multiply_abt
        y = multiply(rows, weight, self.mesh, self.panels)
        return (y if bias is None else y + bias.to(y.dtype)).unflatten(0, x.shape[:-1])

    def extra_repr(self) -> str:
        """Return the whole layer's sizes and the layout."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, layout={self.layout}"


class TiedHead2D(Module2D):
    """Compute logits [b / r, s, v / c] from an embedding's table.

    A product with the stored table, [v / r, h / c], would send T v activations. Therefore the table is first transposed
    over the mesh: as a weight [h / r, v / c] it only sends T h.

    Args:
        embedding: the layer whose `weight` is the table.
        bias: the whole bias, [v], or None.
        mesh: the ranks.
        panels: how operands are sent; None uses the mesh's setting.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, embedding: Embedding2D, bias: Tensor | None, mesh: Mesh2D, *, panels: Panels | None = None
    ) -> None:
        super().__init__(mesh)
        self.panels = panels
        # The same parameter object, so that optimizers and norms see one tied parameter.
        self.weight = embedding.weight
        self.placements["weight"] = placement = embedding.placements["weight"]
        rows = placement.axes[0]
        self.place_("bias", Placement((Axis(rows.size, "columns", padded=rows.padded),)), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b / r, ..., h / c] to [b / r, ..., v / c]."""
        rows, table = under_autocast(x.flatten(0, -2).contiguous(), self.weight)
        y = multiply_ab(rows, transpose_blocks(table, self.mesh), self.mesh, self.panels)
        bias = self.shared("bias")
        return (y if bias is None else y + bias.to(y.dtype)).unflatten(0, x.shape[:-1])
