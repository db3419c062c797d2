# SPDX-License-Identifier: Apache-2.0
"""The peak memory of tensors: the most bytes of those that exist at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.core.torch_internals import TorchDispatchMode, pytree


class PeakMemory(TorchDispatchMode):
    """Record the most bytes of tensors that exist at the same time, among those made inside this context.

    On a CPU the tensors of PyTorch are counted, and what its kernels allocate within an operation is not. On a GPU
    PyTorch's own peak is taken.

    Args:
        held: tensors that exist before, and count too; the device of the first decides what is measured.
        meta: count tensors without data, and not those with data.

    Attributes:
        now: bytes of the tensors that exist now.
        peak: the most bytes so far.

    Example:
        >>> import torch
        >>> from thinwire.planning.plan.peak_memory import PeakMemory
        >>> with PeakMemory(meta=True) as memory:
        ...     x = torch.empty(100, device="meta")
        ...     x = x.add(1).add(1)
        >>> memory.peak
        1200
    """

    def __init__(self, held: Iterable[Tensor] = (), *, meta: bool = False) -> None:
        super().__init__()
        held = list(held)
        self._device = held[0].device if held else torch.device("cpu")
        self._meta, self._known = meta, set[int]()
        self.now = self.peak = 0
        for x in held:
            self._add(x)

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record the storages that it has made."""
        found = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(found):
            if isinstance(x, Tensor):
                self._add(x)
        return found

    def _add(self, x: Tensor) -> None:
        if x.is_meta != self._meta:
            return
        # PyTorch keeps the Python object of a storage as long as the storage.
        storage = x.untyped_storage()
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.remove(key)
        self.now -= nbytes
