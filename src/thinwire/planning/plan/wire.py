# SPDX-License-Identifier: Apache-2.0
"""The bytes of payload on an interface: with headers of packets, and acknowledgements of received ones."""

from __future__ import annotations

HEADER_BYTES = 66
"""Of one packet: 14 of Ethernet, 20 of IP, and 32 of TCP with timestamps."""
SEGMENT_BYTES = 1448
"""The payload of a full Ethernet frame."""


def wire_bytes(
    sent: float, received: float, *, segment: float = SEGMENT_BYTES, segments_per_acknowledgement: float = 2.0
) -> float:
    """Return the bytes that an interface sends, as its counter sees them.

    Args:
        sent: payload that goes out.
        received: payload that comes in, whose acknowledgements go out.
        segment: payload of a packet. The kernel counts a packet before it cuts it into frames, so that its counters see
            fewer headers than a cable carries: behind emulated links a packet takes at most a millisecond of the link,
            or 64 kB.
        segments_per_acknowledgement: two by TCP's rule; a kernel that joins packets acknowledges what it has joined.

    Example:
        A megabyte in each direction, in frames.

        >>> from thinwire.planning.plan.wire import wire_bytes
        >>> round(wire_bytes(1e6, 1e6))
        1068370
    """
    return sent + HEADER_BYTES * (sent + received / segments_per_acknowledgement) / segment
