# SPDX-License-Identifier: Apache-2.0
"""A small model and its data, a plain loop over them, and what is compared: for all trainers alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import thinwire

STEPS, HALF, BATCH, RATE = 50, 25, 4, 0.05


class Net(nn.Module):
    """A perceptron whose forward takes what the Trainers pass, and returns its loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    """As many examples as both workers need; every one is a function of its index."""

    def __init__(self, count: int = 2 * STEPS * BATCH) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=draw)
        self.y = torch.randn(count, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


def batch_of(rank: int, step: int) -> dict[str, Tensor]:
    """The batches in their order, dealt to two workers in turn."""
    rows, start = Rows(), (2 * step + rank) * BATCH
    return {"x": rows.x[start : start + BATCH], "labels": rows.y[start : start + BATCH]}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)


def plain_loop(recipe: str, *, width: int = 16, steps: int = STEPS, clip: float | None = None) -> list[Tensor]:
    """A user's own loop, with one call of `attach`: the agreed model at the end."""
    model = Net(width)
    optimizer = optimizer_of(model)
    worker = thinwire.attach(model, optimizer, recipe)
    for step in range(steps):
        model(**batch_of(worker.comm.rank, step))["loss"].backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    with worker.consensus() as agreed:
        found = weights(agreed)
    worker.detach()
    return found


def weights(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.state_dict().values()]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
