# SPDX-License-Identifier: Apache-2.0
"""Training on coresets and variance reduction once more, written out in full; nothing in here knows thinwire."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def last_layer_gradients(weight: Tensor, bias: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each point's cross entropy with respect to weight and bias, by autograd, point by point."""
    rows: list[Tensor] = []
    for h, y in zip(hidden, labels, strict=True):
        w, b = weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
        torch.nn.functional.cross_entropy((w @ h + b)[None], y[None]).backward()
        assert w.grad is not None
        assert b.grad is not None
        rows.append(torch.cat([w.grad, b.grad[:, None]], dim=1).flatten())
    return torch.stack(rows)


Sample = Callable[[Tensor, int], Tensor]


def saga(gradient: Sample, w: Tensor, n: int, batches: Sequence[Sequence[int]], *, lr: float, decay: float) -> Tensor:
    """SAGA with a table of whole gradients, zero at first."""
    table = torch.zeros(n, *w.shape, dtype=w.dtype)
    for batch in batches:
        new = torch.stack([gradient(w, i) for i in batch])
        direction = (new - table[list(batch)]).mean(0) + table.mean(0) + decay * w
        table[list(batch)] = new
        w = w - lr * direction
    return w


def svrg(
    gradient: Sample, w: Tensor, n: int, rounds: Sequence[Sequence[Sequence[int]]], *, lr: float, decay: float
) -> Tensor:
    """SVRG, option I: a snapshot at the beginning of every round."""
    for batches in rounds:
        anchor = w
        whole = torch.stack([gradient(anchor, i) for i in range(n)]).mean(0)
        for batch in batches:
            change = torch.stack([gradient(w, i) - gradient(anchor, i) for i in batch]).mean(0)
            w = w - lr * (change + whole + decay * w)
    return w
