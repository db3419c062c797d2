"""A model and an optimizer become replicas: flat views, hooks, consensus."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.base import Comm
from thinwire.comm.group import Group, comm_for
from thinwire.errors import ConfigError
from thinwire.replica.flat import copy_each_, flatten, lay_out, views
from thinwire.replica.moments import Moments
from thinwire.replica.replica import Replica, as_number
from thinwire.replica.shards import Shards, is_sharded, local
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import brief
from thinwire.tensor2d.mesh import Mesh3D
from thinwire.worker import checkpoint, joining
from thinwire.worker.buckets import Backward, Bucket, cut
from thinwire.worker.evaluation import as_evaluated, refuse_movers
from thinwire.worker.grad_scaler import share_skips
from thinwire.worker.handshake import agree, facts_of
from thinwire.worker.mesh_replicas import fitting_block, vectors_of
from thinwire.worker.parameters import by_kind, learning_rate, trained
from thinwire.worker.state import WorkerState

Batch = TypeVar("Batch")
_BUCKET_BYTES = 8 << 20


class Worker(WorkerState):
    """One worker's model under a strategy; made by `attach`.

    The user's loop stays as it was. Models whose parameters have several dtypes or devices have several replicas.
    """

    # -- the training step ---------------------------------------------------------------------------------------

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer itself
        if closure is None:
            self._hooks_before()
            return None

        def evaluate() -> Any:
            loss = closure()
            self._hooks_before()
            return loss

        return args[:1], {**kwargs, "closure": evaluate}

    def _hooks_before(self) -> None:
        self.shards.read()
        with torch.no_grad():
            for replica, (parameters, segments) in zip(self.replicas, self.layouts, strict=True):
                if all(parameter.grad is None for parameter in parameters):
                    replica.samples = 0.0
                if self.strategy.reads_gradient:
                    whole = Bucket(replica, list(parameters), views(replica.g, segments), slice(None))
                    whole.gather()
                    whole.expose()
                self.strategy.before_step(replica)
        self.shards.write()

    def _after_step(self, *_: Any) -> None:
        self.shards.read()
        with torch.no_grad():
            for replica in self.replicas:
                replica.step += 1
                self.strategy.after_step(replica)
                replica.samples, replica.loss = 1.0, None
        self.shards.write()
        self.comm.step = self.step

    def record_batch(self, num_samples: float | None = None, *, loss: Tensor | float | None = None) -> None:
        """Say what is behind the next step's gradient, for strategies that weigh or compare workers by it.

        Args:
            num_samples: of all batches of the step together. A step of which nothing is said counts as one.
            loss: the step's mean loss, a tensor of one element or a number; it may be NaN, and is not waited for.

        Raises:
            ConfigError: a number of samples that is negative or not finite, or a loss of several elements.
        """
        if num_samples is not None and not 0 <= num_samples < float("inf"):
            raise ConfigError(f"num_samples={num_samples}: must be finite and not negative; say len(batch)")
        for replica in self.replicas:
            replica.samples = replica.samples if num_samples is None else float(num_samples)
            replica.loss = replica.loss if loss is None else as_number(loss, replica.x, "loss")

    def metrics(self) -> dict[str, float]:
        """What the strategy noticed since this was last asked, by name; the most of it where there are several vectors.

        Gossip notices `consensus_distance`, the probe of heterogeneity how much gradients differ.
        """
        found: dict[str, float] = {}
        for replica in self.replicas:
            for name, value in replica.metrics.items():
                found[name] = max(found.get(name, float("-inf")), float(value))
            replica.metrics.clear()
        return found

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside accumulate their gradients locally; the first one after sends the sum."""
        if self.backward is None:
            yield
            return
        before, self.backward.syncing = self.backward.syncing, False
        try:
            yield
        finally:
            self.backward.syncing = before

    def join(self, batches: Iterable[Batch], *, after_step: Callable[[], None] | None = None) -> Iterator[Batch]:
        """The batches; when they end, keep answering the other ranks until theirs have ended too.

        A rank without data takes part in every later step with no gradient of its own: means of gradients are over
        the ranks that have one, and averages of parameters include everyone's. Each batch is one optimizer step:
        to accumulate gradients, let each item be all the batches of a step.

        Args:
            batches: this rank's batches. Where every rank's have a length, one message settles who ends when;
                otherwise each step begins with a message of 4 bytes.
            after_step: called after each answering step, for what the loop does besides (a scheduler's step);
                the scaler given to `attach` is kept up already.
        """
        return joining.join(self, batches, after_step or (lambda: None))

    # -- what the workers know together --------------------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Generator[nn.Module]:
        """The model all workers agree on, for evaluation and export; every rank must enter.

        Parameters are the strategy's consensus (the mean, the leader, the de-biased model). Buffers of floating
        dtype, such as BatchNorm statistics, are averaged over workers, others are rank 0's: workers' buffers are
        their own while they train. An optimizer that trains at other parameters than its result (it has a method
        `evaluating`) contributes its result. All of it is put back at the end.
        """
        with as_evaluated(self.optimizer), self._agreed():
            yield self.model

    @contextmanager
    def _agreed(self) -> Generator[None]:
        self.wait_pending()
        self.shards.read()
        own = [replica.x.clone() for replica in self.replicas]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            with torch.no_grad():
                for replica in self.replicas:
                    replica.x.copy_(self.strategy.consensus(replica))
                self._average_buffers()
            self.shards.write()
            yield
        finally:
            with torch.no_grad():
                for replica, x in zip(self.replicas, own, strict=True):
                    replica.x.copy_(x)
                self.shards.write()
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])

    def _average_buffers(self) -> None:
        buffers = list(self.model.buffers())
        for group in by_kind(buffers).values():
            vector = flatten(group, layout := lay_out([("", b) for b in group]))
            if vector.is_floating_point():
                self.comm.all_reduce_(vector).wait().div_(self.comm.size)
            else:
                self.comm.broadcast_(vector, 0).wait()
            copy_each_(group, views(vector, layout))

    # -- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank would need to go on as if it had never stopped.

        All parameters and buffers, the optimizer's state, the strategy's state, messages in flight (waited for, not
        yet used) and the step. Nested dicts of tensors and JSON values. The scheduler, the scaler and the data's
        position are the caller's: see `save`.
        """
        return checkpoint.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of the same rank.

        Raises:
            CheckpointError: it belongs to another recipe, model or number of workers; names the first difference.
        """
        checkpoint.restore(self, state)

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of all ranks to `folder`/step-NNNNNNNN, whole or not at all; every rank must call.

        Args:
            folder: holds one checkpoint per saved step.
            extra: more to keep: dicts of tensors and JSON values, such as a scheduler's `state_dict()`.

        Raises:
            CheckpointError: the disk refused, or there is something that is neither a tensor nor JSON.
            NonFiniteError: a parameter is NaN or infinite; the last good checkpoint stays.
        """
        return checkpoint.save(self, self.own_folder(folder), dict(extra or {}))

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from the newest whole checkpoint in `folder`; returns the `extra` saved with it.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another recipe, model or world size.
        """
        return checkpoint.load(self, self.own_folder(folder))

    def detach(self) -> None:
        """Remove every hook; the model keeps its parameters and trains alone from here on."""
        self.wait_pending()
        for replica in self.replicas:
            self.comm.close_mailbox(replica)
        self.undo.close()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    *,
    group: Group = None,
    comm: Comm | None = None,
    mesh: Mesh3D | None = None,
    init: Literal["broadcast", "own"] = "broadcast",
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    find_unused: bool = False,
    bucket_bytes: int = _BUCKET_BYTES,
    timeout: float = 60.0,
) -> Worker:
    """Train `model` with `strategy` from the next `optimizer.step()` on; the loop needs no other change.

    Parameters become views of one vector per (dtype, device), in place: keep using the model, move it no more.
    After `backward()` each parameter's gradient is final: the mean over workers where the strategy exchanges
    gradients, this worker's own elsewhere. Clip it there, and the norm that is clipped is the norm of the gradient
    the optimizer will use.

    Args:
        model: on its device already; its frozen parameters are compared but never sent again.
        optimizer: any torch optimizer over parameters of `model`; others of its parameters are left alone.
        strategy: the recipe.
        group: the ranks that train together: a process group, or one dimension of a DeviceMesh; default all.
        comm: the ranks as a Comm, instead of `group` (threads, simulation).
        mesh: where `parallelize_2d` has cut the model, the ranks of all its copies; instead of `group`.
        init: "broadcast" starts every rank from rank 0's parameters and buffers; "own" keeps each rank's. The
            optimizer's state is each rank's own either way.
        seed: the key of the strategy's random draws; equal on all ranks.
        scaler: the loop's GradScaler; the decision to skip a step is then made by all ranks together.
        find_unused: parameters without a gradient on any rank keep none, at 4 bytes per tensor and step; otherwise
            a missing gradient counts as zero. Only matters where gradients are exchanged.
        bucket_bytes: how much gradient travels in one message; less overlaps more and costs more calls.
        timeout: how long one wait may last.

    Raises:
        ConfigError: the recipe cannot serve this model or this number of workers.
        MismatchError: ranks were started with different models, recipes, versions or seeds.
    """
    named = trained(model, optimizer)
    scaled = scaler is not None and scaler.is_enabled()
    comm = mesh.data if mesh is not None else comm or comm_for(group, timeout=timeout)
    worker = Worker(model, optimizer, strategy, comm, seed=seed)
    settings = {
        "the number of workers": comm.size,
        "the strategy": brief(strategy),
        "the seed": seed,
        "init": init,
        "bucket_bytes": bucket_bytes,
        "find_unused": find_unused,
        "the use of a scaler": scaled,
    }
    joining.refuse_left_out(strategy, find_unused=find_unused, scaled=scaled)
    agree(comm, facts := facts_of(model, optimizer, named, settings), next(iter(named.values())).device)
    _check(worker, named)
    worker.block = fitting_block(mesh, strategy, optimizer, facts, scaled=scaled)
    _make_replicas(worker, named, mesh)
    if init == "broadcast":
        _broadcast(worker)
    with torch.no_grad():
        for replica in worker.replicas:
            strategy.start(replica)
    _hook(worker, bucket_bytes=bucket_bytes, find_unused=find_unused)
    worker.scaler = scaler
    if scaler is not None and comm.size > 1 and (strategy.reads_gradient or not strategy.sends_gradients):
        share_skips(worker, scaler)
    return worker


