# SPDX-License-Identifier: Apache-2.0
"""What the documentation's fragments of code take for granted: a model, an optimizer, a loader, a mesh.

A block of Python that cannot run by itself is a fragment. It runs with the names of `common`, and with those of `OWN`
for its page and number; where it leaves something out with a line "...", `LEFT_OUT` says what stands there.
"""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from thinwire.arrays import fusion

Names = dict[str, Any]

PROCESSES = {
    "docs/codecs/uses.md": 2,
    "docs/how-to/heterogeneity.md": 2,
    "docs/how-to/sharded-models.md": 8,
    "docs/how-to/training-loops.md": 4,
    "docs/strategies/ad-psgd.md": 2,
    "docs/strategies/async-leader-sgd.md": 2,
    "docs/strategies/backup-workers.md": 2,
    "docs/strategies/leader-sgd.md": 2,
    "docs/tensor-parallel/index.md": 8,
}
"""How many ranks run the fragments of a page, where one alone does not do."""

STEP = "loss_of(model, batch).backward()"
LEFT_OUT = {
    "docs/coresets/training.md": "loss.backward()",
    "docs/how-to/heterogeneity.md": "optimizer.zero_grad(); loss_of(model, batch).backward()",
    "docs/strategies/backup-workers.md": f"{STEP}; optimizer.step()",
    "docs/strategies/local-sgd.md": "loss_fn(model(x), y).backward()",
}
NEEDS = {
    **{("docs/fusion/adapters.md", number): "peft" for number in range(5)},
    ("docs/fusion/sweeps.md", 0): "ray",
    ("docs/how-to/trainers.md", 0): "accelerate",  # and transformers
    ("docs/how-to/trainers.md", 1): "accelerate",
    ("docs/how-to/trainers.md", 2): "lightning",
    ("docs/how-to/trainers.md", 3): "ray",
    ("docs/how-to/trainers.md", 4): "tensorboard",
    ("docs/tutorials/two-homes.md", 0): "obstore",  # and cryptography
}
"""Libraries that a fragment needs and the tests do not bring."""


def common() -> Names:
    """The usual names of a training loop, on a small model and few examples."""
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 2), nn.CrossEntropyLoss()
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model(batch[0]), batch[1])

    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "thinwire": thinwire,
        "fusion": fusion,
        **{name: getattr(thinwire, name) for name in ("attach", "BackupWorkers", "LeaderSGD", "LocalSGD", "SlowMo")},
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(inputs, targets)] * 3,
        "loss_fn": loss_fn,
        "criterion": loss_fn,
        "loss_of": loss_of,
        "next_batch": lambda step=0: (inputs, targets),
        "batch": (inputs, targets),
        "inputs": inputs,
        "targets": targets,
        "evaluate": lambda model: loss_of(model, (inputs, targets)).item(),
        "steps": 4,
        "data": TensorDataset(inputs, targets),
    }


def meshed(names: Names, shape: tuple[int, ...]) -> Names:
    """A network inside DDP, and layers to shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    return {
        "network": DistributedDataParallel(nn.Linear(4, 2)),
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")),
        "layers": [nn.Linear(4, 4), nn.Linear(4, 2)],
        "codec": thinwire.Bf16(),
        "fully_shard": fully_shard,
    }


def attached(names: Names, strategy: thinwire.Strategy) -> Names:
    """A worker with a model and an optimizer of its own."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "worker": thinwire.attach(model, optimizer, strategy)}


