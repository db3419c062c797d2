# SPDX-License-Identifier: Apache-2.0
"""Every feature of a training loop under every family of strategies: one small run per cell, and the table of them.

`python -m tests.matrix` writes `docs/reference/matrix.md`; `tests/test_matrix.py` runs all cells and compares the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire
from thinwire import ConfigError, Worker

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "matrix.md"
STEPS = 6

FAMILIES = {
    "gradients": "AllReduce()",
    "compressed gradients": "AllReduce(codec=Quantize(8))",
    "local steps": "DiLoCo(period=2)",
    "overlapped": "OverlapLocalSGD(period=2)",
    "gossip": "Gossip()",
    "push-sum": "PushSum()",
    "leaders": "LeaderSGD(period=2)",
    "backups": "BackupWorkers(backups=1)",
    "asynchronous": "ADPSGD()",
    "wrapper": "SlowMo(base=PushSum(), period=2)",
}
"""A representative of each."""

_SHARDS = "gradients of sharded parameters are the sharder's to average"
_TIMING = "its results depend on timing, so the shards and copies of one model would belong to different steps"
_LATE = "a late worker leaves out steps, and these need every worker at every step"
_PARTS = "a late worker would leave out steps of one optimizer and not of the other"
REFUSED: dict[tuple[str, str], str] = {
    **{
        (feature, family): _SHARDS
        for feature in ("FSDP2", "HSDP")
        for family in ("gradients", "compressed gradients", "backups")
    },
    **{(feature, "asynchronous"): _TIMING for feature in ("FSDP2", "HSDP")},
    ("GradScaler", "backups"): _LATE,
    **{(feature, "backups"): _PARTS for feature in ("Muon", "several optimizers")},
}
"""Of each cell that does not work: a part of the error's text."""


def net(*, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=draw), torch.randn(5, 3, generator=draw)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, **more: Any) -> Worker:
    return thinwire.attach(model, optimizer, recipe, **{"timeout": 20.0, **more})


def attach_both(
    model: nn.Module, one: torch.optim.Optimizer, other: torch.optim.Optimizer, recipe: str
) -> tuple[Worker, Worker]:
    """Two optimizers of one model."""
    first = attach(model, one, recipe)
    try:
        return first, attach(model, other, recipe)
    except ConfigError:
        first.detach()
        raise


