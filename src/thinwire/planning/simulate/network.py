# SPDX-License-Identifier: Apache-2.0
"""The network and the workers of a simulation: rates, latencies, racks, slow workers, and what goes wrong.

A network is read from a TOML file, whose form is described in `docs/reference/network-file.md`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, cast

from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.planning.quantities import parse_rate
from thinwire.planning.simulate.durations import Duration, parse_distribution, seconds

ALGORITHMS = ("ring", "gloo", "tree")

_LIMIT = 2**31
_RANK_DIGITS = 6  # a longer range of ranks would fill the memory


@dataclass(frozen=True)
class Racks:
    """Workers that stand together, in the order of ranks.

    Attributes:
        size: workers of a rack.
        bits_per_second: rate of a rack's uplink in each direction, shared by its workers; infinite unless given.
        latency: added to what goes from one rack to another, in seconds.
    """

    size: int
    bits_per_second: float = inf
    latency: float = 0.0


@dataclass(frozen=True)
class Pair:
    """A link between two workers that differs from the others, in both directions.

    Attributes:
        between: the two ranks.
        bits_per_second: its rate; that of the slower interface still holds.
        latency: instead of the network's, one way, in seconds; None for the network's.
    """

    between: tuple[int, int]
    bits_per_second: float = inf
    latency: float | None = None


@dataclass(frozen=True)
class Special:
    """Workers that differ from the others.

    Attributes:
        ranks: which.
        bits_per_second: of their interfaces; None for the network's.
        latency: added to each of their messages, in seconds.
        slowdown: how many times as long they compute.
    """

    ranks: tuple[int, ...]
    bits_per_second: float | None = None
    latency: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True)
class Death:
    """The end of a worker's process, or of its machine.

    Attributes:
        rank: which.
        at: when, in seconds; None where `step` says it.
        step: in which training step: at its first call in it.
        silent: nothing closes its connections, as when a machine loses its power: others find out by their timeouts.
    """

    rank: int
    at: float | None = None
    step: int | None = None
    silent: bool = False


@dataclass(frozen=True)
class Pause:
    """A worker that stands still for a while, and does not receive either.

    Attributes:
        rank: which.
        at: from when on, in seconds.
        seconds: how long.
    """

    rank: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Network:
    """The network and the workers of a simulation.

    Attributes:
        bits_per_second: of each worker's interface, in each direction, shared by all its messages.
        latency: one way between two workers, in seconds.
        compute: how long a worker computes in each step; a simulation's own `compute_time` goes before it. No time
            unless given.
        racks: which workers stand together; None where all are at one switch.
        specials: workers that differ.
        pairs: links that differ.
        delayed: share of the messages to single ranks that are delayed, from 0 to 1.
        delay: by how much.
        overtaking: whether messages on the same link may overtake one that is delayed.
        deaths: workers that end.
        pauses: workers that stand still.
        contention: the share of its computation that a worker loses while its interface sends and receives, since
            messages need the processor too; half as much while it does one of them. 0, unless given, is for workers
            with a core or an accelerator to spare; `thinwire doctor` measures it.
        per_call: seconds that each collective call takes before its first byte is sent.
        all_reduce: the algorithm: "ring"; "gloo" for rings that send segments of at most 1 MiB, two at a time, once the
            receiver expects them; "tree" for NCCL's double binary tree.
        per_segment: seconds that Gloo's ring needs for each segment besides its transfer.
        window: bytes that a TCP connection has in flight at most; its rate is at most a window per round trip.
        slow_start: whether a connection that was idle for 0.2 s starts again at ten TCP segments per round trip.
        one_stream: whether a collective call begins when the one before it on the same comm has ended, as with NCCL;
            otherwise it begins when the interface is free, and latencies of consecutive calls overlap.
        spread: deviation of the logarithm of a worker's computing time, drawn for each step.
        device: on which predictions time what a strategy computes itself, such as its codec; "" for the CPU.
        magnified: how many bytes each byte of a message stands for, where tensors are simulated smaller than they are.

    Raises:
        ConfigError: a number is out of its range.

    Example:
        >>> from thinwire.planning.simulate import Network
        >>> network = Network(bits_per_second=1e8, latency=0.01)
        >>> network.bits_per_second
        100000000.0
    """

    bits_per_second: float = 1e9
    latency: float = 1e-4
    compute: Duration | None = None
    racks: Racks | None = None
    specials: tuple[Special, ...] = ()
    pairs: tuple[Pair, ...] = ()
    delayed: float = 0.0
    delay: Duration = field(default_factory=Duration)
    overtaking: bool = False
    deaths: tuple[Death, ...] = ()
    pauses: tuple[Pause, ...] = ()
    contention: float = 0.0
    per_call: float = 0.0
    all_reduce: str = "ring"
    per_segment: float = 0.0
    window: float = inf
    slow_start: bool = False
    one_stream: bool = False
    spread: float = 0.0
    device: str = ""
    magnified: float = 1.0

    def __post_init__(self) -> None:
        if self.all_reduce not in ALGORITHMS:
            raise ConfigError(f"all_reduce={self.all_reduce!r}: must be one of {', '.join(ALGORITHMS)}")
        if not self.window > 0:
            raise ConfigError(f"window={self.window}: must be a positive number of bytes, such as 4194304")
        if self.racks is not None:
            check_range("racks.size", self.racks.size, "1..", "4 workers share an uplink")
        for rate in [*self._rates, inf if self.racks is None else self.racks.bits_per_second]:
            if not rate > 0:
                raise ConfigError(f"bits_per_second={rate}: must be positive, such as 1e9")
        times = [self.latency, *(each.latency for each in self.specials), *(each.latency for each in self.pairs)]
        times += [each.seconds for each in self.pauses] + [each.at for each in [*self.pauses, *self.deaths]]
        times += [0.0 if self.racks is None else self.racks.latency, self.per_call, self.per_segment]
        for time in times:
            check_range("seconds", time, "[0, inf)", "0.01 is 10 ms")
        check_range("magnified", self.magnified, "(0, inf)", "1 is usual")
        check_range("spread", self.spread, "[0, inf)", "0.05 is usual")
        check_range("delayed", self.delayed, "[0, 1]", "It is a share of the messages")
        check_range("contention", self.contention, "[0, 1)", "It is the share of computation that messages take")
        for special in self.specials:
            check_range("slowdown", special.slowdown, "(0, inf)", "4 is four times as slow")
        for death in self.deaths:
            if (death.at is None) == (death.step is None):
                raise ConfigError(f"the death of rank {death.rank}: give either `at` or `step`")

    @property
    def _rates(self) -> list[float]:
        """Of interfaces and of links that differ."""
        rates = [self.bits_per_second, *(each.bits_per_second for each in self.pairs)]
        return rates + [each.bits_per_second for each in self.specials if each.bits_per_second is not None]

    @property
    def slowest(self) -> float:
        """The lowest rate at which a worker sends, in bits per second; of a rack's uplink its share."""
        return min([*self._rates, *([] if self.racks is None else [self.racks.bits_per_second / self.racks.size])])

    def slowdowns(self, workers: int) -> list[float]:
        """Return how many times as long each worker computes as the usual one."""
        found = [1.0] * workers
        for special in self.specials:
            for rank in special.ranks:
                found[rank] *= special.slowdown
        return found

    def check(self, workers: int) -> None:
        """Refuse ranks that a simulation of so many workers does not have.

        Raises:
            ConfigError: with the rank.
        """
        ranks = [rank for each in self.specials for rank in each.ranks]
        ranks += [rank for each in self.pairs for rank in each.between]
        ranks += [each.rank for each in [*self.deaths, *self.pauses]]
        for rank in ranks:
            if not 0 <= rank < workers:
                raise ConfigError(
                    f"network: there is no rank {rank}. With {workers} workers they are 0 to {workers - 1}"
                )


