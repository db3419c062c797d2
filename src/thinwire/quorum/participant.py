"""One rank's side of arrivals: it comes, adds up with the other members, or takes their state when it came too late."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from weakref import proxy

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work
from thinwire.errors import CommTimeoutError, MismatchError
from thinwire.quorum.adding import HEADER_BYTES, Adding, Cut, Piece, piece_of
from thinwire.quorum.control_messages import Kind, Note, length, note_of
from thinwire.quorum.coordinator import Keeper
from thinwire.quorum.endpoint import Office
from thinwire.quorum.packing import digest, pack, unpack_
from thinwire.quorum.reduction_selector import Planes
from thinwire.quorum.round import Round
from thinwire.quorum.rules import Rule
from thinwire.quorum.state_transfer import Given, cut_up
from thinwire.quorum.sums import Ended, Sums, looking
from thinwire.quorum.weak_callback import weak
from thinwire.replica.point_to_point import open_mailbox
from thinwire.replica.replica import Replica

_NOTE, _PIECE, _STATE = 1, 2, 3
_CAPACITY = 64
_LOOK_SECONDS = 0.05
_LEAST_LOOK_SECONDS = 0.001
_USUAL_EXCHANGES = 3
_ALONE = 4
_REMEMBERED = 16
_FIRST_PATIENCE_SECONDS = 2.0
_LEAST_STATE_BYTES = 4096


class Party:
    """What one rank does among those who arrive.

    Its thread waits in `come`, `catch_up` and `stand_still`; messages are read in whatever thread they come in, under
    the mailbox's lock.

    Args:
        r: the replica.
        rule: how long to wait for whom.
        planes: by which way members add up.
        aside: for all-reduces, connections that nobody else uses; None where there are only messages.
        keeper: the rank that decides.
        patience_seconds: the least time that a member waits for others before it says so.
        names: of the replica's state, those that a late rank must be given.
    """

    def __init__(
        self,
        r: Replica,
        rule: Rule,
        planes: Planes,
        aside: Comm | None,
        *,
        keeper: int,
        patience_seconds: float,
        names: Sequence[str],
    ) -> None:
        self.rank, self.size, self.keeper_rank = r.comm.rank, r.comm.size, keeper
        self._cut = Cut(r.x.numel(), rule.least, r.x.dtype)
        self._state_bytes = max(r.x.numel() * r.x.element_size(), _LEAST_STATE_BYTES)
        self._r, self._comm, self._names = proxy(r), r.comm, names
        self._patience_seconds = patience_seconds
        self._lasted: list[float] = []
        self._round: Round | None = None
        self._given = Given()
        self._packed: tuple[int, Tensor] | None = None
        self._still: Counter[int] = Counter()
        self._rests_at, self._since = r.step, time.perf_counter()
        largest = HEADER_BYTES + max(self._cut.nbytes, self._state_bytes)
        like = torch.empty(largest, dtype=torch.uint8, device=r.x.device)
        self._box: Mailbox = proxy(open_mailbox(r, like, capacity=_CAPACITY))
        self._mean: tuple[int, Tensor] | None = None
        self._sums = Sums(self._box.changed)
        self._office: Office | None = None
        if self.rank == keeper:
            self._office = Office(Keeper(rule, planes), self._box.changed, weak(self._post_pair, None))
        others = [rank for rank in range(self.size) if rank != self.rank]
        for topic, handler, like in (
            (_NOTE, self._read_note, torch.empty(length(self.size), dtype=torch.int64)),
            (_PIECE, self._read_piece, torch.empty(HEADER_BYTES + self._cut.nbytes, dtype=torch.uint8)),
            (_STATE, self._read_state, torch.empty(HEADER_BYTES + self._state_bytes, dtype=torch.uint8)),
        ):
            self._box.answer(topic, weak(handler, True), like=like, src=others)
        if aside is not None:
            bring = weak(self._bring, torch.zeros(self._cut.numel, dtype=self._cut.dtype))
            self._sums.begin(aside, bring=bring, told=weak(self._ended, None), look=looking(r))

    # -- what a strategy calls, in the rank's own thread -------------------------------------------------------------

    @property
    def outcome(self) -> Note | None:
        """How the step that this rank has come to was closed; None before."""
        return None if self._round is None else self._round.outcome

    def come(self, gradient: Tensor) -> Note:
        """Bring a gradient to the replica's step; it becomes the mean over members where that is known here.

        A member knows it, and so does a late rank that took part in the all-reduce beside its computation.

        Returns:
            How the step was closed: CLOSED with its members, or LATE, with those of the latest step.

        Raises:
            CommTimeoutError: too few ranks came.
            PeerLostError: the keeper is gone.
            MismatchError: the optimizers of two ranks are set differently.
        """
        self._notice_loading()
        start = time.perf_counter()
        brought = gradient.detach().cpu()  # who waits for a GPU has not come yet
        with self._box.changed:
            here = self._round = Round(self._r.step, brought, start, start)
            self._say_here(here)
        while not here.is_over:
            self._wait(lambda: self._wakes(here), "enough ranks to arrive", lambda: self._remind(here))
            self._work(here)
        assert here.outcome is not None, "it was waited for"
        end, step = time.perf_counter(), here.step
        self._comm.meter.waited("arrivals", start, start, here.went or end, step)
        with self._box.changed:
            self._rests_at = -1
        if self.is_member(here.outcome):
            self._comm.meter.waited("mean", here.went, here.went, end, step)
            self._lasted = [*self._lasted[1 - _REMEMBERED :], end - here.went]
        self._put(here, gradient)
        return here.outcome

    @property
    def holds(self) -> bool:
        """Whether the gradient that was brought has become the mean, so that the step can be taken here."""
        return self._round is not None and self._round.holds

    def is_member(self, outcome: Note) -> bool:
        """Whether this rank's gradient has counted."""
        return outcome.kind is Kind.CLOSED and self.rank in outcome.members

    def catch_up(self, outcome: Note) -> None:
        """Become what members were after the step that this rank came too late for, or after a later one.

        Raises:
            CommTimeoutError: none of them answered.
        """
        start, step = time.perf_counter(), self._r.step
        wanted = outcome.step + (outcome.kind is Kind.CLOSED)
        buddies = [rank for rank in outcome.members if rank != self.rank]
        asked = 0
        with self._box.changed:
            self._given.want(wanted)
        until = time.perf_counter()

        def ask() -> float:
            nonlocal asked, until
            if time.perf_counter() >= until:
                self._post(buddies[(self.rank + asked) % len(buddies)], Note(Kind.WANTED, wanted))
                asked += 1
                until = time.perf_counter() + asked * _ALONE * self._patience()
            return until - time.perf_counter()

        self._wait(lambda: self._given.whole is not None, f"the state of step {wanted}", ask)
        with self._box.changed:
            found = self._given.whole
            self._given.want(-1)
        assert found is not None, "it was waited for"
        unpack_(self._r, found[1])
        self._r.step = found[0]
        self._comm.meter.waited("state", start, start, time.perf_counter(), step)

    def rest(self) -> None:
        """A step has ended: until the next one this rank's state may be given to others."""
        with self._box.changed:
            self._rests_at, self._packed, self._round = self._r.step, None, None
            self._sums.count(self._comm.meter)
        self._since = time.perf_counter()
        self._box.retry()

    def stand_still(self) -> None:
        """Wait until all ranks do so; meanwhile late ones are given this rank's state.

        Raises:
            CommTimeoutError: some rank did not come.
            PeerLostError: some rank is gone.
        """
        start = time.perf_counter()
        with self._box.changed:
            self._still[self.rank] += 1
            times = self._still[self.rank]
            for rank in range(self.size):
                if rank != self.rank:
                    self._post(rank, Note(Kind.STILL, self._r.step))
            self._box.until(
                lambda: [rank for rank in range(self.size) if self._still[rank] < times],
                f"all ranks to end step {self._r.step}",
            )
            self._sums.count(self._comm.meter)
        self._comm.meter.waited("everyone", start, start, time.perf_counter(), self._r.step)

    # -- within those --------------------------------------------------------------------------------------------

    def _notice_loading(self) -> None:
        """Where a checkpoint was read since the last step, all ranks go on from its step together."""
        if self._rests_at == self._r.step:
            return
        with self._box.changed:
            self._rests_at, self._packed = self._r.step, None
            if self._office is not None:
                self._office.keeper.begin(self._r.step)
        self.stand_still()

    def _say_here(self, here: Round) -> None:
        here.told = time.perf_counter()
        microseconds = int(1e6 * (here.began - self._since))
        self._post(self.keeper_rank, Note(Kind.HERE, here.step, here.attempt, digest(self._r), microseconds))

    def _remind(self, here: Round) -> float:
        """Say again that one is here, for another member may never send its part; seconds until that is due again."""
        # Who was named a member waits for messages that are under way; others only for whoever is not here yet.
        patience = self._patience() * (here.attempt or _ALONE)
        left = max(here.told, here.went) + patience - time.perf_counter()
        if left <= 0:
            self._say_here(here)
        return left if left > 0 else patience

    def _patience(self) -> float:
        """Longer than an exchange usually takes."""
        usual = _USUAL_EXCHANGES * median(self._lasted) if self._lasted else _FIRST_PATIENCE_SECONDS
        return max(self._patience_seconds, usual)

    def _wakes(self, here: Round) -> bool:
        if here.refused:
            first, second = here.refused
            raise MismatchError(
                f"step {here.step}: the optimizers of ranks {first} and {second} are set differently, as schedules are "
                "that count a late worker's own steps; make them functions of worker.step"
            )
        return here.is_over or (here.outcome is None and here.adding is not None and here.adding.wakes)

    def _work(self, here: Round) -> None:
        """Send one's parts, add up one's own, and say so when all of the mean is here."""
        with self._box.changed:
            adding, attempt = here.adding, here.attempt
            if adding is None or here.outcome is not None:
                return
            messages = adding.messages(here.gradient)
        for dst, place, whole, part in messages:
            self._post_piece(dst, _PIECE, Piece(here.step, attempt, place, whole, part), self._cut.nbytes)
        with self._box.changed:
            # Only now: who holds the mean is waited for no more, so all others must have its part of it.
            if adding.is_done and not adding.told:
                adding.told = True
                self._post(self.keeper_rank, Note(Kind.HELD, here.step, attempt))

    def _put(self, here: Round, gradient: Tensor) -> None:
        """Write the mean over the gradient, if this rank has it or will have it at once."""
        outcome = here.outcome
        if outcome is None or outcome.kind is not Kind.CLOSED:
            return
        number, sums = outcome.sum, self._sums
        if number:
            self._wait(lambda: not sums.is_coming(number), f"all-reduce {number}", lambda: _LOOK_SECONDS)
            means = dict(each for each in (here.summed, self._mean) if each is not None)
            if number in means:
                gradient.copy_(means[number])
                here.holds = True
        elif here.adding is not None and self.is_member(outcome):
            here.adding.put(gradient)
            here.holds = True

    def _wait(self, ready: Callable[[], bool], waiting_for: str, meanwhile: Callable[[], float]) -> None:
        """Wait under the comm's deadline; the keeper's loss ends it at once, another's does not.

        `meanwhile` is called whenever anything has changed, and again within the seconds that it returns.
        """
        end = time.monotonic() + self._comm.timeout
        # No message of topic 0 ever comes: to ask for one is to ask whether its writer is still there.
        lifeline = None if self._office else self._box.expect(self.keeper_rank, torch.empty(0))
        with self._box.changed:
            while not ready():
                self._box.retry()
                seconds = meanwhile()
                if ready():
                    return
                if time.monotonic() > end:
                    raise CommTimeoutError(
                        f"rank {self.rank} waited {self._comm.timeout:g} s for {waiting_for} "
                        f"at step {self._r.step}; all ranks must train until the same worker.step"
                    )
                _look_after(lifeline)
                self._box.changed.wait(min(_LOOK_SECONDS, max(seconds, _LEAST_LOOK_SECONDS)))

    def _post(self, dst: int, note: Note) -> None:
        with self._box.changed:
            if dst == self.rank:
                self._hear(dst, note)
            else:
                self._box.send(dst, note.vector(self.size), topic=_NOTE)

    def _post_pair(self, mail: tuple[int, Note]) -> None:
        self._post(*mail)

    def _post_piece(self, dst: int, topic: int, piece: Piece, nbytes: int) -> None:
        self._box.send(dst, piece.message(nbytes), topic=topic)

    # -- messages, in whatever thread; under the lock ---------------------------------------------------------------

    def _read_note(self, message: Message) -> bool:
        return self._hear(message.src, note_of(message.content.tolist()))

    def _read_piece(self, message: Message) -> bool:
        piece = piece_of(message.content)
        if self._round is not None and piece.step == self._round.step:
            self._round.take(message.src, piece)
        return True

    def _read_state(self, message: Message) -> bool:
        piece = piece_of(message.content)
        self._given.take(message.src, piece)
        return True

    def _hear(self, src: int, note: Note) -> bool:
        """Take in a note; False puts it aside until this rank rests."""
        here = self._round
        if note.kind is Kind.GO and note.sum:
            self._sums.announce(note)
        if note.kind is Kind.WANTED:
            return self._give(src, note.step)
        if note.kind is Kind.STILL:
            self._still[src] += 1
        elif note.kind in (Kind.HERE, Kind.HELD):
            if self._office is not None:
                self._office.hear(src, note)
        elif here is not None and here.outcome is None:
            self._obey(here, note)
        return True

    def _obey(self, here: Round, note: Note) -> None:
        """Do as the keeper says, about the step that this rank is at."""
        if note.kind is Kind.LATE and note.attempt == here.step:
            missed = note.step - here.step
            here.outcome = note if missed > 1 else note._replace(kind=Kind.CLOSED, step=here.step)
        elif note.step != here.step:
            return
        elif note.kind is Kind.GO and note.attempt > here.attempt and self.rank in note.members:
            here.go(note.attempt, None if note.sum else Adding(self._cut, self.rank, note.members))
        elif note.kind is Kind.CLOSED:
            here.outcome = note
        elif note.kind is Kind.REFUSED:
            here.refused = note.members
        self._box.changed.notify_all()

    def _give(self, dst: int, wanted: int) -> bool:
        """Send one's state, if it is that of the wanted step or a later one."""
        if self._rests_at < wanted:
            return False
        if self._packed is None:
            self._packed = self._rests_at, pack(self._r, self._names)
        for piece in cut_up(*self._packed, self._state_bytes):
            self._post_piece(dst, _STATE, piece, self._state_bytes)
        return True

    # -- in the thread of all-reduces --------------------------------------------------------------------------------

    def _bring(self, note: Note) -> Tensor:
        """What this rank adds: a copy of its gradient as a member; zeros if it is late, or waits no more."""
        with self._box.changed:
            here = self._round
            if here is None or self.rank not in note.members or not here.lend(note.step):
                return torch.zeros(self._cut.numel, dtype=self._cut.dtype)
        try:
            return here.gradient.clone()
        finally:
            with self._box.changed:
                here.lent = False
                self._box.changed.notify_all()

    def _ended(self, ended: Ended) -> None:
        """An all-reduce has ended here, and the keeper may announce another."""
        with self._box.changed:
            note, self._mean = ended.note, (ended.note.sum, ended.mean)
            if self._round is not None and self._round.step == note.step:
                self._round.summed = self._mean
            self._post(self.keeper_rank, Note(Kind.HELD, note.step, note.attempt, sum=note.sum))


def _look_after(lifeline: Work[Message] | None) -> bool:
    """Raises PeerLostError where the writer of a message is gone."""
    return lifeline is not None and lifeline.ready
