"""The fused kernel of `nearest.c`: compiled once for this processor, kept in the user's cache, called by ctypes.

Where there is no compiler, or with LACONIC_NATIVE=0, torch does the work, and the selection is the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import resources

from laconic.kernels.native import library, switched_off

_FLAGS = [
    *("-O3", "-march=native", "-fopenmp-simd", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros"),
]
_long, _pointer = ctypes.c_int64, ctypes.c_void_p


def kernel() -> ctypes.CDLL | None:
    """The compiled functions; None where they are switched off or cannot be made."""
    return None if switched_off() else _kernel()


@cache
def _kernel() -> ctypes.CDLL | None:
    found = library("nearest", resources.files("laconic.coreset").joinpath("nearest.c").read_bytes(), _FLAGS)
    if found is None:
        return None
    found.laconic_gains.argtypes = [_pointer, _pointer, _pointer, _long, _long, _pointer, _long, _pointer, _long]
    found.laconic_take.argtypes = [_pointer, _pointer, _pointer, _long, _long, _pointer, ctypes.c_int32, _long]
    found.laconic_lazy.argtypes = [
        *(_pointer, _pointer, _pointer, _long, _long, _pointer, _pointer, _pointer, _pointer, _pointer, _pointer),
        *(_long, _long, ctypes.c_int32, _long, _pointer, ctypes.c_double, _pointer, _pointer, _long),
    ]
    found.laconic_lazy.restype = found.laconic_gains.restype = _long
    found.laconic_take.restype = None
    for name in ("laconic_lanes", "laconic_together", "laconic_most_threads"):
        getattr(found, name).argtypes, getattr(found, name).restype = [], _long
    return found
