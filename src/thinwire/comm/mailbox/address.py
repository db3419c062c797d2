"""Where the other ranks can reach this one: the address from which it would speak to them."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from thinwire.errors import ConfigError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_address() -> str:
    """This process's address on the network that the ranks share.

    That of the interface which `GLOO_SOCKET_IFNAME` names; else the one from which the way to `MASTER_ADDR` begins,
    which needs no message to find out; else the loopback's.

    Raises:
        ConfigError: `MASTER_ADDR` is no address that this machine knows a way to.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return _of_interface(interface.partition(",")[0]) or _towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def _of_interface(name: str) -> str | None:
    """The IPv4 address of an interface; None where it has none, or where the system does not tell."""
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return None


def _towards(host: str) -> str:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r}: there is no way to it ({error}); set GLOO_SOCKET_IFNAME to the interface "
            "on which the ranks reach each other"
        ) from error


def endpoint(address: str, port: int) -> str:
    """An address and a port as ZeroMQ writes them."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
