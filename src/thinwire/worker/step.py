# SPDX-License-Identifier: Apache-2.0
"""One step of an attached optimizer: the hooks before and after it, and steps of a rank that has no batch left."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from thinwire.core.kernels import all_finite_each
from thinwire.core.replica.flat import views
from thinwire.core.replica.shards import is_sharded, plain
from thinwire.core.torch_internals import set_unscales_itself, unscales_itself, wrap_scaler_step, wrap_unscale
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import Strategy, codecs_of, nested, pace_rule
from thinwire.worker.annexes import Rounds
from thinwire.worker.buckets import Backward, Bucket, NonFinite, ScaledResiduals, cut
from thinwire.worker.compatibility import evaluates_several_gradients, several_evaluations
from thinwire.worker.consensus import refuse_while_lent
from thinwire.worker.guards import (
    Attachment,
    FirstSteps,
    check_first_gradient,
    check_loaded,
    check_parameters,
    refuse,
    within,
    workers_beside,
)
from thinwire.worker.handshake import fingerprint
from thinwire.worker.members import Members
from thinwire.worker.state import WorkerState

Batch = TypeVar("Batch")
_COMPARED_STEPS = 500
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
_ALLOCATING = (("torch.distributed.optim.named_optimizer", "init_state"),)


class Step:
    """Run one worker's part of every optimizer step.

    Torch wraps the `step` of every optimizer class that has been instantiated. If a subclass calls `super().step()`,
    torch calls all hooks for both, one step within the other. The outermost call counts. Steps in which torch only
    allocates the optimizer's state do not count.

    Args:
        worker: whose replicas exist.
        rounds: of an elastic worker; None where the ranks are fixed.
        compare: compares the parameters of all ranks, where they must be equal.
    """

    def __init__(self, worker: WorkerState, *, rounds: Rounds | None, compare: Callable[[], object]) -> None:
        self._worker = worker
        self._rounds = rounds
        self._compare = compare
        self._first_steps: FirstSteps | None = None
        self._allocates_state = False
        self._dropped = False
        self._begun = -1
        self._calls = 0  # of the hook before a step
        self._replaced: Any = None  # the latest function in place of the optimizer's own step
        self._watched: Any = None  # what watches it; None when it is known to run the hooks
        self._looking = ExitStack()  # the hooks of `_look_at_step`

    def watch(self, attachment: Attachment, first_steps: FirstSteps) -> None:
        """Hook to the optimizer, from the next step on; `undo` removes the hooks.

        Args:
            attachment: checks the loop's changes to the model since `attach`.
            first_steps: checks of the first steps.
        """
        self._attachment, self._first_steps = attachment, first_steps
        optimizer, undo = self._worker.optimizer, self._worker.undo
        undo.callback(optimizer.register_step_pre_hook(self.before).remove)
        undo.callback(optimizer.register_step_post_hook(self.after).remove)
        trained = [p for parameters, _ in self._worker.layouts for p in parameters if not is_sharded(p)]
        for node in [torch.autograd.graph.get_gradient_edge(p).node for p in (*trained[:1], *trained[-1:])]:
            self._looking.callback(node.register_prehook(self._look_at_step).remove)
            self._looking.callback(lambda _: None, node)  # a parameter does not keep its node alive
        undo.callback(self._looking.close)
        undo.callback(self._trust_step)
        self._look_at_step()

    def check_start(self) -> None:
        """Before the first step, start again from weights that all ranks have loaded since `attach`, or refuse them.

        Later, look for a function in place of `optimizer.step`.
        """
        self._look_at_step()
        if self._first_steps is not None:
            self._first_steps.check_start(self._worker, begins=False)

    def forget_closure(self) -> None:
        """After a load: run the hooks again in a step whose closure has failed before."""
        self._begun = -1

    def _look_at_step(self, *_: object) -> None:
        """In the first steps, and after a consensus, watch a function in place of `optimizer.step` until it runs hooks.

        Schedulers, scalers and profilers put one there that calls the optimizer's own step.
        """
        worker, optimizer = self._worker, self._worker.optimizer
        replaced: Any = vars(optimizer).get("step")
        if replaced is None and not getattr(type(optimizer).step, "hooked", False):
            replaced = optimizer.step  # of a class whose `step` was replaced since the optimizer was made
        if replaced is None or replaced is self._replaced or replaced is self._watched:
            return

        @wraps(replaced)
        def step(_: Optimizer, *args: Any, **named: Any) -> Any:
            if self._watched is None:
                return replaced(*args, **named)
            calls, before = self._calls, fingerprint(r.x for r in worker.replicas)
            found = replaced(*args, **named)
            if self._calls > calls:
                self._trust_step()
            elif before != fingerprint(r.x for r in worker.replicas):
                name, kind = getattr(replaced, "__qualname__", repr(replaced)), type(optimizer).__name__
                refuse(
                    worker,
                    f"{name} is in place of optimizer.step, and moves the parameters without the hooks of {kind}'s own "
                    "step, so workers would exchange nothing. Call the optimizer's own step in it, or define it as the "
                    f"step of a subclass of {kind}",
                )
            return found

        self._replaced, self._watched = replaced, MethodType(step, optimizer)
        vars(optimizer)["step"] = self._watched

    def _trust_step(self) -> None:
        """Put back what `_look_at_step` has found."""
        own = vars(self._worker.optimizer)
        if self._watched is not None and own.get("step") is self._watched:
            own["step"] = self._replaced
        self._watched = None

    # -- torch's hooks -------------------------------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's hook before `optimizer.step`; returns its arguments if the closure is replaced."""
        frame, worker = _caller(), self._worker
        self._calls += 1
        if worker.step_frame is not None and within(frame, worker.step_frame):
            return None
        worker.step_frame = frame
        self._allocates_state = _only_allocates_state(optimizer)
        if self._allocates_state:
            return None
        if worker.lent:
            refuse_while_lent(worker, "optimizer.step()")
        if worker.exchanging:
            worker.refuse_interrupted()
        self._attachment.before_step(worker)
        if worker.fingerprint_before_load is not None:
            check_loaded(worker)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            self._look_at_gradients()
            if self._first_steps is not None:
                self._first_steps.check_start(worker)
            self._run_before()
            if self._first_steps is not None:
                self._first_steps.enter_update(worker)
            return None
        return args[:1], {**kwargs, "closure": self._evaluating(closure)}

    def after(self, *_: Any) -> None:
        """Torch's hook after `optimizer.step`."""
        frame, worker, comm = _caller(), self._worker, self._worker.comm
        if frame is not worker.step_frame and within(frame, worker.step_frame):
            return
        worker.step_frame = None
        if self._allocates_state:
            return
        if [p.data_ptr() for p in self._attachment.unsharded] != self._attachment.places:
            check_parameters(worker)  # the optimizer has assigned to `p.data`
        if self._first_steps is not None and self._first_steps.end_step(worker):
            self._first_steps = None
            self._looking.close()
        if worker.shards.views:
            worker.shards.read()
        for replica in worker.replicas:
            replica.progress.step += 1
        rounds = self._rounds
        self._exchange(self.strategy_after if rounds is None else partial(rounds.after_step, self.strategy_after))
        comm.round = ""
        worker.account.keep(worker.replicas[0].progress.loss)
        for replica in worker.replicas:
            replica.progress.samples, replica.progress.loss = 1.0, None
        strategy = worker.strategy
        if worker.backward is not None:
            worker.backward.exchanged = False
            worker.account.exchanged |= comm.size > 1
        self._dropped, self._begun = False, -1
        worker.account.end_step()
        if worker.shards.views:
            worker.shards.write()
        comm.step = step = worker.replicas[0].progress.step
        if step % _COMPARED_STEPS == 0 and strategy.traits.equal_replicas:
            self._compare()

    # -- closures ------------------------------------------------------------------------------------------------------

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the closure with the work of a step after its gradient exists.

        The gradient exists only after the call. Optimizers may call a closure several times, and at other points than
        `r.x` of now, so what needs no gradient runs before the first call. If the loop has caught an error of the
        closure and tries again, it has run already.
        """
        worker, strategy, calls = self._worker, self._worker.strategy, 0
        if self._first_steps is not None:
            self._first_steps.check_start(worker)
        if not strategy.traits.reads_gradient and self._begun != worker.step:
            self._run_before()
            self._begun = worker.step
        mean_loss = isinstance(worker.optimizer, LBFGS) and worker.backward is not None

        def evaluate() -> Any:
            nonlocal calls
            if self._first_steps is not None:
                self._first_steps.leave_update(worker)
            loss, calls = closure(), calls + 1
            self._look_at_gradients()
            if strategy.traits.reads_gradient:
                if calls > 1:
                    raise several_evaluations(strategy, worker.optimizer)
                self._run_before()
            loss = self._mean_of(loss) if mean_loss else loss
            if self._first_steps is not None:
                self._first_steps.enter_update(worker)
            return loss

        if self._first_steps is not None:
            self._first_steps.enter_update(worker)
        return evaluate

    def _mean_of(self, loss: Any) -> Tensor:
        # LBFGS decides by the loss when to stop. It must decide alike on all ranks, or some would wait for a gradient
        # that others do not compute.
        device = self._worker.replicas[0].x.device
        value = torch.as_tensor(loss, dtype=torch.float64, device=device).detach().reshape(1)
        return mean_(self._worker.comm, value).wait()[0]

    # -- the strategy's hooks ------------------------------------------------------------------------------------------

    def _run_before(self) -> None:
        """Let the strategy act on the parameters and the gradient, before the optimizer does."""
        worker = self._worker
        if worker.shards.views:
            worker.shards.read()
        self._exchange(self._act_before)
        worker.comm.round = ""
        if self._dropped:
            # In the memory of a gradient that was dropped, the strategy has found zeros.
            drop_gradients(worker)
        if worker.shards.views:
            worker.shards.write()

    def _act_before(self) -> None:
        worker, strategy = self._worker, self._worker.strategy
        if strategy.traits.reads_gradient:
            for replica, (parameters, segments) in zip(worker.replicas, worker.layouts, strict=True):
                whole = Bucket(replica, list(parameters), views(replica.g, segments), slice(None))
                whole.gather()
                # The strategy may rewrite `r.g`; the optimizer must see that.
                whole.expose()
        if self._rounds is not None:
            self._rounds.before_step(self._strategy_before)
        elif type(strategy).before_step is not Strategy.before_step:
            self._strategy_before()

    def _exchange(self, act: Callable[[], object]) -> None:
        """Run the strategy's part of a step; see `WorkerState.refuse_interrupted`."""
        worker = self._worker
        worker.exchanging = True
        try:
            with torch.no_grad():
                act()
        except ThinwireError:
            worker.exchanging = False  # whether the worker can continue is known
            raise
        worker.exchanging = False

    def _strategy_before(self) -> None:
        self._run(self._worker.strategy.before_step)

    def strategy_after(self) -> None:
        """Run the strategy's hook after the optimizer's step."""
        strategy = self._worker.strategy
        if type(strategy).after_step is not Strategy.after_step:
            self._run(strategy.after_step)

    def _run(self, hook: Callable[[Any], None]) -> None:
        """Run a hook on all replicas; its first collective call is checked."""
        worker, comm, traits = self._worker, self._worker.comm, self._worker.strategy.traits
        # Gradients that are sent at every step keep replicas equal, which is checked by itself. Workers that go at
        # their own pace may meet in a round that some of them reach while they wait for its end.
        if not traits.timing_dependent and not (traits.sends_gradients and traits.equal_replicas):
            comm.round = "an average in training"
        sent = comm.meter.messages
        for replica in worker.replicas:
            hook(replica)
        worker.account.exchanged |= comm.meter.messages > sent

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _look_at_gradients(self) -> None:
        worker, backward = self._worker, self._worker.backward
        if backward is not None:
            backward.end_failed(stepped=True)
        if self._first_steps is not None:
            self._first_steps.record_gradient(worker)
        if worker.just_switched:
            check_first_gradient(worker)
        if backward is not None:
            backward.refuse_own_gradients()
        self._dropped = worker.nonfinite != "ignore" and self._handle_nonfinite()
        for replica, (parameters, _) in zip(worker.replicas, worker.layouts, strict=True):
            if all(parameter.grad is None for parameter in parameters):
                replica.progress.samples = 0.0

    def _handle_nonfinite(self) -> bool:
        """Look at the gradient that the optimizer is about to use; raise, or drop it, where it is not finite.

        Where the mean of the gradients was exchanged in the backward pass, it is the same on all ranks, and so is what
        they do. Elsewhere a rank looks at its own gradient.

        Returns:
            Whether a common gradient was dropped, on all ranks, so that nothing is to be updated.

        Raises:
            NonFiniteError: on all ranks, under the policy "raise".
        """
        worker, backward, strategy = self._worker, self._worker.backward, self._worker.strategy
        # A GradScaler that has found the gradient out lets the optimizer leave out the step by itself. Fused optimizers
        # are called all the same; others are not called, and no hook of theirs runs.
        found_inf = getattr(worker.optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor) and bool(found_inf.item()):
            return False
        common = backward is not None and backward.exchanged
        if backward is not None and backward.exchanged:
            found = backward.nonfinite
        else:
            name = _first_nonfinite(worker)
            found = None if name is None else NonFinite(worker.comm.rank, name)
        if found is None:
            return False
        if worker.nonfinite == "raise":
            error = found.error(worker.step, worker.comm)
            if common and not strategy.traits.skips_steps:
                raise error  # as all ranks do
            worker.comm.raise_on_all(error)
        # The strategy skips the step on all ranks together, and counts it.
        if not common and strategy.traits.skips_nonfinite:
            return False
        for replica in worker.replicas:
            replica.count("skipped_steps")
        drop_gradients(worker)
        return common


