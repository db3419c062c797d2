# SPDX-License-Identifier: Apache-2.0
"""As one of several workers behind an emulated link: what training steps of some recipes put on its interface."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.core.comm.group import GroupComm
from thinwire.worker.worker import internals_of

ELEMENTS = 300_000
STEPS = 8


def counters() -> list[int]:
    """Bytes and packets sent, and received, by eth0."""
    rows = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(row.partition(":")[2].split() for row in rows if row.strip().startswith("eth0:"))
    return [int(fields[place]) for place in (8, 9, 0, 1)]


def main(recipes: list[str]) -> None:
    """Train with each recipe; every rank prints a line of JSON for each: payload, and the counters' difference."""
    dist.init_process_group("gloo")
    control = GroupComm(timeout=30)

    def still() -> list[int]:
        # The last acknowledgements are on the way.
        control.all_reduce_(torch.zeros(1)).wait()
        time.sleep(0.05)
        return counters()

    for recipe in recipes:
        model = nn.ParameterList([torch.zeros(ELEMENTS)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, recipe, timeout=30)
        sent, before = worker.comm.meter.payload_bytes, still()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model[0].square().sum().backward()
            optimizer.step()
        internals_of(worker).wait_pending()
        figures = [now - then for now, then in zip(still(), before, strict=True)]
        sys.stdout.write(json.dumps([recipe, worker.comm.meter.payload_bytes - sent, *figures]) + "\n")
        sys.stdout.flush()
        worker.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
