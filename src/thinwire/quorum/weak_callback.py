"""Calls that do not keep alive whom they call: what threads and mailboxes hold of a party."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakMethod

T = TypeVar("T")
A = TypeVar("A")


def weak(method: Callable[[A], T], otherwise: T) -> Callable[[A], T]:
    """The bound method of one argument; what it returns once its object is gone is `otherwise`."""
    found = WeakMethod(method)

    def call(argument: A) -> T:
        alive = found()
        return otherwise if alive is None else alive(argument)

    return call
