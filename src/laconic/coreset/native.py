"""The fused kernel of `nearest.c`: compiled once for this processor, kept in the user's cache, called by ctypes.

Where there is no compiler, or with LACONIC_NATIVE=0, torch does the work, and the selection is the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

_FLAGS = [
    *("-O3", "-march=native", "-shared", "-fPIC", "-fopenmp-simd", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffinite-math-only", "-fno-signed-zeros"),
]
_COMPILE_SECONDS = 60.0
_long, _pointer = ctypes.c_int64, ctypes.c_void_p


def kernel() -> ctypes.CDLL | None:
    """The compiled functions; None where they are switched off or cannot be made."""
    return None if os.environ.get("LACONIC_NATIVE") == "0" else _kernel()


@cache
def _kernel() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or sys.platform == "win32":
        return None
    source = resources.files("laconic.coreset").joinpath("nearest.c").read_bytes()
    try:
        library = ctypes.CDLL(str(_built(compiler, source)))
    except (OSError, subprocess.SubprocessError):
        return None
    library.laconic_gains.argtypes = [_pointer, _pointer, _pointer, _long, _long, _pointer, _long, _pointer, _long]
    library.laconic_take.argtypes = [_pointer, _pointer, _pointer, _long, _long, _pointer, ctypes.c_int32, _long]
    library.laconic_lazy.argtypes = [
        *(_pointer, _pointer, _pointer, _long, _long, _pointer, _pointer, _pointer, _pointer, _pointer, _pointer),
        *(_long, _long, ctypes.c_int32, _long, _pointer, ctypes.c_double, _pointer, _pointer, _long),
    ]
    library.laconic_lazy.restype = library.laconic_gains.restype = _long
    library.laconic_take.restype = None
    for name in ("laconic_lanes", "laconic_together", "laconic_most_threads"):
        getattr(library, name).argtypes, getattr(library, name).restype = [], _long
    return library


def _built(compiler: str, source: bytes) -> Path:
    """The library's file, compiled unless a file for this source, compiler and processor is there.

    Raises:
        OSError: the cache cannot be used.
        subprocess.SubprocessError: the compiler refused or took too long.
    """
    folder = _private(_cache_folder() / "native")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS).stdout
    facts = [source, version, " ".join(_FLAGS).encode(), _processor().encode()]
    path = folder / f"nearest-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:20]}.so"
    if not path.exists():
        _compile(compiler, source, path)
    return path


def _compile(compiler: str, source: bytes, path: Path) -> None:
    """Several ranks may do so at once: each under a name of its own, and the last one's file stays."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(made), "-lm"]
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        made.replace(path)


def _private(folder: Path) -> Path:
    """The folder, made if need be, as long as nobody else can put a library into it.

    Raises:
        OSError: it cannot be made, belongs to someone else, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: others may write to it")
    return folder


def _cache_folder() -> Path:
    """LACONIC_CACHE, or `laconic` where the system keeps caches."""
    if named := os.environ.get("LACONIC_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "laconic"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"


def _processor() -> str:
    """What instructions this processor has, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