def drop_gradients(worker: WorkerState) -> None:
    """Leave all trained parameters without a gradient, so that optimizers do not change them or their state."""
    for parameters, _ in worker.layouts:
        for parameter in parameters:
            parameter.grad = None


def _first_nonfinite(worker: WorkerState) -> str | None:
    """Return the name of the first parameter whose gradient on this rank is not finite."""
    for parameters, segments in worker.layouts:
        if all_finite_each(_gradients_of(parameters)):
            continue
        for parameter, segment in zip(parameters, segments, strict=True):
            if not all_finite_each(_gradients_of([parameter])):
                return segment.name
    return None


def _gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the dense gradients on this rank of the parameters that have one."""
    strided = torch.strided
    return [
        grad if type(grad) is Tensor and grad.layout is strided else _dense(grad)
        for p in parameters
        if (grad := p.grad) is not None
    ]


def _dense(grad: Tensor) -> Tensor:
    own = plain(grad)
    return own if own.layout is torch.strided else own.to_dense()


# -- torch's calls -----------------------------------------------------------------------------------------------------


def _only_allocates_state(optimizer: Optimizer) -> bool:
    """Whether torch takes this step with zero gradients and a learning rate of zero to allocate the optimizer's state.

    `get_state_dict` and `set_state_dict` of `torch.distributed.checkpoint` do so while the optimizer's state is empty.
    The state of plain SGD always is.
    """
    for group in optimizer.param_groups:
        lr = group.get("lr", 0.0)
        # Torch's zero is a scalar on the CPU; a learning rate on a GPU must not be waited for.
        if (isinstance(lr, Tensor) and (lr.ndim or lr.device.type != "cpu")) or lr != 0:
            return False
    frame = inspect.currentframe()
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if (module, function) in _ALLOCATING or module == _CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def _caller() -> FrameType | None:
    """Return the frame from which torch calls the hooks of one step."""
    here = inspect.currentframe()
    asking = here and here.f_back
    return asking and asking.f_back


# -- the backward pass -------------------------------------------------------------------------------------------------


def watch_gradients(worker: WorkerState) -> None:
    """Hook the exchange of the worker's strategy to the backward pass, in place of the one before."""
    strategy = worker.strategy
    stop_watching(worker)
    worker.backward = None
    if not strategy.traits.sends_gradients or (worker.comm.size == 1 and worker.survives is None):
        return
    models = strategy.models if isinstance(strategy, Members) else 1
    buckets = [
        bucket
        for replica, (parameters, segments) in zip(worker.replicas, worker.layouts, strict=True)
        for bucket in cut(replica, parameters, segments, worker.bucket_bytes, models=models)
    ]
    names = {
        id(p): segment.name
        for parameters, segments in worker.layouts
        for p, segment in zip(parameters, segments, strict=True)
    }
    coded = any(True for each in nested(strategy) for _ in codecs_of(each))

    worker.backward = Backward(
        buckets,
        strategy.on_gradient,
        [names[id(p)] for bucket in buckets for p in bucket.parameters],
        find_unused=worker.find_unused,
        skips_steps=strategy.traits.skips_steps,
        raises_own=worker.nonfinite == "raise",
        survives=worker.survives,
        on_begin=worker.start_step,
    )
    if (batch := worker.global_batch) is not None:
        worker.backward.scale = lambda: batch.factor(worker.step, *worker.members())
    if not isinstance(worker.model, DistributedDataParallel):  # where the attribute is set to turn DDP's exchange off
        worker.backward.model = worker.model
    if not strategy.traits.skips_steps and worker.survives is None:
        others = [other.backward for other in workers_beside(worker) if other.survives is None]
        worker.backward.passes = next((other.passes for other in others if other is not None), worker.backward.passes)
    if coded and worker.scaler is not None and worker.scaler.is_enabled():
        worker.backward.residuals = ScaledResiduals(worker.replicas, worker.scaler)
    worker.watching += worker.backward.watch()