# -- the file ----------------------------------------------------------------------------------------------------------

Table = Mapping[str, Any]
Reader = Callable[[Any, str], Any]


def load_network(path: str | Path, *, name: str | None = None) -> Network:
    """Read a network from a TOML file.

    Args:
        path: of the file.
        name: what errors call it; its path unless given.

    Raises:
        ConfigError: the file cannot be read, or a line in it makes no sense; the error names the entry.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from thinwire.planning.simulate import load_network
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "network.toml")
        ...     _ = file.write_text('network = {bandwidth = "100mbit", latency = "10ms"}')
        ...     load_network(file).latency
        0.01
    """
    name = str(path) if name is None else name
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}: cannot be read ({reason}). Give a network file in TOML") from error
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # also an integer of more digits than Python reads
        raise ConfigError(f"{name}: is not TOML: {error}") from error
    return read_network(table, name=name)


def read_network(table: Table, *, name: str = "network") -> Network:
    """Make a network of the entries of its file; `name` is the file's, for errors."""
    tables, lists = ("network", "racks", "compute", "messages"), ("workers", "links", "deaths", "pauses")
    top = _read(table, name, {**dict.fromkeys(tables, _table), **dict.fromkeys(lists, _tables)})
    network, messages, compute, racks = (
        _read(top.get(kind, {}), f"{name}: [{kind}]", readers)
        for kind, readers in (
            ("network", _NETWORK),
            ("messages", {"delayed": _number, "delay": _duration, "overtaking": _flag}),
            ("compute", {"time": _duration, "spread": _number, "device": _text}),
            ("racks", {"size": _whole, "bandwidth": _rate, "latency": _seconds}),
        )
    )
    if ("delay" in messages) != ("delayed" in messages):
        raise ConfigError(f"{name}: [messages]: one of delayed and delay alone delays no message. Give both")
    if "racks" in top and "size" not in racks:
        raise ConfigError(f"{name}: [racks]: size is missing. Add size = 8, the number of workers in a rack")
    try:
        return Network(
            **_renamed(network),
            compute=compute.get("time"),
            spread=compute.get("spread", 0.0),
            device=compute.get("device", ""),
            racks=Racks(**_renamed(racks)) if "racks" in top else None,
            specials=tuple(Special(**_renamed(each)) for each in _entries(top, name, "workers", _WORKER, ("ranks",))),
            pairs=tuple(Pair(**_renamed(each)) for each in _entries(top, name, "links", _LINK, ("between",))),
            deaths=tuple(Death(**each) for each in _entries(top, name, "deaths", _DEATH, ("rank",))),
            pauses=tuple(
                Pause(each["rank"], each["at"], each["for"])
                for each in _entries(top, name, "pauses", _PAUSE, ("rank", "at", "for"))
            ),
            **messages,
        )
    except ConfigError as error:
        raise error if str(error).startswith(name) else ConfigError(f"{name}: {error}") from None


