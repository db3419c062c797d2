# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop on handwritten digits; thinwire's lines end in `# thinwire`.

One worker:             python examples/train.py
Two workers:            torchrun --standalone --nproc-per-node 2 examples/train.py
Four, over slow links:  thinwire emulate --workers 4 --link 100mbit -- python examples/train.py
"""

import os

import torch
import torch.distributed as dist  # thinwire
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire  # thinwire

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    """Train, and print steps, bytes and accuracy."""
    if SIZE > 1:  # thinwire
        dist.init_process_group("gloo")  # thinwire
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    train = TensorDataset(pixels[360 + RANK :: SIZE], labels[360 + RANK :: SIZE])
    order = torch.Generator().manual_seed(RANK)
    loader = DataLoader(train, batch_size=32, shuffle=True, generator=order)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = thinwire.LocalSGD(period=8)  # thinwire
    worker = thinwire.attach(model, optimizer, strategy)  # thinwire

    for _ in range(10):
        for x, y in worker.join(loader):  # thinwire
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with worker.consensus(), torch.no_grad():  # thinwire
        accuracy = (model(pixels[:360]).argmax(1) == labels[:360]).float().mean().item()
    if RANK == 0:
        sent = f"{worker.comm.meter.payload_bytes / 1e6:.2f} MB"
        print(f"workers {SIZE}, steps {worker.step}, {sent} sent by each, accuracy {accuracy:.1%}")
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
