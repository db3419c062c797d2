"""Memory that a process keeps: tensors of many models are larger than what the C library keeps of itself."""

from __future__ import annotations

import ctypes
import sys

_MOST_TRIMMED, _TOP_PAD, _MOST_MAPPED = -1, -2, -4  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX of glibc's mallopt
_NEVER, _PAD_BYTES = -1, 64 << 20


def keep_memory() -> bool:
    """Let this process keep the memory on the CPU that its tensors free, until it ends.

    glibc takes large blocks from the system one by one and gives them back when they are freed, and the system clears
    every page anew at its first touch. Tensors of one model are often small enough to be kept, those of sixteen are
    not, so that an array pays for pages where a loop over its models does not. Call this before the first array is
    made, in a process that does nothing else with its memory. `thinwire sweep` does so. A size that is new to the
    process may be placed anew a few times before its place is found again.

    Returns:
        Whether the C library took it: that of other systems than Linux, and others than glibc, know no such settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    settle = getattr(ctypes.CDLL(None), "mallopt", None)
    if settle is None:
        return False
    settle.argtypes, settle.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    wanted = ((_MOST_MAPPED, 0), (_MOST_TRIMMED, _NEVER), (_TOP_PAD, _PAD_BYTES))
    return all(settle(name, value) == 1 for name, value in wanted)
