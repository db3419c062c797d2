# SPDX-License-Identifier: Apache-2.0
"""Accelerate with a thinwire strategy is the plain loop, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.small import HALF, STEPS, Net, batch_of, equal, optimizer_of, plain_loop, weights
from tests.pool import run_processes

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")


def prepared(recipe: str, *, width: int = 16, **settings: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, **settings)
    model = Net(width)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return accelerator, model, optimizer, attach(accelerator, model, optimizer, recipe)


def train(accelerator: Any, model: Any, optimizer: Any, worker: Any, first: int, last: int) -> None:
    for step in range(first, last):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch_of(worker.comm.rank, step))["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def agreed_weights(worker: Any) -> list[torch.Tensor]:
    with worker.consensus() as agreed:
        found = weights(agreed)
    worker.detach()
    return found


def whole_and_resumed(folder: str, recipe: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    plain, half = plain_loop(recipe, clip=1.0), plain_loop(recipe, clip=1.0, steps=HALF)
    parts = prepared(recipe)
    train(*parts, 0, HALF)
    parts[0].save_state(folder)
    train(*parts, HALF, STEPS)
    found = {"whole": equal(agreed_weights(parts[-1]), plain)}
    parts = prepared(recipe)
    parts[0].load_state(folder)
    train(*parts, HALF, STEPS)
    found["resumed"] = equal(agreed_weights(parts[-1]), plain)
    checkpoint = load_file(f"{folder}/model.safetensors")
    found["the checkpoint"] = equal([checkpoint[name] for name in Net().state_dict()], half)
    return found


@pytest.mark.parametrize("recipe", ["DiLoCo(period=8)", pytest.param("AllReduce()", marks=pytest.mark.slow)])
def test_training_and_resuming_are_the_plain_loop_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    for found in run_processes(2, whole_and_resumed, str(tmp_path), recipe, seconds=100):
        assert all(found.values()), found


def accumulated(recipe: str) -> tuple[float, int]:
    parts = prepared(recipe, gradient_accumulation_steps=2)
    before = parts[-1].comm.meter.payload_bytes
    train(*parts, 0, 8)
    return parts[-1].comm.meter.payload_bytes - before, sum(p.numel() for p in parts[1].parameters())


def test_accumulated_gradients_are_sent_once_a_step() -> None:
    for sent, parameters in run_processes(2, accumulated, "AllReduce()"):
        assert sent == 4 * 4 * parameters  # four steps of two batches, 2 (n - 1) / n vectors each


def logged(folder: str) -> list[str]:
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run")
    model = Net()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    worker = attach(accelerator, model, optimizer, "LocalSGD(period=2)", log_every=2)
    train(accelerator, model, optimizer, worker, 0, 4)
    worker.detach()
    accelerator.end_training()
    return [path.name for path in Path(folder).rglob("events*")]


@pytest.mark.slow
def test_bytes_go_to_the_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_processes(2, logged, str(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = tmp_path.rglob("events*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert [row.step for row in events.Scalars("thinwire/bytes_per_step")] == [2, 4]
