# SPDX-License-Identifier: Apache-2.0
"""An emulated network for the workers of one machine: a namespace each, links with rates and delays, byte counters.

Namespace 0 is the switch: a bridge with one port per worker. Namespace r + 1 belongs to worker r and holds the other
end of its cable, `eth0`. What a worker sends is limited at its `eth0`, what it receives at its port of the switch.
Where a link has a delay there is no bridge: each `eth0` is a tun device, and the `switch` script joins them.

This file writes the `ip` and `tc` commands for that as a plan, and the `namespaces` script carries it out.
"""

import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from thinwire.errors import ConfigError
from thinwire.lab.emulate import namespaces
from thinwire.planning.links import Link, describe_links

SWITCH = Path(__file__).with_name("switch.py")
RENDEZVOUS_PORT = 29500
INTERFACE = "eth0"
MOST_WORKERS = 60
BUILD_SECONDS = 60.0
# What a limited link lets through at once, how much it queues, and the longest packet, as times at the link's rate.
BURST_SECONDS = 0.002
QUEUE_SECONDS = 0.2
PACKET_SECONDS = 0.001
LARGEST_PACKET = 65536
SMALLEST_PACKET = 3000

Step = dict[str, object]
"""One command of a plan: `namespace`, `arguments`, `text` for its standard input, and whether it is `optional`."""