def train(model: nn.Module, *workers: Worker, rank: int | None = None, each: Callable[[int], object] = int) -> None:
    """A user's loop; `workers` are those whose optimizers step."""
    while (step := workers[0].step) < STEPS:
        x, y = batch(workers[0].comm.rank if rank is None else rank, step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        for worker in workers:
            worker.record_batch(loss=loss.detach())
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        each(step)


def agreed(worker: Worker) -> list[Tensor]:
    with worker.consensus() as model:
        return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


def same_on_all(tensors: list[Tensor]) -> bool:
    """Whether all ranks have these bits."""
    own = torch.cat([x.detach().double().flatten() for x in tensors])
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return bool(own.isfinite().all()) and all(torch.equal(rows[0], row) for row in rows)


def check(fact: bool, text: str) -> None:
    if not fact:
        raise AssertionError(text)


def ended(recipe: str, model: nn.Module | None = None) -> list[Tensor]:
    """What the loop ends with: for a model with a feature, or for the plain one."""
    model = net() if model is None else model
    worker = attach(model, sgd(model), recipe)
    train(model, worker)
    found = agreed(worker)
    worker.detach()
    return found


def alike(recipe: str, a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> bool:
    """Whether two runs end alike; only those that do not depend on timing can."""
    if thinwire.parse(recipe).traits.timing_dependent:
        return True
    return all(bool(((x - y).abs() <= tolerance).all()) for x, y in zip(a, b, strict=True))


# -- the features ------------------------------------------------------------------------------------------------------


def compiled(recipe: str) -> None:
    fast: Any = torch.compile(net(), backend="aot_eager")
    check(alike(recipe, ended(recipe, fast), ended(recipe), 1e-6), "another result than without torch.compile")


def checkpointed(recipe: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x: Tensor) -> Tensor:
            if self.reentrant:
                x = x.clone().requires_grad_()
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    want = ended(recipe)
    for reentrant in (False, True):
        parts = net()
        model = nn.Sequential(Again(parts[:2], reentrant=reentrant), Again(parts[2:4], reentrant=reentrant), parts[4])
        check(alike(recipe, ended(recipe, model), want), f"another result than without, use_reentrant={reentrant}")


class Adapted(nn.Module):
    """A frozen layer and a trained update of low rank, as LoRA has it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features) / 2)
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


def low_rank(recipe: str) -> None:
    parts = net()
    frozen = [p.detach().clone() for p in parts.parameters()]
    model = nn.Sequential(*(Adapted(part) if isinstance(part, nn.Linear) else part for part in parts))
    worker = attach(model, sgd(model), recipe)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    check(sum(len(replica.x) for replica in worker.replicas) == adapters, "more than the adapters is sent")
    train(model, worker)
    check(same_on_all(agreed(worker)), "workers do not agree")
    worker.detach()
    kept = [p for p in model.parameters() if not p.requires_grad]
    check(all(map(torch.equal, kept, frozen)), "a frozen parameter has moved")


def muon(recipe: str) -> None:
    model = net(bias=False)
    matrices, rest = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
    workers = attach_both(model, torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02), recipe)
    train(model, *workers)
    with workers[0].consensus(), workers[1].consensus():
        check(same_on_all(list(model.parameters())), "workers do not agree")
    for worker in workers:
        worker.detach()


def scaled(recipe: str) -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    worker = attach(model, sgd(model), recipe, scaler=scaler)
    taken = 0
    for step in range(STEPS):
        x, y = batch(worker.comm.rank, step)
        if step == 2 and worker.comm.rank == 1:
            x = x * float("inf")
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        worker.record_batch(loss=loss.detach())
        before = worker.step
        scaler.step(worker.optimizer)
        scaler.update()
        worker.optimizer.zero_grad()
        taken += worker.step - before
    check(taken == STEPS - 1 and scaler.get_scale() == 2.0, "not all workers have skipped the same step")
    check(same_on_all(agreed(worker)), "workers do not agree")
    worker.detach()


def averaged(recipe: str) -> None:
    model = net()
    worker = attach(model, sgd(model), recipe)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    # Late workers leave out steps, so that not all would come to a consensus on the way.
    every = STEPS if worker.strategy.traits.skips_steps else 2

    def update(step: int) -> None:
        if worker.step % every == 0:
            with worker.consensus() as now:
                mean.update_parameters(now)

    train(model, worker, each=update)
    worker.detach()
    check(same_on_all(list(mean.parameters())), "averages differ between workers")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(torch.tanh(self.first(x))))


def tied(recipe: str) -> None:
    model = Tied()
    worker = attach(model, sgd(model), recipe)
    check(sum(len(replica.x) for replica in worker.replicas) == 36 + 21, "a tied parameter is sent twice")
    train(model, worker)
    check(same_on_all(agreed(worker)), "workers do not agree")
    check(model.last.weight is model.first.weight, "no longer tied")
    worker.detach()


def normed(recipe: str) -> None:
    parts = net()
    model = nn.Sequential(parts[0], nn.BatchNorm1d(8), parts[1], parts[4])
    worker = attach(model, sgd(model), recipe)
    train(model, worker)
    own = model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    found = agreed(worker)
    check(same_on_all(found), "workers do not agree")
    check(torch.equal(own, model[1].running_mean), "own statistics are not put back")  # type: ignore[arg-type]
    worker.detach()


def several(recipe: str) -> None:
    model = net()
    front, back = [*model[0].parameters(), *model[2].parameters()], list(model[4].parameters())
    workers = attach_both(model, torch.optim.SGD(front, lr=0.05), torch.optim.SGD(back, lr=0.05), recipe)
    train(model, *workers)
    with workers[0].consensus(), workers[1].consensus():
        found = [p.detach().clone() for p in model.parameters()]
    for worker in workers:
        worker.detach()
    check(same_on_all(found), "workers do not agree")
    if recipe == "AllReduce()":
        check(alike(recipe, found, ended(recipe)), "another result than with one optimizer")


def sharded(recipe: str, *, hybrid: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 2, 2), ("workers", "replicate", "shard")) if hybrid else ((2, 2), ("workers", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = net()
    inner = mesh[("replicate", "shard")] if hybrid else mesh["shard"]
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=inner)
    worker = attach(model, torch.optim.SGD(model.parameters(), lr=0.05, foreach=False), recipe, group=mesh["workers"])
    train(model, worker, rank=mesh.get_local_rank("workers"))
    with worker.consensus():
        found = [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    worker.detach()
    check(same_on_all(found), "workers do not agree")


def hybrid(recipe: str) -> None:
    sharded(recipe, hybrid=True)


FEATURES: dict[str, tuple[Callable[[str], None], str]] = {
    "torch.compile": (compiled, "the same result as without, to 1e-6; compile before or after `attach`"),
    "activation checkpointing": (checkpointed, "the same bits as without, reentrant or not"),
    "FSDP2": (sharded, "pass `group=mesh[...]` of the ranks that hold the same shard"),
    "HSDP": (hybrid, "a worker is a (replicate, shard) mesh, in which FSDP2 averages gradients"),
    "LoRA": (low_rank, "only adapters are sent during training; frozen parameters once"),
    "Muon": (
        muon,
        "with AdamW for what is no matrix: one `attach` for each, or for a `CombinedOptimizer` of both",
    ),
    "GradScaler": (scaled, "`attach(scaler=...)`: all workers skip the same steps"),
    "EMA": (
        averaged,
        "updated within `worker.consensus()`; under `BackupWorkers` after the loop, as late workers skip steps",
    ),
    "tied weights": (tied, "sent once, and still tied afterwards"),
    "BatchNorm": (normed, "each worker's own statistics, means at consensus"),
    "several optimizers": (
        several,
        "one `attach` for each, in the same order on all ranks; with `AllReduce()` the same bits as with one",
    ),
}
PROCESSES = {"FSDP2": 4, "HSDP": 8}


def run_row(feature: str) -> dict[str, str]:
    """What one rank sees of a feature, under each family: "works", the error's text, or what is wrong."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for family, recipe in FAMILIES.items():
        try:
            FEATURES[feature][0](recipe)
            found[family] = "works"
        except ConfigError as error:
            found[family] = f"refused: {error}"
        except Exception as error:
            found[family] = f"wrong: {type(error).__name__}: {error}"
        dist.barrier()  # a worker that goes on alone would be a lost one
    return found


def expected(feature: str, family: str) -> str:
    """What a cell is known to be."""
    text = REFUSED.get((feature, family))
    return "works" if text is None else text


HEAD = """# Features and strategies

`tests/matrix.py` runs every cell with two workers (four processes for FSDP2, eight for HSDP) and writes this page. What
does not work is refused before the first step, with the text below.

"""


def page() -> str:
    """The page of the table."""
    names = list(FAMILIES)
    notes: list[str] = []
    rows = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for feature in FEATURES:
        cells: list[str] = []
        for family in names:
            text = expected(feature, family)
            if text != "works" and text not in notes:
                notes.append(text)
            cells.append("yes" if text == "works" else f"no ({notes.index(text) + 1})")
        rows.append(f"| {feature} | {' | '.join(cells)} |")
    lines = [f"{i}. Refused: \u201c... {text} ...\u201d" for i, text in enumerate(notes, 1)]
    recipes = [f"| {family} | `{recipe}` |" for family, recipe in FAMILIES.items()]
    says = [f"| {feature} | {text} |" for feature, (_, text) in FEATURES.items()]
    return HEAD + "\n".join(
        [
            *rows,
            "",
            *([*lines, ""] if lines else []),
            "## Checks",
            "",
            "| Feature | Check |",
            "|---|---|",
            *says,
            "",
            "## Recipes of the families",
            "",
            "| Family | Recipe |",
            "|---|---|",
            *recipes,
            "",
        ]
    )


def matches(found: str, wanted: str) -> bool:
    """Whether a cell is what is known of it."""
    return found == "works" if wanted == "works" else found.startswith("refused:") and wanted in found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
