"""Compile C once for this processor, keep the library in the user's cache, and load it by ctypes.

All of it is optional: without a compiler, or with THINWIRE_NATIVE=0, torch computes the same.
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
from collections.abc import Container, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

_COMPILE_SECONDS = 60.0


def load(
    name: str,
    sources: Sequence[str],
    flags: Sequence[str],
    arguments: Mapping[str, Sequence[Any]],
    return_int64: Container[str],
) -> ctypes.CDLL | None:
    """Compile files of `c/` as one library and declare its functions' types; None if there is no compiler.

    Args:
        name: of the library in the cache.
        sources: names of the files; each may use what the files before it define.
        flags: for the compiler.
        arguments: the types of each function's arguments, by its name without `thinwire_`.
        return_int64: names of the functions that return a 64-bit integer; the others return nothing.
    """
    folder = resources.files("thinwire.kernels").joinpath("c")
    found = library(name, b"\n".join(folder.joinpath(source).read_bytes() for source in sources), flags)
    if found is None:
        return None
    for each, types in arguments.items():
        function = getattr(found, f"thinwire_{each}")
        function.argtypes, function.restype = types, ctypes.c_int64 if each in return_int64 else None
    return found


def library(name: str, source: bytes, flags: Sequence[str]) -> ctypes.CDLL | None:
    """Compile a C source and load it; None if that is not possible.

    Args:
        name: of the file in the cache, before the hash of everything that it depends on.
        source: which includes only the system's headers.
        flags: for the compiler, besides those that make a library.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or sys.platform == "win32":
        return None
    try:
        return ctypes.CDLL(str(_built(name, compiler, source, ["-shared", "-fPIC", *flags])))
    except (OSError, subprocess.SubprocessError):
        return None


def _built(name: str, compiler: str, source: bytes, flags: Sequence[str]) -> Path:
    """Return the library's file, compiled unless there is one for this source, compiler, flags and processor.

    Raises:
        OSError: the cache cannot be used.
        subprocess.SubprocessError: the compiler failed or took too long.
    """
    folder = _private(cache_folder() / "native")
    # A compiler that is updated in place keeps its path: its version is part of the name.
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS).stdout
    facts = [source, version, " ".join(flags).encode(), _processor().encode()]
    path = folder / f"{name}-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:20]}.so"
    if path.exists():
        return path
    # Several ranks may compile at once: each in a folder of its own, and renaming is atomic.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / path.name
        command = [compiler, *flags, "-x", "c", "-", "-o", str(made), "-lm"]
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
        made.replace(path)
    return path


def _private(folder: Path) -> Path:
    """Make the folder if needed, and refuse one into which someone else could put a library that we would run.

    Raises:
        OSError: it cannot be made, belongs to someone else, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: others may write to it")
    return folder


def cache_folder() -> Path:
    """Return the folder for caches: THINWIRE_CACHE, or `thinwire` where the system keeps caches."""
    if named := os.environ.get("THINWIRE_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thinwire"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def _processor() -> str:
    """Describe the processor's instructions: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
