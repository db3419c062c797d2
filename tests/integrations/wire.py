# SPDX-License-Identifier: Apache-2.0
"""One worker of a trainer in a network namespace of its own: prints the bytes that its interface sent.

Run as `python -m tests.integrations.wire TOOL FOLDER` by the test of bytes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH, RECIPE, FIRST, LAST = 24_000, "LocalSGD(period=10)", 11, 51
AVERAGES = 4  # at the steps 20, 30, 40 and 50


def sent_bytes() -> int:
    """By all interfaces but the loopback's, since the start."""
    rows = [row.partition(":") for row in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[8]) for name, _, numbers in rows if name.strip() != "lo")


def watch() -> list[int]:
    """What was sent up to every step, by whichever optimizer takes it."""
    seen: list[int] = []
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: seen.append(sent_bytes()))
    return seen


def by_transformers(folder: str) -> None:
    from tests.integrations.test_transformers import trainer_of

    trainer_of(folder, RECIPE, LAST, width=WIDTH).train()


def by_accelerate(folder: str) -> None:
    from tests.integrations.small import batch_of
    from tests.integrations.test_accelerate import prepared

    accelerator, model, optimizer, worker = prepared(RECIPE, width=WIDTH)
    for step in range(LAST):
        accelerator.backward(model(**batch_of(worker.comm.rank, step % 50))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def by_lightning(folder: str, how: str) -> None:
    from tests.integrations.test_lightning import trainer_of

    trainer, module, loaders = trainer_of(folder, RECIPE, LAST, how, width=WIDTH)
    trainer.limit_val_batches = 0
    # A checkpoint holds the model that all agree on, which costs one average more.
    trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ != "ModelCheckpoint"]
    trainer.fit(module, loaders[0])


TOOLS: dict[str, Any] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": lambda folder: by_lightning(folder, "strategy"),
    "lightning-callback": lambda folder: by_lightning(folder, "callback"),
}


def main() -> None:
    """Train, and print what was sent between two steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = watch()
    TOOLS[sys.argv[1]](sys.argv[2])
    print("sent", seen[LAST - 1] - seen[FIRST - 1], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