@dataclass(frozen=True)
class Traffic:
    """The bytes and packets that one worker's interface has carried, headers included.

    The kernel counts a packet that it will split into frames with one header only. A real wire therefore carries up to
    4 % more.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))


class Network:
    """A context in which each worker has a network namespace, all joined by a switch.

    Both directions of a worker's link are limited. The namespaces have no names, and the machine's own network is not
    changed: only open files of this process keep the namespaces alive, so they disappear when it ends, however it ends.
    Root is not needed where users may make user namespaces. The workers cannot reach the outside: one that downloads
    its data must do so before.

    Args:
        links: the link of each worker, 1 to 60.
        user_namespace: make the network in a user namespace even where that is not needed.

    Raises:
        ConfigError: there is no link or there are too many; on entry, this machine does not allow networks.
    """

    def __init__(self, links: Sequence[Link], *, user_namespace: bool = False) -> None:
        if not 1 <= len(links) <= MOST_WORKERS:
            raise ConfigError(f"{len(links)} links: a network joins 1 to {MOST_WORKERS} workers. Give one link each")
        self.links = tuple(links)
        self._user_namespace = user_namespace
        self._files: dict[str, list[int]] = {}
        self._before: tuple[Traffic, ...] = ()
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Make the namespaces and the links; takes about 50 ms."""
        with ExitStack() as contexts:
            try:
                self._files = build(network_plan(self.links, user=self._user_namespace))
            except CannotBuildError as reason:
                links = describe_links(self.links)
                raise ConfigError(f"link {links!r}: this machine cannot emulate a network: {reason}") from None
            for descriptor in itertools.chain.from_iterable(self._files.values()):
                contexts.callback(os.close, descriptor)
            if "tunnel" in self._files:
                contexts.callback(self._start_switch(self._files["tunnel"]).communicate)
            self._before = self._read()
            self._contexts = contexts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the open files of the namespaces; each disappears with the last process in it."""
        self._contexts.close()
        self._files = {}

    @property
    def workers(self) -> int:
        """Return how many workers the network joins."""
        return len(self.links)

    def environment(self) -> dict[str, str]:
        """Environment variables for the workers: the rendezvous address, and the interface for Gloo and NCCL.

        NCCL's shared memory and peer-to-peer transports are off, because they would bypass the links.
        """
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

    def change(self, links: Sequence[Link]) -> None:
        """Give the links other rates, while workers run; what is queued stays queued. Takes about 10 ms a worker.

        Args:
            links: of all workers, without delays, and with a rate where there was one.

        Raises:
            ConfigError: other links than these, or a command fails.
        """
        limited = [link.bits_per_second is not None for link in self.links]
        if [link.bits_per_second is not None for link in links] != limited or any(
            link.delay_seconds for link in (*links, *self.links)
        ):
            raise ConfigError(
                f"links {describe_links(tuple(links))!r} after {describe_links(self.links)!r}: only rates can change "
                "while workers run. Give every worker a rate from the start, and no delay"
            )
        user, *_ = self._files.get("user", [None])
        for rank, link in enumerate(links):
            if link.bits_per_second is not None:
                for namespace, interface in ((0, f"port{rank}"), (rank + 1, "eth0")):
                    words = _shaping(interface, link.bits_per_second, "change")
                    self._run_in(user, self._files["net"][namespace], words)
        self.links = tuple(links)

    def _run_in(self, user: int | None, namespace: int, words: Sequence[str]) -> None:
        files = [namespace] if user is None else [user, namespace]
        command = [*namespaces.enter_command(user, namespace), *words]
        done = subprocess.run(command, pass_fds=files, text=True, capture_output=True, timeout=BUILD_SECONDS)
        if done.returncode:
            raise ConfigError(f"{' '.join(words)}: {' '.join(done.stderr.split()) or done.returncode}")

    def traffic(self) -> tuple[Traffic, ...]:
        """Return what each worker has sent and received since the network was entered; takes microseconds."""
        return tuple(now - before for now, before in zip(self._read(), self._before, strict=True))

    def _start_switch(self, tunnels: list[int]) -> subprocess.Popen[bytes]:
        ports = switch_ports(self.links, tunnels)
        return subprocess.Popen(
            [*namespaces.enter_command(), sys.executable, "-I", "-S", str(SWITCH), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=tunnels,
            process_group=0,
        )

    def _read(self) -> tuple[Traffic, ...]:
        texts = (os.pread(descriptor, 1 << 16, 0).decode() for descriptor in self._files["counters"][1:])
        return tuple(traffic_in(text, INTERFACE) or Traffic() for text in texts)


@functools.cache
def available() -> str | None:
    """Return None where networks can be emulated, otherwise the reason why not and what to do about it.

    The first call makes a small network and removes it, which takes about 50 ms.
    """
    try:
        files = build(network_plan([Link(1e9)]))
    except CannotBuildError as reason:
        return str(reason)
    for descriptor in itertools.chain.from_iterable(files.values()):
        os.close(descriptor)
    return None


def traffic_in(text: str, interface: str) -> Traffic | None:
    """Return the counters of an interface in the text of /proc/net/dev; None where there is none of that name."""
    for line in text.splitlines():
        # The columns: bytes and packets received are 0 and 1, sent 8 and 9.
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return Traffic(fields[8], fields[0], fields[9], fields[1])
    return None


# -- the commands that make a network, as text ------------------------------------------------------------------------


def address(rank: int) -> str:
    """Return the IPv4 address of worker ``rank`` in the network."""
    return f"10.77.0.{rank + 1}"


def network_plan(links: Sequence[Link], *, user: bool = False) -> dict[str, object]:
    """Return the plan of a network: cables and a bridge where no link has a delay, otherwise tun devices.

    Args:
        links: the link of each worker.
        user: require a user namespace.
    """
    delayed = any(link.delay_seconds for link in links)
    tunnels = list(range(1, len(links) + 1)) if delayed else []
    steps = [] if delayed else _switch_steps(links)
    for rank, link in enumerate(links):
        steps += _worker_steps(rank, link)
    return {"count": len(links) + 1, "user": user, "tunnels": tunnels, "steps": steps}


def switch_ports(links: Sequence[Link], descriptors: Sequence[int]) -> list[str]:
    """Return the arguments of the `switch` script that joins the tun devices of all workers."""
    ends = zip(links, descriptors, strict=True)
    words = [f"{end}:{link.bits_per_second or 0:.0f}:{link.delay_seconds:.9f}" for link, end in ends]
    return [str(QUEUE_SECONDS), str(BURST_SECONDS), *words]


def _switch_steps(links: Sequence[Link]) -> list[Step]:
    lines = ["link add bridge type bridge mcast_snooping 0", "link set bridge addrgenmode none up"]
    for rank in range(len(links)):
        lines.append(f"link add port{rank} type veth peer name eth0 netns {{{rank + 1}}}")
        lines.append(f"link set port{rank} addrgenmode none master bridge up")
    rates = [(f"port{rank}", link.bits_per_second) for rank, link in enumerate(links)]
    return [_ip(0, lines), *(_shape(0, port, rate) for port, rate in rates if rate is not None)]


def _worker_steps(rank: int, link: Link) -> list[Step]:
    """Return the commands in one worker's own namespace, in which `eth0` exists already."""
    home, own = rank + 1, address(rank)
    steps = [
        _ip(home, ["link set lo up", "link set eth0 addrgenmode none up", f"addr add {own}/24 dev eth0"]),
        # The same congestion control on every machine; set by route, because a namespace cannot set it by sysctl.
        _ip(home, [f"route replace 10.77.0.0/24 dev eth0 proto kernel scope link src {own} congctl cubic"], True),
    ]
    if link.bits_per_second is None:
        return steps
    packet = _packet_nbytes(link.bits_per_second)
    narrow = _ip(home, [f"link set eth0 gso_max_size {packet}"], True)
    return [*steps, narrow, _shape(home, "eth0", link.bits_per_second)]


