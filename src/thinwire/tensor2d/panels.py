"""In how many pieces a product's operands travel, and how that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.validation import check_kinds

T = TypeVar("T")
Cut = tuple[int, int]
Launch = Callable[[], Work[list[Tensor]]]


@dataclass(frozen=True)
class Panels:
    """How the operands of a distributed product travel.

    With `count=1` each operand is gathered by one message. With more, every rank contributes an equal slice of its
    block to each panel, so that no link is idle, and panel t + 1 travels while panel t is multiplied. The bytes are
    the same.

    Args:
        count: panels of a product; more of them need less memory and more messages. Where a block is narrower, it has
            as many panels as columns.
        overlap: False waits for each message before the next is sent, for networks on which calls on two groups must
            not be under way together.
    """

    count: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        """Check the kinds and the range."""
        check_kinds(self)
        if self.count < 1:
            raise ConfigError(f"count={self.count}: a product has at least one panel; use 1 to gather in one message")

    def cuts(self, width: int) -> list[Cut]:
        """The slices [start, stop) into which `width` columns are cut; they differ by one column at most."""
        count = max(1, min(self.count, width))
        return [(width * k // count, width * (k + 1) // count) for k in range(count)]

    def arriving(
        self, tasks: Sequence[T], launches: Callable[[T], Sequence[Launch]]
    ) -> Iterator[tuple[T, list[list[Tensor]]]]:
        """Each task with what arrived for it; the messages of the next are under way meanwhile.

        Every rank launches in the same order: a row's message first, then a column's.
        """
        if not self.overlap:
            yield from ((task, [launch().wait() for launch in launches(task)]) for task in tasks)
            return
        under_way = [launch() for launch in launches(tasks[0])]
        for k, task in enumerate(tasks):
            following = [launch() for launch in launches(tasks[k + 1])] if k + 1 < len(tasks) else []
            yield task, [work.wait() for work in under_way]
            under_way = following


@dataclass(frozen=True)
class Pace:
    """How fast this machine talks and multiplies, as measured by the caller.

    Args:
        seconds_per_message: latency of one collective call, in seconds.
        bits_per_second: of one rank's link.
        flops_per_second: of one rank, multiplying matrices.
    """

    seconds_per_message: float
    bits_per_second: float
    flops_per_second: float

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.seconds_per_message < 0 or min(self.bits_per_second, self.flops_per_second) <= 0:
            raise ConfigError(f"{self}: the latency must not be negative and the speeds must be positive")


def product_seconds(count: int, *, nbytes: float, flops: float, pace: Pace) -> float:
    """Seconds that a product of `count` panels takes: fill the pipe, then the slower of wire and arithmetic.

    Args:
        count: panels.
        nbytes: what one rank sends in the whole product.
        flops: what it multiplies.
        pace: of the machine.
    """
    talk = 2 * pace.seconds_per_message + 8 * nbytes / count / pace.bits_per_second
    work = flops / count / pace.flops_per_second
    return talk + (count - 1) * max(talk, work) + work


def choose_panels(
    *, nbytes: float, flops: float, gathered_nbytes: float, limit_nbytes: float, width: int, pace: Pace
) -> Panels:
    """The number of panels that takes the least time within a limit of memory.

    Args:
        nbytes: what one rank sends in the whole product.
        flops: what it multiplies.
        gathered_nbytes: what the gathered operands would occupy in one piece.
        limit_nbytes: what they may occupy; two panels are there at a time.
        width: the columns of one slice, which is as many panels as there can be.
        pace: of the machine.

    Raises:
        ConfigError: not even the narrowest panels fit.
    """
    fits = [n for n in range(1, width + 1) if (gathered_nbytes if n == 1 else 2 * gathered_nbytes / n) <= limit_nbytes]
    if not fits:
        raise ConfigError(
            f"limit_nbytes={limit_nbytes:g}: two panels of one column each need {2 * gathered_nbytes / width:g} bytes; "
            "raise the limit or use a larger mesh"
        )
    return Panels(min(fits, key=lambda n: product_seconds(n, nbytes=nbytes, flops=flops, pace=pace)))
