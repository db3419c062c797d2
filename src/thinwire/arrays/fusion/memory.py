# SPDX-License-Identifier: Apache-2.0
"""Keep freed memory in the process: the tensors of many models exceed what the C library keeps by default."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER, _PAD_BYTES = -1, 64 << 20


def keep_memory() -> bool:
    """Keep the CPU memory that tensors free in this process until it ends.

    glibc takes large blocks from the system one by one and returns them when they are freed, and the system clears
    every page at its first touch. Tensors of one model are often small enough to be kept, those of sixteen are not, so
    an array pays for new pages where a loop over its models does not. Call this before the first array is made, in a
    process that needs its memory for nothing else. `thinwire sweep` does so. The first few tensors of a new size may
    still need new pages.

    Returns:
        Whether the C library accepted the settings; only glibc on Linux has them.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    # No block from the system alone, nothing given back, and the heap grown in large steps.
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in wanted)
