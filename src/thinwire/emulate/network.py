"""A network of its own for the workers of one machine: a namespace each, shaped links, byte counters."""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from thinwire.emulate import namespaces
from thinwire.emulate.build import CannotBuildError, build
from thinwire.emulate.link import Link, describe_links
from thinwire.emulate.plan import INTERFACE, MOST_WORKERS, address, network_plan, switch_ports
from thinwire.errors import ConfigError

SWITCH = Path(__file__).with_name("switch.py")
RENDEZVOUS_PORT = 29500


@dataclass(frozen=True)
class Traffic:
    """What one worker's interface has carried, headers included.

    The kernel counts a packet that it will cut into frames with one header only, so that what a real wire carries
    is up to 4 % more for full frames.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """What was carried since ``earlier``."""
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )


class Network:
    """A context in which each worker has a network namespace, all joined by a switch.

    Both directions of a worker's link are shaped. The namespaces have no names and the host's own network is not
    touched: open files of this process are all that keeps them alive, so they end with it, however it ends. Root is
    not needed where users may make user namespaces. Inside there is no way to the outside: a worker that downloads
    its data must do so before.

    Args:
        links: the link of each worker, at most 60.
        user_namespace: make the network in a user namespace even where that is not needed.

    Raises:
        ConfigError: when there is no link or there are too many, or, on entry, when this machine does not allow it.
    """

    def __init__(self, links: Sequence[Link], *, user_namespace: bool = False) -> None:
        if not 1 <= len(links) <= MOST_WORKERS:
            raise ConfigError(f"{len(links)} links: a network joins 1 to {MOST_WORKERS} workers; give one link each")
        self.links = tuple(links)
        self._user_namespace = user_namespace
        self._files: dict[str, list[int]] = {}
        self._before: tuple[Traffic, ...] = ()
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Make the namespaces and the links, in about 50 ms."""
        with ExitStack() as contexts:
            self._files = self._build()
            for descriptor in itertools.chain.from_iterable(self._files.values()):
                contexts.callback(os.close, descriptor)
            if "tunnel" in self._files:
                contexts.callback(self._start_switch(self._files["tunnel"]).communicate)
            self._before = self._read()
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the namespaces; each ends with the last process in it."""
        self._contexts.close()
        self._files = {}

    @property
    def workers(self) -> int:
        """How many workers the network joins."""
        return len(self.links)

    def environment(self) -> dict[str, str]:
        """What tells workers how to find each other here, and NCCL to take no way around the links."""
        return {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(RENDEZVOUS_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
        }

    def descriptors(self, rank: int) -> tuple[int | None, int]:
        """Open files of the user namespace, or None, and of the network namespace of worker ``rank``."""
        user = self._files.get("user", [None])
        return user[0], self._files["net"][rank + 1]

    def traffic(self) -> tuple[Traffic, ...]:
        """What each worker has sent and received since the network was entered; costs microseconds."""
        return tuple(now - before for now, before in zip(self._read(), self._before, strict=True))

    def _build(self) -> dict[str, list[int]]:
        try:
            return build(network_plan(self.links, user=self._user_namespace))
        except CannotBuildError as reason:
            asked = describe_links(self.links)
            raise ConfigError(f"link {asked!r}: this machine cannot emulate a network: {reason}") from None

    def _start_switch(self, tunnels: list[int]) -> subprocess.Popen[bytes]:
        ports = switch_ports(self.links, tunnels)
        return subprocess.Popen(
            [*namespaces.entrance(), sys.executable, "-I", "-S", str(SWITCH), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=tunnels,
            process_group=0,
        )

    def _read(self) -> tuple[Traffic, ...]:
        return tuple(_read_counters(descriptor) for descriptor in self._files["counters"][1:])


@functools.cache
def available() -> str | None:
    """Return None where networks can be emulated, else the reason why not and what to do about it.

    The first call makes a small network and lets it go, in some 50 ms.
    """
    try:
        files = build(network_plan([Link(1e9)]))
    except CannotBuildError as reason:
        return str(reason)
    for descriptor in itertools.chain.from_iterable(files.values()):
        os.close(descriptor)
    return None


def _read_counters(descriptor: int) -> Traffic:
    for line in os.pread(descriptor, 1 << 16, 0).decode().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = [int(number) for number in numbers.split()]
            return Traffic(fields[8], fields[0], fields[9], fields[1])
    return Traffic()
