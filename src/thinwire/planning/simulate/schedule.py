# SPDX-License-Identifier: Apache-2.0
"""Virtual time: which worker runs next, and when.

Each simulated worker is a thread, of which one runs at a time: it has the baton, and hands it over only where it waits.
A waiting thread looks for the next event, so that there is no thread in the middle, and none to hand over to where the
next event is the waiter's own. Time passes only between events; equal times are in the order in which they were asked
for. Nothing here reads a real clock, so a run depends on its inputs alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from types import TracebackType

import torch

from thinwire.core.comm.runtime import Runtime
from thinwire.errors import CommError

_STACK_BYTES = 1 << 20  # of virtual memory, of which a thread uses a small part
_FEW_DEADLINES = 256


class DeadlockError(CommError):
    r"""No worker can continue, because each waits for another one; the message names the waits.

    Example:
        >>> import torch
        >>> from thinwire.planning import simulate
        >>> def work(comm):
        ...     if comm.rank == 0:
        ...         comm.send_recv(torch.ones(2), [], [1]).wait()
        ...     else:
        ...         comm.all_reduce_(torch.ones(2)).wait()
        >>> try:
        ...     simulate.run(2, work)
        ... except simulate.DeadlockError as error:
        ...     print(str(error).replace("; ", "\n"))
        after 0 s no worker can continue: rank 0, step 0, send_recv with ranks 1, waits for rank 1
        rank 1, step 0, all_reduce of 2 x float32, waits for rank 0
    """


class Stopped(BaseException):
    """Ends the thread of a worker that has died, or whose run is over; no worker's own code catches it."""


@dataclass(eq=False)
class Actor:
    """A thread of a simulated worker.

    Attributes:
        rank: the worker's.
        run: what it does.
        background: whether the run may end without it.
        baton: free while it runs; otherwise it waits for it.
        waits: how often it has waited, so that a deadline of an earlier wait is recognised.
        waiting_for: what it waits for now, in words; None while it runs.
        patient: whether nothing but another worker can end this wait.
        woken: whether the last wait ended before its deadline.
        queued: whether its wait is over, and it can continue.
        doomed: whether it is to end at its next wait.
        reason: of its next waits for a change, in words.
        until: when those end, where nothing but a change can end them earlier.
        over: whether it has ended.
    """

    rank: int
    run: Callable[[], None]
    background: bool = False
    baton: threading.Lock = field(default_factory=threading.Lock)
    started: bool = False
    waits: int = 0
    waiting_for: Callable[[], str] | None = None
    patient: bool = True
    woken: bool = False
    queued: bool = False
    doomed: bool = False
    over: bool = False
    reason: Callable[[], str] | None = None
    until: float | None = None


