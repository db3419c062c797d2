# SPDX-License-Identifier: Apache-2.0
"""Models of word sequences: two text classifiers and a small translator. Token 0 is padding."""

from torch import Generator, Tensor, nn

from thinwire.lab.tasks.models.base import Attention, Block, FeedForward, Network, Positions, transformer_


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


class CrossBlock(nn.Module):
    """A decoder's block: attention to itself, attention to the source, feed-forward.

    Args:
        width: of the stream.
        heads: must divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(width)
        self.attend_self = Attention(width, heads)
        self.norm_source = nn.LayerNorm(width)
        self.attend_source = Attention(width, heads)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_part = FeedForward(width)

    def forward(self, stream: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """[batch, length, width] to the same, with attention to [batch, source, width]; `mask` as for `Attention`."""
        stream = stream + self.attend_self(self.norm_self(stream), causal=True)
        stream = stream + self.attend_source(self.norm_source(stream), source, mask=mask)
        return stream + self.forward_part(self.norm_forward(stream))


class Translator(Network):
    """A pre-norm encoder-decoder transformer (Vaswani et al. 2017).

    Args:
        source: how many words the source language has.
        target: how many words the target language has.
        width: of the streams.
        layers: blocks of the encoder, and of the decoder.
        heads: must divide the width.
        length: the longest sentence, in words.
    """

    def __init__(self, source: int, target: int, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.source = nn.Embedding(source, width)
        self.target = nn.Embedding(target, width)
        self.source_positions = Positions(length, width)
        self.target_positions = Positions(length, width)
        self.encoder = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(CrossBlock(width, heads) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [batch, source] and [batch, length] to logits [batch, length, target words]."""
        return self.decode(self.encode(source), source, target)

    def encode(self, source: Tensor) -> Tensor:
        """int64 [batch, source] to [batch, source, width]."""
        stream = self.source_positions(self.source(source))
        for block in self.encoder:
            stream = block(stream, _not_padding(source))
        return self.encoder_norm(stream)

    def decode(self, encoded: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """The output of `encode`, the source and the words so far, to logits [batch, length, target words]."""
        stream = self.target_positions(self.target(target))
        for block in self.decoder:
            stream = block(stream, encoded, _not_padding(source))
        return self.head(self.decoder_norm(stream))

    def initialise_(self, generator: Generator) -> None:
        """See `transformer_`."""
        transformer_(self, generator, residuals=3 * len(self.decoder))


def _not_padding(words: Tensor) -> Tensor:
    """The attention mask, bool [batch, 1, 1, length]."""
    return (words != 0)[:, None, None, :]


def _mean(stream: Tensor, words: Tensor) -> Tensor:
    """The mean over words that are not padding, [batch, width]."""
    weights = (words != 0).unsqueeze(-1).to(stream.dtype)
    return (stream * weights).sum(1) / weights.sum(1).clamp(min=1)
