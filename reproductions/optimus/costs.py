# SPDX-License-Identifier: Apache-2.0
r"""Count the elements that a transformer layer sends and holds, on any r x c mesh and in one dimension.

T is the number of tokens of a batch, h the hidden size, f = 4 h the inner size of the feed-forward part, p = r c. All
schemes use the same number of multiplications. Counts are per rank, and per layer unless stated otherwise; collectives
are counted as bandwidth-optimal algorithms send them.

Costs of one-dimensional tensor parallelism follow Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, and Korthikanti
et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198; those of two dimensions
follow Xu et al., 2021, arXiv:2104.05343.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from thinwire.core.validation import check_fields
from thinwire.errors import ConfigError

Direction = Literal["forward", "backward", "both"]
Scheme = Literal["1d", "1d+sequence", "2d"]


@dataclass(frozen=True)
class Layer:
    """A pre-norm transformer layer, its batch and its mesh.

    Args:
        tokens: tokens of the whole batch, T.
        hidden: hidden size, h.
        rows: rows of the mesh, r.
        columns: columns of the mesh, c.
        inner: inner size of the feed-forward part, f; 0 is 4 h.
    """

    tokens: int
    hidden: int
    rows: int
    columns: int
    inner: int = 0

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_fields(self)
        if min(self.tokens, self.hidden, self.rows, self.columns) < 1 or self.inner < 0:
            raise ConfigError(f"{self}: tokens, hidden, rows and columns must be at least 1, and inner not negative")

    @property
    def linear_sizes(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the four linear layers: projection, output, wide, narrow."""
        h, f = self.hidden, self.inner or 4 * self.hidden
        return (h, 3 * h), (h, h), (h, f), (f, h)

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh, p."""
        return self.rows * self.columns


def product_elements(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, layout: str = "auto") -> float:
    """Return the elements that a rank sends in one product of a linear layer, forward or backward.

    Args:
        tokens: tokens of the whole batch.
        inputs: input features of the linear layer.
        outputs: output features of the linear layer.
        rows: rows of the mesh.
        columns: columns of the mesh.
        layout: "AB", "ABT", or "auto" for the one that sends less.
    """
    # Activations of one side are sent across columns, gathered or as partial sums; the weight across rows.
    side = {"AB": inputs, "ABT": outputs, "auto": min(inputs, outputs)}[layout]
    return tokens * side * (columns - 1) / (rows * columns) + inputs * outputs * (rows - 1) / (rows * columns)


def backward_elements(
    tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, layout: str = "auto"
) -> float:
    """Return the elements that a rank sends in the two backward products of a linear layer.

    In the layout "ABT" both products, for the input and for the weight, need the output's gradient gathered along the
    row, and share one gather: T out activations fewer than twice `product_elements`.

    Args:
        tokens: tokens of the whole batch.
        inputs: input features of the linear layer.
        outputs: output features of the linear layer.
        rows: rows of the mesh.
        columns: columns of the mesh.
        layout: "AB", "ABT", or "auto" for the one that sends less forward.
    """
    shared = layout == "ABT" or (layout == "auto" and inputs > outputs)
    saved = tokens * outputs * (columns - 1) / (rows * columns) if shared else 0.0
    return 2 * product_elements(tokens, inputs, outputs, rows, columns, layout=layout) - saved


def layer_elements(layer: Layer, direction: Direction = "both", *, layout: str = "auto") -> float:
    """Return the elements that a rank sends in the four linear layers.

    Forward these are (4 T h (c - 1) + 12 h^2 (r - 1)) / p with f = 4 h. `layout="AB"` is the paper's, with 7 T h
    instead of 4 T h. The backward pass sends twice as much as the forward pass, minus the T h (c - 1) / p that a shared
    gather saves. `norm_elements` counts norms, `vector_elements` the gradients of biases and gains.
    """
    mesh = layer.rows, layer.columns
    forward = sum(product_elements(layer.tokens, *sizes, *mesh, layout=layout) for sizes in layer.linear_sizes)
    backward = sum(backward_elements(layer.tokens, *sizes, *mesh, layout=layout) for sizes in layer.linear_sizes)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def norm_elements(layer: Layer, direction: Direction = "both", *, kind: str = "layer") -> float:
    """Return the elements (fp32 at least) that a rank sends in the two norms of a layer.

    A layer norm gathers two numbers per token forward and sums two backward; an RMS norm sums one each way.
    """
    # For each element a rank sends c - 1 elements in an all-gather and 2 (c - 1) / c in an all-reduce.
    own, others = layer.tokens / layer.rows, layer.columns - 1
    summed = 2 * others / layer.columns * own
    forward, backward = (2 * others * own, 2 * summed) if kind == "layer" else (summed, summed)
    return 2 * {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def vector_elements(layer: Layer) -> float:
    """Return the elements that a rank sends backward for a layer's biases and gains; it holds 13 h / c."""
    return vectors_held(layer) * 2 * (layer.rows - 1) / layer.rows


