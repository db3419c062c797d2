# SPDX-License-Identifier: Apache-2.0
"""A training script for one process, in the style of PyTorch's mnist example; nothing in it knows of other workers.

`thinwire up examples/single_process.py --processes 2` runs it on two.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A small network for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.fc1 = nn.Linear(4 * 3 * 3, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of ten classes."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model: nn.Module, device: torch.device, train_loader: Loader, optimizer: Optimizer, epoch: int) -> None:
    """Train for one epoch."""
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}] Loss: {loss.item():.9f}", flush=True)


def test(model: nn.Module, device: torch.device, test_loader: Loader) -> None:
    """Print the loss and the accuracy on the test set."""
    model.eval()
    test_loss = correct = seen = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
            seen += len(target)
    print(f"Test set: Average loss: {test_loss / seen:.9f}, Accuracy: {correct}/{seen}", flush=True)


def main() -> None:
    """Train a classifier of random images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", default="")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    images, labels = torch.rand(200, 1, 8, 8), torch.randint(10, (200,))
    train_loader = DataLoader(
        TensorDataset(images[:168], labels[:168]), batch_size=args.batch_size, shuffle=args.shuffle
    )
    test_loader = DataLoader(TensorDataset(images[168:], labels[168:]), batch_size=8)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
