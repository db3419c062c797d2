# SPDX-License-Identifier: Apache-2.0
"""Facility location for coresets: the nearest representative of each point, and the gain of each candidate (nearest.c).

Without a compiler, or with THINWIRE_NATIVE=0, torch computes the same selection.
"""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from thinwire.core.kernels import native
from thinwire.core.kernels.base import usable

# Distances are finite, so these flags are safe; other kernels must match torch's bits for NaN and infinity too.
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp-simd", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros"),
]
_long, _at = ctypes.c_int64, ctypes.c_void_p


class Facility(ctypes.Structure):
    """`facility` of nearest.c: the points, and each one's nearest representative and distance."""

    _fields_ = [
        *((name, _at) for name in ("points", "near", "nearest")),
        *((name, _long) for name in ("panels", "features", "threads")),
    ]


class Search(ctypes.Structure):
    """`search` of nearest.c: the inputs and the results of lazy greedy."""

    _fields_ = [
        *((name, _at) for name in ("ids", "asked", "picked", "bounds", "sums", "gains", "rows")),
        *((name, _long) for name in ("size", "block", "widest", "position", "picks")),
        *((name, ctypes.c_double) for name in ("cost", "enough")),
    ]


_ARGUMENTS = {
    "gains": [ctypes.POINTER(Facility), _at, _at, _long, _at],
    "take": [ctypes.POINTER(Facility), _at, ctypes.c_int32],
    "lazy": [ctypes.POINTER(Facility), ctypes.POINTER(Search)],
    "lanes": [],
    "together": [],
    "most_threads": [],
}


def compiled(rows: Tensor) -> ctypes.CDLL | None:
    """Return the compiled functions; None if they do not support these points, are disabled or do not compile."""
    return _compiled() if usable(rows) else None


@cache
def _compiled() -> ctypes.CDLL | None:
    return_int64 = ("gains", "lazy", "lanes", "together", "most_threads")
    return native.load("nearest", ("nearest.c",), _FLAGS, _ARGUMENTS, return_int64)
