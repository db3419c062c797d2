# SPDX-License-Identifier: Apache-2.0
"""The worker that `attach` returns: the public interface of an attached model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from thinwire.core.comm.base import Comm
from thinwire.core.replica.replica import Replica, as_number
from thinwire.core.replica.shards import is_sharded
from thinwire.core.view import View
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.worker import checkpoint, replica_state, switching
from thinwire.worker.annexes import Elastic
from thinwire.worker.consensus import (
    check_all_there,
    check_call,
    evaluating,
    lends,
    refuse_while_lent,
    together,
    wait_in_step,
)
from thinwire.worker.guards import check_loaded, check_parameters, differs, rebase, workers_beside
from thinwire.worker.members import StackedModule
from thinwire.worker.state import WorkerState
from thinwire.worker.step import Step, join_batches
from thinwire.worker.switching import Switched
from thinwire.worker.times import Stats

Batch = TypeVar("Batch")
T = TypeVar("T")


class Worker:
    """One worker's model under a strategy; returned by `attach`.

    The training loop does not change. A model whose parameters have several dtypes or devices has one flat vector,
    and one replica, for each. `with attach(...) as worker:` detaches at the end.

    Attributes:
        elastic: of a worker under `attach(elastic=True)`: its id, who took part when, and calls on each new view; None
            where the ranks are fixed.

    Example:
        Between averages the workers' parameters differ; inside `consensus()` the model is their average.

        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=8), comm=comm)
        ...     model(torch.tensor([[1.0 + comm.rank]])).sum().backward()
        ...     optimizer.step()
        ...     own = model.weight.item()
        ...     with worker.consensus():
        ...         return worker.step, own, model.weight.item()
        >>> thinwire.run_threads(2, train)
        [(1, -0.5, -0.75), (1, -1.0, -0.75)]
    """

    def __init__(self, state: WorkerState, hooks: Step, elastic: Elastic | None) -> None:
        self._state = state
        self._hooks = hooks
        self.elastic = elastic
        self._detached = False

    def __repr__(self) -> str:
        """Return the strategy, the rank and the step."""
        ended = ", detached" if self._detached else ""
        return f"<Worker rank {self.rank} of {self.size}, step {self.step}, {self.strategy}{ended}>"

    def __enter__(self) -> Self:
        """Return the worker; the end of the block calls `detach`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Detach; after an exception without waiting for other ranks, which then fail too and do not hang."""
        self._detach(waits=kind is None)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model, which was passed to `attach`; of an array, a module with its stacked parameters."""
        return self._state.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which was passed to `attach`."""
        return self._state.optimizer

    @property
    def strategy(self) -> Strategy:
        """The present strategy."""
        return self._state.strategy

    @property
    def comm(self) -> Comm:
        """The ranks; `comm.meter` counts bytes and seconds."""
        return self._state.comm

    @property
    def replicas(self) -> Sequence[Replica]:
        """Return what the strategy sees: a flat vector of parameters and its state, for each dtype and device."""
        return self._state.replicas

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    @property
    def rank(self) -> int:
        """This worker's number among those that train together, from 0; under `elastic=True` it changes with views."""
        rank = None if self.elastic is None else self.elastic.view.rank(self.elastic.worker_id)
        return self.comm.rank if rank is None else rank

    @property
    def size(self) -> int:
        """Return how many workers train together; under `elastic=True` it changes with views."""
        return self.comm.size if self.elastic is None else self.elastic.view.size

    @property
    def view(self) -> View:
        """The workers that train together, under `attach(elastic=True)`; its `members` are in the order of ranks.

        Raises:
            ConfigError: this worker is not elastic.
        """
        if self.elastic is None:
            raise ConfigError("view: only workers of attach(elastic=True) have views. Use worker.rank and worker.size")
        return self.elastic.view

    # -- training --------------------------------------------------------------------------------------------------

    def record_batch(self, num_samples: float | None = None, *, loss: Tensor | float | None = None) -> None:
        """Record how many samples the next gradient averages over, and the loss, for strategies that use them.

        Strategies that weight workers use the number; those that compare workers, such as leader SGD, the loss. Call
        it before `optimizer.step()`.

        Args:
            num_samples: in all batches of the step together; without a call a step counts as one sample.
            loss: the step's mean loss, a tensor of one element or a number; may be NaN. A tensor is not waited for.

        Raises:
            ConfigError: a number of samples that is negative or not finite, or a loss of several elements.
        """
        if num_samples is not None and not 0 <= num_samples < float("inf"):
            raise ConfigError(f"num_samples={num_samples}: must be finite and not negative. Pass len(batch)")
        if loss is not None:
            self._refuse_array("record_batch(loss=...)", "all models would be weighed by one loss. Leave the loss out")
        for replica in self.replicas:
            replica.samples = replica.samples if num_samples is None else float(num_samples)
            replica.loss = replica.loss if loss is None else as_number(loss, replica.x, "loss")

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """Divide a data set among the workers: torch's `DistributedSampler` with this worker's rank and size.

        Pass it to the DataLoader instead of `shuffle`, and call its `set_epoch(epoch)` before each epoch.

        Args:
            dataset: with a length.
            shuffle: whether each epoch has an order of its own.
            seed: of these orders; equal on all ranks.
            drop_last: whether to leave out the last samples if they do not fill all workers' parts. Otherwise the first
                samples are repeated.

        Raises:
            ConfigError: the workers change (`elastic=True`), or the model is sharded, so that ranks which train one
                model together need different data too.

        Example:
            >>> import torch, thinwire
            >>> from torch.utils.data import DataLoader
            >>> def train(comm):
            ...     model = torch.nn.Linear(1, 1)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ...     worker = thinwire.attach(model, optimizer, "LocalSGD(period=8)", comm=comm)
            ...     data = list(range(6))
            ...     batches = DataLoader(data, batch_size=3, sampler=worker.sampler(data, shuffle=False))
            ...     return [batch.tolist() for batch in batches]
            >>> thinwire.run_threads(2, train)
            [[[0, 2, 4]], [[1, 3, 5]]]
        """
        if self.elastic is not None:
            raise ConfigError(
                "sampler() with elastic=True: the number of workers changes. Use ElasticSampler(batches).share(worker)"
            )
        if any(is_sharded(p) for parameters, _ in self._state.layouts for p in parameters):
            raise ConfigError(
                "sampler() of a sharded model: the ranks that hold its shards need different data too. Use "
                "DistributedSampler(dataset), which divides by all ranks of the job"
            )
        return DistributedSampler(dataset, self.size, self.rank, shuffle, seed, drop_last)  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """Return the strategy's latest measurements by name; with several flat vectors, the largest of each.

        Gossip measures `consensus_distance`; `Probe` measures how much the workers' gradients differ. It clears
        nothing: a figure stays until the strategy measures it again. `skipped_steps` is counted since `attach`.
        """
        return self._state.metrics()

    def stats(self) -> Stats:
        """Return the counts since `attach`: steps, averages, bytes sent, and where the time went.

        `slow_worker` names the worker that costs the others more than 10 % of their time, and why: its data, its
        computation or its link. Workers exchange their times with the check of each round of local steps, in 16 bytes.
        Rank 0 logs a worker that is named in several rounds.

        It sends nothing, clears nothing and may be called at any time, by any rank, under every strategy.

        Example:
            >>> import torch, thinwire
            >>> def train(comm):
            ...     model = torch.nn.Linear(10, 10, bias=False)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ...     worker = thinwire.attach(model, optimizer, "LocalSGD(period=8)", comm=comm)
            ...     for _ in range(20):
            ...         model(torch.ones(10)).sum().backward()
            ...         optimizer.step()
            ...     with worker.consensus():
            ...         return worker.stats()
            >>> found = thinwire.run_threads(2, train)[0]
            >>> found.steps, found.averages, found.payload_bytes, found.evaluation_bytes
            (20, 2, 800.0, 400.0)
        """
        return self._state.account.stats()

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within it, backward passes accumulate gradients locally; the first one after it sends the sum."""
        if self._state.backward is None:
            yield
            return
        before, self._state.backward.syncing = self._state.backward.syncing, False
        try:
            yield
        finally:
            self._state.backward.syncing = before

    def join(
        self,
        batches: Iterable[Batch],
        *,
        before_step: Callable[[], object] | None = None,
        after_step: Callable[[], object] | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches; when they end, keep taking part in the other ranks' steps until theirs have ended too.

        A rank without data contributes no gradient: means of gradients are over the ranks that have one, and averages
        of parameters include every rank. Each batch is one optimizer step: to accumulate gradients, let each item be
        all the batches of a step.

        Args:
            batches: this rank's batches. If all have a length, one message decides in advance when each rank ends;
                otherwise each step starts with a message of 4 bytes.
            before_step: called before each step without a batch: the loop's work on gradients, such as clipping.
            after_step: called after each step without a batch, such as a scheduler's; the scaler is updated already.

        Raises:
            ConfigError: under `elastic=True` or `Paced`, or if the optimizer needs a closure.
        """
        if self.elastic is not None:
            raise ConfigError(
                "join() with elastic=True: numbers of batches change with the workers. Give all the same number"
            )
        return join_batches(self._state, batches, before_step or (lambda: None), after_step or (lambda: None))

    def switch(self, strategy: Strategy | str) -> Switched:
        """Continue with another strategy from the next step on; every rank must call, after the same step.

        All workers continue from one point: their parameters, if the old strategy keeps them equal; otherwise the point
        where its round would end now (`Strategy.average`), including messages in flight. State of the old strategy
        that the new one uses in the same sense is kept; the reference of training has the table. Buffers are unchanged,
        and so is the optimizer state, unless workers continue with equal parameters: then its moments become their
        means. Checkpoints from then on belong to the new strategy.

        Args:
            strategy: the recipe, as an object or as text; any that `attach` would take here.

        Returns:
            The names of kept and dropped state.

        Raises:
            ConfigError: the strategy cannot serve this model, optimizer or number of workers, or a gradient is waiting
                for `optimizer.step()`; on all ranks, and nothing has changed.
            MismatchError: ranks name different strategies, or are at different steps.
        """
        if self.elastic is not None:
            raise ConfigError(
                "switch() with elastic=True: a worker could be lost in it. Save, and resume with the new strategy"
            )
        self._refuse_array("switch()", "call detach(), and attach the array again with the new strategy")
        check_all_there(self._state, "switch()")
        check_call(self._state, "switch()")
        self._state.end_failed_pass()
        wait_in_step(self._state, "switch()")
        switched = switching.switch(self._state, strategy)
        rebase(self._state)
        return switched

    # -- consensus -----------------------------------------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Generator[nn.Module]:
        """The model that all workers agree on, for evaluation and export; every rank must enter.

        Parameters are the strategy's consensus (the mean, the leader, the de-biased model). They are not sent where all
        workers have just averaged, at a multiple of `LocalSGD.period` for example. Each worker has its own buffers
        while it trains. A buffer that is equal on all workers, such as a mask, stays unchanged. Of the others, those of
        floating dtype, such as BatchNorm statistics, are averaged over workers, and the rest are rank 0's. Frozen
        parameters are treated like buffers, for example a teacher that the loop updates. An optimizer whose result
        differs from the parameters it trains contributes its result, such as AC-SA and schedule-free optimizers, whose
        `eval()` and `train()` are called. On leaving, all this is restored. Inside, nothing can be saved, loaded,
        switched or trained, and another `consensus()` changes nothing.

        Raises:
            MismatchError: a buffer has another shape on another rank, so that it cannot be averaged.
            ConfigError: a sparse buffer differs between ranks, or parameters have moved to other memory since `attach`.
            PeerLostError: the strategy continues without a lost rank, and the model has buffers to average.
        """
        if self._state.lent:
            yield self.model
            return
        check_parameters(self._state)
        check_loaded(self._state)
        self._together(self._hooks.check_start)
        with evaluating(self._state):
            # Workers that have just averaged agree on their own parameters, unless these were changed since.
            self._state.shards.read()
            averages = self.strategy.traits.averages_at(self.step)
            averaged = self._together(lambda: wait_in_step(self._state, "consensus()", compares=averages))
            if any(True for _ in self.model.buffers()):
                check_all_there(self._state, "consensus() of a model with buffers, such as BatchNorm's")
            with lends(self._state, self._evaluates, averaged=averaged):
                yield self.model

    def _evaluates(self, call: Callable[[], None]) -> None:
        with self._state.account.apart():
            self._together(call)

    # -- saving --------------------------------------------------------------------------------------------------

    def state_dict(self, *, model: bool = False, optimizer: bool = False) -> dict[str, Tensor]:
        """Return the strategy's state of this rank as tensors by flat names: state, messages in flight and the step.

        `torch.save`, safetensors and `torch.distributed.checkpoint` accept the dict unchanged. Load the model, each
        rank its own, and the optimizer before `load_state_dict`, or let the state hold them. With both, this rank
        continues as if it had never stopped. The scheduler, the scaler, random generators and the position in the data
        are the caller's: see `save`, which writes everything. Under `LateMerging` this call and `load_state_dict` are
        refused.

        Names begin with "rank-0000/" and so on, after the name of the shard where the model is split, so that
        `torch.distributed.checkpoint`, which keeps each name only once, keeps the state of every rank.

        Args:
            model: with the parameters and buffers.
            optimizer: with the optimizer's state.

        Example:
            >>> import torch, thinwire
            >>> model = torch.nn.Linear(1, 1)
            >>> worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "SlowMo(period=2)")
            >>> [name.removeprefix("rank-0000/") for name in worker.state_dict()][:3]
            ['header', 'step', 'replicas/0/state/anchor']
        """
        self._refuse_alone("state_dict()")
        check_call(self._state, "state_dict()")
        # The fingerprint is also next to the parameters, so that loading only the strategy's state finds all its names.
        parts = dict.fromkeys((*replica_state.parts_of_state(model=model, optimizer=optimizer), "fingerprint"))
        state = replica_state.pack(self._state, parts)
        return replica_state.to_flat(state, replica_state.part_name(self._state, self.comm.rank))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of the same rank, or from those of all ranks of another number of workers.

        With another number every rank must call, with all parts, models and optimizers in one dict;
        `thinwire.integrations.dcp.load` does so.

        Raises:
            CheckpointError: it belongs to another recipe, model or number of workers, it holds no model and the
                parameters are other ones, or is no such state; names the first difference, and nothing has changed.
        """
        self._refuse_alone("load_state_dict()")
        check_call(self._state, "load_state_dict()", loads=True)
        if self._has_just_joined:
            raise ConfigError(
                f"load_state_dict() on rank {self.rank}, which has just joined an elastic run at step {self.step}. "
                "A worker that joins has the state of the run already. Skip the call where "
                "worker.elastic.has_just_joined is true"
            )
        checkpoint.load_parts(self._state, state)
        self._hooks.forget_closure()

    def save(self, folder: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = 3) -> Path:
        """Write a checkpoint of all ranks to `folder`/step-NNNNNNNN, atomically; every rank must call.

        A run that continues from it ends with the same bits as one that was not stopped, but for methods whose results
        depend on timing (`strategy.traits.timing_dependent`), of which no two runs are alike.

        Args:
            folder: holds one checkpoint per saved step; on a local file system, `~` is expanded.
            extra: more to save: dicts of tensors and JSON values, such as a scheduler's `state_dict()`.
            keep: how many complete checkpoints to keep, this one among them; older ones are removed when this one is
                complete on all ranks. None keeps all.

        Raises:
            PeerLostError: the strategy continues without a lost rank; a checkpoint needs all ranks.
            CheckpointError: a file cannot be written, `extra` holds something that is neither a tensor nor JSON, or
                ranks are at different steps.
            NonFiniteError: a parameter is NaN or infinite; the last good checkpoint stays.
            ConfigError: `keep` is less than 1.

        Example:
            >>> import tempfile, torch, thinwire
            >>> def train(comm, folder):
            ...     model = torch.nn.Linear(1, 1, bias=False)
            ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            ...     worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=2), comm=comm)
            ...     worker.save(folder, extra={"epoch": 3})
            ...     return worker.load(folder)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     thinwire.run_threads(2, lambda comm: train(comm, folder))
            [{'epoch': 3}, {'epoch': 3}]
        """

        def write() -> Path:
            check_all_there(self._state, "save()")
            check_call(self._state, "save()")
            wait_in_step(self._state, "save()")
            check_all_there(self._state, "save()")
            with self._state.account.apart():
                place = checkpoint.own_folder(self._state, folder)
                return checkpoint.save(self._state, place, dict(extra or {}), keep=keep)

        if self._has_just_joined:
            # The others have saved after this step, or not at all; a part of this worker alone would replace one of
            # theirs.
            return checkpoint.own_folder(self._state, folder) / f"step-{self.step:08d}"
        return self._together(write)

    def load(self, folder: str | Path, *, missing_ok: bool = False) -> dict[str, Any]:
        """Continue from the newest complete checkpoint in `folder`; returns the `extra` saved with it.

        Another number of workers may have written it, if every rank sees all parts: the parameters are then those that
        the workers agreed on (`Strategy.average`), optimizers' moments and buffers are means, and the strategy's
        state is redistributed (`Strategy.resized`). Torch's random generators are unchanged, and data must be
        divided again. A new rank gets rank 0's `extra`. After "auto" the strategy of the save continues.
        A worker that has just joined an elastic run keeps the state of the run and only gets rank 0's `extra`.

        Args:
            folder: that `save` wrote to.
            missing_ok: return {} and change nothing where no rank finds a checkpoint in the folder, as on a first
                start. A checkpoint that is damaged, or that only some ranks find, is still an error.

        Raises:
            CheckpointError: there is none, parts are damaged or not of one save, it belongs to another recipe, model,
                seed or optimizer, or something in it cannot be given to another number of workers. All ranks raise it,
                and nothing has changed on any.
        """

        def read() -> dict[str, Any]:
            check_all_there(self._state, "load()")
            check_call(self._state, "load()", loads=True)
            with self._state.account.apart():
                self.comm.check_in_step("load()").wait()
                place = checkpoint.own_folder(self._state, folder, loads=True)
                return checkpoint.load(self._state, place, missing_ok=missing_ok)

        self._hooks.forget_closure()
        if self._has_just_joined:
            place = checkpoint.own_folder(self._state, folder, loads=True)
            return checkpoint.saved_extra(place, missing_ok=missing_ok)
        if self.elastic is not None:
            self.elastic.drop_newcomers()
        return self._together(read)

    def export(self, path: str | Path) -> Path:
        """Write the model that all workers agree on as one safetensors file; every rank must call, and rank 0 writes.

        It holds what `model.state_dict()` holds at `consensus()`, and is loaded without thinwire, with
        `model.load_state_dict(safetensors.torch.load_file(path))`. Tied parameters are in it under each of their names.
        The names are the model's own, also where `torch.compile` wraps it. Sparse buffers are written as dense tensors:
        call `to_sparse()` on them before `load_state_dict`.

        Args:
            path: the path of the file; an existing file is replaced.

        Raises:
            CheckpointError: it cannot be written, or the model's `state_dict` holds something that is no tensor.
            NonFiniteError: a parameter or a running statistic is NaN or infinite, or another buffer holds NaN; nothing
                is written.
            ConfigError: the model is split over a mesh (see `thinwire.tensor2d.write_whole`), or another worker trains
                a part of it and is not inside its `consensus()`.

        Example:
            >>> import tempfile, torch, thinwire
            >>> from safetensors.torch import load_file
            >>> model = torch.nn.Linear(2, 1)
            >>> worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "LocalSGD(period=2)")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     state = load_file(worker.export(f"{folder}/model.safetensors"))
            >>> torch.nn.Linear(2, 1).load_state_dict(state), sorted(state)
            (<All keys matched successfully>, ['bias', 'weight'])
        """
        self._refuse_array("export()", "write array.extract(i).state_dict() inside worker.consensus()")
        check_all_there(self._state, "export()")
        if any(map(differs, workers_beside(self._state))):
            raise ConfigError(
                f"step {self.step}: export() of a model of which another worker trains a part: the file would have "
                "rank 0's own parameters there. Call it inside the other worker's consensus()"
            )
        if self._has_just_joined:
            return Path(path)  # the others have written it, or write it at a later step
        with self._state.account.apart():
            place = self._together(lambda: checkpoint.on_disk(self._state, path))
        with self.consensus() as model, self._state.account.apart():
            return checkpoint.export(self._state, model, place)

    def detach(self) -> None:
        """Remove every hook and close all connections; every rank must call.

        The model keeps its parameters and trains alone from then on. A comm that you passed to `attach` stays open, and
        so does the default process group.

        While an exception is handled, and after a failure of ranks, it does not wait for other ranks. A second
        call does nothing. `with attach(...) as worker:` calls it at the end of the block.

        Raises:
            MismatchError: on all ranks, where some are in another call or at another step; the hooks are removed.
        """
        self._detach(waits=sys.exc_info()[0] is None)

    def _detach(self, *, waits: bool) -> None:
        if self._detached:
            return
        self._detached = True
        try:
            if waits and not self.comm.has_failed():
                refuse_while_lent(self._state, "detach()")
                self._together(lambda: wait_in_step(self._state, "detach()"))
        finally:
            for replica in self.replicas:
                for part in replica.tree():
                    self.comm.close_mailbox(part)
            self._state.undo.close()

    @property
    def _has_just_joined(self) -> bool:
        return self.elastic is not None and self.elastic.has_just_joined

    def _refuse_alone(self, call: str) -> None:
        if self._state.load_alone is not None:
            raise ConfigError(
                f"{call} with elastic=LateMerging(): the state does not contain the rounds that workers are in. Use "
                "save() and load(), and export() for the weights"
            )

    def _refuse_array(self, call: str, instead: str) -> None:
        if isinstance(self.model, StackedModule):
            raise ConfigError(f"{call} of an array: {instead}")

    def _together(self, call: Callable[[], T]) -> T:
        return together(self._state, self.elastic, call)


def internals_of(worker: Worker) -> WorkerState:
    """Return the data behind a worker, for thinwire's own modules; they may change in any version."""
    return worker._state  # pyright: ignore[reportPrivateUsage]
