# SPDX-License-Identifier: Apache-2.0
"""The environment of a worker: its rank, the rendezvous address, and how many threads it may use."""

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from thinwire.lab.emulate.network import Network

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FIRST_PORT = 20000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def rendezvous_environment(network: Network | None) -> dict[str, str]:
    """The rendezvous address of rank 0 as environment variables: in the network, or without one on the loopback."""
    if network is not None:
        return network.environment()
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def worker_environment(rank: int, workers: int, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of one worker, made from this process's.

    Args:
        rank: which worker.
        workers: how many there are.
        own: variables that replace all others.
    """
    # With torchrun's variables a worker would look for the rendezvous of torchrun's agent.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    choices = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return {**choices, **inherited, **{name: str(number) for name, number in ranks.items()}, **own}


def free_port() -> int:
    """A port of the loopback on which nothing listens.

    It lies below the range from which the kernel takes ports for outgoing connections. Rank 0 opens it only seconds
    later, and a port from that range could be taken by then.
    """
    try:
        end = int(PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        end = 32768
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(max(1, end - FIRST_PORT))
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
