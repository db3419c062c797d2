# SPDX-License-Identifier: Apache-2.0
"""`thinwire store`: the store in which elastic workers agree on who they are."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass

from thinwire.cli.console import out, print_json
from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Store:
    """Host the store of elastic workers in a process of its own, until it is interrupted.

    Example: thinwire store --host 10.0.0.1 --port 29400

    It prints the address that workers find it by, as THINWIRE_STORE=HOST:PORT. It is torch's TCPStore, which serves
    anyone who reaches its port, so let it listen on a trusted network only. It keeps a few kilobytes; loss of a worker
    does not touch it, and loss of the store ends the run.

    Args:
        host: the address to listen on, by which the workers reach it.
        port: 0 takes any free one.
        json: print the address as JSON.
    """

    host: str = "127.0.0.1"
    port: int = 29400
    json: bool = False

    def __call__(self) -> int:
        """Serve; returns 0 after an interrupt."""
        from thinwire.core.comm.rendezvous import host_store

        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must be 0 to 65535. Use 0 for a free one")
        try:
            store = host_store(self.host, self.port)
        except OSError as error:
            raise ConfigError(
                f"--host {self.host} --port {self.port}: cannot listen there ({error}). Use "
                "an address of this machine and a free port"
            ) from None
        if self.json:
            print_json({"host": self.host, "port": store.port})
        else:
            out.print(f"THINWIRE_STORE={self.host}:{store.port}")
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        return 0
