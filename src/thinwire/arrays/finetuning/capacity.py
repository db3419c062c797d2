# SPDX-License-Identifier: Apache-2.0
"""How many models fit into memory as one array, measured before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from thinwire.arrays.finetuning.array import AdapterArray
from thinwire.arrays.fusion.optimizers import AdamW, FusedOptimizer
from thinwire.core.validation import check_range
from thinwire.planning.plan.peak_memory import PeakMemory


@dataclass(frozen=True)
class Capacity:
    """How many members fit.

    Args:
        members: the largest number of members; 0 if not even one fits.
        limit: bytes that may be used.
        fixed: bytes that do not depend on the number of members.
        each: bytes of one more member.
        at_once: members at a time in `backward`; None runs all.
    """

    members: int
    limit: int
    fixed: int
    each: int
    at_once: int | None

    def peak(self, members: int) -> int:
        """Return the bytes that an array of so many members needs."""
        return self.fixed + members * self.each


def measure_capacity(
    base: nn.Module,
    member: Any,
    compute: Callable[[AdapterArray], Tensor],
    *,
    limit: int,
    at_once: int | None = None,
    optimizer: Callable[..., FusedOptimizer] = AdamW,
) -> Capacity:
    """Measure how many members can train within `limit` bytes of tensors, by two steps of two small arrays.

    On a CPU the tensors of PyTorch are counted, and what its kernels allocate within an operation is not; on a GPU it
    is PyTorch's own peak. Leave a tenth for the rest.

    Args:
        base: the model, without adapters.
        member: the largest of the members, as for `adapters`.
        compute: the losses of an array of any size, such as `lambda array: array(input_ids=ids, labels=ids).loss`.
        limit: bytes that may be used.
        at_once: as for `AdapterArray.backward`.
        optimizer: makes the optimizer from parameters and `lr`.

    Raises:
        ConfigError: `limit` or `at_once` is less than 1.
    """
    check_range("limit", limit, "1..", "It is a number of bytes. Use 8 << 30 for 8 GiB")
    check_range("at_once", at_once, "1..", "None runs all members at a time")

    def train(size: int) -> None:
        array = AdapterArray(base, [member] * size)
        optimizing = optimizer(array.parameters(), lr=0.0)
        for _ in range(2):
            array.zero_grad()
            array.backward(lambda: compute(array), at_once=at_once)
            optimizing.step()

    return capacity_of(train, limit=limit, at_once=at_once, held=[*base.parameters(), *base.buffers()])


def capacity_of(
    train: Callable[[int], None], *, limit: int, at_once: int | None = None, held: Iterable[Tensor] = ()
) -> Capacity:
    """Measure how many members fit by training two small arrays.

    Args:
        train: makes an array of so many members, and trains it for two steps: the second has the optimizer's state from
            its beginning.
        limit: bytes that may be used.
        at_once: members at a time in the backward pass; None runs all.
        held: tensors that every array uses, and that exist before.
    """
    # An array of one member takes other paths, so it is not on the line.
    few, more = 2 * (at_once or 1), 4 * (at_once or 1)
    peaks = list[int]()
    for size in (few, more):
        with PeakMemory(held) as memory:
            train(size)
        peaks.append(memory.peak)
    each = max(1, -(-(peaks[1] - peaks[0]) // (more - few)))
    fixed = peaks[0] - few * each
    return Capacity(max(0, (limit - fixed) // each), limit, fixed, each, at_once)