class Schedule:
    """The virtual clock, the events and the threads of one run.

    Attributes:
        now: virtual seconds since the start.
        current: the thread that runs; None while an event is handled.
        paused: of ranks that stand still, until when.
        may_time_out: whether waits time out if no worker can continue, as they do after a silent loss.
        before_event: called with the time of each event, for progress.

    Example:
        >>> from thinwire.planning.simulate.schedule import Schedule
        >>> times = Schedule()
        >>> def work(rank):
        ...     times.sleep(3.0 - rank)
        ...     print(rank, times.now)
        >>> times.start(0, lambda: work(0)), times.start(1, lambda: work(1))
        (None, None)
        >>> times.run()
        1 2.0
        0 3.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.current: Actor | None = None
        self.paused: dict[int, float] = {}
        self.may_time_out = False
        self.before_event: Callable[[float], None] | None = None
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._deadlines: list[tuple[float, int, Actor, int]] = []
        self._ready: deque[Actor] = deque()
        self._actors: list[Actor] = []
        self._unfinished = 0
        self._main = Actor(-1, lambda: None)
        self._error: BaseException | None = None

    # -- for the caller of a simulation --------------------------------------------------------------------------

    def start(self, rank: int, run: Callable[[], None], *, background: bool = False) -> None:
        """Add a thread that runs a function; the function must not raise anything but `Stopped`."""
        actor = Actor(rank, run, background)
        actor.baton.acquire()
        self._actors.append(actor)
        self._unfinished += not background
        self._queue(actor)

    def run(self) -> None:
        """Let all threads run to their end; those in the background end with the others.

        Raises:
            DeadlockError: no worker can continue.
        """
        self._main.baton.acquire()
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._hand_over(self._main)
        except KeyboardInterrupt as error:
            # The thread that has the baton keeps it until its next wait, and hands it to this thread then.
            self._fail(error)
            self._main.baton.acquire()
        finally:
            threading.stack_size(before)
        for actor in self._actors:
            self._end(actor)
        self._main.baton.release()
        if self._error is not None:
            raise self._error

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call a function at a time, not before now; it must not wait."""
        heappush(self._events, (max(time, self.now), next(self._numbers), call))

    def kill(self, rank: int) -> None:
        """End all threads of a worker: each at the wait in which it is."""
        for actor in self._actors:
            if actor.rank == rank and not actor.over:
                actor.doomed = True
                if actor is not self.current and not actor.queued:
                    self._queue(actor)

    # -- for the threads -----------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the thread that calls; nothing wakes it earlier."""
        actor = self._running()
        number = actor.waits + 1
        self.at(self.now + seconds, lambda: self.wake(actor, number))
        self.wait(lambda: f"the end of {seconds:g} s of its own")

    def wait(self, waiting_for: Callable[[], str], *, until: float = inf, patient: bool = True) -> bool:
        """Wait until `wake` is called for this thread; False if a virtual time came first.

        Args:
            waiting_for: what is waited for, in words.
            until: the time.
            patient: only another worker can end this wait, so it counts as stuck if no worker continues.
        """
        actor = self._running()
        self._check_doomed(actor)
        actor.waits += 1
        actor.waiting_for, actor.patient, actor.woken = waiting_for, patient, False
        if until < inf:
            heappush(self._deadlines, (until, next(self._numbers), actor, actor.waits))
            if len(self._deadlines) > _FEW_DEADLINES + 4 * len(self._actors):
                self._deadlines[:] = [each for each in self._deadlines if not _is_old(each)]
                heapify(self._deadlines)
        self._hand_over(actor)
        actor.waiting_for = None
        self._check_doomed(actor)
        return actor.woken

    def wake(self, actor: Actor, wait: int | None = None) -> None:
        """End the wait of a thread; does nothing if that wait, or any, is over."""
        if actor.waiting_for is None or actor.queued or (wait is not None and wait != actor.waits):
            return
        actor.woken = True
        self._queue(actor)

    def runtime(self, rank: int) -> Runtime:
        """Return the clock, locks, timers and threads of one worker."""

        def call_later(seconds: float, call: Callable[[], None]) -> None:
            # In a thread of its own, as it may take a lock that is held.
            self.at(self.now + seconds, lambda: self.start(rank, call, background=True))

        return Runtime(
            clock=lambda: self.now,
            condition=lambda: VirtualCondition(self),
            call_later=call_later,
            start_thread=lambda run: self.start(rank, run, background=True),
        )

    # -- the baton -----------------------------------------------------------------------------------------------

    def _running(self) -> Actor:
        if self.current is None:
            raise CommError("a handler of messages must not wait: other messages would wait for it")
        return self.current

    def _check_doomed(self, actor: Actor) -> None:
        if actor.doomed:
            raise Stopped

    def _hand_over(self, actor: Actor) -> None:
        """Let another thread run, and return when it is this one's turn again."""
        following = self._next()
        self.current = following
        if following is actor:
            return
        self._let_run(following)
        actor.baton.acquire()

    def _let_run(self, actor: Actor) -> None:
        if actor.started or actor is self._main:
            actor.baton.release()
            return
        actor.started = True
        threading.Thread(target=self._body, args=(actor,), daemon=True, name=f"thinwire-rank-{actor.rank}").start()

    def _body(self, actor: Actor) -> None:
        try:
            if not actor.doomed:
                # A backward pass on a GPU would wait for the other workers in the thread that runs theirs.
                with suppress(Stopped), torch.autograd.set_multithreading_enabled(False):
                    actor.run()
        except BaseException as error:  # a mistake of this package: the run must end, and say so
            self._fail(error)
        actor.over = True
        self._unfinished -= not actor.background
        following = self._next()
        self.current = following
        self._let_run(following)

    def _next(self) -> Actor:
        """Return the thread that runs next; the main one when the run is over."""
        try:
            while self._unfinished > 0 and self._error is None:
                while self._ready:
                    actor = self._ready.popleft()
                    if actor.over:
                        continue
                    until = self.paused.get(actor.rank, 0.0)
                    if until > self.now and not actor.doomed:
                        self.at(until, lambda actor=actor: self._ready.append(actor))
                        continue
                    actor.queued = False
                    return actor
                self.current = None
                self._next_event()
        except BaseException as error:
            self._fail(error)
        return self._main

    def _next_event(self) -> None:
        events, deadlines = self._events, self._deadlines
        while deadlines and not (events and events[0][0] <= deadlines[0][0]) and _is_old(deadlines[0]):
            heappop(deadlines)
        if events and not (deadlines and deadlines[0][0] < events[0][0]):
            self.now, _, call = heappop(events)
            if self.before_event is not None:
                self.before_event(self.now)
            call()
            return
        if not events:
            self._check_deadlock()
        self.now, _, actor, _ = heappop(deadlines)
        # `woken` stays False: the wait has ended by its deadline.
        self._queue(actor)

    def _queue(self, actor: Actor) -> None:
        actor.queued = True
        self._ready.append(actor)

    def _check_deadlock(self) -> None:
        """Raise if no event is due, and each worker waits for another one."""
        stuck = [actor for actor in self._actors if not actor.over and not actor.background]
        if self._deadlines and (self.may_time_out or not all(actor.patient for actor in stuck)):
            return
        waits = [f"{actor.waiting_for()}" for actor in stuck if actor.waiting_for is not None]
        more = f"; and {len(waits) - 8} more" if len(waits) > 8 else ""
        raise DeadlockError(f"after {self.now:g} s no worker can continue: {'; '.join(waits[:8])}{more}")

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _end(self, actor: Actor) -> None:
        """Let a thread that is still waiting unwind."""
        actor.doomed = True
        if actor.started and not actor.over:
            self._unfinished = 0  # the last thread hands the baton to the main thread
            self.current = actor
            actor.baton.release()
            self._main.baton.acquire()


