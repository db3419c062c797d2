# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without late workers, over objects that every worker reads when it has time.

    late/NAME/N             the N-th contribution of a worker: its displacement, its tokens, and its progress
    late/state/NAME/N       the N-th state that a worker has published: at the start of its open round, for others that
                            join
    closing/K               the contributions that round K takes, and the worker that has proposed them; written once
    state/first/EPOCH       the object with the state of the first worker of the run that started as view EPOCH
    state/NUMBER            the same, for the worker of this request to join
    load/EPOCH/L/WHAT/NAME  what a worker knows of checkpoints in the L-th call of `load`; "state" is the object with
                            the state from which all continue

A worker is named by its rank at the start of the run, or by the next free number if it joins. All workers apply the
same closings in the same order, so that their common parameters have the same bits, and none of them waits for a
message of a worker that is not in a closing.

If a strategy has F fragments, each has its own local steps, contributions and common parameters, and round n is the
next one of the fragment n modulo F. All of a model is one fragment otherwise; then a worker that was late leaves out
steps of its next round, so that it ends it with the others.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.bucket import AWAITED_SECONDS
from thinwire.core.comm.threads import single_worker
from thinwire.core.kernels import all_finite
from thinwire.core.kernels.decisions import host_copy
from thinwire.core.replica.flat import restored
from thinwire.core.replica.replica import Replica
from thinwire.core.storage.tree import from_bytes, to_bytes
from thinwire.core.view import View
from thinwire.elastic.closing import Closer, Closing, Contribution, Phase
from thinwire.elastic.fleet import Fleet
from thinwire.elastic.late import LateMerging
from thinwire.elastic.late_saves import Plan, extra_of_newest, find, folder_of, missing, plan, taken_of
from thinwire.elastic.membership import RunEndedError
from thinwire.elastic.sampler import MembershipInterval
from thinwire.errors import (
    CheckpointError,
    CommError,
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
)
from thinwire.methods.codecs.base import Codec, draw_key
from thinwire.methods.codecs.feedback import residual_sizes
from thinwire.worker.checkpoint import check_kind, check_random, restore_random
from thinwire.worker.handshake import Facts
from thinwire.worker.replica_state import PARTS, check, mapping_of, pack, same_names, unpack
from thinwire.worker.state import WorkerState

T = TypeVar("T")
_LOGGER = logging.getLogger("thinwire")
_HEADER_BYTES = 1 << 16
_LOOK_SECONDS = 1.0  # between looks for lost workers
_LONGEST_PAUSE, _PAUSE_SHARE = 2.0, 0.1  # between looks for messages
_TINY = 1e-30  # in place of a norm of 0
_NOTHING: list[list[int]] = [[0], [], []]  # the counts of a worker that has sent nothing
_KEPT_ROUNDS = 8  # whose contributions stay, for workers that were considered lost


@dataclass
class _Fragment:
    """The part of the parameters that a round merges, and this worker's steps on it.

    Attributes:
        parts: of each replica, the vector.
        end: the step of a period, from 1, after which its round ends.
        points: the common parameters.
        codec_states: of each replica, such as the errors of earlier messages.
        started: the round for which this worker trains it.
        starts: the common parameters from which this worker has started.
        launched: the parameters that it has sent, if it continues from them.
        tokens: the tokens or samples of its steps since it last sent.
        began: the time at which it started.
        first: the step at which it started.
    """

    parts: list[Replica]
    end: int
    points: list[Tensor]
    codec_states: list[dict[str, Tensor]]
    started: int = 0
    starts: list[Tensor] = field(default_factory=list[Tensor])
    launched: list[Tensor] = field(default_factory=list[Tensor])
    tokens: float = 0.0
    began: float = 0.0
    first: int = 0


@dataclass
class _Message:
    """A contribution with its displacement of each replica.

    Attributes:
        number: its number among those of its worker.
        contribution: the worker, the round in which it started, and its tokens.
        seconds: how long its worker took for it.
        lr: the learning rate of its worker.
        drawn: the rank in the random draws of its codec: the worker's name in the run that has sent it.
        payloads: of each replica.
    """

    number: int
    contribution: Contribution
    seconds: float
    lr: float
    drawn: int
    payloads: list[Tensor]

    def content(self) -> dict[str, Any]:
        """Return it as JSON values and tensors in host memory."""
        payloads = [host_copy(x) for x in self.payloads]
        return {**vars(self), "contribution": self.contribution.content(), "payloads": payloads}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> _Message:
        """Restore a message from its `content`."""
        number, drawn = int(content["number"]), int(content["drawn"])
        seconds, lr = float(content["seconds"]), float(content["lr"])
        return cls(number, Contribution.read(content["contribution"]), seconds, lr, drawn, content["payloads"])


@dataclass
class _Other:
    """The progress of one worker.

    Attributes:
        id: its id in the membership.
        row: the location of its process.
        read: the number of its contributions that this worker has read.
        open: the numbers of those that no closing has taken.
        closed: the numbers of those that closings had taken before this worker joined.
        round: the newest round that it is known to have reached.
        times: the report of its times in its last contribution, as `Report.pack` returns it.
    """

    id: str
    row: str
    read: int = 0
    open: set[int] = field(default_factory=set[int])
    closed: set[int] = field(default_factory=set[int])
    round: int = 0
    times: tuple[int, int] | None = None


