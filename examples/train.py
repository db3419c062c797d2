"""A plain PyTorch loop on handwritten digits; laconic's lines end in `# laconic`.

One worker:             python examples/train.py
Two workers:            torchrun --standalone --nproc-per-node 2 examples/train.py
Four, over slow links:  laconic emulate --workers 4 --link 100mbit -- python examples/train.py
"""

import os

import torch
import torch.distributed as dist  # laconic
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic  # laconic

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    """Train, and say what came of it."""
    if SIZE > 1:  # laconic
        dist.init_process_group("gloo")  # laconic
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    train = TensorDataset(pixels[360 + RANK :: SIZE], labels[360 + RANK :: SIZE])
    order = torch.Generator().manual_seed(RANK)
    loader = DataLoader(train, batch_size=32, shuffle=True, generator=order)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = laconic.SlowMo(period=8, momentum=0.2)  # laconic
    replica = laconic.attach(model, optimizer, strategy)  # laconic

    for _ in range(10):
        for x, y in replica.join(loader):  # laconic
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with replica.consensus(), torch.no_grad():  # laconic
        accuracy = (model(pixels[:360]).argmax(1) == labels[:360]).float().mean().item()
    if RANK == 0:
        sent = f"{replica.comm.meter.payload_bytes / 1e6:.2f} MB"
        print(f"workers {SIZE}, steps {replica.step}, {sent} sent by each, accuracy {accuracy:.1%}")
    if SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
