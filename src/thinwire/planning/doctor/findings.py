# SPDX-License-Identifier: Apache-2.0
"""From measurements to sentences: what is wrong, with whom, and what to do about it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import median
from typing import Literal

from thinwire.planning.doctor.host import LOOPBACK_NET, Host
from thinwire.planning.doctor.links import Pair
from thinwire.planning.doctor.speeds import LoadedStep, StepTime
from thinwire.planning.units import rate

Severity = Literal["error", "warning", "note"]

SLOW_LINK = 0.6
"""A link is slow if it has less than this share of the median link's rate."""
SLOW_RANK = 1.25
"""A rank is slow if its step takes longer than this times the median."""
SLOWED_STEP = 1.1
"""Messages are told to disturb computing if they make a step longer than this times as long."""
RESTART_SECONDS = 0.05
"""A connection that needs so long after a pause until it fills its link is worth a note."""
FIRST_WINDOW = 14_480
"""Bytes that TCP sends in the first round trip of a connection."""
CLOCK_SECONDS = 0.5
FEWEST_FILES = 1024
FILES_PER_RANK = 16


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing.

    Attributes:
        kind: a short name, the same in all versions, for programs.
        severity: "error" will break training, "warning" slows it down or may break it, "note" is worth knowing.
        ranks: whom it concerns; empty for all.
        text: what was found.
        fix: what to do about it.
    """

    kind: str
    severity: Severity
    ranks: list[int]
    text: str
    fix: str


@dataclass(frozen=True)
class Examination:
    """All that was measured.

    Attributes:
        size: how many ranks were started.
        rendezvous: the address or name of the rendezvous, "" for one process alone.
        hosts: by rank, those that came.
        pairs: of ranks that were measured.
        all_reduces: seconds of an all-reduce by its bytes.
        steps: the model's step time by rank.
        silent: by phase, the ranks that came and did not answer in it.
        group_problem: why the process group could not be made or used; "" if it could.
        loaded: the model's step by rank, while messages pass through all links.
    """

    size: int
    rendezvous: str
    hosts: dict[int, Host]
    pairs: list[Pair] = field(default_factory=list[Pair])
    all_reduces: dict[int, float] = field(default_factory=dict[int, float])
    steps: dict[int, StepTime] = field(default_factory=dict[int, StepTime])
    silent: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    group_problem: str = ""
    loaded: dict[int, LoadedStep] = field(default_factory=dict[int, LoadedStep])

    @property
    def slowed(self) -> float:
        """How many times as long a step takes while messages pass, the mean over ranks; 1 where it was not measured."""
        both = [rank for rank in self.loaded if rank in self.steps]
        alone = sum(self.steps[rank].seconds for rank in both)
        return max(1.0, sum(self.loaded[rank].seconds for rank in both) / alone) if alone else 1.0

    @property
    def sharing(self) -> float:
        """Return how many times as long ranks compute as one alone would: threads for each core of the fullest machine.

        Machines with an accelerator do not count: ranks compute there.
        """
        hosts = [host for host in self.hosts.values() if not host.accelerator]
        return max([1.0, *(host.threads * host.local_ranks / host.cores for host in hosts)])


def findings_of(seen: Examination) -> list[Finding]:
    """Everything that is wrong, errors first."""
    found = itertools.chain(
        _missing(seen),
        _names(seen),
        _interfaces(seen),
        _connections(seen),
        _links(seen),
        _restarts(seen),
        _clocks(seen),
        _versions(seen),
        _threads(seen),
        _limits(seen),
        _step_times(seen),
        _contention(seen),
    )
    order: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def in_words(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 0, 1 and 4".

    Example:
        >>> in_words([3]), in_words([0, 1, 4])
        ('rank 3', 'ranks 0, 1 and 4')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def _missing(seen: Examination) -> Iterator[Finding]:
    absent = [rank for rank in range(seen.size) if rank not in seen.hosts]
    if absent:
        yield Finding(
            "missing-rank",
            "error",
            absent,
            f"{in_words(absent)} of {seen.size} did not come to the rendezvous at {seen.rendezvous}",
            "see whether the process was started and what it printed. Check --nnodes and --node-rank, the address of "
            "the rendezvous as that machine sees it, and its firewall",
        )
    for phase, ranks in seen.silent.items():
        if ranks := [rank for rank in ranks if rank not in absent]:
            yield Finding(
                "silent-rank",
                "error",
                ranks,
                f"{in_words(ranks)} came, but did not answer while {phase} was measured",
                "look at what that process prints, and whether it is suspended or out of memory",
            )


def _several_machines(seen: Examination) -> bool:
    return len({host.name for host in seen.hosts.values()}) > 1 or any(
        host.route_address and not host.route_address.startswith(LOOPBACK_NET) for host in seen.hosts.values()
    )


def _names(seen: Examination) -> Iterator[Finding]:
    for rank, host in seen.hosts.items():
        if host.asked_interface or not _several_machines(seen):
            continue
        better = host.interface_of(host.route_address)
        use = better.name if better else "the one that has the route to the other machines"
        fix = f"set GLOO_SOCKET_IFNAME={use} on this machine, or correct its line in /etc/hosts"
        if any(address.startswith(LOOPBACK_NET) for address in host.name_addresses):
            yield Finding(
                "name-is-loopback",
                "error",
                [rank],
                f"rank {rank}: its own name {host.name!r} resolves to {host.name_addresses[0]}, which reaches only the "
                "machine itself; Gloo tells the others to connect there",
                fix,
            )
        elif not host.name_addresses:
            yield Finding(
                "name-unknown",
                "warning",
                [rank],
                f"rank {rank}: its own name {host.name!r} does not resolve, so Gloo falls back to the loopback",
                fix,
            )


def _interfaces(seen: Examination) -> Iterator[Finding]:
    if not _several_machines(seen):
        return
    for rank, host in seen.hosts.items():
        asked, used = host.asked_interface, host.interface_of(host.gloo_address)
        better = host.interface_of(host.route_address)
        if not asked:
            continue
        names = ", ".join(each.name for each in host.interfaces) or "none"
        use = f"; {better.name} has the route to the rendezvous" if better else ""
        if used is None:
            text = f"rank {rank}: GLOO_SOCKET_IFNAME={asked}, but no such interface is up (up are: {names})"
        elif used.loopback:
            text = f"rank {rank}: GLOO_SOCKET_IFNAME={asked} is the loopback, which reaches only the machine itself"
        elif better is not None and better.name != used.name:
            text = f"rank {rank}: GLOO_SOCKET_IFNAME={asked} is not the interface with the route to the others"
            yield Finding("wrong-interface", "warning", [rank], text + use, f"set it to {better.name}, or check routes")
            continue
        else:
            continue
        fix = f"set GLOO_SOCKET_IFNAME={better.name}" if better else "set it to an interface that reaches the others"
        yield Finding("wrong-interface", "error", [rank], text + use, fix)


def _connections(seen: Examination) -> Iterator[Finding]:
    failed = [pair for pair in seen.pairs if pair.problem]
    # A rank that none can reach is one finding, not one for each of the others.
    for rank in sorted(seen.hosts):
        mine = [pair for pair in failed if rank in (pair.a, pair.b) and not pair.connected]
        if len(mine) > 1 and len(mine) == len(seen.hosts) - 1:
            failed = [pair for pair in failed if pair not in mine]
            yield Finding(
                "unreachable",
                "error",
                [rank],
                f"rank {rank} has no connection to any other rank ({mine[0].problem})",
                "open the TCP ports between the machines: Gloo listens on ports that the system chooses; check that "
                "the interface is the right one, and that the address is not behind NAT",
            )
    for pair in failed:
        if pair.connected:
            yield Finding(
                "no-answer",
                "error",
                [pair.a, pair.b],
                f"rank {pair.a} connected to rank {pair.b}, and then: {pair.problem}",
                "raise --timeout if this link has less than some hundred kbit/s; see whether the process is suspended, "
                "and whether something on the way, such as a VPN, drops large packets (lower the interfaces' MTU)",
            )
            continue
        yield Finding(
            "blocked-port",
            "error",
            [pair.a, pair.b],
            f"rank {pair.a} cannot connect to rank {pair.b}: {pair.problem}",
            "open the TCP ports between these two machines (Gloo's are chosen by the system, from "
            "/proc/sys/net/ipv4/ip_local_port_range); check NAT and routes",
        )
    if seen.group_problem and not failed and not any(pair.problem for pair in seen.pairs):
        yield Finding(
            "no-group",
            "error",
            [],
            f"links work, but Gloo could not: {seen.group_problem}",
            "check GLOO_SOCKET_IFNAME on every machine, and that all have the same versions",
        )


def _links(seen: Examination) -> Iterator[Finding]:
    good = [pair for pair in seen.pairs if not pair.problem]
    if not good:
        return
    usual = median(pair.rate for pair in good)
    fast, best = rates_of(good)
    ranks = sorted(best)
    slow = [rank for rank in ranks if best[rank] < SLOW_LINK * fast]
    if len(ranks) == 2 or len(slow) == len(ranks):
        slow = []
    for rank in slow:
        yield Finding(
            "slow-link",
            "warning",
            [rank],
            f"rank {rank}'s link carries {rate(best[rank])} where the others' have {rate(fast)}: a "
            "ring is as fast as its slowest link",
            "look at its cable, its switch port, its VPN and its Wi-Fi; or leave the rank out",
        )
    for pair in good:
        if pair.rate < SLOW_LINK * fast and not {pair.a, pair.b} & set(slow) and len(ranks) > 2:
            yield Finding(
                "slow-pair",
                "warning",
                [pair.a, pair.b],
                f"between ranks {pair.a} and {pair.b} {rate(pair.rate)} where others have {rate(fast)}",
                "look at the path between these two: another site, a VPN, a shared uplink",
            )
    one, four = median(pair.there for pair in good), median(pair.several for pair in good)
    if four > 1.5 * one:
        trip = median(pair.seconds_per_round_trip for pair in good)
        yield Finding(
            "one-stream",
            "note",
            [],
            f"one connection carries {rate(one)}, four together {rate(four)} (round trip "
            f"{1e3 * trip:.3g} ms): one cannot fill the link",
            "raise net.ipv4.tcp_rmem and tcp_wmem to the rate times the round trip, or use bbr as congestion control",
        )
    both = median(pair.both for pair in good)
    if both < 0.6 * usual:
        yield Finding(
            "half-duplex",
            "note",
            [],
            f"while both directions send each has {rate(both)}, alone {rate(usual)}: the link shares "
            "its rate between them, as Wi-Fi does, or a processor is the limit",
            "count on the smaller rate: an all-reduce sends and receives at once",
        )


def _restarts(seen: Examination) -> Iterator[Finding]:
    ranks = [rank for rank, host in seen.hosts.items() if host.restarts_slowly]
    good = [pair for pair in seen.pairs if not pair.problem]
    if not ranks or not good:
        return
    far = max(good, key=lambda pair: pair.seconds_per_round_trip)
    trip = far.seconds_per_round_trip
    # What is under way doubles in each round trip, until it fills the link.
    trips = log2(max(1.0, far.rate * trip / 8 / FIRST_WINDOW))
    if trips * trip < RESTART_SECONDS:
        return
    yield Finding(
        "slow-start",
        "note",
        ranks,
        f"{in_words(ranks)}: after a pause a connection begins slowly again, and between ranks {far.a} and {far.b} it "
        f"takes about {trips:.0f} round trips of {1e3 * trip:.3g} ms until it carries {rate(far.rate)}: strategies "
        "that send once a period pause before every message",
        "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every machine, before training starts",
    )


def _clocks(seen: Examination) -> Iterator[Finding]:
    # By how much each clock is ahead of the lowest rank's, as far as pairs with it were measured.
    first = min(seen.hosts, default=0)
    ahead = {first: 0.0}
    for pair in seen.pairs:
        if not pair.problem and pair.a == first:
            ahead[pair.b] = pair.clock_offset
    middle = median(ahead.values())
    for rank, offset in ahead.items():
        off = offset - middle if len(ahead) > 2 else offset
        if abs(off) > CLOCK_SECONDS:
            yield Finding(
                "clock",
                "warning",
                [rank],
                f"rank {rank}'s clock is {abs(off):.3g} s {'ahead of' if off > 0 else 'behind'} the others'",
                "synchronise it (chrony, systemd-timesyncd): logs and timelines of ranks do not fit together",
            )


def _versions(seen: Examination) -> Iterator[Finding]:
    for name in ("thinwire", "torch", "python", "numpy"):
        # Without the build: machines with different accelerators may train together.
        versions = {rank: host.versions.get(name, "none").split("+")[0] for rank, host in seen.hosts.items()}
        if name == "python":
            versions = {rank: ".".join(version.split(".")[:2]) for rank, version in versions.items()}
        if len(set(versions.values())) > 1:
            usual = max(sorted(set(versions.values())), key=list(versions.values()).count)
            odd = [rank for rank, version in versions.items() if version != usual]
            theirs = ", ".join(sorted({versions[rank] for rank in odd}))
            yield Finding(
                "versions",
                "error" if name in ("thinwire", "torch") else "warning",
                odd,
                f"{in_words(odd)}: {name} {theirs}, the others have {usual}",
                f"install the same {name} everywhere",
            )


def _threads(seen: Examination) -> Iterator[Finding]:
    # Ranks of one machine have the same trouble.
    alike: dict[tuple[int, int, int], list[int]] = {}
    for rank, host in seen.hosts.items():
        alike.setdefault((host.threads, host.local_ranks, host.cores), []).append(rank)
    for (threads, local, cores), ranks in alike.items():
        if threads * local <= cores:
            continue
        if threads == 1:
            text = f"{local} ranks on a machine share {cores} cores"
            fix = "start fewer ranks there: each needs a core of its own"
        else:
            text = f"{threads} threads of computation for each of {local} ranks on the machine, and {cores} cores"
            text = f"{threads} threads of computation on {cores} cores" if local == 1 else text
            fix = f"set OMP_NUM_THREADS={max(1, cores // local)}; threads that wait for a core hold up the others"
        yield Finding("threads", "warning", ranks, f"{in_words(ranks)}: {text}", fix)
    counts = {rank: host.threads for rank, host in seen.hosts.items()}
    if len(set(counts.values())) > 1 and not any(host.accelerator for host in seen.hosts.values()):
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        yield Finding(
            "threads-differ",
            "note",
            [],
            f"ranks compute with different numbers of threads ({listed})",
            "set OMP_NUM_THREADS alike where the machines are alike: all wait for the slowest",
        )


def _limits(seen: Examination) -> Iterator[Finding]:
    for rank, host in seen.hosts.items():
        least = max(FEWEST_FILES, FILES_PER_RANK * seen.size)
        if host.open_files < least:
            yield Finding(
                "open-files",
                "warning",
                [rank],
                f"rank {rank}: the process may open {host.open_files} files and connections; {seen.size} ranks with "
                f"data loaders need {least}",
                f"ulimit -n {max(4096, least)} before the start (LimitNOFILE= under systemd)",
            )


def _step_times(seen: Examination) -> Iterator[Finding]:
    if len(seen.steps) < 2:
        return
    usual = median(step.seconds for step in seen.steps.values())
    if len(seen.steps) == 2:
        usual = min(step.seconds for step in seen.steps.values())
    for rank, step in seen.steps.items():
        if step.seconds > SLOW_RANK * usual:
            host = seen.hosts.get(rank)
            load = f" (its machine's load is {host.load:.1f} on {host.cores} cores)" if host else ""
            yield Finding(
                "slow-rank",
                "warning",
                [rank],
                f"rank {rank}'s step takes {1e3 * step.seconds:.3g} ms where others need {1e3 * usual:.3g} ms{load}: "
                "all wait for it in every synchronous step",
                "look for other processes, heat and power settings there; or use a strategy that does not wait: "
                "BackupWorkers, or local steps by speed",
            )


def _contention(seen: Examination) -> Iterator[Finding]:
    if seen.slowed <= SLOWED_STEP:
        return
    alone = median(step.seconds for step in seen.steps.values())
    yield Finding(
        "contention",
        "note",
        [],
        f"a training step takes {seen.slowed:.2f} times as long while messages pass through the links "
        f"({1e3 * alone:.3g} ms without them): they need the processors that compute",
        "leave a core free of computation (OMP_NUM_THREADS one lower); send less: overlapping hides waits, not this",
    )


def rates_of(pairs: Sequence[Pair]) -> tuple[float, dict[int, float]]:
    """The usual rate of a rank's link, and each rank's, which is that of its best pair: others may be to blame."""
    ranks = sorted({rank for pair in pairs for rank in (pair.a, pair.b)})
    best = {rank: max(pair.rate for pair in pairs if rank in (pair.a, pair.b)) for rank in ranks}
    return max(median(pair.rate for pair in pairs), median(best.values())), best