def _check(worker: Worker, named: Mapping[str, nn.Parameter]) -> None:
    """Can the recipe serve these workers, this optimizer and these parameters?"""
    strategy = worker.strategy
    strategy.check(worker.comm.size)
    strategy.check_optimizer(worker.optimizer)
    refuse_movers(strategy, worker.optimizer)
    if strategy.sends_gradients and any(is_sharded(p) for p in named.values()):
        raise ConfigError(
            f"{strategy}: gradients of sharded parameters are the sharder's to average; give fully_shard a mesh of "
            "('replicate', 'shard') for that, or use a strategy that averages parameters, such as SlowMo()"
        )


def _make_replicas(worker: Worker, named: Mapping[str, nn.Parameter], mesh: Mesh3D | None) -> None:
    names = {id(p): name for name, p in named.items()}
    sharded: list[tuple[Tensor, Tensor]] = []
    for parameters in vectors_of(worker.model, named, mesh):
        segments = lay_out([(names[id(p)], local(p)) for p in parameters])
        x = flatten([local(p) for p in parameters], segments)
        for parameter, view in zip(parameters, views(x, segments), strict=True):
            if is_sharded(parameter):
                sharded.append((parameter, view))
            else:
                parameter.data = view
        g = worker.strategy.room_for_gradient(x)
        moved = parameters
        lr = learning_rate(worker.optimizer, moved, segments, x)
        moments = Moments(worker.optimizer, moved, segments)
        worker.replicas.append(Replica(x, g, worker.comm, lr=lr, seed=worker.seed, moments=moments))
        worker.layouts.append((moved, segments))
    worker.shards = Shards(worker.model, sharded)


