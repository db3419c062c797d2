# SPDX-License-Identifier: Apache-2.0
"""The peak memory of a dry run: bytes of all tensors that exist at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.core.torch_internals import TorchDispatchMode, pytree, storage_alive


class PeakMemory(TorchDispatchMode):
    """Record the most bytes of tensors that exist at the same time, among those made inside this context.

    Attributes:
        peak: the most bytes so far.

    Example:
        >>> import torch
        >>> from thinwire.planning.plan.peak import PeakMemory
        >>> with PeakMemory() as memory:
        ...     x = torch.empty(100, device="meta")
        ...     x = x.add(1).add(1)
        >>> memory.peak
        1200
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[Callable[[], bool], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record the storages that it has made."""
        found, made = func(*args, **(kwargs or {})), False
        for x in pytree.tree_leaves(found):
            if isinstance(x, Tensor):
                key, alive = storage_alive(x)
                if key not in self._held or not self._held[key][0]():
                    self._held[key] = alive, x.untyped_storage().nbytes()
                    made = True
        if made:
            self.peak = max(self.peak, self.now())
        return found

    def now(self) -> int:
        """Return the bytes of the tensors that exist now."""
        self._held = {key: (alive, nbytes) for key, (alive, nbytes) in self._held.items() if alive()}
        return sum(nbytes for _, nbytes in self._held.values())
