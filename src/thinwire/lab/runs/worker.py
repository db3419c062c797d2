# SPDX-License-Identifier: Apache-2.0
"""One rank of a run.

As a program, started once per rank: `python -m thinwire.lab.runs FOLDER [--resume] [MODULE ...]`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm
from thinwire.core.comm.rendezvous import init_process_group, started_by_torchrun
from thinwire.elastic.fleet import fleet_in_bucket
from thinwire.errors import ConfigError, ThinwireError
from thinwire.lab.emulate import Straggler, Traffic
from thinwire.lab.runs.baselines import Baseline, Engine
from thinwire.lab.runs.coreset import ChosenData, parse_policy
from thinwire.lab.runs.elastic_worker import ElasticTraining
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.lab.runs.folder import Fields, RunFolder
from thinwire.lab.runs.measure import peak_memory
from thinwire.lab.runs.optimizer import make_optimizer
from thinwire.lab.runs.own_functions import load_task
from thinwire.lab.runs.recipes import Recipe, parse_recipe, parse_strategy
from thinwire.lab.runs.settings import Settings
from thinwire.lab.runs.switches import in_force
from thinwire.lab.runs.tensor import TensorParallel, tensor_parallel_engine
from thinwire.lab.runs.training import RunContext, Training
from thinwire.lab.runs.writer import Writer
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach
from thinwire.worker.checkpoint import saved_step
from thinwire.worker.compatibility import check_carried
from thinwire.worker.handshake import agree, gather_texts
from thinwire.worker.worker import internals_of

Emit = Callable[[Fields], None]
_CPU = torch.device("cpu")
# The other ranks wait in the control group while rank 0 evaluates, which may take long.
_CONTROL_TIMEOUT = 3600.0
# Settings that may differ between ranks.
_LOCAL = ("command", "data", "threads")


class Ranks(NamedTuple):
    """The ranks of a run.

    Attributes:
        comm: for training.
        control: for everything else.
        publish: lets `thinwire watch` show what a function returns; None outside buckets.
    """

    comm: Comm
    control: Comm
    publish: Callable[[Callable[[], str]], None] | None = None


@contextmanager
def in_bucket(settings: Settings, url: str) -> Generator[Ranks]:
    """Enter the run at a URL as one of its workers.

    Raises:
        ConfigError: the settings have something that a bucket does not carry, or the store or the key cannot be used.
        CommError: the store cannot be reached, or not all workers arrived.
    """
    why_not = "which needs a process group. With --rendezvous, use a strategy with rounds, such as DiLoCo(period=100)"
    recipe = parse_strategy(settings.strategy, why_not, imports=False)
    fleet, _ = fleet_in_bucket(url, workers=settings.workers, timeout=settings.timeout)
    try:
        check_carried(recipe, fleet.request_seconds)
    except ConfigError:
        fleet.withdraw()
        raise
    comm = fleet.connect(settings.timeout)
    try:
        control = comm.duplicate()
        control.timeout = _CONTROL_TIMEOUT
        yield Ranks(comm, control, fleet.publish)
    finally:
        comm.disconnect()


@contextmanager
def connected(settings: Settings) -> Generator[tuple[Comm, Comm]]:
    """Connect the ranks of a run; yields two comms, one for training and one for everything else.

    An existing default process group is used and kept.

    Raises:
        ConfigError: the number of processes is not that of workers.
        CommTimeoutError: not all workers connected in time.
    """
    own = not dist.is_initialized()
    size = (int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1) if own else dist.get_world_size()
    if size != settings.workers:
        raise ConfigError(f"workers={settings.workers}: {size} processes were started. Start as many as workers")
    if own:
        init_process_group(torch.device(settings.device), settings.timeout)
    try:
        yield GroupComm(timeout=settings.timeout), GroupComm(timeout=_CONTROL_TIMEOUT)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def no_events(_: Fields) -> None:
    """Ignore an event."""


def work(
    settings: Settings, folder: Path, *, emit: Emit = no_events, resume: bool = False, ranks: Ranks | None = None
) -> Fields | None:
    """Train as one rank: the one that torchrun's variables name, or the only one where there are none.

    Args:
        settings: equal on all ranks.
        folder: of the run; all ranks use rank 0's.
        emit: called on rank 0 with each step and evaluation as they happen.
        resume: continue from the newest checkpoint in the folder.
        ranks: the ranks that train together, if they are connected already.

    Returns:
        The summary on rank 0, None on the others.

    Raises:
        ConfigError: something in the settings cannot work.
        MismatchError: ranks were started with different settings or data.
        CommError: another rank was lost, or does not answer.
        CheckpointError: there is nothing to resume.
        NonFiniteError: the loss is NaN or infinite.
    """
    # Restored at the end: several runs may take place in one process.
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        if ranks is not None:
            return train(settings, folder, ranks, emit, resume=resume)
        with connected(settings) as (comm, control):
            return train(settings, folder, Ranks(comm, control), emit, resume=resume)
    finally:
        torch.set_num_threads(threads)


def train(settings: Settings, folder: Path, ranks: Ranks, emit: Emit, *, resume: bool = False) -> Fields | None:
    """Train as one rank, as `work` does."""
    comm, control, publish = ranks
    task = load_task(settings)
    facts = [(name, repr(value)) for name, value in settings.to_json().items() if name not in _LOCAL]
    agree(control, [*facts, ("the data", task.fingerprint())], _CPU)
    home = RunFolder(Path(gather_texts(control, str(folder.resolve()).encode(), _CPU)[0].decode()))
    # One that took over before the checkpoint saved it.
    done = (saved_step(home.checkpoints) or 0) if resume else 0
    recipe = parse_recipe(in_force(settings.strategy, settings.switch, done), imports=False)
    model = task.model(settings.model, seed=settings.seed)
    # Counted before a mesh splits them.
    parameters = sum(p.numel() for p in model.parameters())
    engine, tensor_parallel = _engine(recipe, model.to(settings.device), settings, comm, control)
    if publish is not None and isinstance(engine, ThinwireEngine):
        internals_of(engine.worker).publish(publish)
    extra = engine.load(home.checkpoints) if resume else None
    writer = Writer(home, settings, task, engine.step) if comm.rank == 0 else None
    if writer is not None:
        writer.write_config(parameters, recipe.paper)
        emit({"event": "start", "parameters": parameters, "step": engine.step})
    data_rank = comm.rank if tensor_parallel is None else tensor_parallel.copy
    shard = task.shards(settings.copies, split=settings.split, seed=settings.seed)[data_rank]
    coreset = None
    if settings.coreset is not None:
        coreset = ChosenData(
            parse_policy(settings.coreset),
            task,
            shard,
            model=model,
            optimizer=engine.optimizer,
            batch_size=settings.batch_size,
            seed=settings.seed,
            rank=comm.rank,
        )
    context = RunContext(
        settings=settings,
        task=task,
        shard=shard,
        engine=engine,
        control=control,
        straggler=Straggler.from_environment(),
        # Only behind an emulated link is the interface this worker's alone.
        interface=os.environ.get("GLOO_SOCKET_IFNAME") if settings.link else None,
        checkpoints=home.checkpoints,
        writer=writer,
        emit=emit,
        coreset=coreset,
        tensor_parallel=tensor_parallel,
    )
    training = Training(context, extra)
    training.run()
    return _finish(training)


def _engine(
    recipe: Recipe, model: nn.Module, settings: Settings, comm: Comm, control: Comm
) -> tuple[Engine, TensorParallel | None]:
    recipe.check(settings.copies)
    if settings.tensor_parallel is not None and isinstance(recipe, Strategy):
        return tensor_parallel_engine(recipe, model, settings)
    optimizer = make_optimizer(model, settings)
    if isinstance(recipe, Baseline):
        return recipe.engine(model, optimizer, control), None
    worker = attach(model, optimizer, recipe, comm=comm, seed=settings.seed, nonfinite=settings.nonfinite)
    return ThinwireEngine(worker, optimizer), None


def _finish(training: Training) -> Fields | None:
    """Gather every worker's bytes, and write the last files."""
    context, own = training.context, training.wire_bytes
    # -1 stands for "not measured": a tensor has no null.
    wire = [-1.0, -1.0] if own is None else [float(own.sent_bytes), float(own.received_bytes)]
    memory = float(peak_memory(context.settings.device))
    mine = torch.tensor(
        [*wire, training.payload_bytes, memory, training.cpu_seconds], dtype=torch.float64, device="cpu"
    )
    rows = [row.tolist() for row in context.control.all_gather(mine).wait()]
    if context.writer is None:
        return None
    every = [None if row[0] < 0 else Traffic(round(row[0]), round(row[1])) for row in rows]
    known = [each.sent_bytes for each in every if each is not None]
    mean = sum(known) / len(known) if len(known) == len(every) else None
    context.writer.write_links(every, [row[2] for row in rows])
    steps = training.engine.step
    more: Fields = {
        "peak_memory_bytes": max(row[3] for row in rows),
        "cpu_seconds_per_worker_per_step": fmean(row[4] for row in rows) / steps if steps else None,
    }
    more |= {} if context.coreset is None else context.coreset.summary()
    more |= {} if context.tensor_parallel is None else context.tensor_parallel.summary()
    more |= {"notice": {"step": training.engine.step, "reasons": training.notice}} if training.notice else {}
    summary = context.writer.write_summary(training.evaluation, training.seconds_to_target, mean, more)
    context.writer.close()
    return summary


def main(arguments: list[str]) -> int:
    """Train as one rank, printing events as JSON lines; returns 0 for success, 1 for failure, 2 for a user's error.

    The modules are those of the recipe's classes and of the user's functions. The launcher names them, and never the
    folder, whose files may come from another user.
    """
    folder = RunFolder(Path(arguments[0]))
    try:
        for module in arguments[1:]:
            if module != "--resume":
                import_module(module)
        settings = folder.settings()
        if settings.elastic:
            torch.set_num_threads(settings.threads)
            ElasticTraining(settings, print_event, folder, resume="--resume" in arguments).run()
        else:
            work(settings, folder.path, emit=print_event, resume="--resume" in arguments)
    except ThinwireError as error:
        print_event({"event": "error", "kind": type(error).__name__, "message": str(error)})
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def print_event(event: dict[str, Any]) -> None:
    """Print one event as a line of JSON, which the launcher reads."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def exit_process(code: int) -> None:
    """End the process; after a failure at once, because broken connections may block an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