def _renamed(found: dict[str, Any]) -> dict[str, Any]:
    return {"bits_per_second" if key == "bandwidth" else key: value for key, value in found.items()}


def _entries(
    top: Table, name: str, kind: str, readers: Mapping[str, Reader], needed: Sequence[str]
) -> list[dict[str, Any]]:
    return [
        _read(entry, f"{name}: [[{kind}]] number {place}", readers, needed)
        for place, entry in enumerate(top.get(kind, []), start=1)
    ]


def _read(table: Table, where: str, readers: Mapping[str, Reader], needed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the entries of a table, each read by its reader."""
    for key in table:
        if key not in readers:
            close = get_close_matches(key, readers, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"it may have {', '.join(readers)}"
            raise ConfigError(f"{where} has no entry {key!r}; {hint}")
    for key in needed:
        if key not in table:
            raise ConfigError(f"{where}: {key} is missing")
    return {key: readers[key](value, f"{where}, {key}") for key, value in table.items()}


def _table(value: Any, where: str) -> Table:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} = {value!r}: must be a table, [{where.rpartition(', ')[2]}]")
    return cast(Table, value)


def _tables(value: Any, where: str) -> list[Table]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast(list[object], value)):
        raise ConfigError(f"{where}: must be a list of tables, each under [[{where.rpartition(', ')[2]}]]")
    return cast(list[Table], value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f'{where} = {value!r}: must be text with a unit, such as "100mbit" or "10ms"')
    return value


def _rate(value: Any, where: str) -> float:
    return parse_rate(_text(value, where), argument=where)


def _seconds(value: Any, where: str) -> float:
    return seconds(_text(value, where), argument=where)


def _duration(value: Any, where: str) -> Duration:
    return parse_distribution(_text(value, where), argument=where)


def _brief(value: Any) -> str:
    """Return a value for an error; an integer of any length."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where} = {_brief(value)}: must be a whole number, not negative")
    if value >= _LIMIT:
        raise ConfigError(f"{where} = {_brief(value)}: must be less than {_LIMIT}")
    return value


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r}: must be a number")
    if not abs(value) < _LIMIT:
        raise ConfigError(f"{where} = {_brief(value)}: must be less than {_LIMIT}")
    return float(value)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r}: must be true or false")
    return value


def _ranks(value: Any, where: str) -> tuple[int, ...]:
    """Return a rank, a list of ranks, or text such as "0-15, 20"."""
    if isinstance(value, list):
        if not value:
            raise ConfigError(f'{where} = []: must name ranks, such as 3, [3, 7] or "0-15, 20"')
        return tuple(_whole(each, where) for each in cast(list[object], value))
    if not isinstance(value, str):
        return (_whole(value, where),)
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f'{where} = {value!r}: must name ranks, such as 3, [3, 7] or "0-15, 20"')
        # Lengths first: Python refuses to read integers of thousands of digits.
        if max(len(first), len(last)) > _RANK_DIGITS:
            raise ConfigError(f"{where} = {_brief(value)}: must name ranks of at most {_RANK_DIGITS} digits")
        if dash and int(last) < int(first):
            raise ConfigError(f"{where} = {value!r}: a range must begin with its lowest rank. Write {last}-{first}")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _pair(value: Any, where: str) -> tuple[int, int]:
    ranks = _ranks(value, where)
    if len(ranks) != 2 or ranks[0] == ranks[1]:
        raise ConfigError(f"{where} = {value!r}: must be two different ranks, such as [0, 5]")
    return ranks[0], ranks[1]


_NETWORK: dict[str, Reader] = (
    {
        "bandwidth": _rate,
        "latency": _seconds,
        "per_call": _seconds,
        "per_segment": _seconds,
    }
    | {"contention": _number, "window": _number, "all_reduce": _text}
    | dict.fromkeys(("slow_start", "one_stream"), _flag)
)
_WORKER: dict[str, Reader] = {"ranks": _ranks, "bandwidth": _rate, "latency": _seconds, "slowdown": _number}
_LINK: dict[str, Reader] = {"between": _pair, "bandwidth": _rate, "latency": _seconds}
_DEATH: dict[str, Reader] = {"rank": _whole, "at": _seconds, "step": _whole, "silent": _flag}
_PAUSE: dict[str, Reader] = {"rank": _whole, "at": _seconds, "for": _seconds}
