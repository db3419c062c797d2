"""What the models are made of: seeded building, first parameters, attention.

No model here draws random numbers once it is built: none has dropout.
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
        """Fill every parameter and buffer; what they held before does not matter."""


Built = TypeVar("Built", bound=Network)


def build(network: Callable[[], Built], *, seed: int) -> Built:
    """Make a network whose parameters are a function of `seed` alone, and leave the global generator alone.

    It is made without memory first, so that no constructor draws anything. It ends up on the default device; if that
    is the meta device, it stays without memory.

    Args:
        network: makes it.
        seed: of its first parameters.
    """
    target = torch.empty(0).device
    with torch.device("meta"):
        model = network()
    if target.type == "meta":
        return model
    model.to_empty(device="cpu")
    model.initialise_(torch.Generator("cpu").manual_seed(seed))
    return model.to(target)


def kaiming_(module: nn.Module, generator: Generator) -> None:
    """He et al.'s normal weights, which keep the size of signals through ReLUs; norms start as the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            init.kaiming_normal_(part.weight, nonlinearity="relu", generator=generator)
            if part.bias is not None:
                init.zeros_(part.bias)
        _reset_norm_(part)


def transformer_(module: nn.Module, generator: Generator, *, residuals: int) -> None:
    """LeCun's normal weights, which keep the size of signals through linear layers, around a stream of size one.

    Embeddings have deviation 1, so that the stream says from the first step on which symbol it is at; what is
    added to it starts smaller with its depth, as in GPT-2; the head is small, so that at first all answers are equally
    likely.

    Args:
        module: its linear layers named `out` write to the stream, the one named `head` reads the answer off it.
        generator: of the draws.
        residuals: additions to the stream from its beginning to its end.
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
    """A learned vector for each position, added to the stream.

    Args:
        length: positions known; longer input is an error of torch's.
        width: of the stream.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(length, width))

    def forward(self, stream: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        return stream + self.table[: stream.shape[1]]


class Attention(nn.Module):
    """Multi-head attention of a stream to itself, or to a memory.

    Args:
        width: of the stream.
        heads: must divide the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        stream: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """[batch, length, width] and [batch, memory, width] to [batch, length, width].

        Args:
            stream: who asks.
            memory: who is asked; None is the stream itself.
            mask: bool, [batch, 1, 1, memory], False where nothing is to be heard.
            causal: no position hears a later one.
        """
        query, key, value = (self._split(part) for part in self._project(stream, memory))
        heard = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.out(heard.transpose(1, 2).flatten(2))

    def _project(self, stream: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        if memory is None:
            return self.projection(stream).chunk(3, dim=-1)
        width = stream.shape[-1]
        weight, bias = self.projection.weight, self.projection.bias
        query = F.linear(stream, weight[:width], bias[:width])
        return query, *F.linear(memory, weight[width:], bias[width:]).chunk(2, dim=-1)

    def _split(self, stream: Tensor) -> Tensor:
        return stream.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers, four times as wide in between, with a GELU.

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
    """Attention and feed-forward, each added to the stream, each after a layer norm of its input.

    Args:
        width: of the stream.
        heads: must divide the width.
        causal: no position hears a later one.
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_part = FeedForward(width)

    def forward(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, length, width] to the same; `mask` as for `Attention`."""
        stream = stream + self.attention(self.norm_attention(stream), mask=mask, causal=self.causal)
        return stream + self.forward_part(self.norm_forward(stream))


def _reset_norm_(part: nn.Module) -> None:
    if isinstance(part, nn.LayerNorm | nn.BatchNorm2d):
        part.reset_parameters()  # ones and zeros: nothing is drawn
