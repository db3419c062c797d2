# SPDX-License-Identifier: Apache-2.0
"""Network namespaces for the workers, joined by links with a rate and a delay; Linux, iproute2, root or `unshare -Ur`.

Each namespace is held by an `unshare --net cat` process, which ends when this one does, so nothing stays behind.
Without a delay, cables of all workers end at a bridge. With one, each `eth0` is a tun device that `switch.py` reads.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from thin_gpt.task import Link

QUEUE_SECONDS, BURST_SECONDS, PACKET_SECONDS = 0.2, 0.002, 0.001


def address(rank: int) -> str:
    """Of a worker in the network."""
    return f"10.77.0.{rank + 1}"


class Network:
    """A context in which `workers` namespaces exist.

    Args:
        link: of every worker.
        workers: how many.

    Raises:
        OSError: on entry, this machine does not allow it.
    """

    def __init__(self, link: Link, workers: int) -> None:
        self.link, self.workers = link, workers
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Make namespaces and links."""
        with ExitStack() as contexts:
            self.holders = [_hold(contexts) for _ in range(self.workers + 1)]
            switch, *own = self.holders
            if self.link.delay:
                script = [sys.executable, "-I", "-S", str(Path(__file__).with_name("switch.py"))]
                ports = [f"{self.link.rate}", f"{self.link.delay}", *map(str, own)]
                process = subprocess.Popen([*script, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                contexts.callback(process.communicate)
                if process.stdout is None or process.stdout.readline() != b"ready\n":
                    raise OSError("links with a delay need /dev/net/tun. Load the module tun")
            else:
                _run(switch, "ip link add bridge type bridge mcast_snooping 0", "ip link set bridge up")
                for rank, pid in enumerate(own):
                    port = f"port{rank}"
                    _run(switch, f"ip link add {port} type veth peer name eth0 netns {pid}")
                    _run(switch, f"ip link set {port} master bridge up", *self._shaped(port))
            for rank, pid in enumerate(own):
                commands = ["ip link set lo up", f"ip addr add {address(rank)}/24 dev eth0", "ip link set eth0 up"]
                _run(pid, *commands, *self._shaped("eth0"))
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove everything."""
        self._contexts.close()

    def namespace(self, rank: int) -> str:
        """The path of a worker's namespace."""
        return f"/proc/{self.holders[rank + 1]}/ns/net"

    def sent(self) -> list[int]:
        """The bytes that each worker's interface has sent, headers included."""
        return [_sent(Path(f"/proc/{pid}/net/dev").read_text()) for pid in self.holders[1:]]

    def _shaped(self, interface: str) -> list[str]:
        bytes_per_second = self.link.rate / 8
        if not bytes_per_second:
            return []
        packet = min(65536, max(3000, round(bytes_per_second * PACKET_SECONDS)))
        burst = max(2 * packet, round(bytes_per_second * BURST_SECONDS))
        limit = burst + max(4 * 65536, round(bytes_per_second * QUEUE_SECONDS))
        return [
            f"ip link set {interface} gso_max_size {packet}",
            f"tc qdisc add dev {interface} root tbf rate {self.link.rate:.0f}bit burst {burst} limit {limit}",
        ]


def _sent(table: str) -> int:
    lines = (line.partition(":") for line in table.splitlines())
    return next((int(numbers.split()[8]) for name, _, numbers in lines if name.strip() == "eth0"), 0)


def _hold(contexts: ExitStack) -> int:
    process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    contexts.callback(process.communicate)
    here, until = Path("/proc/self/ns/net").readlink(), time.monotonic() + 10
    while time.monotonic() < until and process.poll() is None:
        if Path(f"/proc/{process.pid}/ns/net").readlink() != here:
            return process.pid
        time.sleep(0.002)
    raise OSError("network namespaces are not allowed here. Run as root, or under `unshare -Ur`")


def _run(pid: int, *commands: str) -> None:
    for command in commands:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()], capture_output=True, text=True
        )
        # Old kernels cannot set the longest packet, which then is only less exact.
        if done.returncode and "gso_max_size" not in command:
            raise OSError(f"{command}: {done.stderr.strip()}. The network needs iproute2 and the module sch_tbf")
