# SPDX-License-Identifier: Apache-2.0
"""One rank of a GPU test: trains for a few steps, and rank 0 writes the parameters of all ranks to a file.

python -m torch.distributed.run --nproc-per-node N tests/gpu/ranks.py DEVICE RECIPE STREAM FILE

DEVICE is "cpu", "cuda" (NCCL, a GPU for every rank), "sharded" (the same, with a model in shards) or "shared" (Gloo,
one GPU for all ranks).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire.core.storage.files import write_atomically

STEPS = 6


def main(device: str, recipe: str, stream: str, path: str) -> None:
    """Train as one rank."""
    rank = int(os.environ["RANK"])
    sharded, device = device == "sharded", "cuda" if device == "sharded" else device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if device == "shared":
        # NCCL wants a GPU for every rank; Gloo does not.
        torch.distributed.init_process_group("gloo")
        device = "cuda"
    torch.manual_seed(0)
    # Wide enough for several buckets.
    model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 4)).to(
        device
    )
    group = None
    if sharded:
        mesh = init_device_mesh("cuda", (1, int(os.environ["WORLD_SIZE"])), mesh_dim_names=("replicate", "shard"))
        group = mesh["replicate"]
        for each in (*model, model):
            fully_shard(each, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = torch.cuda.Stream() if stream == "own" and device == "cuda" else None
    worker = thinwire.attach(model, optimizer, recipe, group=group)
    if own is not None:
        own.wait_stream(torch.cuda.current_stream())  # PyTorch leaves that to the caller
    with torch.cuda.stream(own) if own is not None else torch.enable_grad():
        for step in range(STEPS):
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    if own is not None:
        torch.cuda.current_stream().wait_stream(own)
    with worker.consensus():
        whole = [p.full_tensor() if sharded else p for p in model.parameters()]
        flat = torch.cat([p.detach().flatten() for p in whole]).cpu()
    if rank == 0:
        write_atomically(Path(path), flat.numpy().tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