def vectors_held(layer: Layer) -> float:
    """Return the elements of biases and gains on a rank: four vectors of norms, and each linear bias."""
    return (4 * layer.hidden + sum(outputs for _, outputs in layer.linear_sizes)) / layer.columns


def embedding_elements(tokens: int, vocabulary: int, hidden: int, rows: int, columns: int, *, algorithm: str) -> float:
    """Return the elements that a rank sends in each direction for an embedding, without ids."""
    sent = vocabulary if algorithm == "table" else tokens
    return sent * hidden / columns * (rows - 1) / rows


def id_elements(tokens: int, rows: int) -> float:
    """Return the 4-byte ids that a rank sends in each direction with the algorithm "tokens"."""
    return tokens / rows * (rows - 1)


def head_elements(tokens: int, vocabulary: int, hidden: int, rows: int, columns: int, *, tied: bool) -> float:
    """Return the elements that a rank sends forward for logits; with `tied`, off a square mesh's diagonal."""
    product = product_elements(tokens, hidden, vocabulary, rows, columns, layout="AB")
    return product + (vocabulary * hidden / (rows * columns) if tied else 0)


def loss_elements(tokens: int, rows: int, columns: int) -> float:
    """Return the elements (fp32 at least) that a rank sends for the cross-entropy: three per token."""
    return 3 * tokens / rows * (columns - 1)


def one_dimensional_elements(
    layer: Layer, direction: Direction = "both", *, sequence_parallel: bool = False, keeps_gathered: bool = False
) -> float:
    """Return the elements sent in one-dimensional tensor parallelism: 4 T h (p - 1) / p per direction.

    Sequence parallelism replaces each all-reduce with an all-gather and a reduce-scatter of the same bytes, and the
    backward pass gathers the two layer inputs once more. An implementation that keeps the gathered inputs instead, like
    torch's, sends no more than without sequence parallelism.
    """
    # Two all-reduces of T h elements in each direction: after attention and after the feed-forward part.
    p, volume = layer.ranks, layer.tokens * layer.hidden
    once = 4 * volume * (p - 1) / p
    again = 2 * volume * (p - 1) / p if sequence_parallel and not keeps_gathered else 0.0
    return {"forward": once, "backward": once + again, "both": 2 * once + again}[direction]


def parameters_held(layer: Layer) -> float:
    """Return the elements of parameters on a rank: 12 h^2 / p + 13 h / c with f = 4 h."""
    return sum(inputs * outputs for inputs, outputs in layer.linear_sizes) / layer.ranks + vectors_held(layer)


def one_dimensional_parameters_held(layer: Layer) -> float:
    """Return the parameters in one dimension, with replicated norms and output biases: 12 h^2 / p + 7 h / p + 6 h."""
    (h, wide), f = layer.linear_sizes[0], layer.linear_sizes[2][1]
    weights = sum(inputs * outputs for inputs, outputs in layer.linear_sizes)
    return (weights + wide + f) / layer.ranks + 6 * h


