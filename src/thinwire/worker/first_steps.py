# SPDX-License-Identifier: Apache-2.0
"""Checks in the first steps: parameters changed after `attach`, equal batches, an optimizer that communicates.

The ranks send each other 40 bytes in the first step and in the third, and nothing after that.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire.comm.work import Work
from thinwire.errors import MismatchError
from thinwire.replica.replica import Replica
from thinwire.replica.shards import local
from thinwire.strategies.base import Strategy, nested
from thinwire.strategies.wrapper import Wrapper
from thinwire.worker.attachment import refuse
from thinwire.worker.compatibility import check_start
from thinwire.worker.handshake import fingerprint, sum_of_bits
from thinwire.worker.state import WorkerState

_STEPS = 3
_START_CHECK, _DATA_CHECK = "a check of the start", "a check of the data"
_CHANGED = 1 << 62
_LOGGER = logging.getLogger("thinwire")


class FirstSteps:
    """Check the first three steps of a worker, together with the other ranks.

    Ranks that do not take their steps together send nothing: each of them refuses what it cannot agree on alone.

    Args:
        worker: before its first step.
        init: as for `attach`.
    """

    def __init__(self, worker: WorkerState, init: Literal["broadcast", "own"]) -> None:
        self._init = init
        self._gradients: list[int] = []
        self._calls = 0
        # As of now: a loop with several networks may freeze some of them for a while. Those that another optimizer
        # trains are its worker's.
        held = {id(p) for parameters, _ in worker.layouts for p in parameters}
        worker.frozen = [p for p in worker.model.parameters() if id(p) not in held and not p.requires_grad]
        worker.start_fingerprint = _fingerprint(worker)
        worker.own_gradient = 0
        if worker.backward is not None:
            worker.backward.exchange = partial(_record_and_exchange, worker)

    # -- the start -------------------------------------------------------------------------------------------------

    def check_start(self, worker: WorkerState) -> None:
        """Before the first step, start again if all ranks have changed the parameters alike since `attach`.

        Raises:
            MismatchError: on all ranks, if they are different now, with the ranks that have changed them.
            ConfigError: on all ranks, if the ranks cannot agree on the change.
        """
        self._calls = 0  # of a step that has failed
        if worker.start_fingerprint is None:
            return
        number = _fingerprint(worker)
        changed = number != worker.start_fingerprint
        worker.start_fingerprint = worker.fingerprint_before_load = None
        worker.frozen = []
        if worker.comm.size > 1 and not _step_together(worker):
            if changed:
                run = str(worker.strategy) if worker.survives is None else "elastic=True"
                refuse(
                    worker,
                    f"parameters were changed after attach. Under {run} the ranks cannot agree on a new start. Load or "
                    "edit the weights before attach",
                )
            return
        mine = number % _CHANGED + _CHANGED * changed
        found = worker.comm.gather_in_step(_START_CHECK, mine).wait()
        equal = len({each % _CHANGED for each in found}) == 1
        ranks = [rank for rank, each in enumerate(found) if each >= _CHANGED]
        problem = self._problem(worker, ranks, equal=equal) if ranks else ""
        if worker.mesh is not None:
            blocks = worker.mesh.block.whole.gather_in_step(_START_CHECK, int(bool(problem))).wait()
            if any(blocks) and not problem:
                problem = "the parameters of other blocks of the model were changed after attach on some ranks"
        if problem:
            raise MismatchError(f"step {worker.step}: {problem}. Load or edit the weights before attach")
        if ranks and not worker.resumed:
            check_start(worker.strategy, equal=equal)
            _start_again(worker, equal=equal)

    def _problem(self, worker: WorkerState, ranks: list[int], *, equal: bool) -> str:
        """Why the worker cannot start from what these ranks have changed; empty if it can."""
        whose = "all ranks" if len(ranks) == worker.comm.size else worker.comm.names(ranks)
        if worker.resumed:
            if len(ranks) == worker.comm.size and not keeps_copies(worker):
                return ""  # a local update, as in any later step
            return f"the parameters of {whose} were changed after worker.load(), whose state belongs to others"
        if equal or (self._init == "own" and not worker.strategy.traits.sends_gradients):
            return ""
        return (
            f"the parameters of {whose} were changed after attach, and now differ between ranks. Every rank must start "
            "from the same parameters"
        )

    # -- the gradients ---------------------------------------------------------------------------------------------

    def record_gradient(self, worker: WorkerState) -> None:
        """Add up this rank's own gradients, where they are not exchanged during the backward pass."""
        if worker.backward is not None or worker.own_gradient is None:
            return
        for parameters, _ in worker.layouts:
            for grad in (local(p.grad) for p in parameters if p.grad is not None):
                dense = grad if grad.layout == torch.strided else grad.coalesce().values()
                worker.own_gradient += sum_of_bits(dense)

    def _compare_gradients(self, worker: WorkerState) -> None:
        """Warn of ranks whose own gradients were equal and not zero in each of the first steps."""
        if worker.comm.size == 1 or worker.strategy.traits.meets_every > 1 or not _step_together(worker):
            return
        number = 0
        if all(self._gradients):
            for each in self._gradients:
                number = (31 * number + each) % (1 << 63)
        numbers = worker.comm.gather_in_step(_DATA_CHECK, number).wait()
        equal = [value for value, count in Counter(numbers).items() if value and count > 1]
        if equal and worker.comm.rank == 0:
            ranks = [rank for rank, value in enumerate(numbers) if value == equal[0]]
            _LOGGER.warning(
                "step %d: %s computed the same gradients in each of the first %d steps. They probably read the same "
                "batches, and do the work of one. Give each rank its own part of the data: "
                "DataLoader(dataset, sampler=worker.sampler(dataset))",
                *(worker.step, worker.comm.names(ranks), _STEPS),
            )

    # -- the optimizer's own calls ---------------------------------------------------------------------------------

    def enter_update(self, worker: WorkerState) -> None:
        """Count calls from here on as the optimizer's own."""
        self._calls -= worker.comm.count_other_calls()

    def leave_update(self, worker: WorkerState) -> None:
        """Count calls from here on as the worker's or the closure's."""
        self._calls += worker.comm.count_other_calls()

    def _check_calls(self, worker: WorkerState) -> None:
        calls, self._calls = self._calls, 0
        if not calls:
            return
        name = type(worker.optimizer).__name__
        found = f"{name}.step() makes collective calls of its own ({calls} in this step)"
        if not worker.strategy.traits.equal_replicas:
            refuse(
                worker,
                f"{found}. Under {worker.strategy!s} ranks have different parameters and gradients, which the "
                "optimizer would mix up. Use an optimizer that updates all parameters on every rank, or AllReduce()",
            )
        if worker.comm.rank == 0:
            _LOGGER.warning("step %d: %s, which worker.comm.meter does not count", worker.step, found)

    def end_step(self, worker: WorkerState) -> bool:
        """After the optimizer's update; returns whether this was the last step to be checked.

        Raises:
            ConfigError: on all ranks, if the optimizer communicates and the ranks' parameters differ.
        """
        self.leave_update(worker)
        self._check_calls(worker)
        self._gradients.append(worker.own_gradient or 0)
        worker.own_gradient = 0
        if len(self._gradients) < _STEPS:
            return False
        worker.own_gradient = None
        if worker.backward is not None:
            worker.backward.exchange = worker.strategy.on_gradient
        self._compare_gradients(worker)
        return True


