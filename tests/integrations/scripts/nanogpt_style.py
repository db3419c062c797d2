# SPDX-License-Identifier: Apache-2.0
"""In the style of nanoGPT's train.py: a module of globals, get_batch, accumulation, clipping, a schedule, a scaler."""

import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

eval_interval, eval_iters, max_iters = 4, 2, 8
batch_size, block_size, gradient_accumulation_steps = 4, 8, 2
learning_rate, grad_clip, warmup_iters = 1e-2, 1.0, 3
dtype = "float32"
exec_line = os.environ.get("SCRIPT_SETTINGS", "")
if exec_line:
    max_iters = int(exec_line)

ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?
assert not ddp
torch.manual_seed(1337)
ctx = nullcontext()
data = np.random.default_rng(0).integers(0, 16, 4096).astype(np.uint16)
splits = {"train": data[:3072], "val": data[3072:]}


def get_batch(split):
    chosen = splits[split]
    ix = torch.randint(len(chosen) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(chosen[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(chosen[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(0.1)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.drop(self.mlp(self.wte(idx))))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def configure_optimizers(self, learning_rate):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


model = GPT(16, 16)
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(learning_rate)
checkpoint = None


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


X, Y = get_batch("train")
iter_num = 0
while True:
    lr = learning_rate * min(1.0, (iter_num + 1) / warmup_iters)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        found = estimate_loss()
        print(f"step {iter_num}: train loss {found['train']:.9f}, val loss {found['val']:.9f}", flush=True)
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.9f}", flush=True)
    iter_num += 1
    if iter_num > max_iters:
        break
