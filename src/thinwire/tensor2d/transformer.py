# SPDX-License-Identifier: Apache-2.0
"""The communication, memory and arithmetic of a transformer's training step on any mesh, from its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from thinwire.core.validation import check_field_types
from thinwire.errors import ConfigError
from thinwire.tensor2d.costs import (
    Layer,
    backward_elements,
    embedding_elements,
    id_elements,
    loss_elements,
    norm_elements,
    product_elements,
)

_FP32_NBYTES = 4


@dataclass(frozen=True)
class Transformer:
    """The sizes of a causal language model and of its batch.

    Without `gated`, blocks are GPT-2's: layer norms, biases, and one layer for queries, keys and values. With `gated`
    they are Llama's: RMS norms, rotary positions, no biases, SwiGLU, and separate layers.

    Args:
        layers: number of blocks, N.
        hidden: hidden size, h.
        heads: query heads, n.
        vocabulary: size of the vocabulary, v.
        samples: samples of the whole batch, b.
        length: tokens per sample, s.
        inner: inner size of the feed-forward part, f; 0 is 4 h.
        key_heads: heads of keys and values; 0 for as many as query heads.
        positions: rows of a learned table of positions; 0 for no table.
        gated: whether to use Llama's blocks.
        tied: whether the output head shares the embedding's table.
        head_bias: whether the output head has a bias.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    samples: int
    length: int
    inner: int = 0
    key_heads: int = 0
    positions: int = 0
    gated: bool = False
    tied: bool = False
    head_bias: bool = True

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_field_types(self)
        least = min(self.layers, self.hidden, self.heads, self.vocabulary, self.samples, self.length)
        if least < 1 or min(self.inner, self.key_heads, self.positions) < 0:
            raise ConfigError(f"{self}: sizes must be at least 1, and inner, key_heads and positions not negative")
        if self.hidden % self.heads or self.heads % (self.key_heads or self.heads):
            raise ConfigError(f"{self}: heads must divide hidden, and key_heads must divide heads")

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch, T."""
        return self.samples * self.length

    @property
    def _inner(self) -> int:
        return self.inner or 4 * self.hidden

    @property
    def _keys(self) -> int:
        """Features of all key heads together."""
        return self.hidden // self.heads * (self.key_heads or self.heads)

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the linear layers of one block."""
        h, f, k = self.hidden, self._inner, self._keys
        if self.gated:
            return (h, h), (h, k), (h, k), (h, h), (h, f), (h, f), (f, h)
        return (h, h + 2 * k), (h, h), (h, f), (f, h)

    def padded(self, rows: int, columns: int) -> int:
        """The vocabulary padded so that the mesh divides it."""
        return -(-self.vocabulary // lcm(rows, columns)) * lcm(rows, columns)

    def refusal(self, rows: int, columns: int) -> str:
        """Return why a mesh cannot split the model, with the size and its divisor; empty if it can."""
        slices, keys = lcm(rows, columns), self.key_heads or self.heads
        needs = [
            (f"{self.samples} samples", self.samples, rows),
            (f"{self.heads} heads", self.heads, columns),
            (f"hidden={self.hidden}", self.hidden, slices),
            (f"inner={self._inner}", self._inner, slices),
            (f"keys of {self._keys} features", self._keys, slices),
        ]
        words = [f"{what} % {divisor} must be 0" for what, size, divisor in needs if size % divisor]
        if keys % columns and self.heads % columns == 0:
            own, group = self.heads // columns, self.heads // keys
            if own % group and group % own:
                words.append(f"{own} query heads per column and {group} per key head: one must divide the other")
        return ", ".join(words)

    # -- communication -------------------------------------------------------------------------------------------

    def sent_bytes(self, rows: int, columns: int, *, element_nbytes: int = 4) -> float:
        """Return the bytes that a rank sends in a forward and a backward pass.

        With a tied table it is the count of the ranks that send most: those off the diagonal of a square mesh.
        """
        mesh, tokens, h = (rows, columns), self.tokens, self.hidden
        products = self.layers * sum(
            product_elements(tokens, *sizes, *mesh) + backward_elements(tokens, *sizes, *mesh) for sizes in self.linears
        )
        gathered = 4 * self.layers * tokens / rows * self._keys / columns * (columns - 1) * self._gathers(columns)
        v = self.padded(rows, columns)
        head = product_elements(tokens, h, v, *mesh, layout="AB")
        head += backward_elements(tokens, h, v, *mesh, layout="AB")
        transposes = 2 * v * h * _sent_to_transpose(rows, columns) * self.tied
        algorithm = self._lookup
        lookup = 2 * embedding_elements(tokens, v, h, *mesh, algorithm=algorithm)
        vectors = self.vectors / columns * 2 * (rows - 1) / rows
        ids = 2 * id_elements(tokens, rows) if algorithm == "tokens" else 0.0
        elements = products + gathered + head + transposes + lookup + vectors
        # Statistics of norms and of the loss are sent in fp32 at least.
        layer = Layer(tokens=tokens, hidden=h, rows=rows, columns=columns)
        norm = norm_elements(layer, kind="rms" if self.gated else "layer") / 2  # a `Layer` has two norms
        scalars = 2 * 2 * (rows - 1) / rows  # all-reduces of the loss and of the number of its tokens
        statistics = (2 * self.layers + 1) * norm + loss_elements(tokens, rows, columns) + scalars
        return elements * element_nbytes + statistics * max(element_nbytes, _FP32_NBYTES) + 4 * ids

    def messages(self, rows: int, columns: int) -> int:
        """Return the number of collective calls in both passes that send data, with one panel per product."""
        across, down = int(columns > 1), int(rows > 1)
        shared = sum(inputs > outputs for inputs, outputs in self.linears) * across
        block = 3 * len(self.linears) * (across + down) - shared + 4 * across + 4 * across * self._gathers(columns)
        lookup = (4 if self._lookup == "tokens" else 2) * down
        head = 3 * (across + down) + 2 * int(self.tied and rows * columns > 1)
        return self.layers * block + 2 * across + lookup + head + across + 3 * down

    def _gathers(self, columns: int) -> int:
        return int((self.key_heads or self.heads) % columns > 0)

    @property
    def _lookup(self) -> str:
        return "tokens" if self.tokens < self.vocabulary else "table"

    # -- memory and arithmetic -----------------------------------------------------------------------------------

    @property
    def vectors(self) -> int:
        """Elements of biases, gains and positions, which are replicated over the rows."""
        norms = (2 * self.layers + 1) * self.hidden * (1 if self.gated else 2)
        biases = 0 if self.gated else self.layers * sum(outputs for _, outputs in self.linears)
        return norms + biases + self.positions * self.hidden + self.vocabulary * self.head_bias

    def parameters_held(self, rows: int, columns: int) -> float:
        """Elements of parameters on one rank."""
        weights = self.layers * sum(inputs * outputs for inputs, outputs in self.linears)
        tables = self.padded(rows, columns) * self.hidden * (1 if self.tied else 2)
        return (weights + tables) / (rows * columns) + self.vectors / columns

    def activations_held(self, rows: int, columns: int, *, checkpointed: bool = False) -> float:
        """Return the elements kept for the backward pass; `checkpointed` keeps only results of collectives.

        With fused attention, a block keeps the inputs and outputs of its norms, queries, keys, values, the output of
        attention, and the inner activations before and after their nonlinearity: 16 T h / p with f = 4 h, and 10 T h /
        p checkpointed.
        """
        h, f, k, ranks = self.hidden, self._inner, self._keys, rows * columns
        inner = 4 * f if self.gated else 2 * f
        rotated = h + k if self.gated else 0
        block = 4 * h + (h + 2 * k) + rotated + h + inner
        if checkpointed:
            block = h + sum(outputs for _, outputs in self.linears)
        ends = 2 * h + 2 * self.padded(rows, columns)  # the last norm, and logits with their gradient
        statistics = (4 * self.layers + 2 + 1) / rows + (0 if checkpointed else self.layers * self.heads / ranks)
        return self.tokens * ((self.layers * block + ends) / ranks + statistics)

    def transit_held(self, rows: int, columns: int) -> float:
        """Return the peak of gathered elements on a rank, with one panel per product."""
        sizes = [*self.linears, (self.hidden, self.padded(rows, columns))]
        return max(
            self.tokens / rows * min(inputs, outputs) * (columns > 1) + inputs * outputs / columns * (rows > 1)
            for inputs, outputs in sizes
        )

    @property
    def flops(self) -> float:
        """Return the operations of a step over all ranks: six per weight and token, plus attention."""
        weights = self.layers * sum(inputs * outputs for inputs, outputs in self.linears)
        attention = 6 * self.layers * self.tokens * self.length * self.hidden
        return 6 * self.tokens * (weights + self.hidden * self.vocabulary) + attention


def _sent_to_transpose(rows: int, columns: int) -> float:
    """Return the largest fraction of a table that a rank sends to transpose it: its block minus its own part."""
    overlaps = [
        max(0.0, min((i + 1) / rows, (j + 1) / columns) - max(i / rows, j / columns))
        for i in range(rows)
        for j in range(columns)
    ]
    return 1 / (rows * columns) - min(overlaps) ** 2
