# SPDX-License-Identifier: Apache-2.0
"""Two classifiers of texts. Token 0 is padding."""

from torch import Generator, Tensor, nn

from thinwire.lab.tasks.models.base import Block, Network, Positions, transformer_


class WordBag(Network):
    """The mean of a text's word vectors, and a linear layer.

    Args:
        vocabulary: how many words.
        width: of a word vector.
        classes: how many.
    """

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, classes]."""
        return self.head(_mean(self.embedding(words), words))

    def initialise_(self, generator: Generator) -> None:
        """Normal, of deviation 0.1 for the words and 1 / sqrt(width) for the head."""
        nn.init.normal_(self.embedding.weight, std=0.1, generator=generator)
        nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5, generator=generator)
        nn.init.zeros_(self.head.bias)


class TextTransformer(Network):
    """A transformer without a causal mask, the mean of its output over the words, and a linear layer.

    Args:
        vocabulary: how many words.
        width: of the stream.
        layers: how many blocks.
        heads: must divide the width.
        length: the longest text, in words.
        classes: how many.
    """

    def __init__(self, vocabulary: int, *, width: int, layers: int, heads: int, length: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = Positions(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """int64 [batch, length] to logits [batch, classes]."""
        stream = self.positions(self.embedding(words))
        for block in self.blocks:
            stream = block(stream, _not_padding(words))
        return self.head(_mean(self.norm(stream), words))

    def initialise_(self, generator: Generator) -> None:
        """See `transformer_`."""
        transformer_(self, generator, residuals=2 * len(self.blocks))


def _not_padding(words: Tensor) -> Tensor:
    """The attention mask, bool [batch, 1, 1, length]."""
    return (words != 0)[:, None, None, :]


def _mean(stream: Tensor, words: Tensor) -> Tensor:
    """The mean over words that are not padding, [batch, width]."""
    weights = (words != 0).unsqueeze(-1).to(stream.dtype)
    return (stream * weights).sum(1) / weights.sum(1).clamp(min=1)
