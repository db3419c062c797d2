# SPDX-License-Identifier: Apache-2.0
"""The objects that calls over a bucket write and read."""

from __future__ import annotations

from typing import NamedTuple

from thinwire.core.comm.bucket import header_bytes, in_two_stages
from thinwire.core.storage.bucket import SEAL_BYTES

_USUAL_CALL = 50  # bytes of the description of a call


class Objects(NamedTuple):
    """The objects of one rank's calls over a bucket.

    Attributes:
        puts: objects that it writes.
        gets: objects that it reads.
        up: bytes that it writes, with headers and seals.
        down: bytes that it reads.
        stages: writes that are followed by reads, one after the other.
    """

    puts: int = 0
    gets: int = 0
    up: float = 0.0
    down: float = 0.0
    stages: int = 0

    @classmethod
    def of(cls, puts: int, gets: int, up: float, down: float, size: int, stages: int = 1) -> Objects:
        """Return the objects of one call with this payload."""
        each = SEAL_BYTES + header_bytes(size) + _USUAL_CALL
        return cls(puts, gets, up + puts * each, down + gets * each, stages)

    @classmethod
    def of_gather(cls, nbytes: int, size: int) -> Objects:
        """Return the objects of an all-gather."""
        return cls.of(1, size - 1, nbytes, nbytes * (size - 1), size)

    @classmethod
    def of_all_reduce(cls, nbytes: int, size: int) -> Objects:
        """Return the objects of an all-reduce."""
        if not in_two_stages(nbytes, size):
            return cls.of_gather(nbytes, size)
        return cls.of(size, 2 * (size - 1), nbytes, 2 * nbytes * (size - 1) / size, size, stages=2)

    def plus(self, other: Objects) -> Objects:
        """Return the objects of both."""
        count = (self.puts + other.puts, self.gets + other.gets)
        return Objects(*count, self.up + other.up, self.down + other.down, self.stages + other.stages)
