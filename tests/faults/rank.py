# SPDX-License-Identifier: Apache-2.0
"""One rank of a run in which something goes wrong: a user's loop with traps in it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

from torch import Tensor, nn

import thinwire
from tests.battery.runs import BUCKET_BYTES
from tests.faults.drawn import LOOK, Fault, Phase
from tests.problems import flat
from thinwire import Comm, GroupComm, ThinwireError, ThreadComm, Worker
from thinwire.worker.worker import internals_of


class CaughtError(Exception):
    """What a loop catches, such as a batch that does not fit into memory."""


class UncaughtError(Exception):
    """What ends a loop."""


@dataclass
class Ending:
    """How a rank's run ended.

    Attributes:
        kind: "done", or the class of the error.
        text: of the error.
        step: of the worker.
        model: the parameters at the end.
        agreed: the consensus.
        sent: bytes.
    """

    kind: str
    text: str = ""
    step: int = -1
    model: tuple[float, ...] = ()
    agreed: tuple[float, ...] = ()
    sent: float = 0.0


class Trap:
    """Waits for its moment on one rank, and strikes once.

    Args:
        fault: when, and what.
        rank: this one.
    """

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault = fault
        self._armed = rank in fault.victims and fault.kind not in ("left out", "nan")
        self._phase: Phase | None = None
        self._step = 0
        self._calls = 0

    @contextmanager
    def during(self, phase: Phase, step: int) -> Generator[None]:
        """A phase of the run; a trap whose call did not come in it strikes at its end."""
        self.enter(phase, step)
        yield
        self.leave()

    def enter(self, phase: Phase, step: int) -> None:
        """A phase begins."""
        self._phase, self._step, self._calls = phase, step, 0

    def leave(self) -> None:
        """It ends."""
        if self._is_due():
            self._strike()
        self._phase = None

    def called(self) -> None:
        """The rank is about to start a message."""
        # An exception between two calls of the library would be the library's own.
        if self._is_due() and self._calls == self._fault.call and self._fault.kind in ("kill", "stop"):
            self._strike()
        self._calls += 1

    def reached(self, phase: Phase) -> None:
        """The rank is in the middle of a phase, in the user's own code."""
        if self._phase == phase and self._is_due() and self._fault.kind not in ("kill", "stop"):
            self._strike()

    def _is_due(self) -> bool:
        return self._armed and self._phase == self._fault.phase and self._step == self._fault.step

    def _strike(self) -> None:
        self._armed, kind = False, self._fault.kind
        if kind in ("skipped batch", "repeated batch"):
            raise CaughtError
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP) if self._fault.processes else time.sleep(1.5 * self._fault.timeout)
        elif kind == "kill" and self._fault.processes:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise UncaughtError


def take_part(fault: Fault, comm: Comm | None, rank: int, folder: str) -> Ending:
    """Attach, train, look, save, and look again; the fault strikes on its victims."""
    trap, setting = Trap(fault, rank), fault.setting
    for kind in (GroupComm, ThreadComm):
        if isinstance(comm, kind):
            _count_calls(comm, trap)
    with trap.during("start", fault.step):
        model = setting.problem.model()
        optimizer = setting.make_optimizer(model)
    optimizer.register_step_pre_hook(lambda *_: trap.reached("before step"))
    _reach_in_the_middle(model, trap)
    if comm is None:
        _count_calls_of_groups(trap)
    with trap.during("attach", fault.step):
        strategy = setting.case.strategy
        worker = thinwire.attach(
            model, optimizer, strategy, comm=comm, bucket_bytes=BUCKET_BYTES, timeout=fault.timeout
        )
    _mark_phases(worker, trap)
    _train(worker, fault, trap, folder)
    with trap.during("end", fault.step), worker.consensus() as agreed:
        final = flat(agreed)
        trap.reached("end")
    worker.detach()
    return Ending("done", "", worker.step, _numbers(model), tuple(final.tolist()), worker.comm.meter.payload_bytes)


