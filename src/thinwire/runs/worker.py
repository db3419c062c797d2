"""One rank of a run; as a program, `python -m thinwire.runs FOLDER [--resume]`, started once per rank."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.comm.base import Comm
from thinwire.emulate import Straggler
from thinwire.errors import ConfigError, ThinwireError
from thinwire.runs.baselines import Peer
from thinwire.runs.coreset import ChosenData, parse_policy
from thinwire.runs.engine import Engine, ThinwireEngine
from thinwire.runs.folder import Fields, RunFolder
from thinwire.runs.optimizer import make_optimizer
from thinwire.runs.processes import joined
from thinwire.runs.recipes import Recipe, parse_recipe
from thinwire.runs.settings import Settings
from thinwire.runs.tensor import Cut, cut_engine
from thinwire.runs.traffic import Carried
from thinwire.runs.training import RunContext, Training
from thinwire.runs.writer import Writer
from thinwire.strategies.base import Strategy
from thinwire.tasks import Shard, Task, load
from thinwire.worker.handshake import Facts, agree, gather_texts
from thinwire.worker.worker import attach

Emit = Callable[[Fields], None]
_CPU = torch.device("cpu")
_PRIVATE = ("command", "data", "threads")


def silent(_: Fields) -> None:
    """Say nothing."""


def work(settings: Settings, folder: Path, *, emit: Emit = silent, resume: bool = False) -> Fields | None:
    """Train as one rank: the one that torchrun's variables name, or rank 0 of one where there are none.

    Args:
        settings: equal on all ranks.
        folder: of the run; rank 0's counts.
        emit: told of steps and evaluations, on rank 0.
        resume: go on from the newest checkpoint in the folder.

    Returns:
        The summary on rank 0, None on the others.

    Raises:
        ConfigError: something in the settings cannot work.
        MismatchError: ranks were started with different settings or data.
        CommError: another rank is lost, or does not answer.
        CheckpointError: there is nothing to resume.
        NonFiniteError: the loss is NaN or infinite.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with joined(settings) as (comm, control):
            return _train(settings, folder, comm, control, emit, resume)
    finally:
        torch.set_num_threads(threads)


def _train(settings: Settings, folder: Path, comm: Comm, control: Comm, emit: Emit, resume: bool) -> Fields | None:
    task = load(settings.task, data=Path(settings.data) if settings.data else None)
    agree(control, _facts(settings, task), _CPU)
    home = RunFolder(Path(gather_texts(control, str(folder.resolve()).encode(), _CPU)[0].decode()))
    recipe, model = parse_recipe(settings.strategy), task.model(settings.model, seed=settings.seed)
    parameters = sum(p.numel() for p in model.parameters())
    engine, cut = _engine(recipe, model.to(settings.device), settings, comm, control)
    extra = engine.load(home.checkpoints) if resume else None
    writer = Writer(home, settings, task, engine.step) if comm.rank == 0 else None
    if writer is not None:
        writer.write_config(parameters, recipe.paper)
        emit({"event": "start", "parameters": parameters, "step": engine.step})
    number = comm.rank if cut is None else cut.copy
    shard = task.shards(settings.copies, split=settings.split, seed=settings.seed)[number]
    place = RunContext(
        settings=settings,
        task=task,
        shard=shard,
        engine=engine,
        control=control,
        straggler=Straggler.from_environment(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") if settings.link else None,
        checkpoints=home.checkpoints,
        writer=writer,
        emit=emit,
        coreset=_coreset(settings, task, shard, model, engine, comm.rank),
        cut=cut,
    )
    training = Training(place, extra)
    training.run()
    return _finish(training)


def _coreset(
    settings: Settings, task: Task, shard: Shard, model: nn.Module, engine: Engine, rank: int
) -> ChosenData | None:
    """What this rank trains on, where that is not all of its shard."""
    if settings.coreset is None:
        return None
    return ChosenData(
        parse_policy(settings.coreset),
        task,
        shard,
        model=model,
        optimizer=engine.optimizer,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rank=rank,
    )


def _facts(settings: Settings, task: Task) -> Facts:
    """What all ranks must have in common before anything is made of it."""
    asked = [(name, repr(value)) for name, value in settings.to_json().items() if name not in _PRIVATE]
    return [*asked, ("the data", task.fingerprint())]


def _engine(
    recipe: Recipe, model: nn.Module, settings: Settings, comm: Comm, control: Comm
) -> tuple[Engine, Cut | None]:
    recipe.check(settings.copies)
    if settings.tensor_parallel is not None and isinstance(recipe, Strategy):
        return cut_engine(recipe, model, settings, make_optimizer)
    optimizer = make_optimizer(model, settings)
    if isinstance(recipe, Peer):
        return recipe.engine(model, optimizer, control), None
    worker = attach(model, optimizer, recipe, comm=comm, seed=settings.seed)
    return ThinwireEngine(worker, optimizer), None


def _finish(training: Training) -> Fields | None:
    """Gather what each link carried, and write the last files."""
    place, carried = training.place, training.carried
    wire = [-1.0, -1.0] if carried is None else [float(carried.sent), float(carried.received)]
    mine = torch.tensor([*wire, training.payload_bytes], dtype=torch.float64)
    rows = [row.tolist() for row in place.control.all_gather(mine).wait()]
    if place.writer is None:
        return None
    every = [None if row[0] < 0 else Carried(round(row[0]), round(row[1])) for row in rows]
    known = [each.sent for each in every if each is not None]
    mean = sum(known) / len(known) if len(known) == len(every) else None
    place.writer.write_links(every, [row[2] for row in rows])
    more = {} if place.coreset is None else place.coreset.summary()
    more |= {} if place.cut is None else place.cut.summary()
    summary = place.writer.write_summary(training.evaluation, training.seconds_to_target, mean, more)
    place.writer.close()
    return summary


def main(arguments: list[str]) -> int:
    """Train as one rank and tell the launcher how it goes, in lines of JSON; 0 done, 1 failed, 2 the user's error."""
    folder = RunFolder(Path(arguments[0]))
    try:
        work(folder.settings(), folder.path, emit=tell, resume="--resume" in arguments)
    except ThinwireError as error:
        tell({"event": "error", "kind": type(error).__name__, "message": str(error)})
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def tell(event: dict[str, Any]) -> None:
    """Say one thing to the launcher."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def leave(code: int) -> None:
    """End at once when something failed: connections that are half dead may keep an orderly end waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
