# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that operations read and write."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These only make or name memory.
_FREE = ("empty", "detach", "alias", "_unsafe_view")


class ByteCounter(TorchDispatchMode):
    """Inside, `nbytes` grows by the inputs and results of every operation, each read or written once; views are free.

    Example:
        >>> import torch
        >>> x = torch.zeros(100)
        >>> with ByteCounter() as moved:
        ...     y = x.view(10, 10) + 1
        >>> moved.nbytes
        800
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation."""
        found = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        name, changes = func._schema.name.split("::")[1], bool(func._schema.is_mutable)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        is_view = not changes and made and all(tensor.untyped_storage().data_ptr() in memory for tensor in made)
        if not is_view and not name.startswith(_FREE):
            self.nbytes += sum(map(_nbytes, [*given, *(made if made or not changes else given)]))
        return found


def _nbytes(tensor: Tensor) -> int:
    """A tensor's bytes in memory: expanded elements are there once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