class LateRounds:
    """The rounds of one worker.

    Args:
        fleet: this worker's way into the run, which it has entered.
        options: when rounds close, and what becomes of late work.
        timeout: how long to wait without any news of another worker, in seconds.

    Attributes:
        worker_id: the id of this worker.
        number: its number in the run: its rank at the start, or the next free number if it joins.
        peers: the ids of the workers that make calls together: this one alone.
        comm: of this worker alone; `comm.meter` counts the bytes of its contributions.
        closings: the closed rounds that this worker has applied.
        costs: empty.
        on_view: called when the present workers change.
        has_just_joined: False: a worker starts with the state of the run.
    """

    def __init__(self, fleet: Fleet, options: LateMerging, *, timeout: float) -> None:
        membership, objects = fleet.membership, fleet.objects
        first = membership.view
        assert first is not None and objects is not None, "enter() comes first"
        self.options = options
        self.worker_id = membership.worker
        self.peers = (self.worker_id,)
        self.comm: Comm = single_worker()
        self.comm.timeout, self.comm.traffic = timeout, objects.traffic
        self.closings: list[Closing] = []
        self.costs: dict[str, float] = {}
        self.on_view: list[Callable[[View], None]] = []
        self.has_just_joined = False
        self._fleet, self._membership, self._objects = fleet, membership, objects
        self._first = first
        self._others = {str(rank): _Other(each, first.rows[each]) for rank, each in enumerate(first.members)}
        self._requests, self._served, self._published = 0, 0, 0
        self._states: dict[str, int] = {}  # the states that this worker has published, and the rounds of these
        rank = first.rank(membership.worker)
        self.number = first.size + membership.last_request - 1 if rank is None else rank
        self._name = str(self.number)
        self._others.setdefault(self._name, _Other(membership.worker, membership.row))
        if options.replay and rank is None:
            raise ConfigError("replay: this worker joins a run. All workers of a replay must start it")
        self._closer = Closer(options, self._name, map(str, range(first.size)), now=time.monotonic())
        self._messages: dict[tuple[str, int], _Message] = {}
        self._sent: dict[int, tuple[int, int | None]] = {}  # by number: the started round, and the round that took it
        self._looked = time.monotonic()
        self._fragments: list[_Fragment] = []
        self._step = 0
        self._known: tuple[str, ...] = first.members
        self._awaited: list[int] = []
        self._upload_seconds = 0.0
        self._worker: WorkerState | None = None
        self._run = secrets.token_hex(8)  # the id of the run, which the first worker draws
        self._loads, self._has_stepped = 0, False
        self._phase, self._left_out = Phase(1), 0
        own = (each for closing in options.replay or () for each in closing.contributions if each.worker == self._name)
        self._replayed = {each.started: each.tokens for each in own if not each.others}

    # -- set-up --------------------------------------------------------------------------------------------------------

    @property
    def joins(self) -> bool:
        """Return True if this worker gets parameters and state from another one."""
        return self.number > 0

    @property
    def worker(self) -> WorkerState:
        """The worker of these rounds."""
        assert self._worker is not None
        return self._worker

    @property
    def view(self) -> View:
        """The workers that this one takes for present; others may learn of a change earlier or later."""
        names = sorted(self._closer.workers | {self._name}, key=int)
        rows = {self._others[name].id: self._others[name].row for name in names if name in self._others}
        return View(self._closer.round, tuple(rows), rows=rows, begins=self._first.begins)

    def agree(self, facts: Facts, device: torch.device) -> None:
        """Refuse to enter a run of another model, recipe or rule.

        Raises:
            MismatchError: with the first difference.
        """
        self._fleet.agree(facts)

    def begin(self, worker: WorkerState, after_step: Callable[[], None]) -> None:
        """Start with the state of the first worker, or of the one that has closed the last round."""
        self._worker = worker
        worker.undo.callback(self.close)
        self.options.check(worker.strategy, worker.optimizer, init="broadcast", global_batch=None)
        worker.common = self._common
        worker.awaited = lambda: self._awaited
        worker.folder, worker.pack_rounds, worker.load_alone = folder_of(self._name), self._pack_rounds, self._load
        self._phase = Phase(self._period)
        # Of each replica, the fragments; of each fragment, the parts in all replicas.
        for pairs in zip(*(worker.strategy.fragments_in(r) for r in worker.replicas), strict=True):
            parts = [part for part, _ in pairs]
            points = [part.x.clone() for part in parts]
            self._fragments.append(_Fragment(parts, pairs[0][1], points, [{} for _ in parts]))
        if not self.joins:
            self._restart_all(0, map(str, range(self._first.size)))
            self._write_state([f"state/first/{self._first.begins}"])
        elif self.number < self._first.size:
            self._adopt(f"state/first/{self._first.begins}")
        else:
            self._adopt(f"state/{self._membership.last_request}")

    def _common(self) -> list[Tensor]:
        """Return the common parameters of each replica."""
        found = list[Tensor]()
        for i in range(len(self.worker.replicas)):
            in_order = sorted(self._fragments, key=lambda each: each.parts[i].x.storage_offset())
            found.append(torch.cat([each.points[i] for each in in_order]))
        return found

    @property
    def _period(self) -> int:
        return self.worker.strategy.traits.period or 1

    def _step_after(self, round: int) -> int:
        """Return the step at which a worker that is in time ends a round."""
        periods, number = divmod(round, len(self._fragments))
        return periods * self._period + self._fragments[number].end

    def _next_round_of(self, number: int) -> int:
        """Return the round that merges a fragment next."""
        return self._closer.round + (number - self._closer.round) % len(self._fragments)

    def _restart(self, number: int) -> None:
        """Start local steps on a fragment at its common parameters."""
        fragment, carry = self._fragments[number], self.options.carry
        for i, (part, point) in enumerate(zip(fragment.parts, fragment.points, strict=True)):
            if not fragment.launched:
                part.x.copy_(point)
                continue
            late = _exact(part.x).sub_(_exact(fragment.launched[i]))
            if carry == "adaptive":
                change = _exact(point).sub_(_exact(fragment.starts[i]))
                late.mul_(nn.functional.cosine_similarity(late, change, dim=0).clamp_(min=0))
            part.x.copy_(late.add_(_exact(point)))
        fragment.starts, fragment.launched = fragment.points, []
        fragment.started = self._next_round_of(number)
        if carry == "off":  # steps since the last message are dropped
            fragment.tokens = 0.0
        fragment.began = time.monotonic()

    def _restart_all(self, round: int, workers: Iterable[str]) -> None:
        """Start all fragments at the common parameters, with this round open."""
        self._closer = Closer(
            self.options,
            self._name,
            workers,
            now=time.monotonic(),
            round=round,
            fragments=len(self._fragments),
        )
        for number, fragment in enumerate(self._fragments):
            fragment.launched, fragment.tokens = [], 0.0
            self._restart(number)
        self._set_step(self._step_after(round - 1) if round else 0)
        self._left_out = 0
        for fragment in self._fragments:
            fragment.first = self._step

    def _leave_out(self, steps: int) -> None:
        """Take so many steps less in the round that starts; with fragments, whole rounds are taken."""
        if len(self._fragments) == 1 and steps < self._period - self.options.delay and not self.options.replay:
            self._left_out = steps  # from the next step on, so that loops see the end of a round
            self._fragments[0].first += steps

    def _set_step(self, step: int) -> None:
        for r in self.worker.replicas:
            r.step = step
        self._step = self.comm.step = step

    # -- steps ---------------------------------------------------------------------------------------------------------

    def gradients(self, exchange: Callable[[], None]) -> None:
        """Run the exchange of a backward pass, which sends nothing."""
        exchange()

    def start_step(self) -> None:
        """Do nothing: a step begins without a message."""

    def together(self, body: Callable[[], T], *, sends: bool = True) -> T:
        """Run a call, which this worker makes alone."""
        return body()

    def drop_newcomers(self) -> None:
        """Do nothing: a worker starts with the state of the run."""

    def crews(self) -> list[MembershipInterval]:
        """Refuse to assign batches by step.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"ElasticSampler with elastic={self.options}: workers are at different steps, so no step assigns batches "
            "to all of them. Draw batches at random, with a seed of worker.elastic.worker_id"
        )

    def before_step(self, hook: Callable[[], None]) -> None:
        """Do nothing: the strategy takes local steps."""

    def after_step(self, hook: Callable[[], None]) -> None:
        """Count a step; send the contribution when it is due, and end the round."""
        step, self._step = self.worker.step, self._step + 1
        if step != self._step:
            raise ConfigError(
                f"worker {self.worker_id} is at step {step} after step {self._step - 1}: steps of a run with "
                f"elastic={self.options} must not be set from outside. Leave out load_state_dict"
            )
        if self._left_out:
            self._set_step(self._step + self._left_out)
            self._left_out = 0
        self._membership.take_step()
        self._has_stepped = True
        for fragment in self._fragments:
            fragment.tokens += self.worker.replicas[0].samples
        self._follow_replay()
        for number, left in enumerate(self._steps_left()):
            if left == self.options.delay:
                self._send(number)
            if left == 0:
                self._end_round(number)
        if self._served < self._membership.requests() and self._closer.owner == self._name:
            self._serve()

    def _follow_replay(self) -> None:
        """Send after as many tokens as in the replayed run, whose worker may have left out steps."""
        left, fragment = self._steps_left()[0], self._fragments[0]
        if left > self.options.delay and fragment.tokens >= self._replayed.get(fragment.started, math.inf):
            self._set_step(self._step + left - self.options.delay)

    def _steps_left(self) -> list[int]:
        """Return the steps until the end of each fragment's round."""
        return [(fragment.end - self._step) % self._period for fragment in self._fragments]

    # -- contributions -------------------------------------------------------------------------------------------------

    def _send(self, number: int, *, leaves: bool = False) -> None:
        """Send this worker's displacement of a fragment since it has started."""
        worker, payloads, fragment = self.worker, list[Tensor](), self._fragments[number]
        rate: Any = worker.replicas[0].lr
        if isinstance(rate, Tensor) and rate.ndim:
            if bool((rate != rate[0]).any()) and worker.strategy.traits.lr_factor is None:
                raise ConfigError(
                    f"elastic={self.options}: parameter groups have different learning rates, and outer steps may "
                    "divide by one. Use one learning rate"
                )
            rate = rate.flatten()[0]
        for i, (part, start) in enumerate(zip(fragment.parts, fragment.starts, strict=True)):
            x, codec = part.x, self._codec_for(part)
            delta = _exact(x).sub_(_exact(start)) if x.dtype != torch.float64 else x - start
            if not all_finite(delta):
                raise NonFiniteError(
                    f"worker {self.worker_id}, step {worker.step}: its parameters are not finite, and it sends "
                    "nothing. The others continue without it. Lower the learning rate, and start this worker again"
                )
            key = self._key(self.number, fragment.started, i)
            payloads.append(delta if codec is None else codec.encode(delta, fragment.codec_states[i], key))
        own, now = self._others[self._name], time.monotonic()
        # The link of a worker is as slow as its last upload.
        own.times = worker.account.times.row((self._upload_seconds, 0, 0))
        others = tuple(each.started for each in self._fragments if each is not fragment)
        contribution, seconds = (
            Contribution(fragment.started, self._name, fragment.tokens, others),
            now - fragment.began,
        )
        self._put(_Message(own.read, contribution, seconds, float(rate), self.number, payloads), leaves=leaves)
        end = time.monotonic()
        self._upload_seconds = end - now
        self.comm.meter.waited("contribution", now, now, end, worker.step)
        self._phase.record_step(seconds / max(1, self._step - fragment.first))
        fragment.tokens = 0.0
        if self.options.carry != "off":
            fragment.launched = [part.x.clone() for part in fragment.parts]

    def _put(self, message: _Message, *, leaves: bool = False) -> None:
        """Send a contribution of this worker."""
        times = self._others[self._name].times
        more = {"round": self._closer.round, "leaves": leaves, "times": times and list(times)}
        content = to_bytes({**message.content(), **more}).numpy().tobytes()
        self._objects.put(f"late/{self._name}/{message.number}", content)
        self.comm.meter.sent("contribution", float(sum(x.nbytes for x in message.payloads)))
        self._sent[message.number] = message.contribution.started, None
        self._keep(self._name, message)

    def _keep(self, name: str, message: _Message) -> None:
        """Keep a contribution until a closing takes it."""
        other = self._others[name]
        other.read = max(other.read, message.number + 1)
        other.open.add(message.number)
        self._hold(message)

    def _hold(self, message: _Message) -> None:
        self._messages[message.contribution.worker, message.contribution.started] = message
        self._closer.arrive(message.contribution, message.seconds, time.monotonic())

    def _codec_for(self, part: Replica) -> Codec | None:
        return self.options.codec if part.x.numel() else None

    def _key(self, rank: int, started: int, replica: int) -> int:
        return draw_key(self.worker.seed, started, rank=rank, stage=replica)

    def _look(self, wanted: Collection[str] = ()) -> bool:
        """Read the contributions that have arrived, and notice workers that come and go; return True for any news.

        Args:
            wanted: workers with a contribution that a closing takes.
        """
        news, now = self._take_requests(now=not self._others.keys() >= set(wanted)), time.monotonic()
        looks = now - self._looked > _LOOK_SECONDS
        if looks:
            self._looked = now
            for name in self._ended(self._closer.workers - {self._name}):
                self._closer.lose(name)
                news = True
        # One that is considered lost may only be slow.
        present = {*self._closer.workers, *wanted}
        names = [name for name in self._others if name != self._name and (looks or name in present)]
        asked = [f"late/{name}/{self._others[name].read}" for name in names]
        most = _HEADER_BYTES + sum(2 * _exact_bytes(r.x) for r in self.worker.replicas)
        for name, content in zip(names, self._objects.get(asked, most), strict=True):
            if content is not None:
                self._arrive(name, content)
                news = True
        if news and (view := self.view).members != self._known:
            self._known = view.members
            for call in self.on_view:
                call(view)
        return news

    def _ended(self, names: Iterable[str]) -> list[str]:
        """Return those of the workers that have ended, or have left the run."""
        found = {name: self._others[name] for name in sorted(names)}
        ended = self._membership.ended({each.id: each.row for each in found.values()}, self._first.epoch)
        return [name for name, other in found.items() if other.id in ended]

    def _take_requests(self, *, now: bool = False) -> bool:
        """Name the workers that have asked to join."""
        before, known = self._requests, {each.id for each in self._others.values()}
        while self._requests < self._membership.requests(now=now):
            self._requests += 1
            found = self._membership.requested(self._requests)
            if found is not None and found[0] not in known:
                name = str(self._first.size + self._requests - 1)
                self._others[name] = _Other(*found, round=self._closer.round)
                known.add(found[0])
        return self._requests > before

    def _arrive(self, name: str, content: bytes) -> None:
        """Record a contribution.

        Raises:
            CommError: it has another form than expected.
        """
        other = self._others[name]
        try:
            found = from_bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            message = self._checked(_Message.read(found))
            if (message.contribution.worker, message.number) != (name, other.read):
                raise ValueError(f"it is number {message.number}, {message.contribution}")
            leaves = bool(found["leaves"])
            other.round = max(other.round, int(found["round"]))
            if found["times"] is not None:
                data, addresses = map(int, found["times"])
                other.times = data, addresses
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            raise CommError(
                f"late/{name}/{other.read}: the contribution of worker {other.id} cannot be read ({error}). All "
                "workers need the same version of thinwire, the same model and the same recipe"
            ) from None
        if other.read in other.closed:
            other.read += 1
        else:
            self._keep(name, message)
        if name not in self._closer.workers:
            self._closer.join(name)
        if leaves:
            self._closer.lose(name)

    def _checked(self, message: _Message) -> _Message:
        """Return a message on this worker's devices.

        Raises:
            ValueError: it is of another number of fragments, or has another size.
        """
        if 1 + len(message.contribution.others) != len(self._fragments):
            raise ValueError(f"it is {message.contribution}")
        parts = self._fragments[message.contribution.started % len(self._fragments)].parts
        codecs = [self._codec_for(part) for part in parts]
        sizes = [
            _exact_bytes(part.x) if codec is None else codec.nbytes(part.x.numel())
            for part, codec in zip(parts, codecs, strict=True)
        ]
        if (found := [x.nbytes for x in message.payloads]) != sizes:
            raise ValueError(f"payloads of {found} bytes, not {sizes}")
        return replace(message, payloads=[x.to(p.x.device) for x, p in zip(message.payloads, parts, strict=True)])

    # -- the end of a round --------------------------------------------------------------------------------------------

    def _end_round(self, number: int) -> None:
        """Wait for the closing of a fragment's round, apply later ones, and start its next round."""
        fragment, began = self._fragments[number], time.monotonic()
        started, seconds = fragment.started, -fragment.began
        self._advance(number)
        self.comm.meter.waited("closing", began, began, time.monotonic(), self.worker.step)
        if fragment.started == started:  # no other worker's state was copied
            self._restart(number)
            # A late worker skips whole periods, so that it sends every fragment equally often.
            self._set_step(max(self._step, self._step_after(fragment.started - len(self._fragments))))
            fragment.first = self._step
            in_time = self._sent.get(self._others[self._name].read - 1) == (started, started)
            closed, seconds = self._closer.round - started, seconds + fragment.began
            self._leave_out(self._phase.end(seconds=seconds, rounds=closed, in_time=in_time))
        self.worker.account.exchanged = True
        self._compare_times()

    def _compare_times(self) -> None:
        """Find a slow worker from the last contributions of the present workers."""
        names = sorted(self._closer.workers | {self._name}, key=int)
        times = [self._others[name].times for name in names]
        rows = [each for each in times if each is not None]
        if len(rows) == len(names):  # every worker has contributed
            self.worker.account.times.take(rows, late_rank=names.index(self._name))

    def _advance(self, number: int) -> None:
        """Apply the closings up to the newest one, and at least that of a fragment's own round."""
        started, until = self._fragments[number].started, self._end_in_replay(number)
        news = begin = time.monotonic()
        while True:
            closer, looked = self._closer, time.monotonic()
            record = self._closing(until)
            if record is not None:
                news = begin = time.monotonic()
                self._apply(record)
                continue
            if closer.round > started if until is None else closer.round >= until:
                self._awaited = []
                return
            if self._look():
                news = time.monotonic()
            now = time.monotonic()
            if until is None and (closing := closer.propose(now)) is not None:
                self._membership.propose(f"closing/{closing.round}", {"by": self._name, "taken": closing.content()})
                continue
            missing = sorted(closer.missing(), key=int)
            if now - begin >= AWAITED_SECONDS:
                self._awaited = [int(name) for name in missing]
            if closer.owner == self._name:  # a missing one may wait for a state
                self._serve()
            if looked - news > self.comm.timeout:  # a process that was stopped looks again first
                raise CommTimeoutError(
                    f"worker {self.worker_id}, step {self.worker.step}: round {closer.round} was not closed within "
                    f"{self.comm.timeout:g} s; worker {', '.join(missing) or 'none'} has not contributed. Use a longer "
                    "timeout, or a smaller quorum"
                )
            pause = min(_LONGEST_PAUSE, max(self._membership.poll_seconds, _PAUSE_SHARE * (now - begin)))
            wait = closer.seconds_to_wait(now)
            time.sleep(pause if not wait else min(pause, wait))

    def _end_in_replay(self, number: int) -> int | None:
        """Return the round before which this worker starts a fragment again in a replay; None if this is no replay."""
        if not self.options.replay:
            return None
        count, now = len(self._fragments), self._fragments[number].started
        rounds = (
            started
            for closing in self.options.replay
            for each in closing.contributions
            if each.worker == self._name
            for started in (each.started, *each.others)
            if started > now and started % count == number
        )
        return min((started - count + 1 for started in rounds), default=len(self.options.replay))

    def _closing(self, until: int | None) -> tuple[Closing, str] | None:
        """Return the closing of the open round, and the worker that has proposed it; None while it is open."""
        number = self._closer.round
        if until is not None:
            return (self.options.replay[number], "") if number < min(until, len(self.options.replay)) else None
        found = self._membership.read(f"closing/{number}")
        if found is None:
            return None
        return Closing.read(number, found["taken"]), str(found["by"])

    def _apply(self, record: tuple[Closing, str]) -> None:
        """Continue from the mean of a closing's contributions."""
        (closing, by), worker, closer = record, self.worker, self._closer
        messages = self._messages_of(closing)
        if messages is None:
            self._adopt(f"state/{self._membership.request()}")
            return
        weights = closing.weights(self.options.late)
        fragment = self._fragments[closing.round % len(self._fragments)]
        with restored([part.x for part in fragment.parts]):
            for i, (part, point) in enumerate(zip(fragment.parts, fragment.points, strict=True)):
                like = _exact(point)
                merge = _Merge(like, self._turned(part))
                for each, message in zip(closing.contributions, messages, strict=True):
                    if weights[each]:
                        merge.add(self._decoded(message, part, like, i), weights[each])
                part.x.copy_(merge.result().add_(point))
            for r in worker.replicas:
                r.step = self._step_after(closing.round)
                # Outer steps may divide by the rate, which must be the same on all workers.
                r.override_lr(messages[0].lr)
                try:
                    worker.strategy.after_step(r)
                finally:
                    r.override_lr(None)
            fragment.points = [part.x.clone() for part in fragment.parts]
        self._set_step(self._step)
        closer.apply(closing, time.monotonic())
        self.closings.append(closing)
        for each, message in zip(closing.contributions, messages, strict=True):
            del self._messages[each.worker, each.started]
            if each.worker in self._others:
                self._others[each.worker].open.discard(message.number)
            if each.worker == self._name:
                self._sent[message.number] = each.started, closing.round
        self._others[self._name].round = closer.round
        self._sweep()
        if by == self._name:
            self._serve()

    def _messages_of(self, closing: Closing) -> list[_Message] | None:
        """Return the contributions of a closing, in its order; None if one was deleted.

        Raises:
            CommTimeoutError: a contribution has not arrived in time.
        """
        keys = [(each.worker, each.started) for each in closing.contributions]
        end, misses = time.monotonic() + self.comm.timeout, 0
        while missing := [key for key in keys if key not in self._messages]:
            begin = time.monotonic()  # this process may be stopped while it looks
            # The worker that proposed the closing had read all of it. Another may join before this one looks.
            looked = self._look([worker for worker, _ in missing])
            misses = 0 if looked else misses + 1
            # The run is far ahead: the others have deleted what this worker has missed.
            far = self._membership.read(f"closing/{closing.round + _KEPT_ROUNDS}") is not None
            if misses > 2 and far and not self.options.replay:
                return None
            if begin > end and misses > 2:
                raise CommTimeoutError(
                    f"worker {self.worker_id}: contributions {missing} of round {closing.round} did not arrive within "
                    f"{self.comm.timeout:g} s. Start this worker again to let it join"
                )
            if not looked:
                time.sleep(self._membership.poll_seconds)
        found = [self._messages[key] for key in keys]
        if any(message.contribution != each for message, each in zip(found, closing.contributions, strict=True)):
            raise MismatchError(
                f"round {closing.round} takes {closing.contributions}, and workers sent "
                f"{tuple(message.contribution for message in found)}. A replay needs the same numbers of samples"
            )
        return found

    def _decoded(self, message: _Message, part: Replica, like: Tensor, replica: int) -> Tensor:
        payload, codec = message.payloads[replica], self._codec_for(part)
        key = self._key(message.drawn, message.contribution.started, replica)
        return payload if codec is None else codec.decode(payload, like, key)

    def _turned(self, part: Replica) -> list[slice]:
        """Return the tensors of a part whose norms and directions are averaged apart."""
        if self.options.merge == "mean":
            return []
        embeddings = {id(each.weight) for each in self.worker.model.modules() if isinstance(each, nn.Embedding)}
        names = {
            segment.name
            for parameters, segments in self.worker.layouts
            for x, segment in zip(parameters, segments, strict=True)
            if id(x) in embeddings
        }
        return [slice(each.start, each.stop) for each in part.segments if each.name not in names]

    def _sweep(self) -> None:
        """Delete own contributions that all present workers have applied, and states from before them."""
        slowest = min(self._others[name].round for name in self._closer.workers | {self._name})
        before = max(slowest - _KEPT_ROUNDS, self._closer.round - 8 * _KEPT_ROUNDS)
        old = [n for n, (_, taken) in self._sent.items() if taken is not None and taken < before]
        states = [name for name, round in self._states.items() if round < before]
        for number in old:
            del self._sent[number]
        for name in states:
            del self._states[name]
        if (old or states) and not self.options.replay:
            self._objects.delete([*(f"late/{self._name}/{number}" for number in old), *states])

    # -- workers that come and go --------------------------------------------------------------------------------------

    def _write_state(self, keys: list[str]) -> None:
        """Write the common state at the start of the open round, and name it under keys."""
        known = set(self._others)
        late = {
            "run": self._run,
            "round": self._closer.round,
            "workers": sorted(self._closer.workers),
            "phase": [self._closer.seconds_open(time.monotonic()), self._phase.interval],
            "counts": self._counts(),
            # Those of a stopped run, which no object holds.
            "carried": [each.content() for (name, _), each in self._messages.items() if name not in known],
        }
        self._publish({**self._common_state(), "late": late}, keys)

    def _counts(self) -> dict[str, list[list[int]]]:
        """Return which contributions of each worker this one has read, for `taken_of`."""
        return {name: [[each.read], sorted(each.open), sorted(each.closed)] for name, each in self._others.items()}

    def _common_state(self) -> dict[str, Any]:
        with restored([part.x for each in self._fragments for part in each.parts]):
            for fragment in self._fragments:
                for part, point in zip(fragment.parts, fragment.points, strict=True):
                    part.x.copy_(point)
            return pack(self.worker, PARTS, keeps=_is_common, inflight=False)

    def _publish(self, state: dict[str, Any], keys: list[str]) -> None:
        name = f"late/state/{self._name}/{self._published}"
        self._published += 1
        self._states[name] = self._closer.round
        content = to_bytes(state).numpy().tobytes()
        self._objects.put(name, content)
        for key in keys:
            self._membership.propose(key, {"name": name, "bytes": len(content)})

    def _serve(self) -> None:
        """Give workers that have asked the state at the start of the open round."""
        self._take_requests()
        keys = [f"state/{number}" for number in range(self._served + 1, self._requests + 1)]
        if unanswered := [key for key in keys if self._membership.read(key) is None]:
            self._write_state(unanswered)
        self._served = self._requests

    def _adopt(self, key: str) -> None:
        """Wait for a state of the run, and continue from it."""
        packed, late = self._wait_for_state(key)
        self._run = late["run"]
        self._start_from(packed, late["round"], {*late["workers"], self._name} & self._others.keys())
        elapsed, interval = late["phase"]
        self._leave_out(self._phase.join(elapsed=elapsed, interval=interval))
        messages, self._messages = self._messages.values(), {}
        for each in late["carried"]:
            self._hold(self._checked(_Message.read(each)))
        for name, other in self._others.items():
            taken, other.open = taken_of(late["counts"].get(name, _NOTHING)), set[int]()
            if name == self._name:  # own contributions that no closing has taken still count
                for message in messages:
                    if message.contribution.worker == name and message.number not in taken:
                        self._keep(name, message)
                continue
            other.read = next(number for number in itertools.count() if number not in taken)
            other.closed = {number for number in taken if number > other.read}

    def _wait_for_state(self, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a common state of the run, and what belongs to its rounds.

        Raises:
            PeerLostError: no worker is left.
            CommTimeoutError: no worker has answered in time.
        """
        end = time.monotonic() + self.comm.timeout
        while True:
            begin = time.monotonic()  # this process may be stopped while it looks
            if (content := self._named_state(key)) is not None:
                break
            self._take_requests()
            others = (name for name, each in self._others.items() if each.id != self.worker_id)
            if all(self._ended([name]) for name in others):
                raise RunEndedError(
                    "the run in this store has ended: all its workers are gone. To start a new run, use another path "
                    "or name"
                )
            if begin > end:
                raise CommTimeoutError(
                    f"worker {self.worker_id} got no state of the run within {self.comm.timeout:g} s. Its rounds take "
                    "longer, or it has ended. Use a longer timeout"
                )
            time.sleep(self._membership.poll_seconds)
        self._take_requests()  # the state may be of a round with workers that have just joined
        packed: dict[str, Any] = from_bytes(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return packed, packed.pop("late")

    def _named_state(self, key: str) -> bytes | None:
        """Return the object that a record names; None if one of the two does not exist yet."""
        found: Mapping[str, Any] | None = self._membership.read(key)
        return None if found is None else self._objects.get([found["name"]], found["bytes"])[0]

    def _start_from(self, packed: dict[str, Any], round: int, workers: Iterable[str]) -> None:
        """Start all fragments from a common state, with this round open."""
        check(packed, self.worker, ranks=False)
        unpack(packed, self.worker)
        for fragment in self._fragments:
            fragment.points = [part.x.clone() for part in fragment.parts]
        self._restart_all(round, workers)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _pack_rounds(self) -> dict[str, Any]:
        """Return what this worker needs to continue its rounds from a checkpoint, besides its state."""
        return {
            "run": self._run,
            "name": self._name,
            "round": self._closer.round,
            "sent": self._others[self._name].read,
            "rule": self._rule,
            "counts": self._counts(),
            "fragments": [
                {
                    "points": [host_copy(x) for x in each.points],
                    # Usually the same tensors.
                    "starts": [] if each.starts is each.points else [host_copy(x) for x in each.starts],
                    "launched": [host_copy(x) for x in each.launched],
                    "codec_states": [{name: host_copy(x) for name, x in y.items()} for y in each.codec_states],
                    "started": each.started,
                    "tokens": each.tokens,
                }
                for each in self._fragments
            ],
            "messages": [each.content() for each in self._messages.values()],
        }

    @property
    def _rule(self) -> str:
        """The options that a checkpoint belongs to."""
        return f"codec={self.options.codec}, delay={self.options.delay}, carry={self.options.carry}"

    def _load(self, folder: Path, missing_ok: bool) -> dict[str, Any]:
        """Continue from the checkpoints of a stopped run, with all workers of the start.

        Raises:
            ConfigError: this worker has taken a step.
            CheckpointError: on all workers: there is no checkpoint, or one is damaged or of another run.
        """
        if self.number >= self._first.size:
            return extra_of_newest(folder, missing_ok=missing_ok)  # it has joined, with the state of the run
        if self._has_stepped:
            raise ConfigError(
                f"load() at step {self.worker.step} with elastic={self.options}: the other workers do not wait for it. "
                "Call load directly after attach, on all workers"
            )
        self._loads += 1

        def look() -> dict[str, Any]:
            check_kind(folder, alone=True)
            return find(folder)

        found = plan(self._with_all("saves", look))
        if found is None:
            if missing_ok:
                return {}
            raise missing(folder)
        content: dict[str, Any] = {}

        def read() -> None:
            if self._name in found.saves:
                content.update(found.saves[self._name].read(folder))
                self._check_saved(content)

        self._with_all("read", read)
        key = f"load/{self._first.begins}/{self._loads}/state"
        if found.saves.get(self._name) == found.newest:
            self._publish(self._state_of_save(content, found), [key])
        packed, late = self._wait_for_state(key)
        self._start_from(packed, late["round"], map(str, range(self._first.size)))
        self._messages, self._sent = {}, {}
        self._others = {name: _Other(each.id, each.row, round=late["round"]) for name, each in self._others.items()}
        for each in late["carried"]:
            self._hold(self._checked(_Message.read(each)))
        for fragment in self._fragments:
            fragment.codec_states = [{} for _ in fragment.parts]
        extra = dict[str, Any](late["extra"])
        if content:
            self._continue(content, packed, late["round"])
            self._send_again(content["late"], late["taken"][content["late"]["name"]])
            extra = content["extra"]
        else:
            _LOGGER.warning(
                "worker %s starts at the parameters of round %d, without a checkpoint of its own",
                self._name,
                late["round"],
            )
        for why, names in (
            ("is older than work of it that the newest one contains", found.outdated),
            ("is not continued, since there are fewer workers", found.dropped),
        ):
            if self.number == 0 and names:
                _LOGGER.warning("the checkpoint of worker %s %s. Its unfinished round is lost", ", ".join(names), why)
        return extra

    def _with_all(self, what: str, call: Callable[[], T]) -> dict[str, T]:
        """Make a call on all workers of the start; return their results, which are JSON values, by name.

        Raises:
            CheckpointError: on all workers, if the call fails on one of them.
            PeerLostError: one of them has ended.
            CommTimeoutError: one of them does not call `load`.
        """
        mine, cause = dict[str, Any](), None
        try:
            mine["found"] = call()
        except Exception as error:
            cause = error
            known = isinstance(error, OSError | CheckpointError | ConfigError)
            mine["problem"] = str(error) if known else f"it does not fit ({type(error).__name__}: {error})"
        place = f"load/{self._first.begins}/{self._loads}/{what}"
        self._membership.propose(f"{place}/{self._name}", mine)
        rows, end = dict[str, dict[str, Any]](), time.monotonic() + self.comm.timeout
        while absent := [str(rank) for rank in range(self._first.size) if str(rank) not in rows]:
            told = self._membership.read_each([f"{place}/{name}" for name in absent])
            rows.update({name: row for name, row in zip(absent, told, strict=True) if row is not None})
            absent = [name for name in absent if name not in rows]
            for name in self._ended(absent):
                # It may have written its row, and raised the error of another one, since the look above.
                if self._membership.read(f"{place}/{name}") is None:
                    raise PeerLostError(f"worker {self._others[name].id} was lost in load(). Start all workers again")
            for name in absent:
                if time.monotonic() > end:
                    raise CommTimeoutError(
                        f"worker {self.worker_id}: worker {self._others[name].id} has not called load() within "
                        f"{self.comm.timeout:g} s. All workers of the start must call it directly after attach"
                    )
            if len(rows) < self._first.size:
                time.sleep(self._membership.poll_seconds)
        for name in sorted(rows, key=int):
            if "problem" in rows[name]:
                raise CheckpointError(f"worker {name}: {rows[name]['problem']}") from cause
        return {name: row["found"] for name, row in rows.items()}

    def _check_saved(self, content: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run or of other options."""
        same_names("a part", content, ("save", "state", "names", "extra", "random", "late"))
        mapping_of(content["extra"], "extra")
        check_random(content["random"])
        check(content["state"], self.worker, finite=True)
        late = mapping_of(content["late"], "the rounds")
        if late["rule"] != self._rule:
            raise CheckpointError(
                f"the checkpoint has {late['rule']}, and this run {self._rule}. Contributions depend on them. Use the "
                "same options of LateMerging; quorum, tokens, deviations and late may change"
            )
        if len(late["fragments"]) != len(self._fragments):
            raise CheckpointError(f"the checkpoint has {len(late['fragments'])} fragments, not {len(self._fragments)}")
        for fragment, saved in zip(self._fragments, late["fragments"], strict=True):
            like = [(x.dtype, x.shape) for x in fragment.points]
            for name in ("points", "starts", "launched"):
                if (found := [(x.dtype, x.shape) for x in saved[name]]) != like and (found or name == "points"):
                    raise CheckpointError(f"{name} of a fragment are {found}: must be {like}. Use the same model")
            if len(saved["codec_states"]) != len(fragment.parts):
                raise CheckpointError(f"a fragment has {len(saved['codec_states'])} codec states")
        for each in late["messages"]:
            self._checked(_Message.read(each))

    def _state_of_save(self, content: dict[str, Any], found: Plan) -> dict[str, Any]:
        """Return the common state of the newest checkpoint, which this worker continues."""
        saved = content["late"]
        unpack(content["state"], self.worker)
        for fragment, each in zip(self._fragments, saved["fragments"], strict=True):
            fragment.points = [x.to(part.x.device) for x, part in zip(each["points"], fragment.parts, strict=True)]
        counts = saved["counts"]
        taken = {each.name: sorted(taken_of(counts.get(each.name, _NOTHING))) for each in found.saves.values()}
        carried = list[dict[str, Any]]()
        for message in map(_Message.read, saved["messages"]):
            worker = message.contribution.worker
            if worker not in taken:  # others send their contributions again
                name = worker if "." in worker else f"{worker}.{saved['run'][:8]}"
                carried.append(replace(message, contribution=replace(message.contribution, worker=name)).content())
        late = {"round": saved["round"], "taken": taken, "carried": carried, "extra": content["extra"]}
        return {**self._common_state(), "late": late}

    def _continue(self, content: dict[str, Any], packed: dict[str, Any], round: int) -> None:
        """Continue this worker's own steps, from the checkpoint that it has saved in the middle of them."""
        state, saved = content["state"], content["late"]
        unpack({**state, "replicas": packed["replicas"]}, self.worker)
        for fragment, each in zip(self._fragments, saved["fragments"], strict=True):
            devices = [part.x.device for part in fragment.parts]
            starts, launched = (
                [x.to(device) for x, device in zip(found, devices, strict=bool(found))]
                for found in (each["starts"] or each["points"], each["launched"])
            )
            fragment.starts = fragment.points if saved["round"] == round and not each["starts"] else starts
            fragment.launched = launched
            fragment.codec_states = [
                {name: x.to(device) for name, x in found.items()}
                for found, device in zip(each["codec_states"], devices, strict=True)
            ]
            fragment.started, fragment.tokens = int(each["started"]), float(each["tokens"])
            fragment.first = state["step"]
        restore_random(self.worker, content["random"])
        self._set_step(state["step"])

    def _send_again(self, saved: dict[str, Any], taken: Iterable[int]) -> None:
        """Send the contributions of a checkpoint that no closing has taken."""
        own, before = self._others[self._name], set(taken)
        for message in sorted(map(_Message.read, saved["messages"]), key=lambda each: each.number):
            if message.contribution.worker == saved["name"] and message.number not in before:
                contribution = replace(message.contribution, worker=self._name)
                self._put(self._checked(replace(message, number=own.read, contribution=contribution)))

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self, leaving: Mapping[str, str]) -> bool:
        """Leave the run; the work of the unfinished round is sent first, and counts in the next round that closes."""
        left = self._steps_left()
        numbers = [n for n, each in enumerate(self._fragments) if each.tokens > 0 and left[n] >= self.options.delay]
        for number in numbers:
            self._send(number, leaves=number == numbers[-1])
        self._serve()
        self.close()
        return True

    def withdraw(self) -> None:
        """Leave a run in which this worker could not start, and take it off the model and the optimizer."""
        self._fleet.withdraw()
        if self._worker is not None:
            self._worker.undo.close()

    def close(self) -> None:
        """Leave: the others no longer wait for this worker."""
        self._membership.close()


