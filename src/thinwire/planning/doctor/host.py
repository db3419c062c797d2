# SPDX-License-Identifier: Apache-2.0
"""Facts of one machine that need no other: interfaces, names, versions, limits, threads."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire._version import __version__
from thinwire.errors import ConfigError

LOOPBACK_NET = "127."
_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: such as eth0.
        address: its first IPv4 address, or its first IPv6 address where it has no other.
        loopback: whether it reaches this machine only.
        mbit: the speed that it claims, in Mbit/s; 0 where it does not say.
        mtu: the longest packet, in bytes.
    """

    name: str
    address: str
    loopback: bool
    mbit: int
    mtu: int


@dataclass(frozen=True)
class Host:
    """One rank's machine, as it is sent to the other ranks; JSON values only.

    Attributes:
        rank: of the process that looked.
        name: the host's name.
        name_addresses: the IPv4 addresses that its own name resolves to; empty if it does not resolve.
        interfaces: those that are up and have an address.
        asked_interface: GLOO_SOCKET_IFNAME, or "" where it is not set.
        gloo_address: the address at which Gloo will listen; "" if it finds none.
        route_address: the address from which this machine reaches the rendezvous; "" if there is no route.
        versions: of python, torch, numpy and thinwire.
        threads: threads of computation of this process.
        local_ranks: how many ranks of the job run on this machine.
        cores: processor cores that this process may use.
        load: running processes in the last minute, on average.
        open_files: the most files and connections that the process may open.
        accelerator: the name of the first one, or "".
        restarts_slowly: whether a connection begins slowly again after a pause (Linux's tcp_slow_start_after_idle).
    """

    rank: int
    name: str
    name_addresses: list[str]
    interfaces: list[Interface]
    asked_interface: str
    gloo_address: str
    route_address: str
    versions: dict[str, str]
    threads: int
    local_ranks: int
    cores: int
    load: float
    open_files: int
    accelerator: str
    restarts_slowly: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Host:
        """From JSON values, which came from another rank.

        Raises:
            TypeError: fields are missing or unknown.
        """
        interfaces: Any = [Interface(**each) for each in fields["interfaces"]]
        return cls(**{**fields, "interfaces": interfaces})

    def interface_of(self, address: str) -> Interface | None:
        """Return the interface that has an address."""
        return next((each for each in self.interfaces if each.address == address), None)


def look(rank: int, rendezvous: str) -> Host:
    """Look at this machine.

    Args:
        rank: of this process.
        rendezvous: the address or name of the rendezvous; "" if there is none.
    """
    import numpy as np
    import torch

    interfaces = _interfaces()
    asked = os.environ.get("GLOO_SOCKET_IFNAME", "")
    named = resolve(socket.gethostname())
    cuda = torch.cuda.is_available()
    return Host(
        rank=rank,
        name=socket.gethostname(),
        name_addresses=named,
        interfaces=interfaces,
        asked_interface=asked,
        gloo_address=gloo_address(asked, named, interfaces),
        route_address=route_to(rendezvous),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "thinwire": __version__,
        },
        threads=torch.get_num_threads(),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        cores=usable_cores(),
        load=load_average(),
        open_files=_open_files(),
        accelerator=torch.cuda.get_device_name() if cuda else "",
        restarts_slowly=_restarts_slowly(),
    )


def resolve(name: str) -> list[str]:
    """Return the IPv4 addresses of a name; empty if it has none."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def route_to(name: str) -> str:
    """Return the address from which this machine sends to another; "" if it cannot. Nothing is sent."""
    for address in resolve(name) if name else []:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def gloo_address(asked: str, named: list[str], interfaces: list[Interface]) -> str:
    """Return the address at which Gloo listens.

    PyTorch takes the interface of GLOO_SOCKET_IFNAME (the first, where it lists several); without it, the first address
    of the machine's own name at which it can listen, and else the loopback.
    """
    if asked:
        first = asked.partition(",")[0]
        return next((each.address for each in interfaces if each.name == first), "")
    for address in named:
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address
    return next((each.address for each in interfaces if each.loopback), "")


def _interfaces() -> list[Interface]:
    psutil = _psutil()
    found: list[Interface] = []
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    for name, state in states.items():
        known = addresses.get(name, [])
        own = [each.address for family in (socket.AF_INET, socket.AF_INET6) for each in known if each.family == family]
        if state.isup and own:
            loopback = own[0].startswith(LOOPBACK_NET) or own[0] == "::1"
            found.append(Interface(name, own[0], loopback, state.speed, state.mtu))
    return sorted(found, key=lambda each: (each.loopback, each.name))


def _psutil() -> Any:
    try:
        import psutil
    except ImportError:
        raise ConfigError("the doctor needs psutil: pip install 'thinwire[doctor]'") from None
    return psutil


def usable_cores() -> int:
    """Of this process."""
    # Containers and schedulers give a process fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Running processes in the last minute, on average; 0 where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _restarts_slowly() -> bool:
    try:
        return _SLOW_START.read_text().strip() == "1"
    except OSError:  # not Linux, or not to be seen from a container
        return False


def _open_files() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