def _broadcast(worker: Worker) -> None:
    """Every rank starts from rank 0's parameters (frozen ones too) and buffers."""
    comm = worker.comm
    with torch.no_grad():
        for replica in worker.replicas:
            comm.broadcast_(replica.x, 0).wait()
        worker.shards.write()
        mine = {id(p) for parameters, _ in worker.layouts for p in parameters}
        rest = [local(t.data) for t in worker.model.parameters() if id(t) not in mine]
        rest += list(worker.model.buffers())
        for group in by_kind(rest).values():
            vector = flatten(group, layout := lay_out([("", t) for t in group]))
            comm.broadcast_(vector, 0).wait()
            copy_each_(group, views(vector, layout))


def _hook(worker: Worker, *, bucket_bytes: int, find_unused: bool) -> None:
    strategy, optimizer = worker.strategy, worker.optimizer
    if strategy.sends_gradients and worker.comm.size > 1:
        buckets = [
            bucket
            for replica, (parameters, segments) in zip(worker.replicas, worker.layouts, strict=True)
            for bucket in cut(replica, parameters, segments, bucket_bytes)
        ]
        worker.backward = Backward(buckets, strategy.on_gradient, find_unused)
        for handle in worker.backward.watch():
            worker.undo.callback(handle.remove)
    before, after = worker._before_step, worker._after_step  # pyright: ignore[reportPrivateUsage]
    for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
        worker.undo.callback(handle.remove)
