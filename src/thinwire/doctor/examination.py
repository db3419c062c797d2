"""One examination: all ranks look, meet, measure the links between them and a step; rank 0 collects."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.doctor.findings import Examination
from thinwire.doctor.host import Host, look
from thinwire.doctor.links import TOKEN_BYTES, Clock, Pair, measure
from thinwire.doctor.meeting import Meeting
from thinwire.doctor.speeds import StepTime, time_all_reduces
from thinwire.errors import CommError, CommTimeoutError

Tell = Callable[[str], None]
TimeStep = Callable[[float], StepTime]
"""Times a step within a budget of seconds."""


def _silence(_: str) -> None:
    """Tell nothing."""


@dataclass(frozen=True)
class Budget:
    """How long the parts of an examination may take, in seconds.

    Attributes:
        answer: how long to wait for one answer of another rank.
        links: for all links together.
        all_reduces: for all sizes together.
        steps: for the model's steps.
    """

    answer: float = 15.0
    links: float = 16.0
    all_reduces: float = 8.0
    steps: float = 6.0


def examine(
    meeting: Meeting,
    rendezvous: str,
    time_step: TimeStep,
    *,
    budget: Budget,
    tell: Tell = _silence,
    clock: Clock = time.time,
) -> Examination | None:
    """Measure together with the other ranks; every rank calls it.

    Args:
        meeting: of the ranks.
        rendezvous: its address or name, "" for one process alone.
        time_step: times a training step on this rank.
        budget: how long each part may take.
        tell: called on rank 0 with what is measured now.
        clock: of this machine.

    Returns:
        What was seen, on rank 0; None on the others.

    Raises:
        CommTimeoutError: rank 0 did not answer.
    """
    tell("machines")
    host = look(meeting.rank, rendezvous)
    meeting.put("host", host.to_json())
    if meeting.size == 1:
        tell("a training step")
        return Examination(1, rendezvous, {0: host}, steps={0: time_step(budget.steps)})
    token, present, addresses = _gather(meeting, budget)
    tell("links")
    pairs = measure(
        meeting,
        present,
        addresses,
        token=token,
        budget_seconds=budget.links,
        seconds=budget.answer,
        clock=clock,
    )
    meeting.put("pairs", [asdict(pair) for pair in pairs])
    silent: dict[str, list[int]] = {}
    every = _take(meeting, "pairs", present, budget.answer + budget.links, silent, "its links") or {}
    found = [Pair(**each) for rows in every.values() for each in rows]
    complete = len(present) == meeting.size and not any(pair.problem for pair in found) and not silent
    reduces, problem = _all_reduces(meeting, complete, budget, tell)
    tell("a training step")
    # All at once, as in training: cores and memory of a machine are shared.
    meeting.put("ready", 1)
    meeting.collect("ready", present, seconds=budget.answer)
    meeting.put("step", asdict(time_step(budget.steps)))
    steps = _take(meeting, "step", present, budget.answer + 4 * budget.steps, silent, "its training step")
    if steps is None:
        meeting.collect("end", [0], seconds=budget.answer + 4 * budget.steps)
        return None
    hosts = {rank: Host.from_json(each) for rank, each in meeting.collect("host", present, seconds=1.0).items()}
    meeting.put("end", 1)
    timed = {rank: StepTime(**each) for rank, each in steps.items()}
    return Examination(meeting.size, rendezvous, hosts, found, reduces, timed, silent, problem)


def _gather(meeting: Meeting, budget: Budget) -> tuple[bytes, list[int], dict[int, str]]:
    """Find out who came; rank 0 decides, draws the token for the links, and tells the others."""
    if meeting.rank == 0:
        hosts = meeting.collect("host", range(meeting.size), seconds=budget.answer)
        addresses = {rank: each["gloo_address"] for rank, each in hosts.items()}
        decision = {"token": secrets.token_hex(TOKEN_BYTES), "addresses": addresses}
        meeting.put("present", decision)
    found: dict[int, Any] = meeting.collect("present", [0], seconds=2 * budget.answer)
    if 0 not in found:
        raise CommTimeoutError(
            f"rank {meeting.rank}: the rendezvous answers, but rank 0 did not come within {2 * budget.answer:g} s; see "
            "whether it was started and what it printed"
        )
    told = {int(rank): address for rank, address in found[0]["addresses"].items()}
    if meeting.rank not in told:
        raise CommTimeoutError(
            f"rank {meeting.rank}: came too late; rank 0 had waited for {budget.answer:g} s and went on with "
            f"{len(told)} of {meeting.size} ranks; start all ranks at about the same time, or raise --timeout"
        )
    return bytes.fromhex(found[0]["token"]), sorted(told), told


def _take(
    meeting: Meeting, name: str, ranks: list[int], seconds: float, silent: dict[str, list[int]], phase: str
) -> dict[int, Any] | None:
    """On rank 0, what the ranks put; who does not answer is noted. None on the other ranks."""
    if meeting.rank != 0:
        return None
    found = meeting.collect(name, ranks, seconds=seconds)
    if absent := [rank for rank in ranks if rank not in found]:
        silent[phase] = absent
    return found


def _all_reduces(meeting: Meeting, complete: bool, budget: Budget, tell: Tell) -> tuple[dict[int, float], str]:
    """All-reduces by size, if rank 0 finds that all ranks can take part; and what went wrong."""
    if meeting.rank == 0:
        meeting.put("reduce", complete)
    go = meeting.collect("reduce", [0], seconds=2 * (budget.answer + budget.links))
    if not go.get(0):
        return {}, ""
    tell("all-reduces")
    try:
        with meeting.group(seconds=budget.answer) as comm:
            return time_all_reduces(comm, budget=budget.all_reduces), ""
    except CommError as error:
        return {}, str(error)