def _ip(namespace: int, lines: list[str], optional: bool = False) -> Step:
    return _step(namespace, ["ip", "-batch", "-"], "\n".join([*lines, ""]), optional)


def _shape(namespace: int, interface: str, bits_per_second: float) -> Step:
    return _step(namespace, _shaping(interface, bits_per_second, "add"), "", False)


def _shaping(interface: str, bits_per_second: float, verb: str) -> list[str]:
    # tbf drops a packet that is longer than its burst, and a queue that is too short would drop packets of slow links.
    burst = max(2 * _packet_nbytes(bits_per_second), round(bits_per_second / 8 * BURST_SECONDS))
    queue = burst + max(LARGEST_PACKET * 4, round(bits_per_second / 8 * QUEUE_SECONDS))
    words = f"tc qdisc {verb} dev {interface} root tbf rate {bits_per_second:.0f}bit burst {burst} limit {queue}"
    return words.split()


def _packet_nbytes(bits_per_second: float) -> int:
    """Return the longest packet, in bytes, that the kernel may make before it splits it: what the link sends in 1 ms.

    `tbf` lets whole packets through, so longer packets would need a larger burst, and a message shorter than the burst
    would cross an idle link in no time.
    """
    nbytes = round(bits_per_second / 8 * PACKET_SECONDS)
    return min(LARGEST_PACKET, max(SMALLEST_PACKET, nbytes))


def _step(namespace: int, arguments: list[str], text: str, optional: bool) -> Step:
    return {"namespace": namespace, "arguments": arguments, "text": text, "optional": optional}


# -- carrying them out -------------------------------------------------------------------------------------------------


class CannotBuildError(Exception):
    """This machine does not allow a network; the message says why and what to do about it."""


def build(plan: Mapping[str, object]) -> dict[str, list[int]]:
    """Carry out a plan, in the form that `namespaces` describes.

    Returns:
        The descriptors of the open files by their kind; the caller closes them.

    Raises:
        CannotBuildError: it cannot be carried out here.
    """
    if sys.platform != "linux":
        raise CannotBuildError(f"it needs Linux, and this is {sys.platform}")
    ours, theirs = socket.socketpair()
    with ours:
        # A process of its own, because it changes its own namespace on the way.
        with theirs:
            maker = subprocess.Popen(
                [sys.executable, "-I", "-S", namespaces.__file__, "make", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            ours.settimeout(BUILD_SECONDS)
            ours.sendall(json.dumps(plan).encode() + b"\n")
            text, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 253, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise CannotBuildError(f"ip and tc did not finish in {BUILD_SECONDS:.0f} seconds") from None
        finally:
            maker.kill()
            maker.communicate()
    answer = json.loads(text or '{"error": "the helper process ended early"}')
    if "error" in answer:
        raise CannotBuildError(_with_advice(answer["error"]))
    files: dict[str, list[int]] = {}
    for kind, descriptor in zip(answer["kinds"], descriptors, strict=True):
        files.setdefault(kind, []).append(descriptor)
    return files


def _with_advice(error: str) -> str:
    if "is missing" in error:
        return f"{error}; install iproute2"
    if "/dev/net/tun" in error:
        return f"{error}; a delay needs this device: load the module tun, or ask for links without a delay"
    if "tbf" in error:
        return f"{error}; the kernel needs the module sch_tbf"
    if any(word in error for word in ("unshare", "Operation not permitted", "Permission denied")):
        return f"{error}; run as root, in a privileged container, or where users may make user namespaces"
    return error
