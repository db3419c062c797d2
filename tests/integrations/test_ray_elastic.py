# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as Ray actors: one is killed by Ray, the other trains on, and a new actor joins."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire

pytest.importorskip("ray", reason="needs ray[train]")
pytestmark = pytest.mark.slow


@pytest.fixture
def ray() -> Any:
    warnings.simplefilter("ignore")  # Ray's own
    import ray

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=3, include_dashboard=False, logging_level="error", object_store_memory=80 << 20)
    yield ray
    ray.shutdown()


def loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains until somebody has come in the place of a lost one, and some steps more."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker = thinwire.attach(model, optimizer, settings["recipe"], elastic=True, timeout=60)
    sizes = [worker.size]
    worker.elastic.on_view.append(lambda view: sizes.append(view.size))

    def ends_at() -> int | None:
        joins = [crew.begins for crew in worker.elastic.crews()[1:] if len(crew.members) == settings["workers"]]
        return joins[0] + 20 if joins else None

    while (last := ends_at()) is None or worker.step < last:
        if worker.rank == 0:
            with Path(settings["steps"]).open("a") as file:
                file.write(".")
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    with worker.consensus():
        agreed = [p.tolist() for p in model.parameters()]
    return {"sizes": sizes, "step": worker.step, "agreed": agreed}


@pytest.mark.timeout(300)
def test_an_actor_is_killed_the_other_trains_on_and_another_actor_joins(ray: Any, tmp_path: Path) -> None:
    from thinwire.integrations import ray_elastic

    start, killers = ray_elastic.Group.start, list[threading.Thread]()

    def start_and_kill(group: ray_elastic.Group, rank: int) -> None:
        """Rank 0 is killed when it has taken ten steps."""
        start(group, rank)
        if not killers:
            (actor,) = [actor for _, actor in group.actors.values()]
            killers.append(threading.Thread(target=kill_when, args=(tmp_path / "steps", lambda: ray.kill(actor))))
            killers[0].start()

    settings = {"recipe": "AllReduce()", "workers": 2, "steps": tmp_path / "steps"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_elastic.Group, "start", start_and_kill)
        results = ray_elastic.run(loop, settings, workers=2, restarts=1)
    killers[0].join(10)
    assert sorted(results) == [0, 1]
    assert results[1]["sizes"] == [2, 1, 2] and results[0]["sizes"] == [2]
    assert results[0]["step"] == results[1]["step"] and results[0]["agreed"] == results[1]["agreed"]


def kill_when(path: Path, kill: Callable[[], None]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and not (path.exists() and len(path.read_text()) >= 10):
        time.sleep(0.05)
    kill()


@pytest.mark.timeout(300)
def test_an_error_of_the_loop_is_raised_and_a_group_that_is_lost_is_named(ray: Any) -> None:
    from thinwire.errors import PeerLostError
    from thinwire.integrations import ray_elastic

    with pytest.raises(ZeroDivisionError):
        ray_elastic.run(lambda _: 1 / 0, workers=2, restarts=3)
    with pytest.raises(PeerLostError, match="all 1 actors were lost"):
        ray_elastic.run(lambda _: os._exit(1), workers=1, restarts=3)
    with pytest.raises(thinwire.CommTimeoutError, match=r"1 of 4 actors have not started within 20 s.*CPU 3, GPU 0\."):
        ray_elastic.run(lambda _: time.sleep(100), workers=4, start_seconds=20)
    with pytest.raises(thinwire.ConfigError, match="workers=0"):
        ray_elastic.run(loop, workers=0)


@pytest.mark.timeout(300)
def test_the_example_of_the_page_runs(ray: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/elastic-clusters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"prepared": prepared, "loss_fn": torch.nn.functional.mse_loss}
    exec(code, names)
    assert names["results"] == {0: 200, 1: 200}


def prepared(_: Any) -> tuple[Any, Any, Any]:
    model = torch.nn.Linear(3, 1)
    batch = torch.ones(4, 3), torch.ones(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), [batch] * 30
