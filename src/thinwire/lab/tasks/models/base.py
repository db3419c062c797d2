# SPDX-License-Identifier: Apache-2.0
"""Parts of the models: building with a seed, initialisation, attention.

No model here has dropout, so none draws random numbers after it is built.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn import init


class Network(nn.Module, ABC):
    """A module that can draw all its parameters from one generator."""

    @abstractmethod
    def initialise_(self, generator: Generator) -> None:
        """Set every parameter and buffer, whatever it held before."""


Built = TypeVar("Built", bound=Network)


def build(network: Callable[[], Built], *, seed: int) -> Built:
    """Make a network whose parameters are a function of `seed` alone, without using the global generator.

    The network is in fp32, as the tasks' data are, and on the default device; on the meta device it has no memory.

    Args:
        network: makes it.
        seed: seed of its initial parameters.
    """
    # First on the meta device, where the initialisation in torch's constructors draws nothing.
    target = torch.empty(0, dtype=torch.float32).device
    with torch.device("meta"):
        model = network().float()
    if target.type == "meta":
        return model
    model.to_empty(device="cpu")
    model.initialise_(torch.Generator("cpu").manual_seed(seed))
    return model.to(target)


def kaiming_(module: nn.Module, generator: Generator) -> None:
    """Initialise with He et al.'s normal weights, which preserve variance through ReLUs; norms are the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            init.kaiming_normal_(part.weight, nonlinearity="relu", generator=generator)
            if part.bias is not None:
                init.zeros_(part.bias)
        _reset_norm_(part)


def transformer_(module: nn.Module, generator: Generator, *, residuals: int) -> None:
    """Initialise a transformer with LeCun's normal weights, which preserve variance through linear layers.

    Embeddings have standard deviation 1, so that the residual stream carries its symbol from the first step on. Layers
    that add to the stream start smaller the more of them there are, as in GPT-2. The head is small, so that at first
    all symbols are about equally likely.

    Args:
        module: linear layers named `out` add to the residual stream, the one named `head` computes the logits.
        generator: random generator.
        residuals: how many layers add to the stream.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            scale = residuals**-0.5 if name.endswith("out") else 1.0
            deviation = 0.02 if name == "head" else scale * part.in_features**-0.5
            init.normal_(part.weight, std=deviation, generator=generator)
            init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            init.normal_(part.weight, generator=generator)
        elif isinstance(part, Positions):
            init.normal_(part.table, std=0.1, generator=generator)
        _reset_norm_(part)


class Positions(nn.Module):
    """A learned vector for each position, added to the residual stream.

    Args:
        length: the longest input; a longer one is an error of torch's.
        width: of the stream.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, width, dtype=torch.float32))

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        return stream + self.table[: stream.shape[1]]


class Attention(nn.Module):
    """Multi-head causal self-attention.

    Args:
        width: of the residual stream.
        heads: how many; must divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same; no position attends to a later one."""
        parts = self.projection(stream).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        values = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(values.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, where it is four times as wide.

    Args:
        width: of the stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        return self.out(F.gelu(self.wide(stream)))


class Block(nn.Module):
    """A pre-norm block: attention and feed-forward, each with a layer norm of its input, each added to the stream.

    Args:
        width: of the residual stream.
        heads: of the attention; must divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_part = FeedForward(width)

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        stream = stream + self.attention(self.norm_attention(stream))
        return stream + self.forward_part(self.norm_forward(stream))


def _reset_norm_(part: nn.Module) -> None:
    if isinstance(part, nn.LayerNorm | nn.BatchNorm2d):
        # Ones and zeros, which draw nothing.
        part.reset_parameters()
