# SPDX-License-Identifier: Apache-2.0
"""Keep a process's connections and signal handlers out of its forks, such as DataLoader workers.

Threads do not survive a fork. A fork that closes its copy of a connection could wait for the connection's thread,
crash, or tell the other ranks that the parent has ended.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol
from weakref import WeakSet


class Protected(Protocol):
    """An object that belongs to the process that made it."""

    def after_fork(self) -> None:
        """Make the object unusable in a fork of that process, without closing anything."""
        ...


_protected: WeakSet[Protected] = WeakSet()
_hooked: list[bool] = []


def protect(owner: Protected) -> None:
    """Call `owner.after_fork()` in every fork of this process, and never free the owner there."""
    if not _hooked and hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(after_in_child=_after_fork)
        _hooked.append(True)
    _protected.add(owner)


def keep_forever(kept: object) -> None:
    """Never free an object or the objects that it refers to, even when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _after_fork() -> None:
    for owner in list(_protected):
        keep_forever(owner)
        owner.after_fork()