def _train(worker: Worker, fault: Fault, trap: Trap, folder: str) -> None:
    """The user's loop: over batches, or up to a step where late workers leave some out."""
    place, looked = 0, False
    left_out = {fault.step} if fault.kind == "left out" and worker.comm.rank in fault.victims else set[int]()
    while (worker.step if fault.case.strategy.traits.skips_steps else place) < fault.setting.steps:
        step = worker.step if fault.case.strategy.traits.skips_steps else place
        if step >= LOOK and not looked:
            looked = True
            with trap.during("consensus", LOOK), worker.consensus():
                trap.reached("consensus")
            with trap.during("save", LOOK):
                worker.save(folder)
        place += 1
        if step in left_out:
            left_out.clear()
            continue
        try:
            _one_step(worker, fault, trap, step)
        except CaughtError:
            worker.optimizer.zero_grad()
            place -= fault.kind == "repeated batch"
        if fault.case.lockstep:
            internals_of(worker).wait_pending()


def _one_step(worker: Worker, fault: Fault, trap: Trap, step: int) -> None:
    setting, optimizer = fault.setting, worker.optimizer
    for group in optimizer.param_groups:
        group["lr"] = setting.plain_rates[step]
    optimizer.zero_grad()
    with trap.during("forward", step):
        loss = setting.loss(worker.model, worker.comm.rank, step)
        if fault.kind == "nan" and worker.comm.rank in fault.victims and step == fault.step:
            loss = loss * nan
    with trap.during("backward", step):
        loss.backward()
    worker.record_batch(loss=loss.detach())
    trap.enter("before step", step)  # which the hooks end
    optimizer.step()


def _mark_phases(worker: Worker, trap: Trap) -> None:
    """End the phase before the optimizer's step where the step begins, and begin and end the one after it."""
    optimizer = worker.optimizer

    def between(*_: Any) -> None:
        step = trap._step  # pyright: ignore[reportPrivateUsage]
        trap.leave()
        trap.enter("after step", step)

    def after(*_: Any) -> None:
        trap.reached("after step")
        trap.leave()

    # Hooks run in the order in which they are registered: after the worker's.
    optimizer.register_step_pre_hook(between)
    optimizer.register_step_post_hook(after)


def _reach_in_the_middle(model: nn.Module, trap: Trap) -> None:
    """An error of the user's own code in the middle of the backward pass, when some gradients are there already."""

    def strike(gradient: Tensor) -> Tensor:
        trap.reached("backward")
        return gradient

    list(model.parameters())[1].register_hook(strike)


def _count_calls(comm: Comm, trap: Trap) -> None:
    """Let the trap know of every message that this rank starts."""
    for name in ("_start", "_join", "_send_recv"):
        if hasattr(comm, name):
            setattr(comm, name, _counted(getattr(comm, name), trap))


def _count_calls_of_groups(trap: Trap) -> None:
    """The same in a process that has no comm yet."""
    start: Callable[..., Any] = GroupComm._start  # pyright: ignore[reportPrivateUsage]

    def counted(comm: GroupComm, *given: Any) -> Any:
        trap.called()
        return start(comm, *given)

    GroupComm._start = counted  # type: ignore[method-assign]


def _counted(call: Callable[..., Any], trap: Trap) -> Callable[..., Any]:
    def counted(*given: Any) -> Any:
        trap.called()
        return call(*given)

    return counted


def _numbers(model: nn.Module) -> tuple[float, ...]:
    return tuple(flat(model).tolist())


def ended(
    fault: Fault, comm: Comm | None, rank: int, folder: str, failed: Callable[[BaseException], None] = lambda _: None
) -> Ending:
    """The ending of a rank's run, its error included.

    Args:
        fault: what goes wrong.
        comm: of threads; processes make theirs.
        rank: this one.
        folder: for checkpoints.
        failed: is told the error.
    """
    try:
        return take_part(fault, comm, rank, folder)
    except Exception as error:
        failed(error)
        if fault.processes and isinstance(error, UncaughtError):
            raise
        known = isinstance(error, ThinwireError | UncaughtError)
        return Ending(type(error).__name__, str(error) if known else traceback.format_exc())
