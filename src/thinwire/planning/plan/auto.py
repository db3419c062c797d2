# SPDX-License-Identifier: Apache-2.0
"""`attach(model, optimizer, "auto")`: the strategy for the network that the ranks are on, chosen by rank 0 for all.

All-reduces are timed over the ranks' own group, which takes a few hundred milliseconds, or seconds on a slow link.
What a training step takes is not known yet when a model is attached: it is read from the file that the environment
variable THINWIRE_PLAN names on rank 0, which `thinwire doctor --out` has written, and assumed otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import synchronize
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan.all_reduces import all_reduce_seconds, time_all_reduces
from thinwire.planning.plan.candidates import CANDIDATES, DENSE, measured
from thinwire.planning.plan.guard import Guard
from thinwire.planning.plan.networks import network_of_all_reduces
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.plan.search import FEW_WORKERS, Job, Planner, choose
from thinwire.planning.simulate import Network
from thinwire.planning.units import rate, seconds
from thinwire.worker.annexes import Watch
from thinwire.worker.compatibility import check_compatible
from thinwire.worker.handshake import gather_texts

FILE = "THINWIRE_PLAN"
EXAMPLES = 32
"""Through dense layers: so long a step is assumed to take where nothing says what it takes."""
WORTH = 1.2
"""What is chosen instead of AllReduce() must reach the loss so many times as soon."""
MOST_STEPS = 1.25
"""And must not have needed more than so many times the steps where that was measured."""

_SIZES, _BUDGET_SECONDS = (4 << 10, 64 << 10, 1 << 20), 0.5
_TIMED_ELEMENTS = 1 << 18
_MOST_WORKERS = 64
_LOGGER = logging.getLogger("thinwire")


def choose_for(optimizer: Optimizer, named: Mapping[str, nn.Parameter], comm: Comm) -> tuple[Strategy, Watch | None]:
    """Choose the strategy, the same on all ranks, and how to watch it.

    Args:
        optimizer: of the model.
        named: the trained parameters.
        comm: of the ranks; all of them call it.

    Returns:
        The strategy, and a guard that falls back to `AllReduce()` if that is faster; None where it was chosen.

    Raises:
        ConfigError: on all ranks, if the file that THINWIRE_PLAN names cannot be read.
        CommError: a rank does not answer.
    """
    if comm.size == 1:
        return AllReduce(), None
    device = next(iter(named.values())).device
    reduces = time_all_reduces(comm, budget=_BUDGET_SECONDS, sizes=_SIZES, device=device, figure=min)
    said: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            said = _decide(optimizer, named, network_of_all_reduces(reduces, comm.size), comm.size)
            nbytes = sum(p.numel() * p.element_size() for p in named.values())
            said["least"] = max(all_reduce_seconds(reduces, nbytes) or 0.0, min(reduces.values()))
        except ConfigError as error:
            said = {"error": str(error)}
    decision = json.loads(gather_texts(comm, json.dumps(said).encode(), device)[0])
    if "error" in decision:
        raise ConfigError(decision["error"])
    if comm.rank == 0:
        _LOGGER.log(logging.INFO if decision["known"] else logging.WARNING, "%s", decision["words"])
    strategy = parse(decision["recipe"], imports=False)
    if decision["recipe"] == DENSE:
        return strategy, None
    return strategy, partial(Guard, fallback_least=decision["least"], windows=1)


def _decide(optimizer: Optimizer, named: Mapping[str, nn.Parameter], network: Network, workers: int) -> dict[str, Any]:
    """Rank 0's decision, and its reason."""
    parameters = list(named.values())
    shapes = [tuple(p.shape) for p in parameters]
    examined = _examined(shapes)
    model_time, contention, sharing = examined or (_assumed(shapes, parameters[0].device), 0.0, 1.0)
    network = replace(network, contention=contention)
    recipes = [recipe for recipe in CANDIDATES if _serves(recipe, optimizer, parameters, workers)]
    # More workers take long to simulate, and the ring's share of the vector hardly depends on them.
    job = Job(shapes, min(workers, _MOST_WORKERS), network, model_time, parameters[0].dtype, sharing=sharing).coarse()
    # The learning rate stays as it is. The other ranks wait, and not longer than their timeout.
    table = measured(tuned=False)
    options = Planner(job, recipes, table, timed_elements=_TIMED_ELEMENTS, most_workers=FEW_WORKERS).options()
    dense = next(each for each in options if each.recipe == DENSE)
    found = choose([each for each in options if each.recipe == DENSE or each.steps <= MOST_STEPS])
    chosen = found if found.to_loss * WORTH <= dense.to_loss else dense
    basis = f"a step of {seconds(model_time.seconds)} without communication, " + (
        f"from {os.environ[FILE]}"
        if examined
        else f"which is assumed, of {EXAMPLES} examples through dense layers ({FILE} can name a file of the doctor's)"
    )
    words = (
        f'attach(..., "auto") has chosen {chosen.recipe}: {rate(network.bits_per_second)} and '
        f"{seconds(network.latency)} were measured between {workers} ranks, and with {basis}, it would take "
        f"{seconds(chosen.seconds)} a step, and {DENSE} {seconds(dense.seconds)}"
    )
    return {"recipe": chosen.recipe, "words": words, "known": examined is not None}


def _serves(recipe: str, optimizer: Optimizer, parameters: list[nn.Parameter], workers: int) -> bool:
    accuracy = measured(tuned=False).of(recipe)
    if recipe != DENSE and (accuracy is None or accuracy.missed):
        return False
    try:
        check_compatible(parse(recipe), optimizer, workers, parameters)
    except ConfigError:
        return recipe == DENSE
    return True


def _assumed(shapes: list[tuple[int, ...]], device: torch.device) -> ModelTime:
    flops = 6.0 * EXAMPLES * sum(prod(shape) for shape in shapes)
    # A GPU is not busy with less than 2048 rows.
    width = 256 if device.type == "cpu" else 2048
    taken = flops / (2 * width**3) * min(_seconds_of_product(width, device) for _ in range(6))
    return ModelTime(taken / 3, 2 * taken / 3)


def _seconds_of_product(width: int, device: torch.device) -> float:
    x = torch.ones(width, width, dtype=torch.float32, device=device)
    synchronize(device)
    start = time.perf_counter()
    torch.mm(x, x)
    synchronize(device)
    return time.perf_counter() - start


def _examined(shapes: list[tuple[int, ...]]) -> tuple[ModelTime, float, float] | None:
    """Return what the doctor has written of a step, of contention and of shared cores; None without its file.

    Raises:
        ConfigError: it is of another model, or cannot be read.
    """
    if not os.environ.get(FILE):
        return None
    path = Path(os.environ[FILE])
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        step = max(content["steps"].values(), key=lambda each: each["forward"] + each["backward"])
        timed = ModelTime(step["forward"], step["backward"], step["update"], tuple(step["ready"]))
        found = timed, float(content["contention"]), float(content["sharing"])
        theirs = [tuple(shape) for shape in step["shapes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{FILE}={path}: must be a file that thinwire doctor --out has written ({type(error).__name__}: {error})"
        ) from None
    if sum(map(prod, theirs)) != sum(map(prod, shapes)):
        raise ConfigError(
            f"{FILE}={path}: is of a model with {sum(map(prod, theirs))} trained parameters, and this one has "
            f"{sum(map(prod, shapes))}. Run thinwire doctor with --model for this one"
        )
    return found
