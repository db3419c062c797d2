# SPDX-License-Identifier: Apache-2.0
"""One run of real size: a GPT of 85 million parameters on two workers, over an emulated link.

python -m benchmarks.gpt124m [--strategy RECIPE ...] [--steps N] [--link 1gbit] [--batch N] [--micro N] [--context N]
    [--device cuda]

The model has the blocks of GPT-2 small (12 layers, 768 wide) and a vocabulary of bytes, and learns Python's own
library. It prints what a step takes and waits, the bytes of the interfaces, the memory of each worker, and the loss.
Several recipes run one after another in the same processes, each from the same start.

On a GPU both workers share the first one, compute in bf16 by autocast, and send over Gloo.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.lab.emulate import Network, parse_links, run_workers
from thinwire.lab.tasks.models.base import build
from thinwire.lab.tasks.models.gpt import GPT, GPT_SIZES
from thinwire.worker.worker import internals_of

RECIPE = "DiLoCo(period=8, fragments=4, delay=2, mixing=0.5, codec=Quantize(4))"


def main() -> None:
    """Start two workers in a network of their own, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", nargs="+", default=[RECIPE])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro", type=int, default=1, help="batches of which a step accumulates the gradients")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    rows: list[dict[str, Any]] = []

    def read(rank: int, stream: str, line: str) -> None:
        if line.startswith("{"):
            rows.append(json.loads(line))
        else:
            print(f"rank {rank}: {line}", file=sys.stderr)

    with Network(parse_links(options.link, 2)) as network:
        command = [sys.executable, "-m", "benchmarks.gpt124m", *sys.argv[1:], "--worker"]
        exits = run_workers(command, 2, network=network, on_line=read, timeout=7200)
    if any(record.code for record in exits):
        raise SystemExit(1)
    for strategy in options.strategy:
        own = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: row["rank"])
        print(f"{strategy}, {options.link}, {options.steps} steps, {options.batch} x {options.context} tokens")
        for name in (each for each in own[0] if each != "strategy"):
            print(f"{name:32}", *(f"{row[name]:12.4g}" for row in own))


def tokens_of(rank: int) -> Tensor:
    """One half of Python's own library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files[rank::2])
    return torch.frombuffer(bytearray(text[: len(text) // 2 * 2]), dtype=torch.uint8).long()


def train(options: argparse.Namespace) -> None:
    """Run every recipe as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for strategy in options.strategy:
        train_by(strategy, options)
    dist.destroy_process_group()


def train_by(strategy: str, options: argparse.Namespace) -> None:
    """One worker's loop, and its figures as a line of JSON."""
    rank, device = dist.get_rank(), torch.device(options.device)
    on_gpu = device.type == "cuda"
    model = build(lambda: GPT(GPT_SIZES["124m"], context=options.context, vocabulary=256), seed=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    worker = thinwire.attach(model, optimizer, strategy, timeout=600)
    tokens, draw = tokens_of(rank).to(device), torch.Generator().manual_seed(rank)
    meter, begun = worker.comm.meter, sent_bytes()
    payload, waited = meter.payload_bytes, meter.exposed_seconds
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(options.steps):
        start, total = time.perf_counter(), torch.zeros((), device=device)
        for _ in range(options.micro):
            first = torch.randint(len(tokens) - options.context - 1, (options.batch, 1), generator=draw)
            rows = tokens[(first + torch.arange(options.context + 1)).to(device)]
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                scores = model(rows[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, rows[:, 1:].flatten()) / options.micro
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        print(f"step {step}: loss {losses[-1]:.3f}, {seconds[-1]:.2f} s", flush=True)
    internals_of(worker).wait_pending()
    parameters = sum(p.numel() for p in model.parameters())
    found = {
        "strategy": strategy,
        "rank": rank,
        "parameters, millions": parameters / 1e6,
        "mean step, seconds": statistics.mean(seconds[options.steps // 4 :]),
        "median step, seconds": statistics.median(seconds),
        "waits per step, seconds": (meter.exposed_seconds - waited) / options.steps,
        "payload per step, MB": (meter.payload_bytes - payload) / options.steps / 1e6,
        "interface per step, MB": (sent_bytes() - begun) / options.steps / 1e6,
        "fp32 all-reduce per step, MB": 4 * parameters / 1e6,
        "peak memory, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
        "first loss": losses[0],
        "mean of the last 4 losses": statistics.mean(losses[-4:]),
    }
    if on_gpu:
        found["peak on the GPU, GiB"] = torch.cuda.max_memory_allocated() / (1 << 30)
    print(json.dumps(found), flush=True)
    worker.detach()


def sent_bytes() -> int:
    """By this namespace's interfaces but the loopback, since their start."""
    rows = [row.partition(":") for row in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, _, numbers in rows if name.strip() != "lo")


if __name__ == "__main__":
    main()
