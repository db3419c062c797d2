# SPDX-License-Identifier: Apache-2.0
"""Attach a strategy to a model and an optimizer: check the arguments, build flat vectors, and hook them to the step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.base import RULE, Comm
from thinwire.core.comm.group import Group, comm_for
from thinwire.core.comm.pending import PendingMeans
from thinwire.core.replica.flat import flatten, lay_out, views
from thinwire.core.replica.shards import Shards, is_sharded, local
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, pace_rule
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.registry import canonical
from thinwire.tensor2d.mesh import Mesh3D
from thinwire.worker import annexes
from thinwire.worker.annexes import ElasticOptions, Fleet
from thinwire.worker.compatibility import (
    check_arguments,
    check_bucket,
    check_carried,
    check_closures,
    check_compatible,
    check_elastic,
    check_global_batch,
    check_group,
    check_mesh,
    check_model,
    check_policy,
    check_skipped_steps,
    check_start,
)
from thinwire.worker.consensus import broadcast_others, check_in_step, different, together
from thinwire.worker.guards import Attachment, FirstSteps, InsideDDP, check_beside, check_new, check_wrappers
from thinwire.worker.handshake import agree, facts_of
from thinwire.worker.members import Array, Members, StackedModule, array_of, check_array
from thinwire.worker.parameters import check_aliases, trained, vectors_of
from thinwire.worker.replica_state import new_replica
from thinwire.worker.state import GlobalBatch, Policy, WorkerState
from thinwire.worker.step import Step, share_skips, stop_watching, watch_gradients
from thinwire.worker.worker import Worker

_BUCKET_BYTES = 8 << 20
_RENDEZVOUS = "THINWIRE_RENDEZVOUS"


def attach(
    model: nn.Module | Array,
    optimizer: Optimizer,
    strategy: Strategy | str,
    *,
    group: Group = None,
    comm: Comm | None = None,
    mesh: Mesh3D | None = None,
    init: Literal["broadcast", "own"] = "broadcast",
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    find_unused: bool = False,
    bucket_bytes: int = _BUCKET_BYTES,
    nonfinite: Policy | None = None,
    inside_ddp: InsideDDP = "refuse",
    elastic: bool | Fleet | ElasticOptions = False,
    global_batch: int | None = None,
    timeout: float = 60.0,
    rendezvous: str | None = None,
    workers: int | None = None,
    key: str | None = None,
) -> Worker:
    """Train `model` with `strategy` from the next `optimizer.step()` on; the loop needs no other change.

    Parameters become views of one flat vector per (dtype, device), in place: keep using the model, but do not move it
    to another device or dtype afterwards. After `backward()` each parameter's gradient is final: the mean over workers
    where the strategy exchanges gradients, else this worker's own. Clip it there: the optimizer uses that gradient.

    Args:
        model: already on its device. Frozen parameters are compared and sent once, from rank 0. An array of models
            (`fuse`) trains each of its models as if that model were attached alone.
        optimizer: any torch optimizer over parameters of `model`; parameters that it does not hold are not trained. For
            an array, one of its package, such as `fusion.Adam`.
        strategy: the recipe, as an object or as text, such as "SlowMo(base=PushSum(), period=48)" (see `parse`); or
            "auto", which measures the links between the ranks and takes what `thinwire plan` would recommend: rank 0
            logs why, and `worker.strategy` says which it is. A training step's time is not known here: it is read on
            rank 0 from the file of `thinwire doctor --out` that THINWIRE_PLAN names, and otherwise assumed. The first
            steps are measured, and `AllReduce()` takes over if it is faster (see `thinwire.planning.plan.guard.Guard`).
        group: the ranks that train together: a process group, or one dimension of a DeviceMesh; default all. Where
            there is no process group yet, it is made from the variables that torchrun sets (with NCCL for parameters on
            CUDA, otherwise Gloo), and destroyed when the process ends.
            With `elastic=True` or `rendezvous`, the ranks of this one worker, which hold the shards of one model.
        comm: the ranks as a Comm, instead of `group` (threads, simulation).
        mesh: for a model split by `parallelize_2d`, the ranks of all its copies; instead of `group`.
        init: "broadcast" starts every rank from rank 0's parameters and buffers; "own" keeps each rank's, and refuses
            parameters that differ where the strategy would never make them equal. The optimizer's state is each rank's
            own either way.
        seed: seed of the strategy's random draws; equal on all ranks.
        scaler: the loop's GradScaler; all ranks then skip the same steps. Elastic workers that train locally each skip
            the update of their own steps.
        find_unused: leave parameters that have no gradient on any rank without one, at 4 bytes per tensor and step;
            otherwise a missing gradient counts as zero. Only matters where gradients are exchanged.
        bucket_bytes: bytes of gradient per message; fewer overlap more with the backward pass, and cost more calls.
        nonfinite: what to do with a gradient that is NaN or infinite, unless a GradScaler skips the step: "raise" on
            all ranks; "skip" the optimizer's step, of all workers where they exchange gradients, else of this one only;
            or "ignore" it. "skip" is refused for optimizers with several gradients a step, such as LBFGS and SVRG, and
            for arrays. By default "raise", and "ignore" for an array, where one model must not stop the others.
        inside_ddp: where the model or a part of it is inside DistributedDataParallel, which averages gradients too:
            "refuse" raises at `attach`, or in the first forward pass if it is wrapped later; "mute" turns the wrapper's
            exchange off until `detach`.
        elastic: continue when workers are lost, and accept workers that join later. `Worker.view` is the list of
            workers; see `docs/how-to/elastic.md` for starting workers and for what survives. A `Fleet` is this worker's
            entry into the run; True reads it from the environment. `LateMerging` closes rounds without late workers.
        global_batch: samples of each step, of all workers together. `thinwire.elastic.sampler.batch_share` is this
            worker's part, which follows the number of workers. Means of gradients are over samples.
        timeout: how long one wait may last, in seconds. With `rendezvous`, use more than the time by which one worker's
            rounds are longer than another's.
        rendezvous: the URL of an object store or a shared folder over which the workers train, instead of a process
            group: "s3://bucket/run", "gs://...", "az://...", "file:///mnt/share/run", or "memory://run" for threads.
            No worker needs an open port: run the same command on each machine. The strategy must have rounds, such as
            `DiLoCo`. By default that of the environment variable THINWIRE_RENDEZVOUS, if `group`, `comm` and `mesh` are
            not given. A path can be used for one run; see `thinwire.core.storage.bucket.Bucket.open` for credentials.
        workers: with `rendezvous`, the number of workers; by default that of THINWIRE_WORKERS. They take ranks in the
            order in which they start, or that of THINWIRE_RANK, and the loss of one ends the run on all. Started again,
            they continue from their checkpoints (`load`). Without a number, the run is elastic and starts with one
            worker. With a number and `elastic=True`, it is elastic and starts with so many.
        key: with `rendezvous`, the run key, which encrypts all that is stored; by default that of THINWIRE_KEY.
            `thinwire bucket key` prints a new one; use the same on all machines.

    Raises:
        ConfigError: the recipe cannot serve this model, this optimizer or this number of workers.
        CommTimeoutError: not all ranks connected in time.
        MismatchError: ranks were started with different models, recipes, versions or seeds.
        NonFiniteError: in a step, on all ranks, if a gradient is not finite; with the rank and the parameter.

    Example:
        Two workers as threads. Rank 0's parameters are used on both, and each step takes the mean gradient.

        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, thinwire.AllReduce(), comm=comm)
        ...     model(torch.tensor([[1.0, comm.rank]])).sum().backward()
        ...     optimizer.step()
        ...     return model.weight.tolist()
        >>> thinwire.run_threads(2, train)
        [[[-0.5, -0.25]], [[-0.5, -0.25]]]
    """
    automatic = strategy == "auto"
    array = array_of(model)
    model = check_model(model if array is None else StackedModule(array))
    strategy = check_arguments(optimizer, AllReduce() if automatic else strategy)
    named = trained(model, optimizer)
    if array is not None:
        refused = {"'auto'": automatic, "elastic": bool(elastic), "mesh": mesh is not None}
        refused |= {"scaler": scaler is not None, 'nonfinite="skip"': nonfinite == "skip"}
        refused["rendezvous"] = bool(rendezvous or os.environ.get(_RENDEZVOUS))
        check_array(array, optimizer, named, refused)
        strategy = Members(strategy, array.size)
    nonfinite = nonfinite or ("raise" if array is None else "ignore")
    scaled = scaler is not None and scaler.is_enabled()
    device = next(iter(named.values())).device
    views = watch = fixed = entry = None
    options = elastic if isinstance(elastic, ElasticOptions) else None
    if options is not None:
        options.check(strategy, optimizer, init=init, global_batch=global_batch)
    elsewhere = (group, comm, mesh, None if isinstance(elastic, bool | ElasticOptions) else elastic)
    connected = any(other is not None for other in elsewhere)
    url = rendezvous or ("" if connected else os.environ.get(_RENDEZVOUS, ""))
    grouped, own_ranks = group is not None, None
    if url or elastic:
        check_group(named, elastic, grouped=grouped)
    if url:
        check_bucket(elsewhere[1:], automatic=automatic, scaled=scaled, find_unused=find_unused)
        own_ranks = _ranks_of(group, timeout)
        asked = options or bool(elastic)
        open_run = annexes.open_run()
        fleet, is_fixed = open_run(url, key=key, workers=workers, elastic=asked, timeout=timeout, group=own_ranks)
        try:
            check_carried(strategy, fleet.request_seconds)
            if not is_fixed:
                check_elastic(strategy, optimizer, (), scaled=scaled, find_unused=find_unused, grouped=grouped)
        except ConfigError as error:
            fleet.withdraw()
            hint = "" if elastic or is_fixed else ". Without a number of workers a run is elastic: give workers=N"
            raise ConfigError(f"{error}{hint}") from None
        entry = fleet
        fixed, elastic = (fleet, False) if is_fixed else (None, fleet)
    elif workers is not None or key is not None:
        raise ConfigError(
            f"workers={workers} without rendezvous: workers and key belong to a run over a bucket. Give its URL as "
            f"rendezvous or in {_RENDEZVOUS}"
        )
    if elastic:
        if automatic:
            raise ConfigError(
                "strategy='auto' with elastic=True: a worker that joins later could not measure the links of the "
                "others. Name the strategy, such as the one that `thinwire plan` recommends"
            )
        check_new(named, optimizer)
        if not url:
            others = comm, mesh
            check_elastic(strategy, optimizer, others, scaled=scaled, find_unused=find_unused, grouped=grouped)
            own_ranks = _ranks_of(group, timeout)
        views = annexes.enter()(elastic, timeout, own_ranks)
        comm = views.comm
    with ExitStack() as on_failure:
        if views is not None:
            on_failure.callback(views.withdraw)
        given = mesh.data if mesh is not None else comm
        comm = given or (fixed.connect(timeout) if fixed else comm_for(group, timeout=timeout, device=device))
        if fixed is not None:
            on_failure.callback(fixed.withdraw)
        if given is None:
            on_failure.callback(comm.disconnect)
        settings = {
            "the number of workers": comm.size if fixed is None else fixed.size,  # over a bucket, the expected one
            "the strategy": "auto" if automatic else canonical(strategy),
            "the seed": seed,
            "init": init,
            "bucket_bytes": bucket_bytes,
            "find_unused": find_unused,
            "the use of a scaler": scaled,
            "nonfinite": nonfinite,
            "inside_ddp": inside_ddp,
            "elastic": options or views is not None,
            "global_batch": global_batch,
        }
        facts = facts_of(model, optimizer, named, settings)
        # Before the checks below: after the ranks agree, all of them refuse what one refuses, and no rank is left
        # waiting for a rank that has raised.
        if views is None:
            agree(comm, facts, device)
        else:
            views.agree(facts, device)
        if automatic:
            strategy, watch = annexes.chooser()(optimizer, named, comm)
        state = WorkerState(model, optimizer, strategy, comm, seed=seed)
        if given is None:
            state.undo.callback(comm.disconnect)  # the last of all, as `undo` runs callbacks in reverse
        state.bucket_bytes, state.find_unused, state.scaler, state.mesh = bucket_bytes, find_unused, scaler, mesh
        comm.in_step = comm.in_step and not strategy.traits.timing_dependent
        comm.rule = pace_rule(strategy) if strategy.traits.meets_every > 1 else RULE
        if global_batch is not None:
            check_global_batch(strategy, global_batch)
            state.global_batch = GlobalBatch(global_batch)
            state.global_batch.check(comm.size)
        # Elastic workers that train locally do not send a message for a scaler.
        asks = scaled and (views is None or strategy.traits.sends_gradients)
        check_skipped_steps(strategy, find_unused=find_unused, scaled=asks)
        check_wrappers(model, inside_ddp)
        check_new(named, optimizer)
        check_beside(model, strategy)
        check_policy(nonfinite, named.values(), 1 if mesh is None else mesh.block.whole.size, optimizer)
        check_compatible(strategy, optimizer, comm.size, named.values())
        check_closures(strategy, optimizer)
        if mesh is not None:
            check_mesh(strategy, optimizer, mesh.block, scaled=scaled)
            agree(mesh.block.whole, facts, device)
            state.block = mesh.folder
        make_replicas(state, named, mesh)
        if views is None or not views.joins:  # a joining worker copies parameters and state from another one
            start(state, init)
        state.nonfinite = nonfinite
        if views is not None:
            state.survives, state.start_step = views.gradients, views.start_step
            state.members = lambda: (views.view.members, views.worker_id)
        watch_gradients(state)
        state.undo.callback(stop_watching, state)

        def compare() -> None:
            together(state, views, lambda: check_in_step(state, "a comparison of weights"))

        hooks = Step(state, rounds=views, compare=compare)
        if views is not None:
            views.begin(state, hooks.strategy_after)
        state.started += [{name: (x.dtype, tuple(x.shape)) for name, x in r.state.items()} for r in state.replicas]
        state.undo.callback(model.register_forward_pre_hook(state.account.times.before_forward).remove)
        hooks.watch(Attachment(state, inside_ddp), FirstSteps(state, init))
        share_skips(state)
        if array is not None:
            array.attached = model
            state.undo.callback(setattr, array, "attached", None)
        state.automatic = automatic
        worker = Worker(state, hooks, views)
        if watch is not None:
            watch(worker)
        state.account.begin()
        if entry is not None:
            state.publish(entry.publish)
        # A dry run measures nothing. Of several optimizers that share a comm the first one's worker reports.
        if comm.reporter is None and comm.checks_first_steps:
            comm.reporter = state.account.times
            state.undo.callback(setattr, comm, "reporter", None)
        on_failure.pop_all()
        return worker


def _ranks_of(group: Group, timeout: float) -> Comm | None:
    """Return the ranks of this worker, if it is a group; they wait for those that wait for other groups."""
    return None if group is None else comm_for(group, timeout=2 * timeout)


def start(worker: WorkerState, init: Literal["broadcast", "own"]) -> None:
    """The parameters of the first step, and the strategy's state."""
    with torch.no_grad():
        if init == "broadcast":
            broadcast(worker)
        else:
            equal = not different(worker, _vectors(worker), at_start=True)
            check_start(worker.strategy, equal=equal)
            for replica in worker.replicas:
                replica.equal_start = equal
        for replica in worker.replicas:
            worker.strategy.start(replica)


