# SPDX-License-Identifier: Apache-2.0
"""What the formulas predict for more ranks than one machine can emulate: bytes, memory and the largest batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from reproductions.optimus.costs import (
    Direction,
    Layer,
    layer_elements,
    most_tokens,
    one_dimensional_elements,
    step_peak,
)
from reproductions.optimus.transformer_layers import SCHEMES, Scheme

# The model grows with the ranks, as in the paper's weak scaling: parameters per rank and tokens per feature stay.
RANKS = (4, 16, 36, 64, 256, 1024)
HIDDEN_PER_SIDE = 1024
TOKENS_PER_HIDDEN = 8
LAYERS = 24
HEAD_SIZE = 64
LIMIT_BYTES = 16 * 2**30
SEQUENCE = 512  # tokens, in the paper


@dataclass(frozen=True)
class Published:
    """A row of the paper's table of weak scaling: Megatron's figure, then Optimus's.

    Args:
        ranks: GPUs, of 16 GB.
        hidden: features of the stream.
        heads: of attention.
        batches: sequences.
        training: sequences in a second.
        inference: the same of forward passes alone.
    """

    ranks: int
    hidden: int
    heads: int
    batches: tuple[int, int]
    training: tuple[float, float]
    inference: tuple[float, float]


PUBLISHED = (
    Published(4, 2048, 32, (60, 96), (2.936, 2.523), (12.61, 10.15)),
    Published(16, 4096, 64, (60, 192), (1.383, 1.413), (4.80, 5.67)),
    Published(36, 6120, 72, (40, 288), (0.882, 1.306), (2.96, 5.26)),
    Published(64, 8192, 128, (30, 384), (0.641, 0.950), (2.16, 3.86)),
)
STRONG_HIDDEN, STRONG_HEADS = 3072, 64  # of the paper's strong scaling


@dataclass(frozen=True)
class Row:
    """Figures for one number of ranks, per rank, in fp32.

    Args:
        ranks: p, of a square mesh.
        hidden: features of the stream, which grow with the mesh's side.
        payload_bytes: of a step of training, by scheme; beside thinwire's storage the paper's, as "2d, paper".
        inference_bytes: of a forward pass alone, by the same.
        peak_bytes: of a step's tensors, by scheme.
        most_tokens: the largest batch that fits the limit, by scheme.
    """

    ranks: int
    hidden: int
    payload_bytes: dict[str, float]
    inference_bytes: dict[str, float]
    peak_bytes: dict[Scheme, float]
    most_tokens: dict[Scheme, int]

    @property
    def batch_ratio(self) -> float:
        """How many times larger a batch fits in two dimensions than in one; infinite where none fits in one."""
        one = self.most_tokens["1d"]
        return self.most_tokens["2d"] / one if one else float("inf")


def scaling(limit_nbytes: float = LIMIT_BYTES) -> list[Row]:
    """A row for each number of ranks."""
    widths = {p: HIDDEN_PER_SIDE * isqrt(p) for p in RANKS}
    return [row_of(p, hidden, hidden // HEAD_SIZE, limit_nbytes) for p, hidden in widths.items()]


def sent_for_a_sequence(row: Published) -> tuple[float, float]:
    """Bytes of training at the paper's two batches: in one dimension, and in two with the paper's storage."""
    side = isqrt(row.ranks)
    one, two = (Layer(tokens=SEQUENCE * b, hidden=row.hidden, rows=side, columns=side) for b in row.batches)
    elements = one_dimensional_elements(one) / row.batches[0], layer_elements(two, layout="AB") / row.batches[1]
    return 4 * LAYERS * elements[0], 4 * LAYERS * elements[1]


def row_of(ranks: int, hidden: int, heads: int, limit_nbytes: float = LIMIT_BYTES) -> Row:
    """The figures of one square mesh.

    Args:
        ranks: a square number.
        hidden: features of the stream.
        heads: of attention.
        limit_nbytes: of a rank's memory.
    """
    side = isqrt(ranks)
    layer = Layer(tokens=TOKENS_PER_HIDDEN * hidden, hidden=hidden, rows=side, columns=side)

    def nbytes(direction: Direction) -> dict[str, float]:
        # The paper keeps every weight in one storage, of which no gather serves two products.
        elements = {
            "1d": one_dimensional_elements(layer, direction),
            "1d+sequence": one_dimensional_elements(layer, direction, sequence_parallel=True, keeps_gathered=True),
            "2d": layer_elements(layer, direction),
            "2d, paper": layer_elements(layer, direction, layout="AB"),
        }
        return {name: 4 * LAYERS * each for name, each in elements.items()}

    return Row(
        ranks,
        hidden,
        nbytes("both"),
        nbytes("forward"),
        {scheme: 4 * step_peak(layer, LAYERS, heads, scheme=scheme) for scheme in SCHEMES},
        {scheme: most_tokens(layer, LAYERS, heads, limit_nbytes, scheme=scheme) for scheme in SCHEMES},
    )
