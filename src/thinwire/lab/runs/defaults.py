# SPDX-License-Identifier: Apache-2.0
"""Complete the settings of a run, and refuse what cannot work before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from thinwire.errors import ConfigError
from thinwire.lab.emulate import available, parse_links, parse_stragglers
from thinwire.lab.runs.baselines import Baseline
from thinwire.lab.runs.coreset import check_policy
from thinwire.lab.runs.own_functions import task_of
from thinwire.lab.runs.recipes import describe, parse_late, parse_recipe, parse_strategy
from thinwire.lab.runs.settings import MOST_WORKERS, Settings, parse_mesh
from thinwire.lab.runs.switches import check_switches
from thinwire.lab.runs.tensor import check_tensor_parallel, size_for
from thinwire.lab.tasks import Task
from thinwire.methods.strategies.base import check_workers
from thinwire.planning.doctor.host import usable_cores
from thinwire.worker.compatibility import check_survives

_STEPS = 200
# The limit of a run with only a target, which may never be reached.
_TARGET_SECONDS = 900.0
_EVALUATIONS = 10


def resolve(asked: Mapping[str, Any]) -> Settings:
    """Make settings from the fields that were given; the task's defaults fill in the others.

    Args:
        asked: fields of `Settings` by name; None leaves a field open.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    rows, columns = parse_mesh(given.get("tensor_parallel"), given.get("workers", 1))
    given["strategy"] = check_recipe(given.get("strategy", "AllReduce()"), given.get("workers", 1) // (rows * columns))
    check_nonfinite(given["strategy"], given.get("nonfinite", "raise"))
    if "switch" in given:
        given["switch"] = check_switches(given["switch"], given["strategy"], given.get("workers", 1))
    _check_environment(given)
    task = task_of(given)
    if "coreset" in given:
        given["coreset"] = check_policy(given["coreset"], task, given.get("optimizer", task.defaults.optimizer))
    settings = Settings(**_filled(given, task))
    if "momentum" in given and settings.optimizer != "sgd":
        name = f"momentum={settings.momentum} with the optimizer {settings.optimizer}"
        raise ConfigError(f"{name}: is the momentum of sgd. Leave out one of them")
    check_tensor_parallel(settings, task, parse_recipe(settings.strategy))
    if settings.elastic:
        check_recipe_survives(settings)
    elif settings.on_notice is not None:
        check_can_save(settings)
    task.shards(settings.copies, split=settings.split, seed=settings.seed)
    return settings if "timeout" in given else replace(settings, timeout=default_timeout(settings, task))


def check_recipe_survives(settings: Settings) -> None:
    """Refuse a recipe that cannot continue when a worker is lost.

    Raises:
        ConfigError: with the reason.
    """
    recipe = parse_strategy(settings.strategy, "which ends with any worker. Use AllReduce() with elastic")
    check_survives(recipe)
    if settings.late is not None:
        optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=1.0)
        parse_late(settings.late).check(recipe, optimizer, init="broadcast", global_batch=None)


def check_can_save(settings: Settings) -> None:
    """Refuse to save with notice what cannot be saved, or where ranks do not hear of each other's notice.

    Raises:
        ConfigError: with the reason.
    """
    parse_strategy(settings.strategy, f"which cannot be saved. Use AllReduce() with on_notice={settings.on_notice!r}")
    if settings.tensor_parallel is not None:
        raise ConfigError(
            f"on_notice={settings.on_notice!r} with tensor_parallel={settings.tensor_parallel!r}: only the ranks that "
            "hold the same part of the model would learn of a signal. Use save_every"
        )


def check_recipe(text: str, workers: int) -> str:
    """Check that a recipe serves this number of workers; returns its canonical form.

    Raises:
        ConfigError: it cannot be read, or does not serve this number.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    if workers > MOST_WORKERS:
        raise ConfigError(f"workers={workers}: must be at most {MOST_WORKERS}")
    if text.strip() == "auto":
        raise ConfigError("strategy='auto': is for attach(). Give a recipe; `thinwire plan` recommends one")
    recipe = parse_recipe(text)
    if isinstance(recipe, Baseline):
        recipe.check(workers)
    else:
        check_workers(recipe, workers)
    return describe(recipe)


def check_nonfinite(strategy: str, policy: str) -> None:
    """Refuse to leave out steps under one of PyTorch's own methods, which have no means to do so together.

    Raises:
        ConfigError: with the policy and what to use instead.
    """
    if policy == "skip" and isinstance(parse_recipe(strategy), Baseline):
        raise ConfigError(
            f"nonfinite='skip' with {strategy}: PyTorch's own methods cannot leave out a step on all ranks. Use "
            "'raise' or 'ignore', or AllReduce() instead of ddp"
        )


def _check_environment(given: Mapping[str, Any]) -> None:
    """Check links, stragglers, libraries and GPUs, before the task's data are loaded."""
    workers = given.get("workers", 1)
    parse_stragglers(given.get("slow"), given.get("stall"), workers=workers)
    if given.get("link") is not None:
        parse_links(given["link"], workers)
        if (reason := available()) is not None:
            raise ConfigError(f"link {given['link']!r}: this machine cannot emulate a network: {reason}")
    if given.get("tensorboard") and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard=True: the library is missing; pip install 'thinwire[track]'")
    if given.get("device") == "cuda":
        if given.get("link") is not None:
            raise ConfigError("device='cuda' with a link: only CPU workers can be put behind emulated links")
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or given.get("workers") or 1)
        if torch.cuda.device_count() < local:
            gpus = torch.cuda.device_count()
            raise ConfigError(f"device='cuda' with {local} workers here: torch sees {gpus} GPUs. Use fewer or 'cpu'")


def _filled(given: dict[str, Any], task: Task) -> dict[str, Any]:
    defaults = task.defaults_for(given["optimizer"]) if "optimizer" in given else task.defaults
    own = {name: getattr(defaults, name) for name in ("optimizer", "lr", "batch_size", "momentum", "weight_decay")}
    mesh = parse_mesh(given.get("tensor_parallel"), given.get("workers", 1))
    filled: dict[str, Any] = {
        "model": task.default_size if mesh == (1, 1) else size_for(task, *mesh),
        "threads": default_threads(given.get("workers", 1)),
        **own,
        **given,
    }
    if not {"steps", "seconds", "target_loss"} & filled.keys():
        filled["steps"] = _STEPS
    if filled.keys().isdisjoint({"steps", "seconds"}):
        filled["seconds"] = _TARGET_SECONDS
    # Where a clock or a target may end the run, evaluations follow the clock instead.
    if "eval_every" not in filled and filled.keys().isdisjoint({"seconds", "target_loss"}):
        filled["eval_every"] = max(1, filled["steps"] // _EVALUATIONS)
    return filled


def default_threads(workers: int) -> int:
    """Threads per worker: OMP_NUM_THREADS, or this machine's cores divided by the number of workers."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    return max(1, usable_cores() // workers)


def default_timeout(settings: Settings, task: Task) -> float:
    """Return a minute, or several times what sending the whole model takes on the slowest link."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in task.model(settings.model, seed=settings.seed).parameters())
    links = parse_links(settings.link or "none", settings.workers)
    slowest = min((link.bits_per_second or 1e9 for link in links), default=1e9)
    slower = max(each.factor for each in parse_stragglers(settings.slow, settings.stall, workers=settings.workers))
    # Four times what the slowest link needs to carry one model per worker, at 32 bits per parameter.
    return max(60.0 * min(slower, 10), 4 * settings.workers * 32 * parameters / slowest)