def with_global_batch(names: Names) -> Names:
    """A worker that has a share of a global batch."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = thinwire.attach(model, optimizer, thinwire.AllReduce(), global_batch=8)
    return {"worker": worker, "dataset": names["data"]}


def with_config(names: Names) -> Names:
    """A worker whose model has a configuration, as those of transformers have."""
    found = attached(names, thinwire.SlowMo())
    found["model"].config = SimpleNamespace(save_pretrained=lambda folder: None)
    return found


def array_of(count: int) -> Names:
    """An array of small models, an optimizer and schedules."""
    array = fusion.fuse([nn.Linear(4, 2) for _ in range(count)])
    optimizer = fusion.SGD(array.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 3
    return {
        "array": array,
        "optimizer": optimizer,
        "schedules": schedules_of(optimizer),
        "batches": batches,
        "own_batches": batches,
        "images": batches[0][0],
        "labels": batches[0][1],
    }


def schedules_of(optimizer: Any) -> Any:
    """The schedules that the page of arrays makes."""
    return fusion.Schedules(optimizer, lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 1000))


def dropped_out(dropout: float = 0.0) -> nn.Module:
    """A model with one hyperparameter."""
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 2))


def array_page(names: Names) -> Names:
    """The first fragment of the page of arrays."""
    return {**array_of(1), "make_model": dropped_out, "rates": [0.0, 0.1, 0.2, 0.3], "learning_rates": [0.1] * 4}


def plain(names: Names) -> Names:
    """What a member of an array is loaded into."""
    model = dropped_out()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    return {"plain_model": model, "plain_optimizer": optimizer, "plain_scheduler": scheduler}


def simulated(names: Names) -> Names:
    """Batches of sixteen workers."""
    return {"batches": [(torch.randn(16, 8, 4), torch.randint(2, (16, 8)))] * 3}


def selected(names: Names) -> Names:
    """Schedules of the members that were kept."""
    return {"schedules": schedules_of(names["optimizer"]), "step": 3}


def coresets(names: Names) -> Names:
    """A small data set, with one epoch for the page's hundred."""
    inputs, labels = torch.randn(40, 4), torch.arange(40) % 2
    dataset = TensorDataset(inputs, labels)
    return {
        "features": inputs,
        "own_rows": inputs,
        "labels": labels,
        "own_labels": labels,
        "comm": thinwire.core.comm.group.comm_for(),
        "plain_dataset": dataset,
        "dataset": dataset,
        "rank": 0,
        "size": 1,
        "range": lambda epochs: builtins.range(epochs // 100),
    }


def probed(names: Names) -> Names:
    """As many batches as the page reads figures after."""
    return {"loader": [names["batch"]] * 200}


def sharded(names: Names) -> Names:
    """A model of blocks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.blocks = [model[0], model[1]]  # type: ignore[assignment]
    return {"model": model}


def split(names: Names) -> Names:
    """A model that two rows and two columns can split."""
    from thinwire.tensor2d import mesh_3d, parallelize_2d

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return {"model": model, "mesh_3d": mesh_3d, "parallelize_2d": parallelize_2d}


def asynchronous(names: Names) -> Names:
    """A clock whose minute is a fifth of a second."""
    clock = SimpleNamespace(monotonic=lambda: 300 * time.monotonic())
    return {**attached(names, thinwire.AsyncLeaderSGD()), "time": clock}


def elastic(names: Names) -> Names:
    """A new worker, as the page's first loop ends with `detach`."""
    from thinwire.elastic.sampler import ElasticSampler

    return {
        **attached(names, thinwire.BackupWorkers(backups=1)),
        "data": range(64),
        "batch_size": 8,
        "ElasticSampler": ElasticSampler,
    }


def scored(names: Names) -> Names:
    """A batch that all workers have in common."""
    from thinwire.methods.strategies.leader.election import ScoreFunction

    return {"common_inputs": names["inputs"], "common_targets": names["targets"], "ScoreFunction": ScoreFunction}


def bucketed(names: Names) -> Names:
    """The variables of the page, for one worker and a bucket of this process."""
    from thinwire.core.storage.bucket import new_key

    os.environ.update(THINWIRE_RENDEZVOUS="memory://two-homes", THINWIRE_KEY=new_key(), THINWIRE_WORKERS="1")
    return {}


OWN: dict[tuple[str, int], Callable[[Names], Names]] = {
    ("docs/codecs/uses.md", 0): lambda names: meshed(names, (2, 1)),
    ("docs/coresets/selection.md", 0): coresets,
    ("docs/coresets/training.md", 0): coresets,
    ("docs/fusion/how-it-works.md", 0): lambda names: array_of(4),
    ("docs/fusion/index.md", 0): array_page,
    ("docs/fusion/index.md", 1): plain,
    ("docs/fusion/index.md", 2): simulated,
    ("docs/fusion/optimizers.md", 0): lambda names: array_of(2),
    ("docs/fusion/optimizers.md", 1): lambda names: {
        **array_of(4),
        "optimizer": fusion.AdamW(array_of(4)["array"].parameters()),
    },
    ("docs/fusion/sweeps.md", 1): lambda names: array_of(4),
    ("docs/fusion/sweeps.md", 2): selected,
    ("docs/how-to/checkpoints.md", 0): with_config,
    ("docs/how-to/elastic.md", 2): lambda names: {"batches": names["loader"], "steps": names["worker"].step + 4},
    ("docs/how-to/heterogeneity.md", 0): probed,
    ("docs/how-to/late-merging.md", 1): lambda names: attached(names, thinwire.DiLoCo()),
    ("docs/how-to/sharded-models.md", 0): sharded,
    ("docs/how-to/unequal-workers.md", 0): with_global_batch,
    ("docs/strategies/accelerated-minibatch.md", 0): lambda names: {"rounds": [[names["batch"]] * 3] * 2},
    ("docs/strategies/async-leader-sgd.md", 0): asynchronous,
    ("docs/strategies/backup-workers.md", 1): elastic,
    ("docs/strategies/leader-sgd.md", 0): lambda names: attached(names, thinwire.LeaderSGD(period=1)),
    ("docs/strategies/leader-sgd.md", 1): scored,
    ("docs/strategies/local-sgd.md", 0): lambda names: attached(names, thinwire.LocalSGD(weights="samples")),
    ("docs/tensor-parallel/index.md", 0): split,
    ("docs/tutorials/two-homes.md", 0): bucketed,
}


def run_fragments(page: str, codes: list[str], folder: str) -> list[str]:
    """Run a page's fragments one after another; returns why some could not run."""
    import importlib.util

    rank = dist.get_rank() if dist.is_initialized() else 0
    here = Path(folder) if page == "docs/fusion/sweeps.md" else Path(folder) / str(rank)
    here.mkdir(exist_ok=True)
    os.chdir(here)
    names, left_out, environment = {"__name__": "fragment", **common()}, [], dict(os.environ)
    for number, code in enumerate(codes):
        needed = NEEDS.get((page, number))
        if needed is not None and importlib.util.find_spec(needed) is None:
            left_out.append(f"{page}, fragment {number}: needs {needed}")
            continue
        if own := OWN.get((page, number)):
            names.update(own(names))
        filled = code.replace("...\n", LEFT_OUT[page] + "\n") if page in LEFT_OUT else code
        exec(compile(filled, f"{page}, fragment {number}", "exec"), names)
    if page == "docs/strategies/backup-workers.md":
        names["worker"].detach()  # a worker that has ended is a lost one otherwise
    os.environ.clear()
    os.environ.update(environment)
    if dist.is_initialized():
        dist.barrier()  # rank 0 hosts the store
    return left_out
