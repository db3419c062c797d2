# SPDX-License-Identifier: Apache-2.0
"""One examination: all ranks look, meet, measure the links between them and a step; rank 0 collects."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.errors import CommError, CommTimeoutError, ConfigError
from thinwire.planning.doctor.findings import Examination
from thinwire.planning.doctor.host import Host, look
from thinwire.planning.doctor.links import TOKEN_BYTES, Pair, measure
from thinwire.planning.doctor.rendezvous import Rendezvous
from thinwire.planning.doctor.speeds import LoadedStep, StepTime, TimeStep, time_loaded_step
from thinwire.planning.plan.all_reduces import time_all_reduces

Tell = Callable[[str], None]

# Seconds for all links, for all sizes of all-reduces, and for the model's steps; as much again for steps with messages.
_LINKS, _ALL_REDUCES, _STEPS = 16.0, 8.0, 6.0
_SLOWEST_STEPS = 5 * _STEPS  # of a slow rank


def examine(
    peers: Rendezvous,
    rendezvous: str,
    time_step: TimeStep,
    *,
    answer: float,
    tell: Tell = lambda _: None,
) -> Examination | None:
    """Measure together with the other ranks; every rank calls it.

    Args:
        peers: of the ranks.
        rendezvous: its address or name, "" for one process alone.
        time_step: times a training step on this rank.
        answer: seconds to wait for one answer of another rank.
        tell: called on rank 0 with what is measured now.

    Returns:
        The findings on rank 0; None on the others.

    Raises:
        CommTimeoutError: rank 0 did not answer.
    """
    tell("machines")
    host = look(peers.rank, rendezvous)
    peers.put("host", host.to_json())
    if peers.size == 1:
        tell("a training step")
        return Examination(1, rendezvous, {0: host}, steps={0: time_step(_STEPS)})
    token, present, addresses = _gather(peers, answer)
    tell("links")
    pairs = measure(peers, present, addresses, token=token, budget_seconds=_LINKS, seconds=answer)
    peers.put("pairs", [asdict(pair) for pair in pairs])
    silent: dict[str, list[int]] = {}
    every = _take(peers, "pairs", present, answer + _LINKS, silent, "its links") or {}
    found = [Pair(**each) for rows in every.values() for each in rows]
    complete = len(present) == peers.size and not any(pair.problem for pair in found) and not silent
    reduces, loaded, problem = _in_a_group(peers, complete, time_step, answer, tell)
    peers.put("loaded", None if loaded is None else asdict(loaded))
    tell("a training step")
    # All at once, as in training: cores and memory of a machine are shared.
    peers.put("ready", 1)
    peers.collect("ready", present, seconds=answer + _SLOWEST_STEPS)
    peers.put("step", asdict(time_step(_STEPS)))
    steps = _take(peers, "step", present, answer + _SLOWEST_STEPS, silent, "its training step")
    if steps is None:
        # Rank 0 hosts the store, and has ended where it cannot be reached.
        with suppress(RuntimeError):
            peers.collect("end", [0], seconds=answer + _SLOWEST_STEPS)
        return None
    hosts = {rank: Host.from_json(each) for rank, each in peers.collect("host", present, seconds=1.0).items()}
    amid = {rank: LoadedStep(**each) for rank, each in peers.collect("loaded", present, seconds=1.0).items() if each}
    peers.put("end", 1)
    timed = {rank: StepTime(**each) for rank, each in steps.items()}
    return Examination(peers.size, rendezvous, hosts, found, reduces, timed, silent, problem, amid)


def _gather(peers: Rendezvous, answer: float) -> tuple[bytes, list[int], dict[int, str]]:
    """Find out which ranks came; rank 0 decides, draws the token for the links, and informs the others."""
    if peers.rank == 0:
        hosts = peers.collect("host", range(peers.size), seconds=answer)
        addresses = {rank: each["gloo_address"] for rank, each in hosts.items()}
        decision = {"token": secrets.token_hex(TOKEN_BYTES), "addresses": addresses}
        peers.put("present", decision)
    found: dict[int, Any] = peers.collect("present", [0], seconds=2 * answer)
    if 0 not in found:
        raise CommTimeoutError(
            f"rank {peers.rank}: the rendezvous answers, but rank 0 did not come within {2 * answer:g} s. See "
            "whether it was started and what it printed"
        )
    told = {int(rank): address for rank, address in found[0]["addresses"].items()}
    if peers.rank not in told:
        raise CommTimeoutError(
            f"rank {peers.rank}: came too late. Rank 0 had waited for {answer:g} s and continued with "
            f"{len(told)} of {peers.size} ranks. Start all ranks at about the same time, or raise --timeout"
        )
    return bytes.fromhex(found[0]["token"]), sorted(told), told


def _take(
    peers: Rendezvous, name: str, ranks: list[int], seconds: float, silent: dict[str, list[int]], phase: str
) -> dict[int, Any] | None:
    """On rank 0, what the ranks put; who does not answer is noted. None on the other ranks."""
    if peers.rank != 0:
        return None
    found = peers.collect(name, ranks, seconds=seconds)
    if absent := [rank for rank in ranks if rank not in found]:
        silent[phase] = absent
    return found


def _in_a_group(
    peers: Rendezvous, complete: bool, time_step: TimeStep, answer: float, tell: Tell
) -> tuple[dict[int, float], LoadedStep | None, str]:
    """Time all-reduces by size, and a step with messages, if rank 0 finds that all can take part; with the problem."""
    if peers.rank == 0:
        peers.put("reduce", complete)
    go = peers.collect("reduce", [0], seconds=2 * (answer + _LINKS))
    reduces: dict[int, float] = {}
    if not go.get(0):
        return reduces, None, ""
    try:
        with peers.group(seconds=answer) as comm:
            tell("all-reduces")
            reduces = time_all_reduces(comm, budget=_ALL_REDUCES)
            tell("a training step while messages pass")
            return reduces, time_loaded_step(comm, time_step, budget=_STEPS), ""
    except CommError as error:
        return reduces, None, str(error)


def read_examination(path: Path) -> Examination:
    """Return all of an examination but what went wrong.

    Raises:
        ConfigError: it cannot be read, or is not what the doctor writes.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--doctor {path}: cannot be read ({reason}). Write it with thinwire doctor --out {path}"
        ) from None
    try:
        return _examination(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is not what thinwire doctor --out writes ({type(error).__name__}: {error}). Write it again with "
            "this version"
        ) from None


def _examination(content: dict[str, Any]) -> Examination:
    return Examination(
        size=int(content["size"]),
        rendezvous=str(content["rendezvous"]),
        hosts={int(rank): Host.from_json(each) for rank, each in content["hosts"].items()},
        pairs=[Pair(**each) for each in content["pairs"]],
        all_reduces={int(size): float(taken) for size, taken in content["all_reduces"].items()},
        steps={int(rank): StepTime(**each) for rank, each in content["steps"].items()},
        loaded={int(rank): LoadedStep(**each) for rank, each in content["loaded"].items()},
    )
