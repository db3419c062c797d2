# SPDX-License-Identifier: Apache-2.0
"""What a rank's tensors occupy at most, and what torch's own collectives send."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES = "_c10d_functional"


class Counted(TorchDispatchMode):
    """Counts memory and messages of whatever runs within it, in this thread and in its backward passes.

    Memory is that of tensors: each storage from the operation that makes it to its end. What libraries take for
    themselves inside of an operation is not seen. Messages are torch's functional collectives, counted as a
    bandwidth-optimal algorithm sends them.

    Args:
        held: tensors that are there already.
        ranks: that take part in a collective.

    Attributes:
        nbytes: of the storages that are alive.
        peak_nbytes: the most there have been.
        payload_nbytes: what this rank has sent.
    """

    def __init__(self, held: Iterable[Tensor], *, ranks: int) -> None:
        super().__init__()
        self.nbytes = self.peak_nbytes = 0
        self.payload_nbytes = 0.0
        self._ranks = ranks
        self._known: dict[int, int] = {}
        for x in held:
            self._count(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensor comes by here too
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, list | tuple) else [result]:
            if isinstance(x, Tensor):
                self._count(x)
        if func.namespace == _COLLECTIVES:
            self._listen(func._opname, args[0], result)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.nbytes += storage.nbytes()
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.nbytes -= self._known.pop(key)

    def _listen(self, name: str, sent: Any, received: Any) -> None:
        share = (self._ranks - 1) / self._ranks
        if name.startswith("all_reduce"):
            self.payload_nbytes += 2 * share * sent.numel() * sent.element_size()
        elif name.startswith("all_gather"):
            self.payload_nbytes += share * received.numel() * received.element_size()
        elif name.startswith("reduce_scatter"):
            self.payload_nbytes += share * sent.numel() * sent.element_size()
