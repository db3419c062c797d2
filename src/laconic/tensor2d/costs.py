r"""What a transformer layer moves and holds, in elements, for any r x c and for one-dimensional tensor parallelism.

T is the number of tokens of a batch, h the hidden size, f = 4 h the inner size of the feed-forward part, p = r c. Every
scheme multiplies equally much. Figures are per rank, and per layer unless they say otherwise; collectives count as a
bandwidth-optimal algorithm's.

Costs of one-dimensional tensor parallelism after Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, and Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198; of the two-dimensional
one after Xu et al., 2021, arXiv:2104.05343.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from laconic.errors import ConfigError
from laconic.kinds import check_kinds

Direction = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class Layer:
    """A pre-norm transformer layer and the batch that goes through it.

    Args:
        tokens: of the whole batch, T.
        hidden: size of the stream, h.
        inner: size of the feed-forward part, f; 0 is four times the stream.
        rows: of the mesh, r.
        columns: of the mesh, c.
    """

    tokens: int
    hidden: int
    rows: int
    columns: int
    inner: int = 0

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if min(self.tokens, self.hidden, self.rows, self.columns) < 1 or self.inner < 0:
            raise ConfigError(f"{self}: tokens, hidden, rows and columns must be at least 1, and inner not negative")

    @property
    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the four linear layers: projection, output, wide, narrow."""
        h, f = self.hidden, self.inner or 4 * self.hidden
        return (h, 3 * h), (h, h), (h, f), (f, h)

    @property
    def ranks(self) -> int:
        """Of the mesh, p."""
        return self.rows * self.columns


def product_elements(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, layout: str = "auto") -> float:
    """Elements that a rank sends in one product of a linear layer, forward or either backward one.

    Args:
        tokens: of the whole batch.
        inputs: of the linear layer.
        outputs: of the linear layer.
        rows: of the mesh.
        columns: of the mesh.
        layout: "AB", "ABT", or "auto" for the better of them.
    """
    side = {"AB": inputs, "ABT": outputs, "auto": min(inputs, outputs)}[layout]
    return tokens * side * (columns - 1) / (rows * columns) + inputs * outputs * (rows - 1) / (rows * columns)


def layer_elements(layer: Layer, direction: Direction = "both", *, layout: str = "auto") -> float:
    """Elements that a rank sends in the four linear layers; forward (4 T h (c - 1) + 12 h^2 (r - 1)) / p with f = 4 h.

    `layout="AB"` is the paper's, with 7 T h in place of 4 T h. The backward pass moves twice the forward's. What else a
    layer says, about its norms, is `norm_elements`; the sum of vectors' gradients is `vector_elements`.
    """
    once = sum(
        product_elements(layer.tokens, *sizes, layer.rows, layer.columns, layout=layout) for sizes in layer.linear_sizes
    )
    return once * _times(direction)


def norm_elements(layer: Layer, direction: Direction = "both", *, kind: str = "layer") -> float:
    """Elements (fp32 at least) that a rank sends in the two norms of a layer.

    A layer norm gathers two numbers per token forward and sums two backward; an RMS norm sums one each way.
    """
    own, others = layer.tokens / layer.rows, layer.columns - 1
    summed = 2 * others / layer.columns * own
    forward, backward = (2 * others * own, 2 * summed) if kind == "layer" else (summed, summed)
    return 2 * {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def vector_elements(layer: Layer) -> float:
    """Elements that a rank sends in each backward pass for a layer's biases and gains, of which it holds 13 h / c."""
    return vectors_held(layer) * 2 * (layer.rows - 1) / layer.rows


def vectors_held(layer: Layer) -> float:
    """Elements of biases and gains that a rank holds: four of the norms' and one for each linear output."""
    return (4 * layer.hidden + sum(outputs for _, outputs in layer.linear_sizes)) / layer.columns


def embedding_elements(tokens: int, vocabulary: int, hidden: int, rows: int, columns: int, *, algorithm: str) -> float:
    """Elements that a rank sends forward, and again backward, to look tokens up; ids are counted by `id_elements`."""
    travelling = vocabulary if algorithm == "table" else tokens
    return travelling * hidden / columns * (rows - 1) / rows


def id_elements(tokens: int, rows: int) -> float:
    """Ids of four bytes that a rank sends forward, and again backward, where tokens travel to the table."""
    return tokens / rows * (rows - 1)


def head_elements(tokens: int, vocabulary: int, hidden: int, rows: int, columns: int, *, tied: bool) -> float:
    """Elements that a rank off a square mesh's diagonal sends forward to make logits; a tied table is swapped too."""
    product = product_elements(tokens, hidden, vocabulary, rows, columns, layout="AB")
    return product + (vocabulary * hidden / (rows * columns) if tied else 0)


def loss_elements(tokens: int, rows: int, columns: int) -> float:
    """Elements (fp32 at least) that a rank sends along its row for the cross-entropy: three numbers a token."""
    return 3 * tokens / rows * (columns - 1)


def one_dimensional_elements(layer: Layer, direction: Direction = "both", *, sequence_parallel: bool = False) -> float:
    """The same for tensor parallelism over p ranks: 4 T h (p - 1) / p in each direction.

    With the sequence split between blocks sums become a gather and a scatter of equal bytes, and the backward pass
    gathers the two layer inputs once more.
    """
    p, volume = layer.ranks, layer.tokens * layer.hidden
    once = 4 * volume * (p - 1) / p
    again = 2 * volume * (p - 1) / p if sequence_parallel else 0.0
    return {"forward": once, "backward": once + again, "both": 2 * once + again}[direction]


def parameters_held(layer: Layer) -> float:
    """Elements of parameters that a rank holds: 12 h^2 / p + 13 h / c with f = 4 h."""
    return sum(inputs * outputs for inputs, outputs in layer.linear_sizes) / layer.ranks + vectors_held(layer)


def checkpoints_held(layer: Layer, *, scheme: Literal["2d", "1d", "1d+sequence"] = "2d") -> float:
    """Elements of a layer's input that a rank keeps for the backward pass: T h / p, or T h without a split sequence."""
    return layer.tokens * layer.hidden / (1 if scheme == "1d" else layer.ranks)


def panels_held(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, count: int, layout: str) -> float:
    """The most elements of travelling operands and partial results that a rank has at once in a forward product.

    One panel where it is gathered in one message, two of each with more: one that is multiplied, one that travels.
    """
    weight = inputs * outputs / columns
    other = tokens / rows * (inputs if layout == "AB" else outputs)
    return (weight + other) * min(1, 2 / count)


def best_rows(layer: Layer) -> float:
    r"""$\sqrt{T p / 3 h}$ within [1, p]: the rows that move least, between cut columns and gathered weights."""
    return min(max(sqrt(layer.tokens * layer.ranks / (3 * layer.hidden)), 1.0), float(layer.ranks))


def _times(direction: Direction) -> int:
    return {"forward": 1, "backward": 2, "both": 3}[direction]
