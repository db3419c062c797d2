"""The environment of a worker: who it is, where all meet, and how many threads it may use."""

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from thinwire.emulate.network import Network

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FIRST_PORT = 20000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def meeting_place(network: Network | None) -> dict[str, str]:
    """The variables that tell all workers where rank 0 waits for them: in the network, else on the loopback."""
    if network is not None:
        return network.environment()
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def worker_environment(rank: int, workers: int, own: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, made into that of a worker.

    Args:
        rank: which worker.
        workers: how many there are.
        own: variables that win over all others.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    choices = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return {**choices, **inherited, **{name: str(number) for name, number in ranks.items()}, **own}


def free_port() -> int:
    """A port of the loopback on which nothing listens, outside the range from which the kernel takes its own.

    Rank 0 opens it only seconds later; until then no outgoing connection can have been given it.
    """
    end = _kernel_ports_start()
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(max(1, end - FIRST_PORT))
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _kernel_ports_start() -> int:
    try:
        return int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
