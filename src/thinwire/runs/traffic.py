"""Bytes on the wire, as the kernel counts them on this worker's own interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COUNTERS = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class Carried:
    """Bytes an interface has sent and received, headers included."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.sent - other.sent, self.received - other.received)


def read_counters(interface: str) -> Carried | None:
    """What an interface of this network namespace has carried; None where there is none of that name."""
    if not COUNTERS.is_file():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            return Carried(fields[8], fields[0])
    return None


class Tap:
    """Counts an interface's bytes while training runs, and not while it stands.

    Args:
        interface: its name; None counts nothing.
    """

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._opened: Carried | None = None
        self._carried = Carried()
        self._seen = False

    @property
    def carried(self) -> Carried | None:
        """Bytes so far; None where nothing can be counted."""
        return self._carried if self._seen else None

    def open(self) -> None:
        """Start to count."""
        self._opened = read_counters(self._interface) if self._interface else None

    def close(self) -> None:
        """Stop to count."""
        now = read_counters(self._interface) if self._interface else None
        if self._opened is not None and now is not None:
            self._carried, self._seen = self._carried + (now - self._opened), True
        self._opened = None