def stop_watching(worker: WorkerState) -> None:
    """Remove the hooks of the exchange."""
    while worker.watching:
        worker.watching.pop().remove()
    if worker.backward is not None:
        worker.backward.passes.leave(worker.backward)


# -- skipped steps -----------------------------------------------------------------------------------------------------


def share_skips(worker: WorkerState) -> None:
    """Make an overflow on one rank skip the step on all ranks, as the GradScaler for sharded models does.

    Elastic workers that train locally skip steps on their own, but count them.
    """
    scaler, strategy = worker.scaler, worker.strategy
    if scaler is not None and scaler.is_enabled() and strategy.traits.reads_gradient:
        _unscale_before_step(worker)
    if scaler is None or worker.shares_skips:
        return
    # Where only gradients are exchanged, all ranks have the same one and find the same overflow by themselves.
    if strategy.traits.sends_gradients and not strategy.traits.reads_gradient:
        return
    if worker.survives is not None:
        worker.shares_skips = True
        worker.undo.callback(wrap_scaler_step(scaler, lambda step: _skipping_own(worker, step)))
        return
    if worker.comm.size == 1:
        return
    worker.shares_skips = True
    device = worker.replicas[0].x.device

    def together(unscale: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
        def unscale_together(optimizer: Optimizer, *rest: Any) -> dict[torch.device, Tensor]:
            found = unscale(optimizer, *rest)
            if optimizer is not worker.optimizer:
                return found
            none = torch.zeros((), dtype=torch.float32, device=device)
            overflows = sum((each.to(device) for each in found.values()), none)
            return {device: worker.comm.all_reduce_(overflows).wait()}

        return unscale_together

    worker.undo.callback(wrap_unscale(scaler, together))


def _skipping_own(worker: WorkerState, step: Callable[..., Any]) -> Callable[..., Any]:
    """Let a step whose gradient overflows on this rank count as one without an update.

    Elastic workers that train locally send nothing between their rounds, which are counted in steps. A step that one of
    them left out would leave it behind the others. If a worker is a group of ranks, torch has told all of them of an
    overflow in any shard when it unscaled the gradients.
    """

    def step_without_overflow(optimizer: Optimizer, state: dict[str, Any], *rest: Any, **named: Any) -> Any:
        if optimizer is not worker.optimizer:
            return step(optimizer, state, *rest, **named)
        if any(bool(found) for found in state["found_inf_per_device"].values()):
            drop_gradients(worker)
            for replica in worker.replicas:
                replica.count("skipped_steps")
        return optimizer.step(*rest, **named)

    return step_without_overflow


def _unscale_before_step(worker: WorkerState) -> None:
    """Keep a scaler from leaving the gradient scaled for a fused optimizer, where the strategy reads it first."""
    optimizer = worker.optimizer
    if unscales_itself(optimizer):
        set_unscales_itself(optimizer, False)
        worker.undo.callback(set_unscales_itself, optimizer, True)


# -- uneven numbers of batches -----------------------------------------------------------------------------------------


class _End:
    """No more batches."""


_END = _End()


def join_batches(
    worker: WorkerState,
    batches: Iterable[Batch],
    before_step: Callable[[], object],
    after_step: Callable[[], object],
) -> Iterator[Batch]:
    """Yield this rank's batches, then take the steps for which other ranks still have data."""
    if evaluates_several_gradients(worker.optimizer):
        raise ConfigError(
            f"join() with {type(worker.optimizer).__name__}: its step calls a closure, which a rank without a batch "
            "does not have. Give all ranks the same number of batches"
        )
    if worker.strategy.traits.meets_every > 1:
        raise ConfigError(
            f"join() with {worker.strategy}: {pace_rule(worker.strategy)}. Let the data of every rank go round"
        )
    worker.comm.check_in_step("join()").wait()
    device = worker.replicas[0].x.device
    own = torch.tensor([len(batches) if isinstance(batches, Sized) else -1], dtype=torch.int64, device=device)
    lengths = [int(n.item()) for n in worker.comm.all_gather(own).wait()]
    known = min(lengths) >= 0
    iterator = iter(batches)
    step = 0
    try:
        while True:
            batch = next(iterator, _END)
            worker.end_failed_pass()
            if known:
                active = sum(step < n for n in lengths)
            else:
                has_batch = torch.tensor([float(batch is not _END)], dtype=torch.float32, device=device)
                active = int(worker.comm.all_reduce_(has_batch).wait().item())
            if not active:
                return
            _set_active(worker, active)
            if isinstance(batch, _End):
                step_without_batch(worker, before_step)
                after_step()
            else:
                yield batch
            step += 1
    finally:
        # Also when the loop breaks early: later steps count every rank again.
        _set_active(worker, worker.comm.size)


def _set_active(worker: WorkerState, active: int) -> None:
    for replica in worker.replicas:
        replica.active = active


def step_without_batch(worker: WorkerState, before_step: Callable[[], object] = lambda: None) -> None:
    """Take one step without a gradient of this rank's own; where gradients are exchanged, with the others' mean."""
    worker.optimizer.zero_grad(set_to_none=True)
    if worker.backward is not None:
        worker.backward.flush()
    if worker.scaler is None:
        before_step()
        worker.optimizer.step()
    else:
        # A scaler sets itself up with the first loss, which this rank may never have had.
        worker.scaler.scale(torch.zeros((), dtype=torch.float32, device=worker.replicas[0].x.device))
        before_step()
        worker.scaler.step(worker.optimizer)
        worker.scaler.update()
    worker.optimizer.zero_grad(set_to_none=True)