def checkpoints_held(layer: Layer, *, scheme: Scheme = "2d") -> float:
    """Return the elements of a layer's input kept with checkpointing: T h / p, or T h with scheme "1d"."""
    return layer.tokens * layer.hidden / (1 if scheme == "1d" else layer.ranks)


def activations_held(layer: Layer, heads: int, *, scheme: Scheme = "2d") -> float:
    """Return the elements that a layer keeps for its backward pass, without checkpointing.

    The layer has GELU and fused attention. With V = T h: 16 V / p in two dimensions; 4 V + 12 V / p in one; 2 V + 14 V
    / p with sequence parallelism and kept gathered inputs of linear layers. Statistics of norms and attention are
    added.
    """
    whole, part = float(layer.tokens * layer.hidden), layer.tokens * layer.hidden / layer.ranks
    # Fused attention keeps one number per token and head, a norm two per token.
    attention = layer.tokens * heads / layer.ranks
    if scheme == "1d":
        return 4 * whole + 12 * part + 4 * layer.tokens + attention
    if scheme == "1d+sequence":
        return 2 * whole + 14 * part + 4 * layer.tokens / layer.ranks + attention
    return 16 * part + 4 * layer.tokens / layer.rows + attention


def transient_held(layer: Layer, *, scheme: Scheme = "2d") -> float:
    """Return the peak of temporary elements in the last layer's passes, with one panel per product.

    In one dimension these are a partial sum, its copy in the message, and the result. In two dimensions it is the
    largest of three moments: partial sums in the last forward product; gradients, gathered operands and partial sums
    in the backward products of the last linear layer; and the same for the linear layer before it.
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
    """Return the peak of elements on a rank in a training step of several layers without gradients at first.

    The peak is at the end of the forward pass: all activations are kept, and no weight has a gradient yet.

    Args:
        layer: one layer, and the batch.
        layers: number of layers.
        heads: attention heads.
        scheme: two dimensions, or one dimension as torch implements it.
        copies: tensors of the parameters' size, the parameters included; 2 is SGD with momentum.
        ends: whether to count the input and the target of the first and last layer.
    """
    held = parameters_held(layer) if scheme == "2d" else one_dimensional_parameters_held(layer)
    volume = layer.tokens * layer.hidden
    end = {"1d": float(volume), "1d+sequence": volume / layer.ranks, "2d": 2 * volume / layer.ranks}[scheme]
    kept = activations_held(layer, heads, scheme=scheme)
    return layers * (copies * held + kept) + transient_held(layer, scheme=scheme) + (end if ends else 0.0)


def most_tokens(
    layer: Layer, layers: int, heads: int, limit_nbytes: float, *, scheme: Scheme = "2d", element_size: int = 4
) -> int:
    """Return the largest batch in tokens that fits into `limit_nbytes`, or 0; `layer.tokens` is ignored."""

    def fits(tokens: int) -> bool:
        return element_size * step_peak(replace(layer, tokens=tokens), layers, heads, scheme=scheme) <= limit_nbytes

    # Doubling, then bisection: the peak grows with the number of tokens.
    top = 1
    while fits(top):
        top *= 2
    low = top // 2
    while top - low > 1:
        middle = (low + top) // 2
        low, top = (middle, top) if fits(middle) else (low, middle)
    return low


def panels_held(tokens: int, inputs: int, outputs: int, rows: int, columns: int, *, count: int, layout: str) -> float:
    """Return the peak of gathered and partial elements on a rank in a forward product.

    With one panel it is the whole operand. With more it is two panels: one is multiplied while the next is received.
    """
    weight = inputs * outputs / columns
    other = tokens / rows * (inputs if layout == "AB" else outputs)
    return (weight + other) * min(1, 2 / count)


def best_rows(layer: Layer) -> float:
    r"""Return the number of rows with the fewest bytes forward: $\sqrt{T p / 3 h}$, within [1, p]."""
    return min(max(sqrt(layer.tokens * layer.ranks / (3 * layer.hidden)), 1.0), float(layer.ranks))
