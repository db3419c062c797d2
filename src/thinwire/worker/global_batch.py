# SPDX-License-Identifier: Apache-2.0
"""A fixed global batch that is divided among the present workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thinwire.errors import ConfigError


def shares(global_batch: int, size: int) -> list[range]:
    """Divide the positions of a global batch evenly among `size` workers, in rank order.

    Example:
        >>> from thinwire.worker.global_batch import shares
        >>> shares(8, 3)
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    ends = [-(-rank * global_batch // size) for rank in range(size + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


@dataclass
class GlobalBatch:
    """One worker's part of the global batch of each step.

    Args:
        samples: in the global batch.

    Attributes:
        step: the step whose share was read last.
        members: the workers that the global batch of that step was divided among.
    """

    samples: int
    step: int = -1
    members: Sequence[object] = field(default_factory=tuple[object, ...])

    def check(self, size: int) -> None:
        """Refuse more workers than samples.

        Raises:
            ConfigError: with the numbers.
        """
        if self.samples < size:
            raise ConfigError(
                f"global_batch={self.samples} with {size} workers: each worker needs at least one sample. Use a larger "
                "global batch or fewer workers"
            )

    def share(self, step: int, members: Sequence[object], own: object) -> range:
        """Return this worker's positions in the global batch of a step."""
        self.check(len(members))
        self.step, self.members = step, tuple(members)
        return shares(self.samples, len(members))[self.members.index(own)]

    def factor(self, step: int, members: Sequence[object], own: object) -> float:
        """Return the factor of this worker's mean gradient in a plain mean over `members`.

        The result is the mean over all samples. After the loss of a worker it is the mean over the samples of the rest.

        Raises:
            ConfigError: the share of this step was not read.
        """
        if self.step != step:
            raise ConfigError(
                f"step {step}: the share of the global batch was not read. A worker's share changes with the number of "
                "workers. Call batch_share(worker) of thinwire.elastic.sampler before each step, and use these samples"
            )
        parts = shares(self.samples, len(self.members))
        sizes = {each: len(part) for each, part in zip(self.members, parts, strict=True)}
        there = [sizes[each] for each in members if each in sizes]
        return sizes[own] * len(members) / sum(there)
