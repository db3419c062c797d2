# SPDX-License-Identifier: Apache-2.0
"""Bytes and waits as curves in TensorBoard and W&B; integrations whose tool is absent say what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.integrations.loggers import TensorBoard, WandB, log_to


def trained(logger: Any) -> None:
    def train(comm: thinwire.Comm) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, "LocalSGD(period=2)", comm=comm)
        if comm.rank == 0:
            log_to(worker, logger, every=2)
        for _ in range(4):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        worker.detach()

    thinwire.run_threads(2, train)


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, figures: Any, step: int) -> None:
        self.rows.append((step, dict(figures)))


def test_figures_are_those_since_the_last_record() -> None:
    trained(logger := Kept())
    assert [step for step, _ in logger.rows] == [2, 4]
    # One average of five numbers in two steps.
    assert [row["thinwire/bytes_per_step"] for _, row in logger.rows] == [10.0, 10.0]
    assert logger.rows[1][1]["thinwire/bytes"] - logger.rows[0][1]["thinwire/bytes"] == 20.0


def test_no_record_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "LocalSGD(period=2)")
    with pytest.raises(thinwire.ConfigError, match="every=0"):
        log_to(worker, Kept(), every=0)


@pytest.mark.slow
def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoard(tmp_path)
    trained(logger)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [row.step for row in events.Scalars("thinwire/bytes_per_step")] == [2, 4]


def into_wandb(folder: str) -> None:
    import wandb

    with pytest.raises(thinwire.ConfigError, match="no run is open"):
        WandB()
    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    trained(WandB())
    print(run.summary["thinwire/step"], run.summary["thinwire/bytes_per_step"])
    run.finish()


@pytest.mark.slow
def test_wandb_gets_the_figures_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    # In a process of its own: W&B leaves threads and a service to the end of the process.
    program = f"from {into_wandb.__module__} import into_wandb; into_wandb({str(tmp_path)!r})"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [float(each) for each in done.stdout.split()] == [4, 10]


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
try:
    __import__("thinwire.integrations." + sys.argv[2], fromlist=["x"])
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("tool", "module", "package"),
    [
        ("transformers", "transformers", "transformers[torch]"),
        ("accelerate", "accelerate", "accelerate"),
        ("lightning", "lightning", "lightning"),
        ("ray", "ray_train", "ray[train]"),
    ],
)
@pytest.mark.slow
def test_an_integration_without_its_tool_says_what_to_install(tool: str, module: str, package: str) -> None:
    done = subprocess.run([sys.executable, "-c", HIDE, tool, module], capture_output=True, text=True, timeout=60)
    assert f"pip install '{package}'" in done.stdout, done.stderr
