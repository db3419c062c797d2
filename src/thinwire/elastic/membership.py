# SPDX-License-Identifier: Apache-2.0
"""The protocol by which workers agree on views, over keys of one store.

    first/EPOCH/RANK    the id and process of an initial worker of view EPOCH, or a note that it withdrew
    view/EPOCH          a view; written once, by compare-and-set, so that every number has at most one view
    steps/EPOCH         for the run that started as view EPOCH: whether a step was taken, or never will be
    facts/EPOCH         the settings that it was started with
    kind/ID             what kind of run a worker expects, if not one that is elastic: "fixed" or "late"
    step/EPOCH          the number of the last round before the first step of a view with new workers
    next/EPOCH/ID       the progress of a member of view EPOCH - 1 that has finished that view or leaves, or a note
                        that it could not start: it is gone, though its process may run
    join/NUMBER         the id and process of a worker that asks to join, or a note that it withdrew; from 1, no gaps
    offer/NUMBER/K      the K-th part of a state that a member offers to that worker, while the others train
    group/ID            the number of the last request of a worker that is a group of ranks, or a note that it withdrew
    fails/EPOCH/ID      a note that messages of view EPOCH have failed on a rank of that group
    beat/ID             a counter that increases while the worker's process runs, and the worker's report
    epoch               a recent view number; a joining worker searches from there

All records but `beat` are signed (see `Records`). A record without a valid signature counts as absent.

If a peer is lost, each survivor closes its connections, so that its neighbors notice, and registers for the next
view. A worker that finds that every other member has registered or is gone proposes the view; the first proposal is
the view. A worker that is left out stops, like one that cannot reach the store, so there is never a second group.

A run starts as view 0, when all its initial workers have registered. Before the first step there are no rounds: a
loss ends the run on all of them. If all workers are gone, restarted workers start the run again, as the view after
the last one, unless a step was taken before. The first of these two facts that is written is valid.

A worker may be a group of ranks (see `Ranks`). The first rank writes its records, and the others follow it into each
view. The group has ended if the process of any of its ranks has.

The workers of a fixed run have no later views: a loss ends the run on all of them. Restarted workers start it again as
soon as one of the old ones is gone, and continue from a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from thinwire.core.comm.liveness import ROW_BYTES, Processes, State, own_row
from thinwire.core.comm.roll_call import Store, within
from thinwire.core.storage.bucket import BucketStore
from thinwire.core.view import Progress, View, is_worker, rows_in
from thinwire.elastic.records import Records, values_of
from thinwire.errors import CommError, CommTimeoutError, ConfigError, PeerLostError

T = TypeVar("T")
_STORE_SECONDS = 10.0
_SILENT_SECONDS, _SILENT_BEATS = 4.0, 8  # a worker on another machine is gone if its beat stops for this long
_GIVEN_UP_SECONDS, _GIVEN_UP_BEATS = 10.0, 20  # the limit if nothing else indicates a loss
_FIRST_BEAT_SECONDS = 0.5  # the longest interval until the run starts, as its workers wait for a second beat
_SHOWN_SECONDS = 1.0  # after which a store shows a view that others have read
_TRIES = 4  # attempts of a joining worker to connect to the others
_TAKEN, _NONE = "taken", "none"  # whether the run took a step
_WITHDRAWN = "withdrawn"  # replaces a progress, a request, or an initial worker
_KINDS = {
    "elastic": "any number of workers",
    "fixed": "a fixed number of workers",
    "late": "rounds that close without late workers",
}


class Membership:
    """One worker's side of the agreement on views.

    Args:
        store: a store that outlives every worker.
        worker: this worker's unique id.
        timeout: how long to wait for workers in an unknown state, in seconds.
        state: returns whether another worker runs, if the caller knows better than the process tables.
        beat_seconds: the interval of this worker's heartbeats and of its checks for join requests.
        poll_seconds: the interval between looks at the store while this worker waits for others.
        kind: of the run: "elastic"; "fixed", which ends with the loss of a worker; or "late", whose workers agree on no
            further view, so that a later one only registers itself by its request.
        connected: whether closed connections show the others that this worker has ended; otherwise `close` does.
        token: the secret of the run, which signs the workers' records.
        rank: this process's rank in the group of ranks that is this worker; None if the worker is one process.
        row: the location of the worker's processes; by default that of this process.

    Attributes:
        view: the current view; None before `enter`.
        last_request: the number of this worker's last request to join; 0 if it made none.
        row: the location of this worker's processes, as in `View.rows`.
        on_offer: called with each part of a state that this worker is offered while it waits to join.
        report: returns a text about this worker for `heartbeat`; called by the thread of heartbeats.
    """

    def __init__(
        self,
        store: Store | BucketStore,
        worker: str,
        *,
        timeout: float,
        state: Callable[[str], State] | None = None,
        beat_seconds: float = 0.5,
        poll_seconds: float = 0.01,
        kind: Literal["elastic", "fixed", "late"] = "elastic",
        connected: bool = True,
        token: bytes = b"",
        rank: int | None = None,
        row: str = "",
    ) -> None:
        self.worker = worker
        self.view: View | None = None
        self.timeout = timeout
        self.on_offer: Callable[[str], None] | None = None
        self.report: Callable[[], str] = str
        self._store = store
        self._records = Records(store, token)
        self.row = row or own_row().hex()
        self._follows = bool(rank)
        self._is_group = rank is not None
        self._part = "" if rank is None else f".{rank}"  # in the keys of what each rank of a group has by itself
        self._given_state = state
        self._beat_seconds, self.poll_seconds = beat_seconds, poll_seconds
        self._kind, self._connected = kind, connected
        self._fix = (
            "name it with THINWIRE_RUN"
            if connected
            else "delete this one with `thinwire bucket clean` or use another path, and load a checkpoint"
        )
        self._beats: dict[str, tuple[bytes, float, bool]] = {}  # the last one, since when, whether it is not the first
        self._place: tuple[str, list[str]] | None = None
        self._request_key = ""  # the key of a request that was not served yet
        self.last_request = 0
        self._known_views: dict[int, View] = {}
        self._stepped = False
        self._tries = 0
        self._requests = 0
        self._history: list[View] = []
        self._ended = threading.Event()
        self._store_is_lost = False
        self._in_brief = _InBrief()

    @property
    def current(self) -> View:
        """Return the current view, after `enter`."""
        assert self.view is not None, "enter() comes first"
        return self.view

    # -- entering --------------------------------------------------------------------------------------------------

    def enter(self, rank: int | None, size: int) -> View:
        """Start the run with `size` workers, or join it if it has started already.

        Args:
            rank: this worker's rank, if the run starts; None takes the first free one.
            size: the number of workers at the start of the run.

        Raises:
            CommTimeoutError: not all workers arrived, or the job did not accept this worker, within the timeout.
            PeerLostError: the run has ended, or the store cannot be reached.
            ConfigError: all workers of a fixed run are there already.
        """
        end = time.monotonic() + self.timeout
        try:
            if self._follows:
                return self._accept(self._follow(0))
            threading.Thread(target=self._beat, daemon=True, name="thinwire-beat").start()
            if self._kind != "elastic":
                self._write(f"kind/{self.worker}", self._kind)
            while True:
                last = self.newest()
                if last is None or self._restarts(last):
                    last = self._begin(0 if last is None else last.epoch + 1, rank, size)
                    if last.rank(self.worker) is not None:
                        return self._accept(last)
                elif self._kind == "fixed" and time.monotonic() > end:
                    raise ConfigError(
                        f"this run has {last.size} workers already, and all of them run. Increase the number of "
                        "workers on all machines, leave it out to let workers join later, or use another path"
                    )
                self._check_kind(last.members[:1])  # all of them have checked each other
                if self._kind == "fixed":
                    time.sleep(self.poll_seconds)
                    continue
                # The run has started; if that was just now, another worker had this one's rank.
                if self._kind == "late":
                    self.request()
                    return self._accept(last)  # the only one
                try:
                    return self._join()
                except RunEndedError:
                    if not self._restarts(self.newest() or last):
                        raise
        except BaseException:
            self.withdraw()
            raise

    def _begin(self, epoch: int, rank: int | None, size: int) -> View:
        """Wait until all initial workers have registered; return the first view, with or without this one."""
        keys, own = [f"first/{epoch}/{each}" for each in range(size)], [self.worker, self.row]
        end, absent = time.monotonic() + self.timeout, list(range(size))
        while self._view(epoch) is None:
            self._take_place(keys if rank is None else [keys[rank]], own)
            places = self.read_each(keys)
            if None not in places:
                absent = self._absent(places)
                if not absent:
                    rows: dict[str, str] = dict(places)
                    self._check_kind(rows)
                    # Counted after the workers: one may have asked to join before it found that all are gone.
                    asked = self.requests(now=True)
                    self._propose(View(epoch, tuple(rows), rows=rows, requests=asked, begins=epoch))
                    break
            if time.monotonic() > end:
                missing = [rank for rank, place in enumerate(self.read_each(keys)) if not is_worker(place)] or absent
                who = "this worker" if rank is None else f"rank {rank}"
                raise CommTimeoutError(
                    f"{who}: rank {', '.join(map(str, missing))} of {size} initial workers did not arrive in "
                    f"{self.timeout:g} s"
                )
            time.sleep(self.poll_seconds)
        return self._view_of(epoch)

    def _check_kind(self, workers: Iterable[str]) -> None:
        """Check that these workers expect a run of the same kind as this one.

        Raises:
            ConfigError: one of them does not; without this check, each would train alone.
        """
        for kind in self.read_each([f"kind/{each}" for each in workers]):
            if (kind := kind or "elastic") != self._kind:
                raise ConfigError(
                    f"worker {self.worker} was started for {_KINDS[self._kind]}, and another worker of this run for "
                    f"{_KINDS.get(kind, kind)}. Set THINWIRE_WORKERS on all machines or on none, give all workers the "
                    "same value of elastic, or use another path"
                )

    def _take_place(self, keys: list[str], own: list[str]) -> None:
        """Become the worker of the first rank of these that no other running worker has."""
        if self._place is not None and self._place[0] in keys and self.read(self._place[0]) == own:
            return
        for key in keys:
            found = self.propose(key, own)
            if found != own and (not is_worker(found) or self.state_of(found[0], found[1]) is State.ENDED):
                found = self.propose(key, own, instead_of=found)
            if found == own or len(keys) == 1:
                self._place = key, own
                return

    def _absent(self, places: Sequence[Any]) -> list[int]:
        """Return the ranks whose workers have withdrawn, or are not known to run."""
        states = self.states_of({place[0]: place[1] for place in places if is_worker(place)})
        # A remote worker must show a second heartbeat, since a killed worker leaves its record and its last one.
        running = {
            worker
            for worker, state in states.items()
            if state in (State.RUNNING, State.STOPPED) or (state is State.UNKNOWN and self._beats[worker][2])
        }
        return [rank for rank, place in enumerate(places) if not (is_worker(place) and place[0] in running)]

    def _restarts(self, last: View) -> bool:
        """Return True if the run restarts as the next view: all workers are gone, and none has taken a step.

        In a fixed run, if any of them is gone.
        """
        if self._kind == "fixed":
            return bool(self.gone(last.members, last))
        key = f"steps/{last.begins}"
        found = self.read(key)
        if found is None and self._all_gone(last):
            found = self.propose(key, _NONE)
        return found == _NONE

    def gone(self, workers: Collection[str], view: View) -> set[str]:
        """Return those of the workers of a view that have ended, or have left the run."""
        return self.ended({each: view.rows[each] for each in workers}, view.epoch, self._given_up_seconds)

    def _all_gone(self, view: View) -> bool:
        # One after the other: the first one that runs is usually the first that is asked for.
        return all(self.gone([each], view) for each in view.members)

    def ended(self, rows: Mapping[str, str], epoch: int, silent: float | None = None) -> set[str]:
        """Return the workers whose processes have ended or are silent, or that have left the view of this number.

        Args:
            rows: the locations of their processes, by their ids.
            epoch: the number of the view.
            silent: after how many seconds without a heartbeat a remote worker has ended.
        """
        states = self.states_of(rows, silent)
        notes = self.read_each([f"next/{epoch + 1}/{each}" for each in rows])
        return {
            each for each, note in zip(rows, notes, strict=True) if states[each] is State.ENDED or note == _WITHDRAWN
        }

    def take_step(self) -> None:
        """Record that a step counts: after any worker's first step, the run cannot restart.

        Raises:
            PeerLostError: the run has restarted without this worker, or the store cannot be reached.
        """
        key = f"steps/{self.current.begins}"
        if not self._stepped and self.propose(key, _TAKEN) != _TAKEN:
            raise PeerLostError(
                f"worker {self.worker}: it was considered lost before the first step, and the others have restarted "
                "the run. Start it again to let it join"
            )
        self._stepped = True

    def withdraw(self) -> None:
        """Withdraw because this worker could not start; others do not wait for it, though its process may run."""
        if self.has_left:
            return
        with suppress(StoreLostError), self._in_brief:
            if self._is_group and not self._follows:
                self._write(f"group/{self.worker}", _WITHDRAWN)
            if self._place is not None:
                key, own = self._place
                self.propose(key, _WITHDRAWN, instead_of=own)
            if self._request_key:
                self._write(self._request_key, _WITHDRAWN)
            if self._place is not None or self._request_key or self.view is not None:  # others know this worker
                last = self.newest()
                newest = -1 if last is None else last.epoch
                first = newest if self.view is None else self.view.epoch
                # Withdraw from the next views too: others that have just read this worker's record or request may be
                # about to agree on one that contains it. No worker checks that record in a view without it.
                for epoch in range(first + 1, newest + 4):
                    self._write(f"next/{epoch}/{self.worker}", _WITHDRAWN)
        self.close()

    def _join(self, epoch: int = 0) -> View:
        """Wait until the others accept this worker.

        Args:
            epoch: the first view that counts; this worker may have been in earlier ones.
        """
        number, part = self.request(), 0
        epoch, end = max(epoch, self._hint()), time.monotonic() + self.timeout
        last: View | None = None
        while True:
            while (view := self._view(epoch)) is not None:
                epoch += 1
                if view.rank(self.worker) is not None:
                    return self._accept(view)
                if view.requests >= number:
                    # The others were gone before this worker registered its name.
                    number, part = self.request(), 0
                last = view
            if self._view(epoch + 1) is not None and self._view(epoch) is None:
                epoch += 1  # another program has overwritten a view in between
                continue
            if self._takes_offer(number, part):
                part, end = part + 1, time.monotonic() + self.timeout
            if last is not None and self._all_gone(last):
                raise RunEndedError(
                    f"the run in this store has ended: all workers of its last view, {last.epoch}, are gone. To start "
                    f"a new run, {self._fix}"
                )
            if time.monotonic() > end:
                raise CommTimeoutError(
                    f"the run in this store did not accept this worker within {self.timeout:g} s: it has ended, or "
                    f"its steps take longer. To start a new run, {self._fix}"
                )
            time.sleep(self.poll_seconds)

    def _takes_offer(self, number: int, part: int) -> bool:
        """Receive a part of a state if it is offered to this worker, whose request has this number."""
        if self.on_offer is None or (offered := self.read(self._offer_key(number, part))) is None:
            return False
        self.on_offer(offered)
        return True

    def _offer_key(self, number: int, part: int) -> str:
        return f"offer/{number}{self._part}/{part}"

    def _follow(self, epoch: int, *, ready: bool = False) -> View:
        """Wait until the first rank of this group has entered a view.

        Args:
            epoch: the first view that counts.
            ready: whether this group has a state. Then it is not offered one, and must be in that view.
        """
        number, part = 0, 0
        while True:
            # The first rank gives up in time, and the kernel reports its end.
            end = time.monotonic() + 3 * self.timeout
            while (view := self._view(epoch)) is None:
                asked = self.read(f"group/{self.worker}")
                if asked == _WITHDRAWN or self.has_lost_rank() or time.monotonic() > end:
                    raise PeerLostError(
                        f"worker {self.worker}: another rank of this group has ended, or has not entered the run "
                        f"within {3 * self.timeout:g} s. See its error, and start all ranks of the group again"
                    )
                if isinstance(asked, int) and asked != number:
                    number, part = asked, 0
                if number and not ready and self._takes_offer(number, part):
                    part, end = part + 1, time.monotonic() + 3 * self.timeout
                time.sleep(self.poll_seconds)
            epoch += 1
            if ready or view.rank(self.worker) is not None:
                return view

    def wait_for_step(self) -> int:
        """Wait for the next step of an earlier member of the run; return the number of its last round.

        Raises:
            PeerLostError: this view ended earlier.
        """
        epoch = self.current.epoch
        while not isinstance(number := self.read(f"step/{epoch}"), int):
            if self.given_up():
                raise PeerLostError(f"worker {self.worker}: view {epoch} ended before its first step")
            time.sleep(self.poll_seconds)
        return number

    def announce_step(self, last_round: int) -> None:
        """Let the workers that joined in this view start with this worker's next step.

        Args:
            last_round: the number of the last round, the same on all earlier members of the run.
        """
        self._write(f"step/{self.current.epoch}", last_round)

    def give_up_view(self) -> None:
        """Report to the others that this worker takes no further step."""
        with suppress(StoreLostError), self._in_brief:
            self.propose(f"next/{self.current.epoch + 1}/{self.worker}", _WITHDRAWN)

    def request(self) -> int:
        """Ask to join; return the number of the request."""
        number, own = max(self._requests, self.last_request) + 1, [self.worker, self.row]
        while self.propose(f"join/{number}", own) != own:
            number += 1
        self._request_key, self.last_request = f"join/{number}", number
        if self._is_group:
            self._write(f"group/{self.worker}", number)
        return number

    def requested(self, number: int) -> tuple[str, str] | None:
        """Return id and process of the worker of a request to join; None if there is none yet, or it was withdrawn."""
        asks = self.read(f"join/{number}")
        return (asks[0], asks[1]) if is_worker(asks) else None

    def asked(self, upto: int) -> dict[int, tuple[str, str]]:
        """Return id and process of the workers that asked to join since the last view, by request number."""
        numbers = range(self.current.requests + 1, upto + 1)
        asks = self.read_each([f"join/{number}" for number in numbers])
        found = {number: (each[0], each[1]) for number, each in zip(numbers, asks, strict=True) if is_worker(each)}
        states = self.states_of(dict(found.values()))
        return {number: each for number, each in found.items() if states[each[0]] is not State.ENDED}

    def offer(self, number: int, what: dict[str, str | int]) -> None:
        """Offer a part of a state to the worker of a request."""
        part = 0
        while self.propose(self._offer_key(number, part), what) != what:
            part += 1  # this one is of a donor that was lost since

    # -- a change of view ------------------------------------------------------------------------------------------

    def change(
        self,
        progress: Progress,
        *,
        requests: int | None = None,
        donor: str = "",
        problem: str = "",
    ) -> View:
        """Agree on the next view with all other survivors.

        A worker that has joined and has no state yet is not part of the view: the others may be in the middle of a
        round, in which no worker can enter. It asks again, and enters at the end of a round.

        Args:
            progress: the progress of this worker.
            requests: the number up to which workers that asked to join are accepted; None accepts none.
            donor: the worker that has sent its state to those that asked.
            problem: the problem in the view that ends, in words.

        Raises:
            PeerLostError: the others continue without this worker, or the store cannot be reached.
            CommTimeoutError: this worker has no state yet, and was not accepted again within the timeout; or it was
                accepted several times and did not connect.
        """
        before = self.current
        epoch = before.epoch + 1
        if self._follows:
            view = self._follow(epoch, ready=progress.ready)
        else:
            self.register(progress)
            view = self._agree(before, requests, donor)
        if view.rank(self.worker) is not None:
            return self._accept(view)
        if progress.ready:
            raise PeerLostError(
                f"worker {self.worker}: the others continue as view {epoch} without this worker, which did not answer "
                "in time. Start it again to let it join"
            )
        self._count_try(before, view, problem)
        return self._join(epoch)

    def _agree(self, before: View, requests: int | None, donor: str) -> View:
        """Propose the next view, unless another worker does, as soon as all others have registered for it or are gone.

        Raises:
            RunEndedError: no worker with a state has registered within the timeout.
        """
        epoch, end = before.epoch + 1, time.monotonic() + self.timeout
        while self._view(epoch) is None:
            here = self._registered(before.members, epoch)
            away = self.states_of({each: before.rows[each] for each in before.members if each not in here})
            if all(state is State.ENDED for state in away.values()) or time.monotonic() > end:
                # It may have registered and ended since the last check.
                proposal = self._proposal(before, self._registered(before.members, epoch), requests, donor)
                if not proposal.progress:  # the workers with a state are in the middle of a round, or gone
                    raise RunEndedError(
                        f"worker {self.worker} has no state yet, and no worker with a state has answered within "
                        f"{self.timeout:g} s. Start it again"
                    )
                self._propose(proposal)
                break
            time.sleep(self.poll_seconds)
        return self._view_of(epoch)

    def _count_try(self, taken_in: View, left_out: View, problem: str) -> None:
        """Stop asking to join after a few views that accepted this worker and failed to connect.

        A view in which a worker with a state was lost or left does not count, since it does not show a fault of this
        one.
        """
        if left_out.left or any(each in taken_in.ready for each in left_out.lost):
            return
        self._tries += 1
        if self._tries == _TRIES:
            raise CommTimeoutError(
                f"worker {self.worker}: it was accepted {_TRIES} times, and never connected to all others. It reaches "
                "the store, but not every worker, or one does not reach it. Open all ports between workers in "
                "firewalls, and set GLOO_SOCKET_IFNAME to the network interface that they share. Use a longer timeout "
                f"if the state takes longer to arrive. Then start this worker again ({problem})"
            )

    def register(self, progress: Progress) -> None:
        """Register for the next view, or announce that it does not contain this worker, without waiting.

        Args:
            progress: the progress of this worker, with the reason if it leaves.

        Raises:
            PeerLostError: the store cannot be reached.
        """
        if not self._follows:
            self._write(f"next/{self.current.epoch + 1}/{self.worker}", asdict(progress))

    def _proposal(self, before: View, told: Mapping[str, Any], requests: int | None, donor: str) -> View:
        progress = {each: Progress.read(found) for each, found in told.items() if isinstance(found, dict)}
        joined = dict(self.asked(requests or 0).values())
        left = {each: found.left for each, found in progress.items() if found.left}
        progress = {each: found for each, found in progress.items() if found.ready and not found.left}
        rows = {each: before.rows[each] for each in progress} | joined
        return View(
            before.epoch + 1,
            tuple(rows),
            joined=tuple(joined),
            lost=tuple(each for each in before.members if each not in progress and each not in left),
            left=left,
            progress=progress,
            rows=rows,
            requests=max(before.requests, requests or 0),
            donor=donor,
            begins=before.begins,
        )

    def _registered(self, workers: Sequence[str], epoch: int) -> dict[str, Any]:
        """Return what those of the workers have written that have finished the view before this one."""
        notes = self.read_each([f"next/{epoch}/{each}" for each in workers])
        return {each: note for each, note in zip(workers, notes, strict=True) if note is not None}

    def history(self) -> list[View]:
        """Return all views of the run so far, from its first to the current one."""
        while (epoch := self.current.begins + len(self._history)) <= self.current.epoch:
            self._history.append(self._view_of(epoch))
        return self._history

    def requests(self, *, now: bool = False) -> int:
        """Return the number of join requests so far, at most half a second old unless `now`."""
        if now:
            self._do(self._count_requests)
        return self._requests

    def _count_requests(self) -> None:
        # No counter is used, since a stray write could set it to any number.
        number = self._requests
        while self._records.read(f"join/{number + 1}") is not None:
            number += 1
        self._requests = max(number, self._requests)

    def facts(self, own: str) -> str:
        """Return the settings of the run as its first worker recorded them; `own` if this is the first."""
        return str(self.propose(f"facts/{self.current.begins}{self._part}", own))

    # -- who runs --------------------------------------------------------------------------------------------------

    def given_up(self) -> bool:
        """Return True if this view has ended or cannot connect: a member is gone or registered for the next."""
        view = self.current
        others = {each: row for each, row in view.rows.items() if each != self.worker}
        if self._store_is_lost:
            return any(self._state_by_process(*each) is State.ENDED for each in others.items())
        try:
            with self._in_brief:
                if self._is_group and (self.has_lost_rank() or self.read(self._failure_key()) is not None):
                    return True
                states = self.states_of(others, self._given_up_seconds)
                return State.ENDED in states.values() or bool(self._registered(list(others), view.epoch + 1))
        except StoreLostError:
            self._store_is_lost = self._connected  # ends the run at the next change of view, not earlier
            return False

    def has_lost_rank(self) -> bool:
        """Return True if the process of another rank of this worker's group is known to have ended."""
        return self._is_group and self._state_by_process(self.worker, self.row) is State.ENDED

    def report_failure(self) -> None:
        """Let the other ranks of this worker's group know that messages in this view have failed."""
        self._write(self._failure_key(), True)

    def _failure_key(self) -> str:
        return f"fails/{self.current.epoch}/{self.worker}"

    @property
    def _given_up_seconds(self) -> float:
        return max(_GIVEN_UP_SECONDS, _GIVEN_UP_BEATS * self._beat_seconds)

    def state_of(self, worker: str, row: str) -> State:
        """Return the state of a worker's process."""
        return self.states_of({worker: row})[worker]

    def states_of(self, rows: Mapping[str, str], silent: float | None = None) -> dict[str, State]:
        """Return the states of processes; a remote one has ended if its heartbeat stops for `silent` seconds."""
        silent = max(_SILENT_SECONDS, _SILENT_BEATS * self._beat_seconds) if silent is None else silent
        found = {
            each: State.RUNNING if each == self.worker else self._state_by_process(each, row)
            for each, row in rows.items()
        }
        remote = [each for each, state in found.items() if state is State.UNKNOWN]
        for each, (silence, _) in zip(remote, self.heartbeats(remote), strict=True):
            if silence > silent:
                found[each] = State.ENDED
        return found

    def _state_by_process(self, worker: str, row: str) -> State:
        if self._given_state is not None:
            return self._given_state(worker)
        rows = [bytes.fromhex(each) for each in rows_in(row)]
        processes = Processes([bytes(ROW_BYTES), *rows], 0)
        states = {processes.state(rank) for rank in range(1, len(rows) + 1)}
        order = (State.ENDED, State.UNKNOWN, State.STOPPED, State.RUNNING)
        return next((each for each in order if each in states), State.UNKNOWN)

    def heartbeats(self, workers: Collection[str]) -> list[tuple[float, str]]:
        """Return for how many seconds the heartbeat of each worker has not changed; its counter and report follow."""
        now, found = time.monotonic(), list[tuple[float, str]]()
        beats = self._do(lambda: values_of(self._store, [f"beat/{each}" for each in workers])) if workers else []
        seen = time.monotonic()  # this process may be stopped while it reads
        for worker, beat in zip(workers, beats, strict=True):
            known = self._beats.get(worker)
            if known is None or known[0] != beat:
                self._beats[worker] = known = (beat, seen, known is not None)
            found.append((max(0.0, now - known[1]), beat.decode(errors="replace")))
        return found

    def _beat(self) -> None:
        """Send heartbeats of this process, and check for join requests."""
        beat = 0
        first = min(self._beat_seconds, _FIRST_BEAT_SECONDS)
        while not self._ended.wait((first if self.view is None else self._beat_seconds) if beat else 0.0):
            beat += 1
            # The store may be gone, or a record damaged; the training thread notices and stops.
            with suppress(RuntimeError, OSError, CommError):
                self._store.set(f"beat/{self.worker}", f"{beat} {self.report()}".rstrip())
                if self._kind != "fixed":
                    self._count_requests()

    @property
    def has_left(self) -> bool:
        """Return True if this worker has left."""
        return self._ended.is_set()

    def are_gone(self, ranks: Collection[int]) -> bool:
        """Return True if one of these ranks of the view has ended."""
        view = self.current
        with suppress(StoreLostError), self._in_brief:  # the call that waits for them fails at its timeout
            return bool(self.gone([view.members[rank] for rank in ranks], view))
        return False

    def close(self) -> None:
        """Stop the heartbeat thread."""
        if (self._kind == "late" or not self._connected) and self.view is not None and not self.has_left:
            self.give_up_view()
        self._ended.set()

    # -- the store -------------------------------------------------------------------------------------------------

    def _accept(self, view: View) -> View:
        if self.view is None or self.view.begins != view.begins:
            self._history = []
        self.view, self._request_key = view, ""
        self._beats.clear()
        self._known_views[view.epoch] = view
        return self.view

    def _propose(self, view: View) -> View:
        """Store a view unless its number is taken; return the stored one."""
        found = View.read(self.propose(f"view/{view.epoch}", view.content()))
        self._do(lambda: self._records.hint("epoch", view.epoch))
        return found

    def _view(self, epoch: int) -> View | None:
        """Return the view with a number; None if it does not exist yet."""
        found = self.read(f"view/{epoch}")
        return None if found is None else View.read(found)

    def has_view(self, epoch: int) -> bool:
        """Return True if the view with this number exists."""
        return self._view(epoch) is not None

    def _view_of(self, epoch: int) -> View:
        """Return a view that has been agreed on.

        Raises:
            CommError: another program has overwritten it.
        """
        view, end = self._view(epoch), time.monotonic() + _SHOWN_SECONDS
        if view is None and (view := self._known_views.get(epoch)) is not None:
            self._write(f"view/{epoch}", view.content())
        while view is None and time.monotonic() < end:
            time.sleep(self.poll_seconds)
            view = self._view(epoch)
        if view is None:
            raise CommError(
                f"view {epoch} of this run cannot be read any more: another program has overwritten it. Use a separate "
                "store"
            )
        return view

    def newest(self) -> View | None:
        """Return the last view; None before the run has started."""
        epoch = self._hint()
        while epoch and self._view(epoch) is None:
            epoch -= 1
        last = None
        while (view := self._view(epoch)) is not None:
            last, epoch = view, epoch + 1
        return last

    def _hint(self) -> int:
        found = self.read("epoch")
        return found if isinstance(found, int) else 0

    def read(self, key: str) -> Any:
        """Return a signed record of the run; None if it does not exist."""
        return self.read_each([key])[0]

    def read_each(self, keys: Sequence[str]) -> list[Any]:
        """Return signed records of the run; None for each that does not exist."""
        return self._do(lambda: self._records.read_each(keys)) if keys else []

    def propose(self, key: str, value: object, *, instead_of: object = None) -> Any:
        """Write a signed record of the run if it does not exist, or is `instead_of`; return the resulting one."""
        return self._do(lambda: self._records.propose(key, value, instead_of=instead_of))

    def _write(self, key: str, value: object) -> None:
        self._do(lambda: self._records.write(key, value))

    def _do(self, call: Callable[[], T]) -> T:
        """Return the store's answer; a bucket may be out of reach for a while, up to the timeout.

        Raises:
            PeerLostError: the store is gone, or does not answer.
        """
        end = time.monotonic() + (0.0 if self._connected or self._in_brief.calls else self.timeout)
        while True:
            begin = time.monotonic()  # this process may be stopped in a call
            try:
                return within(_STORE_SECONDS, call)
            except CommError:
                raise
            except TimeoutError:
                problem = f"no answer within {_STORE_SECONDS:g} s"
            except (RuntimeError, OSError) as error:
                problem = str(error).partition("\n")[0][:200]
            if begin >= end:
                break
            time.sleep(self.poll_seconds)
        raise StoreLostError(
            f"worker {self.worker}: the store of the worker list cannot be reached ({problem}). This "
            "worker stops, since the others may continue without it"
        )


class _InBrief(threading.local, AbstractContextManager[None]):
    """Let the calls of this thread to a bucket fail at once while it is out of reach; a context."""

    calls = 0

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        self.calls -= 1


class RunEndedError(PeerLostError):
    """No worker is left to join."""


class StoreLostError(PeerLostError):
    """The store that holds the views cannot be reached."""
