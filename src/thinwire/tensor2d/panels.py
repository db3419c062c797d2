# SPDX-License-Identifier: Apache-2.0
"""The panels in which the operands of a product are sent, and the choice of their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.validation import check_field_types
from thinwire.errors import ConfigError

T = TypeVar("T")
Cut = tuple[int, int]
Launch = Callable[[], Work[list[Tensor]]]


@dataclass(frozen=True)
class Panels:
    """Settings for sending the operands of a distributed product.

    With `count=1` each operand is gathered in one message. With more panels, every rank contributes an equal slice of
    its block to each, so that no link is idle, and panel t + 1 is sent while panel t is multiplied. The bytes are the
    same.

    Args:
        count: panels per product; more panels use less memory and more messages. A block with fewer columns has one
            panel per column.
        overlap: False waits for each message before the next send, for backends that must not have collectives
            of two groups in flight at once.
    """

    count: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        """Check the kinds and the range."""
        check_field_types(self)
        if self.count < 1:
            raise ConfigError(f"count={self.count}: must be at least one panel. Use 1 to gather in one message")

    def cuts(self, width: int) -> list[Cut]:
        """Return the slices [start, stop) of `width` columns, one per panel; widths differ by at most one."""
        count = max(1, min(self.count, width))  # an empty block still takes part in one message
        return [(width * k // count, width * (k + 1) // count) for k in range(count)]

    def pipeline(
        self, tasks: Sequence[T], launches: Callable[[T], Sequence[Launch]]
    ) -> Iterator[tuple[T, list[list[Tensor]]]]:
        """Yield each task with the result of its messages, while the messages of the next task are in flight.

        Every rank must launch in the same order (the row's message first, then the column's). Otherwise collectives of
        two groups could wait for each other.
        """
        if not self.overlap:
            yield from ((task, [launch().wait() for launch in launches(task)]) for task in tasks)
            return
        in_flight = [launch() for launch in launches(tasks[0])]
        for k, task in enumerate(tasks):
            following = [launch() for launch in launches(tasks[k + 1])] if k + 1 < len(tasks) else []
            yield task, [work.wait() for work in in_flight]
            in_flight = following


@dataclass(frozen=True)
class Pace:
    """Latency, bandwidth and arithmetic speed of one rank, given or from `measure_pace`.

    Args:
        seconds_per_message: latency of one collective call, in seconds.
        bits_per_second: bandwidth of one rank's link.
        flops_per_second: speed of one rank's matrix products.
    """

    seconds_per_message: float
    bits_per_second: float
    flops_per_second: float

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_field_types(self)
        if self.seconds_per_message < 0 or min(self.bits_per_second, self.flops_per_second) <= 0:
            raise ConfigError(f"{self}: the latency must not be negative and the speeds must be positive")


def product_seconds(count: int, *, nbytes: float, flops: float, pace: Pace) -> float:
    """Return the seconds of a product of `count` panels: a pipeline of communication and arithmetic.

    Args:
        count: number of panels.
        nbytes: bytes that one rank sends in the whole product.
        flops: floating-point operations of one rank in the whole product.
        pace: speed of the machine.
    """
    # The first panel is only sent and the last only multiplied; between them the slower part sets the pace.
    communication = 2 * pace.seconds_per_message + 8 * nbytes / count / pace.bits_per_second
    compute = flops / count / pace.flops_per_second
    return communication + (count - 1) * max(communication, compute) + compute


def choose_panels(
    *, nbytes: float, flops: float, gathered_nbytes: float, limit_nbytes: float, width: int, pace: Pace
) -> Panels:
    """Return the number of panels with the least time within a memory limit.

    Args:
        nbytes: bytes that one rank sends in the whole product.
        flops: floating-point operations of one rank in the whole product.
        gathered_nbytes: bytes of the gathered operands in one piece.
        limit_nbytes: the most bytes that they may occupy; of several panels, two are in memory at once.
        width: columns of one slice, which is the largest number of panels.
        pace: speed of the machine.

    Raises:
        ConfigError: not even panels of one column fit.
    """
    fits = [n for n in range(1, width + 1) if (gathered_nbytes if n == 1 else 2 * gathered_nbytes / n) <= limit_nbytes]
    if not fits:
        raise ConfigError(
            f"limit_nbytes={limit_nbytes:g}: two panels of one column each need {2 * gathered_nbytes / width:g} bytes. "
            "Raise the limit or use a larger mesh"
        )
    return Panels(min(fits, key=lambda n: product_seconds(n, nbytes=nbytes, flops=flops, pace=pace)))
