# SPDX-License-Identifier: Apache-2.0
"""Lightning with a thinwire strategy is the plain loop, bit for bit: as its Strategy, and as a callback beside DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.integrations.small import HALF, STEPS, Net, batch_of, equal, optimizer_of, plain_loop, weights
from tests.pool import run_processes

pytest.importorskip("lightning", reason="needs lightning")


class Batches:
    """This worker's batches; Lightning saves the place of loaders that have a state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done = rank, 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.done < STEPS:
            self.done += 1
            yield batch_of(self.rank, self.done - 1)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def trainer_of(folder: str, recipe: str, steps: int, how: str, *, width: int = 16) -> tuple[Any, Any, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    from thinwire.integrations.lightning import Callback, Strategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("loss", self.net(**batch)["loss"], sync_dist=False)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=HALF, save_top_k=-1)
    newest = ModelCheckpoint(f"{folder}/newest", filename="{step}", every_n_train_steps=HALF, mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        strategy=Strategy(recipe) if how == "strategy" else DDPStrategy(),
        callbacks=[saver, newest] if how == "strategy" else [saver, newest, Callback(recipe)],
        logger=CSVLogger(folder),
        log_every_n_steps=10,
        val_check_interval=HALF,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rank = torch.distributed.get_rank()
    return trainer, Module(), [Batches(rank), Batches(rank)]


def whole_and_resumed(folder: str, recipe: str, how: str) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")  # Lightning's advice
    plain, half = plain_loop(recipe, clip=1.0), plain_loop(recipe, clip=1.0, steps=HALF)
    trainer, module, loaders = trainer_of(folder, recipe, STEPS, how)
    trainer.fit(module, *loaders)
    path = f"{folder}/step={HALF}.ckpt"
    found = {"whole": equal(weights(module.net), plain), "validated": "loss" in trainer.callback_metrics}
    torch.distributed.barrier()  # rank 0 removes
    left = sorted(each.name for each in Path(folder, "newest").iterdir())
    found["older checkpoints are removed whole"] = left == [f"step={STEPS}.ckpt", f"step={STEPS}.ckpt.workers"]
    found["the strategy's methods are its own again"] = not {"save_checkpoint", "teardown"} & set(
        vars(trainer.strategy)
    )
    torch.distributed.barrier()
    again, second, loaders = trainer_of(folder, recipe, STEPS, how)
    again.fit(second, *loaders, ckpt_path=path)
    found["resumed"] = equal(weights(second.net), plain)
    saved = torch.load(path, weights_only=True)["state_dict"]
    found["the checkpoint"] = equal([saved[f"net.{name}"] for name in Net().state_dict()], half)
    found["logged"] = (
        trainer.global_rank > 0 or "thinwire/bytes" in Path(trainer.logger.log_dir, "metrics.csv").read_text()
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["strategy", "callback"])
@pytest.mark.parametrize("recipe", ["DiLoCo(period=8)", "AllReduce()"])
def test_training_and_resuming_are_the_plain_loop_bit_for_bit(recipe: str, how: str, tmp_path: Path) -> None:
    for found in run_processes(2, whole_and_resumed, str(tmp_path), recipe, how, seconds=110):
        assert all(found.values()), found


def with_a_hook(folder: str) -> bool:
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")

    class OnCpuToo(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            # Lightning does this itself on GPUs only.
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    rank = torch.distributed.get_rank()
    plain = plain_loop("AllReduce(codec=Bf16())", steps=6)
    torch.distributed.destroy_process_group()  # Lightning makes its own, after the strategy and the hook
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    strategy = OnCpuToo(ddp_comm_hook=thinwire.ddp_hook(thinwire.Bf16()))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_steps=6, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, Batches(rank))
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(weights(module.net), plain, strict=True))


@pytest.mark.slow
def test_a_hook_that_is_made_before_the_group_averages_gradients(tmp_path: Path) -> None:
    assert run_processes(2, with_a_hook, str(tmp_path), seconds=100) == [True, True]
