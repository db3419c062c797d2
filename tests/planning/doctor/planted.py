# SPDX-License-Identifier: Apache-2.0
"""One rank of an examination with a fault planted in it: `python -m tests.planning.doctor.planted FAULT [OPTIONS]`."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
ADDRESS = f"10.77.0.{RANK + 1}"


def wrong_interface() -> None:
    if RANK == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def name_is_loopback() -> None:
    del os.environ["GLOO_SOCKET_IFNAME"]
    resolve = socket.getaddrinfo

    def patched(host: object, *args: object, **kwargs: object) -> object:
        if host == socket.gethostname():
            host = "127.0.1.1" if RANK == 1 else ADDRESS
        return resolve(host, *args, **kwargs)  # type: ignore

    socket.getaddrinfo = patched  # type: ignore


def blocked_port() -> None:
    if RANK == 1:
        subprocess.run(["ip", "route", "add", "prohibit", "10.77.0.3/32"], check=True)


def versions() -> None:
    if RANK == 2:
        import thinwire._version

        thinwire._version.__version__ = "0.0.9"


def threads() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 1 if RANK == 0 else 1)


def clock() -> None:
    if RANK == 2:
        real = time.time
        time.time = lambda: real() + 3.0


def open_files() -> None:
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def missing_rank() -> None:
    if RANK == 2:
        sys.exit(0)


def slow_rank() -> None:
    os.environ["PLANTED_SLOW"] = "2"


def none() -> None:
    """No fault, or one of the network."""


def model() -> nn.Module:
    return nn.Linear(8, 8)


def data(rank: int, size: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(1, 8), torch.zeros(1))]


def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Takes longer on the slow rank."""
    time.sleep(0.08 if os.environ.get("PLANTED_SLOW") == str(RANK) else 0.02)
    return outputs.sum()


OPTIONS = [
    word for name in ("model", "data", "loss") for word in (f"--{name}", f"tests.planning.doctor.planted:{name}")
]


def main(faults: str, *options: str) -> int:
    """Plant the faults, and run the command."""
    for fault in faults.split("+"):
        globals()[fault]()
    # After the faults, some of which must be there when it is imported.
    from thinwire.cli import main as command
    from thinwire.planning.doctor import examination

    if "--quick" in options:
        quick = {"_LINKS": 1.0, "_ALL_REDUCES": 0.5, "_STEPS": 0.5, "_SLOWEST_STEPS": 2.5}
        for name, seconds in quick.items():
            setattr(examination, name, seconds)
    rest = [option for option in options if option != "--quick"]
    return command(["doctor", "--json", *OPTIONS, *rest])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
