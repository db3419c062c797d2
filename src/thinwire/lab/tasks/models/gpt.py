# SPDX-License-Identifier: Apache-2.0
"""A language model of bytes: the GPT-2 trunk (Radford et al. 2019) over a vocabulary of 256."""

from dataclasses import dataclass

from torch import Generator, Tensor, nn

from thinwire.errors import ConfigError
from thinwire.lab.tasks.models.base import Block, Network, Positions, transformer_


@dataclass(frozen=True)
class GPTSize:
    """The size of a GPT, which has about 12 x layers x width^2 parameters.

    Args:
        layers: how many blocks.
        width: of the residual stream.
        heads: of each attention; must divide the width.

    Raises:
        ConfigError: a value below 1, or heads that do not divide the width.
    """

    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads) < 1 or self.width % self.heads:
            raise ConfigError(f"{self}: all must be at least 1 and heads must divide width. Change heads")


GPT_SIZES = {
    "0.5m": GPTSize(layers=4, width=96, heads=3),
    "1m": GPTSize(layers=5, width=128, heads=4),
    "6m": GPTSize(layers=8, width=256, heads=4),
    "25m": GPTSize(layers=8, width=512, heads=8),
    "124m": GPTSize(layers=12, width=768, heads=12),
}
"""By name, which is the number of parameters of a byte model within 10 %. Only `124m` is named after GPT-2 small, whose
blocks it has: 124 M parameters with GPT-2's 50,257 tokens and 1,024 positions, 85 M as a byte model."""


class GPT(Network):
    """A pre-norm transformer with learned positions, GELU, and a head that is not tied to the embedding.

    Args:
        size: layers, width and heads.
        context: the longest input, in bytes.
        vocabulary: how many symbols.
    """

    def __init__(self, size: GPTSize, *, context: int = 128, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.positions = Positions(context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary)

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, length, vocabulary]."""
        stream = self.positions(self.embedding(symbols))
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))

    def initialise_(self, generator: Generator) -> None:
        """See `transformer_`."""
        transformer_(self, generator, residuals=2 * len(self.blocks))
