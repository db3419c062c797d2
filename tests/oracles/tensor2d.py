# SPDX-License-Identifier: Apache-2.0
"""Serial models and whole matrices, with which the blocks of a mesh are compared; nothing here uses the library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MESHES = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)]
BATCH, LENGTH, VOCABULARY = 12, 6, 36


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def joined(blocks: list[Tensor], rows: int, columns: int) -> Tensor:
    return torch.cat([torch.cat(blocks[i * columns : (i + 1) * columns], -1) for i in range(rows)])


def tokens(step: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and targets; many targets are ignored in the last third of the batch, none in the first."""
    draw = torch.Generator().manual_seed(500 + step)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    targets[8:, 1:] = -100
    targets[5, :2] = -100
    return ids, targets


def serial_loss(model: nn.Module, step: int = 0) -> Tensor:
    ids, targets = tokens(step)
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def serial_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


class Encoder(nn.Module):
    """Torch's own encoder layers over an embedding, with dropout, a tied head and an RMS norm."""

    def __init__(self, dropout: float = 0.0, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self.embedding = nn.Embedding(vocabulary, 24, padding_idx=3)
            layer = nn.TransformerEncoderLayer(24, 12, 48, dropout, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.RMSNorm(24, eps=1e-6)
            self.lm_head = nn.Linear(24, vocabulary)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = 0.5 * drawn(*parameter.shape, seed=number)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        stream = self.encoder(self.embedding(ids), mask=mask, src_key_padding_mask=padding)
        return self.lm_head(self.norm(stream))
