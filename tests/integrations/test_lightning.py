# SPDX-License-Identifier: Apache-2.0
"""Lightning with a thinwire strategy is the plain loop, bit for bit: as its Strategy, and as a callback beside DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.integrations.small import HALF, STEPS, Net, batch_of, equal, optimizer_of, plain_loop, weights
from tests.pool import run_processes

# Imported where a test needs it, which takes seconds.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


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


class Logged:
    """What is logged of bytes in a run."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, float]] = []

    def logger(self) -> Any:
        from lightning.pytorch.loggers.logger import Logger

        rows = self.rows

        class Rows(Logger):
            name, version = "rows", 0  # pyright: ignore[reportAssignmentType]

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                if "thinwire/bytes" in metrics:
                    rows.append((step, metrics["thinwire/bytes_per_step"]))

            def log_hyperparams(self, *given: Any, **more: Any) -> None:
                """Nothing."""

        return Rows()


def fitted(how: str, recipe: str, savers: list[Any], **settings: Any) -> tuple[Any, list[tuple[int | None, float]]]:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from thinwire.integrations.lightning import Callback, Strategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            self.log("own", float(self.global_rank))  # as a metric that ranks do not average
            return self.net(**batch)["loss"]  # not through the module's own forward

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    resume, logged = settings.pop("ckpt_path", None), Logged()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Strategy(recipe) if how == "strategy" else DDPStrategy(),
        callbacks=savers if how == "strategy" else [*savers, Callback(recipe)],
        logger=logged.logger(),
        log_every_n_steps=1,
        enable_checkpointing=bool(savers),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(Module(), Batches(torch.distributed.get_rank()), ckpt_path=resume)
    return trainer, logged.rows


@pytest.mark.parametrize(("every", "logged"), fast_where(lambda each: each[0] == 3, [(0, []), (3, [6]), (4, [])]))
def test_a_trainer_that_never_logs_is_served(every: int, logged: list[int]) -> None:
    from thinwire.integrations.lightning import Callback

    found: list[int] = []
    logger = SimpleNamespace(log_metrics=lambda figures, step: found.append(step))
    callback: Any = Callback("AllReduce()")
    callback.session = SimpleNamespace(figures=dict)
    # What barebones=True sets is 0.
    trainer = SimpleNamespace(global_step=6, log_every_n_steps=every, loggers=[logger])
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert found == logged


def features(folder: str) -> dict[str, Any]:
    import warnings

    from lightning.pytorch.callbacks import ModelCheckpoint

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    parameters = sum(x.numel() for x in Net().parameters())
    for how in ("strategy", "callback"):
        _, rows = fitted(how, "AllReduce()", [], max_steps=3, accumulate_grad_batches=4)
        found[f"{how}: once a step"] = rows == [(step, 4.0 * parameters) for step in (1, 2, 3)]
    # So that weights tell whether they are those that workers agree on.
    thinwire.LocalSGD.average = lambda self, r, at="now": torch.full_like(r.x, 7.0)  # type: ignore[method-assign]
    alone = ModelCheckpoint(f"{folder}/alone", filename="x", every_n_train_steps=1, save_weights_only=True)
    whole = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")
    # Not at the end of a round, after which parameters are equal without an average.
    trainer, _ = fitted("strategy", "LocalSGD(period=3)", [alone, whole], max_steps=4)
    found["the strategy's method is its own again"] = "lightning_module_state_dict" not in vars(trainer.strategy)
    for path in (f"{folder}/alone/x.ckpt", f"{folder}/step=2.ckpt"):
        saved = torch.load(path, weights_only=True)["state_dict"]
        found[path] = saved and all(bool((x == 7).all()) for x in saved.values())
    torch.distributed.barrier()
    whole = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last="link")
    trainer, _ = fitted("strategy", "LocalSGD(period=3)", [whole], max_steps=6, ckpt_path=f"{folder}/last.ckpt")
    found["a link is resumed"] = Path(f"{folder}/last.ckpt").is_symlink() and trainer.global_step == 6
    # A name made of a metric is another one on each rank.
    named = ModelCheckpoint(f"{folder}/named", "{own}", every_n_train_steps=2, save_top_k=-1)
    fitted("strategy", "LocalSGD(period=2)", [named], max_steps=2)
    torch.distributed.barrier()
    found["one name"] = [each.name for each in Path(folder, "named").glob("*.workers")] == ["own=0.0.ckpt.workers"]
    path = f"{folder}/named/own=0.0.ckpt"
    trainer, _ = fitted("strategy", "LocalSGD(period=2)", [], max_steps=4, ckpt_path=path)
    found["its state is found"] = trainer.global_step == 4
    # A name that is used again holds the last state alone.
    for steps in (6, 4):
        same = ModelCheckpoint(f"{folder}/same", "x", every_n_train_steps=2, enable_version_counter=False)
        fitted("strategy", "LocalSGD(period=2)", [same], max_steps=steps)
        torch.distributed.barrier()
        states = [each.name for each in Path(folder, "same", "x.ckpt.workers", "thinwire").iterdir()]
        found[f"one state after {steps} steps"] = states == [f"step-{steps:08d}"]
    return found


@pytest.mark.slow
def test_what_lightning_does_besides_training(tmp_path: Path) -> None:
    for found in run_processes(2, features, str(tmp_path), seconds=110):
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
