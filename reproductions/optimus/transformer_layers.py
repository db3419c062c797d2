# SPDX-License-Identifier: Apache-2.0
"""The layers of a transformer, cut over processes in one dimension by torch itself or in two by thinwire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from thinwire import parallelize_2d
from thinwire.lab.tasks.models.base import Network, build
from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.plan import Untouched

Scheme = Literal["1d", "1d+sequence", "2d"]
SCHEMES: tuple[Scheme, ...] = ("1d", "1d+sequence", "2d")


@dataclass(frozen=True)
class Stem:
    """Sizes of pre-norm layers and of the batch that goes through them.

    Args:
        layers: how many.
        hidden: features of the stream.
        heads: of attention.
        length: tokens of a sequence.
        sequences: of a batch.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    sequences: int

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.length * self.sequences


class Heads(nn.Module):
    """Causal attention; the outputs of `projection` are, head after head, a query, a key and a value."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.projection = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        """[b, s, h] to the same, on however many whole heads `projection` gives."""
        heads = self.projection(stream).unflatten(-1, (-1, 3 * self.size)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each after a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(hidden)
        self.attention = Heads(hidden, heads)
        self.second_norm = nn.LayerNorm(hidden)
        self.wide = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)

    def forward(self, stream: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        stream = stream + self.attention(self.first_norm(stream))
        return stream + self.narrow(F.gelu(self.wide(self.second_norm(stream))))


class Blocks(nn.Sequential, Network):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Layer after layer."""

    def __init__(self, stem: Stem) -> None:
        super().__init__(*(Block(stem.hidden, stem.heads) for _ in range(stem.layers)))

    @torch.no_grad()
    def initialise_(self, generator: torch.Generator) -> None:
        """Torch's own distributions, from this generator."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                bound = part.in_features**-0.5
                part.weight.uniform_(-bound, bound, generator=generator)
                part.bias.uniform_(-bound, bound, generator=generator)
            elif isinstance(part, nn.LayerNorm):
                part.reset_parameters()


def blocks_of(stem: Stem, *, seed: int = 0) -> nn.Sequential:
    """The serial layers, alike on every rank."""
    return build(lambda: Blocks(stem), seed=seed)


def cut_in_one_dimension(model: nn.Sequential, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    """Torch's own tensor parallelism over all ranks.

    Args:
        model: the serial layers.
        mesh: of one dimension.
        sequence: split the sequence where features are not split.
    """
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.projection": ColwiseParallel(input_layouts=between),
        "attention.out": RowwiseParallel(output_layouts=between),
        "wide": ColwiseParallel(input_layouts=between),
        "narrow": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan |= {"first_norm": SequenceParallel(), "second_norm": SequenceParallel()}
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def cut(model: nn.Sequential, scheme: Scheme, line: DeviceMesh, mesh: Mesh2D) -> nn.Module:
    """The model as one rank holds it.

    Args:
        model: the serial layers.
        scheme: how it is cut.
        line: all ranks in one dimension.
        mesh: all ranks in two.
    """
    if scheme == "2d":
        return parallelize_2d(model, mesh, {Block: Untouched(), Heads: Untouched()})
    return cut_in_one_dimension(model, line, sequence=scheme == "1d+sequence")


def share(x: Tensor, scheme: Scheme, mesh: Mesh2D) -> Tensor:
    """What a rank holds of a stream [b, s, h], in memory of its own."""
    if scheme == "1d":
        return x.clone()
    if scheme == "1d+sequence":
        return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone()
    return mesh.columns_of(mesh.rows_of(x)).clone()
