"""The nearest representative of each point, and what a candidate would save: the functions of `nearest.c`.

Where there is no compiler, or with THINWIRE_NATIVE=0, torch does the work, and the selection is the same.
"""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from thinwire.kernels import native

# No distance is NaN or infinite; other kernels must keep torch's bits for such numbers too.
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp-simd", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros"),
]
_long, _at = ctypes.c_int64, ctypes.c_void_p


class Facility(ctypes.Structure):
    """`facility` of nearest.c: the points, and how near each is to which representative."""

    _fields_ = [
        *((name, _at) for name in ("points", "near", "nearest")),
        *((name, _long) for name in ("panels", "features", "threads")),
    ]


class Search(ctypes.Structure):
    """`search` of nearest.c: what lazy greedy goes by, and what it finds."""

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
    """The compiled functions; None where they cannot work on these points, are switched off or cannot be made."""
    return _compiled() if native.usable(rows) else None


@cache
def _compiled() -> ctypes.CDLL | None:
    counting = ("gains", "lazy", "lanes", "together", "most_threads")
    return native.load("nearest", ("nearest.c",), _FLAGS, _ARGUMENTS, counting)
