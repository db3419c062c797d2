# SPDX-License-Identifier: Apache-2.0
"""All ranks of a quorum as state machines, and a network between them: no threads, no clock, no waiting.

What happens next is chosen by whoever calls `World.do`: which rank receives, computes, stops, dies or
notices that another one has, which message arrives a second time, and how much time passes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.coordinator import Coordinator
from thinwire.asynchronous.quorum.member import Action, Member, Send
from thinwire.asynchronous.quorum.messages import ControlMessage, GradientChunk, Kind, StateChunk
from thinwire.asynchronous.quorum.reductions import Partition
from thinwire.asynchronous.quorum.rules import QuorumRule
from thinwire.asynchronous.quorum.state_transfer import split_state

NUMEL = 5
CHUNK_BYTES = 40
_TROUBLES = 6  # every so many moves there may be trouble
Payload = ControlMessage | GradientChunk | StateChunk
Move = partial[None]


def gradient_of(rank: int, step: int) -> Tensor:
    """Powers of two, so that a sum of gradients tells whose they are, and that each is in it once."""
    return torch.full((NUMEL,), 2.0**rank, dtype=torch.float64) * (1 + step)


def mean_of(members: tuple[int, ...], step: int) -> Tensor:
    return torch.stack([gradient_of(rank, step) for rank in members]).sum(0) / len(members)


@dataclass
class Rank:
    """What surrounds a member: its loop and its parameters.

    Attributes:
        member: the state machine.
        x: the sum of all means so far.
        log: the members of each step.
        phase: computing, waiting, updating its parameters, catching up, unpacking a state, or at the barrier.
        verdicts: of each step that it contributed to, whether its gradient has counted.
        gradient: what it updates its parameters with.
        taken: the state that it unpacks.
    """

    member: Member
    x: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))
    log: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    phase: str = "computing"
    verdicts: dict[int, bool] = field(default_factory=dict[int, bool])
    gradient: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))
    taken: tuple[int, Tensor] | None = None


class World:
    """The ranks of one run, until all have done `steps`.

    Args:
        rule: of the quorum.
        coordinator: the rank that decides, which does not die.
        steps: to be done.
    """

    def __init__(self, rule: QuorumRule, *, coordinator: int, steps: int) -> None:
        self.size, self.rule, self.steps, self.now = rule.size, rule, steps, 0.0
        partition = Partition(NUMEL, rule.least, torch.float64)
        self.ranks = [
            Rank(Member(rank, rule.size, rule.least, coordinator, partition, 0.01, self.now))
            for rank in range(rule.size)
        ]
        self.coordinator = coordinator
        self.ranks[coordinator].member.coordinator = Coordinator(rule)
        self.edges: dict[tuple[int, int], deque[Payload]] = defaultdict(deque[Payload])
        self.delivered: dict[int, list[tuple[int, Payload]]] = defaultdict(list[tuple[int, Payload]])
        self.commits: dict[int, set[tuple[int, tuple[int, ...]]]] = defaultdict(set[tuple[int, tuple[int, ...]]])
        self.stopped, self.dead = set[int](), set[int]()
        self.moves = Counter[str]()

    # -- what may happen next ----------------------------------------------------------------------------------------

    def do(self, choice: int) -> None:
        """One thing that can happen now, as a number chooses; most often one that lets the run progress."""
        kind, choice = choice % _TROUBLES, choice // _TROUBLES
        moves = self.progress() if kind else [*self.progress(), *self.trouble()]
        name, move = moves[choice % len(moves)]
        self.moves[name] += 1
        move()

    def has_ended(self) -> bool:
        """Whether all that live are through, and have read their messages."""
        living = [number for number in range(self.size) if number not in self.dead]
        arrived = not any(messages for (_, dst), messages in self.edges.items() if dst in living)
        return arrived and all(self.ranks[number].phase == "done" for number in living)

    def progress(self) -> list[tuple[str, Move]]:
        """What a run is made of: messages arrive, and ranks go on."""
        moves: list[tuple[str, Move]] = [("time", partial(self.pass_time, 0.3))]
        for number, rank in enumerate(self.ranks):
            if number in self.stopped | self.dead:
                continue
            moves += [
                ("deliver", partial(self.deliver, edge)) for edge in list(self.edges) if self._waits_at(edge, number)
            ]
            if rank.phase != "done":
                moves.append((rank.phase, partial(self.go_on, number)))
            moves += [("notice", partial(self.notice, number, lost)) for lost in self.dead - rank.member.gone]
        return moves

    def trouble(self) -> list[tuple[str, Move]]:
        """What disturbs a run; no more ranks stop and die than each step can go without."""
        moves: list[tuple[str, Move]] = []
        for rank in set(self.delivered) - self.stopped - self.dead:
            old = self.delivered[rank]
            src, payload = old[self.moves.total() % len(old)]
            moves.append(("duplicate", partial(self.receive, src, rank, payload)))
        spare = self.size - self.rule.least - len(self.stopped | self.dead)
        # A step of which all members die is lost.
        mortal = len(self.dead) + 1 < self.rule.least
        for rank in range(self.size):
            if rank in self.stopped:
                moves.append(("continue", partial(self.stopped.remove, rank)))
            elif spare > 0 and rank not in self.dead:
                moves.append(("stop", partial(self.stopped.add, rank)))
                moves += [("die", partial(self.dead.add, rank))] * (mortal and rank != self.coordinator)
        return moves

    def _waits_at(self, edge: tuple[int, int], rank: int) -> bool:
        return edge[1] == rank and bool(self.edges[edge])

    # -- the network -------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for number, rank in enumerate(self.ranks):
            if rank.member.coordinator is not None and number not in self.stopped | self.dead:  # its timer
                self.perform(number, rank.member.time_passed(self.now))

    def notice(self, rank: int, lost: int) -> None:
        """A rank learns that another one is lost."""
        self.perform(rank, self.ranks[rank].member.lose([lost], self.now))

    def deliver(self, edge: tuple[int, int]) -> None:
        payload = self.edges[edge].popleft()
        self.delivered[edge[1]].append((edge[0], payload))
        self.receive(*edge, payload)

    def receive(self, src: int, dst: int, payload: Payload) -> None:
        member = self.ranks[dst].member
        if isinstance(payload, ControlMessage):
            self.perform(dst, member.receive(src, payload, self.now))
        elif isinstance(payload, GradientChunk):
            member.receive_gradient(src, payload)
        else:
            member.receive_state(src, payload)

    def perform(self, rank: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.message.kind in (Kind.START, Kind.COMMIT):
                    assert len(set(action.message.members)) >= self.rule.least
                if action.message.kind is Kind.COMMIT:
                    self.commits[action.message.step].add((action.message.attempt, action.message.members))
                self.edges[rank, action.dst].append(action.message)
            else:
                self.edges[rank, action.dst].extend(self.state_of(rank))

    def state_of(self, rank: int) -> list[StateChunk]:
        sender = self.ranks[rank]
        assert len(sender.log) == sender.member.idle_at, "no state leaves while a step is being taken"
        content = json.dumps([sender.log, sender.x.tolist()]).encode()
        return split_state(len(sender.log), torch.frombuffer(bytearray(content), dtype=torch.uint8), CHUNK_BYTES * 100)

    # -- one rank ----------------------------------------------------------------------------------------------------

    def go_on(self, number: int) -> None:
        """What the training thread does next."""
        rank, step = self.ranks[number], len(self.ranks[number].log)
        member = rank.member
        if rank.phase == "computing" and step == self.steps:
            self.perform(number, member.enter_barrier(step, self.now))
            rank.phase = "done"
        elif rank.phase == "computing":
            self.perform(number, member.contribute(step, gradient_of(number, step), 7, self.now, self.now))
            rank.phase = "waiting"
        elif rank.phase == "waiting":
            self._wait(number, rank, step)
        elif rank.phase == "updating":
            self._update(number, rank)
        elif rank.phase == "unpacking":
            self._unpack(number, rank)
        elif not member.has_state:
            self.perform(number, member.time_passed(self.now))
        else:
            rank.taken = member.take_state()
            rank.phase = "unpacking"

    def _wait(self, number: int, rank: Rank, step: int) -> None:
        member, current = rank.member, rank.member.round
        assert current is not None
        if current.has_work:
            reduction = current.reduction
            assert reduction is not None
            for dst, chunk in member.advance(current):
                # The wire carries bytes.
                self.edges[number, dst].append(chunk._replace(content=chunk.content.clone().view(torch.uint8)))
            self.perform(number, member.acknowledge(reduction, self.now))
        elif current.outcome is None:
            self.perform(number, member.time_passed(self.now))
        else:
            rank.gradient, rank.phase = gradient_of(number, step), "updating"
            if member.is_member(member.begin_update(current, self.now)):
                member.write_mean_(current, rank.gradient)

    def _update(self, number: int, rank: Rank) -> None:
        current, step = rank.member.round, len(rank.log)
        assert current is not None
        assert current.outcome is not None
        if not rank.member.is_member(current.outcome):
            rank.phase = "catching up"
            self.perform(number, rank.member.recover(self.now))
            return
        members = current.outcome.members
        assert torch.equal(rank.gradient, mean_of(members, step)), "each member's gradient counts once"
        rank.verdicts[step] = number in members
        rank.x += rank.gradient
        rank.log.append(members)
        self._end_step(number, rank)

    def _unpack(self, number: int, rank: Rank) -> None:
        assert rank.taken is not None
        reached, data = rank.taken
        before, step = rank.log, len(rank.log)
        log, x = json.loads(data.numpy().tobytes())
        rank.log, rank.x = [tuple(each) for each in log], torch.tensor(x, dtype=torch.float64)
        assert reached == len(rank.log), "the step that was told is that of the state"
        assert rank.log[:step] == before, "what this rank has used stays decided"
        if reached > step:
            rank.verdicts[step] = number in rank.log[step]
        self._end_step(number, rank)

    def _end_step(self, number: int, rank: Rank) -> None:
        rank.phase = "computing"
        self.perform(number, rank.member.end_step(len(rank.log), self.now))
