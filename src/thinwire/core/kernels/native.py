# SPDX-License-Identifier: Apache-2.0
"""Compile C once for this processor, keep the library in the user's cache, and load it by ctypes.

Compiled code is optional: without a compiler, or with THINWIRE_NATIVE=0, torch computes the same, more slowly. A
library is loaded only if it belongs to this user, nobody else can write to it, and its bytes match the hash in its
name. A library that fails this check is compiled again; without a compiler a valid one is still used.
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
import warnings
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from thinwire._version import __version__

_COMPILE_SECONDS = 60.0


def load(
    name: str,
    sources: Sequence[str],
    flags: Sequence[str],
    arguments: Mapping[str, Sequence[Any]],
    return_int64: Container[str],
) -> ctypes.CDLL | None:
    """Compile files of `c/` as one library and declare its functions' types; None if this fails.

    Args:
        name: the name of the library in the cache.
        sources: names of the files; each may use the definitions of earlier files.
        flags: flags for the compiler.
        arguments: the types of each function's arguments, by its name without `thinwire_`.
        return_int64: names of the functions that return a 64-bit integer; the others return nothing.
    """
    folder = resources.files("thinwire.core.kernels").joinpath("c")
    source = b"\n".join(folder.joinpath(each).read_bytes() for each in sources)
    found = library(name, source, flags, symbols=[f"thinwire_{each}" for each in arguments])
    if found is None:
        return None
    for each, types in arguments.items():
        function = getattr(found, f"thinwire_{each}")
        function.argtypes, function.restype = types, ctypes.c_int64 if each in return_int64 else None
    return found


def library(name: str, source: bytes, flags: Sequence[str], *, symbols: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Load a C source's library from the cache, or compile it; if both fail, warn once and return None.

    Args:
        name: the first part of the file name in the cache, followed by hashes of all dependencies.
        source: the C code, which includes only system headers.
        flags: flags for the compiler, in addition to those that make a library.
        symbols: names of functions that the library must define.
    """
    try:
        if sys.platform == "win32":
            raise OSError("they need Linux or macOS")
        return _found(name, source, ["-shared", "-fPIC", *flags], symbols)
    except (OSError, subprocess.SubprocessError) as error:
        problems[name] = _one_line(error)
        warn_of_slow_path(
            f"thinwire's compiled kernels are not used ({problems[name]}). PyTorch computes the same, up to 300 times "
            "more slowly. `thinwire tools` lists the kernels; THINWIRE_NATIVE=0 selects PyTorch without this warning"
        )
        return None


problems: dict[str, str] = {}
"""The reasons why libraries could not be loaded, by their names."""


@cache
def warn_of_slow_path(text: str) -> None:
    """Warn once per process."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _found(name: str, source: bytes, flags: Sequence[str], symbols: Sequence[str]) -> ctypes.CDLL:
    """Return the library, from the cache if a valid one exists for this source, processor and compiler.

    Raises:
        OSError: the cache cannot be used, or neither a library nor a compiler exists.
        subprocess.SubprocessError: the compiler failed or took too long.
    """
    folder = _private(cache_folder() / "native")
    facts = [source, " ".join(flags).encode(), _processor().encode()]
    key = f"{name}-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:20]}"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    # A compiler that is updated in place keeps its path: its version is part of the name.
    version = b"" if compiler is None else _run([compiler, "--version"])
    tag = hashlib.sha256(version).hexdigest()[:8]
    for path in sorted(folder.glob(f"{key}-{'*' if compiler is None else tag}-*.so")):
        if found := _opened(path, symbols):
            return found
    if compiler is None:
        raise FileNotFoundError("no C compiler was found. Install gcc or clang")
    # Several ranks may compile at once: each uses its own folder, and renaming is atomic. A process keeps the library
    # that it has loaded under that name.
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / "library.so"
        _run([compiler, *flags, "-x", "c", "-", "-o", str(made), "-lm"], source)
        made.chmod(0o700)
        path = made.replace(folder / f"{key}-{tag}-{_hash(made)}.so")
    return ctypes.CDLL(str(path))


def _opened(path: Path, symbols: Sequence[str]) -> ctypes.CDLL | None:
    """Open a library of the cache if it belongs to this user, is complete and defines all functions."""
    # Another rank may be replacing it, or the file system may not allow programs.
    with suppress(OSError):
        about = path.lstat()
        mine = _is_mine(about)
        # Loading an incomplete library kills the process.
        if stat.S_ISREG(about.st_mode) and mine and path.stem.endswith(_hash(path)):
            found = ctypes.CDLL(str(path))
            return found if all(hasattr(found, each) for each in symbols) else None
    return None


def _is_mine(about: os.stat_result) -> bool:
    """Return True if only this user owns and may write to a file; False if the system has no user ids."""
    user = getattr(os, "getuid", lambda: None)()
    return about.st_uid == user and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _run(command: Sequence[str], standard_input: bytes = b"") -> bytes:
    done = subprocess.run(command, input=standard_input, capture_output=True, check=True, timeout=_COMPILE_SECONDS)
    return done.stdout


def _one_line(error: Exception) -> str:
    """Return an error as part of a sentence; for a compiler, the first line with an error."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = error.stderr.decode(errors="replace").splitlines()
    first = next((line for line in lines if "error" in line), "it printed nothing")
    return f"the compiler {error.cmd[0]} failed: {first[:200]}"


def _private(folder: Path) -> Path:
    """Create the folder if needed, and check that no other user can put a library into it.

    Raises:
        OSError: it cannot be created, belongs to another user, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if not _is_mine(found):
        raise PermissionError(f"{folder}: belongs to another user, or others may write to it")
    return folder


def cache_folder() -> Path:
    """Return the folder for caches: THINWIRE_CACHE, or `thinwire` in the system's cache folder."""
    if named := os.environ.get("THINWIRE_CACHE"):
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thinwire"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"


def machine_path(folder: str, name: str) -> Path:
    """Return the path of a JSON file in the folder for caches, for this machine and these versions."""
    facts = [platform.node(), platform.machine(), str(os.cpu_count()), torch.__version__, __version__]
    return cache_folder() / folder / f"{name}-{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:20]}.json"


def _processor() -> str:
    """Describe the processor's instructions: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