def _is_old(deadline: tuple[float, int, Actor, int]) -> bool:
    actor, wait = deadline[2:]
    return actor.over or actor.queued or actor.waits != wait or actor.waiting_for is None


class VirtualCondition:
    """A lock with waits for changes, in virtual time; see `threading.Condition`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._owner: Actor | None = None
        self._depth = 0
        self._waiting: list[Actor] = []
        self._for_lock: deque[Actor | Callable[[], None]] = deque()

    def __enter__(self) -> bool:
        """Take the lock, and wait for it where another thread holds it."""
        me = self._schedule.current
        if self._owner is not None and self._owner is not me:
            if me is None:
                raise CommError("a handler of messages waits for a lock that a worker holds while it waits itself")
            while self._is_taken():
                self._for_lock.append(me)
                self._schedule.wait(lambda: "a lock that another of its threads holds")
        if me is not None:
            self._owner = me
            self._depth += 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        if self._schedule.current is None:
            return
        self._depth -= 1
        if not self._depth:
            self._release()

    def _is_taken(self) -> bool:
        return self._owner is not None

    def _release(self) -> None:
        self._owner = None
        while self._for_lock and self._owner is None:
            following = self._for_lock.popleft()
            if isinstance(following, Actor):
                self._schedule.wake(following)
            else:
                self._schedule.at(self._schedule.now, following)

    def when_free(self, call: Callable[[], None]) -> None:
        """Call a function, for an event, as soon as no thread holds the lock."""
        if self._owner is None:
            call()
        else:
            self._for_lock.append(lambda: self.when_free(call))

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until a change; False after so many seconds without one."""
        schedule, me, depth = self._schedule, self._schedule.current, self._depth
        if me is None:
            raise CommError("a handler of messages must not wait: other messages would wait for it")
        # Of a wait that nothing but a change can end, the polls are left out.
        patient = me.until is not None
        until = me.until if me.until is not None else inf if timeout is None else schedule.now + timeout
        self._depth = 0
        self._waiting.append(me)
        self._release()
        try:
            return schedule.wait(
                me.reason or (lambda: f"rank {me.rank} waits for a change"), until=until, patient=patient
            )
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            while self._is_taken() and not me.doomed:
                self._for_lock.append(me)
                schedule.wait(lambda: "a lock that another of its threads holds")
            self._owner, self._depth = me, depth

    def notify_all(self) -> None:
        """Let all that wait for a change look again."""
        waiting, self._waiting = self._waiting, []
        for actor in waiting:
            self._schedule.wake(actor)