def _vectors(worker: WorkerState) -> dict[str, Tensor]:
    return {f"parameters {index}": replica.x for index, replica in enumerate(worker.replicas)}


def broadcast(worker: WorkerState) -> None:
    """Start every rank from rank 0's parameters (frozen ones too) and buffers; only those that differ are sent."""
    for x in different(worker, _vectors(worker), at_start=True).values():
        worker.comm.broadcast_(x, 0).wait()
    worker.shards.write()
    broadcast_others(worker)


def make_replicas(worker: WorkerState, named: Mapping[str, nn.Parameter], mesh: Mesh3D | None) -> None:
    """Copy the parameters into flat vectors, and let each parameter be a view of its vector.

    Raises:
        ConfigError: on all ranks, where a parameter would be untied from a tensor in the same memory.
    """
    check_aliases(worker.model, named)
    names = {id(p): name for name, p in named.items()}
    sharded: list[tuple[Tensor, Tensor]] = []
    # One for all replicas: a step is skipped by all of them or by none.
    means = PendingMeans()
    for parameters in vectors_of(worker.model, named, mesh):
        segments = lay_out([(names[id(p)], local(p)) for p in parameters])
        x = flatten([local(p) for p in parameters], segments)
        for parameter, view in zip(parameters, views(x, segments), strict=True):
            if is_sharded(parameter):
                # Its storage belongs to FSDP2; its part of the vector is copied back and forth instead.
                sharded.append((parameter, view))
            else:
                parameter.data = view
        worker.replicas.append(new_replica(worker, worker.strategy, x, parameters, segments, means))
        worker.layouts.append((parameters, segments))
    worker.shards = Shards(worker.model, sharded)
