# SPDX-License-Identifier: Apache-2.0
"""Ray Train with a thinwire strategy is the plain loop, bit for bit; checkpoints go through its own report."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.small import HALF, STEPS, Net, batch_of, equal, optimizer_of, plain_loop, weights
from thinwire import LocalSGD
from thinwire.errors import ConfigError


def loop(settings: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_model
    from torch import nn

    from thinwire.integrations.ray_train import attach, report

    model = Net()
    wrapped = prepare_model(model, move_to_device=False)
    optimizer = optimizer_of(model)
    worker = attach(wrapped, optimizer)
    rank = ray.train.get_context().get_world_rank()
    for step in range(worker.step, settings["steps"]):
        wrapped(**batch_of(rank, step))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == HALF - 5:
            report(worker, {"equal": False})
    with worker.consensus() as agreed:
        found = weights(agreed)
    plain = plain_loop(settings["recipe"], clip=1.0, steps=settings["steps"])
    report(worker, {"equal": equal(found, plain)})
    worker.detach()
    with pytest.raises(ConfigError, match=r"Report before detach\(\)"):
        report(worker, {"equal": False})


@pytest.fixture
def ray() -> Any:
    warnings.simplefilter("ignore")  # Ray's own
    ray = pytest.importorskip("ray", reason="needs ray[train]")
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=3, include_dashboard=False, logging_level="error", object_store_memory=80 << 20)
    yield ray
    ray.shutdown()


def run(ray: Any, folder: Path, name: str, steps: int) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from thinwire.integrations.ray_train import Config

    recipe = "DiLoCo(period=8)"
    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": steps, "recipe": recipe},
        torch_config=Config(recipe, backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(folder)),
    )
    return trainer.fit()


@pytest.mark.parametrize(
    ("given", "configured", "period"),
    [(None, "LocalSGD(period=3)", 3), ("LocalSGD(period=2)", None, 2), ("LocalSGD(period=2)", "LocalSGD(period=3)", 2)],
)
def test_the_strategy_is_the_given_one_or_that_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, given: str | None, configured: str | None, period: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        train = pytest.importorskip("ray.train", reason="needs ray[train]")
        from thinwire.integrations.ray_train import attach
    monkeypatch.setattr(train, "get_checkpoint", lambda: None)
    monkeypatch.delenv("THINWIRE_RAY_STRATEGY", raising=False)
    model = Net()
    with pytest.raises(ConfigError, match="no strategy: pass TorchTrainer"):
        attach(model, optimizer_of(model))
    if configured is not None:
        monkeypatch.setenv("THINWIRE_RAY_STRATEGY", configured)
    worker = attach(model, optimizer_of(model), given)
    assert worker.strategy == LocalSGD(period=period)
    worker.detach()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_and_resuming_are_the_plain_loop_bit_for_bit(ray: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    first = run(ray, tmp_path, "run", HALF)
    assert first.metrics["equal"] and first.metrics["thinwire/step"] == HALF
    with first.checkpoint.as_directory() as folder:
        saved = load_file(f"{folder}/model.safetensors")
    assert sorted(saved) == sorted(Net().state_dict())
    # Of the same name, as a job that was stopped and is started again.
    second = run(ray, tmp_path, "run", STEPS)
    assert second.metrics["equal"] and second.metrics["thinwire/step"] == STEPS