class _Merge:
    """The weighted mean of changes; of some of their tensors, the mean norm along the mean direction.

    Args:
        like: a vector of the same form.
        turned: these tensors.
    """

    def __init__(self, like: Tensor, turned: Sequence[slice]) -> None:
        self._sum, self._turned = torch.zeros_like(like), turned
        self._norms = [like.new_zeros(()) for _ in turned]

    def add(self, change: Tensor, weight: float) -> None:
        """Add a change; the weights of all add up to one."""
        if not self._turned:
            self._sum.add_(change, alpha=weight)
            return
        factors = torch.full_like(self._sum, weight)
        for where, total in zip(self._turned, self._norms, strict=True):
            norm = change[where].norm()
            total.add_(norm, alpha=weight)
            factors[where].div_(norm.clamp_(min=_TINY))
        self._sum.addcmul_(change, factors)

    def result(self) -> Tensor:
        """Return the merge."""
        for where, total in zip(self._turned, self._norms, strict=True):
            self._sum[where].mul_(total / self._sum[where].norm().clamp_(min=_TINY))
        return self._sum


def _exact(x: Tensor) -> Tensor:
    """Return a copy in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _exact_bytes(x: Tensor) -> int:
    return x.numel() * max(x.element_size(), 4)


def _is_common(_: Replica, name: str) -> bool:
    """Return True if state is equal on all workers; a residual is its worker's own."""
    return residual_sizes(name, [0]) is None
