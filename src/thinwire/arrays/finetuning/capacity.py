# SPDX-License-Identifier: Apache-2.0
"""How many adapters fit into memory, measured before the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.arrays.finetuning.array import AdapterArray
from thinwire.arrays.fusion.optimizers import AdamW, FusedOptimizer
from thinwire.core.torch_internals import TorchDispatchMode, pytree
from thinwire.core.validation import check_range


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
    # An array of one member takes other paths, so it is not on the line.
    few, more = 2 * (at_once or 1), 4 * (at_once or 1)
    peaks = {size: _peak_of(base, member, compute, size, at_once, optimizer) for size in (few, more)}
    each = max(1, -(-(peaks[more] - peaks[few]) // (more - few)))
    fixed = peaks[few] - few * each
    return Capacity(max(0, (limit - fixed) // each), limit, fixed, each, at_once)


def _peak_of(
    base: nn.Module,
    member: Any,
    compute: Callable[[AdapterArray], Tensor],
    size: int,
    at_once: int | None,
    optimizer: Callable[..., FusedOptimizer],
) -> int:
    with PeakMemory(base) as memory:
        array = AdapterArray(base, [member] * size)
        optimizing = optimizer(array.parameters(), lr=0.0)
        # The second step has the optimizer's state from its beginning.
        for _ in range(2):
            array.zero_grad()
            array.backward(lambda: compute(array), at_once=at_once)
            optimizing.step()
    return memory.peak


class PeakMemory(TorchDispatchMode):
    """Context manager that measures the largest number of bytes that tensors hold at a time.

    Args:
        model: held before; its parameters and buffers are counted.

    Attributes:
        peak: the largest number of bytes so far.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self._device = next((each.device for each in held), torch.device("cpu"))
        self._live: dict[int, int] = {}
        self._now = self.peak = 0
        for tensor in held:
            self._add(tensor)

    def __enter__(self) -> PeakMemory:
        """Begin to measure."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        super().__exit__(kind, error, trace)
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the results of one operation."""
        found = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return found

    def _add(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        # PyTorch keeps the Python object of a storage as long as the storage.
        key = id(storage)
        if key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._now -= self._live.pop(key)
