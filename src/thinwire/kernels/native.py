"""C compiled once for this processor, kept in the user's cache, and called by ctypes.

Nothing here is needed: where there is no compiler, or with THINWIRE_NATIVE=0, torch does the work, to the same result.
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

from torch import Tensor

_COMPILE_SECONDS = 60.0


def usable(x: Tensor) -> bool:
    """Whether compiled C may work on a tensor: it is on the CPU, and THINWIRE_NATIVE=0 does not ask for torch alone."""
    return x.device.type == "cpu" and sys.byteorder == "little" and os.environ.get("THINWIRE_NATIVE") != "0"


def load(
    name: str,
    sources: Sequence[str],
    flags: Sequence[str],
    arguments: Mapping[str, Sequence[Any]],
    counting: Container[str],
) -> ctypes.CDLL | None:
    """The functions of some files of `c/`, compiled as one, with their types; None where there is no compiler.

    Args:
        name: of the library in the cache.
        sources: names of the files, each of which may use what stands in those before it.
        flags: for the compiler.
        arguments: the types of what each function takes; their names are without `thinwire_`.
        counting: names of the functions that return a 64-bit integer; the others return nothing.
    """
    folder = resources.files("thinwire.kernels").joinpath("c")
    found = library(name, b"\n".join(folder.joinpath(source).read_bytes() for source in sources), flags)
    if found is None:
        return None
    for each, types in arguments.items():
        function = getattr(found, f"thinwire_{each}")
        function.argtypes, function.restype = types, ctypes.c_int64 if each in counting else None
    return found


def library(name: str, source: bytes, flags: Sequence[str]) -> ctypes.CDLL | None:
    """The functions of a C source; None where they cannot be made.

    Args:
        name: of the file in the cache, before the hash of all that it depends on.
        source: self-contained, but for the system's headers.
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
    """The library's file, compiled unless a file for this source, compiler, flags and processor is there.

    Raises:
        OSError: the cache cannot be used.
        subprocess.SubprocessError: the compiler refused or took too long.
    """
    folder = _private(cache_folder() / "native")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_SECONDS).stdout
    facts = [source, version, " ".join(flags).encode(), _processor().encode()]
    path = folder / f"{name}-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:20]}.so"
    if not path.exists():
        _compile(compiler, source, flags, path)
    return path


def _compile(compiler: str, source: bytes, flags: Sequence[str], path: Path) -> None:
    """Several ranks may do so at once: each under a name of its own, and the last one's file stays."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *flags, "-x", "c", "-", "-o", str(made), "-lm"]
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


def cache_folder() -> Path:
    """THINWIRE_CACHE, or `thinwire` where the system keeps caches."""
    if named := os.environ.get("THINWIRE_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thinwire"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def _processor() -> str:
    """What instructions this processor has, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
