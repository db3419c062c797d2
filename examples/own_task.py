# SPDX-License-Identifier: Apache-2.0
"""Your own model and data for `thinwire train`, `thinwire compare` and `thinwire sweep`.

thinwire train --model examples.own_task:model --data examples.own_task:data --loss torch.nn.functional:cross_entropy
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def model() -> nn.Module:
    """A network for two classes; initial parameters follow from --seed."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def data(rank: int, size: int, seed: int) -> tuple[DataLoader, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The batches of one worker, and held-out batches: here the parity of the number of positive features."""
    features = torch.randn(1200, 8, generator=torch.Generator().manual_seed(1))
    labels = (features > 0).sum(1) % 2
    # Every size-th example is this worker's; the last 200 are held out.
    mine = TensorDataset(features[rank:1000:size], labels[rank:1000:size])
    return DataLoader(mine, batch_size=16, shuffle=True), [(features[1000:], labels[1000:])]


if __name__ == "__main__":
    print(__doc__)
