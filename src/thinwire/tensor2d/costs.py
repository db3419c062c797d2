r"""What a transformer layer moves and holds, in elements, for any r x c and for one-dimensional tensor parallelism.

T is the number of tokens of a batch, h the hidden size, f = 4 h the inner size of the feed-forward part, p = r c. Every
scheme multiplies equally much. Figures are per rank, and per layer unless they say otherwise; collectives count as a
bandwidth-optimal algorithm's.

Costs of one-dimensional tensor parallelism after Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, and Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198; of the two-dimensional
one after Xu et al., 2021, arXiv:2104.05343.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from thinwire.errors import ConfigError
from thinwire.validation import check_kinds

Direction = Literal["forward", "backward", "both"]
Scheme = Literal["1d", "1d+sequence", "2d"]


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


def backward_elements(
    tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, layout: str = "auto"
) -> float:
    """Elements that a rank sends in the two backward products of a linear layer, for its input and for its weight.

    In the storage "ABT" both need the output's gradient from along the row, and one gather serves them: T out
    activations fewer than twice `product_elements`.

    Args:
        tokens: of the whole batch.
        inputs: of the linear layer.
        outputs: of the linear layer.
        rows: of the mesh.
        columns: of the mesh.
        layout: "AB", "ABT", or "auto" for the better of them forward.
    """
    shared = layout == "ABT" or (layout == "auto" and inputs > outputs)
    saved = tokens * outputs * (columns - 1) / (rows * columns) if shared else 0.0
    return 2 * product_elements(tokens, inputs, outputs, rows, columns, layout=layout) - saved


def layer_elements(layer: Layer, direction: Direction = "both", *, layout: str = "auto") -> float:
    """Elements that a rank sends in the four linear layers; forward (4 T h (c - 1) + 12 h^2 (r - 1)) / p with f = 4 h.

    `layout="AB"` is the paper's, with 7 T h in place of 4 T h. The backward pass moves twice the forward's, less T h
    that one gather saves. What else a layer says, about its norms, is `norm_elements`; the sum of vectors' gradients
    is `vector_elements`.
    """
    mesh = layer.rows, layer.columns
    forward = sum(product_elements(layer.tokens, *sizes, *mesh, layout=layout) for sizes in layer.linear_sizes)
    backward = sum(backward_elements(layer.tokens, *sizes, *mesh, layout=layout) for sizes in layer.linear_sizes)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


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


def one_dimensional_elements(
    layer: Layer, direction: Direction = "both", *, sequence_parallel: bool = False, keeps_gathered: bool = False
) -> float:
    """The same for tensor parallelism over p ranks: 4 T h (p - 1) / p in each direction.

    With the sequence split between blocks sums become a gather and a scatter of equal bytes, and the backward pass
    gathers the two layer inputs once more. An implementation that keeps them whole instead (torch's does) sends no
    more than without the split.
    """
    p, volume = layer.ranks, layer.tokens * layer.hidden
    once = 4 * volume * (p - 1) / p
    again = 2 * volume * (p - 1) / p if sequence_parallel and not keeps_gathered else 0.0
    return {"forward": once, "backward": once + again, "both": 2 * once + again}[direction]


def parameters_held(layer: Layer) -> float:
    """Elements of parameters that a rank holds: 12 h^2 / p + 13 h / c with f = 4 h."""
    return sum(inputs * outputs for inputs, outputs in layer.linear_sizes) / layer.ranks + vectors_held(layer)


def one_dimensional_parameters_held(layer: Layer) -> float:
    """The same in one dimension, with norms and the biases of sums whole on every rank: 12 h^2 / p + 7 h / p + 6 h."""
    (h, wide), f = layer.linear_sizes[0], layer.linear_sizes[2][1]
    weights = sum(inputs * outputs for inputs, outputs in layer.linear_sizes)
    return (weights + wide + f) / layer.ranks + 6 * h


def checkpoints_held(layer: Layer, *, scheme: Scheme = "2d") -> float:
    """Elements of a layer's input that a rank keeps for the backward pass: T h / p, or T h without a split sequence."""
    return layer.tokens * layer.hidden / (1 if scheme == "1d" else layer.ranks)


def activations_held(layer: Layer, heads: int, *, scheme: Scheme = "2d") -> float:
    """Elements that a layer with GELU and fused attention keeps for its backward pass, without checkpoints.

    With V = T h: 16 V / p in two dimensions; 4 V + 12 V / p in one; 2 V + 14 V / p with a split sequence, where the
    gathered inputs of linear layers are kept. Beside it are statistics of norms and attention.
    """
    whole, part = float(layer.tokens * layer.hidden), layer.tokens * layer.hidden / layer.ranks
    attention = layer.tokens * heads / layer.ranks
    if scheme == "1d":
        return 4 * whole + 12 * part + 4 * layer.tokens + attention
    if scheme == "1d+sequence":
        return 2 * whole + 14 * part + 4 * layer.tokens / layer.ranks + attention
    return 16 * part + 4 * layer.tokens / layer.rows + attention


def passing_held(layer: Layer, *, scheme: Scheme = "2d") -> float:
    """The most elements that come and go while the last of several layers is worked on, with one panel per product.

    In one dimension these are a partial sum, its copy on the wire and what is made of them. In two it is the most of
    three moments: partial sums under way in the last forward product; gradients, what was gathered and partial sums in
    the backward products of the last linear layer; and of the one before it.
    """
    whole, part = float(layer.tokens * layer.hidden), layer.tokens * layer.hidden / layer.ranks
    if scheme == "1d":
        return 4 * whole
    if scheme == "1d+sequence":
        return 2 * whole + 2 * part
    r, c = layer.rows, layer.columns
    weight = layer.hidden * layer.linear_sizes[2][1] / layer.ranks
    gathered_weight, gathered = (r * weight if r > 1 else 0.0), (c * part if c > 1 else 0.0)
    down, across = (3 if r > 1 else 1) * r * weight, (3 if c > 1 else 1) * c * part
    forward = 3 * part + gathered_weight + across
    last = 5 * part + gathered + gathered_weight + weight + down
    before = -2 * part + gathered_weight + 2 * gathered + across + 2 * weight
    return max(forward, last, before)


def step_peak(
    layer: Layer, layers: int, heads: int, *, scheme: Scheme = "2d", copies: int = 2, ends: bool = True
) -> float:
    """The most elements a rank holds in a training step of several layers, whose gradients are born in it.

    The most is reached where the forward pass turns: all activations are kept, no gradient of a weight is there yet.

    Args:
        layer: one of them, and the batch.
        layers: how many.
        heads: of attention.
        scheme: two dimensions, or one as torch has it.
        copies: parameters and the optimizer's states of their size; 2 is SGD with momentum.
        ends: count the stack's input and target too.
    """
    held = parameters_held(layer) if scheme == "2d" else one_dimensional_parameters_held(layer)
    volume = layer.tokens * layer.hidden
    end = {"1d": float(volume), "1d+sequence": volume / layer.ranks, "2d": 2 * volume / layer.ranks}[scheme]
    kept = activations_held(layer, heads, scheme=scheme)
    return layers * (copies * held + kept) + passing_held(layer, scheme=scheme) + (end if ends else 0.0)


def most_tokens(
    layer: Layer, layers: int, heads: int, limit_nbytes: float, *, scheme: Scheme = "2d", element_size: int = 4
) -> int:
    """The largest batch, in tokens, whose step fits a limit; `layer.tokens` does not count. 0 where none does."""

    def fits(tokens: int) -> bool:
        return element_size * step_peak(replace(layer, tokens=tokens), layers, heads, scheme=scheme) <= limit_nbytes

    top = 1
    while fits(top):
        top *= 2
    low = top // 2
    while top - low > 1:
        middle = (low + top) // 2
        low, top = (middle, top) if fits(middle) else (low, middle)
    return low


def panels_held(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, count: int, layout: str) -> float:
    """The most elements of travelling operands and partial results that a rank has at once in a forward product.

    One panel where it is gathered in one message, two of each with more: one that is multiplied, one that travels.
    """
    weight = inputs * outputs / columns
    other = tokens / rows * (inputs if layout == "AB" else outputs)
    return (weight + other) * min(1, 2 / count)


def best_rows(layer: Layer) -> float:
    r"""$\sqrt{T p / 3 h}$ within [1, p]: the rows that move least forward, between cut columns and gathered weights."""
    return min(max(sqrt(layer.tokens * layer.ranks / (3 * layer.hidden)), 1.0), float(layer.ranks))
