# SPDX-License-Identifier: Apache-2.0
"""In the style of minGPT's trainer: a Trainer class with callbacks, and an endless sampler with replacement."""

import random
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class SortDataset(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, idx):
        inp = torch.from_numpy(np.random.default_rng(idx).integers(0, 3, 6))
        return inp, torch.sort(inp)[0]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(3, 12)
        self.block = nn.Sequential(nn.Flatten(), nn.Linear(72, 48), nn.GELU(), nn.Linear(48, 18))

    def forward(self, idx, targets=None):
        logits = self.block(self.emb(idx)).view(-1, 3)
        return logits, None if targets is None else F.cross_entropy(logits, targets.view(-1))


class Trainer:
    def __init__(self, model, train_dataset):
        self.model, self.train_dataset = model, train_dataset
        self.callbacks = defaultdict(list)
        self.iter_num, self.loss = 0, None

    def run(self, max_iters):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e5)),
            shuffle=False,
            batch_size=8,
            num_workers=0,
        )
        model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1
            if self.iter_num >= max_iters:
                break


if __name__ == "__main__":
    set_seed(3407)
    trainer = Trainer(GPT(), SortDataset())
    trainer.callbacks["on_batch_end"].append(
        lambda trainer: print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.9f}", flush=True)
    )
    trainer.run(8)
