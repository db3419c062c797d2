# SPDX-License-Identifier: Apache-2.0
"""The panels in which the operands of a product are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from thinwire.core.comm.work import Work
from thinwire.core.validation import check_fields
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
        check_fields(self)
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