def _record_and_exchange(worker: WorkerState, replica: Replica, part: slice) -> Work[Tensor] | None:
    """Add up this rank's own gradients before they are exchanged."""
    worker.own_gradient = (worker.own_gradient or 0) + sum_of_bits(replica.g[part])
    return worker.strategy.on_gradient(replica, part)


def rebase(worker: WorkerState) -> None:
    """Take changes of the parameters so far as the worker's own, and not as the training loop's."""
    worker.fingerprint_before_load = None
    if worker.start_fingerprint is not None:
        worker.start_fingerprint = _fingerprint(worker)


def check_loaded(worker: WorkerState) -> None:
    """Refuse weights that were loaded between two steps, if the strategy keeps copies of the parameters as they were.

    Weights that were put back before the step, as after an evaluation of averaged weights, are no change.

    Raises:
        ConfigError: on all ranks.
    """
    before = worker.fingerprint_before_load
    if before is None or worker.start_fingerprint is not None:
        return
    worker.fingerprint_before_load = None
    if keeps_copies(worker):
        worker.shards.read()
        if fingerprint(r.x for r in worker.replicas) != before:
            refuse(
                worker,
                f"load_state_dict() of the model between two steps. {worker.strategy!s} keeps copies of the "
                "parameters, and would move them back. Use worker.load(), or call worker.detach(), load on all ranks, "
                "and attach again",
            )


def keeps_copies(worker: WorkerState) -> bool:
    """Whether the strategy's state or messages in flight refer to the parameters as they were."""
    own_restarts = (Strategy.restart, Wrapper.restart)
    if all(type(each).restart in own_restarts for each in nested(worker.strategy)):
        return False
    for replica in worker.replicas:
        least = min((part.x.numel() for part in replica.tree()), default=1) / worker.comm.size
        copies = (x for x in replica.state.values() if x.is_floating_point() and x.numel() >= max(least, 1))
        if replica.inflight or any(True for _ in copies):
            return True
    return False


def _step_together(worker: WorkerState) -> bool:
    """Whether all ranks take each of their first steps, and at the same time."""
    comm = worker.comm
    return (
        worker.survives is None and not worker.strategy.traits.skips_steps and comm.in_step and comm.checks_first_steps
    )


def _start_again(worker: WorkerState, *, equal: bool) -> None:
    """Give the strategy the state of a start from the parameters of now."""
    with torch.no_grad(), worker.account.apart():
        for replica in worker.replicas:
            replica.equal_start = equal
            if worker.strategy.traits.sends_gradients:
                # Of the gradient that was just exchanged, its residuals for one, the state stays.
                worker.strategy.restart(replica)
            else:
                replica.wait_pending()
                replica.inflight.clear()
                replica.state.clear()
                worker.strategy.start(replica)


def _fingerprint(worker: WorkerState) -> int:
    """Of the trained and the frozen parameters."""
    worker.shards.read()
    frozen = [local(p.data) for p in worker.frozen]
    return fingerprint([*(r.x for r in worker.replicas), *(x for x in frozen if x.layout == torch.strided)])
