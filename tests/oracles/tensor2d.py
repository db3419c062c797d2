"""Serial transformers and whole matrices, which the blocks of a mesh must add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.tasks.models.base import build
from thinwire.tasks.models.gpt import GPT, GPTSize
from thinwire.tensor2d import Mesh2D, Panels, cross_entropy_2d, parallelize_2d, run_mesh_threads, whole_state

T = TypeVar("T")
MESHES = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)]
BATCH, LENGTH, VOCABULARY = 12, 6, 36


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def block_of(x: Tensor, mesh: Mesh2D) -> Tensor:
    """Rows of the first dimension, columns of the last."""
    return x.chunk(mesh.rows)[mesh.row].chunk(mesh.columns, -1)[mesh.column].contiguous()


def joined(blocks: list[Tensor], rows: int, columns: int) -> Tensor:
    return torch.cat([torch.cat(blocks[i * columns : (i + 1) * columns], -1) for i in range(rows)])


def run(rows: int, columns: int, work: Callable[[Mesh2D], T], panels: Panels | None = None) -> list[T]:
    return run_mesh_threads(rows, columns, work, panels=panels, timeout=20)


def gpt(seed: int = 0) -> GPT:
    """Two blocks, twelve heads of two."""
    size = GPTSize(layers=2, width=24, heads=12)
    model = build(lambda: GPT(size, context=LENGTH, vocabulary=VOCABULARY), seed=seed).double()
    with torch.no_grad():  # biases and gains that are not all alike
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * drawn(*parameter.shape, seed=100 + number))
    return model


def tokens(step: int = 0) -> tuple[Tensor, Tensor]:
    """Symbols and targets; many of them ignored in the last third of the batch, none in the first."""
    draw = torch.Generator().manual_seed(500 + step)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)
    targets[8:, 1:] = -100
    targets[5, :2] = -100
    return ids, targets


def serial_loss(model: nn.Module, step: int = 0) -> Tensor:
    ids, targets = tokens(step)
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def mesh_loss(model: nn.Module, mesh: Mesh2D, step: int = 0) -> Tensor:
    ids, targets = (mesh.rows_of(x) for x in tokens(step))
    return cross_entropy_2d(model(ids), targets, mesh)


def laid_out(mesh: Mesh2D, model: nn.Module | None = None, **settings: Any) -> nn.Module:
    return parallelize_2d(gpt() if model is None else model, mesh, **settings)


def gradients(model: nn.Module, mesh: Mesh2D) -> dict[str, Tensor]:
    """The whole gradients by name; the model holds them as parameters afterwards."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return whole_state(model, mesh)


def serial_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


class Rotary(nn.Module):
    """Attention with rotary positions and grouped key heads, written out."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, key_heads * self.size)
        self.value = nn.Linear(width, key_heads * self.size)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.query, self.key, self.value))
        q, k = self.turned(q), self.turned(k)
        heard = torch.zeros_like(q)
        length = x.shape[1]
        for head in range(self.heads):
            shared = head * self.key_heads // self.heads
            scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) / self.size**0.5
            allowed = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            heard[:, :, head] = weights @ v[:, :, shared]
        return self.out(heard.flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        """Pairs as complex numbers, turned by their position."""
        half = self.size // 2
        pairs = torch.complex(x[..., :half], x[..., half:])
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, :]
        return torch.cat([turned.real, turned.imag], -1)


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
